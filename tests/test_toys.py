"""The toy experiments at small sizes: rows, what they say, and figures from the rows alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats

from bochner.experiments import toys
from bochner.experiments.catalogue import Request
from bochner.experiments.rows import read_rows, write_rows
from bochner.experiments.theory import NINE
from bochner.experiments.toys import EXPERIMENTS, PAPER, PROCESSES, Config
from bochner.likelihoods import Gaussian
from bochner.posteriors import nuts
from bochner.reports.figures import save_figure
from bochner.reports.toys import DRAWN_FROM, FIGURES

SMALL = Config(
    populations=2,
    particles=8,
    sweeps=1,
    warmup=1,
    units=3,
    widths=(2, 3),
    toy_units=3,
    grid=8,
    gp_steps=5,
    draws=10,
)
ROWS = {"banana": 1 + 15 + 6, "banana-width": 1 + 2 * 4 * 2, "toy-1d": 1 + 9 + 9}


def crescents(num=40):
    """Two arcs of two classes, in the place of the banana set."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(num) % 2
    angle = torch.pi * torch.rand(num, generator=generator, dtype=torch.float64)
    side = torch.where(y == 1, 1.0, -1.0)
    return torch.stack([side * (1.5 * angle.cos() - 0.5), side * (1.5 * angle.sin() - 0.7)], -1), y


@pytest.fixture(autouse=True)
def generated(monkeypatch):
    load = toys._arrays
    monkeypatch.setattr(toys, "_arrays", lambda name: crescents() if name == "banana" else load(name))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_makes_rows_and_figures_from_them_alone(name, tmp_path, monkeypatch):
    monkeypatch.setattr(toys, "Config", lambda seed, protocol, *_, **__: replace(SMALL, seed=seed, protocol=protocol))
    path, said = tmp_path / f"{name}.jsonl", []
    request = Request(report=said.append)
    toys.run(name, request, path)
    rows = read_rows(path)
    assert len(rows) == len(said) == ROWS[name]
    for row in (r for r in rows if r["method"] == "slices"):
        assert np.isfinite([row["r_hat"], row["ess"], *row["mean"]]).all()
        # Sixteen particles are never 400 effective ones: every network is sampled again, for longer.
        assert (row["populations"], row["particles"], row["sweeps"], row["warmup"]) == (2, 8, 1, 4)
    for figure in DRAWN_FROM[name]:
        save_figure(FIGURES[figure](rows), tmp_path / f"{figure}.svg")
        assert (tmp_path / f"{figure}.svg").stat().st_size < 1_000_000
    save_figure(FIGURES[figure](read_rows(path)), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / f"{figure}.svg").read_bytes()


def test_an_interrupted_run_makes_what_is_missing_and_drops_rows_of_another_sampler(tmp_path, monkeypatch):
    units = {("data", ""): lambda: {"method": "data"}, ("slices", "a"): lambda: {"method": "slices", "model": "a"}}
    monkeypatch.setitem(EXPERIMENTS, "banana", lambda _: units)
    path, said = tmp_path / "banana.jsonl", []
    origin = {"experiment": "banana", "seed": 0, "protocol": "bochner"}
    write_rows(path, [{**origin, "method": "data", "kept": True}, {**origin, "method": "nuts", "model": "a"}])
    toys.run("banana", Request(report=said.append), path)
    data, network = read_rows(path)
    assert data["kept"]
    assert (network["method"], network["model"]) == ("slices", "a")
    assert said[0].startswith("[1/1] banana slices a")
    toys.run("banana", Request(report=said.append), path)
    assert "already" in said[1]
    assert read_rows(path) == [data, network]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"r_hat": 1.011}, False),
        ({"ess": 399}, False),
        ({"far_r_hat": 1.02}, False),
        ({"far_ess": 3}, False),
    ],
)
def test_a_network_converged_if_its_populations_agree_near_and_far(change, expected):
    assert toys.converged({"r_hat": 1.01, "ess": 400, **change}) is expected


def test_a_network_that_converged_is_not_sampled_again():
    x, y = toys._arrays("toy-1d")
    model = toys.make_network(("rbf", "sin"), 1, 3, Gaussian(0.1), Config())
    easy = replace(SMALL, particles=300, populations=4, warmup=20, sweeps=3)
    assert toys._sampled(model, (x[:2], y[:2, None]), {"": x}, easy)[1]["warmup"] == 20


def test_curves_are_those_of_f_and_of_y():
    x, y = toys._arrays("toy-1d")
    model = toys.make_network(("rbf", "sin"), 1, 3, Gaussian(0.1), Config())
    posterior, how = toys._sampled(model, (x, y[:, None]), {"": x, "far_": 5 * x}, SMALL)
    assert how.items() >= {"method": "slices", "populations": 2, "particles": 8}.items()
    for prefix, points in (("", x), ("far_", 5 * x)):
        found = posterior.diagnose(points)
        assert (how[f"{prefix}r_hat"], how[f"{prefix}ess"]) == (round(found.r_hat, 4), round(found.ess, 1))
    curves = toys._curves(posterior.predict(x), x)
    assert all(a < b for a, b in zip(curves["std"], curves["std_y"], strict=True))


def test_published_banana_has_one_logit_with_a_bias_and_normal_output_weights():
    """Departures 30 and 39, the log joint written out with SciPy; NUTS samples the same density."""
    (name, model), *_ = toys._periodic(("rbf",), 5, Config(protocol="paper")).items()
    assert name == "rbf-sin"
    model, (x, y) = model.double(), crescents(12)
    assert model.output.weight.shape == (1, 5)
    logit = (model.features(x) @ model.output.weight.T + model.output.bias)[:, 0].detach().numpy()
    expected = -np.logaddexp(0, np.where(y == 1, -logit, logit)).sum()
    expected += stats.norm.logpdf(model.output.weight.detach()).sum() + stats.norm.logpdf(model.output.bias.item())
    expected += model.layer.log_prior(jacobian=True).item() + stats.gamma(2).logpdf(1)  # the amplitude, held at 1
    assert model.log_joint(x, y, jacobian=True).item() == pytest.approx(expected, rel=1e-12)
    with jax.enable_x64(True):
        parameters = {n: jnp.asarray(p.detach().numpy()) for n, p in model.named_parameters()}
        sampled = nuts.log_joint(model, parameters, *nuts.as_arrays(model, x, y))
    assert float(sampled) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(torch.softmax(model(x), -1)[:, 1].detach(), torch.from_numpy(1 / (1 + np.exp(-logit))))


def test_every_figure_has_an_experiment():
    assert sorted(name for names in DRAWN_FROM.values() for name in names) == sorted(FIGURES)
    assert list(DRAWN_FROM) == list(EXPERIMENTS)
    assert list(PAPER["mean"]) == list(NINE)
    assert {len(curve) for curve in PAPER["mean"].values()} == {PAPER["grid"]["num"]}


def test_the_square_is_drawn_row_after_row_from_the_bottom():
    """So that reshaping gives an image with y along the first axis."""
    square = toys._square(3, 2.0)
    torch.testing.assert_close(square[:4].tolist(), [[-2.0, -2.0], [0.0, -2.0], [2.0, -2.0], [-2.0, 0.0]])


def test_processes_return_to_the_prior_lose_their_variance_or_extrapolate():
    """The three behaviours of the paper's first figure, at infinite width and after a fit; nothing is sampled."""
    rows = {name: toys._banana_process(name, Config(gp_steps=50, grid=4, draws=200)) for name in PROCESSES}
    assert list(rows) == list(PROCESSES)
    for name in ("rbf-sin", "matern32-sin"):
        assert rows[name]["far_confidence"] < 0.55
        assert rows[name]["far_variance"] > 0.01
    for name in ("local_rbf", "local_matern32"):
        assert rows[name]["far_confidence"] < 0.55
        assert rows[name]["far_variance"] < 1e-3
    assert rows["relu"]["far_worst_confidence"] > 0.75


def test_processes_of_the_regression_are_near_the_papers():
    """Our points only resemble the paper's, which it does not list: its nine means are met within 0.1 on average."""
    rows = {prior: toys._toy_process(prior, Config(gp_steps=100)) for prior in NINE}
    differences = [row["paper_difference"] for row in rows.values()]
    assert np.mean(differences) < 0.1
    for row in rows.values():
        recomputed = np.abs(np.subtract(row["mean"], row["paper"])).mean()
        assert row["paper_difference"] == pytest.approx(recomputed, abs=2e-4)
    # At the edges of the grid, five times as far out as the data.
    assert rows["RBF"]["std"][0] == pytest.approx(rows["RBF"]["amplitude"], rel=1e-3)
    assert rows["RBF-NN (local)"]["std"][0] < 0.01
    assert rows["ArcCos-1 ~ ReLU"]["mean"][0] > 0.5
