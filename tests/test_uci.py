"""The UCI experiments: networks by name, the published posterior, whole sweeps at small size, resume, engines, the command line."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import torch
from typer.testing import CliRunner

from bochner.cli import app
from bochner.datasets import Dataset, folds
from bochner.datasets.tables import ADULT_NUMERIC
from bochner.experiments.catalogue import EXPERIMENTS, Request
from bochner.experiments.published import decay, linear_search
from bochner.experiments.published_laplace import PublishedLaplace
from bochner.experiments.rows import read_rows, write_rows
from bochner.experiments.uci import kfac as uci
from bochner.experiments.uci import swag
from bochner.experiments.uci import sweep as sweeping
from bochner.experiments.uci.data import Data
from bochner.experiments.uci.kfac import Sweep, run_set
from bochner.experiments.uci.protocols import PROTOCOLS, Bench, Config, Paper, held_out_noise
from bochner.experiments.uci.sweep import pending, sweep, units
from bochner.experiments.zoo import MODELS, Shape, activation, build
from bochner.networks import SeededDropout
from bochner.posteriors.learning_rate import DivergedError
from bochner.predictive import CategoricalPredictive, GaussianPredictive
from bochner.reports import tables
from bochner.reports.blocks import as_markdown
from bochner.training import map as training
from problems import data, regression
from test_tables import ten

SMALL = {
    "folds": (0, 3),
    "epochs": 2,
    "hidden": (8, 6, 5),
    "width": 10,
    "rates": (1e-3, 1e-2),
    "scales": (0.05, 0.2),
    "grid_draws": 4,
    "draws": 6,
    "noise_points": 7,
    "swag_epochs": 20,
    "swag_trials": 4,
}
SHAPE = {"hidden": (8, 6, 5), "width": 10}


def tiny(name):
    """Stands in for ``load``: a generated set under the name of a real one."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 3)) * 5 + 2
    if name in uci.SETS["uci-regression"]:
        return Dataset(name, x, np.sin(x[:, 0]) + 0.1 * x[:, 1], None, ("a", "b", "c"))
    return Dataset(name, x, (x[:, 0] + generator.normal(size=60) > 2).astype(np.int64), 2, ("a", "b", "c"))


@pytest.fixture
def generated(monkeypatch):
    monkeypatch.setattr(uci, "load", tiny)


def without_clock(rows):
    return sorted(
        json.dumps({k: v for k, v in row.items() if k not in ("seconds", "commit")}, sort_keys=True) for row in rows
    )


def test_the_published_schedule_ends_at_five_hundred_thousandths():
    """Departure 10: half by epoch 30, a tenth by 54, 4.9e-5 at the end."""
    schedule = decay(100)
    assert schedule(0.0) == 1.0
    assert schedule(0.3) == pytest.approx(0.5, abs=0.05)
    assert schedule(0.54) == pytest.approx(0.1, abs=0.02)
    assert schedule(1.0) == pytest.approx(4.9e-5, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("protocol", ["paper", "bochner"])
def test_every_model_has_the_log_joint_of_its_protocol(name, protocol):
    model = build(name, 3, Shape(protocol, None, **SHAPE), 1).double()
    again = build(name, 3, Shape(protocol, None, **SHAPE), 1).double()
    x, y = data(20)
    assert torch.isfinite(model.log_joint(x, y))
    torch.testing.assert_close(model.log_joint(x, y), again.log_joint(x, y))
    if protocol == "paper":
        assert model.layer.multiplier.item() == (1.0 if name == "relu" else 5.0)
        torch.testing.assert_close(model.layer.lengthscale, 1 / model.layer.multiplier)
        assert (model.extractor(x) >= 0).all()
        assert "output.bias" not in model.precisions()
        # Σθ² with coefficient 1, biases included: its gradient is 2θ.
        weight = model.extractor[0].weight
        (slope,) = torch.autograd.grad(model.log_prior(), [weight])
        torch.testing.assert_close(slope, -2 * weight)


def test_published_phases_are_uniform_before_the_link():
    """Departure 17: the linked bias is then at most π tanh(π/2) = 2.88."""
    layer = build("rbf-sin", 3, Shape("paper", 2, 4000, (8, 5)), 0).layer
    assert layer.bias.abs().max() <= math.pi
    assert layer.bias.std().item() == pytest.approx(math.pi / math.sqrt(3), rel=0.05)
    assert layer.linked_bias.abs().max().item() == pytest.approx(2.88, abs=0.01)
    assert layer.multiplier.item() == 1.0  # classification starts at 1


@pytest.mark.parametrize(("name", "factor"), [("local_matern32", 1 / 1.5), ("local_matern52", 1 / 2.5)])
def test_published_local_matern_is_divided_by_nu(name, factor):
    z = torch.linspace(-1, 3, 20).double()
    torch.testing.assert_close(activation(name, "paper")(z), factor * activation(name, "bochner")(z))


def test_published_laplace_is_its_formula():
    """Empirical Fisher of the batch, damping √5e-4, scale/N, transposed factor: the output layer, written out."""
    models = [regression(s, hidden=(4, 3), width=5) for s in range(2)]
    x, y = (torch.stack(parts) for parts in zip(data(12, seed=0), data(12, seed=1), strict=True))
    posterior = PublishedLaplace(models, x, y, num_data=30, seeds=torch.tensor([0, 1]))
    at = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    drawn = list(posterior.outputs(at, scales=[0.5, 0.7], num=3))
    assert len(drawn) == 3
    assert drawn[0].shape == (2, 2, 6, 1)
    a_root, b_root = posterior.inverses[-1]
    for i, model in enumerate(models):
        h, f = model.features(x[i]).detach(), model(x[i]).detach()
        g = (y[i] - f) / 0.3**2
        damping = 5e-4**0.5
        a = torch.linalg.cholesky(h.T @ h / 12 + damping * torch.eye(5, dtype=torch.float64))
        b = torch.linalg.cholesky(g.T @ g / 12 + damping * torch.eye(1, dtype=torch.float64))
        torch.testing.assert_close(a_root[i], torch.linalg.inv(a))
        torch.testing.assert_close(b_root[i], torch.linalg.inv(b))
    # Where only the output layer moves the network is linear: outputs differ by scale/N · h · L_A⁻¹ z L_B⁻¹.
    posterior.inverses = [
        (a, b) if k == len(posterior.inverses) - 1 else (0 * a, b) for k, (a, b) in enumerate(posterior.inverses)
    ]
    (draw,) = posterior.outputs(at, scales=[0.7], num=1)
    generator = torch.Generator().manual_seed(0)
    for a, b in posterior.inverses:
        z = torch.randn(b.shape[-1], a.shape[-1], generator=generator, dtype=torch.float64)
    for i, model in enumerate(models):
        moved = (0.7 / 30) * b_root[i].T @ z @ a_root[i].T
        expected = model(at[i]).detach() + model.features(at[i]).detach() @ moved.T
        torch.testing.assert_close(draw[0, i], expected)


@pytest.mark.parametrize("name", ["rbf-sin", "matern32-tri", "rbf-sincos", "relu"])
def test_published_draws_are_those_of_networks_with_moved_weights(name):
    """W + scale/N · L_B⁻ᵀ Z L_A⁻ᵀ formed for every layer, phases before their link, against the thin products."""
    models = [build(name, 3, Shape("paper", None, **SHAPE), s).double() for s in range(2)]
    x, y = (torch.stack(parts) for parts in zip(data(12, seed=0), data(12, seed=1), strict=True))
    posterior = PublishedLaplace(models, x, y, num_data=3, seeds=torch.tensor([0, 1]))
    (drawn,) = posterior.outputs(x, scales=[0.4, 0.9], num=1)
    generator = torch.Generator().manual_seed(0)
    for tap, (a, b) in zip(posterior.layers, posterior.inverses, strict=True):
        z = torch.randn(b.shape[-1], a.shape[-1], generator=generator, dtype=torch.float64)
        for i, model in enumerate(models):
            change = 0.9 / 3 * b[i].T @ z @ a[i].T
            module = model.get_submodule(tap.name)
            with torch.no_grad():
                module.weight += change[:, :-1] if tap.has_bias else change
                if tap.has_bias:
                    module.bias += change[:, -1]
    for i, model in enumerate(models):
        torch.testing.assert_close(drawn[1, i], model(x[i]).detach())


def test_published_draws_do_not_depend_on_how_many_are_computed_at_a_time(monkeypatch):
    models = [build("rbf-tri", 3, Shape("paper", None, **SHAPE), s).double() for s in range(3)]
    x, y = (torch.stack(parts) for parts in zip(*(data(12, seed=s) for s in range(3)), strict=True))
    posterior = PublishedLaplace(models, x, y, num_data=3, seeds=torch.arange(3))
    found = []
    for portion in ((1, 12, 1), (3, 5, 4), (2, 12, 5)):
        monkeypatch.setattr(PublishedLaplace, "_portion", staticmethod(lambda *_, portion=portion: portion))
        found.append(torch.stack(list(posterior.outputs(x, scales=[0.4, 0.9], num=5))))
    assert found[0].shape == (5, 2, 3, 12, 1)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_folds_are_standardised_by_their_own_training_rows():
    full = tiny("boston")
    cut = Data.of(full, (0, 3), "cpu")
    assert cut.train.shape == (2, 54)
    assert cut.test.shape == (2, 6)
    for i, fold in enumerate((0, 3)):
        train, test = folds(60)[fold]
        torch.testing.assert_close(cut.x[cut.train[i]].mean(0), torch.zeros(3), rtol=0, atol=1e-6)
        torch.testing.assert_close(cut.y[cut.train[i]].std(0, correction=0), torch.ones(1))
        expected = (full.x[test] - full.x[train].mean(0)) / full.x[train].std(0)
        np.testing.assert_allclose(cut.x[cut.test[i]].numpy(), expected, rtol=1e-5, atol=1e-6)
    fit, check = cut.halves()
    assert (fit.shape[1], check.shape[1]) == (43, 11)
    torch.testing.assert_close(torch.cat([fit, check], 1), cut.train)


def test_held_out_noise_maximises_the_validation_density():
    generator = torch.Generator().manual_seed(0)
    mean, variance = torch.zeros(2, 40, 1).double(), torch.rand(2, 40, 1, generator=generator).double()
    y = torch.randn(2, 40, 1, generator=generator).double() * torch.tensor([1.0, 3.0]).double()[:, None, None]
    found = held_out_noise(GaussianPredictive(mean, variance, torch.ones(2).double()), y)
    for i in range(2):

        def loss(noise, i=i):
            total = variance[i] + noise**2
            return float((0.5 * y[i] ** 2 / total + 0.5 * total.log()).mean())

        best = scipy.optimize.minimize_scalar(loss, bounds=(1e-3, 10), method="bounded", options={"xatol": 1e-9}).x
        assert found[i].item() == pytest.approx(best, rel=1e-4)


def small_sweep(protocol="paper", experiment="uci-regression", **changes):
    config = Config(experiment=experiment, protocol=protocol, **{**SMALL, **changes})
    data = Data.of(tiny("boston" if experiment == "uci-regression" else "diabetes"), (0, 3), "cpu")
    return Sweep(Bench(config, data, 10, torch.tensor([0, 3])))


def test_the_rate_is_the_smallest_within_one_standard_error():
    scores = np.array([[1.0, 1.2, 1.1, 0.9], [0.52, 0.43, 0.50, 0.57], [0.50, 0.44, 0.50, 0.56]])
    # The second is 0.005 ± 0.006 above the best, at most 0.02 where the best spreads by 0.04; the first 0.550 ± 0.062.
    assert PROTOCOLS["bochner"].choose_rate(scores) == 1
    assert PROTOCOLS["paper"].choose_rate(scores) == 2
    assert PROTOCOLS["paper"].choose_rate(np.array([[1.0, 1.0], [0.1, math.inf]])) == 0
    ruined = np.array([[0.499] * 9 + [1000.0], list(np.linspace(0.4, 0.6, 10))])
    assert PROTOCOLS["bochner"].choose_rate(ruined) == 1


@pytest.mark.parametrize("experiment", ["uci-regression", "uci-classification"])
def test_rates_are_scored_by_the_protocols_metric(experiment):
    """Error, minus accuracy, or minus log density of the validation rows, recomputed; infinite where a fold diverged."""
    for protocol in ("paper", "bochner"):
        sweep_ = small_sweep(protocol, experiment)
        nets, rows = sweep_.untrained("rbf-sin"), sweep_.data.halves()[1]
        found = sweep_.rate_scores(nets, torch.tensor([False, True]), rows)
        x, y = sweep_.data.x[rows[0]], sweep_.data.y[rows[0]]
        f = nets[0].eval()(x).detach()
        if experiment == "uci-regression":
            likelihood = -nets[0].likelihood(f, y).mean()
            expected = likelihood if protocol == "bochner" else (f - y).square().mean().sqrt()
        elif protocol == "bochner":
            expected = torch.nn.functional.cross_entropy(f, y)
        else:
            expected = -(f.argmax(-1) == y).double().mean()
        assert found[0] == pytest.approx(expected.item(), rel=1e-5)
        assert found[1] == math.inf


def test_scales_are_scored_on_validation_plus_a_fifth_of_noise():
    """Departure 33: validation + 0.2 × noise."""
    sweep_ = small_sweep(noise_points=2)
    mean, y = torch.tensor([[0.0, 1.0, 2.0, 3.0]])[..., None].repeat(2, 1, 1), torch.ones(2, 2, 1)
    prediction = GaussianPredictive(mean, torch.zeros_like(mean), torch.ones(2))
    constant = 0.5 * math.log(2 * math.pi)
    # Residuals 1, 0 on validation (targets 1) and 2, 3 on noise (targets 0).
    expected = (0.25 + constant) + 0.2 * (13 / 4 + constant)
    torch.testing.assert_close(
        Paper.scale_scores(prediction, y, 2, sweep_.config.noise_weight), torch.full((2,), expected)
    )
    log_p = torch.log(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [0.99, 0.01]])).repeat(2, 1, 1)
    guess = CategoricalPredictive(log_p, torch.zeros_like(log_p), torch.zeros(2, 4))
    expected = -0.5 * (math.log(0.9) + math.log(0.8)) - 0.05 * (2 * math.log(0.5) + math.log(0.99) + math.log(0.01))
    labels = torch.tensor([[0, 1], [0, 1]])
    torch.testing.assert_close(
        Paper.scale_scores(guess, labels, 2, sweep_.config.noise_weight), torch.full((2,), expected)
    )


def test_published_nlpd_is_that_of_one_gaussian():
    """Departure 33: N(y | mean of f, s² + var f) of the draws, in the table and for the scale; not their mixture."""
    sweep_ = small_sweep()
    nets = sweep_.untrained("rbf-sin")
    x, y = sweep_.data.x[sweep_.data.test], sweep_.data.y[sweep_.data.test]
    posterior = Paper().posterior(sweep_.bench, nets, sweep_.data.train)
    f = torch.stack([d[0] for d in posterior.outputs(x, scales=[200.0], num=6)]).double()
    std = (posterior.noise.double().square()[:, None, None] + f.var(0, correction=0)).sqrt()
    expected = -torch.distributions.Normal(f.mean(0), std).log_prob(y.double()).mean((1, 2))
    rows = sweep_.test(nets, 200.0)
    for row, nlpd in zip(rows, expected.tolist(), strict=True):
        assert row["nlpd"] == pytest.approx(nlpd, rel=1e-4)
    mixture = GaussianPredictive.from_samples(f, posterior.noise.double()).log_prob(y.double())
    assert rows[0]["nlpd"] != pytest.approx(-mixture[0].mean().item(), rel=1e-2)


def test_only_the_numeric_columns_of_adult_are_standardised_under_paper(monkeypatch):
    """Departure 34: its 0/1 columns stay; under bochner all are standardised."""
    generator = np.random.default_rng(1)
    x = np.concatenate([generator.normal(3, 5, (60, 6)), generator.random((60, 4)) < 0.2], 1)
    names = (*ADULT_NUMERIC, "a=1", "a=2", "b=1", "b=2")
    full = Dataset("adult", x, np.arange(60) % 2, 2, names)
    seen = {}
    monkeypatch.setattr(uci, "load", lambda _: full)

    def look(bench, *_):
        seen[bench.config.protocol] = bench.data
        raise InterruptedError("seen")

    monkeypatch.setattr(uci, "Sweep", look)
    for protocol in ("paper", "bochner"):
        with pytest.raises(InterruptedError, match="seen"):
            run_set(Config(experiment="uci-classification", protocol=protocol, **SMALL), "adult", ["relu"])
    order = np.concatenate([full.x, full.x])
    paper, ours = seen["paper"], seen["bochner"]
    np.testing.assert_array_equal(paper.x[:, 6:].numpy(), order[:, 6:])
    torch.testing.assert_close(paper.x[:, :6], ours.x[:, :6])
    assert paper.x[paper.train[0]][:, :6].std(0, correction=0).numpy() == pytest.approx(1.0, rel=1e-5)
    assert ours.x[ours.train[0]][:, 6:].std(0, correction=0).numpy() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("name", ["relu", "local-rbf", "local-matern32"])
def test_the_published_prior_of_normal_biases_is_taken_at_the_linked_bias(name):
    """Departure 38: N(π tanh(b/2) | 0, 1), while the layer adds b itself."""
    layer = build(name, 3, Shape("paper", 2, **SHAPE), 0).double().layer
    gradients = torch.autograd.grad(layer.log_prior(), list(layer.parameters()))
    slopes = layer.log_prior_slopes({n: p.detach() for n, p in layer.named_parameters()})
    for (n, _), gradient in zip(layer.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(slopes[n], gradient, msg=n)
    slope, half = slopes["bias"], torch.tanh(layer.bias / 2)
    torch.testing.assert_close(slope, -(math.pi * half) * (math.pi / 2) * (1 - half**2))
    before = layer.log_prior().item()
    with torch.no_grad():
        layer.bias[0] += 0.7
    moved = math.pi * torch.tanh(layer.bias[0] / 2), math.pi * torch.tanh((layer.bias[0] - 0.7) / 2)
    assert layer.log_prior().item() - before == pytest.approx((moved[1] ** 2 - moved[0] ** 2).item() / 2)
    torch.testing.assert_close(layer.linked_bias, layer.bias)


def test_the_published_curvature_sees_the_first_batch_with_dropout_on():
    sweep_ = small_sweep()
    nets, rows = sweep_.untrained("rbf-sin"), sweep_.data.train
    here = Paper().posterior(sweep_.bench, nets, rows).inverses
    moved = rows.clone()
    moved[:, sweep_.bench.batch :] = rows[:, sweep_.bench.batch :].flip(1)
    torch.testing.assert_close(Paper().posterior(sweep_.bench, nets, moved).inverses[-1][0], here[-1][0])
    sweep_.bench.seeds = sweep_.bench.seeds + 1
    assert not torch.allclose(Paper().posterior(sweep_.bench, nets, rows).inverses[-1][0], here[-1][0], rtol=1e-3)


def test_held_out_noise_is_what_the_prediction_uses():
    sweep_ = small_sweep("bochner")
    nets = sweep_.untrained("rbf-sin")
    wide, narrow = (sweep_.test(nets, torch.full((2,), noise)) for noise in (3.0, 0.3))
    assert wide[0]["rmse"] == narrow[0]["rmse"]
    assert wide[0]["nlpd"] != narrow[0]["nlpd"]


def test_a_bad_fold_leaves_the_noise_of_others_alone():
    mean, y = torch.zeros(2, 5, 1), torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5])[:, None].repeat(2, 1, 1)
    mean[0] = math.nan
    found = held_out_noise(GaussianPredictive(mean, torch.zeros_like(mean), torch.ones(2)), y)
    assert math.isnan(found[0])
    assert found[1].item() == pytest.approx(y[1].square().mean().sqrt().item(), rel=1e-4)


@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize("protocol", ["paper", "bochner"])
@pytest.mark.parametrize(("experiment", "name"), [("uci-regression", "boston"), ("uci-classification", "diabetes")])
def test_a_set_gives_one_row_for_each_model_and_fold(protocol, experiment, name):
    config = Config(experiment=experiment, protocol=protocol, **SMALL)
    rows = run_set(config, name, ["relu", "matern32-sin"])
    assert [(r["model"], r["fold"]) for r in rows] == [(m, f) for m in ("relu", "matern32-sin") for f in (0, 3)]
    names = {"nlpd", "rmse"} if experiment == "uci-regression" else {"nlpd", "accuracy", "auc"}
    for row in rows:
        assert row["status"] == "ok"
        assert all(math.isfinite(row[n]) and math.isfinite(row[f"map_{n}"]) for n in names)
        assert row["lr"] in SMALL["rates"]
        assert row["folds"] == [0, 3]
        assert {"seconds", "commit", "torch", "seed", "protocol"} <= row.keys()
        assert (row["scale"] in SMALL["scales"]) if protocol == "paper" else ("scale" not in row)


@pytest.mark.usefixtures("generated")
def test_a_unit_alone_equals_the_unit_inside_a_stack(monkeypatch):
    """In float32 sums may come in another order: equal to 1e-3 after two epochs of a small network."""
    monkeypatch.setattr(training, "stack_size", lambda *_: 1000)
    config = Config(protocol="bochner", **SMALL)
    names = ["rbf-prelu", "relu", "matern32-sin", "matern52-sincos"]
    together = {(r["model"], r["fold"]): r for r in run_set(config, "boston", names)}
    for name in names:
        for row in run_set(config, "boston", [name]):
            other = together[name, row["fold"]]
            assert row["lr"] == other["lr"]
            for metric in ("nlpd", "rmse", "map_nlpd", "map_rmse"):
                assert row[metric] == pytest.approx(other[metric], rel=1e-3, abs=1e-4)


@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize("protocol", ["paper", "bochner"])
def test_divergence_is_a_row_that_says_so(protocol):
    config = Config(protocol=protocol, **{**SMALL, "rates": (1e30,)})
    rows = run_set(config, "boston", ["rbf-sin"])
    assert {r["status"] for r in rows} == {"diverged"}
    assert all(r["nlpd"] is None and r["lr"] == 1e30 for r in rows)


@pytest.mark.usefixtures("generated")
def test_swag_that_diverges_everywhere_is_a_row_too(monkeypatch):
    def diverge(*_, **__):
        raise DivergedError("everywhere")

    monkeypatch.setattr(swag, "Swag", diverge)
    config = Config(experiment="uci-classification", posterior="swag", **{**SMALL, "hidden": (8, 6)})
    rows = run_set(config, "diabetes", ["rbf-sin"])
    assert [(r["status"], r["nlpd"], r["lr"]) for r in rows] == [("diverged", None, None)] * 2


@pytest.mark.usefixtures("generated")
def test_swag_rows():
    config = Config(experiment="uci-classification", protocol="paper", posterior="swag", **{**SMALL, "hidden": (8, 6)})
    config = replace(config, swag_trials=2)  # 0.001 and 3: in between so small a network may or may not diverge
    rows = run_set(config, "diabetes", ["rbf-sin"])
    assert [r["status"] for r in rows] == ["ok", "ok"]
    grid = np.linspace(0.001, 3, 4)
    assert all(r["lr"] in grid and 0 <= r["accuracy"] <= 1 for r in rows)
    paper = Config.swag(experiment="uci-classification", protocol="paper")
    assert (paper.hidden, paper.width, paper.epochs) == ((1000, 1000, 500), 50, 20)
    # Dropout sits before the 500-wide layer.
    layers = list(build("relu", 8, Shape("paper", 2, paper.width, paper.hidden), 0).extractor)
    place = next(i for i, layer in enumerate(layers) if isinstance(layer, SeededDropout))
    assert (layers[place].width, layers[place + 1].out_features) == (1000, 500)


@pytest.mark.usefixtures("generated")
def test_models_of_one_activation_collect_as_one_stack_and_equal_each_alone(monkeypatch):
    """Draws of a stack share a generator, so the trained networks are compared: the scores before any draw."""
    config = Config(experiment="uci-classification", protocol="paper", posterior="swag", **{**SMALL, "hidden": (8, 6)})
    means = {}

    def search(loss, _config):
        loss(1e-3)
        return 1e-3

    collect = swag.Swag

    def collected(nets, *args, **options):
        found = collect(nets, *args, **options)
        means.setdefault(len(nets), []).append(found.mean["output.weight"].clone())
        return found

    monkeypatch.setattr(PROTOCOLS["paper"], "search_swag_rate", search)
    monkeypatch.setattr(swag, "Swag", collected)
    together = run_set(config, "diabetes", ["rbf-sin", "matern32-sin"])
    alone = [row for name in ("rbf-sin", "matern32-sin") for row in run_set(config, "diabetes", [name])]
    assert [(r["model"], r["fold"], r["lr"]) for r in together] == [(r["model"], r["fold"], r["lr"]) for r in alone]
    # Validation and test, of two models as one stack and of each alone.
    for which in (0, 1):
        torch.testing.assert_close(
            means[4][which], torch.cat([means[2][which], means[2][2 + which]]), rtol=1e-3, atol=1e-5
        )


@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize(("protocol", "optimizer"), [("paper", training.sgd), ("bochner", training.adam)])
def test_the_first_phase_of_published_swag_is_sgd(protocol, optimizer, monkeypatch):
    """Departure 36: SGD with momentum, though the text calls it Adam."""

    def stop(_nets, _x, _y, recipe, **_):
        raise InterruptedError(recipe.optimizer.__name__)

    monkeypatch.setattr(swag, "fit_map", stop)
    config = Config(experiment="uci-classification", protocol=protocol, posterior="swag", **{**SMALL, "hidden": (8, 6)})
    with pytest.raises(InterruptedError, match=optimizer.__name__):
        run_set(config, "diabetes", ["rbf-sin"])


def test_the_published_search_is_a_linear_grid():
    """Departure 36: from 0.001 to 3 in even steps; a rate that diverges does not count."""
    best, tried = linear_search(lambda rate: math.nan if rate > 2 else abs(rate - 1), trials=4)
    assert [rate for rate, _ in tried] == pytest.approx([0.001, 0.001 + 2.999 / 3, 0.001 + 2 * 2.999 / 3, 3.0])
    assert best == pytest.approx(0.001 + 2.999 / 3)
    with pytest.raises(DivergedError, match=r"No learning rate between 0.001 and 3.0 gave a finite score"):
        linear_search(lambda _: math.nan, trials=3)


@pytest.mark.usefixtures("generated")
def test_a_second_run_makes_what_is_missing_and_nothing_else(tmp_path, monkeypatch):
    config = Config(protocol="bochner", **SMALL)
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    sweep(config, ["boston", "concrete"], ["relu", "rbf-sin"], whole, Request())
    sweep(config, ["boston"], ["relu"], resumed, Request())
    calls = []
    monkeypatch.setattr(sweeping, "run_set", lambda c, s, m, **k: calls.append((s, m)) or run_set(c, s, m, **k))
    lines = []
    sweep(config, ["boston", "concrete"], ["relu", "rbf-sin"], resumed, Request(report=lines.append))
    assert calls == [("boston", ["rbf-sin"]), ("concrete", ["relu"]), ("concrete", ["rbf-sin"])]
    assert len(lines) == 3
    assert without_clock(read_rows(resumed)) == without_clock(read_rows(whole))
    sweep(config, ["boston", "concrete"], ["relu", "rbf-sin"], resumed, Request())
    assert len(calls) == 3


@pytest.mark.usefixtures("generated")
def test_two_sweeps_into_one_file_and_a_torn_line_lose_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    one = Config(protocol="bochner", **SMALL)

    def other(_):
        sweep(dataclasses.replace(one, seed=1), ["boston"], ["relu"], path, Request())

    sweep(one, ["boston"], ["relu", "rbf-sin"], path, Request(report=other))
    assert [(r["seed"], r["model"]) for r in read_rows(path)] == [
        (seed, model) for model in ("rbf-sin", "relu") for _ in (0, 3) for seed in ((0, 1) if model == "relu" else (0,))
    ]
    torn = path.read_text()[:-20]
    path.write_text(torn)
    sweep(dataclasses.replace(one, seed=1), ["boston"], ["relu"], path, Request())
    assert len(read_rows(path)) == 6


def test_jobs():
    config = Config(folds=(0, 1))
    have = [{"protocol": "bochner", "posterior": "kfac", "set": "boston", "model": "relu", "seed": 0, "folds": [0, 1]}]
    rows = [{**have[0], "fold": 0}, {**have[0], "fold": 1}]
    assert pending(config, ["boston"], ["relu"], rows) == {}
    assert pending(config, ["boston"], ["relu"], rows[:1]) == {"boston": ["relu"]}
    assert pending(dataclasses.replace(config, seed=1), ["boston"], ["relu"], rows) == {"boston": ["relu"]}
    left = {"boston": ["relu", "rbf-sin"], "concrete": ["relu"]}
    assert units(config, left) == [("boston", ["relu"]), ("boston", ["rbf-sin"]), ("concrete", ["relu"])]
    assert units(dataclasses.replace(config, device="cuda"), left) == [
        ("concrete", ["relu"]),
        ("boston", ["relu", "rbf-sin"]),
    ]
    # Sets that take minutes are cut, so that what an interrupted run has made is kept.
    names = list(MODELS)
    large = units(dataclasses.replace(config, device="cuda"), {"adult": names, "covtype": names})
    assert [(name, len(models)) for name, models in large] == [("covtype", 1)] * 16 + [("adult", 8)] * 2
    assert sorted(m for name, models in large if name == "adult" for m in models) == sorted(names)
    assert {MODELS[m][1] for m in large[-1][1]} == {"sin", "sincos", "triangle"}  # activations stay together
    swag = Config.swag(experiment="uci-classification", device="cuda")
    assert units(swag, {"adult": ["relu", "rbf-sin"]}) == [("adult", ["relu"]), ("adult", ["rbf-sin"])]
    grouped = units(dataclasses.replace(swag, protocol="paper"), {"adult": names, "covtype": names[:3]})
    assert [len(models) for name, models in grouped if name == "adult"] == [1, 1, 1, 1, 3, 3, 3, 3]
    assert all(len({MODELS[m][1] for m in models}) == 1 for _, models in grouped)
    assert [len(models) for name, models in grouped if name == "covtype"] == [1, 1, 1]


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_uci
from bochner.experiments.uci import kfac as uci
from bochner.experiments.uci import swag
from bochner.experiments.catalogue import Request
from bochner.experiments.uci.sweep import sweep
from bochner.experiments.uci.protocols import Config
uci.load = test_uci.tiny
config = Config(protocol="paper", **test_uci.SMALL)
sweep(config, ["boston"], ["relu", "rbf-sin", "rbf-tri"], Path(sys.argv[1]), Request())
"""


@pytest.mark.usefixtures("generated")
def test_a_killed_sweep_ends_with_the_rows_of_an_unbroken_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    broken, whole = tmp_path / "broken.jsonl", tmp_path / "whole.jsonl"
    process = subprocess.Popen([sys.executable, str(script), str(broken)], env=environment)
    while not broken.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < len(read_rows(broken)) < 6
    for path in (broken, whole):
        sweep(Config(protocol="paper", **SMALL), ["boston"], ["relu", "rbf-sin", "rbf-tri"], path, Request())
    assert len(read_rows(whole)) == 6
    assert without_clock(read_rows(broken)) == without_clock(read_rows(whole))


@pytest.mark.usefixtures("generated")
def test_unknown_and_absent_engines(tmp_path, monkeypatch):
    config = Config(protocol="bochner", **SMALL)
    with pytest.raises(
        ValueError, match=r"engine parameter must be one of local, ray, dask, got 'rey' instead. Did you mean 'ray'"
    ):
        EXPERIMENTS["uci-regression"].check(Request(engine="rey"))
    monkeypatch.setitem(sys.modules, "ray.util.joblib", None)
    with pytest.raises(ValueError, match="engine 'ray' needs a package that is not installed"):
        sweep(config, ["boston"], ["relu"], tmp_path / "rows.jsonl", Request(engine="ray"))


def test_the_command_line_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("BOCHNER_DATA", str(tmp_path / "nowhere"))
    runner = CliRunner()
    result = runner.invoke(app, ["run", "uci-regression", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "bochner data fetch boston" in result.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()
    folder = Path(__file__).parents[2] / "shared" / "data" / "tables"
    if folder.exists():
        monkeypatch.setenv("BOCHNER_DATA", str(tmp_path))
        text = (folder / "boston.csv").read_text()
        (tmp_path / "boston.csv").write_text(text.replace("0.02731", "0.02732"))
        result = runner.invoke(app, ["run", "uci-regression", "--sets", "boston", "--out", str(tmp_path / "out")])
        assert result.exit_code == 1
        assert "data set boston cannot be used" in result.output
    for words, message in (
        (["--models", "rbf-sine"], "Did you mean 'rbf-sin'"),
        (["--sets", "bostn"], "Did you mean 'boston'"),
        (["--folds", "11"], "folds parameter must be one of 0, 1"),
        (["--protocol", "papers"], "Did you mean 'paper'"),
        (["--posterior", "swag"], "part of uci-classification only"),
        (["--device", "cuda:9"], "device parameter must be one of"),
        (["--protocol", "paper,bochner"], "protocol parameter must be one of"),
        (["--models", ","], "models parameter must name at least one of"),
    ):
        result = runner.invoke(app, ["run", "uci-regression", *words])
        assert result.exit_code == 1
        assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.usefixtures("generated")
def test_the_report_never_trains(tmp_path):
    runner = CliRunner()
    result = runner.invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "There are no rows in" in " ".join(result.output.replace("│", " ").split())
    (tmp_path / "uci-regression.jsonl").write_text("nonsense\n")
    result = runner.invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "Line 1 of" in result.output
    (tmp_path / "uci-regression.jsonl").unlink()
    rows = [*ten(0.5), *ten(0.4, model="rbf-sin"), *ten(0.3, protocol="bochner")]
    write_rows(tmp_path / "uci-regression.jsonl", rows)
    result = runner.invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    blocks = [*tables.blocks(rows), tables.headline(rows), *tables.comparison(rows)]
    assert (tmp_path / "tables.md").read_text() == as_markdown(blocks)
    assert (tmp_path / "tables.tex").read_text() == tables.latex(rows)
    write_rows(tmp_path / "uci-regression.jsonl", ten(0.5))
    assert runner.invoke(app, ["report", str(tmp_path)]).exit_code == 0
    assert (tmp_path / "tables.md").read_text() == as_markdown([*tables.blocks(ten(0.5)), tables.headline(ten(0.5))])


RAY = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import ray
import test_uci
from bochner.experiments.uci import kfac as uci
from bochner.experiments.uci import swag
from bochner.experiments.catalogue import Request
from bochner.experiments.uci.sweep import sweep
from bochner.experiments.uci.protocols import Config

ray.init(num_cpus=2, include_dashboard=False, runtime_env={{"env_vars": {{"BOCHNER_DATA": sys.argv[2]}}}})
for engine, workers in (("local", 1), ("ray", 2)):
    path = Path(sys.argv[1]) / f"{{engine}}.jsonl"
    config, request = Config(protocol="bochner", **test_uci.SMALL), Request(engine=engine, workers=workers)
    sweep(config, ["boston"], ["relu", "rbf-sin"], path, request)
"""


@pytest.mark.slow
def test_ray_makes_the_rows_of_a_local_run(tmp_path):
    """Two workers in processes of their own, on the real boston set."""
    pytest.importorskip("ray")
    folder = Path(__file__).parents[2] / "shared" / "data" / "tables"
    if not folder.exists():
        pytest.skip("the data sets are not beside the repository")
    script = tmp_path / "script.py"
    script.write_text(RAY.format(tests=str(Path(__file__).parent)))
    environment = {**os.environ, "BOCHNER_DATA": str(folder)}
    subprocess.run([sys.executable, str(script), str(tmp_path), str(folder)], env=environment, check=True)
    rows = {engine: read_rows(tmp_path / f"{engine}.jsonl") for engine in ("local", "ray")}
    assert len(rows["ray"]) == 4
    assert without_clock(rows["ray"]) == without_clock(rows["local"])
