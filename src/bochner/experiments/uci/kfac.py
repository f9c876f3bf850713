"""The paper's UCI tables: one call makes the rows of one data set for some models, all folds and learning rates as one stack.

Under "paper": a learning rate for all folds by the validation error, a variance scale by validation plus noise inputs, retraining,
50 posterior samples, as the published code does. Under "bochner": the rate by validation density, the posterior of the output
layer given the whole training set and the prior, and the noise from the validation residuals; no variance scale.
"""

import copy
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from bochner.datasets import load
from bochner.datasets.tables import ADULT_NUMERIC
from bochner.experiments.published import decay, noises
from bochner.experiments.rows import Row, provenance
from bochner.experiments.uci.data import Data, score_folds
from bochner.experiments.uci.protocols import PROTOCOLS, Bench
from bochner.experiments.uci.swag import swag_rows
from bochner.experiments.zoo import MODELS, Shape, build, by_activation
from bochner.models import Model
from bochner.predictive import CategoricalPredictive, GaussianPredictive, Predictive
from bochner.training.map import Recipe, fit_stacks, sgd

SETS: dict[str, dict[str, int]] = {
    "uci-regression": {"boston": 50, "concrete": 50, "airfoil": 50, "elevators": 500},
    "uci-classification": {"diabetes": 50, "adult": 500, "connect-4": 500, "covtype": 500},
}

# Columns that are standardised, where these are not all: the published code leaves the 0/1 columns of adult as they are.
SCALED = {"paper": {"adult": ADULT_NUMERIC}, "bochner": {}}
FOLDS = tuple(range(10))

# Folds that choose rate and scale, where these are not all: with 104,582 validation rows each, two tell rates apart.
RATE_FOLDS = {"covtype": 2}


@dataclass(frozen=True)
class Config:
    """Settings of a sweep; sizes and grids are the paper's."""

    experiment: str = "uci-regression"
    protocol: str = "bochner"
    posterior: str = "kfac"
    seed: int = 0
    device: str = "cpu"
    folds: tuple[int, ...] = FOLDS
    epochs: int = 100
    hidden: tuple[int, ...] = (1000, 1000, 500, 25)
    width: int = 2000
    rates: tuple[float, ...] = (5e-5, 1e-4, 5e-4, 1e-3)
    scales: tuple[float, ...] = (0.01, 0.05, 0.1, 0.15, 0.2, 0.25)
    grid_draws: int = 30
    draws: int = 50
    noise_points: int = 200
    noise_weight: float = 0.2
    swag_epochs: int = 40
    swag_trials: int = 12
    precision: Literal["float32", "tf32", "bfloat16"] = "bfloat16"

    @classmethod
    def swag(cls, **options: Any) -> "Config":
        """The paper's SWAG networks: d-1000-1000-500-50-c, 20 epochs before the posterior is collected."""
        return cls(posterior="swag", hidden=(1000, 1000, 500), width=50, epochs=20, **options)


def run_set(config: Config, name: str, models: Sequence[str], *, progress: bool = False) -> list[Row]:
    """All rows of one data set for the given models: one for each model and fold."""
    start = time.perf_counter()
    scaled = SCALED[config.protocol].get(name)
    data = Data.of(load(name), config.folds, config.device, scaled=scaled)
    batch = SETS[config.experiment][name]
    ordered = by_activation(models)
    if config.posterior == "swag":
        groups = itertools.groupby(ordered, key=lambda model: MODELS[model][1])
        few = _rate_folds(config, name)
        results = {k: v for _, some in groups for k, v in swag_rows(config, data, list(some), batch, few).items()}
    else:
        seeds = torch.tensor([1000 * config.seed + f for f in config.folds])
        sweep = Sweep(Bench(config, data, batch, seeds), progress, _rate_folds(config, name))
        results = sweep.run(ordered)
    seconds = (time.perf_counter() - start) / len(models)
    common: Row = {
        "experiment": config.experiment,
        "protocol": config.protocol,
        "posterior": config.posterior,
        "set": name,
    }
    if name in RATE_FOLDS:
        common["rate_folds"] = _rate_folds(config, name)
    rows, origin = [], provenance(config.device)
    for model in models:
        for i, fold in enumerate(config.folds):
            own = results[model][i]
            status = "diverged" if any(v is None for v in own.values()) else "ok"
            unit = {"model": model, "fold": fold, "folds": list(config.folds), "seed": config.seed, "status": status}
            rows.append({**common, **unit, **own, "seconds": round(seconds, 3), **origin})
    return rows


def _rate_folds(config: Config, name: str) -> int:
    """How many of the folds choose the rate, and under "paper" the scale."""
    return min(RATE_FOLDS.get(name, len(config.folds)), len(config.folds))


class Sweep:
    """Grid, selection, retraining and testing for a list of models that train as one stack.

    Args:
        bench: The set and what networks are trained with.
        progress: Whether training shows a bar.
        rate_folds: How many folds choose; all of them by default.
    """

    def __init__(self, bench: Bench, progress: bool = False, rate_folds: int | None = None) -> None:
        self.bench, self.config, self.data, self.progress = bench, bench.config, bench.data, progress
        self.protocol = PROTOCOLS[bench.config.protocol]
        self.rate_folds = rate_folds or len(bench.seeds)
        self.first_networks: dict[str, list[Model]] = {}

    def run(self, names: list[str]) -> dict[str, list[Row]]:
        """Rows of metrics and choices, by model and fold."""
        fit_rows, check_rows = (rows[: self.rate_folds] for rows in self.data.halves())
        rates = list(self.config.rates)
        nets, bad = self._train([(name, rate) for name in names for rate in rates], fit_rows)
        chosen: dict[str, float] = {}
        kept: dict[str, list[Model]] = {}
        for name in names:
            scores = np.array([self.rate_scores(nets[name, r], bad[name, r], check_rows) for r in rates])
            chosen[name] = rates[self.protocol.choose_rate(scores)]
            kept[name] = nets[name, chosen[name]]
        del nets
        tuned = {name: self.protocol.tune(self.bench, kept[name], fit_rows, check_rows) for name in names}
        del kept
        final, lost = self._train([(name, chosen[name]) for name in names], self.data.train)
        out = {}
        for name in names:
            rows = self.test(final[name, chosen[name]], tuned[name])
            failed = lost[name, chosen[name]].tolist()
            out[name] = [
                {**(dict.fromkeys(row) if f else row), "lr": chosen[name], **self.protocol.choice(tuned[name], i)}
                for i, (row, f) in enumerate(zip(rows, failed, strict=True))
            ]
        return out

    def _train(
        self, cells: list[tuple[str, float]], rows: Tensor
    ) -> tuple[dict[tuple[str, float], list[Model]], dict[tuple[str, float], Tensor]]:
        """Networks of the folds that ``rows`` (F, n) is for, for each (model, rate), and which of them diverged."""
        config, folds = self.config, len(rows)
        nets = {cell: [copy.deepcopy(m) for m in self.untrained(cell[0])[:folds]] for cell in cells}
        recipe = Recipe(
            config.epochs,
            self.bench.batch,
            sgd,
            [rate for _, rate in cells for _ in range(folds)],
            scale_lr=0.01,
            schedule=decay(config.epochs),
            precision=config.precision,
        )
        fit = fit_stacks(
            [model for cell in cells for model in nets[cell]],
            self.data.x,
            self.data.y,
            recipe,
            seed=self.bench.seeds[:folds].tolist() * len(cells),
            rows=rows.repeat(len(cells), 1),
            num_data=self.data.train.shape[1],
            progress=self.progress,
        )
        return nets, dict(zip(cells, fit.diverged.split(folds), strict=True))

    def untrained(self, name: str) -> list[Model]:
        """The networks of every fold as they are drawn."""
        if name not in self.first_networks:
            shape = Shape(self.config.protocol, self.data.classes, self.config.width, self.config.hidden)
            drawn = [build(name, self.data.x.shape[1], shape, int(s)) for s in self.bench.seeds]
            self.first_networks[name] = [m.to(self.config.device) for m in drawn]
        return self.first_networks[name]

    def _plug_in(self, nets: list[Model], rows: Tensor) -> Predictive:
        """Prediction of the trained networks themselves, each on its own rows."""
        f = _outputs(nets, self.data.x[rows])
        if self.data.classes is None:
            return GaussianPredictive(f, torch.zeros_like(f), noises(nets))
        return CategoricalPredictive.from_logits([f])

    def rate_scores(self, nets: list[Model], bad: Tensor, rows: Tensor) -> list[float]:
        """What the learning rate is chosen by, lower better, for each fold; infinite where it diverged."""
        found = score_folds(self._plug_in(nets, rows), self.data.y[rows])
        name = self.protocol.rate_metric(self.data.classes is None)
        sign = -1 if name == "accuracy" else 1
        failed = [row[name] is None or lost for row, lost in zip(found, bad.tolist(), strict=True)]
        return [math.inf if f else sign * row[name] for row, f in zip(found, failed, strict=True)]

    def test(self, nets: list[Model], tuned: Any) -> list[Row]:
        """Metrics on the test rows, of the posterior and of the trained networks alone."""
        y = self.data.y[self.data.test]
        posterior = score_folds(self.protocol.predict(self.bench, nets, tuned), y)
        plain = score_folds(self._plug_in(nets, self.data.test), y)
        return [
            {**own, **{f"map_{n}": v for n, v in mapped.items()}} for own, mapped in zip(posterior, plain, strict=True)
        ]


def _outputs(nets: Sequence[Model], x: Tensor) -> Tensor:
    """Outputs (E, n, c) of networks of one structure, each on its own inputs (E, n, d)."""
    numbers, buffers = stack_module_state([m.eval() for m in nets])  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        return vmap(lambda p, own: functional_call(nets[0], p, (own,)))(numbers | buffers, x)
