"""MAP training: one network, a stack of them, the paper's recipe, divergence."""

import copy
import dataclasses
import math
import threading

import pytest
import scipy.stats
import torch
from torch import nn

from bochner import Categorical, Gaussian, Model, StationaryLayer
from bochner.networks import SeededDropout, mlp
from bochner.posteriors.closed_form import ClosedForm
from bochner.training import map as training
from bochner.training.map import Recipe, StackRows, fit_map, fit_stacks, sgd, square_root_decay
from bochner.training.randomness import counter_permutation, counter_uniform
from problems import classification, data, regression


def deep(seed, dropout=0.3):
    generator = torch.Generator().manual_seed(seed)
    extractor = mlp(3, (8, 6, 4), dropout=dropout, generator=generator).double()
    layer = StationaryLayer(4, 10, kernel="matern32", activation="triangle", generator=generator, dtype=torch.float64)
    return Model(layer, 1, Gaussian(), extractor=extractor, generator=generator)


def test_counter_numbers_are_uniform_and_independent_of_the_stack():
    seeds = torch.tensor([0, 1, 2, 10**9])
    u = counter_uniform(seeds, 5, 20_000)
    for row in u:
        assert scipy.stats.kstest(row.numpy(), "uniform").pvalue > 1e-3
    assert torch.corrcoef(u).fill_diagonal_(0).abs().max() < 5 / math.sqrt(20_000)
    assert torch.corrcoef(torch.stack([u[0, :-1], u[0, 1:]]))[0, 1].abs() < 5 / math.sqrt(20_000)
    torch.testing.assert_close(counter_uniform(seeds[2:3], 5, 20_000)[0], u[2], rtol=0, atol=0)
    assert not torch.equal(counter_uniform(seeds, 6, 20_000), u)
    permutation = counter_permutation(seeds, 0, 100)
    torch.testing.assert_close(permutation.sort(1).values, torch.arange(100).expand(4, -1))


@pytest.mark.parametrize("recipe", [Recipe(3, 7, lr=1e-2), Recipe.paper(1e-2, epochs=3, batch_size=7)])
def test_a_member_of_a_stack_equals_the_network_trained_alone(recipe):
    """Own seed, own rows, own learning rate, dropout on: equal to rounding, since only the order of sums differs."""
    x, y = data(40)
    rows = torch.stack([torch.arange(40)[torch.arange(40) % 4 != i] for i in range(3)])
    rates = [1e-2, 3e-3, 1e-3]
    stack = [deep(s) for s in range(3)]
    fit = fit_map(
        stack, x, y, Recipe(3, 7, recipe.optimizer, rates, recipe.scale_lr, recipe.schedule), seed=[5, 6, 7], rows=rows
    )
    for i in range(3):
        alone = deep(i)
        single = fit_map(
            alone,
            x,
            y,
            Recipe(3, 7, recipe.optimizer, rates[i], recipe.scale_lr, recipe.schedule),
            seed=5 + i,
            rows=rows[i : i + 1],
        )
        torch.testing.assert_close(single.loss[:, 0], fit.loss[:, i], rtol=1e-10, atol=1e-12)
        for (name, p), q in zip(stack[i].named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10, msg=name)


def test_networks_of_several_priors_in_one_stack_equal_each_alone():
    """Activations and spectra mixed, ARD and frozen parameters, a scalar in the extractor: losses and parameters to rounding."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

        def forward(self, x):
            return self.gain * x

    def make(i):
        kernel, activation = [("rbf", "sin"), ("matern32", "sin"), ("matern32", "sincos"), ("rbf", "relu")][i]
        generator = torch.Generator().manual_seed(i)
        scale = torch.tensor([0.5, 1.0, 2.0])
        options = {"kernel": kernel, "activation": activation, "lengthscale": scale, "generator": generator}
        layer = StationaryLayer(3, 8, dtype=torch.float64, **options)
        layer.weight.requires_grad_(i < 2)
        return Model(layer, 1, Gaussian(), extractor=Scaled(), output_bias=True, generator=generator)

    x, y = data(30)
    recipe = Recipe(3, 7, sgd, 1e-2, 0.03)
    stack = [make(i) for i in range(4)]
    fit = fit_map(stack, x, y, recipe, seed=[3, 4, 5, 6], num_data=50)
    for i in range(4):
        alone = make(i)
        single = fit_map(alone, x, y, recipe, seed=3 + i, num_data=50)
        torch.testing.assert_close(single.loss[:, 0], fit.loss[:, i], rtol=1e-10, atol=1e-12)
        for (name, p), q in zip(stack[i].named_parameters(), alone.named_parameters(), strict=True):
            torch.testing.assert_close(p, q[1], rtol=1e-9, atol=1e-11, msg=name)
    # One full-batch epoch: the loss is minus the log joint over N, all priors but the noise's at the end.
    model = make(1)
    before = copy.deepcopy(model)
    loss = fit_map(model, x, y, Recipe(1, 30, sgd, 1e-3), num_data=50).loss[0, 0].item()
    prior = model.log_prior() - model.likelihood.log_prior() + before.likelihood.log_prior()
    joint = before.log_likelihood(x, y) / 30 + prior / 50
    assert loss == pytest.approx(-joint.item(), rel=1e-10)


def test_stacks_of_any_number_equal_one_stack(monkeypatch):
    monkeypatch.setattr(training, "stack_size", lambda *_: 2)
    x, y = data(30)
    rows = torch.arange(30).expand(5, -1)
    many, one = [deep(s) for s in range(5)], [deep(s) for s in range(5)]
    recipe = Recipe(2, 10, sgd, [1e-3, 1e-3, 1e-2, 1e-2, 1e-3])
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    fits = [
        fit_stacks(many, StackRows(x, y, rows), dataclasses.replace(recipe, precision="tf32"), seed=range(5)),
        fit_map(one, x, y, recipe, seed=range(5)),
    ]
    torch.testing.assert_close(fits[0].loss, fits[1].loss)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (threads, precision)


def test_training_stops_when_told():
    x, y = data(20)
    stop = threading.Event()
    fit = fit_map(regression(), x, y, Recipe(6, 10), after_epoch=lambda _: stop.set(), stop=stop)
    assert torch.isfinite(fit.loss[:, 0]).tolist() == [True] + [False] * 5


def test_one_full_batch_step_is_the_optimisers():
    """Against the plain torch loop on minus the log joint over N."""
    x, y = data(20)
    ours, reference = regression(), regression()
    fit_map(ours, x, y, Recipe(4, 20, lambda g: torch.optim.SGD(g, momentum=0.9), 1e-2))
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        (-reference.log_joint(x, y) / 20).backward()
        optimizer.step()
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_the_map_of_the_output_layer_is_the_closed_form_mean():
    """With everything else held fixed the log joint is quadratic in the output weights, and its mode is known."""
    model = regression(width=8)
    for name, p in model.named_parameters():
        p.requires_grad_(name == "output.weight")
    x, y = data(30)
    fit_map(model, x, y, Recipe(500, 30, lr=0.05))
    torch.testing.assert_close(model.output.weight.T, ClosedForm(model, x, y).mean, rtol=1e-4, atol=1e-5)


def test_paper_recipe():
    recipe = Recipe.paper(1e-3)
    assert (recipe.epochs, recipe.batch_size, recipe.lr, recipe.scale_lr) == (100, 50, 1e-3, 0.01)
    assert square_root_decay(0.0) == 1.0
    assert square_root_decay(1.0) == pytest.approx(0.72)
    (group,) = recipe.optimizer([{"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0}]).param_groups
    assert group["momentum"] == 0.9


def test_separate_rate_for_lengthscale_and_noise():
    x, y = data(20)
    model = regression()
    before = {n: p.clone() for n, p in model.named_parameters()}
    fit_map(model, x, y, Recipe(1, 20, lambda g: torch.optim.SGD(g), lr=1e-9, scale_lr=0.1))
    moved = {n: (p - before[n]).abs().max().item() for n, p in model.named_parameters()}
    assert moved["layer.log_lengthscale"] > 1e-4
    assert moved["likelihood.log_noise"] > 1e-4
    assert moved["layer.weight"] < 1e-6


def test_training_classifies():
    model = classification(hidden=(8, 4))
    x, y = data(60, classes=3)
    fit = fit_map(model, x, y, Recipe(150, 20, lr=0.02))
    assert fit.loss[-1, 0] < fit.loss[0, 0]
    assert (model(x).argmax(-1) == y).double().mean() > 0.9


@pytest.mark.parametrize("rate", [1e3, 1e30])
def test_a_diverging_member_is_reported_and_keeps_its_last_good_parameters(rate):
    x, y = data(20)
    stack, alone = [regression(0), regression(1)], regression(1)
    start = {n: p.clone() for n, p in stack[0].named_parameters()}
    fit = fit_map(
        stack, x, y, Recipe(20, 20, lambda g: torch.optim.SGD(g, momentum=0.9), [rate, 1e-3], explosion=100.0)
    )
    assert fit.diverged.tolist() == [True, False]
    assert torch.isnan(fit.loss[-1, 0])
    for name, p in stack[0].named_parameters():
        torch.testing.assert_close(p, start[name], rtol=0, atol=0)  # it never got through an epoch
    fit_map(alone, x, y, Recipe(20, 20, lambda g: torch.optim.SGD(g, momentum=0.9), 1e-3))
    for p, q in zip(stack[1].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_dropout_acts_in_training_only():
    dropout = SeededDropout(0.5, 4)
    x = torch.ones(2, 4)
    dropout.mask = torch.tensor([0.0, 2.0, 0.0, 2.0])
    torch.testing.assert_close(dropout(x), x * dropout.mask)
    torch.testing.assert_close(dropout.eval()(x), x)


def test_batch_norm_statistics_of_a_stack_are_those_of_each_network():
    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        extractor = nn.Sequential(nn.BatchNorm1d(3)).double()
        return Model(
            StationaryLayer(3, 8, generator=generator, dtype=torch.float64),
            1,
            Gaussian(),
            extractor=extractor,
            generator=generator,
        )

    x, y = data(20)
    stack = [make(0), make(1)]
    fit_map(stack, x + 3, y, Recipe(2, 5, lr=1e-3), seed=[1, 2])
    alone = make(1)
    fit_map(alone, x + 3, y, Recipe(2, 5, lr=1e-3), seed=2)
    assert alone.extractor[0].running_mean.abs().max() > 1
    torch.testing.assert_close(stack[1].extractor[0].running_mean, alone.extractor[0].running_mean)


def test_divergence_restores_batch_norm_too_and_a_lone_last_row_is_skipped():
    def make():
        extractor = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
        return Model(StationaryLayer(3, 8, dtype=torch.float64), 1, Gaussian(), extractor=extractor)

    x, y = data(21)
    model = make()
    fit = fit_map(model, x, y, Recipe(5, 10, lambda g: torch.optim.SGD(g), 1e200))
    assert fit.diverged.all()
    assert all(torch.isfinite(v).all() for v in model.state_dict().values())
    assert not fit_map(make(), x, y, Recipe(2, 10, lr=1e-3)).diverged.any()


def test_an_interrupted_run_keeps_what_it_has_learnt():
    x, y = data(20)
    model = regression()
    before = model.output.weight.clone()

    def stop(_):
        raise KeyboardInterrupt("enough")

    with pytest.raises(KeyboardInterrupt, match="enough"):
        fit_map(model, x, y, Recipe(5, 10, lr=1e-2), after_epoch=stop)
    assert not torch.equal(model.output.weight, before)
    assert not model.training


def test_bad_arguments():
    x, y = data(20)
    model = regression()
    with pytest.raises(ValueError, match=r"networks may hold nn.Dropout and nn.Dropout1d to 3d, got \['0'\] instead"):
        fit_map(
            Model(
                StationaryLayer(3, 4, dtype=torch.float64), 1, Gaussian(), extractor=nn.Sequential(nn.AlphaDropout(0.1))
            ),
            x,
            y,
            Recipe(),
        )
    with pytest.raises(
        ValueError, match=r"networks of a stack must have the same extractor, outputs.*number 1 differs"
    ):
        fit_map([regression(), regression(hidden=(4,))], x, y, Recipe())
    with pytest.raises(ValueError, match=r"x parameter must have the model's type, torch.float64, got torch.float32"):
        fit_map(model, x.float(), y, Recipe())
    with pytest.raises(ValueError, match="y parameter must be finite, got 1 NaN"):
        fit_map(model, x, torch.where(torch.arange(20)[:, None] == 0, math.nan, y), Recipe())
    with pytest.raises(ValueError, match="at least two classes, got only class 0"):
        fit_map(
            Model(StationaryLayer(3, 4, dtype=torch.float64), 2, Categorical()),
            x,
            torch.zeros(20, dtype=torch.long),
            Recipe(),
        )
    with pytest.raises(ValueError, match="seed parameter must be one number or 1, got 2 instead"):
        fit_map(model, x, y, Recipe(), seed=[1, 2])
    with pytest.raises(ValueError, match="lr parameter must be positive and finite, got -1 instead"):
        fit_map(model, x, y, Recipe(lr=-1))
    with pytest.raises(ValueError, match=r"must add weight decay to the gradient.*AdamW does not"):
        fit_map(model, x, y, Recipe(optimizer=lambda groups: torch.optim.AdamW(groups)))
    mixed = [regression(), regression(activation="relu")]
    with pytest.raises(ValueError, match="after_epoch parameter needs networks that share their activation"):
        fit_map(mixed, x, y, Recipe(), after_epoch=print)
    with pytest.raises(ValueError, match="model parameter must be a bochner Model, got Linear instead"):
        fit_map(nn.Linear(2, 1), *data(), Recipe())
    with pytest.raises(ValueError, match="must be a network or a list of at least one, got an empty list"):
        fit_map([], x, y, Recipe())
    with pytest.raises(ValueError, match="epochs parameter must be an integer of at least 1, got 0 instead"):
        fit_map(model, x, y, Recipe(epochs=0))
    with pytest.raises(ValueError, match=r"rows parameter must have shape \(1, n\) with n ≥ 1, got \(2, 3\) instead"):
        fit_map(model, x, y, Recipe(), rows=torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"p parameter must lie in \[0, 1\), got 1 instead"):
        SeededDropout(1, 3)


def test_a_batch_of_one_row():
    x, y = data(1)
    assert torch.isfinite(fit_map(regression(), x, y, Recipe(2, 50)).loss).all()
