"""Mixtures, their weights and their spread, against SciPy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import brentq, minimize
from scipy.special import softmax
from scipy.stats import norm
from torch import nn

from bochner.estimators import Settings, spread
from bochner.estimators.mixture import NormalMixture, stacking_weights
from bochner.estimators.spread import Spread, learn_spread
from bochner.estimators.targets import TargetMap
from bochner.members import extractors
from bochner.members.member import Inputs, Member, candidates_to_keep, climb_to_best, weighted_variance_left

Y = np.exp(np.random.default_rng(0).normal(size=60)) + 0.5
MAPS = tuple(TargetMap.learn(kind, Y, np.ones(60)) for kind in ("identity", "power", "log"))
WEIGHT = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
MEAN = torch.tensor([[0.1, -0.6], [0.4, -0.2], [-0.3, 0.8]], dtype=torch.float64)
STD = torch.tensor([[0.3, 0.5], [0.6, 0.2], [0.4, 0.3]], dtype=torch.float64)
MIXTURE = NormalMixture(WEIGHT, MEAN, STD, MAPS)


def both(value):
    """A target for each of the two rows."""
    return torch.full((2,), float(value), dtype=torch.float64)


def density(value, row):
    """Σ w N(m(y); mean, std) m'(y), with the slope by differences."""
    total = 0.0
    for weight, mean, std, own in zip(WEIGHT, MEAN[:, row], STD[:, row], MAPS, strict=True):
        if own.kind == "log" and value <= 0:
            continue
        step = 1e-6
        up, at, down = own.forward(torch.tensor([value + step, value, value - step], dtype=torch.float64)).tolist()
        total += float(weight) * norm.pdf(at, float(mean), float(std)) * (up - down) / (2 * step)
    return total


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize("weighted", [False, True])
def test_weights_are_those_of_the_largest_posterior(weighted):
    """The rows' log density under the mixture, plus Σ log w: one row beforehand for each member."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=80)
    logs = np.stack([norm(0.3, 1).logpdf(y), norm(-1, 0.7).logpdf(y), norm(2, 1).logpdf(y)])
    row_weight = rng.uniform(0.5, 3, 80) if weighted else np.ones(80)

    def loss(free):
        w = softmax(np.append(free, 0.0))
        return -row_weight @ np.log(w @ np.exp(logs)) - np.log(w).sum()

    best = minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12})
    found = stacking_weights(torch.from_numpy(logs), torch.from_numpy(row_weight), steps=1500)
    np.testing.assert_allclose(found, softmax(np.append(best.x, 0.0)), atol=1e-4)
    usual = stacking_weights(torch.from_numpy(logs), torch.from_numpy(row_weight))
    assert loss((usual[:2] / usual[2]).log().numpy()) - best.fun < 0.01  # 300 steps are enough


def test_a_member_that_is_always_better_takes_all_but_one_row_each():
    logs = torch.zeros(3, 50, dtype=torch.float64)
    logs[1] += 100
    found = stacking_weights(logs, torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([1, 51, 1], dtype=torch.float64) / 53)


def test_a_row_of_weight_three_counts_as_three_rows():
    logs = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 20)))
    weight = torch.ones(20, dtype=torch.float64)
    weight[4] = 3
    repeated = torch.cat([logs, logs[:, 4:5], logs[:, 4:5]], 1)
    expected = stacking_weights(repeated, torch.ones(22, dtype=torch.float64))
    torch.testing.assert_close(stacking_weights(logs, weight), expected)


def test_candidates_that_count_little_are_left_out_but_never_the_first():
    weights = torch.tensor([0.001, 0.5, 0.009, 0.49], dtype=torch.float64)
    kept, shares = candidates_to_keep(weights, 0.02)
    assert kept == [0, 1, 3]
    torch.testing.assert_close(shares, weights[kept] / 0.991)


def test_a_climb_ends_on_a_top():
    class Choice:
        def __init__(self, index):
            self.index, self.score = index, [0, 2, 3, 1, 9][index]

    seen = []

    def evaluate(index):
        seen.append(index)
        return Choice(index)

    assert climb_to_best(5, 1, evaluate).index == 2
    assert sorted(seen) == [0, 1, 2, 3]  # each once
    assert climb_to_best(5, 4, evaluate).index == 4


# ------------------------------------------------------------------ what they predict


@pytest.mark.parametrize("row", [0, 1])
def test_the_density_is_the_sum_of_mapped_normals_and_integrates_to_one(row):
    for value in (-0.5, 0.4, 1.0, 2.7, 6.0):
        found = float(MIXTURE.log_prob(both(value))[row])
        assert np.exp(found) == pytest.approx(density(value, row), rel=1e-6, abs=1e-12)
    total = quad(lambda y: float(MIXTURE.log_prob(both(y))[row].exp()), -15, 40, points=[0, 0.5, 1, 2, 4], limit=300)[0]
    assert total == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("row", [0, 1])
def test_the_distribution_function_is_the_integral_of_the_density(row):
    for value in (0.6, 1.2, 2.5):
        expected = quad(lambda y: density(y, row), -15, value, points=[0, 0.5], limit=300)[0]
        assert float(MIXTURE.cdf(both(value))[row]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("level", [0.001, 0.05, 0.5, 0.8, 0.999])
def test_quantiles_are_where_the_distribution_function_has_their_level(level):
    found = MIXTURE.quantile(level)
    np.testing.assert_allclose(MIXTURE.cdf(found), level, rtol=1e-9)
    for row in (0, 1):
        expected = brentq(lambda y, row=row: float(MIXTURE.cdf(both(y))[row]) - level, -20, 60, xtol=1e-12)
        assert float(found[row]) == pytest.approx(expected, rel=1e-8)


def test_quantiles_are_found_where_members_lie_many_orders_of_magnitude_apart():
    """The logarithm's member reaches from 1e-13 to 1e13: halvings of such an interval do not end in time."""
    mean, std = MEAN.clone(), STD.clone()
    mean[-1], std[-1] = 0.0, 20.0
    assert MAPS[-1].kind == "log"
    wide = NormalMixture(torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64), mean, std, MAPS)
    levels = [1e-6, 0.05, 0.3, 0.5, 0.95, 1 - 1e-6]
    found = wide.quantiles(levels)
    for number, level in enumerate(levels):
        np.testing.assert_allclose(norm.ppf(wide.cdf(found[:, number])), norm.ppf(level), rtol=0, atol=1e-9)
    for row in (0, 1):  # a row's quantiles do not depend on the rows beside it
        alone = NormalMixture(wide.weight, mean[:, row : row + 1], std[:, row : row + 1], MAPS)
        torch.testing.assert_close(alone.quantiles(levels), found[row : row + 1], rtol=1e-12, atol=0)


def test_the_quantile_of_a_probability_is_the_value():
    for value in (0.7, 1.4, 3.0):
        for row in (0, 1):
            level = float(MIXTURE.cdf(both(value))[row])
            assert float(MIXTURE.quantile(level)[row]) == pytest.approx(value, rel=1e-8)


def test_a_mixture_of_one_has_its_own_quantiles():
    one = NormalMixture(torch.ones(1, dtype=torch.float64), MEAN[2:], STD[2:], MAPS[2:])
    expected = MAPS[2].inverse(MEAN[2] + norm.ppf(0.9) * STD[2])
    torch.testing.assert_close(one.quantile(0.9), expected)


@pytest.mark.parametrize("row", [0, 1])
def test_moments_are_those_of_the_density(row):
    mean, std = (float(value[row]) for value in MIXTURE.moments())
    first, second = (
        quad(lambda y, p=p: y**p * density(y, row), -15, 40, points=[0, 0.5, 1, 2, 4], limit=300)[0] for p in (1, 2)
    )
    # The power's kink and the limits of mean and variance cost a little.
    assert mean == pytest.approx(first, rel=5e-3)
    assert std == pytest.approx(np.sqrt(second - first**2), rel=1e-2)


def test_scores_are_normal_quantiles_of_the_probabilities_and_stay_finite():
    y = torch.tensor([1.3, 0.9], dtype=torch.float64)
    np.testing.assert_allclose(MIXTURE.scores(y), norm.ppf(MIXTURE.cdf(y)), rtol=1e-9)
    far = MIXTURE.scores(torch.tensor([1e6, -1e6], dtype=torch.float64))
    assert bool(((far.abs() > 7) & (far.abs() <= 8)).all())
    assert bool((far.sign() == torch.tensor([1, -1])).all())


def test_scaling_widens_every_member():
    wide = MIXTURE.scaled(torch.tensor([2.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(wide.std, STD * torch.tensor([2.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(wide.mean, MEAN)
    assert wide.mean.shape == (3, 2)


def test_variance_left_is_weighed_and_stays_within_one():
    class Head:
        def __init__(self, left):
            self.left = left

        def predict(self, x):
            return x[:, 0], torch.full((len(x),), self.left, dtype=torch.float64)

        def left_of(self, _, left):
            return left

    inputs = Inputs(torch.zeros(3, 1, dtype=torch.float64), None)
    found = weighted_variance_left([Member(0.25, Head(0.2)), Member(0.75, Head(1 + 1e-9))], inputs)
    torch.testing.assert_close(found, torch.full((3,), 0.8, dtype=torch.float64))


# ------------------------------------------------------------------ the spread


def scores(num, factor, seed=0):
    """Inputs, means and scores whose standard deviation is a function of the first column."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.7, 1.7, (num, 2))
    values = factor(x[:, 0]) * rng.normal(size=num)
    mean = rng.normal(size=num)
    return tuple(torch.from_numpy(value) for value in (x, mean, values, np.ones(num)))


def test_a_noise_that_grows_along_a_column_is_found():
    def factor(column):
        return np.exp(0.6 * column)

    found = learn_spread(*scores(800, factor), 5)
    assert found.features is not None
    assert not found.mean_only
    x, mean, *_ = scores(300, factor, seed=1)
    ratio = found(x, mean).numpy() / factor(x[:, 0].numpy())
    assert np.quantile(abs(ratio - 1), 0.9) < 0.3
    assert abs(np.log(ratio)).mean() < 0.15


def test_a_noise_that_grows_with_the_mean_is_found_along_the_mean_alone():
    x, mean, values, weight = scores(400, np.ones_like)
    found = learn_spread(x, mean, values * (0.5 * mean).exp(), weight, 5)
    assert found.mean_only
    inside = mean.abs() < 1.5
    ratio = found(x, mean) / (0.5 * mean).exp()
    assert float((ratio[inside] - 1).abs().max()) < 0.3


@pytest.mark.parametrize("level", [1.0, 1.8, 0.6])
def test_an_even_noise_has_a_constant_spread(level):
    x, mean, values, weight = scores(300, lambda column: level * np.ones_like(column))
    found = learn_spread(x, mean, values, weight, 5)
    assert found.features is None
    factor = found(x, mean)
    assert float(factor.std()) == pytest.approx(0, abs=1e-12)
    # Within four standard errors of a standard deviation of 300 rows.
    assert float(factor[0]) == pytest.approx(level, rel=4 / np.sqrt(600))


def test_the_constant_is_where_scipy_finds_it():
    score, weight = torch.tensor([0.5, 2.0, -3.0], dtype=torch.float64), torch.tensor([1.0, 2.0, 0.5]).double()
    found = float(spread._mode(torch.zeros(3, 0, dtype=torch.float64), score, weight, 1.0)[-1])

    def loss(c):
        return -(weight.numpy() * norm(0, np.exp(c)).logpdf(score)).sum() + 0.5 * c**2

    best = minimize(lambda c: loss(c[0]), [0.0]).x[0]
    assert found == pytest.approx(best, abs=1e-3)


def test_the_gain_of_a_spread_is_a_difference_of_log_densities():
    score, level = torch.tensor([0.3, -2.0], dtype=torch.float64), torch.tensor([0.4, -0.2], dtype=torch.float64)
    expected = norm(0, np.exp(level.numpy())).logpdf(score) - norm.logpdf(score)
    np.testing.assert_allclose(spread.log_density(score, level), expected, rtol=1e-10)


def test_far_away_the_constant_is_left_and_no_factor_is_beyond_reason():
    found = learn_spread(*scores(800, lambda column: np.exp(0.6 * column)), 5)
    far = torch.full((1, 2), 500.0, dtype=torch.float64)
    assert float(found(far, torch.zeros(1).double())[0]) == pytest.approx(np.exp(found.constant))
    assert float(Spread(30.0)(far, torch.zeros(1).double())[0]) == pytest.approx(np.exp(2))
    assert float(Spread()(far, torch.zeros(1).double())[0]) == 1


def test_two_rows_have_a_spread():
    x, mean, values, weight = scores(2, np.ones_like)
    assert torch.isfinite(learn_spread(x, mean, values, weight, 2)(x, mean)).all()


def test_networks_train_in_rounds_until_rows_they_have_not_seen_say_stop(monkeypatch):
    """Rounds that bring better, better and worse networks: the second one's stay; a network that goes astray goes back alone."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 1, generator=generator)
    y = 2 * x + 0.1 * torch.randn(600, 1, generator=generator)
    models = [nn.Sequential(nn.Linear(1, 1, bias=False)) for _ in range(2)]
    slopes = iter([(1.0, 1.0), (1.8, 1.8), (1.9, -5.0), (1.0, 1.0)])
    rounds = []

    def fake(models, *_, seed, **__):
        rounds.append(seed)
        for model, slope in zip(models, next(slopes), strict=True):
            model[0].weight.data.fill_(slope)
        return SimpleNamespace(diverged=torch.zeros(2, dtype=torch.bool))

    monkeypatch.setattr(extractors, "fit_map", fake)
    task = SimpleNamespace(settings=Settings(many_rows=10, most_rounds=9), say=lambda _: None)
    options = {"seed": [0, 1], "rows": torch.arange(300).expand(2, -1)}
    judging = [torch.arange(300), torch.arange(300, 600)]
    assert extractors._train(models, (x, y), None, judging, options, task) == [False, False]
    assert [round(model[0].weight.item(), 3) for model in models] == [1.9, 1.8]
    assert rounds == [[0, 1], [1000, 1001], [2000, 2001], [3000, 3001]]
    # A network whose outputs overflow is one that goes back, and a single round is not judged at all.
    slopes = iter([(1.0, 1.0), (1.9, np.inf), (1.0, 1.0)])
    extractors._train(models, (x, y), None, judging, options, task)
    assert [round(model[0].weight.item(), 3) for model in models] == [1.9, 1.0]
    slopes = iter([(np.nan, np.nan)])
    task.settings = Settings(most_rounds=1)
    extractors._train(models, (x, y), None, judging, options, task)


@pytest.mark.parametrize("level", [1e-20, 1e-15, 1e-6])
def test_quantiles_far_in_the_tails_are_right(level):
    mean = torch.zeros(2, 1, dtype=torch.float64)
    std = torch.tensor([[1.0], [1.2]], dtype=torch.float64)
    plain = TargetMap.learn("identity", np.array([-1.0, 1.0]), np.ones(2))
    mixture = NormalMixture(torch.tensor([0.5, 0.5], dtype=torch.float64), mean, std, (plain, plain))
    expected = brentq(lambda y: np.log(0.5 * norm.cdf(y) + 0.5 * norm.cdf(y / 1.2)) - np.log(level), -15, 0, xtol=1e-13)
    low, high = mixture.quantiles([level, 1 - level if level > 1e-16 else 1 - 1e-6])[0].tolist()
    assert low == pytest.approx(expected, rel=1e-9)
    if level == 1e-6:
        assert high == pytest.approx(-expected, rel=1e-9)
