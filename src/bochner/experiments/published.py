r"""What the paper's published code does, to compare with its tables. Nothing here is to be trusted beyond that.

The departures from the paper's text, and from what is right, are kept on purpose: the network trains 1/ℓ and the noise themselves,
draws phases uniformly before their link, has independent Student-t weights and a ReLU on the bottleneck; and its KFAC posterior

$$ W = W^* + \tfrac{\mathrm{scale}}{N}\, L_B^{-\top} Z L_A^{-\top} $$

takes A and B from the empirical Fisher of one batch with dropout on, has $\sqrt{5\cdot10^{-4}}$ on the diagonal of each in place of
a prior, scale/N where Laplace has $1/\sqrt N$, and $L_A^{-\top}$ where $L_A^{-1}$ is right.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from bochner.layers import StationaryLayer, layer_log_prior
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.networks import SeededDropout
from bochner.posteriors.mixture import drawn_outputs
from bochner.posteriors.taps import Listener, Tap, taps
from bochner.randomness import counter_mask
from bochner.validation import as_stack

Parameters = dict[str, Tensor]

DAMPING = math.sqrt(5e-4)


def decay(epochs: int) -> Callable[[float], float]:
    """The schedule of the code: every epoch multiplies the present rate by 0.72 + 0.28 √(1 − t), down to 4.9e-5 of the first."""
    factors = [1.0]
    for epoch in range(epochs):
        factors.append(factors[-1] * (0.72 + 0.28 * math.sqrt(1 - epoch / epochs)))
    return lambda progress: factors[round(progress * epochs)]


class PublishedLayer(StationaryLayer):
    """A model layer that trains 1/ℓ under a Gamma(2, 0.5) prior on it, with phases drawn uniformly before their link."""

    def __init__(self, in_features: int, out_features: int, *, multiplier: float, **options: Any) -> None:
        super().__init__(in_features, out_features, lengthscale=1 / multiplier, **options)
        del self.log_lengthscale
        self.multiplier = nn.Parameter(self.weight.new_tensor(multiplier))
        if self.bias is not None and self.activation.bias == "uniform":
            with torch.no_grad():
                self.bias.uniform_(-math.pi, math.pi, generator=options.get("generator"))

    @property
    def lengthscale(self) -> Tensor:
        """What the input is divided by."""
        return 1 / self.multiplier

    def log_prior(self, *, jacobian: bool = False) -> Tensor:
        """Log prior density of weights, biases and 1/ℓ."""
        scale = self.multiplier.log()
        return layer_log_prior(self.spectrum, self.activation, self.weight, self.bias, scale, jacobian=jacobian)


class PublishedGaussian(Gaussian):
    """Gaussian noise whose standard deviation itself, not its logarithm, is trained."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.std = nn.Parameter(torch.ones(()))

    @property
    def log_noise(self) -> Tensor:
        """Logarithm of the standard deviation."""
        return self.std.log()


class PublishedModel(Model):
    """A network whose output bias has no prior. Its extractor's Σθ² is ``extractor_precision`` 2."""

    def precisions(self) -> dict[str, float]:
        """Those of ``Model`` without the output bias."""
        return {name: p for name, p in super().precisions().items() if name != "output.bias"}


class PublishedLaplace:
    """The KFAC posterior of the published code, for a stack of networks that share their activation.

    Args:
        models: Trained networks of one structure.
        x: The batch that the curvature comes from, one for each network, (E, b, d).
        y: Its targets.
        num_data: The N that the scale is divided by.
        seeds: Seeds of the dropout masks, (E,).
    """

    def __init__(self, models: Sequence[Model], x: Tensor, y: Tensor, *, num_data: int, seeds: Tensor) -> None:
        self.models = as_stack(models)
        self.model, self.num_data = self.models[0], num_data
        parameters, self.buffers = stack_module_state(self.models)  # pyright: ignore[reportArgumentType]
        self.parameters = {name: p.detach() for name, p in parameters.items()}
        self.layers = taps(self.model.eval())
        listener = Listener(self.model, self.layers, x[0])
        masks = {}
        for i, (name, module) in enumerate(self.model.named_modules()):
            if isinstance(module, SeededDropout):
                kept = counter_mask(seeds, i, x.shape[1] * module.width, module.p).to(x) / (1 - module.p)
                masks[f"{name}.mask"] = kept.reshape(len(x), x.shape[1], module.width)

        def statistics(numbers: Parameters, xb: Tensor, yb: Tensor) -> list[tuple[Tensor, Tensor]]:
            def slope(p: Parameters, f: Tensor) -> Tensor:
                own = {n.removeprefix("likelihood."): v for n, v in p.items() if n.startswith("likelihood.")}
                return grad(lambda g: functional_call(self.model.likelihood, own, (g, yb)).sum())(f)[None]

            _, rows, grads = listener(numbers, xb, slope)
            return [_factors(*each) for each in zip(self.layers, rows, grads, strict=True)]

        self.model.train()
        try:
            factors = vmap(statistics)(self.parameters | self.buffers | masks, x, y)
        finally:
            self.model.eval()
        self.inverses = [(_inverse_root(a), _inverse_root(b)) for a, b in factors]

    def outputs(self, x: Tensor, *, scales: Sequence[float], num: int) -> Iterator[Tensor]:
        """Outputs (len(scales), E, n, c) of each of ``num`` draws at inputs (E, n, d).

        As in the code, draw i takes its noise from seed i: all networks and scales share it.
        """
        group = 5 if x.is_cuda else 1  # a GPU is not filled by one draw
        for start in range(0, num, group):
            moved: list[Parameters] = []
            for i in range(start, min(start + group, num)):
                generator = torch.Generator(x.device).manual_seed(i)
                moved.append({})
                for tap, (a, b) in zip(self.layers, self.inverses, strict=True):
                    z = torch.randn(b.shape[-1], a.shape[-1], generator=generator, dtype=a.dtype, device=a.device)
                    moved[-1] |= _split(tap, b.mT @ (z @ a.mT))
            drawn = {
                n: torch.stack([self.parameters[n] + (s / self.num_data) * own[n] for own in moved for s in scales])
                for n in moved[0]
            }
            fixed = {n: p for n, p in self.parameters.items() if n not in drawn} | self.buffers
            yield from drawn_outputs(self.model, drawn, fixed, x, own=True).split(len(scales))

    @property
    def noise(self) -> Tensor:
        """Noise of each network, (E,)."""
        return noises(self.models)


def noises(models: Sequence[Model]) -> Tensor:
    """Noise of each network, (E,)."""
    likelihoods: Any = [m.likelihood for m in models]
    return torch.stack([each.noise.detach() for each in likelihoods])


def _factors(tap: Tap, rows: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Averages over the batch of āā' and gg', in the units of the code: its wave's unit is not in the weights."""
    unit = tap.module.activation.unit if isinstance(tap.module, StationaryLayer) else 1.0
    a, b = rows.flatten(0, 1) / unit, grads.flatten(0, 2) * unit
    return a.mT @ a / len(a), b.mT @ b / len(b)


def _inverse_root(factor: Tensor) -> Tensor:
    """L⁻¹ of a damped factor, (E, n, n); NaN for a network that has none because it diverged."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    lower, failed = torch.linalg.cholesky_ex(factor + DAMPING * eye)
    lower = torch.where(failed[:, None, None] > 0, math.nan, lower)
    return torch.linalg.solve_triangular(lower, eye.expand_as(factor), upper=False)


def _split(tap: Tap, deviation: Tensor) -> Parameters:
    """A deviation (E, out, in) as those of the module's own parameters; phases are moved before their link."""
    shape: Any = tap.module.weight.shape  # pyright: ignore[reportAttributeAccessIssue]
    weight = deviation[..., :-1] if tap.has_bias else deviation
    out = {f"{tap.name}.weight": weight.reshape(-1, *shape)}
    return out | ({f"{tap.name}.bias": deviation[..., -1]} if tap.has_bias else {})
