"""SWAG: against its own theory, BatchNorm from the training data only, and the choice of the learning rate."""

import math

import pytest
import torch
from torch import nn

from bochner import Categorical, Model, StationaryLayer
from bochner.posteriors.learning_rate import tune_learning_rate
from bochner.posteriors.swag import Snapshots, Swag
from bochner.training.map import Recipe, fit_map
from problems import classification, data, regression


def test_samples_have_half_the_diagonal_plus_half_the_low_rank_covariance(generator):
    """20,000 draws against ½ diag + ½ DD'/(M−1), every entry within five of its standard errors."""
    model = regression(width=4)
    x, y = data(30)
    swag = Swag(model, x, y, Snapshots(lr=1e-3, epochs=8, rank=5, batch_size=10))
    drawn = swag.sample_weights(20_000, generator=generator)
    draws = torch.cat([drawn[n][:, 0].flatten(1) for n in drawn], -1)
    mean = torch.cat([swag.mean[n][0].flatten() for n in drawn])
    variance = torch.cat([(swag.scatter[n] / swag.count)[0].flatten() for n in drawn])
    columns = torch.cat([torch.stack(swag.deviations[n])[:, 0].flatten(1) for n in drawn], -1)
    assert columns.shape[0] == 5
    covariance = 0.5 * torch.diag(variance) + 0.5 * columns.T @ columns / 4
    scale = covariance.diagonal()
    error = ((scale[:, None] * scale + covariance**2) / 20_000).sqrt()
    assert ((torch.cov(draws.T) - covariance).abs() / error).max() < 5
    assert ((draws.mean(0) - mean).abs() / (scale / 20_000).sqrt()).max() < 5


def test_moments_are_those_of_the_snapshots():
    """The path, collected a second time by hand."""
    x, y = data(30)
    snapshots = []
    reference = regression(width=4)
    for n, p in reference.named_parameters():
        p.requires_grad_(not n.endswith(("log_lengthscale", "log_noise", "log_amplitude")))
    sgd = Recipe(6, 10, lambda g: torch.optim.SGD(g, momentum=0.9), 1e-3)
    fit_map(reference, x, y, sgd, after_epoch=lambda ps: snapshots.append({n: p.clone() for n, p in ps.items()}))
    model = regression(width=4)
    lengthscale = model.layer.lengthscale.item()
    swag = Swag(model, x, y, Snapshots(lr=1e-3, epochs=6, rank=3, batch_size=10))
    for name, mean in swag.mean.items():
        stack = torch.stack([s[name] for s in snapshots])
        torch.testing.assert_close(mean, stack.mean(0))
        torch.testing.assert_close(swag.scatter[name] / 6, stack.var(0, correction=0), rtol=1e-6, atol=1e-14)
        torch.testing.assert_close(model.get_parameter(name), stack.mean(0)[0])
        # A deviation is from the mean as it was when the snapshot came in.
        torch.testing.assert_close(swag.deviations[name][-1], stack[-1] - stack.mean(0))
        torch.testing.assert_close(swag.deviations[name][0], stack[3] - stack[:4].mean(0))
    assert model.layer.lengthscale.item() == lengthscale
    assert model.layer.log_lengthscale.requires_grad


def test_float32_variances_do_not_cancel():
    """Snapshots around 3 with standard deviation 1e-4: a difference of mean squares would be all rounding error."""
    swag = Swag.__new__(Swag)
    swag.count, swag.rank, swag.mean, swag.scatter, swag.deviations = 0, 5, {}, {}, {}
    snapshots = 3 + 1e-4 * torch.randn(40, 1, 500, generator=torch.Generator().manual_seed(0))
    for snapshot in snapshots:
        swag._collect({"w": snapshot})
    expected = snapshots.double().var(0, correction=0).sqrt()
    torch.testing.assert_close((swag.scatter["w"] / 40).sqrt().double(), expected, rtol=1e-2, atol=0)


def test_divergence_is_an_error_for_one_and_marked_in_a_stack():
    x, y = data(30)
    with pytest.raises(ValueError, match=r"SGD diverged at the learning rate 1e\+150 while collecting; lower it"):
        Swag(regression(), x, y, Snapshots(lr=1e150, epochs=6, rank=3))
    swag = Swag([regression(0), regression(1)], x, y, Snapshots(lr=[1e150, 1e-3], epochs=6, rank=3))
    prediction = swag.predict(x[:2], 4)
    assert torch.isnan(prediction.mean[0]).all()
    assert torch.isfinite(prediction.mean[1]).all()


def norm_model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    extractor = nn.Sequential(nn.BatchNorm1d(3)).double()
    return Model(
        StationaryLayer(3, 8, generator=generator, dtype=torch.float64),
        3,
        Categorical(),
        extractor=extractor,
        generator=generator,
    )


def test_scoring_another_data_set_does_not_change_predictions():
    x, y = data(40, classes=3)
    swag = Swag(norm_model(), x, y, Snapshots(lr=1e-2, epochs=4, rank=3, batch_size=8))
    seeds = [torch.Generator().manual_seed(1) for _ in range(3)]
    before = swag.predict(x[:5], 6, generator=seeds[0]).probabilities
    swag.predict(100 + 50 * x, 6, generator=seeds[1])
    after = swag.predict(x[:5], 6, generator=seeds[2]).probabilities
    torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_batch_norm_statistics_are_averages_over_the_training_data():
    x, y = data(40, classes=3)
    swag = Swag(norm_model(), 3 + 2 * x, y, Snapshots(lr=1e-2, epochs=4, rank=3, batch_size=8))
    statistics = swag.norm_statistics(swag.sample_weights(2, generator=torch.Generator().manual_seed(0)))
    batches = (3 + 2 * x).split(8)
    expected = torch.stack([b.mean(0) for b in batches]).mean(0)
    torch.testing.assert_close(statistics["extractor.0.running_mean"], expected.expand(2, 1, 3))
    expected = torch.stack([b.var(0) for b in batches]).mean(0)
    torch.testing.assert_close(statistics["extractor.0.running_var"], expected.expand(2, 1, 3))


def test_a_stack_equals_single_fits():
    x, y = data(30, classes=3)
    make = lambda s: classification(s, width=6)  # noqa: E731
    stack = Swag([make(0), make(1)], x, y, Snapshots(lr=[1e-2, 1e-3], epochs=4, rank=3, batch_size=10, seed=[3, 4]))
    alone = Swag(make(1), x, y, Snapshots(lr=1e-3, epochs=4, rank=3, batch_size=10, seed=4))
    for name in alone.mean:
        torch.testing.assert_close(stack.mean[name][1], alone.mean[name][0], rtol=1e-9, atol=1e-12)
    assert stack.predict(x[:4], 5).probabilities.shape == (2, 4, 3)
    assert alone.predict(x[:4], 5).probabilities.shape == (4, 3)


def test_bayesian_optimisation_finds_the_minimum_and_survives_divergence():
    """A parabola in log lr with its minimum at 0.02; rates above 0.5 diverge."""

    def score(rate):
        return math.nan if rate > 0.5 else (math.log(rate) - math.log(0.02)) ** 2

    best, history = tune_learning_rate(score, trials=10)
    assert len(history) == 10
    assert abs(math.log(best / 0.02)) < 0.3
    with pytest.raises(ValueError, match="No learning rate between"):
        tune_learning_rate(lambda _: math.nan, trials=4)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"rank parameter must lie between 2 and epochs \(4\), got 5 instead"):
        Swag(regression(), *data(), Snapshots(lr=1e-3, epochs=4, rank=5))
    with pytest.raises(ValueError, match="bounds must be positive and increasing"):
        tune_learning_rate(lambda r: r, bounds=(1.0, 0.1))
