"""The scikit-learn estimators: by the book, in the user's units, and against formulas written here."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid
from scipy.stats import binom
from sklearn.base import clone
from sklearn.datasets import make_moons
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import check_estimator

from bochner.estimators import Settings, StationaryClassifier, StationaryRegressor
from bochner.estimators.base import divide_common_rows
from bochner.estimators.evaluation import forecast
from bochner.members.heads import GaussianHead, sums_of
from bochner.members.member import Inputs
from bochner.members.rows import TrainingRows
from bochner.priors.spectra import RBF, Matern

DEFAULT = {"hidden_layer_sizes": (), "random_state": 0}
QUICK = {**DEFAULT, "settings": replace(Settings(), folds=2)}  # where the quality of the fit does not matter
FAST = {"random_state": 0, "settings": replace(Settings(), least_steps=20, most_steps=20)}
CHEAP = {
    "kernel": "rbf",
    "hidden_layer_sizes": (),
    "settings": replace(Settings(), folds=2, tuning_rows=60, judging_rows=60, tuning_steps=8, wide_anchors=60),
}
CHEAP_NETWORKS = {
    "kernel": "rbf",
    "hidden_layer_sizes": (20, 5),
    "settings": replace(CHEAP["settings"], network_rows=50, least_steps=10, most_steps=10),
    "random_state": 0,
}
BOTH = [StationaryRegressor, StationaryClassifier]


def line(num, seed=0, noise=0.1):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (num, 2))
    return x, np.sin(2 * x[:, 0]) + 0.3 * x[:, 1] + noise * rng.normal(size=num)


def target_of(kind, y):
    """The target itself, or whether it is positive."""
    return y if kind is StationaryRegressor else (y > 0).astype(int)


def answer(model, x):
    """What an estimator says of rows, as one array."""
    return np.stack(model.predict(x, return_std=True)) if hasattr(model, "sample_y") else model.predict_proba(x)


def directions(model, num=60, dim=2, distance=100.0):
    """Rows so many standard deviations away from the middle of the data, in all directions."""
    rows = np.random.default_rng(9).normal(size=(num, dim))
    rows = distance * rows / np.linalg.norm(rows, axis=1, keepdims=True)
    mean, scale = (np.array([getattr(c, name) for c in model.columns_.columns]) for name in ("mean", "scale"))
    return mean + scale * rows


@pytest.fixture(scope="module")
def fitted():
    return StationaryRegressor(**DEFAULT).fit(*line(120))


@pytest.fixture(scope="module")
def deep():
    """A regressor with networks."""
    return StationaryRegressor(**FAST).fit(*line(220))


@pytest.fixture(scope="module")
def moons():
    x, y = make_moons(120, noise=0.2, random_state=0)
    return StationaryClassifier(**DEFAULT).fit(x, y), x, y


@pytest.fixture(scope="module")
def deep_moons():
    """A classifier with networks."""
    x, y = make_moons(220, noise=0.2, random_state=0)
    return StationaryClassifier(**FAST).fit(x, y)


# ------------------------------------------------------------------ by the book


@pytest.mark.filterwarnings("ignore")  # scikit-learn's checks warn about what they try on purpose
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("options", [CHEAP, pytest.param({}, marks=pytest.mark.slow)], ids=["cheap", "default"])
def test_scikit_learns_own_checks_pass_without_exceptions(kind, options, monkeypatch):
    if options:  # a hundred fits: one lengthscale of the spread and one of a class head instead of six
        monkeypatch.setattr("bochner.estimators.spread.LENGTHSCALES", (2.0,))
        monkeypatch.setattr("bochner.estimators.classification.LENGTHSCALES", (1.0,))
    results = check_estimator(kind(**options), on_skip=None, on_fail="raise")
    assert len(results) > 40
    assert {row["check_name"] for row in results if row["status"] != "passed"} <= {"check_array_api_input"}
    assert not any(row["expected_to_fail"] for row in results)


def test_pipelines_grids_and_cross_validation_work():
    x, y = line(60)
    pipeline = make_pipeline(MinMaxScaler(), StationaryRegressor(**QUICK))
    assert cross_val_score(pipeline, x, y, cv=3).min() > 0.8
    search = GridSearchCV(StationaryClassifier(**QUICK), {"kernel": ["rbf", "matern32"]}, cv=2).fit(x, y > 0)
    assert search.best_params_["kernel"] in ("rbf", "matern32")
    assert clone(search.best_estimator_).get_params() == search.best_estimator_.get_params()


@pytest.mark.parametrize("kind", BOTH)
def test_nothing_is_predicted_before_a_fit(kind):
    with pytest.raises(NotFittedError, match="is not fitted yet"):
        kind().predict(np.zeros((2, 2)))
    with pytest.raises(NotFittedError, match="is not fitted yet"):
        kind().ood_score(np.zeros((2, 2)))


# ------------------------------------------------------------------ what must not matter


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("scale", [1024.0, 1000.0])
def test_units_of_columns_do_not_matter(kind, scale):
    x, y = line(60)
    target, new = target_of(kind, y), line(10, seed=1)[0]
    plain, moved = kind(**QUICK).fit(x, target), kind(**QUICK).fit(scale * x, target)
    np.testing.assert_allclose(answer(moved, scale * new), answer(plain, new), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(moved.ood_score(scale * new), plain.ood_score(new), rtol=1e-3, atol=1e-6)


def test_units_of_the_target_do_not_matter():
    x, y = line(60)
    new = line(10, seed=1)[0]
    plain, moved = StationaryRegressor(**QUICK).fit(x, y), StationaryRegressor(**QUICK).fit(x, 1e-3 * y - 5)
    mean, std = answer(plain, new)
    moved_mean, moved_std = answer(moved, new)
    np.testing.assert_allclose(1e3 * (moved_mean + 5), mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(1e3 * moved_std, std, rtol=1e-4)
    for name in ("noise_", "prior_std_"):
        assert 1e3 * getattr(moved, name) == pytest.approx(getattr(plain, name), rel=1e-4)
    # Where y is positive its logarithm is tried too: nearly the same map here, but not the same one.
    mean_of_positive = StationaryRegressor(**QUICK).fit(x, 1e-3 * y + 5).predict(new)
    np.testing.assert_allclose(1e3 * (mean_of_positive - 5), mean, atol=0.03)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("options", "num"), [(QUICK, 50), (CHEAP_NETWORKS, 60)], ids=["columns", "networks"])
def test_the_order_of_rows_does_not_matter(kind, options, num):
    x, y = line(num)
    target, new, mixed = target_of(kind, y), line(10, seed=1)[0], np.random.default_rng(3).permutation(num)
    first, second = kind(**options).fit(x, target), kind(**options).fit(x[mixed], target[mixed])
    np.testing.assert_allclose(answer(second, new), answer(first, new), rtol=1e-10)


@pytest.mark.parametrize("kind", BOTH)
def test_rows_that_are_repeated_are_rows_of_more_weight(kind):
    x, y = line(40)
    target, new = target_of(kind, y), line(10, seed=1)[0]
    weight = np.where(np.arange(40) % 3 == 0, 3, 1)
    many = np.repeat(np.arange(40), weight)
    weighed, repeated = kind(**QUICK).fit(x, target, weight), kind(**QUICK).fit(x[many], target[many])
    np.testing.assert_allclose(answer(weighed, new), answer(repeated, new), rtol=1e-8)
    plain = kind(**QUICK).fit(x, target)
    assert abs(answer(weighed, new) - answer(plain, new)).max() > 1e-4  # weights do something


@pytest.mark.parametrize("kind", BOTH)
def test_rows_of_no_weight_are_not_there(kind):
    x, y = line(40)
    target, new = target_of(kind, y), line(10, seed=1)[0]
    there = np.arange(40) % 4 > 0
    weighed, fewer = kind(**QUICK).fit(x, target, there.astype(float)), kind(**QUICK).fit(x[there], target[there])
    np.testing.assert_allclose(answer(weighed, new), answer(fewer, new), rtol=1e-10)
    assert weighed.ood_threshold_ == pytest.approx(fewer.ood_threshold_)


def test_a_class_of_no_weight_is_not_there():
    x, y = line(40)
    labels = np.digitize(y, [-0.5, 0.5])
    model = StationaryClassifier(**QUICK).fit(x, labels, (labels != 1).astype(float))
    assert model.classes_.tolist() == [0, 2]


@pytest.mark.parametrize("kind", BOTH)
def test_neighbours_do_not_matter(kind, fitted, moons):
    model = fitted if kind is StationaryRegressor else moons[0]
    new = line(10, seed=1)[0]
    whole = answer(model, new)
    own = whole[:, 3:4] if kind is StationaryRegressor else whole[3:4]
    np.testing.assert_allclose(answer(model, new[3:4]), own, rtol=1e-9)


@pytest.mark.parametrize("kind", BOTH)
def test_seeds_decide_and_global_random_state_is_left_alone(kind):
    x, y = line(40)
    target, new = target_of(kind, y), line(5, seed=1)[0]
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = kind(**QUICK).fit(x, target), kind(**QUICK).fit(x, target)
    np.testing.assert_array_equal(answer(first, new), answer(second, new))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


@pytest.mark.parametrize("kind", BOTH)
def test_a_fit_that_fails_leaves_the_estimator_as_it_was(kind):
    x, y = line(30)
    model = kind(**QUICK).fit(x, target_of(kind, y))
    before, state = answer(model, x), set(vars(model))
    for bad, message in ((np.full(30, 1), "at least two"), (target_of(kind, y)[:20], "same number of rows")):
        with pytest.raises(ValueError, match=message):
            model.fit(x[:, :1], bad)
    with pytest.raises(ValueError, match="false_alarm"):
        model.set_params(false_alarm=2).fit(x[:, :1], target_of(kind, y))
    np.testing.assert_array_equal(answer(model, x), before)
    assert set(vars(model)) == state
    if kind is StationaryClassifier:
        assert model.classes_.tolist() == [0, 1]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("options", [QUICK, CHEAP_NETWORKS], ids=["columns", "networks"])
def test_fits_have_the_same_bits_on_one_two_and_four_threads(kind, options):
    x, y = line(50)
    target, new, before = target_of(kind, y), line(10, seed=1)[0], torch.get_num_threads()
    # Predictions run on any number of threads; networks work in float32, and the heads behind them magnify its rounding.
    rounding = 1e-9 if options is QUICK else 100 * np.finfo(np.float32).eps
    answers = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            model = kind(**options).fit(x, target)
            assert torch.get_num_threads() == threads
            torch.set_num_threads(1)
            answers.append((answer(model, new), model.ood_score(new), model.ood_threshold_))
            torch.set_num_threads(threads)
            np.testing.assert_allclose(answer(model, new), answers[0][0], rtol=rounding)
    finally:
        torch.set_num_threads(before)
    for other in answers[1:]:
        for value, expected in zip(other, answers[0], strict=True):
            np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("kind", BOTH)
def test_the_number_of_threads_is_the_same_after_a_fit(kind, monkeypatch):
    x, y = line(30)
    own = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        kind(**QUICK).fit(x, target_of(kind, y))
        assert torch.get_num_threads() == 2

        def fail(*_):
            assert torch.get_num_threads() == 1
            raise RuntimeError("on purpose")

        for name in ("regression.fit_regression", "classifier.fit_classes"):
            monkeypatch.setattr(f"bochner.estimators.{name}", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            kind(**QUICK).fit(x, target_of(kind, y))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(own)


# ------------------------------------------------------------------ regression against formulas


def test_predictions_are_a_mixture_of_gaussian_processes(fitted):
    """Every member as a dense Gaussian process in standardised units, weighed."""
    x, y = line(120)
    new = line(15, seed=1)[0]
    mixture = fitted.mixtures_[0]
    assert [member.map.kind for member in mixture.members] == ["identity"] * len(mixture.members)
    means, variances, weights = [], [], []
    inside, outside = (fitted.columns_.transform(rows) for rows in (x, new))
    for member in mixture.members:
        head = member.head
        scale, a, s = head.features.lengthscale.numpy(), head.amplitude, head.noise

        def kernel(p, q, head=head, scale=scale, a=a):
            r = np.linalg.norm((p[:, None] - q[None]) / scale, axis=-1)
            if isinstance(head.features.spectrum, RBF):
                return a**2 * np.exp(-(r**2) / 2)
            return a**2 * (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r)

        gram, cross = kernel(inside, inside) + s**2 * np.eye(120), kernel(outside, inside)
        means.append(cross @ np.linalg.solve(gram, (y - y.mean()) / y.std()) * y.std() + y.mean())
        left = a**2 - (cross * np.linalg.solve(gram, cross.T).T).sum(1)
        variances.append((left + s**2) * y.std() ** 2)
        weights.append(member.weight)
    factor = mixture.spread(torch.from_numpy(outside), torch.zeros(15).double()).numpy()
    assert np.ptp(factor) == 0  # even noise
    means, variances = np.stack(means), np.stack(variances) * factor**2
    expected = weights @ means
    mean, std = fitted.predict(new, return_std=True)
    np.testing.assert_allclose(mean, expected, atol=1e-3)
    np.testing.assert_allclose(std, np.sqrt(weights @ (variances + (means - expected) ** 2)), rtol=1e-3)
    assert sum(weights) == pytest.approx(1)


def test_it_learns_and_knows_its_noise(fitted, deep):
    new, truth = line(200, seed=1)
    for model in (fitted, deep):
        assert model.score(new, truth) > 0.96
        assert model.noise_ == pytest.approx(0.1, rel=0.4)
        assert model.prior_std_ > 0.5
        assert np.isfinite(model.log_marginal_likelihood_)
    assert any(member.network is not None for member in deep.mixtures_[0].members)


def test_intervals_hold_the_share_that_they_promise(fitted):
    new, truth = line(400, seed=2)
    for coverage in (0.5, 0.9):
        low, high = fitted.predict_interval(new, coverage).T
        held = int(((low <= truth) & (truth <= high)).sum())
        # 400 rows, and a spread that was itself learnt from 120: eight per cent beside the binomial's five sigmas.
        assert binom.ppf(1e-4, 400, coverage - 0.08) <= held <= binom.ppf(1 - 1e-4, 400, min(coverage + 0.08, 0.99))


def test_quantiles_rise_and_hold_their_share_of_the_distribution(fitted, deep):
    new = line(20, seed=2)[0]
    levels = [0.01, 0.2, 0.5, 0.9, 0.99]
    for model in (fitted, deep):
        found = model.predict_quantiles(new, levels)
        assert found.shape == (20, 5)
        assert (np.diff(found, axis=1) > 0).all()
        ends = model.predict_interval(new, 0.8)
        np.testing.assert_allclose(ends, model.predict_quantiles(new, [0.1, 0.9]))
    assert fitted.predict_quantiles(new).shape == (20, 3)


def test_the_density_of_a_row_integrates_to_one(fitted):
    row = line(1, seed=2)[0]
    mean, std = (float(value[0]) for value in fitted.predict(row, return_std=True))
    grid = np.linspace(mean - 12 * std, mean + 12 * std, 2001)
    density = np.exp(fitted.log_prob(np.repeat(row, 2001, axis=0), grid))
    assert trapezoid(density, grid) == pytest.approx(1, abs=1e-4)
    assert trapezoid(density * grid, grid) == pytest.approx(mean, abs=1e-4)
    assert trapezoid(density * (grid - mean) ** 2, grid) == pytest.approx(std**2, rel=1e-3)
    level = trapezoid(density[: 1000 + 1], grid[: 1000 + 1])
    assert fitted.predict_quantiles(row, [level])[0, 0] == pytest.approx(mean, abs=1e-3)


def test_a_skewed_target_is_predicted_on_a_scale_of_its_own():
    x, y = line(100)
    model = StationaryRegressor(**QUICK).fit(x, np.exp(2 * y))
    assert {member.map.kind for member in model.mixtures_[0].members} <= {"log", "power", "identity"}
    assert "log" in {member.map.kind for member in model.mixtures_[0].members}
    new, truth = line(100, seed=1)
    plain = model.predict_quantiles(new, [0.5])[:, 0]
    assert np.corrcoef(np.log(plain), 2 * truth)[0, 1] > 0.95
    assert (model.predict_quantiles(new, [0.01]) > 0).mean() > 0.95
    assert np.isneginf(model.log_prob(new[:1], [-1.0])) or model.log_prob(new[:1], [-1.0])[0] < -5


def test_samples_have_the_moments_of_the_prediction(fitted, deep):
    new = line(6, seed=2)[0]
    for model in (fitted, deep):
        mean, std = model.predict(new, return_std=True)
        drawn = model.sample_y(new, 4000, random_state=3)
        assert drawn.shape == (6, 4000)
        np.testing.assert_allclose(drawn.mean(1), mean, atol=5 * std.max() / np.sqrt(4000))
        np.testing.assert_allclose(drawn.std(1), std, rtol=0.1)
        np.testing.assert_array_equal(model.sample_y(new, 3, random_state=3), model.sample_y(new, 3, random_state=3))


def test_samples_of_near_rows_go_together(fitted):
    """Far from the data, where f is all prior: two rows close by share f and not the noise."""
    far = np.array([[50.0, 0.0], [50.0 + 1e-6, 0.0], [-50.0, 3.0]])
    drawn = fitted.sample_y(far, 3000)
    assert np.corrcoef(drawn)[0, 1] > 0.7
    assert abs(np.corrcoef(drawn)[0, 2]) < 0.15
    assert drawn.std() == pytest.approx(fitted.prior_std_, rel=0.1)


def test_rows_that_are_repeated_or_many_can_be_sampled(fitted):
    x, _ = line(120)
    assert np.isfinite(fitted.sample_y(np.vstack([x, x, line(200, seed=4)[0]]), 2)).all()


def test_streaming_gives_the_posterior_of_all_rows(fitted):
    x, y = line(120)
    parts = StationaryRegressor(**QUICK).partial_fit(x[:60], y[:60], np.ones(60))
    first = StationaryRegressor(**QUICK).fit(x[:60], y[:60])
    np.testing.assert_array_equal(parts.predict(x), first.predict(x))
    threshold = parts.ood_threshold_
    parts.partial_fit(x[60:90], y[60:90]).partial_fit(x[90:], y[90:], np.full(30, 2.0))
    weight = np.r_[np.ones(90), np.full(30, 2.0)]
    inputs = torch.from_numpy(parts.columns_.transform(x))
    for member in parts.mixtures_[0].members:
        rows = TrainingRows(inputs, member.map.forward(torch.from_numpy(y))[:, None], torch.from_numpy(weight))
        whole = GaussianHead(
            member.head.features, sums_of(member.head.features, rows), member.head.amplitude, member.head.noise
        )
        torch.testing.assert_close(member.head.mean, whole.mean, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(member.head.sums.gram, whole.sums.gram)
        assert member.head.sums.count == pytest.approx(150)
        assert member.head.log_evidence == pytest.approx(whole.log_evidence)
    assert parts.ood_threshold_ == threshold
    assert fitted.predict(x).std() == pytest.approx(parts.predict(x).std(), rel=0.1)


def test_later_rows_reach_the_networks_too(deep):
    x, y = line(30, seed=6)
    model = copy.deepcopy(deep)
    before = [member.head.sums.count for member in model.mixtures_[0].members]
    model.partial_fit(x, y)
    assert [member.head.sums.count for member in model.mixtures_[0].members] == [total + 30 for total in before]
    assert model.log_prob(x, y).mean() > deep.log_prob(x, y).mean()


def test_streaming_refuses_what_does_not_fit(fitted):
    x, y = line(5, seed=3)
    with pytest.raises(ValueError, match="X and y must have the same number of rows, got 5 and 4"):
        fitted.partial_fit(x, y[:4])
    refused = [
        (
            np.zeros(5),
            "sample_weight parameter cannot be used: Sample weights must contain at least one non-zero number",
        ),
        (np.arange(5.0), "sample_weight parameter must hold a positive number for each row, got 0 for some"),
        (np.ones(4), r"sample_weight.shape == \(4,\), expected \(5,\)"),
        (np.full(5, np.nan), "Input sample_weight contains NaN"),
    ]
    for weight, message in refused:
        with pytest.raises(ValueError, match=message):
            fitted.partial_fit(x, y, weight)
    with pytest.raises(ValueError, match=r"The y parameter must hold 1 targets, got shape \(5, 2\) instead"):
        fitted.partial_fit(x, np.stack([y, y], 1))


def test_streaming_a_target_that_has_no_logarithm_does_not_spoil_the_model():
    x, y = line(60)
    model = StationaryRegressor(**QUICK).fit(x, np.exp(2 * y))
    assert "log" in {member.map.kind for member in model.mixtures_[0].members}
    before = model.predict(x)
    with pytest.raises(ValueError, match="positive"):
        model.partial_fit(x[:2] + 0.1, [-1.0, 2.0])
    np.testing.assert_array_equal(model.predict(x), before)


def test_several_targets_are_separate_fits():
    x, y = line(50)
    both = np.stack([y, 100 - 30 * x[:, 1] ** 2], 1)
    model, new = StationaryRegressor(**QUICK).fit(x, both), line(12, seed=1)[0]
    alone = [StationaryRegressor(**QUICK).fit(x, column) for column in both.T]
    mean, std = model.predict(new, return_std=True)
    assert mean.shape == std.shape == (12, 2)
    for k, single in enumerate(alone):
        np.testing.assert_allclose(mean[:, k], single.predict(new), rtol=1e-8)
        np.testing.assert_allclose(std[:, k], single.predict(new, return_std=True)[1], rtol=1e-8)
        np.testing.assert_allclose(model.predict_interval(new)[..., k], single.predict_interval(new), rtol=1e-8)
        assert model.noise_[k] == pytest.approx(single.noise_)
        assert model.prior_std_[k] == pytest.approx(single.prior_std_)
    total = sum(single.log_prob(new, column) for single, column in zip(alone, both[:12].T, strict=True))
    np.testing.assert_allclose(model.log_prob(new, both[:12]), total, rtol=1e-8)
    inputs = Inputs(torch.from_numpy(model.columns_.transform(new)), None)
    for mixture, single in zip(model.mixtures_, alone, strict=True):
        np.testing.assert_allclose(mixture.left(inputs), single.mixtures_[0].left(inputs), rtol=1e-8)
    assert model.sample_y(new, 3).shape == (12, 3, 2)
    assert model.log_marginal_likelihood_ == pytest.approx(sum(single.log_marginal_likelihood_ for single in alone))
    with pytest.raises(ValueError, match="The y parameter must hold 2 targets, got 1"):
        model.log_prob(new, both[:12, 0])


def test_a_noise_that_grows_is_known():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (250, 1))
    y = x[:, 0] + np.exp(x[:, 0] - 1.5) * rng.normal(size=250)
    model = StationaryRegressor(**QUICK).fit(x, y)
    _, std = model.predict([[-1.5], [1.5]], return_std=True)
    assert std[1] > 3 * std[0]


def test_a_forecast_is_what_the_methods_say(deep, deep_moons):
    x, y = line(20, seed=1)
    said, interval = forecast(deep, x, y, 0.8), deep.predict_interval(x, 0.8)
    np.testing.assert_array_equal(said.values, np.column_stack([*deep.predict(x, return_std=True), interval]))
    np.testing.assert_array_equal(said.scores, deep.ood_score(x))
    np.testing.assert_array_equal(said.log_density, deep.log_prob(x, y))
    assert forecast(deep, x).log_density is None
    x, y = make_moons(20, noise=0.2, random_state=1)
    said = forecast(deep_moons, x, y)
    np.testing.assert_array_equal(said.values, deep_moons.predict_proba(x))
    np.testing.assert_array_equal(said.scores, deep_moons.ood_score(x))


# ------------------------------------------------------------------ classes


def test_probabilities_are_the_weighted_mean_of_what_members_say(moons, deep_moons):
    new = make_moons(30, noise=0.3, random_state=1)[0]
    for model in (moons[0], deep_moons):
        mixture = model.mixtures_[0]
        inputs = Inputs(torch.from_numpy(model.columns_.transform(new)), mixture.extractors)
        said = np.stack([m.head.probabilities(inputs.of(m.network)).numpy() for m in mixture.members])
        weights = np.array([m.weight for m in mixture.members])
        found = model.predict_proba(new)
        np.testing.assert_allclose(found, np.tensordot(weights, said, 1), rtol=1e-9)
        np.testing.assert_allclose(found.sum(1), 1, rtol=1e-9)
        assert weights.sum() == pytest.approx(1)
        # A class that all members rule out stays ruled out.
        assert (found <= said.max(0) + 1e-12).all()
        assert (found >= said.min(0) - 1e-12).all()
    assert any(member.network is not None for member in deep_moons.mixtures_[0].members)


def test_classes_are_learnt(moons, deep_moons):
    new, labels = make_moons(300, noise=0.2, random_state=1)
    for model in (moons[0], deep_moons):
        assert model.score(new, labels) > 0.93
        own = model.predict_proba(new)[np.arange(300), labels]
        np.testing.assert_allclose(model.log_prob(new, labels), np.log(own), rtol=1e-9)
        assert -model.log_prob(new, labels).mean() < 0.25
        np.testing.assert_array_equal(model.predict(new), model.predict_proba(new).argmax(1))


def test_labels_may_be_texts_and_three():
    x, y = line(90)
    labels = np.array(["low", "middle", "high"])[np.digitize(y, [-0.4, 0.5])]
    model = StationaryClassifier(**QUICK).fit(x, labels)
    assert model.classes_.tolist() == ["high", "low", "middle"]
    assert model.score(x, labels) > 0.85
    assert model.predict_proba(x).shape == (90, 3)
    with pytest.raises(ValueError, match="The y parameter holds a class that was not learnt: 'other'"):
        model.log_prob(x[:2], ["low", "other"])
    with pytest.raises(ValueError, match="X and y must have the same number of rows, got 2 and 1"):
        model.log_prob(x[:2], ["low"])


# ------------------------------------------------------------------ rows unlike the training data


@pytest.mark.parametrize("kind", BOTH)
def test_the_threshold_keeps_its_false_alarm_rate(kind):
    x, y = line(150)
    model = kind(**QUICK, false_alarm=0.2).fit(x, target_of(kind, y))
    scores = model.ood_score(line(400, seed=5)[0])
    assert ((scores >= 0) & (scores <= 1)).all()
    alarms = int((scores > model.ood_threshold_).sum())
    # The threshold is itself a quantile of 150 rows, with a standard error of three per cent: twice that and the binomial's.
    assert binom.ppf(1e-3, 400, 0.13) <= alarms <= binom.ppf(1 - 1e-3, 400, 0.27)


def test_the_score_is_the_share_of_ordinary_rows_that_are_as_strange(fitted):
    """Both cues written out: variance left, and the leverage of a linear model, of rows that were left out."""
    x, _ = line(120)
    near, far = line(20, seed=1)[0], directions(fitted)[:5]
    design = np.column_stack([fitted.columns_.transform(x), np.ones(120)])
    new = np.column_stack([fitted.columns_.transform(np.vstack([near, far])), np.ones(25)])
    ridge = 1e-6 * 120 * np.eye(3)
    precision = design.T @ design + ridge
    reference = [np.sort(fitted.mixtures_[0].judged_left)]
    # A row's leverage by a sum over all others.
    others = [row @ np.linalg.solve(precision - np.outer(row, row), row) for row in design]
    reference.append(np.sort(others))
    left = fitted.mixtures_[0].left(Inputs(torch.from_numpy(new[:, :-1]), None)).numpy()
    cues = [left, (new * np.linalg.solve(precision, new.T).T).sum(1)]
    shares = []
    for known, cue in zip(reference, cues, strict=True):
        beyond = (known[None] >= cue[:, None]).sum(1)
        shares.append(np.where(beyond > 0, (beyond + 1) / 121, known.max() / cue / 121))
    expected = 1 - np.minimum(1, 2 * np.minimum(*shares))
    np.testing.assert_allclose(fitted.ood_score(np.vstack([near, far])), expected, atol=1e-6)
    assert (expected[20:] > 0.98).all()


@pytest.mark.parametrize("kind", BOTH)
def test_a_row_that_breaks_a_relation_between_columns_is_strange(kind):
    rng = np.random.default_rng(0)
    first = rng.normal(size=100)
    x = np.column_stack([first, first + 0.05 * rng.normal(size=100)])
    model = kind(**QUICK).fit(x, target_of(kind, np.sin(first) + 0.1 * rng.normal(size=100)))
    assert model.ood_score([[1.0, -1.0]])[0] > max(0.95, model.ood_threshold_)
    assert model.ood_score([[1.0, 1.0]])[0] < model.ood_threshold_


@pytest.mark.parametrize("name", ["fitted", "deep", "moons", "deep_moons"])
def test_far_rows_have_a_score_of_one(name, request):
    model = request.getfixturevalue(name)
    model = model[0] if isinstance(model, tuple) else model
    far = directions(model)
    scores = model.ood_score(far)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert (scores > model.ood_threshold_).mean() >= 0.95
    assert scores.mean() > (0.9 if "deep" in name else 0.999)


@pytest.mark.parametrize("name", ["fitted", "deep"])
def test_far_away_predictions_are_those_of_the_prior(name, request):
    model = request.getfixturevalue(name)
    mean, std = model.predict(directions(model), return_std=True)
    assert std.mean() >= 0.95 * model.prior_std_
    y = line(120 if name == "fitted" else 220)[1]
    assert abs(mean - y.mean()).mean() < 0.2 * y.std()


@pytest.mark.parametrize("name", ["moons", "deep_moons"])
def test_far_away_all_classes_are_equally_probable(name, request):
    model = request.getfixturevalue(name)
    model = model[0] if isinstance(model, tuple) else model
    assert (abs(model.predict_proba(directions(model)) - 0.5) < 0.05).all(1).mean() >= 0.95


def test_far_away_a_spread_along_the_mean_leaves_the_prior():
    rng = np.random.default_rng(0)
    rng.normal(size=(60, 2))
    x = rng.uniform(-2, 2, (150, 2))
    mean = 3 * x[:, 0]
    model = StationaryRegressor(**QUICK).fit(x, mean + (0.02 + 0.6 * abs(mean)) * rng.normal(size=150))
    assert model.mixtures_[0].spread.features is not None
    _, std = model.predict(directions(model), return_std=True)
    assert std.mean() == pytest.approx(model.prior_std_, rel=0.05)


# ------------------------------------------------------------------ odd tables


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "x",
    [
        np.random.default_rng(0).normal(size=(50, 200)),
        np.column_stack([np.linspace(0, 1, 30), np.full(30, 7.0)]),
        np.ones((30, 2)),
        np.array([[0.0], [1.0]]),
        np.array([[0.0], [0.0]]),
        np.column_stack([np.linspace(0, 1, 30), np.where(np.arange(30) % 3, np.nan, 1e90)]),
        np.arange(24).reshape(24, 1) % 2 == 0,
    ],
    ids=["50x200", "constant column", "all equal", "two rows", "two equal rows", "huge and missing", "booleans"],
)
def test_odd_tables_are_learnt_from(kind, x):
    y = np.arange(len(x)) % 2
    model = kind(**QUICK).fit(x, y if kind is StationaryClassifier else y + 0.1 * np.arange(len(x)))
    assert np.isfinite(answer(model, x)).all()
    assert ((model.ood_score(x) >= 0) & (model.ood_score(x) <= 1)).all()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("seed", [2, 3, 19])
def test_columns_with_long_tails_are_learnt_from(kind, seed):
    logs = np.random.default_rng(seed).normal(size=40)
    x = np.exp(8 * logs)[:, None]
    model = kind(**QUICK).fit(x, target_of(kind, logs))
    assert np.isfinite(answer(model, x)).all()


def test_a_class_of_one_row_is_a_class():
    x, y = line(40)
    labels = np.where(np.arange(40) == 7, 2, (y > 0).astype(int))
    model = StationaryClassifier(**QUICK).fit(x, labels)
    assert model.classes_.tolist() == [0, 1, 2]
    assert model.predict_proba(x).shape == (40, 3)


def test_a_hundred_classes_of_two_rows_are_classes():
    x = np.random.default_rng(0).normal(size=(100, 3)).repeat(2, axis=0)
    x += 0.01 * np.random.default_rng(1).normal(size=x.shape)
    few = replace(Settings(), tuning_rows=60, folds=2)  # quicker
    model = StationaryClassifier(hidden_layer_sizes=(), kernel="matern32", random_state=0, settings=few)
    model.fit(x, np.arange(200) // 2)
    probability = model.predict_proba(x)
    assert probability.shape == (200, 100)
    np.testing.assert_allclose(probability.sum(1), 1, rtol=1e-9)
    assert model.score(x, np.arange(200) // 2) > 0.8


def test_lists_kernels_and_verbosity_are_understood(capsys):
    x, y = line(30)
    model = StationaryRegressor(
        kernel=[Matern(2.5), "exponential"], hidden_layer_sizes=[], random_state=0, verbose=True
    )
    model.fit(x.tolist(), y.tolist())
    assert "bochner: tuning on 30 rows, judging on 30" in capsys.readouterr().err
    assert {member.head.features.spectrum.nu for member in model.mixtures_[0].members} <= {2.5, 0.5}


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "rfb"}, "The kernel parameter must be one of .*, got 'rfb' instead. Did you mean 'rbf'?"),
        ({"kernel": ()}, "The kernel parameter must name at least one kernel, got an empty sequence"),
        ({"kernel": Matern(1.5, product=True)}, r"The kernel parameter must be isotropic \(not a product\), got"),
        ({"hidden_layer_sizes": 10}, r"The hidden_layer_sizes parameter must be a tuple of positive widths.* got 10"),
        ({"hidden_layer_sizes": (10, 0)}, r"hidden_layer_sizes parameter must be a tuple .* got \(10, 0\) instead"),
        ({"hidden_layer_sizes": (1.5,)}, r"hidden_layer_sizes parameter must be a tuple .* got \(1.5,\) instead"),
        ({"false_alarm": 0}, "The false_alarm parameter must lie between 0 and 1, got 0 instead"),
        ({"false_alarm": 1.0}, r"The false_alarm parameter must lie between 0 and 1, got 1\.0 instead"),
        ({"false_alarm": "few"}, "The false_alarm parameter must lie between 0 and 1, got 'few' instead"),
        ({"device": "gpu"}, "The device parameter must be one of auto, cpu, cuda, got 'gpu' instead"),
        ({"settings": {"folds": 3}}, "The settings parameter must be a Settings, got dict instead"),
    ],
)
def test_parameters_out_of_range_are_refused(kind, options, message):
    x, y = line(10)
    with pytest.raises(ValueError, match=message):
        kind(**options).fit(x, target_of(kind, y))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"The device parameter asks for a GPU \('cuda'\), but torch sees none"):
        StationaryRegressor(device="cuda").fit(*line(10))


@pytest.mark.parametrize("kind", BOTH)
def test_tables_that_cannot_be_learnt_from_are_refused(kind):
    x, y = line(10)
    y, model = target_of(kind, y), kind(**QUICK)
    cases = [
        (x[:1], y[:1], None, "1 sample.* while a minimum of 2 is required"),
        (np.full((10, 2), np.inf), y, None, "contains infinity"),
        (np.where(x > 1e9, x, 1e200), y, None, r"Column 0 of X holds values beyond 1e\+100"),
        (x[:8], y, None, "X and y must have the same number of rows, got 8 and 10 instead"),
        (x, None, None, "requires y to be passed, but the target y is None"),
        (x, y, -np.ones(10), "Negative values in data passed to `sample_weight`"),
        (x, y, np.eye(10)[0], "sample_weight parameter must be positive for at least 2 rows, got 1"),
        (x, y, np.ones(9), r"sample_weight.shape == \(9,\), expected \(10,\)"),
        (x, np.full(10, 3), None, "The y parameter must hold at least two"),
        (np.column_stack([x, np.full(10, np.nan)]), y, None, "Column 2 of X has no values"),
    ]
    for table, target, weight, message in cases:
        with pytest.raises(ValueError, match=message):
            model.fit(table, target, weight)


@pytest.mark.parametrize("kind", BOTH)
def test_missing_targets_are_refused_without_a_warning(kind):
    with pytest.raises(ValueError, match="Input y contains NaN"):
        kind(**QUICK).fit(line(10)[0], np.r_[np.nan, np.zeros(4), np.ones(5)])


def test_targets_that_are_no_numbers_are_refused():
    x, y = line(10)
    cases = [
        (np.array(["a"] * 10), "The y parameter must hold numbers .*; for classes use StationaryClassifier"),
        (np.zeros((10, 2, 2)), "Found array with dim 3"),
        (np.zeros((10, 0)), r"Found array with 0 feature\(s\)"),
        (np.r_[1e101, y[1:]], r"The y parameter holds values beyond 1e\+100 in size"),
        (np.stack([y, np.where(y > 0, np.nan, y)], 1), "Input y contains NaN"),
        (np.stack([y, np.full(10, 2.0)], 1), "at least two different values in column 1, got 2 only"),
        (np.full(10, 2.0), "at least two different values, got 2 only"),
    ]
    for target, message in cases:
        with pytest.raises(ValueError, match=message):
            StationaryRegressor(**QUICK).fit(x, target)


def test_labels_that_are_no_classes_are_refused():
    x, y = line(10)
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        StationaryClassifier(**QUICK).fit(x, y)
    with pytest.raises(ValueError, match="must hold at least two classes, got one class only: 'up'"):
        StationaryClassifier(**QUICK).fit(x, ["up"] * 10)


def test_questions_that_have_no_answer_are_refused(fitted):
    x, y = line(5)
    with pytest.raises(ValueError, match="return_cov parameter must be False: a mixture has no covariance"):
        fitted.predict(x, return_cov=True)
    for number in (0, 1.5, -2):
        with pytest.raises(ValueError, match=f"n_samples parameter must be an integer of at least 1, got {number}"):
            fitted.sample_y(x, number)
    for levels in ([], [0.5, 1.0], [0.0], [np.nan]):
        with pytest.raises(ValueError, match="The quantiles parameter must hold numbers between 0 and 1, got"):
            fitted.predict_quantiles(x, levels)
    for coverage in (0, 1, 1.5):
        with pytest.raises(ValueError, match=f"coverage parameter must lie between 0 and 1, got {coverage} instead"):
            fitted.predict_interval(x, coverage)
    with pytest.raises(ValueError, match="X and y must have the same number of rows, got 5 and 4"):
        fitted.log_prob(x, y[:4])
    with pytest.raises(ValueError, match="X has 1 features, but StationaryRegressor is expecting 2"):
        fitted.predict(x[:, :1])
    with pytest.raises(ValueError, match="contains infinity"):
        fitted.predict(np.full((2, 2), np.inf))
    with pytest.raises(ValueError, match="requires y to be passed"):
        fitted.log_prob(x, None)


# ------------------------------------------------------------------ few different rows


def test_equal_rows_that_are_no_copies_may_judge_apart():
    """Six different inputs, five different targets: their frequencies are the best forecast there is."""
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.integers(0, 3, 3000), rng.integers(0, 2, 3000)]).astype(float)
    y = np.clip(np.round(3 + x[:, 0] - x[:, 1] + rng.normal(size=3000)), 1, 5)
    cell, fit, new = (x @ [2, 1]).astype(int), slice(1500), slice(1500, None)
    counts = np.zeros((6, 5))
    np.add.at(counts, (cell[fit], y[fit].astype(int) - 1), 1)
    frequency = counts / counts.sum(1, keepdims=True)

    options = {"hidden_layer_sizes": (), "random_state": 0}
    classifier = StationaryClassifier(**options).fit(x[fit], y[fit])
    best = -np.mean(np.log(frequency[cell[new], y[new].astype(int) - 1]))
    assert -classifier.log_prob(x[new], y[new]).mean() < best + 0.015  # 0.029 above it while equal rows judged together
    std = np.sqrt(frequency @ np.arange(1, 6) ** 2 - (frequency @ np.arange(1, 6)) ** 2)
    regressor = StationaryRegressor(**options).fit(x[fit], y[fit])
    ratio = regressor.predict(x[new], return_std=True)[1] / std[cell[new]]
    assert 0.75 < ratio.min() < ratio.max() < 1.4  # 1.4 to 2.2 while equal rows judged together


def test_copies_of_a_row_are_still_one_row():
    """Without other targets for the same inputs, three copies are a weight of three, and nothing is divided."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2))
    y = np.sin(x[:, 0])
    first, weight = divide_common_rows(x, np.arange(40), np.full(40, 3.0), 1.0)
    np.testing.assert_array_equal(first, np.arange(40))
    np.testing.assert_array_equal(weight, np.full(40, 3.0))
    x[1] = x[0]  # now the first two have the same inputs and other targets
    first, weight = divide_common_rows(x, np.arange(40), np.array([2.0, 7.5, *[1.0] * 38]), 1.0)
    assert first[:8].tolist() == [0, 0, 1, 1, 1, 1, 1, 2]
    np.testing.assert_allclose(weight[:8], [1, 1, *[1.5] * 5, 1])
    table = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])[np.arange(40) % 4]  # four combinations, 40 rows
    first, weight = divide_common_rows(table, np.arange(4), np.full(4, 10.0), 1.0)
    assert len(first) == 20
    options = {"hidden_layer_sizes": (), "random_state": 0}
    weighed = StationaryRegressor(**options).fit(x, y, np.r_[3.0, 2.0, np.ones(38)])
    copied = StationaryRegressor(**options).fit(x[np.r_[0, 0, :40, 1]], y[np.r_[0, 0, :40, 1]])
    np.testing.assert_allclose(weighed.predict(x), copied.predict(x), rtol=1e-9)


def test_four_different_rows_are_learnt():
    x = np.random.default_rng(0).integers(0, 2, (200, 2)).astype(float)
    y = (x[:, 0] != x[:, 1]).astype(int)
    options = {"hidden_layer_sizes": (), "random_state": 0}
    assert StationaryClassifier(**options).fit(x, y).log_prob(x, y).mean() > -0.05
    mean, std = StationaryRegressor(**options).fit(x, y.astype(float)).predict(x, return_std=True)
    assert np.abs(mean - y).max() < 0.05
    assert std.max() < 0.1
