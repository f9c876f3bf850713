"""Kernels against quadrature written out here, and the theorem by Monte Carlo."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from scipy.integrate import dblquad, quad

from bochner import RBF, Exponential, Matern, StationaryLayer, activations, induced_kernel
from bochner.priors.kernels import arccos0, arccos1, erf_nn, gaussian_bump, matern_nn, rbf_nn

SPECTRA = [RBF(), Matern(2.5), Matern(1.5), Exponential()]
PAIRS = [([0.3, -1.0], [0.9, 0.4]), ([1.5, 0.0], [-1.0, 0.2]), ([0.7, 0.7], [0.7, 0.7])]


def closed_form(spectrum, r):
    """The four kernels, written out."""
    z = {0.5: 1.0, 1.5: math.sqrt(3), 2.5: math.sqrt(5)}.get(getattr(spectrum, "nu", 0), 0) * r
    if isinstance(spectrum, RBF):
        return torch.exp(-0.5 * r**2)
    polynomial = {0.5: 1.0, 1.5: 1 + z, 2.5: 1 + z + z**2 / 3}[spectrum.nu]
    return polynomial * torch.exp(-z)


def odd_quartic_cosines(z):
    """Σ cos(λz)/λ⁴ over odd λ, as the cubic spline that it is."""
    z = np.abs(z - 2 * math.pi * np.round(z / (2 * math.pi)))
    return math.pi**4 / 96 - math.pi**2 * z**2 / 16 + math.pi * z**3 / 24


@pytest.mark.parametrize(("dim", "offset"), [(1, 1000.0), (5, 0.0), (25, 1000.0)])
@pytest.mark.parametrize("spectrum", SPECTRA, ids=lambda s: f"{type(s).__name__}{getattr(s, 'nu', '')}")
@pytest.mark.parametrize("activation", ["sin", "sincos", "triangle", "periodic_relu", "paired"])
def test_prior_covariance_is_the_induced_kernel_wherever_the_inputs_lie(
    activation, spectrum, dim, offset, record_property
):
    """Bochner's theorem: within five standard errors of 200,000 units, near the origin and far from it."""
    num = 200_000
    generator = torch.Generator().manual_seed(1)
    layer = StationaryLayer(
        dim,
        num * activations.resolve_activation(activation).outputs,
        kernel=spectrum,
        activation=activation,
        lengthscale=1.7,
        generator=generator,
        dtype=torch.float64,
    )
    x = (
        torch.randn(3, dim, generator=generator, dtype=torch.float64)
        / math.sqrt(dim)
        * torch.tensor([[0.1], [1.0], [2.0]])
        + offset
    )
    with torch.no_grad():
        h = layer(x).reshape(3, -1, num)
    r = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") / 1.7
    expected = closed_form(spectrum, r)
    if activation in ("triangle", "periodic_relu"):
        expected = sum(closed_form(spectrum, lam * r) / lam**4 for lam in range(1, 400, 2)) / (math.pi**4 / 96)
    products = (h[:, None] * h[None, :]).mean(2)
    error = products.std(-1) / math.sqrt(num)
    deviation = ((products.mean(-1) - expected).abs() / error.clamp(min=1e-9)).max().item()
    record_property("deviation", deviation)
    assert deviation <= 5


@pytest.mark.parametrize("spectrum", [RBF(), Matern(1.5), Exponential(), Matern(2.2)], ids=str)
@pytest.mark.parametrize("name", ["triangle", "periodic_relu"])
@pytest.mark.parametrize("r", [0.01, 0.5, 1.0, 3.0])
def test_induced_kernel_of_the_piecewise_linear_activations_is_the_integral(name, spectrum, r):
    """E_w of the spline over the density, by Gauss–Legendre on each half period; independent of the harmonics."""
    dist = scipy.stats.norm if isinstance(spectrum, RBF) else scipy.stats.t(2 * spectrum.nu)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    # The spline has its kinks at multiples of π/r and the density varies on the scale of 1. Signs alternate from one half
    # period to the next, so half of the last one stands for the rest of the (slowly falling) tail.
    edge = math.pi / r
    cuts = np.concatenate([np.linspace(0, edge, max(2, math.ceil(edge) + 1)), edge * np.arange(2, 20_000)])
    left, width = cuts[:-1, None], np.diff(cuts)[:, None]
    w = left + width * (nodes + 1) / 2
    # Twice the half line, times half the interval's width on which the nodes live.
    pieces = (dist.pdf(w) * odd_quartic_cosines(w * r) * weights).sum(1) * width[:, 0]
    value = pieces[:-1].sum() + pieces[-1] / 2
    x = torch.tensor([[0.2], [0.2 + r]], dtype=torch.float64)
    unit, paper = (
        induced_kernel(name, spectrum),
        induced_kernel(activations.ACTIVATIONS[name](scaling="paper"), spectrum),
    )
    assert unit(x)[0, 1].item() == pytest.approx(value / (math.pi**4 / 96), abs=1e-8)
    assert paper(x)[0, 1].item() == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize("spectrum", SPECTRA, ids=str)
@pytest.mark.parametrize("name", ["triangle", "periodic_relu", "sin", "sincos", "paired"])
def test_induced_variance_is_exactly_one(name, spectrum):
    x = torch.zeros(1, 2, dtype=torch.float64)
    assert abs(induced_kernel(name, spectrum)(x).item() - 1) <= 4e-16
    if name in ("triangle", "periodic_relu"):
        kernel = induced_kernel(activations.ACTIVATIONS[name](scaling="paper"), spectrum)
        assert abs(kernel(x).item() - math.pi**4 / 96) <= 4e-16


def test_paired_features_are_stationary_at_any_width(generator):
    layer = StationaryLayer(3, 16, kernel="matern32", activation="paired", generator=generator, dtype=torch.float64)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)

    def covariance(inputs):
        h = layer(inputs).detach()
        return h @ h.T / 16

    worst = 0.0
    for _ in range(50):
        c = (2 * torch.rand(3, generator=generator, dtype=torch.float64) - 1) * 1e3
        worst = max(worst, (covariance(x + c) - covariance(x)).abs().max().item())
    assert worst <= 1e-10


def gaussian_expectation(function, x, x2, *, kink):
    """E[σ(z)σ(z')] for jointly normal z, z' with unit bias variance: z = √a s, z' = slope s + rest t."""
    x, x2 = np.append(x, 1.0), np.append(x2, 1.0)
    a, c, b = x @ x, x @ x2, x2 @ x2
    slope, rest = c / math.sqrt(a), math.sqrt(max(b - c * c / a, 0.0))
    if not kink:  # smooth: Gauss–Hermite in both directions
        nodes, weights = np.polynomial.hermite_e.hermegauss(200)
        s, t = nodes[:, None], nodes[None, :]
        return weights @ (function(math.sqrt(a) * s) * function(slope * s + rest * t)) @ weights / (2 * math.pi)

    def pdf(z):  # SciPy's own takes 60 microseconds, and is needed a hundred thousand times
        return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    def inner(s):  # both factors vanish for negative arguments
        if rest < 1e-9:
            return pdf(s) * function(math.sqrt(a) * s) * function(slope * s)
        start = max(-12.0, -slope * s / rest)
        tail = (
            quad(lambda t: pdf(t) * function(slope * s + rest * t), start, 12.0, epsabs=1e-11)[0] if start < 12 else 0.0
        )
        return pdf(s) * function(math.sqrt(a) * s) * tail

    return quad(inner, 0.0, 12.0, epsabs=1e-11, limit=200)[0]


@pytest.mark.parametrize(("x", "x2"), PAIRS)
@pytest.mark.parametrize(
    ("kernel", "name", "function"),
    [
        (arccos1, "relu", lambda z: z),
        (arccos0, "step", lambda _: 1.0),
        (erf_nn, "erf", scipy.special.erf),
        (gaussian_bump, "local_rbf", lambda z: np.exp(-z * z)),
    ],
)
def test_closed_forms_under_normal_weights_are_the_integral(kernel, name, function, x, x2):
    expected = gaussian_expectation(function, x, x2, kink=name in ("relu", "step"))
    a, b = torch.tensor([x], dtype=torch.float64), torch.tensor([x2], dtype=torch.float64)
    assert kernel(a, b).item() == pytest.approx(expected, abs=1e-6)
    induced = induced_kernel(name, "rbf", lengthscale=2.0)
    assert induced.method == "closed form"
    torch.testing.assert_close(induced(2 * a, 2 * b), kernel(a, b))


@pytest.mark.parametrize(("lengthscale", "bias_scale"), [(1.0, 1.0), (0.6, 2.0)])
def test_rbf_network_kernel_is_the_integral_over_centres(lengthscale, bias_scale):
    x, x2 = np.array([0.4, -0.7]), np.array([1.1, 0.2])

    def integrand(c2, c1):
        c = np.array([c1, c2])
        prior = math.exp(-c @ c / (2 * bias_scale**2)) / (2 * math.pi * bias_scale**2)
        return prior * math.exp(-((x - c) @ (x - c) + (x2 - c) @ (x2 - c)) / (2 * lengthscale**2))

    expected = dblquad(integrand, -15, 15, -15, 15, epsabs=1e-9)[0]
    ours = rbf_nn(torch.tensor(x)[None], torch.tensor(x2)[None], lengthscale=lengthscale, bias_scale=bias_scale).item()
    assert ours == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5, 2.2])
def test_matern_network_kernel_is_the_activation_correlated_with_itself_under_the_envelope(nu):
    """∫σ(x+b)σ(x'+b)db is the Matérn kernel (Parseval), and the envelope is exp(−x²/2σ_m²) with σ_m² = 2σ_b² + ℓ²."""
    sigma = activations.local_matern(nu)
    x, x2, bias_scale = 0.5, 1.2, 0.8

    def integrand(b):
        return (sigma(torch.tensor(x + b).double()) * sigma(torch.tensor(x2 + b).double())).item()

    correlation = quad(integrand, -x, -x + 60, epsabs=1e-10, limit=400)[0]
    envelope = math.exp(-(x**2 + x2**2) / (2 * (2 * bias_scale**2 + 1)))
    ours = matern_nn(torch.tensor([[x]]).double(), torch.tensor([[x2]]).double(), nu=nu, bias_scale=bias_scale).item()
    assert ours == pytest.approx(envelope * correlation, abs=1e-6)


def test_monte_carlo_states_its_error(generator):
    """ReLU under a heavy-tailed prior has no closed form here; normal weights as a limit do, and bound the error."""
    x = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    exact = induced_kernel("relu", RBF())(x)
    kernel = induced_kernel("relu", Matern(1e4), units=50_000)
    assert kernel.method == "monte carlo"
    assert math.isnan(kernel.error)
    error = kernel.standard_error(x)
    assert ((kernel(x) - exact).abs() / error).max() < 5
    assert induced_kernel("relu", RBF()).standard_error(x).max() == 0


def test_the_stated_standard_error_is_the_spread_over_independent_draws():
    x = torch.tensor([[0.3], [2.0]], dtype=torch.float64)
    stated = induced_kernel("erf", Matern(1.5), units=2000, lengthscale=3.0).standard_error(x)
    estimates = []
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        w = Matern(1.5).sample(2000, 1, lengthscale=3.0, generator=generator)
        h = torch.erf(x @ w.T + torch.randn(2000, generator=generator, dtype=torch.float64))
        estimates.append(h @ h.T / 2000)
    # The spread of 400 draws is known within 4 %, the stated error within a few.
    torch.testing.assert_close(stated, torch.stack(estimates).std(0), rtol=0.2, atol=0)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
def test_truncation_stays_within_its_tolerance_and_uses_it(tolerance):
    x = torch.linspace(0, 2, 50, dtype=torch.float64)[:, None]
    exact, rough = induced_kernel("triangle", "rbf")(x), induced_kernel("triangle", "rbf", tolerance=tolerance)(x)
    assert 1e-9 < (rough - exact).abs().max() <= tolerance


def test_bad_arguments():
    for tolerance in (0.0, 2.0):
        with pytest.raises(ValueError, match=f"tolerance parameter must lie between 0 and 1, got {tolerance} instead"):
            induced_kernel("triangle", "rbf", tolerance=tolerance)
    with pytest.raises(ValueError, match="units parameter must be at least 2, got 0 instead"):
        induced_kernel("relu", "matern32", units=0)
    with pytest.raises(ValueError, match=r"ReLU units under Exponential\(.*\) have no kernel"):
        induced_kernel("relu", "exponential")


def test_kernels_are_positive_semidefinite_and_symmetric(generator):
    x = torch.randn(25, 3, generator=generator, dtype=torch.float64)
    grams = [k(x) for k in (arccos0, arccos1, erf_nn, gaussian_bump, rbf_nn)] + [matern_nn(x, nu=1.5)]
    grams += [induced_kernel("triangle", s)(x) for s in SPECTRA]
    for gram in grams:
        torch.testing.assert_close(gram, gram.T)
        assert torch.linalg.eigvalsh(gram).min() > -1e-10


def test_angle_is_accurate_for_equal_inputs():
    """The textbook arc cosine of a rounded cosine is off by 1e-8 there, and has no gradient."""
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    torch.testing.assert_close(arccos0(x).diagonal(), torch.full((200,), 0.5).double(), rtol=0, atol=1e-15)
    torch.testing.assert_close(arccos1(x).diagonal(), (x.square().sum(-1) + 1) / 2, rtol=1e-14, atol=0)
    for kernel in (arccos0, arccos1, erf_nn, gaussian_bump):
        (grad,) = torch.autograd.grad(kernel(x).sum(), x)
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("kernel", [arccos0, arccos1, erf_nn, gaussian_bump])
def test_float32_far_from_the_origin_is_finite(kernel, generator):
    assert torch.isfinite(kernel(3e3 * torch.randn(50, 3, generator=generator))).all()
