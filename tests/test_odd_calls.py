"""Odd calls of layers, networks, training and posteriors; many threads at one posterior; gradients are not asked of inputs."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from bochner import Categorical, Gaussian, Laplace, Model, StationaryLayer, tune_marginal
from bochner.networks import SeededDropout
from bochner.predictive import GaussianPredictive
from bochner.training import Recipe, StackRows, batches, fit_map, fit_stacks, stack
from fuzz_posteriors import calls, fitted, outcome, pair, rows, single_cases
from problems import data, regression

CASES = single_cases()
NAMES = ("ClosedForm", "ClosedFormClassifier", "Laplace", "Laplace classes", "Swag", "Swag classes", "Sampled")
PROCESSES = ("GaussianProcess", "GaussianProcessClassifier")


def test_there_are_cases_of_every_call():
    assert len(CASES) > 3000
    assert {case.call.name for case in CASES} == {call.name for call in calls()}


@pytest.mark.parametrize("part", range(2))
def test_odd_calls_give_a_right_result_or_an_error_that_names_the_argument(part):
    """A sample: singles of every argument of every call, and pairs. ``make fuzz`` tries all of them."""
    rng = random.Random(part)
    by_argument: dict = {}
    for case in CASES:
        by_argument.setdefault((case.call.name, case.odd[0][0]), []).append(case)
    chosen = [rng.choice(cases) for cases in by_argument.values()] + [pair(rng, CASES) for _ in range(20)]
    assert len(chosen) > 150
    wrong = [f"{case}: {message}" for case in chosen for kind, message in [outcome(case)] if kind == "wrong"]
    assert not wrong, "\n".join(wrong)


def value_of(answer):
    return answer.mean if isinstance(answer, GaussianPredictive) else answer.log_probabilities


@pytest.mark.parametrize("name", [*NAMES, *PROCESSES])
def test_eight_threads_get_the_answers_of_one(name):
    posterior, inputs = fitted(name), [rows(6) + i for i in range(16)]
    alone = [value_of(posterior.predict(x)) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda x: value_of(posterior.predict(x)), inputs))
    for first, second in zip(alone, together, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*NAMES, *PROCESSES])
def test_a_prediction_does_not_depend_on_how_its_inputs_are_held(name):
    """Inputs that require a gradient, or that are not contiguous, give the same numbers; no gradient is kept."""
    posterior, x = fitted(name), rows(6)
    expected = value_of(posterior.predict(x))
    for held in (x.clone().requires_grad_(), torch.stack([x, x], -1)[..., 0]):
        answer = value_of(posterior.predict(held))
        assert not answer.requires_grad
        torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-12)


def test_inputs_that_require_a_gradient_get_none_from_tuning():
    x, y = data(30)
    x.requires_grad_()
    tune_marginal(regression(width=8), x, y, steps=2, train_features=True)
    assert x.grad is None


def test_tuning_refuses_loaders():
    x, y = data(10)
    with pytest.raises(ValueError, match=r"x parameter of tune_marginal must be a tensor: a loader's rows may differ"):
        tune_marginal(regression(), [(x, y)], None)


def test_shuffles_and_dropout_draw_from_different_streams(monkeypatch):
    """Streams of random numbers are numbered: no number is used by a shuffle and by a mask, and none twice."""
    used: dict[str, list[int]] = {"shuffles": [], "masks": []}
    shuffle, mask = batches.counter_permutation, stack.counter_mask
    monkeypatch.setattr(
        batches, "counter_permutation", lambda s, k, n: used["shuffles"].append(int(k)) or shuffle(s, k, n)
    )
    monkeypatch.setattr(stack, "counter_mask", lambda s, k, n, p: used["masks"].append(int(k)) or mask(s, k, n, p))
    extractor = nn.Sequential(nn.Linear(3, 4), SeededDropout(0.5, 4), nn.Linear(4, 4), SeededDropout(0.5, 4)).double()
    model = Model(StationaryLayer(4, 6, dtype=torch.float64), 1, Gaussian(), extractor=extractor)
    fit_map(model, *data(20), Recipe(epochs=4, batch_size=8))
    assert len(used["shuffles"]) == 4
    masks = used["masks"][-2 * 4 * 3 :]  # the first ones are of a dry run
    assert len(set(masks)) == 2 * 4 * 3
    assert not set(used["shuffles"]) & set(used["masks"])


@pytest.mark.parametrize("bad", [False, True])
def test_stacks_leave_the_number_of_threads_as_it_was(bad):
    x, y = data(20)
    before = torch.get_num_threads()
    schedule = (lambda _: float("nan")) if bad else (lambda _: 1.0)
    recipe = Recipe(epochs=1, schedule=schedule)
    try:
        torch.set_num_threads(3)
        models = [regression(seed, width=4, hidden=(4, 3)) for seed in range(2)]
        rows = torch.arange(20).expand(2, -1)
        if bad:
            with pytest.raises(ValueError, match="schedule of the recipe must give finite numbers, got nan"):
                fit_stacks(models, StackRows(x, y, rows), recipe, seed=[0, 1])
        else:
            fit_stacks(models, StackRows(x, y, rows), recipe, seed=[0, 1])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_messages_of_sets_of_rows_and_of_loaders():
    x, y = data(10)
    with pytest.raises(
        ValueError, match="x and y parameters must hold a set of rows for each of 2 networks, got 0 and 2"
    ):
        Laplace([regression(0), regression(1)], x.expand(2, -1, -1)[:0], y.expand(2, -1, -1))
    with pytest.raises(
        ValueError, match=r"x parameter, without y, must be a loader of pairs\. The loader parameter must be"
    ):
        Laplace(regression(), iter([(x, y)]))


def test_messages_of_numbers_seeds_and_tensors():
    x, y = data(10)
    model = regression(width=4)
    for value, message in (
        (2**70, "epochs parameter must be an integer of at most 2147483647, got 1180591620717411303424"),
        (True, "epochs parameter must be an integer of at least 1, got True"),
    ):
        with pytest.raises(ValueError, match=message):
            Recipe(epochs=value)
    with pytest.raises(ValueError, match="lengthscale parameter must lie between 1e-18 and 1e18, got 1e-300"):
        StationaryLayer(3, 4, lengthscale=1e-300)
    with pytest.raises(ValueError, match="optimizer parameter must be a function, got 'adam'"):
        Recipe(optimizer="adam")
    with pytest.raises(ValueError, match="lr of the recipe must be one number or 1, got"):
        fit_map(model, x, y, Recipe(lr=[0.1, 0.2]))
    with pytest.raises(ValueError, match="recipe parameter must be a Recipe, got 3"):
        fit_map(model, x, y, 3)
    with pytest.raises(ValueError, match="seed parameter must be an integer of at most 64 bits, got 'a'"):
        fit_map(model, x, y, seed="a")
    with pytest.raises(ValueError, match=r"rows parameter must hold 0 to 9, got 0 to 10"):
        fit_map(model, x, y, rows=torch.tensor([[0, 10]]))
    with pytest.raises(ValueError, match=r"rows parameter must be a tensor of integers, got torch.float32 of shape"):
        fit_map(model, x, y, rows=torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"generator parameter must be a torch.Generator or None, got 3"):
        StationaryLayer(3, 4, generator=3)
    with pytest.raises(ValueError, match=r"x parameter must be a dense tensor of real numbers, got torch.complex128"):
        fit_map(model, x.to(torch.complex128), y)
    with pytest.raises(ValueError, match=r"y parameter must hold numbers up to 1e18, got .*standardise it first"):
        fit_map(model, x, y * 1e30)
    with pytest.raises(ValueError, match=r"x parameter must have at least 1 row, got shape \(0, 3\)"):
        fitted("ClosedForm").predict(x[:0])
    with pytest.raises(ValueError, match=r"extractor fails at the x parameter, torch.float64 of shape \(1, 2\)"):
        fit_map(regression(hidden=(4, 3)), x[:, :2], y)
    with pytest.raises(ValueError, match=r"into features of shape \(n, 3\), got torch.float64 of shape \(1, 2\)"):
        fit_map(model, x[:, :2], y)
    with pytest.raises(ValueError, match="device parameter must name a device of torch, got 'gpu'"):
        StationaryLayer(3, 4, device="gpu")
    with pytest.raises(ValueError, match="extractor parameter must be a module or None, got 'net'"):
        Model(StationaryLayer(3, 4), 2, Categorical(), extractor="net")
    with pytest.raises(ValueError, match="output_bias parameter must be True or False, got 'yes'"):
        Model(StationaryLayer(3, 4), 2, Categorical(), output_bias="yes")
