r"""Covariance functions of infinitely wide layers, in closed form.

All take rows of inputs, (n, d) and (m, d), and return the (n, m) matrix; the second argument defaults to the first. The
stationary family is ``spectrum.kernel`` (``RBF``, ``Matern``, ``Exponential``); this module adds the kernels of
activations that are not periodic and ``induced_kernel``, the kernel of a prior whatever it is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bochner.activations import Activation
from bochner.activations import resolve as resolve_activation
from bochner.spectra import RBF, Matern, Spectrum, check_lengthscale, open_uniform
from bochner.spectra import resolve as resolve_spectrum

Kernel = Callable[[Tensor, Tensor | None], Tensor]


def _second_moments(x: Tensor, x2: Tensor | None, bias_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Var z, Var z' and Cov(z, z') of z = w·x + b under w ~ N(0, I) and b ~ N(0, bias_scale²)."""
    x2 = x if x2 is None else x2
    bias = bias_scale**2
    return x.square().sum(-1)[:, None] + bias, x2.square().sum(-1)[None, :] + bias, x @ x2.mT + bias


def _angle(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Angle between two vectors with squared norms a, b and inner product c; accurate for nearly parallel vectors too."""
    return torch.atan2((a * b - c * c).clamp(min=0).sqrt(), c)


def arccos0(x: Tensor, x2: Tensor | None = None, *, bias_scale: float = 1.0) -> Tensor:
    r"""Kernel of step units, $\mathrm{E}[\Theta(z)\Theta(z')] = (\pi - \theta)/2\pi$, half the arc-cosine kernel of order 0."""
    a, b, c = _second_moments(x, x2, bias_scale)
    return (math.pi - _angle(a, b, c)) / (2 * math.pi)


def arccos1(x: Tensor, x2: Tensor | None = None, *, bias_scale: float = 1.0) -> Tensor:
    r"""Kernel of ReLU units, half the arc-cosine kernel of order 1.

    $$ \mathrm{E}[z_+ z'_+] = \frac{\sqrt{ab}}{2\pi}(\sin\theta + (\pi - \theta)\cos\theta), \qquad
       a = \mathrm{Var}\,z,\; b = \mathrm{Var}\,z',\; \sqrt{ab}\cos\theta = \mathrm{Cov}(z, z') $$
    """
    a, b, c = _second_moments(x, x2, bias_scale)
    sine = (a * b - c * c).clamp(min=0).sqrt()
    return (sine + (math.pi - _angle(a, b, c)) * c) / (2 * math.pi)


def erf_nn(x: Tensor, x2: Tensor | None = None, *, bias_scale: float = 1.0) -> Tensor:
    r"""Neural-network kernel of erf units.

    $$ \mathrm{E}[\mathrm{erf}(z)\,\mathrm{erf}(z')] = \frac2\pi \arcsin\frac{2c}{\sqrt{(1 + 2a)(1 + 2b)}} $$
    """
    a, b, c = _second_moments(x, x2, bias_scale)
    return 2 / math.pi * torch.asin(2 * c / ((1 + 2 * a) * (1 + 2 * b)).sqrt())


def gaussian_bump(x: Tensor, x2: Tensor | None = None, *, bias_scale: float = 1.0) -> Tensor:
    r"""Kernel of ``local_rbf`` units under normal weights, $\mathrm{E}[e^{-z^2 - z'^2}] = |I + 2\Sigma|^{-1/2}$."""
    a, b, c = _second_moments(x, x2, bias_scale)
    return ((1 + 2 * a) * (1 + 2 * b) - 4 * c * c).rsqrt()


def _envelope(x: Tensor, x2: Tensor, variance: float) -> Tensor:
    """exp(−x²/2v) exp(−x'²/2v) for all pairs."""
    return torch.exp(-(x.square().sum(-1)[:, None] + x2.square().sum(-1)[None, :]) / (2 * variance))


def rbf_nn(x: Tensor, x2: Tensor | None = None, *, lengthscale: float = 1.0, bias_scale: float = 1.0) -> Tensor:
    r"""RBF network kernel: bumps $e^{-\lVert x - c\rVert^2/2\ell^2}$ with centres $c \sim \mathrm{N}(0, \sigma_b^2 I)$.

    $$ \kappa(x, x') = \left(\frac{\ell^2}{\ell^2 + 2\sigma_b^2}\right)^{d/2}
       e^{-\lVert x\rVert^2/2\sigma_m^2}\, e^{-\lVert x - x'\rVert^2/2\sigma_s^2}\, e^{-\lVert x'\rVert^2/2\sigma_m^2} $$

    with $\sigma_m^2 = 2\sigma_b^2 + \ell^2$ and $\sigma_s^2 = 2\ell^2 + \ell^4/\sigma_b^2$.
    """
    x2 = x if x2 is None else x2
    envelope_variance = 2 * bias_scale**2 + lengthscale**2
    stationary = RBF().kernel(x, x2, lengthscale=math.sqrt(2 * lengthscale**2 + lengthscale**4 / bias_scale**2))
    scale = (lengthscale**2 / envelope_variance) ** (x.shape[-1] / 2)
    return scale * _envelope(x, x2, envelope_variance) * stationary


def matern_nn(
    x: Tensor, x2: Tensor | None = None, *, nu: float, lengthscale: float = 1.0, bias_scale: float = 1.0
) -> Tensor:
    r"""Matérn network kernel: the Matérn kernel under the Gaussian envelope of variance $\sigma_m^2 = 2\sigma_b^2 + \ell^2$."""
    x2 = x if x2 is None else x2
    envelope_variance = 2 * bias_scale**2 + lengthscale**2
    return _envelope(x, x2, envelope_variance) * Matern(nu).kernel(x, x2, lengthscale=lengthscale)


_CLOSED_FORMS = {"relu": arccos1, "step": arccos0, "erf": erf_nn, "local_rbf": gaussian_bump}


@dataclass(frozen=True)
class InducedKernel:
    """The prior covariance of one output unit of a layer, as a function of its inputs.

    Attributes:
        activation: The activation.
        spectrum: The weight prior.
        lengthscale: What the inputs are divided by.
        method: "harmonics" (exact up to ``error``), "closed form" (exact) or "monte carlo".
        error: Bound on the absolute error; NaN under Monte Carlo, where ``standard_error`` gives it entry by entry.
        units: Number of units drawn under Monte Carlo.
    """

    activation: Activation
    spectrum: Spectrum
    lengthscale: Tensor
    method: str
    error: float
    units: int

    def __call__(self, x: Tensor, x2: Tensor | None = None) -> Tensor:
        """The covariance of all pairs of rows, (n, d) and (m, d) to (n, m)."""
        scale = self.lengthscale.to(x)
        x, x2 = x / scale, None if x2 is None else x2 / scale
        if self.method == "closed form":
            return _CLOSED_FORMS[self.activation.name](x, x2)
        if self.method == "monte carlo":
            return self._products(x, x2)[0]
        frequencies, weights = self.activation.harmonics(self.error or 1e-10)
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        # Smallest terms first: the weights span ten orders of magnitude.
        for frequency, weight in zip(frequencies.flip(0).tolist(), weights.flip(0).tolist(), strict=True):
            total = total + weight * self.spectrum.kernel(frequency * x, None if x2 is None else frequency * x2)
        return total

    def standard_error(self, x: Tensor, x2: Tensor | None = None) -> Tensor:
        """Standard error of each entry, (n, m); zero unless the method is Monte Carlo."""
        scale = self.lengthscale.to(x)
        x, x2 = x / scale, x / scale if x2 is None else x2 / scale
        if self.method != "monte carlo":
            return torch.zeros(len(x), len(x2), dtype=x.dtype, device=x.device)
        mean, square = self._products(x, x2)
        return ((square - mean.square()).clamp(min=0) / self.units).sqrt()

    def _products(self, x: Tensor, x2: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and mean square of σ(z)σ(z') over units drawn with a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        weight = self.spectrum.sample(self.units, x.shape[-1], generator=generator).to(x)
        bias = torch.special.ndtri(open_uniform(1, self.units, generator)).to(x)
        h = self.activation(x @ weight.mT + bias)
        h2 = h if x2 is None else self.activation(x2 @ weight.mT + bias)
        return h @ h2.mT / self.units, h.square() @ h2.square().mT / self.units


def induced_kernel(
    activation: str | Activation,
    spectrum: str | Spectrum,
    *,
    lengthscale: float | Tensor = 1.0,
    tolerance: float = 1e-10,
    units: int = 100_000,
) -> InducedKernel:
    r"""The kernel that a prior, an activation with a spectrum, induces at infinite width.

    Periodic activations: $\sum_\lambda a_\lambda \kappa(\lambda r)$, exact for sin, sincos and paired, within ``tolerance`` for
    triangle and periodic ReLU. Other activations under normal weights: closed form where one is known. Everything else:
    Monte Carlo over ``units`` units, with a standard error for each entry.
    """
    activation, spectrum = resolve_activation(activation), resolve_spectrum(spectrum)
    scale = check_lengthscale(lengthscale)
    if activation.variance is not None:
        method, error = "harmonics", tolerance if activation.decay else 0.0
    elif activation.name in _CLOSED_FORMS and isinstance(spectrum, RBF):
        method, error = "closed form", 0.0
    else:
        method, error = "monte carlo", math.nan
    return InducedKernel(activation, spectrum, scale, method, error, units)
