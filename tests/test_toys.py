"""The toy experiments at small sizes: rows, what they say, and figures from the rows alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.flatten_util import ravel_pytree
from scipy import stats

from bochner.experiments import toys
from bochner.experiments.rows import read_rows, write_rows
from bochner.experiments.theory import NINE
from bochner.experiments.toys import EXPERIMENTS, PAPER, PROCESSES, Config
from bochner.likelihoods import Gaussian
from bochner.posteriors import nuts, nuts_many
from bochner.posteriors.samples import Sampled
from bochner.reports.figures import save_figure
from bochner.reports.toys import DRAWN_FROM, FIGURES

SMALL = Config(
    warmup=4,
    samples=8,
    chains=2,
    toy_chains=2,
    sweeps=1,
    max_tree_depth=4,
    units=4,
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


def prior_draws(models, _x, _y, config):
    """Stands in for the sampler, which takes half a minute to compile: draws from the prior."""
    posteriors = []
    for model in models:
        flat = nuts.starting_points(model, config.chains * config.samples, config.seed)
        samples = {n: torch.from_numpy(v).unflatten(0, (config.chains, config.samples)) for n, v in flat.items()}
        posteriors.append(Sampled(model, samples, divergences=0, leapfrog_steps=0))
    return posteriors, {"method": "nuts", "warmup": config.warmup, "samples": config.samples, "chains": config.chains}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_makes_rows_and_figures_from_them_alone(name, tmp_path, monkeypatch):
    monkeypatch.setattr(toys, "_sample", prior_draws)
    path = tmp_path / f"{name}.jsonl"
    write_rows(path, EXPERIMENTS[name](SMALL))
    rows = read_rows(path)
    assert len(rows) == ROWS[name]
    for row in (r for r in rows if r["method"] in ("nuts", "slices")):
        assert np.isfinite([row["r_hat"], row["ess"], *row["mean"]]).all()
        assert (row["warmup"], row["samples"], row["chains"]) == (4, 8, 2)
    for figure in DRAWN_FROM[name]:
        save_figure(FIGURES[figure](rows), tmp_path / f"{figure}.svg")
        assert (tmp_path / f"{figure}.svg").stat().st_size < 1_000_000
    save_figure(FIGURES[figure](read_rows(path)), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / f"{figure}.svg").read_bytes()


def test_a_sampled_network_says_how_it_was_sampled():
    x, y = toys._arrays("toy-1d")
    models = [toys.make_network(("rbf", name), 1, 3, Gaussian(0.1), Config()) for name in ("sin", "local_rbf")]
    posteriors, common = toys._sample(models, x, y[:, None], SMALL)
    assert [posterior.model for posterior in posteriors] == models
    sizes = {"warmup": 4, "samples": 8, "chains": 2, "max_tree_depth": 4, "networks": 2}
    assert common.items() >= {"method": "nuts", **sizes}.items()
    row = toys._diagnosis(posteriors[0], x)
    assert 2 * 8 <= row["leapfrog_steps"] <= 2 * 8 * 15
    curves = toys._curves(posteriors[0].predict(x), x)
    assert all(a < b for a, b in zip(curves["std"], curves["std_y"], strict=True))


def test_published_banana_has_one_logit_with_a_bias_and_normal_output_weights():
    """Departures 30 and 39, the log joint written out with SciPy; NUTS samples the same density."""
    (name, model), *_ = toys._periodic(("rbf",), 5, Config(protocol="paper")).items()
    assert name == "rbf-sin"
    x, y = crescents(12)
    assert model.output.weight.shape == (1, 5)
    logit = (model.features(x) @ model.output.weight.T + model.output.bias)[:, 0].detach().numpy()
    expected = -np.logaddexp(0, np.where(y == 1, -logit, logit)).sum()
    expected += stats.norm.logpdf(model.output.weight.detach()).sum() + stats.norm.logpdf(model.output.bias.item())
    expected += model.layer.log_prior(jacobian=True).item() + stats.gamma(2).logpdf(1)  # the amplitude, held at 1
    assert model.log_joint(x, y, jacobian=True).item() == pytest.approx(expected, rel=1e-12)
    with jax.enable_x64(True):
        parameters = {n: jnp.asarray(p.detach().numpy()) for n, p in model.named_parameters()}
        sampled = nuts.log_joint(model, parameters, *nuts.as_arrays(model, x, y))
        (state, sizes, unravel), index = nuts_many._start([model], 1, 0), 0
        generate = nuts_many._potential([model], unravel, sizes, *nuts.as_arrays(model, x, y))
        position = ravel_pytree({n: parameters[n] for n in nuts.parameter_names(model)})[0]
        many = -generate(index)(position)
    assert (state.shape, float(sampled)) == ((1, len(position)), pytest.approx(expected, rel=1e-12))
    assert float(many) == pytest.approx(expected, rel=1e-12)
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
    rows = {row["model"]: row for row in toys.banana_processes(Config(gp_steps=50, grid=4, draws=200))}
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
    rows = {row["prior"]: row for row in toys.toy_processes(Config(gp_steps=100))}
    differences = [row["paper_difference"] for row in rows.values()]
    assert np.mean(differences) < 0.1
    for row in rows.values():
        recomputed = np.abs(np.subtract(row["mean"], row["paper"])).mean()
        assert row["paper_difference"] == pytest.approx(recomputed, abs=2e-4)
    # At the edges of the grid, five times as far out as the data.
    assert rows["RBF"]["std"][0] == pytest.approx(rows["RBF"]["amplitude"], rel=1e-3)
    assert rows["RBF-NN (local)"]["std"][0] < 0.01
    assert rows["ArcCos-1 ~ ReLU"]["mean"][0] > 0.5
