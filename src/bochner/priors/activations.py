r"""Activation functions and the bias priors that go with them.

A unit of the model layer computes $\sigma(w^\top x / \ell + b)$. Under a *periodic* $\sigma$ and a uniform bias the prior
covariance of the unit depends on $x - x'$ alone, and is a mixture of the kernel $\kappa$ of the weight prior over the
harmonics of $\sigma$:

$$ \mathrm{E}_{w,b}[\sigma(w^\top x + b)\,\sigma(w^\top x' + b)] = \sum_\lambda a_\lambda\,\kappa(\lambda (x - x')). $$

Every activation here is written as $\sigma(z) = \mathrm{wave}(u z + s)$. A linear layer absorbs the constants *unit* $u$ and
*shift* $s$ at no cost, which leaves a wave of a few elementwise operations. Waves take the array module as an argument
(``torch`` by default), so that the JAX log joint evaluates the same lines.
"""
# torch.linalg and other parts of torch declare no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from bochner.errors import one_of
from bochner.priors.arrays import Array, ArrayModule

Scaling = Literal["unit", "paper"]

# Sum of odd^-4 over all odd numbers: the prior variance of triangle and periodic ReLU under the paper's scaling.
ODD_QUARTIC_SUM = math.pi**4 / 96
WAVE_POINTS = 256  # points of a period at which a wave is compared with its harmonics
WAVE_TOLERANCE = 1e-3  # relative; of a triangle wave the points alone leave 1e-4


class Wave(Protocol):
    """An elementwise function of an array; ``xp`` is the module of functions for arrays of its kind."""

    def __call__(self, u: Array, xp: ArrayModule = torch, /) -> Array:
        """Evaluates the wave."""
        ...


@dataclass(frozen=True)
class Activation:
    """An activation function, its bias prior and its harmonics.

    Attributes:
        name: Its name in ``ACTIVATIONS``.
        wave: Elementwise function of ``unit * z + shift``; its second argument is the array module, ``torch`` by default.
        bias: Bias prior: "uniform" on (−π, π), standard "normal", or "none" (no bias at all).
        stationarity: "stationary", "local" (under a Gaussian envelope) or "none".
        period: Period in z, or None.
        unit: Factor that z is multiplied with before the wave.
        shift: Constant that is added before the wave.
        variance: Prior variance Σ_λ a_λ of one output of a periodic activation, or None.
        odd_quartic: Whether the harmonics are all odd λ with a_λ ∝ λ⁻⁴; otherwise λ = 1 is the only one.
        outputs: Outputs per unit, 1 or (for paired features) 2.
    """

    name: str
    wave: Wave
    bias: Literal["uniform", "normal", "none"]
    stationarity: Literal["stationary", "local", "none"]
    period: float | None = None
    unit: float = 1.0
    shift: float = 0.0
    variance: float | None = None
    odd_quartic: bool = False
    outputs: int = 1

    def __call__(self, z: Array, xp: ArrayModule = torch) -> Array:
        """Evaluates σ(z); paired features double the last dimension."""
        return self.wave(self.unit * z + self.shift, xp)

    def harmonics(self, tolerance: float = 1e-10) -> tuple[Tensor, Tensor]:
        """Harmonics λ and weights a_λ of the prior covariance, in float64.

        The list stops where the weight of all later harmonics together falls below ``tolerance``. That remainder is added
        to the last weight, so the weights sum to the exact prior variance and a covariance computed from them is off by
        at most ``tolerance``.
        """
        if self.variance is None:
            raise ValueError(f"The activation '{self.name}' is not periodic, so it has no harmonics.")
        if not 0 < tolerance < 1:
            raise ValueError(f"The tolerance parameter must lie between 0 and 1, got {tolerance} instead.")
        self._check_first_harmonic(self.variance / ODD_QUARTIC_SUM if self.odd_quartic else self.variance)
        if not self.odd_quartic:
            return torch.ones(1, dtype=torch.float64), torch.full((1,), self.variance, dtype=torch.float64)
        # Odd numbers above L weigh less than the integral of u^-4 / 2 from L - 1, which is (L - 1)^-3 / 6.
        count = math.ceil((2 + (6 * tolerance) ** (-1 / 3)) / 2)
        frequency = 2 * torch.arange(count, dtype=torch.float64) + 1
        weight = frequency**-4 * (self.variance / ODD_QUARTIC_SUM)
        weight[-1] = self.variance - weight[:-1].sum()
        return frequency, weight

    def _check_first_harmonic(self, weight: float) -> None:
        """Raises a ValueError where the wave does not have the harmonics that the fields say, such as a new square wave."""
        turn = torch.arange(WAVE_POINTS, dtype=torch.float64)[:, None] / WAVE_POINTS
        amplitude = (self((self.period or 0.0) * turn) * torch.exp(-2j * math.pi * turn)).mean(0).abs()
        power = float(2 * amplitude.square().mean())
        if abs(power - weight) > WAVE_TOLERANCE * weight:
            raise ValueError(
                f"The activation '{self.name}' has the weight {power:.6g} at λ = 1, but its variance and odd_quartic say "
                f"{weight:.6g}: a kernel is computed from the harmonics of a sine, or of odd ones that fall as λ⁻⁴."
            )


class _TrapezoidContext(FunctionCtx):
    """What the forward pass of ``_Trapezoid`` leaves for its derivatives."""

    limit: float
    clipped: bool
    saved_tensors: tuple[Tensor, Tensor]


class _Trapezoid(torch.autograd.Function):
    """clip(height − slope·|u − round(u)|, −limit, limit), with as few arrays as eager mode allows.

    Allocating an array costs more than a pass over it. Plain operators allocate eight, this function three.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, height: float, slope: float, limit: float) -> tuple[Tensor, Tensor]:
        offset = u.round().sub_(u)
        wave = offset.abs().mul_(-slope).add_(height)
        if limit < height:
            wave = F.hardtanh_(wave, -limit, limit)
        return wave, offset.sign_().mul_(slope)

    @staticmethod
    def setup_context(
        ctx: _TrapezoidContext, inputs: tuple[Tensor, float, float, float], output: tuple[Tensor, Tensor]
    ) -> None:
        _, height, _, ctx.limit = inputs
        ctx.clipped = ctx.limit < height
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def _times_derivative(ctx: _TrapezoidContext, factor: Tensor) -> Tensor:
        wave, derivative = ctx.saved_tensors
        if not ctx.clipped:
            return factor * derivative
        # Zero on the flats, where the wave equals ± limit.
        return torch.ops.aten.hardtanh_backward(factor, wave, -ctx.limit, ctx.limit).mul_(derivative)

    @staticmethod
    def backward(ctx: _TrapezoidContext, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Trapezoid._times_derivative(ctx, grad), None, None, None

    @staticmethod
    def jvp(ctx: _TrapezoidContext, tangent: Tensor, *_: None) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Trapezoid._times_derivative(ctx, tangent), None


@dataclass(frozen=True)
class TrapezoidWave:
    """A triangle wave of period 1 in u, with its height and slope, cut off at ±limit."""

    height: float
    slope: float
    limit: float

    def __call__(self, u: Array, xp: ArrayModule = torch) -> Array:
        """Evaluates the wave."""
        if xp is torch and not torch.compiler.is_compiling():
            return _Trapezoid.apply(u, self.height, self.slope, self.limit)[0]  # pyright: ignore[reportOptionalSubscript]
        return xp.clip(self.height - self.slope * xp.abs(u - xp.round(u)), -self.limit, self.limit)


def _sine_wave(u: Array, xp: ArrayModule = torch) -> Array:
    return math.sqrt(2) * xp.sin(u)


def sin() -> Activation:
    r"""$\sigma(z) = \sqrt2 \sin z$ with uniform bias: induces the kernel of the weight prior exactly."""
    return Activation(
        name="sin",
        wave=_sine_wave,
        bias="uniform",
        stationarity="stationary",
        period=2 * math.pi,
        variance=1.0,
    )


def sincos() -> Activation:
    r"""$\sigma(z) = \sin z + \cos z = \sqrt2 \sin(z + \pi/4)$, free of bias.

    The covariance is the kernel in expectation over symmetric weights; at finite width the sum of sine and cosine leaves a
    term in $x + x'$. ``paired`` is the form without that term.
    """
    return Activation(
        name="sincos",
        wave=_sine_wave,
        bias="none",
        stationarity="stationary",
        period=2 * math.pi,
        shift=math.pi / 4,
        variance=1.0,
    )


def _paired_wave(u: Array, xp: ArrayModule = torch) -> Array:
    return math.sqrt(2) * xp.concatenate([xp.sin(u), xp.cos(u)], -1)


def paired() -> Activation:
    r"""$\sigma(z) = \sqrt2\,[\sin z, \cos z]$: two outputs with separate output weights for each frequency.

    Then $\frac{1}{2K} \sum_k \sigma_k(x)^\top \sigma_k(x') = \frac{1}{K} \sum_k \cos(w_k^\top (x - x'))$: stationary at every
    width and for every draw of the weights, not only on average.
    """
    return Activation(
        name="paired",
        wave=_paired_wave,
        bias="none",
        stationarity="stationary",
        period=2 * math.pi,
        variance=1.0,
        outputs=2,
    )


def triangle(scaling: Scaling = "unit") -> Activation:
    r"""Triangle wave of period $2\pi$, rising through zero at $z = 0$, with uniform bias.

    Scaling "unit" has amplitude $\sqrt3$ and variance 1. Scaling "paper" is
    $\frac{\pi}{2\sqrt2}(z - \pi\lfloor z/\pi + \frac12\rfloor)(-1)^{\lfloor z/\pi + 1/2\rfloor}$, of variance $\pi^4/96$.
    """
    variance = _variance(scaling)
    amplitude = math.sqrt(3 * variance)
    return Activation(
        name="triangle",
        wave=TrapezoidWave(height=amplitude, slope=4 * amplitude, limit=amplitude),
        bias="uniform",
        stationarity="stationary",
        period=2 * math.pi,
        unit=1 / (2 * math.pi),
        shift=-1 / 4,
        variance=variance,
        odd_quartic=True,
    )


def periodic_relu(scaling: Scaling = "unit") -> Activation:
    r"""Periodic ReLU: the sum of two triangle waves a quarter period apart, with uniform bias.

    The sum is a trapezoid wave, flat at the top over $z \in [0, \pi/2]$. Scaling "unit" has amplitude $\sqrt{3/2}$ and
    variance 1; scaling "paper" has amplitude $\pi^2/8$ and variance $\pi^4/96$.
    """
    variance = _variance(scaling)
    amplitude = math.sqrt(1.5 * variance)
    return Activation(
        name="periodic_relu",
        wave=TrapezoidWave(height=2 * amplitude, slope=8 * amplitude, limit=amplitude),
        bias="uniform",
        stationarity="stationary",
        period=2 * math.pi,
        unit=1 / (2 * math.pi),
        shift=-1 / 8,
        variance=variance,
        odd_quartic=True,
    )


def _variance(scaling: str) -> float:
    """Prior variance of triangle and periodic ReLU under a scaling."""
    variances = {"unit": 1.0, "paper": ODD_QUARTIC_SUM}
    if scaling not in variances:
        raise ValueError(f"The scaling parameter must be 'unit' or 'paper', got {scaling!r} instead.")
    return variances[scaling]


def _relu_wave(u: Array, xp: ArrayModule = torch) -> Array:
    return xp.clip(u, 0.0)


def relu() -> Activation:
    """max(z, 0): not stationary; its kernel is the arc-cosine kernel of order 1."""
    return Activation("relu", _relu_wave, bias="normal", stationarity="none")


def _step_wave(u: Array, xp: ArrayModule = torch) -> Array:
    return xp.where(u > 0, 1.0, 0.0 * u)


def step() -> Activation:
    """1 for z > 0, else 0: not stationary; its kernel is the arc-cosine kernel of order 0. No gradient."""
    return Activation("step", _step_wave, bias="normal", stationarity="none")


def _erf_wave(u: Array, xp: ArrayModule = torch) -> Array:
    return xp.special.erf(u)


def erf() -> Activation:
    """The error function, a sigmoid: not stationary; its kernel is the neural-network kernel."""
    return Activation("erf", _erf_wave, bias="normal", stationarity="none")


def _bump_wave(u: Array, xp: ArrayModule = torch) -> Array:
    return xp.exp(-(u * u))


def local_rbf() -> Activation:
    """exp(−z²), as in the paper's code: stationary under a Gaussian envelope, prior variance falls to zero far away."""
    return Activation("local_rbf", _bump_wave, bias="normal", stationarity="local")


@dataclass(frozen=True)
class MaternWave:
    """The impulse response whose autocorrelation is the Matérn function, times a scale."""

    nu: float
    scale: float = 1.0

    @property
    def log_factor(self) -> float:
        """Logarithm of the factor before the power and the exponential; its gamma functions alone would overflow."""
        nu = self.nu
        log_q = 0.5 * (math.log(2 * math.sqrt(math.pi)) + math.lgamma(nu + 0.5) - math.lgamma(nu))
        return log_q + nu * math.log(math.sqrt(2 * nu)) - math.lgamma(nu + 0.5) + math.log(self.scale)

    def __call__(self, u: Array, xp: ArrayModule = torch) -> Array:
        """Evaluates the wave, by its logarithm."""
        # Off the support z is replaced before the logarithm, so that no NaN reaches the gradient.
        positive = xp.where(u > 0, u, 1.0)
        value = xp.exp(self.log_factor + (self.nu - 0.5) * xp.log(positive) - math.sqrt(2 * self.nu) * positive)
        return xp.where(u > 0, value, 0.0)


def local_matern(nu: float = 1.5) -> Activation:
    r"""Locally stationary Matérn activation.

    $$ \sigma(z) = \frac{q}{\Gamma(\nu + 1/2)}\,\Theta(z)\,z^{\nu - 1/2} e^{-\lambda z}, \qquad
       \lambda = \sqrt{2\nu}, \quad q^2 = 2\sqrt\pi\,\frac{\Gamma(\nu + 1/2)}{\Gamma(\nu)} \lambda^{2\nu}, $$

    so that $\int \sigma(x + b)\,\sigma(x' + b)\,\mathrm{d}b$ is the Matérn kernel of $x - x'$ with unit lengthscale.
    """
    if not (nu > 0 and math.isfinite(nu)):
        raise ValueError(f"The nu parameter must be positive and finite, got {nu} instead.")
    return Activation("local_matern", MaternWave(nu), bias="normal", stationarity="local")


ACTIVATIONS: dict[str, Callable[[], Activation]] = {
    factory.__name__: factory
    for factory in (sin, sincos, paired, triangle, periodic_relu, relu, step, erf, local_rbf, local_matern)
}


def resolve_activation(activation: str | Activation) -> Activation:
    """Turns the name of an activation into the activation; an Activation passes through."""
    if isinstance(activation, Activation):
        return activation
    return ACTIVATIONS[one_of("activation", activation, ACTIVATIONS)]()


def link(raw: Array, xp: ArrayModule = torch) -> Array:
    r"""Maps an unconstrained bias into (−π, π): $b = 2\pi\,\mathrm{sigmoid}(\hat b) - \pi = \pi \tanh(\hat b / 2)$."""
    return math.pi * xp.tanh(0.5 * raw)


def unlink(bias: Tensor) -> Tensor:
    r"""The unconstrained bias that ``link`` maps to a bias in (−π, π)."""
    return torch.logit((bias / math.pi + 1) / 2)
