"""Ways of drawing the units: each is unbiased, and the structured ones earn their keep."""

import math

import pytest
import scipy.stats
import torch

from bochner import RBF, Exponential, Matern, StationaryLayer, activations
from bochner.priors.frequencies import draw

METHODS = ["iid", "orthogonal", "sobol"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("spectrum", [RBF(), Matern(1.5), Exponential()])
def test_every_unit_has_the_prior_distribution(spectrum, dim, method):
    """The first, a middle and the last unit of 3,000 small layers, each against the marginal law of the prior."""
    units = [
        draw(spectrum, activations.sin(), 7, dim, method=method, generator=torch.Generator().manual_seed(s))
        for s in range(3000)
    ]
    marginal = scipy.stats.norm if isinstance(spectrum, RBF) else scipy.stats.t(2 * spectrum.nu)
    for unit in (0, 3, 6):
        coordinate = torch.stack([weight[unit, 0] for weight, _ in units])
        bias = torch.stack([b[unit] for _, b in units if b is not None])
        assert scipy.stats.kstest(coordinate.numpy(), marginal.cdf).pvalue > 1e-3
        assert scipy.stats.kstest(bias.numpy(), scipy.stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_the_mean_kernel_over_draws_is_the_kernel(method):
    """Unbiased: the average over 2,000 layers of width 10, within five of its own standard errors."""
    x = torch.tensor([[0.0, 0.0], [0.8, -0.3], [1.5, 1.0]], dtype=torch.float64)
    kernels = []
    for seed in range(2000):
        generator = torch.Generator().manual_seed(seed)
        layer = StationaryLayer(2, 10, kernel=Matern(1.5), frequencies=method, generator=generator, dtype=torch.float64)
        h = layer(x).detach()
        kernels.append(h @ h.T / 10)
    stack = torch.stack(kernels)
    deviation = (stack.mean(0) - Matern(1.5).kernel(x)) / (stack.std(0) / math.sqrt(2000))
    assert deviation.abs().max() < 5


@pytest.mark.parametrize("num", [3, 4, 10])
def test_orthogonal_blocks(num, generator):
    weight, _ = draw(RBF(), activations.sin(), num, 4, method="orthogonal", generator=generator)
    for start in range(0, num, 4):
        block = weight[start : start + 4]
        gram = block @ block.T
        torch.testing.assert_close(gram - torch.diag(gram.diagonal()), torch.zeros_like(gram), rtol=0, atol=1e-12)


def gram_error(method, dim, kernel, activation, num, seeds=20):
    x = torch.randn(40, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / math.sqrt(dim)
    x = torch.linspace(-3, 3, 40, dtype=torch.float64)[:, None] if dim == 1 else x
    errors = []
    for seed in range(seeds):
        width = num * activations.resolve_activation(activation).outputs
        generator = torch.Generator().manual_seed(seed)
        layer = StationaryLayer(
            dim, width, kernel=kernel, activation=activation, frequencies=method, generator=generator
        )
        h = layer.double()(x).detach()
        errors.append((h @ h.T / width - layer.induced_kernel()(x)).abs().mean())
    return torch.stack(errors).mean().item()


@pytest.mark.parametrize("activation", ["sin", "paired"])
@pytest.mark.parametrize(("kernel", "dim", "factor"), [(RBF(), 1, 10), (RBF(), 5, 3), (Matern(1.5), 1, 5)])
def test_sobol_beats_iid_by_a_factor(kernel, dim, factor, activation):
    assert (
        gram_error("sobol", dim, kernel, activation, 1000) <= gram_error("iid", dim, kernel, activation, 1000) / factor
    )


def test_orthogonal_beats_iid_in_more_than_one_dimension():
    assert gram_error("orthogonal", 5, RBF(), "paired", 200) < 0.8 * gram_error("iid", 5, RBF(), "paired", 200)


def test_generator_decides_everything_and_global_state_is_left_alone():
    state = torch.get_rng_state()
    for method in METHODS:
        first, second = (
            draw(Matern(1.5), activations.sin(), 5, 2, method=method, generator=torch.Generator().manual_seed(3))
            for _ in range(2)
        )
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


def test_bad_arguments():
    with pytest.raises(
        ValueError, match=r"frequencies parameter must be one of .*got 'sobl' instead\. Did you mean 'sobol'\?"
    ):
        draw(RBF(), activations.sin(), 3, 1, method="sobl")
    with pytest.raises(ValueError, match="'orthogonal' needs an isotropic spectrum, got Matern"):
        draw(Matern(1.5, product=True), activations.sin(), 3, 2, method="orthogonal")
    with pytest.raises(ValueError, match="Sobol frequencies need at most"):
        draw(RBF(), activations.sin(), 3, 30_000, method="sobol")
