r"""Laplace posteriors over the weights: Kronecker-factored, diagonal, full, or the last layer alone.

Around the MAP estimate the precision is the generalised Gauss–Newton matrix of the whole training set plus the prior's:
$H = \sum_n J_n^\top \Lambda_n J_n + \tau$. For a layer $z = W\bar a$ ($\bar a$ carries a 1 for the bias) KFAC takes

$$ \sum_n J_n^\top\Lambda_n J_n \approx A \otimes B, \qquad A = \tfrac{1}{NT}\sum_{n,t} \bar a \bar a^\top, \qquad
   B = \sum_{n,t,c} g_c g_c^\top, $$

with $g_c$ the gradient of output $c$, weighted by a root of $\Lambda_n$, in $z$, and $T$ the positions that share the weights.
In the eigenbases of A and B, in units of the prior's standard deviations, the prior is added exactly: the precision of entry
(i, j) is $b_i a_j + 1$. For the two likelihoods here the Gauss–Newton matrix is the Fisher information.

The linearised prediction $f(x) + J(x)(\theta - \theta^*)$ has variance $\sum_{ij} (U_B^\top G U_A)_{ij}^2 / (b_i a_j + \tau)$ for
each layer, where $G = \sum_t g_t \bar a_t^\top$. For a linear layer that is $\tilde g^2 \cdot M \cdot \tilde a^2$: two matrix
products and no Jacobian. A convolution sums over its positions, so that $G$ is formed there, for one layer and one chunk at a time.

The lengthscale and the noise stay outside: they are point estimates here.

A list of networks of one shape is treated as one stack: every array then has a leading dimension E, and nothing loops over
the members.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vjp, vmap

from bochner.activations import link, unknown
from bochner.layers import StationaryLayer
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.closed_form import batches
from bochner.posteriors.mixture import Parameters, drawn_outputs, mixture
from bochner.predictive import GaussianPredictive, Predictive
from bochner.spectra import Matern
from bochner.validation import as_stack, check_data


@dataclass(frozen=True)
class Tap:
    """A layer with weights: where to listen to its input and to nudge its pre-activation.

    Attributes:
        name: Dotted name in the model.
        module: The layer.
        precision: Prior precision of its weights.
        bias_precision: Prior precision of its bias.
    """

    name: str
    module: nn.Module
    precision: float
    bias_precision: float

    @property
    def nudged(self) -> nn.Module:
        """The module whose output is the pre-activation."""
        return self.module.phase if isinstance(self.module, StationaryLayer) else self.module

    @property
    def has_bias(self) -> bool:
        """Whether the weight matrix carries a bias as its last column."""
        return getattr(self.module, "bias", None) is not None

    @property
    def circular(self) -> bool:
        """Whether the bias is a phase behind the sigmoid link."""
        return isinstance(self.module, StationaryLayer) and self.module.activation.bias == "uniform"

    def rows(self, x: Tensor) -> Tensor:
        """Input as (n, T, fan_in): what multiplies the weight matrix, with a 1 for the bias."""
        module, one = self.module, 1.0
        if isinstance(module, nn.Conv2d):
            x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # pyright: ignore[reportArgumentType]
        elif isinstance(module, StationaryLayer):
            one = module.activation.unit  # the wave's unit multiplies weights and bias alike
            x = (x * (one / module.lengthscale)).reshape(len(x), -1, module.in_features)
        else:
            x = x.reshape(len(x), -1, x.shape[-1])
        return torch.cat([x, torch.full_like(x[..., :1], one)], -1) if self.has_bias else x

    def precisions(self, like: Tensor) -> Tensor:
        """Prior precision of every column of the weight matrix, the bias last, (fan_in,)."""
        fan_in = like.shape[-1]
        tau = like.new_full((fan_in,), self.precision)
        if self.has_bias:
            tau[-1] = self.bias_precision
        return tau

    def gradients(self, g: Tensor) -> Tensor:
        """Gradient in the pre-activation as (n, T, fan_out)."""
        return g.flatten(-2).mT if isinstance(self.module, nn.Conv2d) else g.reshape(len(g), -1, g.shape[-1])

    def weights(self, parameters: Parameters) -> Tensor:
        """Weight matrices, (E, fan_out, fan_in), the bias as the last column; that of the model layer is the linked one."""
        weight = parameters[f"{self.name}.weight"].flatten(2)
        if not self.has_bias:
            return weight
        bias = parameters[f"{self.name}.bias"]
        return torch.cat([weight, (link(bias) if self.circular else bias)[..., None]], -1)

    def parameters(self, weights: Tensor) -> Parameters:
        """The module's own parameters for weight matrices (..., fan_out, fan_in)."""
        shape: Any = self.module.weight.shape  # pyright: ignore[reportAttributeAccessIssue]
        out = {
            f"{self.name}.weight": (weights[..., :-1] if self.has_bias else weights).reshape(
                *weights.shape[:-2], *shape
            )
        }
        if self.has_bias:
            out[f"{self.name}.bias"] = _unlink(weights[..., -1]) if self.circular else weights[..., -1]
        return out


def _unlink(bias: Tensor) -> Tensor:
    """Unconstrained bias of a phase: wrapped into (−π, π), which changes nothing, then the inverse of the link."""
    turn = (bias / (2 * math.pi) + 0.5).remainder(1.0)
    return torch.logit(turn, eps=1e-7 if bias.dtype == torch.float32 else 1e-15)


def layer_precision(layer: StationaryLayer) -> float:
    """Prior precision of the model layer's weights: the curvature of their log prior at its mode.

    1 for normal weights; (ν + d/2)/ν for the multivariate t, (ν + 1/2)/ν for independent ones.
    """
    if not isinstance(layer.spectrum, Matern):
        return 1.0
    dim = 1 if layer.spectrum.product else layer.in_features
    return (layer.spectrum.nu + dim / 2) / layer.spectrum.nu


def taps(model: Model) -> list[Tap]:
    """All linear and convolutional layers of a network, with the prior precision of each."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, StationaryLayer):
            # A phase is uniform on the circle; a Gaussian of the same variance stands for that.
            phase = 3 / math.pi**2 if module.activation.bias == "uniform" else 1.0
            found.append(Tap(name, module, layer_precision(module), phase))
        elif module is model.output:
            found.append(Tap(name, module, float(model.layer.out_features), 1.0))
        elif isinstance(module, nn.Linear | nn.Conv2d):
            if isinstance(module, nn.Conv2d) and (module.groups, module.padding_mode, type(module.padding)) != (
                1,
                "zeros",
                tuple,
            ):
                raise ValueError(
                    f"The layer {name} must have groups=1 and numeric zero padding to be covered, got {module}."
                )
            found.append(Tap(name, module, model.extractor_precision, model.extractor_precision))
    return found


class Listener:
    """Runs a network and reports, for each tapped layer, its input and the gradient in its pre-activation."""

    def __init__(self, model: Model, layers: list[Tap], x: Tensor) -> None:
        self.model, self.layers = model, layers
        self.shapes: list[torch.Size] = []
        with torch.no_grad():
            self._forward({}, x[:1], None)

    def _forward(self, parameters: Parameters, x: Tensor, nudges: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        rows: dict[str, Tensor] = {}
        shapes: dict[str, torch.Size] = {}
        handles = []
        for i, tap in enumerate(self.layers):

            def hear(_: nn.Module, args: tuple[Any, ...], tap: Tap = tap) -> None:
                if tap.name in rows:
                    raise ValueError(
                        f"The layer {tap.name} is used more than once in a forward pass: the posterior cannot cover it."
                    )
                rows[tap.name] = tap.rows(args[0])

            def nudge(_: nn.Module, __: tuple[Any, ...], output: Tensor, i: int = i, tap: Tap = tap) -> Tensor:
                shapes[tap.name] = output.shape[1:]
                return output if nudges is None else output + nudges[i]

            handles += [tap.module.register_forward_pre_hook(hear), tap.nudged.register_forward_hook(nudge)]
        try:
            f = functional_call(self.model, parameters, (x,))
        finally:
            for handle in handles:
                handle.remove()
        missing = [tap.name for tap in self.layers if tap.name not in shapes]
        if missing:
            raise ValueError(
                f"The layers {', '.join(missing)} took no part in the forward pass: the posterior cannot cover them."
            )
        self.shapes = [shapes[tap.name] for tap in self.layers]
        return f, [rows[tap.name] for tap in self.layers]

    def __call__(self, parameters: Parameters, x: Tensor, weigh: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Outputs (n, out), rows (n, T, fan_in) and gradients (c, n, T, fan_out) of every layer.

        ``weigh(parameters, f)`` gives the cotangents (c, n, out) that are pulled back.
        """
        nudges = [x.new_zeros(len(x), *shape) for shape in self.shapes]
        f, pullback, rows = vjp(lambda n: self._forward(parameters, x, n), nudges, has_aux=True)  # pyright: ignore[reportAssignmentType]
        (grads,) = vmap(pullback)(weigh(parameters, f))
        return f, rows, [vmap(tap.gradients)(g) for tap, g in zip(self.layers, grads, strict=True)]


def likelihood_root(model: Model, parameters: Parameters, f: Tensor) -> Tensor:
    r"""Columns of a root of the likelihood's Hessian in f, (c, n, out): $\sum_c s_c s_c^\top = \Lambda_n$.

    Gaussian: the unit vectors over s. Categorical: $\mathrm{diag}(\sqrt p) - p\sqrt p^\top$.
    """
    eye = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
    if isinstance(model.likelihood, Gaussian):
        return (eye * torch.exp(-parameters["likelihood.log_noise"]))[:, None, :].expand(-1, len(f), -1)
    p = torch.softmax(f, -1)
    return (p.sqrt()[:, :, None] * (eye - p[:, None, :])).transpose(0, 1)


def unit_cotangents(_: Parameters, f: Tensor) -> Tensor:
    """The unit vectors over outputs, (out, n, out): pulling them back gives the Jacobian."""
    return torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)[:, None, :].expand(-1, len(f), -1)


class Laplace:
    """Gaussian posterior over the weights of a trained network, or of a stack of them.

    Args:
        model: The network at its MAP estimate, or a list of networks of one shape. Dropout and BatchNorm act as in
            evaluation from here on.
        x: Training inputs, (N, ...), or one set for each network, (E, N, ...): all rows, streamed in chunks.
        y: Training targets, with the same leading dimensions. They do not enter the curvature, only the checks.
        structure: "kfac", "diagonal", "full" (small networks) or "last_layer" (full, on the output layer alone).
        damping: How the prior joins A ⊗ B under "kfac": "exact" in the eigenbasis, or "pi", the factored
            (A + π) ⊗ (B + 1/π), in units of the prior, with π² the ratio of mean eigenvalues.
        chunk: Rows that are processed at a time.
    """

    def __init__(
        self,
        model: Model | Sequence[Model],
        x: Tensor,
        y: Tensor,
        *,
        structure: str = "kfac",
        damping: Literal["exact", "pi"] = "exact",
        chunk: int = 512,
    ) -> None:
        kinds: dict[str, type[Curvature]] = {"kfac": Kron, "diagonal": Diagonal, "full": Full, "last_layer": Full}
        if structure not in kinds:
            raise ValueError(unknown("structure", structure, kinds))
        if damping not in ("exact", "pi"):
            raise ValueError(f"The damping parameter must be 'exact' or 'pi', got {damping!r} instead.")
        models = as_stack(model)
        self.single = isinstance(model, Model)
        self.model = models[0]
        self.own_data = y.ndim == (3 if isinstance(self.model.likelihood, Gaussian) else 2)
        for i, member in enumerate(models):
            check_data(member.eval(), x[i] if self.own_data else x, y[i] if self.own_data else y)
        self.parameters, self.buffers = stack_module_state(models)  # pyright: ignore[reportArgumentType]
        self.parameters = {name: p.detach() for name, p in self.parameters.items()}
        layers = taps(self.model)
        self.layers = [t for t in layers if t.module is self.model.output] if structure == "last_layer" else layers
        self.curvature = kinds[structure](self.layers, damping)
        self.state = self._fit(x, chunk)

    def _fit(self, x: Tensor, chunk: int) -> list[Any]:
        example = x[0] if self.own_data else x
        self.listener = Listener(self.model, self.layers, example)

        def statistics(parameters: Parameters, buffers: Parameters, xb: Tensor) -> list[Any]:
            _, rows, grads = self.listener(parameters | buffers, xb, lambda p, f: likelihood_root(self.model, p, f))
            return self.curvature.statistics(rows, grads)

        total: Any = None
        stream = x.split(chunk, dim=1) if self.own_data else x.split(chunk)
        for xb in stream:
            part = vmap(statistics, in_dims=(0, 0, 0 if self.own_data else None))(self.parameters, self.buffers, xb)
            total = (
                part
                if total is None
                else [[a + b for a, b in zip(t, p, strict=True)] for t, p in zip(total, part, strict=True)]
            )
        return self.curvature.finish(total, example.shape[0])

    def sample_weights(self, num: int, *, generator: torch.Generator | None = None) -> Parameters:
        """Draws of the named parameters of the covered layers, each (num, E, ...)."""
        drawn: Parameters = {}
        for tap, deviation in zip(self.layers, self.curvature.sample(self.state, num, generator), strict=True):
            weights = tap.weights(self.parameters)
            drawn |= tap.parameters(weights + deviation.to(weights))
        return drawn

    @torch.no_grad()
    def predict_samples(
        self, x: Tensor, num: int = 50, *, group: int = 10, generator: torch.Generator | None = None
    ) -> Predictive:
        """Averages the network over posterior draws of its weights, ``group`` of them at a time."""
        moving = {name for tap in self.layers for name in tap.parameters(tap.weights(self.parameters))}
        fixed = {name: p for name, p in self.parameters.items() if name not in moving} | self.buffers

        def outputs() -> Iterator[Tensor]:
            for start in range(0, num, group):
                drawn = self.sample_weights(min(group, num - start), generator=generator)
                yield from drawn_outputs(self.model, drawn, fixed, x)

        return self._predictive(outputs())

    def output_moments(self, x: Tensor, *, chunk: int = 256) -> tuple[Tensor, Tensor]:
        """Mean (E, n, c) and covariance (E, n, c, c) of the linearised outputs."""
        self.model.eval()

        def moments(parameters: Parameters, buffers: Parameters, state: list[Any], xb: Tensor) -> tuple[Tensor, Tensor]:
            f, rows, grads = self.listener(parameters | buffers, xb, unit_cotangents)
            return f, self.curvature.variance(state, rows, grads)

        parts = [
            vmap(moments, in_dims=(0, 0, 0, None))(self.parameters, self.buffers, self.state, xb)
            for (xb,) in batches(x, size=chunk)
        ]
        return torch.cat([f for f, _ in parts], 1), torch.cat([v for _, v in parts], 1)

    @torch.no_grad()
    def predict(
        self, x: Tensor, *, samples: int = 100, chunk: int = 256, generator: torch.Generator | None = None
    ) -> Predictive:
        """Prediction of the linearised network: Gaussian for regression, averaged over draws of the outputs for classes."""
        mean, covariance = self.output_moments(x, chunk=chunk)
        if isinstance(self.model.likelihood, Gaussian):
            mean, variance = self._members(mean), self._members(covariance.diagonal(dim1=-2, dim2=-1))
            return GaussianPredictive(mean, variance, self._noise())
        jitter = 1e-9 * torch.eye(mean.shape[-1], dtype=torch.float64, device=mean.device)
        factor = torch.linalg.cholesky(covariance.double() + jitter)
        draws = (mean + (factor @ _noise((*mean.shape, 1), factor, generator))[..., 0].to(mean) for _ in range(samples))
        return self._predictive(draws)

    def _members(self, value: Tensor) -> Tensor:
        """Drops the stack's dimension for a single network."""
        return value[0] if self.single else value

    def _noise(self) -> Tensor:
        return self._members(self.parameters["likelihood.log_noise"].exp())

    def _predictive(self, outputs: Iterator[Tensor]) -> Predictive:
        noise = self._noise() if isinstance(self.model.likelihood, Gaussian) else None
        return mixture(self.model, (self._members(f) for f in outputs), noise)


class PaperLaplace(Laplace):
    r"""KFAC as the paper's published code does it, to compare with its tables; not a posterior to trust.

    The curvature is the empirical Fisher (true labels) of the first ``batch`` training rows; no prior enters, only
    $\sqrt{5\cdot10^{-4}}$ on the diagonal of each factor; and with Cholesky factors $L_A$, $L_B$ of the damped averages a draw is

    $$ W = W^* + \tfrac{\mathrm{scale}}{N}\, L_B^{-\top} Z L_A^{-\top}, $$

    where Laplace would have $1/\sqrt N$ and $L_A^{-1}$ on the right. ``scale`` is what the paper calls the variance scale.

    Args:
        model: As in ``Laplace``.
        x: As in ``Laplace``.
        y: As in ``Laplace``; the labels of the first rows enter here.
        scale: The variance scale, chosen on a validation set in the paper.
        batch: Rows that the curvature is computed from.
    """

    DAMPING = math.sqrt(5e-4)

    def __init__(self, model: Model | Sequence[Model], x: Tensor, y: Tensor, *, scale: float, batch: int = 50) -> None:
        if not (scale > 0 and math.isfinite(scale)) or batch < 1:
            raise ValueError(f"The scale and batch parameters must be positive, got {scale} and {batch} instead.")
        self.scale, self.targets = scale, y
        super().__init__(model, x, y, chunk=batch)

    def _fit(self, x: Tensor, chunk: int) -> list[Any]:
        rows_axis = 1 if self.own_data else 0
        first, labels = (v.narrow(rows_axis, 0, min(chunk, v.shape[rows_axis])) for v in (x, self.targets))
        self.listener = Listener(self.model, self.layers, first[0] if self.own_data else first)

        def statistics(parameters: Parameters, buffers: Parameters, xb: Tensor, yb: Tensor) -> list[Any]:
            def slope(p: Parameters, f: Tensor) -> Tensor:
                likelihood = {n.removeprefix("likelihood."): v for n, v in p.items() if n.startswith("likelihood.")}
                return grad(lambda g: functional_call(self.model.likelihood, likelihood, (g, yb)).sum())(f)[None]

            return self.curvature.statistics(*self.listener(parameters | buffers, xb, slope)[1:])

        axis = 0 if self.own_data else None
        total = vmap(statistics, in_dims=(0, 0, axis, axis))(self.parameters, self.buffers, first, labels)
        count, state = first.shape[rows_axis], []
        self.shrink = self.scale / x.shape[rows_axis]
        for sums in total:
            damped = (s / count + self.DAMPING * torch.eye(s.shape[-1]).to(s) for s in sums)
            state.append([torch.linalg.cholesky(factor) for factor in damped])
        return state

    def sample_weights(self, num: int, *, generator: torch.Generator | None = None) -> Parameters:
        """Draws of the named parameters, each (num, E, ...), by the published formula."""
        drawn: Parameters = {}
        for tap, (a, b) in zip(self.layers, self.state, strict=True):
            weights = tap.weights(self.parameters)
            z = _noise((num, *weights.shape), a, generator)
            left = torch.linalg.solve_triangular(b.mT, z, upper=True)
            deviation = torch.linalg.solve_triangular(a.mT, left, upper=True, left=False)
            drawn |= tap.parameters(weights + (self.shrink * deviation).to(weights))
        return drawn

    def output_moments(self, x: Tensor, *, chunk: int = 256) -> tuple[Tensor, Tensor]:
        """Not defined: the published recipe has no linearised prediction."""
        raise NotImplementedError(
            "PaperLaplace predicts by sampling only; use predict_samples, or Laplace for moments."
        )

    def predict(
        self, x: Tensor, *, samples: int = 50, chunk: int = 256, generator: torch.Generator | None = None
    ) -> Predictive:
        """Averages over 50 sampled networks, as the paper does."""
        del chunk  # nothing is linearised here
        return self.predict_samples(x, samples, generator=generator)


def _noise(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator is not None else like.device
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)


def _jacobian(rows: Tensor, grads: Tensor) -> Tensor:
    """Σ_t g ā' of each row: (n, T, in) and (c, n, T, out) to (c, n, out, in)."""
    return torch.einsum("cnto,nti->cnoi", grads, rows)


class Curvature(ABC):
    """A structure of the precision matrix.

    ``statistics`` and ``variance`` see one network (they run under vmap); ``finish`` and ``sample`` see the stack.
    """

    def __init__(self, layers: list[Tap], damping: str) -> None:
        self.layers, self.damping = layers, damping

    @abstractmethod
    def statistics(self, rows: list[Tensor], grads: list[Tensor]) -> list[Any]:
        """What is summed over chunks: a list of tensors for each layer."""

    @abstractmethod
    def finish(self, total: list[Any], count: int) -> list[Any]:
        """Turns sums over ``count`` rows into what sampling and prediction need."""

    @abstractmethod
    def sample(self, state: list[Any], num: int, generator: torch.Generator | None) -> list[Tensor]:
        """Deviations from the MAP weights, (num, E, fan_out, fan_in) for each layer."""

    @abstractmethod
    def variance(self, state: list[Any], rows: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Covariance of the linearised outputs, (n, c, c)."""


def _weighted_outer(rows: Tensor, grads: Tensor, variance: Tensor) -> Tensor:
    """Σ_oi J_c J_d v of a layer whose weights have independent variances v (out, in): (n, c, c)."""
    if rows.shape[1] == 1:
        weighted = (rows[:, 0].square() @ variance.mT)[None] * grads[:, :, 0]
        return torch.einsum("cno,dno->ncd", weighted, grads[:, :, 0])
    j = _jacobian(rows, grads)
    return torch.einsum("cnoi,dnoi->ncd", j * variance, j)


class Kron(Curvature):
    """A ⊗ B for each layer, kept as eigenbases and the standard deviation of each pair."""

    def statistics(self, rows: list[Tensor], grads: list[Tensor]) -> list[Any]:
        """ΣT⁻¹āā' and Σgg'."""
        pairs = []
        for r, g in zip(rows, grads, strict=True):
            a, b = r.flatten(0, 1), g.flatten(0, 2)
            pairs.append(((a.mT @ a).double() / r.shape[1], (b.mT @ b).double()))
        return pairs

    def finish(self, total: list[Any], count: int) -> list[Any]:
        """Eigendecompositions, in the precision of the network."""
        self.factors = [(a / count, b) for a, b in total]
        state = []
        for tap, (a, b) in zip(self.layers, self.factors, strict=True):
            dtype: Any = tap.module.weight.dtype  # pyright: ignore[reportAttributeAccessIssue]
            # In units of the prior's standard deviation every weight has prior precision 1.
            unit = tap.precisions(a).rsqrt()
            values_a, vectors_a = torch.linalg.eigh((unit[:, None] * a * unit).to(dtype))
            values_b, vectors_b = torch.linalg.eigh(b.to(dtype))
            values_a, values_b = values_a.clamp(min=0), values_b.clamp(min=0)
            if self.damping == "pi":
                tiny = torch.finfo(dtype).tiny
                pi = (
                    (values_a.mean(-1, keepdim=True) / values_b.mean(-1, keepdim=True).clamp(min=tiny))
                    .sqrt()
                    .clamp(1e-6, 1e6)
                )
                precision = (values_b + 1 / pi)[..., :, None] * (values_a + pi)[..., None, :]
            else:
                precision = values_b[..., :, None] * values_a[..., None, :] + 1
            state.append((vectors_b, unit[:, None].to(dtype) * vectors_a, precision.reciprocal()))
        return state

    def sample(self, state: list[Any], num: int, generator: torch.Generator | None) -> list[Tensor]:
        """U_B (z / √precision) U_A'."""
        return [u_b @ (_noise((num, *v.shape), v, generator) * v.sqrt()) @ u_a.mT for u_b, u_a, v in state]

    def variance(self, state: list[Any], rows: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Rows and gradients turned into the eigenbases, where the weights are independent."""
        parts = zip(rows, grads, state, strict=True)
        return torch.stack([_weighted_outer(r @ u_a, g @ u_b, v) for r, g, (u_b, u_a, v) in parts]).sum(0)


class Diagonal(Curvature):
    """The diagonal of the Gauss–Newton matrix."""

    def statistics(self, rows: list[Tensor], grads: list[Tensor]) -> list[Any]:
        """Σ over rows and outputs of the squared Jacobian."""
        out = []
        for r, g in zip(rows, grads, strict=True):
            if r.shape[1] == 1:
                out.append((g[:, :, 0].square().sum(0).mT @ r[:, 0].square(),))
            else:
                out.append((_jacobian(r, g).square().sum((0, 1)),))
        return out

    def finish(self, total: list[Any], count: int) -> list[Any]:  # noqa: ARG002
        """Variances."""
        return [
            ((square + tap.precisions(square)).reciprocal(),) for tap, (square,) in zip(self.layers, total, strict=True)
        ]

    def sample(self, state: list[Any], num: int, generator: torch.Generator | None) -> list[Tensor]:
        """Independent normal numbers."""
        return [_noise((num, *v.shape), v, generator) * v.sqrt() for (v,) in state]

    def variance(self, state: list[Any], rows: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Squared Jacobians times variances."""
        return torch.stack([_weighted_outer(r, g, v) for r, g, (v,) in zip(rows, grads, state, strict=True)]).sum(0)


class Full(Curvature):
    """The whole Gauss–Newton matrix over the covered layers together, in float64."""

    LIMIT = 20_000

    def __init__(self, layers: list[Tap], damping: str) -> None:
        super().__init__(layers, damping)
        weights: list[Any] = [tap.module.weight for tap in layers]
        self.shapes = [(w.shape[0], w[0].numel() + tap.has_bias) for w, tap in zip(weights, layers, strict=True)]
        self.sizes = [out * fan_in for out, fan_in in self.shapes]
        if sum(self.sizes) > self.LIMIT:
            raise ValueError(
                f"A full posterior covers at most {self.LIMIT} weights, got {sum(self.sizes)}; use 'kfac' or 'last_layer'."
            )

    def _jacobians(self, rows: list[Tensor], grads: list[Tensor]) -> Tensor:
        return torch.cat([_jacobian(r, g).flatten(-2) for r, g in zip(rows, grads, strict=True)], -1).double()

    def statistics(self, rows: list[Tensor], grads: list[Tensor]) -> list[Any]:
        """ΣJ'J with the likelihood's root in J."""
        j = self._jacobians(rows, grads).flatten(0, 1)
        return [(j.mT @ j,)]

    def finish(self, total: list[Any], count: int) -> list[Any]:  # noqa: ARG002
        """Cholesky factor of the precision."""
        ((ggn,),) = total
        columns = [
            tap.precisions(ggn.new_zeros(fan_in)).repeat(out)
            for tap, (out, fan_in) in zip(self.layers, self.shapes, strict=True)
        ]
        prior = torch.cat(columns)
        return [torch.linalg.cholesky(ggn + torch.diag(prior))]

    def sample(self, state: list[Any], num: int, generator: torch.Generator | None) -> list[Tensor]:
        """L⁻ᵀz, cut into layers."""
        (factor,) = state
        noise = _noise((num, *factor.shape[:-1], 1), factor, generator)
        draws = torch.linalg.solve_triangular(factor.mT, noise, upper=True)[..., 0]
        return [d.unflatten(-1, shape) for d, shape in zip(draws.split(self.sizes, -1), self.shapes, strict=True)]

    def variance(self, state: list[Any], rows: list[Tensor], grads: list[Tensor]) -> Tensor:
        """|L⁻¹J|²."""
        j = self._jacobians(rows, grads)
        half = torch.linalg.solve_triangular(state[0], j.flatten(0, 1).mT, upper=False).unflatten(-1, j.shape[:2])
        return torch.einsum("pcn,pdn->ncd", half, half).to(rows[0])
