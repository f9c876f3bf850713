"""The scikit-learn estimators: by the book, in the user's units, and against formulas written here."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom, norm
from sklearn.base import clone
from sklearn.datasets import make_moons
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import check_estimator

from bochner import Matern, Recipe, estimator_base, estimators
from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.posteriors.closed_form import ClosedForm, features

SMALL = {"width": 60, "random_state": 0}


def line(num, seed=0, noise=0.1):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (num, 2))
    return x, np.sin(2 * x[:, 0]) + 0.3 * x[:, 1] + noise * rng.normal(size=num)


@pytest.fixture(scope="module")
def fitted():
    return StationaryRegressor(kernel="matern32", width=200, random_state=0).fit(*line(150))


@pytest.fixture(scope="module")
def moons():
    x, y = make_moons(200, noise=0.15, random_state=0)
    return StationaryClassifier(width=200, random_state=0).fit(x, y), x, y


# ------------------------------------------------------------------ by the book


@pytest.mark.filterwarnings("ignore")  # scikit-learn's checks warn about what they try on purpose
@pytest.mark.parametrize("kind", [StationaryRegressor, StationaryClassifier])
def test_scikit_learns_own_checks_pass_without_exceptions(kind, monkeypatch):
    for name, value in {
        "TRIAL_STEPS": 3,
        "TUNING_STEPS": 10,
        "EPOCHS": 20,
    }.items():  # hundreds of fits: what is checked is manners
        monkeypatch.setattr(estimator_base, name, value)
    monkeypatch.setattr(estimators, "CLASS_AMPLITUDES", (1.0, 4.0))
    found = check_estimator(kind(width=20, kernel="rbf", hidden=(4,), networks=1), on_skip=None)
    assert {row["check_name"] for row in found if row["status"] != "passed"} <= {"check_array_api_input"}
    assert not any(row["expected_to_fail"] for row in found)


def test_pipelines_grids_and_cross_validation_work():
    x, y = line(60)
    pipeline = make_pipeline(MinMaxScaler(), StationaryRegressor(**SMALL))
    assert cross_val_score(pipeline, x, y, cv=3).min() > 0.8
    search = GridSearchCV(StationaryRegressor(**SMALL), {"kernel": ["rbf", "matern32"]}, cv=2).fit(x, y)
    assert search.best_params_["kernel"] in ("rbf", "matern32")
    assert clone(search.best_estimator_).get_params() == search.best_estimator_.get_params()


# ------------------------------------------------------------------ against formulas


def test_prediction_is_that_of_a_gaussian_process_on_the_features(fitted):
    """The dual form, with its N×N matrix, written out in standardised units."""
    x, y = line(150)
    new, _ = line(20, seed=1)
    model, a = fitted.model_, fitted.amplitude_

    def phi(rows):
        with torch.no_grad():
            return features(model, torch.from_numpy((rows - x.mean(0)) / x.std(0))).numpy() * a / np.sqrt(200)

    noise = fitted.noise_ / y.std()
    gram = phi(x) @ phi(x).T + noise**2 * np.eye(150)
    cross = phi(new) @ phi(x).T
    mean = cross @ np.linalg.solve(gram, (y - y.mean()) / y.std())
    variance = (phi(new) ** 2).sum(1) - (cross * np.linalg.solve(gram, cross.T).T).sum(1) + noise**2
    found, std = fitted.predict(new, return_std=True)
    np.testing.assert_allclose(found, mean * y.std() + y.mean(), rtol=1e-8)
    np.testing.assert_allclose(std, np.sqrt(variance) * y.std(), rtol=1e-7)
    evidence = -0.5 * (
        ((y - y.mean()) / y.std()) @ np.linalg.solve(gram, (y - y.mean()) / y.std())
        + np.linalg.slogdet(2 * np.pi * gram)[1]
    )
    assert fitted.log_marginal_likelihood_ == pytest.approx(evidence - 150 * np.log(y.std()), rel=1e-8)


def test_units_do_not_matter():
    x, y = line(80)
    scale, shift = np.array([1000.0, 0.01]), np.array([-5.0, 3.0])
    plain = StationaryRegressor(**SMALL).fit(x, y)
    moved = StationaryRegressor(**SMALL).fit(scale * x + shift, 40 * y - 7)
    new, _ = line(10, seed=1)
    mean, std = plain.predict(new, return_std=True)
    moved_mean, moved_std = moved.predict(scale * new + shift, return_std=True)
    np.testing.assert_allclose(moved_mean, 40 * mean - 7, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(moved_std, 40 * std, rtol=1e-5)
    np.testing.assert_allclose(moved.lengthscale_, scale * plain.lengthscale_, rtol=1e-5)
    np.testing.assert_allclose(moved.ood_score(scale * new + shift), plain.ood_score(new), rtol=1e-5)


def test_intervals_and_samples_follow_the_moments(fitted):
    new, _ = line(5, seed=2)
    mean, std = fitted.predict(new, return_std=True)
    low, high = fitted.predict_interval(new, coverage=0.8).T
    np.testing.assert_allclose(high - mean, norm.ppf(0.9) * std, rtol=1e-10)
    np.testing.assert_allclose(mean - low, norm.ppf(0.9) * std, rtol=1e-10)
    drawn = fitted.sample_y(new, 4000, random_state=3)
    assert drawn.shape == (5, 4000)
    np.testing.assert_allclose(drawn.mean(1), mean, atol=5 * std.max() / np.sqrt(4000))
    np.testing.assert_allclose(drawn.std(1), std, rtol=5 / np.sqrt(2 * 4000))


def test_streaming_gives_the_posterior_of_all_rows():
    x, y = line(120)
    parts = StationaryRegressor(**SMALL)
    for rows in (slice(0, 60), slice(60, 90), slice(90, 120)):
        parts.partial_fit(x[rows], y[rows])
    t = torch.from_numpy((y - parts.y_mean_) / parts.y_scale_)[:, None]
    whole = ClosedForm(parts.model_, parts._inputs(x), t, amplitude=parts.amplitude_)
    found = parts.members_[0].posterior
    torch.testing.assert_close(found.mean, whole.mean, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.factor, whole.factor, rtol=1e-8, atol=1e-8)
    assert [member.posterior.statistics.count for member in parts.members_] == [120] * 3
    expected = whole.log_marginal_likelihood - 120 * np.log(parts.y_scale_)
    assert parts.log_marginal_likelihood_ == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", [StationaryRegressor, StationaryClassifier])
def test_the_left_out_score_is_that_of_a_fit_without_the_row(kind):
    x, y = line(40)
    model = kind(**SMALL).fit(x, y if kind is StationaryRegressor else y > 0)
    rows = model._inputs(x)
    found = model._scores(rows, left_out=True)
    with torch.no_grad():
        phi = features(model.model_, rows).numpy()
    k, a = phi.shape[1], model.amplitude_
    for i in (0, 7, 39):
        others = np.delete(phi, i, axis=0)
        precision = model.row_weight_ * others.T @ others + k / a**2 * np.eye(k)
        share = phi[i] @ np.linalg.solve(precision, phi[i]) / (a**2 * phi[i] @ phi[i] / k)
        assert found[i] == pytest.approx(share, rel=1e-6)


def test_the_threshold_keeps_its_false_alarm_rate_and_far_rows_are_above_it():
    x, y = line(300)
    model = StationaryRegressor(width=300, random_state=0, false_alarm=0.1, hidden=()).fit(x, y)
    alarms = (model.ood_score(line(400, seed=5)[0]) > model.ood_threshold_).sum()
    # The threshold is itself a quantile of 300 rows: twice the binomial's variance and a margin.
    assert binom.ppf(1e-5, 400, 0.06) <= alarms <= binom.ppf(1 - 1e-5, 400, 0.14)
    far = np.random.default_rng(0).normal(size=(50, 2))
    far = 20 * far / np.linalg.norm(far, axis=1, keepdims=True)
    assert (model.ood_score(far) > model.ood_threshold_).all()
    assert model.ood_score(far).mean() > 0.8


# ------------------------------------------------------------------ classes


def test_classes_are_learnt_and_forgotten_far_away(moons):
    model, x, y = moons
    assert model.score(x, y) > 0.97
    far = model.predict_proba(30 * x / np.linalg.norm(x, axis=1, keepdims=True))
    assert abs(far - 0.5).mean() < 0.1
    assert (model.ood_score(30 * x) > model.ood_threshold_).mean() > 0.95


def test_a_rows_probability_does_not_depend_on_its_neighbours(moons):
    model, x, _ = moons
    np.testing.assert_allclose(model.predict_proba(x[5:6]), model.predict_proba(x)[5:6], rtol=1e-10)
    np.testing.assert_allclose(model.predict_proba(x).sum(1), 1, rtol=1e-12)


def test_labels_may_be_texts():
    x, y = line(60)
    model = StationaryClassifier(**SMALL).fit(x, np.where(y > 0, "up", "down"))
    assert list(model.classes_) == ["down", "up"]
    assert set(model.predict(x)) == {"down", "up"}


# ------------------------------------------------------------------ the other parameters


@pytest.mark.parametrize("options", [{"hidden": ()}, {"hidden": [8]}])
def test_laplace_learns_both_tasks(options):
    x, y = line(150)
    new, truth = line(100, seed=3)
    model = StationaryRegressor(**SMALL, **options, posterior="laplace").fit(x, y)
    assert model.score(new, truth) > 0.9
    classes = StationaryClassifier(**SMALL, **options, posterior="laplace").fit(x, y > 0)
    assert classes.score(new, truth > 0) > 0.85  # noise decides the rest
    assert not hasattr(model, "sample_y")
    assert hasattr(model, "lengthscale_") != bool(model.hidden)


def test_kernels_activations_and_verbosity(capsys):
    x, y = line(60)
    model = StationaryRegressor(**SMALL, kernel=Matern(nu=2.0), activation="triangle", verbose=True).fit(x, y)
    assert model.score(x, y) > 0.9
    assert "bochner: tuning 2 lengthscales, noise and amplitude on 60 rows" in capsys.readouterr().err


def test_constant_columns_change_nothing():
    x, y = line(60)
    model = StationaryRegressor(**SMALL).fit(np.column_stack([x, np.full(60, 1e6 + 0.1)]), y)
    assert model.x_scale_[2] == 1.0
    assert model.score(np.column_stack([x, np.full(60, 1e6 + 0.1)]), y) > 0.9


def test_diverged_training_says_so(monkeypatch):
    monkeypatch.setattr("bochner.estimator_base.Recipe", lambda *_, **__: Recipe(3, 20, lr=1e300))
    with pytest.raises(ValueError, match="Training diverged; use fewer or narrower hidden layers"):
        StationaryRegressor(**SMALL, hidden=(4,), posterior="laplace").fit(*line(60))
    model = StationaryRegressor(**SMALL, hidden=(4,), networks=2).fit(*line(300))
    assert [type(member.model.extractor) for member in model.members_] == [torch.nn.Identity] * 3
    assert len(StationaryClassifier(**SMALL, hidden=(4,), networks=2).fit(line(300)[0], line(300)[1] > 0).members_) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "matern23"}, r"kernel parameter must be one of .* got 'matern23' instead. Did you mean 'matern"),
        ({"activation": "cosine"}, r"activation parameter must be one of .* got 'cosine'"),
        ({"posterior": "closed"}, r"posterior parameter must be one of closed_form, laplace, got 'closed'"),
        ({"width": 61}, r"width parameter must be an integer of at least 2 and even under this activation, got 61"),
        ({"width": 1, "activation": "sin"}, r"width parameter must be an integer of at least 2, got 1"),
        ({"width": 10.0}, r"width parameter must be an integer .* got 10.0"),
        ({"hidden": 25}, r"hidden parameter must be a tuple of positive widths, such as \(100, 25\), got 25"),
        ({"hidden": (0,)}, r"hidden parameter must be a tuple of positive widths, .* got \(0,\)"),
        ({"kernel": ()}, r"kernel parameter must name at least one kernel, got an empty sequence"),
        ({"kernel": ("rbf", "rbg")}, r"kernel parameter must be one of .* got 'rbg' instead. Did you mean 'rbf'"),
        ({"networks": 0}, r"networks parameter must be an integer from 1 to 30, got 0"),
        ({"networks": 31}, r"networks parameter must be an integer from 1 to 30, got 31"),
        ({"networks": 2.0}, r"networks parameter must be an integer from 1 to 30, got 2.0"),
        ({"false_alarm": 1.0}, r"false_alarm parameter must lie between 0 and 1, got 1.0"),
        ({"device": "gpu"}, r"device parameter must be one of auto, cpu, cuda, got 'gpu'"),
    ],
)
def test_bad_parameters_are_named(options, message):
    for kind in (StationaryRegressor, StationaryClassifier):
        with pytest.raises(ValueError, match=message):
            kind(**{**SMALL, **options}).fit(*line(20))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_said():
    with pytest.raises(
        ValueError, match=r"device parameter asks for a GPU \('cuda'\), but torch sees none; use device='cpu'"
    ):
        StationaryRegressor(device="cuda").fit(*line(20))


def test_bad_data_gets_the_step_that_helps():
    x, y = line(20)
    model = StationaryRegressor(**SMALL)
    with pytest.raises(
        ValueError, match=r"contains NaN. Put SimpleImputer before it: make_pipeline\(SimpleImputer\(\), Stat"
    ):
        model.fit(np.where(x > 1.5, np.nan, x), y)
    with pytest.raises(
        ValueError, match=r"could not convert string to float: 'red'\. Encode text columns first: make_pipe"
    ):
        model.fit(pd.DataFrame({"a": ["red"] * 20}), y)
    with pytest.raises(ValueError, match="y parameter must hold at least two different values, got 3 only"):
        model.fit(x, np.full(20, 3.0))
    with pytest.raises(
        ValueError, match=r"Column 1 of X holds values beyond 1e\+100 in size; rescale or clip it first"
    ):
        model.fit(x * np.array([1, 1e200]), y)
    with pytest.raises(ValueError, match=r"y parameter holds values beyond 1e\+100 in size"):
        model.fit(x, y * 1e200)
    with pytest.raises(ValueError, match="requires y to be passed, but the target y is None"):
        model.fit(x, None)
    with pytest.raises(ValueError, match="y parameter must hold at least two classes, got one class only: 'a'"):
        StationaryClassifier(**SMALL).fit(x, ["a"] * 20)
    with pytest.raises(ValueError, match="requires y to be passed, but the target y is None"):
        StationaryClassifier(**SMALL).fit(x, None)


def test_bad_questions_are_refused(fitted):
    with pytest.raises(ValueError, match="coverage parameter must lie between 0 and 1, got 90 instead"):
        fitted.predict_interval(line(3)[0], coverage=90)
    with pytest.raises(AttributeError, match="partial_fit"):
        _ = StationaryRegressor(posterior="laplace").partial_fit


def test_a_rare_class_is_always_learnt_from():
    x, _ = line(30)
    for seed in range(5):
        model = StationaryClassifier(width=20, random_state=seed, kernel="rbf").fit(x, [1, *[0] * 29])
        assert model.predict_proba(x).shape == (30, 2)


def test_later_rows_never_make_the_alarm_more_sensitive():
    x, y = line(200)
    model = StationaryRegressor(**SMALL).fit(x, y)
    before = model.ood_threshold_
    alike = x[:1] + 1e-3 * np.random.default_rng(0).normal(size=(30, 2))
    assert model.partial_fit(alike, np.full(30, y[0])).ood_threshold_ == before
    assert (model.ood_score(x) > model.ood_threshold_).mean() < 0.1


def test_nothing_of_an_earlier_fit_remains():
    x, y = line(40)
    model = StationaryRegressor(**SMALL).fit(x, y).set_params(hidden=(4,), posterior="laplace").fit(x, y)
    assert not hasattr(model, "lengthscale_")
    assert not hasattr(model, "log_marginal_likelihood_")


def test_fast_waves_are_found():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (400, 1))
    y = np.sin(12 * x[:, 0]) + 0.05 * rng.normal(size=400)
    model = StationaryRegressor(width=200, random_state=0, hidden=()).fit(x, y)
    assert model.noise_ < 0.1
    assert model.score(x, y) > 0.99


@pytest.mark.parametrize("kernel", ["rbf", "matern52"])
def test_data_without_noise_are_fitted(kernel):
    x, _ = line(100)
    model = StationaryRegressor(kernel=kernel, width=200, hidden=(), random_state=0).fit(x, x[:, 0] + np.sin(x[:, 1]))
    assert model.score(x, x[:, 0] + np.sin(x[:, 1])) > 0.9999


def test_a_value_of_any_size_is_flagged(fitted):
    mean, std = fitted.predict([[1e308, 0.0], [-1.7e308, 1e300]], return_std=True)
    assert np.isfinite([mean, std]).all()
    assert (fitted.ood_score([[1e308, 0.0], [-1.7e308, 1e300]]) > fitted.ood_threshold_).all()


def test_wrong_targets_and_numbers_of_draws_are_named(fitted):
    with pytest.raises(
        ValueError, match=r"y parameter must hold numbers \(.*'up'.*\); for classes use StationaryClassifier"
    ):
        StationaryRegressor(**SMALL).fit(line(20)[0], ["up", "down"] * 10)
    with pytest.raises(ValueError, match="n_samples parameter must be an integer of at least 1, got -1 instead"):
        fitted.sample_y(line(3)[0], -1)
