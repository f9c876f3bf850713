"""The paper's toy experiments: banana classification and one-dimensional regression, by networks and by Gaussian processes.

Each experiment is a function of a frozen configuration that returns units of work, which make a row each; ``EXPERIMENTS`` names
them. Networks are sampled by annealed elliptical slices: step and local exponential units jump, which no gradient shows, and under
heavy-tailed weights the chains of NUTS end in different modes.
"""

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bochner import datasets
from bochner.experiments.catalogue import Request
from bochner.experiments.published import SampledModel
from bochner.experiments.rows import Row, provenance, read_rows, write_rows
from bochner.experiments.theory import NINE, PERIODIC
from bochner.layers import StationaryLayer
from bochner.likelihoods import Categorical, Gaussian, Likelihood
from bochner.models import Model
from bochner.posteriors.samples import Sampled, Sampling
from bochner.predictive import CategoricalPredictive
from bochner.priors import activations
from bochner.priors.activations import Activation
from bochner.priors.kernels import arccos1, matern_nn, rbf_nn
from bochner.priors.spectra import RBF, Exponential, Matern, Spectrum

Units = dict[tuple[str, str], Callable[[], Row]]  # what makes the row of each method and network or process

# Means of the nine Gaussian processes in the paper's figure "regression", read from its source, which does not list the data.
PAPER: dict[str, Any] = json.loads(
    files("bochner.experiments").joinpath("paper_toy_curves.json").read_text(encoding="utf-8")
)

MAX_R_HAT = 1.01  # a sampled network converged if its R-hat is at most this
MIN_ESS = 400  # and its effective sample size at least this

# Activations that are not periodic, by the name of the network. Their weights are normal.
NOT_PERIODIC = {
    "relu": activations.relu(),
    "local_rbf": activations.local_rbf(),
    "local_matern32": activations.local_matern(1.5),
}

# Kernels of the Gaussian processes in the paper's first figure: the infinite width of the network of the same name.
PROCESSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": arccos1,
    "local_matern32": partial(matern_nn, nu=1.5),
    "local_rbf": partial(rbf_nn, lengthscale=math.sqrt(0.5)),
    "exponential-sin": Exponential().kernel,
    "matern32-sin": Matern(1.5).kernel,
    "rbf-sin": RBF().kernel,
}


@dataclass(frozen=True)
class Config:
    """Sizes of the toy experiments.

    Attributes:
        seed: Seed of every draw.
        protocol: "bochner", or "paper" for the networks of the published Julia code: one logit, an output bias, output weights
            N(0, 1).
        device: Where networks are sampled.
        populations: Populations of particles for each network.
        particles: Particles of a population.
        sweeps: Sweeps over all units for each step from the prior to the posterior.
        warmup: Sweeps after the last step; four times as many where populations do not agree after those.
        units: Units of the banana networks.
        widths: Numbers of units in the width experiment.
        toy_units: Units of the regression networks.
        grid: Points along each side of the square on which banana is drawn.
        extent: Half the side of this square.
        gp_steps: Optimiser steps for the hyperparameters of the Gaussian processes.
        draws: Number of draws, spread over the populations, that predictions on a grid are averaged over.
        progress: Whether to show progress bars.
    """

    seed: int = 0
    protocol: str = "bochner"
    device: str = "cpu"
    populations: int = 8
    particles: int = 256
    sweeps: int = 5
    warmup: int = 100
    units: int = 30
    widths: tuple[int, ...] = (10, 20, 30)
    toy_units: int = 10
    grid: int = 60
    extent: float = 4.0
    gp_steps: int = 300
    draws: int = 1000
    progress: bool = False


def _round(values: Tensor, digits: int = 4) -> list[float]:
    """Values rounded to as many decimals as a figure shows."""
    return [round(v, digits) for v in values.flatten().tolist()]


def _arrays(name: str) -> tuple[Tensor, Tensor]:
    data = datasets.load(name)
    return torch.from_numpy(data.x), torch.from_numpy(data.y)


def make_network(
    prior: tuple[Spectrum | str, Activation | str], dim: int, units: int, likelihood: Likelihood, config: Config
) -> Model:
    """An untrained network of one hidden layer under a prior (spectrum and activation), in the form of the protocol."""
    generator = torch.Generator().manual_seed(config.seed)
    spectrum, activation = prior
    classes = 2 if isinstance(likelihood, Categorical) else 1
    dtype = torch.float32 if classes == 2 else torch.float64  # regression inverts matrices
    layer = StationaryLayer(dim, units, kernel=spectrum, activation=activation, generator=generator, dtype=dtype)
    makers = {
        "bochner": lambda: Model(layer, classes, likelihood, generator=generator),
        "paper": lambda: SampledModel(layer, likelihood, generator),
    }
    return makers[config.protocol]()


def _periodic(kernels: tuple[str, ...], units: int, config: Config) -> dict[str, Model]:
    return {
        f"{kernel}-{name}": make_network((kernel, name), 2, units, Categorical(), config)
        for name in PERIODIC
        for kernel in kernels
    }


def converged(row: Row) -> bool:
    """Whether the populations of a sampled network agree near the data and far from them, by R-hat and effective sample size."""
    near, far = (row["r_hat"], row["ess"]), (row.get("far_r_hat", 1.0), row.get("far_ess", math.inf))
    return all(r_hat <= MAX_R_HAT and ess >= MIN_ESS for r_hat, ess in (near, far))


def _sampled(
    model: Model, data: tuple[Tensor, Tensor], checks: dict[str, Tensor], config: Config
) -> tuple[Sampled, Row]:
    """The posterior of a network, and the entries of its row that say how it was made, and how well.

    R-hat and effective sample size are the worst of the outputs at points, the populations taken as chains.

    Args:
        model: The network.
        data: Inputs and targets.
        checks: Points, by what the entries about them begin with.
        config: Settings of the experiment.
    """
    from bochner.posteriors.slices import slice_sample

    start, weight = time.perf_counter(), model.to(config.device).layer.weight
    x, y = data[0].to(weight), data[1].to(config.device)
    row: Row = {"method": "slices", **{name: getattr(config, name) for name in ("populations", "particles", "sweeps")}}
    for row["warmup"] in (config.warmup, 4 * config.warmup):
        sampling = Sampling(
            row["warmup"], config.particles, config.populations, seed=config.seed, progress=config.progress
        )
        posterior = slice_sample(model, x, y, sampling, sweeps=config.sweeps)
        for prefix, points in checks.items():
            diagnosis = posterior.diagnose(points.to(weight))
            row |= {f"{prefix}r_hat": round(diagnosis.r_hat, 4), f"{prefix}ess": round(diagnosis.ess, 1)}
        if converged(row):
            break
    return posterior, {**row, "run_seconds": round(time.perf_counter() - start, 1)}


def _square(points: int, extent: float) -> Tensor:
    """A grid over a square: row after row from the bottom, (points², 2)."""
    line = torch.linspace(-extent, extent, points, dtype=torch.float64)
    return torch.cartesian_prod(line, line).flip(-1)


def _far_circle() -> Tensor:
    """64 points at distance 10 from the origin, (64, 2)."""
    angle = torch.linspace(0, 2 * math.pi, 65, dtype=torch.float64)[:-1]
    return 10 * torch.stack([angle.cos(), angle.sin()], -1)


def _prediction(predict: Callable[[Tensor], Any], x: Tensor, y: Tensor, config: Config) -> Row:
    """Probability of class 1 and its variance on the grid, accuracy, and confidence at 64 points far from the data."""
    far: CategoricalPredictive = predict(_far_circle())
    grid: CategoricalPredictive = predict(_square(config.grid, config.extent))
    return {
        "accuracy": round((predict(x).probabilities.argmax(-1).cpu() == y).double().mean().item(), 4),
        "far_probability": round(far.probabilities[:, 1].mean().item(), 4),
        "far_confidence": round(far.confidence.mean().item(), 4),
        "far_worst_confidence": round(far.confidence.max().item(), 4),
        "far_variance": round(far.probability_variance[:, 1].mean().item(), 4),
        "grid": config.grid,
        "extent": config.extent,
        "mean": _round(grid.probabilities[:, 1], 3),
        "variance": _round(grid.probability_variance[:, 1]),
    }


def _data_row(name: str) -> Row:
    x, y = _arrays(name)
    return {"method": "data", "x": _round(x), "y": y.tolist() if y.dtype == torch.int64 else _round(y)}


def _banana_network(name: str, model: Model, config: Config) -> Row:
    """The row of a sampled network for classes.

    R-hat and effective sample size are the worst of the class probabilities on a 13 × 13 grid over the data, and those that begin
    with "far" the worst at 64 points on the circle of radius 10; the data end at 3.
    """
    x, y = _arrays("banana")
    posterior, how = _sampled(model, (x, y), {"": _square(13, 3.0), "far_": _far_circle()}, config)
    prior = {"activation": model.layer.activation.name, "kernel": str(model.layer.spectrum)}
    row: Row = {"model": name, **prior, "units": model.layer.out_features, **how}
    thin = max(1, config.populations * config.particles // config.draws)

    def predict(points: Tensor) -> Any:
        return posterior.predict(points.to(posterior.model.layer.weight), thin=thin)

    return row | _prediction(predict, x, y, config)


def _banana_process(name: str, config: Config) -> Row:
    """The row of a variational Gaussian process, whose hyperparameters are fitted too."""
    from bochner.posteriors.gp import GaussianProcessClassifier

    x, y = _arrays("banana")
    start = time.perf_counter()
    process = GaussianProcessClassifier(PROCESSES[name], x, y, steps=config.gp_steps, seed=config.seed)
    row = {"model": name, "method": "gp", "run_seconds": round(time.perf_counter() - start, 1)}
    return row | _prediction(partial(process.predict, samples=2 * config.draws), x, y, config)


def banana(config: Config) -> Units:
    """Banana under 15 priors by networks, and by six Gaussian processes (Figs. "teaser" and "comparisons_app_meanvar").

    Both networks and processes are fitted to all 400 points.
    """
    models = _periodic(("exponential", "matern32", "rbf"), config.units, config)
    models |= {n: make_network((RBF(), a), 2, config.units, Categorical(), config) for n, a in NOT_PERIODIC.items()}
    units: Units = {("data", ""): lambda: _data_row("banana")}
    units |= {("slices", name): partial(_banana_network, name, model, config) for name, model in models.items()}
    return units | {("gp", name): partial(_banana_process, name, config) for name in PROCESSES}


def banana_width(config: Config) -> Units:
    """Banana for several numbers of units (Fig. "comparisons_app")."""
    models = {
        f"{name}-{units}": model
        for units in config.widths
        for name, model in _periodic(("exponential", "rbf"), units, config).items()
    }

    def row_of(name: str) -> Row:
        return {k: v for k, v in _banana_network(name, models[name], config).items() if k != "variance"}

    units: Units = {("data", ""): lambda: _data_row("banana")}
    return units | {("slices", name): partial(row_of, name) for name in models}


def _pair(kernel: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The block of a Gram matrix that belongs to two sets of inputs."""
    return lambda a, b: kernel(torch.cat([a, b]))[: len(a), len(a) :]


def _curves(prediction: Any, grid: Tensor) -> Row:
    deviation = {"std": _round(prediction.f_variance.sqrt()), "std_y": _round(prediction.std)}
    return {"grid": _round(grid), "mean": _round(prediction.mean), **deviation}


def _toy() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and the paper's grid, each a column."""
    x, y = _arrays("toy-1d")
    return x, y[:, None], torch.linspace(*PAPER["grid"].values(), dtype=torch.float64)[:, None]


def _toy_process(prior: str, config: Config) -> Row:
    """The row of an exact Gaussian process, with hyperparameters that maximise the marginal likelihood.

    ``paper_difference`` is the mean absolute difference from the paper's mean on its grid. The paper does not list its data: ours
    are similar but not the same.
    """
    from bochner.posteriors.gp import GaussianProcess

    x, y, grid = _toy()
    start = time.perf_counter()
    process = GaussianProcess(_pair(NINE[prior][0]), x, y, noise=0.1).tune(steps=config.gp_steps)
    row: Row = {"prior": prior, "method": "gp", "run_seconds": round(time.perf_counter() - start, 1)}
    row |= {name: round(value.item(), 5) for name, value in process.hyperparameters.items()}
    with warnings.catch_warnings():
        # Local kernels vanish at the ends of the grid, where a variance of zero may come out as -1e-17.
        warnings.filterwarnings("ignore", message="Negative variance values")
        prediction = process.predict(grid)
    paper = torch.tensor(PAPER["mean"][prior], dtype=torch.float64)
    row["paper_difference"] = round((prediction.mean[:, 0] - paper).abs().mean().item(), 4)
    return {**row, **_curves(prediction, grid), "paper": PAPER["mean"][prior]}


def _toy_network(prior: str, config: Config) -> Row:
    """The row of a network of a few units."""
    x, y, grid = _toy()
    _, activation, spectrum = NINE[prior]
    model = make_network((spectrum or RBF(), activation), 1, config.toy_units, Gaussian(0.1), config)
    posterior, how = _sampled(model, (x, y), {"": x}, config)
    row: Row = {"prior": prior, "units": config.toy_units, **how}
    return row | _curves(posterior.predict(grid.to(config.device)), grid)


def toy_1d(config: Config) -> Units:
    """One-dimensional regression under nine priors, by networks and by Gaussian processes (Figs. "regression(-finite)")."""
    units: Units = {("data", ""): lambda: _data_row("toy-1d")}
    units |= {("slices", prior): partial(_toy_network, prior, config) for prior in NINE}
    return units | {("gp", prior): partial(_toy_process, prior, config) for prior in NINE}


EXPERIMENTS: dict[str, Callable[[Config], Units]] = {
    "banana": banana,
    "banana-width": banana_width,
    "toy-1d": toy_1d,
}


def check(name: str, request: Request) -> None:  # noqa: ARG001
    """Raises an error where the data are missing."""
    datasets.load("toy-1d" if name == "toy-1d" else "banana")


def run(name: str, request: Request, path: Path) -> None:
    """Makes the rows that a file lacks, one after the other. Those of "paper" have a file of their own."""
    config = Config(request.seed, request.protocol, request.device, progress=request.progress)
    common: Row = {"experiment": name, "seed": request.seed, "protocol": request.protocol}
    units = EXPERIMENTS[name](config)
    rows = {_unit(row): row for row in read_rows(path) if all(row.get(k) == v for k, v in common.items())}
    missing = [unit for unit in units if unit not in rows]
    for number, unit in enumerate(missing, start=1):
        start = time.perf_counter()
        row = units[unit]()
        # Gaussian processes always compute on the processor.
        rows[unit] = {**common, **provenance(request.device if unit[0] == "slices" else "cpu"), **row}
        write_rows(path, [rows[known] for known in units if known in rows])
        quality = f"  R-hat {row['r_hat']:.3f}, ESS {row['ess']:.0f}" if "r_hat" in row else ""
        seconds = time.perf_counter() - start
        request.report(f"[{number}/{len(missing)}] {path.stem} {' '.join(unit)}  {seconds:.1f} s{quality}")
    if not missing:
        request.report(f"{path.stem:<20}  already   {path}")


def _unit(row: Row) -> tuple[str, str]:
    """The unit of work that made a row: its method, and the name of its network or process."""
    return row["method"], row.get("model", row.get("prior", ""))
