"""Odd arguments of every public method of the estimators, made by ``fuzz_api.py``; a few of them are fitted for real."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

import fuzz_api
from bochner.estimators import Settings, StationaryClassifier, StationaryRegressor
from bochner.estimators.checks import named_errors

BOTH = [StationaryRegressor, StationaryClassifier]


@pytest.fixture(scope="module")
def models():
    return fuzz_api.fitted_models(tables=False)


@pytest.mark.parametrize("seed", [0, 1])
def test_odd_calls_are_answered_or_refused_by_name_and_change_nothing(models, seed):
    counts, violations = fuzz_api.run(models, seed, share=0.1)
    assert violations == []
    assert counts["refused"] > 100
    assert counts["answered"] > 50
    assert counts["accepted"] > 10


def test_the_generator_sees_a_call_that_is_refused_without_a_name(models):
    def call():
        raise ValueError("bad")

    def raw():
        raise RuntimeError("bad")

    def change():
        models["regressor"].noise_ = 1.0 + models["regressor"].noise_
        raise ValueError("The X parameter")

    model = models["regressor"]
    kinds = [fuzz_api.outcome(fuzz_api.Case("", "X", each, None, model))[0] for each in (call, raw, change)]
    assert kinds == ["nameless", "raw error", "changed by a refused call"]
    nan = fuzz_api.Case("", "X", lambda: np.full(3, np.nan), (3,), model)
    assert fuzz_api.outcome(nan)[0] == "not a number"
    assert fuzz_api.outcome(fuzz_api.Case("", "X", lambda: np.zeros(4), (3,), model))[0] == "wrong shape"


@pytest.mark.parametrize("kind", BOTH)
def test_values_of_other_types_are_the_same_rows(kind):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 2)).astype(np.float32).astype(float)
    y = (x[:, 0] > 0).astype(float) + (0.5 * x[:, 1].round() if kind is StationaryRegressor else 0)
    expected = kind(**fuzz_api.QUICK).fit(x, y).ood_score(x)
    tensor = torch.from_numpy(x).requires_grad_()
    others = [
        (tensor, torch.from_numpy(y).requires_grad_(), torch.ones(12, requires_grad=True)),
        (np.asfortranarray(x), y[::-1][::-1].tolist(), np.ones(12)[::-1]),
        (torch.from_numpy(x).float(), pd.Series(y), None),
    ]
    for rows, target, weight in others:
        model = kind(**fuzz_api.QUICK).fit(rows, target, weight)
        np.testing.assert_array_equal(model.ood_score(rows), expected)
        assert np.isfinite(model.log_prob(rows, target)).all()


@pytest.mark.filterwarnings("ignore:A precision matrix is not positive definite to rounding")  # on some processors
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_weights_of_extreme_size_are_learnt_from(kind, size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 2))
    y = x[:, 0] if kind is StationaryRegressor else (x[:, 0] > 0).astype(int)
    model = kind(**fuzz_api.QUICK).fit(x, y, np.where(np.arange(12) % 2, 1.0, size))
    assert np.isfinite(model.log_prob(x, y)).all()


def test_labels_may_be_dates(models):
    x = np.zeros((2, 2))
    labels = models["dates"].predict(x)
    assert labels.dtype.kind == "M"
    with pytest.raises(ValueError, match="The y parameter holds a class that was not learnt: '2020-01-01'"):
        models["dates"].log_prob(x, np.array(["2020-01-01", "1970-01-01"], dtype="datetime64[D]"))


def test_scores_are_those_of_scikit_learn_with_weights(models):
    x, y = fuzz_api._plain("regressor")
    weight = np.arange(12.0)
    mean = models["regressor"].predict(x)
    centre = np.average(y, weights=weight)
    expected = 1 - (weight * (y - mean) ** 2).sum() / (weight * (y - centre) ** 2).sum()
    assert models["regressor"].score(x, y, weight) == pytest.approx(expected)
    labels = np.arange(12) % 3  # the classifier has learnt 0 and 1
    right = models["classifier"].predict(x) == labels
    assert models["classifier"].score(x, labels, weight) == pytest.approx((weight * right).sum() / weight.sum())
    assert models["classifier"].score(x, ["a"] * 12) == 0
    with pytest.raises(ValueError, match=r"The y parameter must hold 1 targets, got shape \(12, 2\) instead"):
        models["regressor"].score(x, np.column_stack([y, y]))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("a"), ValueError, "The X parameter cannot be used: 'a'"),
        (TypeError("no number"), TypeError, "The X parameter cannot be used: no number"),
        (OverflowError("too large"), ValueError, "The X parameter cannot be used: too large"),
        (ValueError("Input X contains NaN"), ValueError, "^Input X contains NaN$"),
    ],
)
def test_errors_get_the_name_of_their_argument(error, kind, message):
    with pytest.raises(kind, match=message), named_errors("X"):
        raise error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "The folds of Settings must be an integer of at least 2, got 1 instead."),
        ({"tuning_rows": 0}, "The tuning_rows of Settings must be an integer of at least 1, got 0 instead."),
        ({"intervals": -1}, "The intervals of Settings must be an integer of at least 0, got -1 instead."),
        ({"network_rate": 0}, "The network_rate of Settings must be a positive number, got 0 instead."),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Settings(**options)


def test_what_would_not_fit_into_memory_is_refused(models):
    x = np.zeros((2, 2))
    with pytest.raises(ValueError, match="The n_samples parameter must ask for at most 268435456 values, got"):
        models["regressor"].sample_y(x, 10**9)
    with pytest.raises(ValueError, match="hidden_layer_sizes parameter must have widths that fit into memory"):
        StationaryRegressor(hidden_layer_sizes=(10**6, 10**6)).fit(x, [0, 1])
    with pytest.raises(ValueError, match="sample_weight parameter must hold 0 or numbers from 1e-12 to 1e\\+12, got"):
        StationaryRegressor().fit(x, [0, 1], [1, 1e99])
    with pytest.raises(TypeError, match="The X parameter cannot be used: a dense tensor is needed, got a sparse one"):
        models["regressor"].predict(torch.zeros(2, 2).to_sparse())
