"""Predictive distributions and metrics against formulas written out here."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import roc_auc_score

from bochner import metrics
from bochner.predictive import CategoricalPredictive, GaussianPredictive, joined


def gaussian(batch=()):
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(*batch, 6, 2, generator=generator, dtype=torch.float64)
    variance = torch.rand(*batch, 6, 2, generator=generator, dtype=torch.float64) + 0.1
    return GaussianPredictive(mean, variance, torch.full(batch, 0.5, dtype=torch.float64)), mean + 0.7


@pytest.mark.parametrize("batch", [(), (3,)])
def test_gaussian_log_prob_entropy_and_information(batch):
    predictive, y = gaussian(batch)
    total = np.sqrt(predictive.f_variance.numpy() + 0.25)
    expected = scipy.stats.norm(predictive.mean.numpy(), total)
    np.testing.assert_allclose(predictive.log_prob(y).numpy(), expected.logpdf(y.numpy()).sum(-1))
    np.testing.assert_allclose(predictive.entropy.numpy(), expected.entropy().sum(-1))
    information = scipy.stats.norm(0, total).entropy() - scipy.stats.norm(0, 0.5).entropy()
    np.testing.assert_allclose(predictive.mutual_information.numpy(), information.sum(-1))
    of_f = predictive.f_variance.numpy().sum(-1)
    np.testing.assert_allclose(predictive.ood_score.numpy(), of_f / (of_f + 2 * 0.25))
    low, high = predictive.interval(0.9)
    np.testing.assert_allclose(low.numpy(), expected.ppf(0.05))
    np.testing.assert_allclose(high.numpy(), expected.ppf(0.95))


def test_gaussian_mixture(generator):
    samples = torch.randn(40, 6, 2, generator=generator, dtype=torch.float64)
    predictive = GaussianPredictive.from_samples(samples, torch.tensor(0.3, dtype=torch.float64))
    y = torch.zeros(6, 2, dtype=torch.float64)
    densities = scipy.stats.norm(samples.numpy(), 0.3).pdf(0.0).prod(-1).mean(0)
    np.testing.assert_allclose(predictive.log_prob(y).numpy(), np.log(densities))
    torch.testing.assert_close(predictive.mean, samples.mean(0))
    torch.testing.assert_close(predictive.f_variance, samples.var(0, correction=0))


def test_mixture_whose_draws_have_their_own_noise(generator):
    samples = torch.randn(40, 6, 2, generator=generator, dtype=torch.float64)
    noise = 0.1 + torch.rand(40, generator=generator, dtype=torch.float64)
    predictive = GaussianPredictive.from_samples(samples, noise)
    densities = scipy.stats.norm(samples.numpy(), noise.numpy()[:, None, None]).pdf(0.3).prod(-1).mean(0)
    np.testing.assert_allclose(
        predictive.log_prob(torch.full((6, 2), 0.3).double()).numpy(), np.log(densities), rtol=1e-6
    )
    total = samples.numpy().var(0) + (noise.numpy() ** 2).mean()
    np.testing.assert_allclose(predictive.std.numpy(), np.sqrt(total))


def test_log_probabilities_do_not_underflow():
    predictive = CategoricalPredictive.from_logits([torch.tensor([[0.0, 200.0]])] * 3)
    assert predictive.log_prob(torch.tensor([0])).item() == pytest.approx(-200)


def test_categorical_moments(generator):
    logits = 2 * torch.randn(30, 5, 4, generator=generator, dtype=torch.float64)
    predictive = CategoricalPredictive.from_logits(iter(logits))
    p = torch.softmax(logits, -1).numpy()
    np.testing.assert_allclose(predictive.probabilities.numpy(), p.mean(0))
    np.testing.assert_allclose(predictive.marginal_variance.numpy(), p.var(0).sum(-1))
    np.testing.assert_allclose(predictive.entropy.numpy(), scipy.stats.entropy(p.mean(0), axis=-1))
    aleatoric = scipy.stats.entropy(p, axis=-1).mean(0)
    np.testing.assert_allclose(
        predictive.mutual_information.numpy(), scipy.stats.entropy(p.mean(0), axis=-1) - aleatoric
    )
    y = torch.tensor([0, 1, 2, 3, 0])
    np.testing.assert_allclose(predictive.log_prob(y).numpy(), np.log(p.mean(0)[np.arange(5), y.numpy()]))
    np.testing.assert_allclose(predictive.confidence.numpy(), p.mean(0).max(-1))
    np.testing.assert_allclose(predictive.ood_score.numpy(), predictive.entropy.numpy() / np.log(4))


def test_scores_are_between_0_and_1_and_reach_both_ends():
    def score(variance):
        variance = torch.tensor([[variance]], dtype=torch.float64)
        return GaussianPredictive(torch.zeros(1, 1).double(), variance, torch.tensor(0.3).double()).ood_score.item()

    assert score(0.0) == 0
    assert score(0.09) == pytest.approx(0.5)
    assert score(1e18) == 1
    even = CategoricalPredictive.from_logits([torch.zeros(1, 7)])
    sure = CategoricalPredictive.from_logits([torch.tensor([[0.0, 1e4]])])
    assert even.ood_score.item() == pytest.approx(1, rel=1e-12)
    assert even.ood_score.item() <= 1
    assert sure.ood_score.item() == 0


def test_batches_of_predictions_are_joined_with_their_scores():
    whole, _ = gaussian()
    whole = replace(whole, novelty=torch.linspace(0, 1, 6))
    parts = [
        replace(whole, mean=whole.mean[i], f_variance=whole.f_variance[i], novelty=whole.novelty[i])
        for i in (slice(4), slice(4, 6))
    ]
    torch.testing.assert_close(joined(parts).ood_score, whole.ood_score)
    torch.testing.assert_close(joined(parts).mean, whole.mean)


def test_predictive_bad_arguments():
    predictive, y = gaussian()
    with pytest.raises(
        ValueError, match=r"targets y must have the shape of the mean, \(6, 2\), got torch.float64 of shape \(6, 1\)"
    ):
        predictive.log_prob(y[:, :1])
    with pytest.raises(ValueError, match=r"coverage parameter must lie between 0 and 1, got 1\.0 instead"):
        predictive.interval(1.0)
    with pytest.raises(ValueError, match="must hold at least one draw, got none"):
        CategoricalPredictive.from_logits([])
    with pytest.raises(ValueError, match="targets y must be integer class labels"):
        CategoricalPredictive.from_logits([torch.zeros(3, 2)]).log_prob(torch.zeros(3))
    stack = CategoricalPredictive.from_logits([torch.zeros(2, 5, 3)])
    assert stack.log_prob(torch.zeros(5, dtype=torch.int64)).shape == (2, 5)
    with pytest.raises(ValueError, match=r"targets y must be integer class labels, .* shape \(3, 5\)"):
        stack.log_prob(torch.zeros(3, 5, dtype=torch.int64))


def test_regression_metrics():
    assert metrics.rmse([1.0, 2.0], [1.0, 4.0]) == pytest.approx(math.sqrt(2))
    log_prob = scipy.stats.norm(0, 1).logpdf([0.5, -0.2])
    assert metrics.nlpd(log_prob) == pytest.approx(-log_prob.mean())
    # A target of standard deviation 3 in original units: the density there is a third.
    original = scipy.stats.norm(0, 3).logpdf([1.5, -0.6])
    assert metrics.nlpd(log_prob, target_scale=3.0) == pytest.approx(-original.mean())
    assert metrics.coverage([0.0, 1.0, 5.0], [-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]) == pytest.approx(2 / 3)


def test_classification_metrics():
    p = np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3], [0.2, 0.8]])
    y = np.array([0, 0, 0, 1])
    assert metrics.accuracy(y, p) == 0.75
    assert metrics.brier(y, p) == pytest.approx(np.mean([0.02, 0.72, 0.18, 0.08]))
    assert metrics.auc(y, p) == 1.0
    # Four bins of one row each: |right − confidence| of 0.1, 0.6, 0.3, 0.2.
    assert metrics.ece(y, p, bins=15) == pytest.approx((0.1 + 0.6 + 0.3 + 0.2) / 4)
    # One bin: the signed gaps cancel within it.
    assert metrics.ece(y, p, bins=1) == pytest.approx(abs(0.75 - 0.75))
    three = np.array([[0.8, 0.1, 0.1], [0.1, 0.5, 0.4], [0.2, 0.3, 0.5], [0.3, 0.4, 0.3]])
    labels = np.array([0, 1, 2, 0])
    expected = np.mean([roc_auc_score(labels == c, three[:, c]) for c in range(3)])
    assert metrics.auc(labels, three) == pytest.approx(expected)


def test_calibrated_probabilities_have_small_ece():
    rng = np.random.default_rng(0)
    p1 = rng.uniform(size=200_000)
    y = (rng.uniform(size=200_000) < p1).astype(int)
    assert metrics.ece(y, np.stack([1 - p1, p1], -1)) < 0.01


def test_ood_metrics():
    inside, outside = np.array([0.0, 1.0, 2.0, 3.0]), np.array([2.5, 4.0, 5.0])
    pairs = np.mean([o > i for o in outside for i in inside])
    assert metrics.ood_auc(inside, outside) == pytest.approx(pairs)
    # Flagging all three outside inputs flags the inside one at 3 as well.
    assert metrics.fpr95(inside, outside) == pytest.approx(1 / 4)
    # Identical sets: flagging 95 % of one flags 95 % of the other.
    assert metrics.fpr95(np.arange(20.0), np.arange(20.0)) == pytest.approx(0.95)
    assert metrics.ood_aupr(inside, outside) == pytest.approx((1 + 1 + 3 / 4) / 3)


def test_metric_bad_arguments():
    with pytest.raises(ValueError, match="y parameter must hold at least one number and no NaN"):
        metrics.rmse([], [])
    with pytest.raises(ValueError, match="log_prob parameter must hold at least one number and no NaN"):
        metrics.nlpd([math.nan])
    with pytest.raises(ValueError, match=r"mean parameter must have the shape of y, \(2,\), got \(1,\) instead"):
        metrics.rmse([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match=r"must have the shape of y, \(3,\), got \(3, 1\) and \(3, 1\) instead"):
        metrics.coverage(np.zeros(3), np.zeros((3, 1)), np.zeros((3, 1)))
    with pytest.raises(
        ValueError, match=r"y parameter must hold 1 integer labels, one for each row of probabilities, got float64"
    ):
        metrics.accuracy([0.5], [[0.5, 0.5]])
    with pytest.raises(ValueError, match=r"AUC needs at least two classes among the labels, got only \[0\]"):
        metrics.auc([0, 0], [[0.5, 0.5], [0.4, 0.6]])


def test_a_single_class_is_certain_and_nothing_new():
    prediction = CategoricalPredictive.from_logits([torch.randn(3, 1, dtype=torch.float64)])
    torch.testing.assert_close(prediction.ood_score, torch.zeros(3, dtype=torch.float64))
