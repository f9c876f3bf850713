r"""Covariance functions of infinitely wide layers, in closed form.

All take rows of inputs, (n, d) and (m, d), and return the (n, m) matrix; the second argument defaults to the first. The
stationary family is ``spectrum.kernel`` (``RBF``, ``Matern``, ``Exponential``); this module adds the kernels of
activations that are not periodic, and ``induced_kernel``, the kernel of any prior.
"""
# torch.linalg and other parts of torch declare no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bochner.priors.activations import Activation, resolve_activation
from bochner.priors.spectra import (
    RBF,
    Matern,
    Spectrum,
    check_lengthscale,
    check_pair,
    euclidean,
    open_uniform,
    resolve_spectrum,
)


def _second_moments(x: Tensor, x2: Tensor | None, bias_scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Var z, Var z', Cov(z, z') and the angle between z and z', for z = w·x + b, w ~ N(0, I), b ~ N(0, bias_scale²).

    The angle is 2 atan2(|u − v|, |u + v|) of the unit vectors u, v along (x, bias_scale): accurate for nearly parallel ones,
    where the arc cosine of a rounded cosine is not.
    """
    x, x2 = check_pair(x, x2)
    a, b = (torch.cat([v, torch.full_like(v[:, :1], bias_scale)], -1) for v in (x, x2))
    u, v = torch.nn.functional.normalize(a, dim=-1), torch.nn.functional.normalize(b, dim=-1)
    angle = 2 * torch.atan2(euclidean(u, v), euclidean(u, -v))
    return a.square().sum(-1)[:, None], b.square().sum(-1)[None, :], a @ b.mT, angle


def arccos0(x: Tensor, x2: Tensor | None = None, *, bias_scale: float = 1.0) -> Tensor:
    r"""Kernel of step units, $\mathrm{E}[\Theta(z)\Theta(z')] = (\pi - \theta)/2\pi$, half the arc-cosine kernel of order 0."""
    *_, angle = _second_moments(x, x2, bias_scale)
    return (math.pi - angle) / (2 * math.pi)


def arccos1(x: Tensor, x2: Tensor | None = None, *, bias_scale: float = 1.0) -> Tensor:
    r"""Kernel of ReLU units, half the arc-cosine kernel of order 1.

    $$ \mathrm{E}[z_+ z'_+] = \frac{\sqrt{ab}}{2\pi}(\sin\theta + (\pi - \theta)\cos\theta), \qquad
       a = \mathrm{Var}\,z,\; b = \mathrm{Var}\,z',\; \sqrt{ab}\cos\theta = \mathrm{Cov}(z, z') $$
    """
    a, b, _, angle = _second_moments(x, x2, bias_scale)
    return (a * b).sqrt() * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)


def erf_nn(x: Tensor, x2: Tensor | None = None, *, bias_scale: float = 1.0) -> Tensor:
    r"""Neural-network kernel of erf units.

    $$ \mathrm{E}[\mathrm{erf}(z)\,\mathrm{erf}(z')] = \frac2\pi \arcsin\frac{2c}{\sqrt{(1 + 2a)(1 + 2b)}} $$
    """
    a, b, c, _ = _second_moments(x, x2, bias_scale)
    ratio = 2 * c / ((1 + 2 * a).sqrt() * (1 + 2 * b).sqrt())
    limit = 1 - torch.finfo(x.dtype).eps  # a ratio of 1 is a rounding error, and has no gradient
    return 2 / math.pi * torch.asin(ratio.clamp(-limit, limit))


def gaussian_bump(x: Tensor, x2: Tensor | None = None, *, bias_scale: float = 1.0) -> Tensor:
    r"""Kernel of ``local_rbf`` units under normal weights.

    $$ \mathrm{E}[e^{-z^2 - z'^2}] = |I + 2\Sigma|^{-1/2} = (1 + 2a + 2b + 4ab\sin^2\theta)^{-1/2} $$
    """
    a, b, _, angle = _second_moments(x, x2, bias_scale)
    return (1 + 2 * a + 2 * b + 4 * a * b * angle.sin().square()).rsqrt()


def _gaussian_envelope(x: Tensor, x2: Tensor, variance: float) -> Tensor:
    """exp(−x²/2v) exp(−x'²/2v) for all pairs."""
    return torch.exp(-(x.square().sum(-1)[:, None] + x2.square().sum(-1)[None, :]) / (2 * variance))


def rbf_nn(x: Tensor, x2: Tensor | None = None, *, lengthscale: float = 1.0, bias_scale: float = 1.0) -> Tensor:
    r"""RBF network kernel: bumps $e^{-\lVert x - c\rVert^2/2\ell^2}$ with centres $c \sim \mathrm{N}(0, \sigma_b^2 I)$.

    $$ \kappa(x, x') = \left(\frac{\ell^2}{\ell^2 + 2\sigma_b^2}\right)^{d/2}
       e^{-\lVert x\rVert^2/2\sigma_m^2}\, e^{-\lVert x - x'\rVert^2/2\sigma_s^2}\, e^{-\lVert x'\rVert^2/2\sigma_m^2} $$

    with $\sigma_m^2 = 2\sigma_b^2 + \ell^2$ and $\sigma_s^2 = 2\ell^2 + \ell^4/\sigma_b^2$.
    """
    x, x2 = check_pair(x, x2)
    envelope_variance = 2 * bias_scale**2 + lengthscale**2
    stationary = RBF().kernel(x, x2, lengthscale=math.sqrt(2 * lengthscale**2 + lengthscale**4 / bias_scale**2))
    scale = (lengthscale**2 / envelope_variance) ** (x.shape[-1] / 2)
    return scale * _gaussian_envelope(x, x2, envelope_variance) * stationary


def matern_nn(
    x: Tensor, x2: Tensor | None = None, *, nu: float, lengthscale: float = 1.0, bias_scale: float = 1.0
) -> Tensor:
    r"""The paper's Matérn-NN kernel: the Matérn kernel under a Gaussian envelope, equal to 1 at the origin.

    $$ \kappa(x, x') = e^{-\lVert x\rVert^2/2\sigma_m^2}\,\kappa_\mathrm{Mat.}(x, x')\,e^{-\lVert x'\rVert^2/2\sigma_m^2},
       \qquad \sigma_m^2 = 2\sigma_b^2 + \ell^2 $$

    The paper gives it, up to a factor, as the kernel of ``local_matern`` units with normal biases. That is an approximation:
    for uniform biases the Matérn factor is exact, but the effect of a normal bias is a Gaussian envelope only for ``rbf_nn``.
    """
    x, x2 = check_pair(x, x2)
    envelope_variance = 2 * bias_scale**2 + lengthscale**2
    return _gaussian_envelope(x, x2, envelope_variance) * Matern(nu).kernel(x, x2, lengthscale=lengthscale)


_CLOSED_FORMS = {"relu": arccos1, "step": arccos0, "erf": erf_nn, "local_rbf": gaussian_bump}


@dataclass(frozen=True)
class InducedKernel:
    """The prior covariance of one output unit of a layer, as a function of its inputs.

    Attributes:
        activation: The activation.
        spectrum: The weight prior.
        lengthscale: The lengthscale, which divides the inputs.
        method: "harmonics", "closed form" or "monte carlo".
        error: Bound on the error of truncating the harmonics, beside the rounding of the inputs' type; 0 where nothing is
            truncated, NaN under Monte Carlo, where ``standard_error`` gives it entry by entry.
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
        x, x2 = check_pair(x, x2, self.lengthscale)
        if self.method == "closed form":
            return _CLOSED_FORMS[self.activation.name](x, x2)
        if self.method == "monte carlo":
            return self._product_moments(x, x2)[0]
        distance = self.spectrum.distance(x, x2)
        frequencies, weights = self.activation.harmonics(*([self.error] if self.error else []))
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        # Smallest terms first: the weights span ten orders of magnitude.
        for frequency, weight in zip(frequencies.flip(0).tolist(), weights.flip(0).tolist(), strict=True):
            total = total + weight * self.spectrum.correlation(frequency * distance)
        return total

    def standard_error(self, x: Tensor, x2: Tensor | None = None) -> Tensor:
        """Standard error of each entry, (n, m); zero unless the method is Monte Carlo."""
        x, x2 = check_pair(x, x2, self.lengthscale)
        if self.method != "monte carlo":
            return torch.zeros(len(x), len(x2), dtype=x.dtype, device=x.device)
        mean, square = self._product_moments(x, x2)
        return ((square - mean.square()).clamp(min=0) / self.units).sqrt()

    def _product_moments(self, x: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and mean square of σ(z)σ(z') over units drawn with a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        weight = self.spectrum.sample(self.units, x.shape[-1], generator=generator).to(x)
        normal = torch.special.ndtri(open_uniform(1, self.units, generator)).to(x)
        bias = normal if self.activation.bias == "normal" else 0.0
        h, h2 = (self.activation(v @ weight.mT + bias) for v in (x, x2))
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
    Monte Carlo over ``units`` units, with a standard error for each entry (itself unreliable for ReLU under nu ≤ 2, whose
    products have infinite variance).
    """
    activation, spectrum = resolve_activation(activation), resolve_spectrum(spectrum)
    scale = check_lengthscale(lengthscale)
    if units < 2:
        raise ValueError(f"The units parameter must be at least 2, got {units} instead.")
    if not 0 < tolerance < 1:
        raise ValueError(f"The tolerance parameter must lie between 0 and 1, got {tolerance} instead.")
    if activation.variance is not None:
        method, error = "harmonics", tolerance if activation.odd_quartic else 0.0
    elif activation.name in _CLOSED_FORMS and isinstance(spectrum, RBF):
        method, error = "closed form", 0.0
    elif activation.name == "relu" and isinstance(spectrum, Matern) and spectrum.nu <= 1:
        raise ValueError(f"ReLU units under {spectrum} have no kernel: weights with nu ≤ 1 have infinite variance.")
    else:
        method, error = "monte carlo", math.nan
    return InducedKernel(activation, spectrum, scale, method, error, units)
