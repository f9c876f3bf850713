"""Elliptical slice sampling: its likelihood against the dense formula, and its draws against a sum over the prior."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from bochner import Categorical, Gaussian, Matern, Model, StationaryLayer
from bochner.posteriors.samples import Sampling
from bochner.posteriors.slices import LENGTHSCALE_PRIOR, NOISE_PRIOR, Collapsed, _evaluate, _gamma, slice_sample

X = torch.tensor([[-1.0], [0.2], [0.9], [1.5]], dtype=torch.float64)
Y = torch.tensor([[0.4], [-0.3], [0.8], [0.1]], dtype=torch.float64)


def network(units=3, kernel="rbf", activation="sin", **options):
    generator = torch.Generator().manual_seed(0)
    layer = StationaryLayer(1, units, kernel=kernel, activation=activation, generator=generator, dtype=torch.float64)
    return Model(layer, 1, Gaussian(0.3), amplitude=1.7, generator=generator, **options)


@pytest.mark.parametrize("output_bias", [False, True])
@pytest.mark.parametrize(("kernel", "activation"), [("rbf", "step"), (Matern(1.5), "sin"), ("exponential", "triangle")])
def test_the_likelihood_integrates_the_output_weights_out(kernel, activation, output_bias, generator):
    model = network(3, kernel, activation, output_bias=output_bias)
    target = Collapsed(model, X, Y)
    v = torch.randn(2, 3, target.numbers, generator=generator, dtype=torch.float64)
    scales = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    noise = _gamma(scales[:, 1], NOISE_PRIOR)
    h, found = _evaluate(target, v, scales)
    torch.testing.assert_close(found, target.log_likelihood(h, noise))
    for i in range(2):
        units = h[i, :, :3].numpy()
        covariance = noise[i].item() ** 2 * np.eye(4) + 1.7**2 / 3 * units @ units.T + output_bias
        assert found[i].item() == pytest.approx(
            scipy.stats.multivariate_normal.logpdf(Y[:, 0], np.zeros(4), covariance)
        )


def test_numbers_are_quantiles_of_the_priors():
    normal = torch.tensor([-1.3, 0.0, 0.8], dtype=torch.float64)
    for prior in (LENGTHSCALE_PRIOR, NOISE_PRIOR):
        expected = scipy.stats.gamma.ppf(scipy.stats.norm.cdf(normal), prior[0], scale=1 / prior[1])
        np.testing.assert_allclose(_gamma(normal, prior), expected, rtol=1e-9)
    target = Collapsed(network(1, "exponential"), X, Y)
    weight, bias = target.units(torch.tensor([[[0.7, -0.4]]], dtype=torch.float64))
    assert weight.item() == pytest.approx(scipy.stats.cauchy.ppf(scipy.stats.norm.cdf(0.7)))
    assert bias.item() == pytest.approx(math.pi * (2 * scipy.stats.norm.cdf(-0.4) - 1))


@pytest.mark.parametrize("activation", ["sin", "step"])
def test_draws_are_those_of_the_posterior(activation):
    """One unit: means of f and f² against a weighted sum over draws of the prior, within four standard errors of both."""
    x = torch.linspace(-1.5, 1.5, 8, dtype=torch.float64)[:, None]
    y = torch.tensor([0.9, -0.8, 0.1, -0.6, 0.7, 1.2, 0.2, 1.0], dtype=torch.float64)[:, None]
    model, generator = network(1, "rbf", activation), torch.Generator().manual_seed(3)
    target = Collapsed(model, x, y)
    v = torch.randn(100_000, 1, 2, generator=generator, dtype=torch.float64)
    scales = torch.randn(100_000, 2, generator=generator, dtype=torch.float64)
    h, level = _evaluate(target, v, scales)
    share = torch.softmax(level.nan_to_num(nan=-math.inf), 0)
    factor, mean = target.posterior(h, _gamma(scales[:, 1], NOISE_PRIOR))
    f = (h[..., 0] * mean).nan_to_num()
    values = torch.stack([f, f.square() + (h[..., 0] / factor[:, 0]).square().nan_to_num()])
    expected = torch.einsum("s,ksn->kn", share, values)
    weighing = torch.einsum("s,ksn->kn", share.square(), (values - expected[:, None]).square()).sqrt()
    posterior = slice_sample(model, x, y, Sampling(warmup=60, samples=200, chains=16, seed=1))
    drawn = posterior.outputs(x)[..., 0]
    diagnosis, flat = posterior.diagnose(x), drawn.flatten(0, 1)
    assert diagnosis.r_hat < 1.03
    found = torch.stack([flat, flat.square()])
    error = found.std(1) / math.sqrt(diagnosis.ess)
    assert ((found.mean(1) - expected).abs() / (error + weighing)).max() < 4


def test_a_seed_gives_the_same_draws_and_other_networks_are_refused():
    short = Sampling(warmup=2, samples=3, chains=2)
    one, two = (slice_sample(network(output_bias=True), X, Y, short, thin=2).samples for _ in range(2))
    assert {n: tuple(v.shape) for n, v in one.items()} == {
        "layer.weight": (2, 3, 3, 1),
        "likelihood.log_noise": (2, 3),
        "layer.log_lengthscale": (2, 3),
        "layer.bias": (2, 3, 3),
        "output.weight": (2, 3, 1, 3),
        "output.bias": (2, 3, 1),
    }
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=0)
    layer = StationaryLayer(1, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="must be a network for regression of one target"):
        slice_sample(Model(layer, 2, Categorical()), X, torch.tensor([0, 1, 0, 1]))
