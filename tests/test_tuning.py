"""Hyperparameters and the plan of a fit, against dense formulas, differences and refits."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal, norm

from bochner.members import tuning
from bochner.members.features import JITTER
from bochner.members.plan import make_plan
from bochner.members.rows import TrainingRows
from bochner.members.settings import Settings
from bochner.members.tuning import Hyperparameters, leave_one_out_predictions, log_evidence, tune
from bochner.priors.spectra import RBF, Exponential, Matern

GROUP = torch.tensor([0, 1, 1, 2])  # the second column has two inputs
THETA = np.array([0.4, 0.3, -0.5, 0.8, 0.2, -0.9])  # common, three columns, log amplitude, log noise


def rbf(r):
    return np.exp(-0.5 * r**2)


def matern32(r):
    return (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r)


def exponential(r):
    return np.exp(-r)


KERNELS = [(RBF(), rbf), (Matern(1.5), matern32), (Exponential(), exponential)]


def table(num=25, outputs=1, weight=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num, 4))
    y = np.sin(x[:, :1]) + x[:, 1:2] * x[:, 3:] + 0.2 * rng.normal(size=(num, outputs))
    weight = np.ones(num) if weight is None else weight
    return TrainingRows(*(torch.from_numpy(value) for value in (x, y, weight)))


def covariance(kappa, x, z, theta=THETA):
    scale = np.exp(theta[0] + theta[1:-2])[GROUP.numpy()]
    return np.exp(2 * theta[-2]) * kappa(np.linalg.norm((x[:, None] - z[None]) / scale, axis=-1))


def nugget(theta=THETA):
    return np.exp(2 * theta[-1]) + JITTER * np.exp(2 * theta[-2])


# ------------------------------------------------------------------ evidence


@pytest.mark.parametrize(("spectrum", "kappa"), KERNELS, ids=["rbf", "matern32", "exponential"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_evidence_is_the_dense_normal_density(spectrum, kappa, outputs):
    rows = table(outputs=outputs)
    x = rows.x.numpy()
    dense = multivariate_normal(np.zeros(25), covariance(kappa, x, x) + nugget() * np.eye(25))
    expected = sum(dense.logpdf(column) for column in rows.y.numpy().T)
    # Distances are kept above 1e-6, which an exponential kernel feels.
    assert log_evidence(rows, spectrum, GROUP, THETA)[0] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("spectrum", "_kappa"), KERNELS, ids=["rbf", "matern32", "exponential"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_gradient_is_that_of_differences(spectrum, _kappa, outputs):
    rows, step = table(outputs=outputs, weight=np.linspace(0.5, 3, 25)), 1e-5
    found = log_evidence(rows, spectrum, GROUP, THETA)[1]
    for number, unit in enumerate(np.eye(len(THETA))):
        up, down = (log_evidence(rows, spectrum, GROUP, THETA + sign * step * unit)[0] for sign in (1, -1))
        assert found[number] == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-5)


def test_a_row_of_weight_three_has_the_evidence_of_three_rows():
    weight = np.ones(25)
    weight[[2, 9]] = 3
    rows = table(weight=weight)
    many = np.repeat(np.arange(25), weight.astype(int))
    x, y = rows.x.numpy()[many], rows.y.numpy()[many, 0]
    dense = multivariate_normal(np.zeros(len(y)), covariance(matern32, x, x) + nugget() * np.eye(len(y)))
    assert log_evidence(rows, Matern(1.5), GROUP, THETA)[0] == pytest.approx(dense.logpdf(y), abs=1e-5)


def test_hopeless_covariances_have_no_evidence():
    rows = table()
    rows = TrainingRows(rows.x * 0, rows.y, rows.weight * -1)  # a diagonal below zero
    value, gradient = log_evidence(rows, RBF(), GROUP, THETA)
    assert value == -np.inf
    assert not gradient.any()


@pytest.mark.parametrize(("spectrum", "kappa"), KERNELS, ids=["rbf", "matern32", "exponential"])
def test_rows_left_out_in_closed_form_are_left_out_by_refits(spectrum, kappa):
    weight = np.where(np.arange(25) % 4 == 0, 2.5, 1.0)
    rows = table(outputs=2, weight=weight)
    mean, variance = leave_one_out_predictions(rows, spectrum, GROUP, Hyperparameters.from_vector(THETA))
    x, y = rows.x.numpy(), rows.y.numpy()
    for i in range(25):
        others = np.arange(25) != i
        gram = covariance(kappa, x[others], x[others]) + np.diag(nugget() / weight[others])
        cross = covariance(kappa, x[i : i + 1], x[others])[0]
        np.testing.assert_allclose(mean[i], cross @ np.linalg.solve(gram, y[others]), atol=1e-5)
        expected = np.exp(2 * THETA[-2]) + nugget() - cross @ np.linalg.solve(gram, cross)
        assert float(variance[i]) == pytest.approx(expected, abs=1e-5)


# ------------------------------------------------------------------ hyperparameters


def test_hyperparameters_are_their_vector():
    point = Hyperparameters.from_vector(THETA)
    np.testing.assert_array_equal(point.vector, THETA)
    assert (point.amplitude, point.noise) == (pytest.approx(np.exp(0.2)), pytest.approx(np.exp(-0.9)))
    np.testing.assert_allclose(point.lengthscale(GROUP), np.exp([0.7, -0.1, -0.1, 1.2]))
    start = Hyperparameters.start(4)
    assert start.common == pytest.approx(np.log(2) + 0.3)
    assert (start.amplitude, start.noise) == (1, pytest.approx(0.3))


def test_the_prior_is_normal_in_the_logarithms():
    value, gradient = tuning._log_prior(THETA, 0.7)
    centre = np.array([np.log(3) / 2 + 0.3, 0, 0, 0, 0, np.log(0.3)])
    scale = np.array([1.5, 0.7, 0.7, 0.7, 1.0, 1.5])

    def density(theta):
        return norm(centre, scale).logpdf(theta).sum()

    assert value - tuning._log_prior(centre, 0.7)[0] == pytest.approx(density(THETA) - density(centre))
    for number, unit in enumerate(np.eye(6)):
        difference = (density(THETA + 1e-5 * unit) - density(THETA - 1e-5 * unit)) / 2e-5
        assert gradient[number] == pytest.approx(difference, abs=1e-6)


def test_tuning_climbs_and_columns_that_do_not_matter_get_long_lengthscales():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, 3))
    y = np.sin(2 * x[:, :1]) + 0.1 * rng.normal(size=(80, 1))
    rows = TrainingRows(*(torch.from_numpy(value) for value in (x, y / y.std(), np.ones(80))))
    group, start = torch.arange(3), Hyperparameters.start(3)
    settings = Settings(column_spread=1.0, tuning_steps=40)

    def posterior(point):
        return log_evidence(rows, RBF(), group, point.vector)[0] + tuning._log_prior(point.vector, 1.0)[0]

    shared = tune(rows, RBF(), group, start, settings, columns_move=False)
    own = tune(rows, RBF(), group, shared, settings, columns_move=True)
    assert not shared.columns.any()
    assert posterior(own) > posterior(shared) > posterior(start)
    lengthscale = own.lengthscale(group)
    assert float(lengthscale[1:].min()) > 3 * float(lengthscale[0])
    assert own.noise == pytest.approx(0.1 / y.std(), rel=0.3)


def test_rows_are_taken_by_number():
    rows = table()[torch.tensor([3, 1])]
    assert len(rows) == 2
    torch.testing.assert_close(rows.x, table().x[[3, 1]])
    torch.testing.assert_close(rows.y, table().y[[3, 1]])


# ------------------------------------------------------------------ the plan


SMALL = Settings(judging_rows=40, tuning_rows=15, large_rows=60, folds=4, folds_large=6)


@pytest.mark.parametrize("rows", [2, 3, 20, 39, 50, 54, 55, 61, 200])
@pytest.mark.parametrize("with_labels", [False, True])
def test_every_judging_row_is_in_exactly_one_part(rows, with_labels, generator):
    labels = torch.arange(rows) % 3 if with_labels else None
    plan = make_plan(rows, labels, SMALL, generator)
    assert sorted(plan.order.tolist()) == list(range(rows))
    judging = plan.judging.tolist()
    assert len(judging) == len(set(judging)) == min(rows, 40)
    assert len(plan.folds) == min(rows, 6 if rows > 60 else 4)
    assert max(map(len, plan.folds)) - min(map(len, plan.folds)) <= 1
    for number, fold in enumerate(plan.folds):
        others = plan.others(number).tolist()
        assert sorted(others + fold.tolist()) == list(range(rows))
        tuned = plan.tuning_without(number, SMALL).tolist()
        assert not set(tuned) & set(fold.tolist())
        assert len(tuned) == min(15, len(others))


@pytest.mark.parametrize("rows", [54, 55])
def test_tuning_rows_do_not_judge_where_there_are_rows_enough(rows, generator):
    plan = make_plan(rows, None, SMALL, generator)
    both = set(plan.tuning.tolist()) & set(plan.judging.tolist())
    assert plan.separate == (rows == 55) == (not both)
    assert len(plan.tuning) == 15


def test_few_others_are_those_that_do_not_judge(generator):
    plan = make_plan(100, None, SMALL, generator)
    assert not set(plan.others(0, 60).tolist()) & set(plan.judging.tolist())
    assert len(plan.others(0, 70)) == 70
    assert not set(plan.others(0, 70).tolist()) & set(plan.folds[0].tolist())


@pytest.mark.parametrize("sizes", [(60, 30, 10), (50, 50), (80, 20), (37, 41, 22)])
def test_classes_are_spread_evenly_over_the_parts(sizes, generator):
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(100, generator=generator)]
    plan = make_plan(100, labels, Settings(folds=5), generator)
    counts = torch.stack([torch.bincount(labels[fold], minlength=len(sizes)) for fold in plan.folds])
    assert float((counts - torch.tensor(sizes) / 5).abs().max()) <= 2


def test_plans_are_the_same_for_the_same_generator():
    first, second = (make_plan(50, None, SMALL, torch.Generator().manual_seed(3)) for _ in range(2))
    torch.testing.assert_close(first.order, second.order)
    assert not torch.equal(first.order, make_plan(50, None, SMALL, torch.Generator().manual_seed(4)).order)
    assert torch.equal(first.to(torch.device("cpu")).judging, first.judging)


# ------------------------------------------------------------------ settings


def test_settings_follow_the_number_of_rows():
    settings = Settings()
    assert [settings.folds_for(rows) for rows in (3, 100, 2000, 2001)] == [3, 5, 5, 8]
    assert [settings.steps_for(rows) for rows in (100, 800, 5000, 20_001)] == [150, 800, 1500, 1500]
    assert [settings.rounds_for(rows) for rows in (100, 20_000, 20_001)] == [1, 1, 5]
    assert settings.deep_anchors(5) ** 2 * 5 <= settings.deep_numbers < (settings.deep_anchors(5) + 1) ** 2 * 5
