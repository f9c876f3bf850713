r"""Spectral densities of stationary kernels, which are the weight priors of networks.

Bochner's theorem: $\kappa(r) = \int p(\omega)\, e^{\mathrm{i}\omega^\top r}\,\mathrm{d}\omega$ for a probability density $p$. A
spectrum here is that $p$, used as the prior of the weights: Normal for the RBF kernel, Student-t for the Matérn family,
Cauchy for the exponential kernel. A lengthscale $\ell$ (one number, or one per input for ARD) divides the input, which
divides the frequencies: $\omega = w/\ell$ with $w$ drawn at $\ell = 1$.
"""
# SciPy and parts of torch declare no types:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import scipy.linalg
import scipy.special
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from bochner.arguments import MAX_NUMBER, generator_device, shown
from bochner.errors import one_of
from bochner.priors.arrays import Array, ArrayModule, Number

QUADRATURE_NODES = 40  # of the mixture that stands for Matérn kernels of large ν


def log_gamma_log_prob(log_value: Array, shape: float, rate: float, xp: ArrayModule = torch) -> Array:
    r"""Log density of Gamma at $v = e^u$, in terms of $u$: $\alpha\log\beta - \log\Gamma(\alpha) + (\alpha - 1) u - \beta e^u$."""
    return shape * math.log(rate) - math.lgamma(shape) + (shape - 1) * log_value - rate * xp.exp(log_value)


def normal_log_prob(value: Number, precision: float) -> Number:
    r"""Log density of $\mathrm{N}(0, 1/\tau)$, entry by entry."""
    return 0.5 * (math.log(precision / (2 * math.pi)) - precision * value * value)


def check_lengthscale(lengthscale: float | Tensor) -> Tensor:
    """Returns the lengthscale as a float64 tensor, after checking that every entry is positive and finite."""
    try:
        value = torch.as_tensor(lengthscale, dtype=torch.float64).detach()
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = torch.zeros(())
    if value.ndim > 1 or value.numel() == 0 or not bool((torch.isfinite(value) & (value > 0)).all()):
        raise ValueError(
            "The lengthscale parameter must be positive and finite, a number or one per input, "
            f"got {shown(lengthscale)} instead."
        )
    if not 1 / MAX_NUMBER <= float(value.min()) <= float(value.max()) <= MAX_NUMBER:
        raise ValueError(
            f"The lengthscale parameter must lie between 1e-18 and 1e18, got {shown(lengthscale)} instead."
        )
    return value


def check_pair(x: Tensor, x2: Tensor | None, lengthscale: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Inputs divided by the lengthscale, after checking that their shapes fit; x2 defaults to x."""
    dim = x.shape[-1] if x.ndim else 0
    for name, value in (("x", x), ("x2", x if x2 is None else x2)):
        if value.ndim != 2 or value.shape[1] != dim:
            shape = "(n, d)" if name == "x" else f"(m, {dim})"
            raise ValueError(f"The {name} parameter must have shape {shape}, got {tuple(value.shape)} instead.")
    entries = check_lengthscale(lengthscale)
    if entries.ndim and len(entries) != dim:
        raise ValueError(f"The lengthscale parameter must be a number or {dim} numbers, got {len(entries)} instead.")
    scale = torch.as_tensor(lengthscale, dtype=x.dtype, device=x.device)
    scaled = x / scale
    return scaled, scaled if x2 is None else x2 / scale


class Spectrum(ABC):
    """A spectral density, which is a weight prior.

    Subclasses define the density, its inverse CDF and its kernel at unit lengthscale.
    """

    @property
    @abstractmethod
    def isotropic(self) -> bool:
        """Whether the density depends on the norm of the frequency alone."""

    @abstractmethod
    def weight_log_prob(self, weight: Array, xp: ArrayModule = torch) -> Array:
        """Log p(w) at unit lengthscale: (..., d) to (...)."""

    def weight_score(self, weight: Tensor) -> Tensor:
        """Gradient of log p(w), (..., d); subclasses have it in closed form."""
        with torch.enable_grad():
            value = weight.detach().requires_grad_()
            return torch.autograd.grad(self.weight_log_prob(value).sum(), value)[0]

    def precision(self, dim: int) -> float:  # noqa: ARG002
        """Curvature of minus log p(w) along a coordinate at w = 0: the prior precision in a Laplace approximation."""
        raise ValueError(f"{type(self).__name__} has no method precision, which a Laplace approximation asks for.")

    @abstractmethod
    def uniforms(self, dim: int) -> int:
        """Number of uniform numbers that one weight vector of ``dim`` inputs is made from."""

    @abstractmethod
    def from_uniform(self, u: Tensor, dim: int) -> Tensor:
        """Inverse-CDF map from the unit cube, ``k = uniforms(dim)``, to weights at unit lengthscale."""

    @abstractmethod
    def distance(self, x: Tensor, x2: Tensor) -> Tensor:
        """Distances that the kernel depends on: Euclidean ones (n, m), or those of each coordinate (n, m, d) for a product."""

    @abstractmethod
    def correlation(self, distance: Tensor) -> Tensor:
        """κ at unit lengthscale as a function of ``distance``: to (n, m)."""

    def log_prob(self, omega: Tensor, *, lengthscale: float | Tensor = 1.0) -> Tensor:
        r"""Log density of frequencies, $\log p(\ell\omega) + \sum_i \log \ell_i$."""
        scale = check_lengthscale(lengthscale).to(omega).expand(omega.shape[-1])
        return self.weight_log_prob(omega * scale) + scale.log().sum()

    def density(self, omega: Tensor, *, lengthscale: float | Tensor = 1.0) -> Tensor:
        """Density of frequencies; integrates to one."""
        return self.log_prob(omega, lengthscale=lengthscale).exp()

    def sample(
        self,
        num: int,
        dim: int,
        *,
        lengthscale: float | Tensor = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Independent frequencies, in float64 on the CPU."""
        scale = check_lengthscale(lengthscale)
        if scale.ndim and len(scale) != dim:
            raise ValueError(f"The lengthscale parameter must be a number or {dim} numbers, got {len(scale)} instead.")
        return self.from_uniform(open_uniform(num, self.uniforms(dim), generator), dim) / scale

    def kernel(
        self,
        x: Tensor,
        x2: Tensor | None = None,
        *,
        lengthscale: float | Tensor = 1.0,
    ) -> Tensor:
        """Closed-form covariance of all pairs of rows; differentiable in the inputs and the lengthscale."""
        return self.correlation(self.distance(*check_pair(x, x2, lengthscale)))


def open_uniform(num: int, dim: int, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers strictly inside (0, 1), float64, on the CPU whatever the generator's device."""
    device = generator_device(generator)
    u = torch.rand(num, dim, generator=generator, dtype=torch.float64, device=device).cpu()
    return u.clamp_(min=2.0**-54)


@dataclass(frozen=True)
class RBF(Spectrum):
    r"""Normal weights: $\kappa(r) = \exp(-\lVert r\rVert^2/2)$."""

    @property
    def isotropic(self) -> bool:
        """The normal density is isotropic and a product at once."""
        return True

    def weight_log_prob(self, weight: Array, xp: ArrayModule = torch) -> Array:
        r"""$-\frac12 \lVert w\rVert^2 - \frac d2 \log 2\pi$."""
        return -0.5 * xp.sum(weight * weight, -1) - 0.5 * weight.shape[-1] * math.log(2 * math.pi)

    def weight_score(self, weight: Tensor) -> Tensor:
        r"""$-w$."""
        return -weight

    def precision(self, dim: int) -> float:  # noqa: ARG002
        """1: the log density is a square."""
        return 1.0

    def uniforms(self, dim: int) -> int:
        """One for each input."""
        return dim

    def from_uniform(self, u: Tensor, dim: int) -> Tensor:
        """Normal quantiles."""
        return torch.special.ndtri(u[:, :dim])

    def distance(self, x: Tensor, x2: Tensor) -> Tensor:
        """Euclidean."""
        return euclidean(x, x2)

    def correlation(self, distance: Tensor) -> Tensor:
        """The squared-exponential function."""
        return torch.exp(-0.5 * distance.square())


@dataclass(frozen=True)
class Matern(Spectrum):
    r"""Student-t weights with $2\nu$ degrees of freedom: the Matérn kernel of smoothness $\nu$.

    With more than one input there are two priors of that name. The default is the multivariate t, one shared scale for a
    unit, whose kernel is the isotropic Matérn. ``product=True`` draws each coordinate independently, whose kernel is a
    product of one-dimensional Matérns.
    """

    nu: float
    product: bool = False

    def __post_init__(self) -> None:
        if not (self.nu > 0 and math.isfinite(self.nu)):
            raise ValueError(
                f"The nu parameter must be positive and finite, got {self.nu} instead. RBF() is the limit of large nu."
            )

    @property
    def isotropic(self) -> bool:
        """Whether this is the multivariate t."""
        return not self.product

    def weight_log_prob(self, weight: Array, xp: ArrayModule = torch) -> Array:
        r"""Multivariate t.

        $$ \log\frac{\Gamma(\nu + d/2)}{\Gamma(\nu)(2\nu\pi)^{d/2}}
           - (\nu + \tfrac d2)\log(1 + \tfrac{\lVert w\rVert^2}{2\nu}) $$
        """
        if self.product:
            return xp.sum(self._t_log_prob(weight * weight, 1, xp), -1)
        return self._t_log_prob(xp.sum(weight * weight, -1), weight.shape[-1], xp)

    def weight_score(self, weight: Tensor) -> Tensor:
        r"""$-(2\nu + d)\, w / (2\nu + \lVert w\rVert^2)$; for a product every coordinate on its own, as if $d = 1$."""
        square, dim = weight.square(), 1 if self.product else weight.shape[-1]
        if not self.product:
            square = square.sum(-1, keepdim=True)
        return weight * (-(2 * self.nu + dim) / (2 * self.nu + square))

    def precision(self, dim: int) -> float:
        r"""$(\nu + d/2)/\nu$; for a product as if $d = 1$."""
        return (self.nu + (1 if self.product else dim) / 2) / self.nu

    def _t_log_prob(self, squared_norm: Array, dim: int, xp: ArrayModule) -> Array:
        """Log density of a t distribution in ``dim`` dimensions, as a function of the squared norm."""
        half = self.nu + dim / 2
        constant = math.lgamma(half) - math.lgamma(self.nu) - dim / 2 * math.log(2 * self.nu * math.pi)
        return constant - half * xp.log1p(squared_norm / (2 * self.nu))

    def uniforms(self, dim: int) -> int:
        """One for each input, and one for their shared scale, if they have one."""
        return dim if self.product or dim == 1 else dim + 1

    def from_uniform(self, u: Tensor, dim: int) -> Tensor:
        """Student-t quantiles, or normal quantiles over the root of a chi-squared one."""
        if self.product or dim == 1:
            return torch.from_numpy(np.asarray(scipy.special.stdtrit(2 * self.nu, u[:, :dim].numpy())))
        return torch.special.ndtri(u[:, :dim]) * self.radial_scale(u[:, dim])[:, None]

    def radial_scale(self, u: Tensor) -> Tensor:
        r"""The scale shared by a unit, $\sqrt{2\nu / \chi^2_{2\nu}}$, by its quantile."""
        return torch.from_numpy(np.sqrt(self.nu / scipy.special.gammaincinv(self.nu, u.numpy())))

    def distance(self, x: Tensor, x2: Tensor) -> Tensor:
        """Euclidean, or |x − x2| in every coordinate."""
        return (x[:, None, :] - x2[None, :, :]).abs() if self.product else euclidean(x, x2)

    def correlation(self, distance: Tensor) -> Tensor:
        """The Matérn function of the distance, or the product of those of the coordinates."""
        value = matern(distance, nu=self.nu)
        return value.prod(-1) if self.product else value


@dataclass(frozen=True)
class Exponential(Matern):
    r"""Cauchy weights: $\kappa(r) = \exp(-\lVert r\rVert)$, the Matérn kernel of $\nu = 1/2$."""

    nu: float = field(default=0.5, init=False)


def euclidean(x: Tensor, x2: Tensor) -> Tensor:
    """Euclidean distances of all pairs of rows, (n, d) and (m, d) to (n, m).

    They are computed from differences, which is exact for close rows. The gradient at distance zero is zero.
    """
    return torch.cdist(x, x2, compute_mode="donot_use_mm_for_euclid_dist")


def matern(r: Tensor, *, nu: float) -> Tensor:
    r"""Matérn correlation at distance r ≥ 0 and unit lengthscale.

    $$ \kappa(r) = \frac{2^{1-\nu}}{\Gamma(\nu)} z^\nu K_\nu(z), \qquad z = \sqrt{2\nu}\, r $$

    For $\nu = p + \frac12$ this is $e^{-z}$ times a polynomial. For $\nu \ge 20$, where the Bessel function overflows, it is
    the mixture $\mathrm{E}[e^{-r^2/2g}]$ over $g \sim \mathrm{Gamma}(\nu, \nu)$ by Gauss–Laguerre quadrature. Both run on any
    device. For other ν the Bessel function comes from SciPy, on the CPU. All have a gradient.
    """
    if nu >= 20:
        nodes, weights = _gamma_quadrature(nu)
        return sum(w * torch.exp(-0.5 * r.square() / g) for g, w in zip(nodes, weights, strict=True))  # pyright: ignore[reportReturnType]
    z = math.sqrt(2 * nu) * r
    if nu % 1 != 0.5 or nu > 11:
        return _Bessel.apply(z, nu)  # pyright: ignore[reportReturnType]
    p = int(nu - 0.5)
    # Horner's scheme for sum_i (p+i)! / (i! (p-i)!) (2z)^(p-i) * p! / (2p)!.
    polynomial = torch.zeros_like(z)
    for i in range(p + 1):
        coefficient = math.comb(p, i) * math.factorial(p + i) / math.factorial(2 * p)
        polynomial = polynomial * (2 * z) + coefficient
    return polynomial * torch.exp(-z)


def _gamma_quadrature(nu: float) -> tuple[list[float], list[float]]:
    """Nodes and weights of E over Gamma(ν, rate ν): the eigenproblem of the Laguerre recurrence, which cannot overflow."""
    k = np.arange(QUADRATURE_NODES)
    nodes, vectors = scipy.linalg.eigh_tridiagonal(2 * k + nu, np.sqrt(k[1:] * (k[1:] + nu - 1)))
    return (nodes / nu).tolist(), (vectors[0] ** 2).tolist()


class _BesselContext(FunctionCtx):
    """What the forward pass of ``_Bessel`` leaves for its gradient."""

    nu: float
    saved_tensors: tuple[Tensor]


class _Bessel(torch.autograd.Function):
    r"""$f_\nu(z) = c_\nu z^\nu K_\nu(z)$ with $c_\nu = 2^{1-\nu}/\Gamma(\nu)$.

    Its slope $-c_\nu z^\nu K_{\nu-1}(z)$ is again of the family, so that derivatives of any order exist:
    $f_\nu' = -z f_{\nu-1}/2(\nu - 1)$ for $\nu > 1$, and by $K_{-\mu} = K_\mu$ for $\nu < 1$.
    """

    @staticmethod
    def forward(z: Tensor, nu: float) -> Tensor:
        array = np.atleast_1d(z.detach().double().cpu().numpy()).clip(min=1e-300)
        # kve is exp(z) K(z). It overflows only for z so small, below order 20, that the limit 1 is exact.
        with np.errstate(over="ignore"):
            log_value = nu * np.log(array) + np.log(scipy.special.kve(nu, array)) - array
        value = np.exp(log_value + (1 - nu) * math.log(2) - math.lgamma(nu))
        return torch.from_numpy(np.where(np.isinf(value), 1.0, value)).reshape(z.shape).to(z)

    @staticmethod
    def setup_context(ctx: _BesselContext, inputs: tuple[Tensor, float], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[0])
        ctx.nu = inputs[1]

    @staticmethod
    def backward(ctx: _BesselContext, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (z,) = ctx.saved_tensors
        nu = ctx.nu if ctx.nu != 1 else 1 + 1e-9  # K_0 as the limit
        positive = torch.where(z == 0, 1.0, z)
        if nu > 1:
            slope = positive * _Bessel.apply(positive, nu - 1) / (2 * (nu - 1))
        else:
            ratio = math.exp((1 - 2 * nu) * math.log(2) + math.lgamma(1 - nu) - math.lgamma(nu))
            slope = ratio * positive ** (2 * nu - 1) * _Bessel.apply(positive, 1 - nu)
        return -grad * torch.where(z == 0, 0.0, slope), None

    @staticmethod
    def vmap(info: object, in_dims: tuple[int | None, ...], z: Tensor, nu: float) -> tuple[Tensor, int | None]:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Bessel.apply(z, nu), in_dims[0]  # pyright: ignore[reportReturnType]


SPECTRA: dict[str, Spectrum] = {
    "rbf": RBF(),
    "matern52": Matern(2.5),
    "matern32": Matern(1.5),
    "exponential": Exponential(),
}


def resolve_spectrum(kernel: str | Spectrum) -> Spectrum:
    """Turns a kernel's name into its spectrum; a Spectrum passes through."""
    if isinstance(kernel, Spectrum):
        return kernel
    return SPECTRA[one_of("kernel", kernel, SPECTRA)]
