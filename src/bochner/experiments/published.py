r"""What the paper's published code does, to compare with its tables. Nothing here is to be trusted beyond that.

The departures from the paper's text, and from what is right, are kept on purpose: the network trains 1/ℓ and the noise themselves,
draws phases uniformly before their link, has independent Student-t weights and a ReLU on the bottleneck; and its KFAC posterior

$$ W = W^* + \tfrac{\mathrm{scale}}{N}\, L_B^{-\top} Z L_A^{-\top} $$

takes A and B from the empirical Fisher of one batch with dropout on, has $\sqrt{5\cdot10^{-4}}$ on the diagonal of each in place of
a prior ($\sqrt{5\cdot10^{-4}/T}$ for a convolution with T positions), scale/N where Laplace has $1/\sqrt N$, and $L_A^{-\top}$
where $L_A^{-1}$ is right.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils._pytree import tree_map

from bochner.layers import OutputLayer, StationaryLayer, layer_log_prior
from bochner.likelihoods import Categorical, Gaussian
from bochner.models import Model
from bochner.networks import SeededDropout
from bochner.posteriors.taps import Listener, Tap, taps
from bochner.priors.activations import link
from bochner.training.checks import as_stack
from bochner.training.randomness import counter_mask

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
        """Log prior density of weights, biases and 1/ℓ. That of normal biases is taken where the link of phases would put them."""
        scale, bias = self.multiplier.log(), self.bias
        if bias is not None and self.activation.bias == "normal":
            bias = link(bias)
        parameters = {"weight": self.weight, "bias": bias, "log_lengthscale": scale}
        return layer_log_prior(self.spectrum, self.activation, parameters, jacobian=jacobian)

    def log_prior_slopes(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of ``log_prior``, as in ``StationaryLayer``."""
        slopes = super().log_prior_slopes(parameters)
        if "bias" in slopes:
            linked = link(parameters["bias"])
            # The derivative of π tanh(b/2) is (π² − (π tanh(b/2))²) / 2π.
            slopes["bias"] = -linked * (math.pi**2 - linked.square()) / (2 * math.pi)
        if "multiplier" in parameters:
            slopes["multiplier"] = 1 / parameters["multiplier"] - 0.5
        return slopes


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


class OneLogit(OutputLayer):
    """An output layer for two classes: the logit of the second, beside a zero for the first."""

    def __init__(self, in_features: int) -> None:
        super().__init__(in_features, 1, bias=True)
        self.out_features = 2

    def forward(self, input: Tensor) -> Tensor:
        """Features (..., K) to logits (..., 2)."""
        f = super().forward(input)
        return torch.cat([torch.zeros_like(f), f], -1)


class SampledModel(Model):
    """A toy network of the published Julia code: one logit for two classes, an output bias, output weights and bias N(0, 1)."""

    def __init__(self, layer: StationaryLayer, likelihood: Gaussian | Categorical, generator: torch.Generator) -> None:
        regression = isinstance(likelihood, Gaussian)
        super().__init__(layer, 1 if regression else 2, likelihood, output_bias=True, generator=generator)
        if not regression:
            self.output = OneLogit(layer.out_features).to(layer.weight)
        with torch.no_grad():
            for value in (self.output.weight, self.output.bias):
                value.normal_(generator=generator)

    def precisions(self) -> dict[str, float]:
        """1 for the output weights, whatever their number, and for the bias."""
        return {**super().precisions(), "output.weight": 1.0}


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
        self.models = [model.eval() for model in as_stack(models)]
        self.model, self.num_data = self.models[0], num_data
        parameters, self.buffers = stack_module_state(self.models)  # pyright: ignore[reportArgumentType]
        self.parameters = {name: p.detach() for name, p in parameters.items()}
        self.layers = taps(self.model)
        listener = Listener(self.model, self.layers, x[0])
        masks = {}
        for i, (name, module) in enumerate(self.model.named_modules()):
            if isinstance(module, SeededDropout):
                kept = counter_mask(seeds, i, x.shape[1] * module.width, module.p).to(x) / (1 - module.p)
                masks[f"{name}.mask"] = kept.reshape(len(x), x.shape[1], module.width)

        positions: list[int] = []  # of each layer: 1 but for convolutions

        def statistics(numbers: Parameters, xb: Tensor, yb: Tensor) -> list[tuple[Tensor, Tensor]]:
            def slope(p: Parameters, f: Tensor) -> Tensor:
                own = {n.removeprefix("likelihood."): v for n, v in p.items() if n.startswith("likelihood.")}
                return grad(lambda g: functional_call(self.model.likelihood, own, (g, yb)).sum())(f)[None]

            _, rows, grads = listener(numbers, xb, slope)
            positions[:] = [each.shape[1] for each in rows]
            return [_factors(*each) for each in zip(self.layers, rows, grads, strict=True)]

        self.model.train()
        try:
            factors = vmap(statistics)(self.parameters | self.buffers | masks, x, y)
        finally:
            self.model.eval()
        damping = [DAMPING / math.sqrt(count) for count in positions]
        self.inverses = [
            (_inverse_root(a, own), _inverse_root(b, own)) for (a, b), own in zip(factors, damping, strict=True)
        ]

    @torch.no_grad()
    def outputs(self, x: Tensor, *, scales: Sequence[float], num: int) -> Iterator[Tensor]:
        """Outputs (len(scales), E, n, c) of each of ``num`` draws at inputs (E, n, d), for networks of linear layers.

        As in the code, draw i takes its noise from seed i: all networks and scales share it.
        """
        shrink = torch.tensor([scale / self.num_data for scale in scales], dtype=x.dtype, device=x.device)
        every = self.parameters | self.buffers

        def single(numbers: Parameters, roots: Any, own: Tensor, noise: list[Tensor]) -> Tensor:
            return self._perturbed(numbers, roots, noise, own, shrink)

        networks = vmap(single, in_dims=(0, 0, 0, None))
        draws: Any = vmap(networks, in_dims=(None, None, None, 0))
        size, rows, group = self._portion(x, len(scales))

        def compute(some: Tensor, noise: list[Tensor]) -> Tensor:
            """Outputs (draws, E, scales, n, c) at some of the rows, a few networks at a time."""
            # The rows are repeated for every scale: one tall product in place of several.
            tall = some.repeat(1, len(scales), 1)
            parts = [
                draws(*tree_map(lambda t, i=i: t[i : i + size], (every, self.inverses, tall)), noise)
                for i in range(0, len(x), size)
            ]
            return torch.cat(parts, 1).unflatten(2, (len(scales), -1))

        for start in range(0, num, group):
            drawn = [self._noise(seed) for seed in range(start, min(start + group, num))]
            noise = [torch.stack(each) for each in zip(*drawn, strict=True)]
            yield from torch.cat([compute(some, noise) for some in x.split(rows, 1)], 3).transpose(1, 2)

    @staticmethod
    def _portion(x: Tensor, scales: int) -> tuple[int, int, int]:
        """Networks, rows and draws that are computed at a time, for inputs (E, n, d).

        A GPU takes all networks, and about 200,000 rows, of one draw or several: fewer would be short kernels, more would not fit.
        A CPU takes one draw and a few thousand rows, whose activations stay in its cache.
        """
        num, rows = x.shape[0], x.shape[1]
        if not x.is_cuda:
            return max(1, 2000 // (scales * rows)), rows, 1
        most = max(1, 200_000 // (num * scales))
        return num, min(rows, most), max(1, most // rows)

    def _noise(self, seed: int) -> list[Tensor]:
        """The standard normal matrices of one draw, a layer after the other."""
        generator = torch.Generator(self.inverses[0][0].device).manual_seed(seed)
        return [
            torch.randn(b.shape[-1], a.shape[-1], generator=generator, dtype=a.dtype, device=a.device)
            for a, b in self.inverses
        ]

    @torch.no_grad()
    def networks(self, *, scale: float, num: int) -> Iterator[Parameters]:
        """Parameters (E, ...) of each of ``num`` draws: what ``outputs`` moves, and convolutions too."""
        for i in range(num):
            drawn = dict(self.parameters)
            for tap, (a, b), z in zip(self.layers, self.inverses, self._noise(i), strict=True):
                change = scale / self.num_data * b.mT @ z @ a.mT
                names = [f"{tap.name}.weight", *([f"{tap.name}.bias"] if tap.has_bias else [])]
                parts = (change[..., :-1], change[..., -1]) if tap.has_bias else (change,)
                for name, part in zip(names, parts, strict=True):  # phases move before their link
                    drawn[name] = drawn[name] + part.reshape(drawn[name].shape)
            yield drawn

    def _perturbed(self, numbers: Parameters, roots: Any, noise: list[Tensor], x: Tensor, shrink: Tensor) -> Tensor:
        """One network with every layer's weights moved, without forming them: a few rows go through three thin products."""
        rows: dict[str, Tensor] = {}
        handles = []
        for tap, (a, b), z in zip(self.layers, roots, noise, strict=True):

            def hear(_: nn.Module, args: tuple[Tensor, ...], tap: Tap = tap) -> None:
                rows[tap.name] = tap.rows(args[0])[:, 0]

            def move(_: nn.Module, __: Any, f: Tensor, tap: Tap = tap, own: Any = (a, b, z, shrink)) -> Tensor:
                return f + _change(tap, rows[tap.name], *own)

            handles += [tap.module.register_forward_pre_hook(hear), tap.nudged.register_forward_hook(move)]
        try:
            return functional_call(self.model, numbers, (x,))
        finally:
            for handle in handles:
                handle.remove()

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


def _inverse_root(factor: Tensor, damping: float) -> Tensor:
    """L⁻¹ of a damped factor, (E, n, n); NaN for a network that has none because it diverged."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    lower, failed = torch.linalg.cholesky_ex(factor + damping * eye)
    lower = torch.where(failed[:, None, None] > 0, math.nan, lower)
    return torch.linalg.solve_triangular(lower, eye.expand_as(factor), upper=False)


def _change(tap: Tap, rows: Tensor, a: Tensor, b: Tensor, z: Tensor, shrink: Tensor) -> Tensor:
    """What moving a layer's weights by shrink · L_B⁻ᵀ Z L_A⁻ᵀ adds to its pre-activations; phases move before their link.

    The rows are a block for each of the shrinking factors.
    """
    num = len(rows) // len(shrink)
    scale = shrink.repeat_interleave(num)[:, None]
    if not tap.circular:
        return scale * _product(rows, a, z, b)
    layer: Any = tap.module
    flat = torch.cat([rows[:, :-1], torch.zeros_like(rows[:, -1:])], -1)
    bias = layer.bias + shrink[:, None] * ((a[-1] @ z.mT) @ b)
    turned = layer.activation.unit * (link(bias) - link(layer.bias))
    return scale * _product(flat, a, z, b) + turned.repeat_interleave(num, 0)


def _product(rows: Tensor, a: Tensor, z: Tensor, b: Tensor) -> Tensor:
    """Rows times L_A⁻¹ Z' L_B⁻¹, in the cheaper order: the three factors first, or the rows through each."""
    (fan_out, fan_in), num = z.shape, len(rows)
    if num * (fan_in**2 + fan_out**2) > fan_in * fan_out * (fan_in + fan_out):
        return rows @ ((a @ z.mT) @ b)
    return ((rows @ a) @ z.mT) @ b
