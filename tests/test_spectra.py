"""Spectral densities against SciPy's distributions, scikit-learn's kernels and Bochner's theorem itself."""

import math

import mpmath
import numpy as np
import pytest
import scipy.stats
import torch
from scipy.integrate import quad
from sklearn.gaussian_process import kernels as sk

from bochner import RBF, Exponential, Matern
from bochner.priors import spectra
from bochner.priors.spectra import matern

SPECTRA = [RBF(), Matern(2.5), Matern(1.5), Exponential(), Matern(2.2), Matern(0.3)]
PRODUCTS = [Matern(1.5, product=True), Exponential(product=True)]


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5, 2.2, 7.5])
@pytest.mark.parametrize("lengthscale", [0.4, 3.0])
def test_matern_kernel_equals_scikit_learn(nu, lengthscale, generator):
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    x2 = torch.cat([x[:5], torch.randn(20, 3, generator=generator, dtype=torch.float64)])
    expected = sk.Matern(length_scale=lengthscale, nu=nu)(x.numpy(), x2.numpy())
    np.testing.assert_allclose(Matern(nu).kernel(x, x2, lengthscale=lengthscale).numpy(), expected, rtol=0, atol=1e-10)


def test_rbf_kernel_equals_scikit_learn_with_ard(generator):
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    ard = torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64)
    expected = sk.RBF(length_scale=ard.numpy())(x.numpy())
    np.testing.assert_allclose(RBF().kernel(x, lengthscale=ard).numpy(), expected, rtol=0, atol=1e-10)
    expected = sk.Matern(length_scale=ard.numpy(), nu=1.5)(x.numpy())
    np.testing.assert_allclose(Matern(1.5).kernel(x, lengthscale=ard).numpy(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("lengthscale", [0.5, 2.0])
@pytest.mark.parametrize("r", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("spectrum", [RBF(), Matern(2.5), Matern(1.5), Exponential(), Matern(2.2)])
def test_kernel_is_the_fourier_transform_of_the_density(spectrum, r, lengthscale):
    """Bochner's theorem in one dimension, by quadrature."""

    def density(omega):
        return spectrum.density(torch.tensor([omega], dtype=torch.float64), lengthscale=lengthscale).item()

    # QAWF, the Fourier integral over a half line; at r = 0 the plain one.
    value = 2 * (quad(density, 0, np.inf, weight="cos", wvar=r)[0] if r else quad(density, 0, np.inf)[0])
    x = torch.tensor([[0.0], [r]], dtype=torch.float64)
    assert value == pytest.approx(spectrum.kernel(x, lengthscale=lengthscale)[0, 1].item(), abs=1e-7)


@pytest.mark.parametrize("dim", [1, 4])
@pytest.mark.parametrize("nu", [0.5, 1.5, 2.2])
def test_log_prob_is_the_multivariate_t(nu, dim, generator):
    w = torch.randn(10, dim, generator=generator, dtype=torch.float64)
    expected = scipy.stats.multivariate_t(loc=np.zeros(dim), shape=np.eye(dim), df=2 * nu).logpdf(w.numpy())
    np.testing.assert_allclose(Matern(nu).log_prob(w).numpy(), expected, atol=1e-12)
    expected = scipy.stats.t(2 * nu).logpdf(w.numpy()).sum(-1)
    np.testing.assert_allclose(Matern(nu, product=True).log_prob(w).numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(RBF().log_prob(w).numpy(), scipy.stats.norm.logpdf(w.numpy()).sum(-1), atol=1e-12)


def test_log_prob_with_ard_lengthscale_is_a_change_of_variables(generator):
    w = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    ard = torch.tensor([0.5, 3.0], dtype=torch.float64)
    shape = np.diag(1 / ard.numpy() ** 2)
    expected = scipy.stats.multivariate_t(loc=np.zeros(2), shape=shape, df=3).logpdf(w.numpy())
    np.testing.assert_allclose(Matern(1.5).log_prob(w, lengthscale=ard).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("spectrum", [RBF(), Matern(1.5), Matern(2.5, product=True), Exponential()])
def test_precision_is_the_curvature_of_the_log_density_at_zero(spectrum):
    curvature = -torch.autograd.functional.hessian(spectrum.weight_log_prob, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(curvature, spectrum.precision(3) * torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("spectrum", [*SPECTRA[:5], *PRODUCTS])
@pytest.mark.parametrize("dim", [1, 3])
def test_samples_follow_the_density(spectrum, dim, generator):
    """Kolmogorov–Smirnov on a coordinate, and on the norm where the law of the norm is known."""
    w = spectrum.sample(20_000, dim, lengthscale=2.0, generator=generator) * 2.0
    df = math.inf if isinstance(spectrum, RBF) else 2 * spectrum.nu
    marginal = scipy.stats.norm if df == math.inf else scipy.stats.t(df)
    assert scipy.stats.kstest(w[:, -1].numpy(), marginal.cdf).pvalue > 1e-3
    if spectrum.isotropic:
        radial = scipy.stats.chi2(dim) if df == math.inf else scipy.stats.f(dim, df)
        squared = w.square().sum(-1) / (1 if df == math.inf else dim)
        assert scipy.stats.kstest(squared.numpy(), radial.cdf).pvalue > 1e-3


def test_product_kernel_is_a_product_of_one_dimensional_kernels(generator):
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    expected = torch.ones(8, 8, dtype=torch.float64)
    for i in range(3):
        expected = expected * Matern(1.5).kernel(x[:, i : i + 1])
    torch.testing.assert_close(Matern(1.5, product=True).kernel(x), expected)
    assert (Matern(1.5).kernel(x) - expected).abs().max() > 0.05  # the two priors are not the same


@pytest.mark.parametrize("nu", [0.7, 1.5, 2.2])
def test_matern_gradient_matches_finite_differences(nu):
    r = torch.linspace(0.05, 4, 50, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(matern(r, nu=nu).sum(), r)
    numeric = (matern(r.detach() + 1e-6, nu=nu) - matern(r.detach() - 1e-6, nu=nu)) / 2e-6
    torch.testing.assert_close(grad, numeric, rtol=1e-6, atol=1e-8)


def test_kernel_gradient_in_the_lengthscale_is_finite_on_the_diagonal(generator):
    x = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    for spectrum in SPECTRA:
        lengthscale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(spectrum.kernel(x, lengthscale=lengthscale).sum(), lengthscale)
        assert torch.isfinite(grad)
        assert grad > 0


@pytest.mark.parametrize("nu", [0.3, 2.2, 8.3, 19.9, 40.7])
def test_matern_is_continuous_at_zero(nu):
    assert matern(torch.tensor([0.0, 1e-300, 1e-40]).double(), nu=nu).tolist() == pytest.approx(
        [1.0, 1.0, 1.0], abs=1e-12
    )


@pytest.mark.parametrize("nu", [0.3, 1.0, 3.7, 12.5, 19.9, 20.0, 20.5, 33.3, 150.0, 1000.0])
def test_matern_of_any_smoothness_is_its_definition(nu):
    """Against mpmath, which has the Bessel function in as many digits as one likes."""
    r = torch.tensor([0.05, 0.5, 1.0, 3.0, 8.0], dtype=torch.float64)
    expected = []
    with mpmath.workdps(50):
        for value in r.tolist():
            z = mpmath.sqrt(2 * mpmath.mpf(nu)) * mpmath.mpf(value)
            expected.append(float(mpmath.power(2, 1 - nu) / mpmath.gamma(nu) * z**nu * mpmath.besselk(nu, z)))
    np.testing.assert_allclose(matern(r, nu=nu).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nu", [0.7, 1.0, 2.2, 25.0])
def test_matern_second_derivative_matches_finite_differences(nu):
    def slope(r):
        return torch.func.vmap(torch.func.grad(lambda v: matern(v, nu=nu)))(r)

    r = torch.linspace(0.3, 3, 20, dtype=torch.float64)
    second = torch.func.vmap(torch.func.grad(torch.func.grad(lambda v: matern(v, nu=nu))))(r)
    torch.testing.assert_close(second, (slope(r + 1e-5) - slope(r - 1e-5)) / 2e-5, rtol=1e-5, atol=1e-7)


def test_bad_arguments():
    for nu in (0, -1.5, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"nu parameter must be positive and finite, got {nu} instead"):
            Matern(nu)
    x = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"lengthscale parameter must be positive and finite.*got nan instead"):
        RBF().kernel(x, lengthscale=math.nan)
    with pytest.raises(ValueError, match=r"lengthscale parameter must be positive and finite.*got -1.0 instead"):
        RBF().sample(3, 1, lengthscale=-1.0)
    with pytest.raises(
        ValueError, match=r"lengthscale parameter must be positive and finite.*got tensor\(\[\]\) instead"
    ):
        RBF().kernel(x, lengthscale=torch.tensor([]))
    with pytest.raises(ValueError, match="lengthscale parameter must be a number or 1 numbers, got 3 instead"):
        RBF().kernel(x, lengthscale=torch.ones(3))
    with pytest.raises(ValueError, match="lengthscale parameter must be a number or 1 numbers, got 3 instead"):
        RBF().sample(4, 1, lengthscale=torch.ones(3))
    with pytest.raises(ValueError, match=r"x2 parameter must have shape \(m, 1\), got \(4, 3\) instead"):
        RBF().kernel(x, torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"x parameter must have shape \(n, d\), got \(5,\) instead"):
        RBF().kernel(torch.zeros(5))
    with pytest.raises(ValueError, match="kernel parameter must be an object or one of"):
        spectra.resolve_spectrum(Matern)
    with pytest.raises(TypeError, match="nu"):
        Exponential(nu=2.5)
    with pytest.raises(ValueError, match=r"got 'mattern32' instead\. Did you mean 'matern32'\?"):
        spectra.resolve_spectrum("mattern32")
