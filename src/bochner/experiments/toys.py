"""The paper's toy experiments: banana classification and one-dimensional regression, by networks and by Gaussian processes.

Each experiment is a function of a frozen configuration that returns rows; ``EXPERIMENTS`` names them. Banana networks are sampled
by NUTS as one vectorised run, on a GPU where JAX sees one; regression networks by elliptical slice sampling on the CPU.
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
from bochner.experiments.rows import Row, make_once
from bochner.experiments.theory import NINE, PERIODIC
from bochner.layers import StationaryLayer
from bochner.likelihoods import Categorical, Gaussian, Likelihood
from bochner.models import Model
from bochner.posteriors.samples import Sampling
from bochner.predictive import CategoricalPredictive
from bochner.priors import activations
from bochner.priors.activations import Activation
from bochner.priors.kernels import arccos1, matern_nn, rbf_nn
from bochner.priors.spectra import RBF, Exponential, Matern, Spectrum

# Means of the nine Gaussian processes in the paper's figure "regression", read from its source, which does not list the data.
PAPER: dict[str, Any] = json.loads(
    files("bochner.experiments").joinpath("paper_regression.json").read_text(encoding="utf-8")
)

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
        warmup: Steps of adaptation of each chain; the paper ran 10,000 iterations in all.
        samples: Draws of each chain after that.
        chains: Chains for each network.
        toy_chains: Chains for each regression network, where more chains cost little.
        sweeps: Sweeps over all units for each draw of a regression network.
        max_tree_depth: Largest depth of the trajectories of NUTS, which are 2**depth steps long.
        units: Units of the banana networks.
        widths: Numbers of units in the width experiment.
        toy_units: Units of the regression networks.
        grid: Points along each side of the square on which banana is drawn.
        extent: Half the side of this square.
        gp_steps: Optimiser steps for the hyperparameters of the Gaussian processes.
        draws: Number of draws, spread over the chains, that predictions on a grid are averaged over.
        progress: Whether to show progress bars.
    """

    seed: int = 0
    protocol: str = "bochner"
    warmup: int = 1000
    samples: int = 1000
    chains: int = 4
    toy_chains: int = 16
    sweeps: int = 3
    max_tree_depth: int = 7
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
    layer = StationaryLayer(
        dim, units, kernel=spectrum, activation=activation, generator=generator, dtype=torch.float64
    )
    classes = 2 if isinstance(likelihood, Categorical) else 1
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


def _sample(models: list[Model], x: Tensor, y: Tensor, config: Config) -> tuple[list[Any], Row]:
    """The posteriors by NUTS, and the entries about their common run for every row."""
    from bochner.posteriors.nuts_many import sample_many

    start = time.perf_counter()
    names = ("warmup", "samples", "chains", "max_tree_depth", "seed", "progress")
    posteriors = sample_many(models, x, y, Sampling(**{name: getattr(config, name) for name in names}))
    seconds = round(time.perf_counter() - start, 1)
    sizes: Row = {name: getattr(config, name) for name in names[:4]}
    return posteriors, {"method": "nuts", **sizes, "networks": len(models), "run_seconds": seconds}


def _diagnosis(posterior: Any, x: Tensor) -> Row:
    """Divergences, and the worst R-hat and effective sample size of the outputs at inputs."""
    diagnosis = posterior.diagnose(x)
    quality = {"r_hat": round(diagnosis.r_hat, 4), "ess": round(diagnosis.ess, 1)}
    return {"divergences": diagnosis.divergences, **quality, "leapfrog_steps": posterior.leapfrog_steps}


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
        "accuracy": round((predict(x).probabilities.argmax(-1) == y).double().mean().item(), 4),
        "far_probability": round(far.probabilities[:, 1].mean().item(), 4),
        "far_confidence": round(far.confidence.mean().item(), 4),
        "far_worst_confidence": round(far.confidence.max().item(), 4),
        "far_variance": round(far.probability_variance[:, 1].mean().item(), 4),
        "grid": config.grid,
        "extent": config.extent,
        "mean": _round(grid.probabilities[:, 1], 3),
        "variance": _round(grid.probability_variance[:, 1]),
    }


def _banana_rows(models: dict[str, Model], config: Config) -> list[Row]:
    x, y = _arrays("banana")
    posteriors, common = _sample(list(models.values()), x, y, config)
    thin = max(1, config.chains * config.samples // config.draws)
    rows: list[Row] = [{"method": "data", "x": _round(x), "y": y.tolist()}]
    for (name, model), posterior in zip(models.items(), posteriors, strict=True):
        prior = {"activation": model.layer.activation.name, "kernel": str(model.layer.spectrum)}
        row = {"model": name, **prior, "units": model.layer.out_features, **common}
        far = posterior.diagnose(_far_circle())
        row |= _diagnosis(posterior, _square(13, 3.0))
        row |= {"far_r_hat": round(far.r_hat, 4), "far_ess": round(far.ess, 1)}
        rows.append(row | _prediction(partial(posterior.predict, thin=thin), x, y, config))
    return rows


def banana_networks(config: Config) -> list[Row]:
    """Banana by NUTS under 15 priors, and a row of the data."""
    models = _periodic(("exponential", "matern32", "rbf"), config.units, config)
    models |= {n: make_network((RBF(), a), 2, config.units, Categorical(), config) for n, a in NOT_PERIODIC.items()}
    return _banana_rows(models, config)


def banana_processes(config: Config) -> list[Row]:
    """Banana by six variational Gaussian processes, whose hyperparameters are fitted too."""
    from bochner.posteriors.gp import GaussianProcessClassifier

    x, y = _arrays("banana")
    rows = []
    for name, kernel in PROCESSES.items():
        start = time.perf_counter()
        process = GaussianProcessClassifier(kernel, x, y, steps=config.gp_steps, seed=config.seed)
        row = {"model": name, "method": "gp", "run_seconds": round(time.perf_counter() - start, 1)}
        rows.append(row | _prediction(partial(process.predict, samples=2 * config.draws), x, y, config))
    return rows


def banana(config: Config) -> list[Row]:
    """Banana by NUTS and by Gaussian processes (Figs. "teaser" and "comparisons_app_meanvar").

    R-hat and effective sample size are the worst of the class probabilities on a 13 × 13 grid over the data, and those that begin
    with "far" the worst at 64 points on the circle of radius 10; the data end at 3. Both networks and processes are fitted to all
    400 points.
    """
    return [*banana_networks(config), *banana_processes(config)]


def banana_width(config: Config) -> list[Row]:
    """Banana by NUTS for several numbers of units (Fig. "comparisons_app")."""
    models = {
        f"{name}-{units}": model
        for units in config.widths
        for name, model in _periodic(("exponential", "rbf"), units, config).items()
    }
    return [{k: v for k, v in row.items() if k != "variance"} for row in _banana_rows(models, config)]


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


def toy_processes(config: Config) -> list[Row]:
    """Nine exact Gaussian processes, with hyperparameters that maximise the marginal likelihood.

    ``paper_difference`` is the mean absolute difference from the paper's mean on its grid. The paper does not list its data: ours
    are similar but not the same.
    """
    from bochner.posteriors.gp import GaussianProcess

    x, y, grid = _toy()
    rows = []
    for prior, (kernel, *_) in NINE.items():
        start = time.perf_counter()
        process = GaussianProcess(_pair(kernel), x, y, noise=0.1).tune(steps=config.gp_steps)
        row = {"prior": prior, "method": "gp", "run_seconds": round(time.perf_counter() - start, 1)}
        row |= {name: round(value.item(), 5) for name, value in process.hyperparameters.items()}
        with warnings.catch_warnings():
            # Local kernels vanish at the ends of the grid, where a variance of zero may come out as -1e-17.
            warnings.filterwarnings("ignore", message="Negative variance values")
            prediction = process.predict(grid)
        paper = torch.tensor(PAPER["mean"][prior], dtype=torch.float64)
        row["paper_difference"] = round((prediction.mean[:, 0] - paper).abs().mean().item(), 4)
        rows.append({**row, **_curves(prediction, grid), "paper": PAPER["mean"][prior]})
    return rows


def toy_networks(config: Config) -> list[Row]:
    """Nine networks of a few units by elliptical slice sampling, and a row of the data.

    The posterior has many modes, and step and local exponential units jump, which a gradient does not show: by NUTS the chains of
    only two of the nine networks agreed.
    """
    from bochner.posteriors.slices import slice_sample

    x, y, grid = _toy()
    sampling = Sampling(config.warmup, config.samples, config.toy_chains, seed=config.seed, progress=config.progress)
    rows: list[Row] = [{"method": "data", "x": _round(x), "y": _round(y)}]
    for prior, (_, activation, spectrum) in NINE.items():
        start = time.perf_counter()
        model = make_network((spectrum or RBF(), activation), 1, config.toy_units, Gaussian(0.1), config)
        posterior = slice_sample(model, x, y, sampling, thin=config.sweeps)
        row: Row = {"prior": prior, "units": config.toy_units, "method": "slices", "sweeps": config.sweeps}
        row |= {"warmup": config.warmup, "samples": config.samples, "chains": config.toy_chains}
        row["run_seconds"] = round(time.perf_counter() - start, 1)
        rows.append(row | _diagnosis(posterior, x) | _curves(posterior.predict(grid), grid))
    return rows


def toy_1d(config: Config) -> list[Row]:
    """One-dimensional regression under nine priors, by samples and by Gaussian processes (Figs. "regression(-finite)")."""
    return [*toy_networks(config), *toy_processes(config)]


EXPERIMENTS: dict[str, Callable[[Config], list[Row]]] = {
    "banana": banana,
    "banana-width": banana_width,
    "toy-1d": toy_1d,
}


def check(name: str, request: Request) -> None:  # noqa: ARG001
    """Raises an error where the data are missing."""
    datasets.load("toy-1d" if name == "toy-1d" else "banana")


def run(name: str, request: Request, path: Path) -> None:
    """Makes the rows of an experiment, unless they are there. Those of "paper" have a file of their own."""
    import jax

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    config = Config(seed=request.seed, protocol=request.protocol, progress=request.progress)
    make_once(
        path,
        {"experiment": name, "seed": request.seed, "protocol": request.protocol},
        request.report,
        lambda: EXPERIMENTS[name](config),
        device,
        jax=jax.__version__,
    )
