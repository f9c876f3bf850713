"""Activations against the formulas of the paper, written out here."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from bochner import activations
from bochner.priors.activations import Activation

PERIODIC = ["sin", "sincos", "triangle", "periodic_relu"]
grid = torch.linspace(-20, 20, 4001, dtype=torch.float64)


def paper_triangle(x):
    n = np.floor(x / math.pi + 0.5)
    return (x - math.pi * n) * (-1.0) ** n


PAPER = {
    "sin": lambda x: math.sqrt(2) * np.sin(x),
    "sincos": lambda x: np.sin(x) + np.cos(x),
    "triangle": lambda x: math.pi / (2 * math.sqrt(2)) * paper_triangle(x),
    "periodic_relu": lambda x: math.pi / 4 * (paper_triangle(x + math.pi / 2) + paper_triangle(x)),
}


def paper_scaled(name):
    activation = activations.ACTIVATIONS[name]
    return activation(scaling="paper") if name in ("triangle", "periodic_relu") else activation()


@pytest.mark.parametrize("name", PERIODIC)
def test_paper_scaling_is_the_papers_formula(name):
    ours = paper_scaled(name)(grid).numpy()
    np.testing.assert_allclose(ours, PAPER[name](grid.numpy()), atol=1e-12)


@pytest.mark.parametrize("name", [*PERIODIC, "paired"])
def test_unit_scaling_has_unit_variance_and_zero_mean(name):
    """Trapezoid rule over one period: spectrally exact for sinusoids, 8 over the squared number of points off for a triangle."""
    activation = activations.resolve_activation(name)
    z = torch.linspace(-math.pi, math.pi, 2**16 + 1, dtype=torch.float64)[:-1]
    h = activation(z[:, None])
    torch.testing.assert_close(h.square().mean(0), torch.ones(activation.outputs).double(), rtol=0, atol=1e-8)
    torch.testing.assert_close(h.mean(0), torch.zeros(activation.outputs).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*PERIODIC, "paired"])
def test_period(name):
    activation = activations.resolve_activation(name)
    assert activation.period is not None
    torch.testing.assert_close(activation(grid[:, None] + activation.period), activation(grid[:, None]))


@pytest.mark.parametrize("name", ["triangle", "periodic_relu"])
@pytest.mark.parametrize("scaling", ["unit", "paper"])
def test_harmonics_are_the_squared_fourier_coefficients(name, scaling):
    activation = activations.ACTIVATIONS[name](scaling=scaling)
    frequency, weight = activation.harmonics(1e-6)
    z = torch.linspace(-math.pi, math.pi, 2**16 + 1, dtype=torch.float64)[:-1]
    h = activation(z)
    for lam in range(1, 8):
        power = 2 * (h * torch.exp(1j * lam * z)).mean().abs() ** 2
        expected = weight[frequency == lam]
        torch.testing.assert_close(
            power, expected[0] if len(expected) else torch.tensor(0.0).double(), rtol=1e-6, atol=1e-12
        )


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6, 1e-10])
def test_harmonics_sum_to_the_variance_and_leave_no_more_than_the_tolerance(tolerance):
    frequency, weight = activations.triangle(scaling="paper").harmonics(tolerance)
    assert weight.sum().item() == pytest.approx(math.pi**4 / 96, rel=1e-15)
    remainder = weight[-1] - frequency[-1] ** -4.0
    assert -1e-15 <= remainder <= tolerance


def test_a_wave_with_other_harmonics_than_its_fields_say_is_refused():
    """A square wave of variance 1 has the weight 8/π² at λ = 1, so its kernel is neither that of a sine nor of a triangle."""
    square = Activation(
        "square",
        lambda u, _: u.sin().sign(),
        bias="uniform",
        stationarity="stationary",
        period=2 * math.pi,
        variance=1.0,
    )
    for odd_quartic in (False, True):
        with pytest.raises(
            ValueError, match=r"'square' has the weight 0\.8105\d+ at λ = 1, but its variance and odd_quartic say"
        ):
            replace(square, odd_quartic=odd_quartic).harmonics()


def test_piecewise_linear_gradients_match_finite_differences():
    z = torch.linspace(-9, 9, 212, dtype=torch.float64)  # no point on a kink
    for name in ("triangle", "periodic_relu"):
        activation = activations.resolve_activation(name)
        z.requires_grad_()
        (grad,) = torch.autograd.grad(activation(z).sum(), z)
        step = 1e-6
        numeric = (activation(z.detach() + step) - activation(z.detach() - step)) / (2 * step)
        torch.testing.assert_close(grad, numeric, rtol=1e-6, atol=1e-8)
        _, tangent = torch.func.jvp(activation, (z.detach(),), (torch.ones_like(z),))
        torch.testing.assert_close(tangent, grad)
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(activation))(z.detach()), grad)


@pytest.mark.parametrize("name", ["triangle", "periodic_relu"])
def test_the_compiled_expression_equals_the_eager_one(name):
    """The expression that compilers and JAX see is another one than eager mode runs: they must agree."""
    activation = activations.resolve_activation(name)

    class Namespace:
        clip, abs, round = staticmethod(torch.clip), staticmethod(torch.abs), staticmethod(torch.round)

    torch.testing.assert_close(activation(grid, Namespace), activation(grid))


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.2, 2.5])
def test_local_matern_is_the_stated_formula(nu):
    lam = math.sqrt(2 * nu)
    q = math.sqrt(2 * math.sqrt(math.pi) * math.gamma(nu + 0.5) / math.gamma(nu) * lam ** (2 * nu))
    x = grid.numpy()
    positive = np.where(x > 0, x, 1.0)
    expected = np.where(x > 0, q / math.gamma(nu + 0.5) * positive ** (nu - 0.5) * np.exp(-lam * positive), 0.0)
    np.testing.assert_allclose(activations.local_matern(nu)(grid).numpy(), expected, atol=1e-13)


def test_local_matern_gradient_is_finite_off_its_support():
    z = torch.tensor([-1.0, 0.0, 1e-9, 1.0], requires_grad=True)
    (grad,) = torch.autograd.grad(activations.local_matern(2.5)(z).sum(), z)
    assert torch.isfinite(grad).all()
    assert grad[0] == 0


def test_elementary_activations():
    z = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64)
    torch.testing.assert_close(activations.relu()(z), torch.tensor([0.0, 0.5, 3.0]).double())
    torch.testing.assert_close(activations.step()(z), torch.tensor([0.0, 1.0, 1.0]).double())
    expected = [2 / math.sqrt(math.pi) * quad(lambda t: math.exp(-t * t), 0, v)[0] for v in z.tolist()]
    torch.testing.assert_close(activations.erf()(z), torch.tensor(expected).double())
    torch.testing.assert_close(
        activations.local_rbf()(z), torch.tensor([math.exp(-4), math.exp(-0.25), math.exp(-9)]).double()
    )


def test_bias_priors_and_stationarity_are_declared():
    table = {name: (a.bias, a.stationarity) for name, a in ((n, f()) for n, f in activations.ACTIVATIONS.items())}
    assert table == {
        "sin": ("uniform", "stationary"),
        "sincos": ("none", "stationary"),
        "paired": ("none", "stationary"),
        "triangle": ("uniform", "stationary"),
        "periodic_relu": ("uniform", "stationary"),
        "relu": ("normal", "none"),
        "step": ("normal", "none"),
        "erf": ("normal", "none"),
        "local_rbf": ("normal", "local"),
        "local_matern": ("normal", "local"),
    }


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_pickle_and_equality(name):
    activation = activations.resolve_activation(name)
    assert pickle.loads(pickle.dumps(activation)) == activation == activations.resolve_activation(name)
    assert activations.triangle() != activations.triangle(scaling="paper")
    assert activations.local_matern(1.5) != activations.local_matern(2.5)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(
        ValueError, match=r"activation parameter must be one of .*got 'sine' instead\. Did you mean 'sin'\?"
    ):
        activations.resolve_activation("sine")
    with pytest.raises(ValueError, match=r"got 'tringle' instead\. Did you mean 'triangle'\?"):
        activations.resolve_activation("tringle")


def test_bad_arguments():
    with pytest.raises(
        ValueError, match=r"activation parameter must be an object or one of .*did you forget to call it\?"
    ):
        activations.resolve_activation(activations.sin)
    with pytest.raises(ValueError, match=r"scaling parameter must be 'unit' or 'paper', got 'half' instead"):
        activations.triangle(scaling="half")
    with pytest.raises(ValueError, match=r"nu parameter must be positive and finite, got 0 instead"):
        activations.local_matern(0)
    with pytest.raises(ValueError, match="'relu' is not periodic"):
        activations.relu().harmonics()
    with pytest.raises(ValueError, match=r"tolerance parameter must lie between 0 and 1, got 0 instead"):
        activations.triangle().harmonics(0)
