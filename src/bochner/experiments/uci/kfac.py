"""The paper's UCI tables: one call makes the rows of one data set for some models, all folds and learning rates as one stack.

Networks train at every learning rate of a grid. The protocol (``protocols``) chooses a rate, networks train again at that rate on
all training rows, and the protocol predicts the test rows.
"""

import copy
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from bochner.datasets import load
from bochner.experiments.published import decay, noises
from bochner.experiments.rows import Row, provenance
from bochner.experiments.uci.data import Data, score_folds
from bochner.experiments.uci.protocols import PROTOCOLS, Bench, Config
from bochner.experiments.uci.swag import swag_rows
from bochner.experiments.zoo import MODELS, Shape, build, by_activation
from bochner.models import Model
from bochner.predictive import CategoricalPredictive, GaussianPredictive, Predictive
from bochner.training import fused
from bochner.training.map import Recipe, StackRows, fit_stacks, sgd

# Sets of each experiment, and rows of a minibatch.
SETS: dict[str, dict[str, int]] = {
    "uci-regression": {"boston": 50, "concrete": 50, "airfoil": 50, "elevators": 500},
    "uci-classification": {"diabetes": 50, "adult": 500, "connect-4": 500, "covtype": 500},
}

# Number of folds that choose rate and scale, where these are not all: with 104,582 validation rows each, two tell rates apart.
RATE_FOLDS = {"covtype": 2}


def run_set(config: Config, name: str, models: Sequence[str], *, progress: bool = False) -> list[Row]:
    """All rows of one data set for some models: one for each model and fold."""
    start = time.perf_counter()
    scaled = PROTOCOLS[config.protocol].scaled_columns(name)
    data = Data.of(load(name), config.folds, config.device, scaled=scaled)
    seeds = torch.tensor([1000 * config.seed + fold for fold in config.folds])
    bench = Bench(config, data, SETS[config.experiment][name], seeds)
    results = _results(bench, by_activation(models), _rate_folds(config, name), progress)
    common: Row = {key: getattr(config, key) for key in ("experiment", "protocol", "posterior")} | {"set": name}
    if name in RATE_FOLDS:
        common["rate_folds"] = _rate_folds(config, name)
    # The models train together: the time is spread evenly over them.
    origin = {"seconds": round((time.perf_counter() - start) / len(models), 3), **provenance(config.device)}
    origin["precision"] = _precision(config)
    rows = []
    for model in models:
        for fold, values in zip(config.folds, results[model], strict=True):
            status = "diverged" if any(value is None for value in values.values()) else "ok"
            unit = {"model": model, "fold": fold, "folds": list(config.folds), "seed": config.seed, "status": status}
            rows.append({**common, **unit, **values, **origin})
    return rows


def _results(bench: Bench, models: list[str], rate_folds: int, progress: bool) -> dict[str, list[Row]]:
    """Metrics and choices by model and fold, by the posterior that the settings name."""
    if bench.config.posterior == "kfac":
        return Sweep(bench, progress, rate_folds).run(models)
    groups = itertools.groupby(models, key=lambda model: MODELS[model][1])
    return {name: rows for _, group in groups for name, rows in swag_rows(bench, list(group), rate_folds).items()}


def _precision(config: Config) -> str:
    """What matrix products of training round their inputs to on this machine."""
    usual = not config.device.startswith("cuda") and not fused.multiplies_bfloat16(torch.device("cpu"))
    return "float32" if usual else config.precision


def _rate_folds(config: Config, name: str) -> int:
    """Number of the folds that choose the rate, and under "paper" the scale."""
    return min(RATE_FOLDS.get(name, len(config.folds)), len(config.folds))


class Sweep:
    """Grid, selection, retraining and testing for a list of models that train as one stack.

    Args:
        bench: The data and settings of the set.
        progress: Whether training shows a bar.
        rate_folds: Number of folds that choose rate and scale; all of them by default.
    """

    def __init__(self, bench: Bench, progress: bool = False, rate_folds: int | None = None) -> None:
        self.bench, self.config, self.data, self.progress = bench, bench.config, bench.data, progress
        self.protocol = PROTOCOLS[bench.config.protocol]
        self.rate_folds = rate_folds or len(bench.seeds)
        self.first_networks: dict[str, list[Model]] = {}

    def run(self, names: list[str]) -> dict[str, list[Row]]:
        """Rows of metrics and choices, by model and fold."""
        fit_rows, check_rows = (rows[: self.rate_folds] for rows in self.data.halves())
        rates, kept = self._choose_rates(names, fit_rows, check_rows)
        tuned = {name: self.protocol.tune(self.bench, kept[name], fit_rows, check_rows) for name in names}
        del kept  # before the next networks need its memory
        final, diverged = self._train([(name, rates[name]) for name in names], self.data.train)
        results = {}
        for name in names:
            rows = self.test(final[name, rates[name]], tuned[name])
            failed = diverged[name, rates[name]].tolist()
            results[name] = [
                {**(dict.fromkeys(row) if lost else row), "lr": rates[name], **self.protocol.choice(tuned[name], fold)}
                for fold, (row, lost) in enumerate(zip(rows, failed, strict=True))
            ]
        return results

    def _choose_rates(
        self, names: list[str], fit_rows: Tensor, check_rows: Tensor
    ) -> tuple[dict[str, float], dict[str, list[Model]]]:
        """The learning rate of each model, and its networks trained at that rate."""
        rates = list(self.config.rates)
        nets, diverged = self._train([(name, rate) for name in names for rate in rates], fit_rows)
        chosen: dict[str, float] = {}
        for name in names:
            scores = np.array([self.rate_scores(nets[name, r], diverged[name, r], check_rows) for r in rates])
            chosen[name] = rates[self.protocol.choose_rate(scores)]
        return chosen, {name: nets[name, chosen[name]] for name in names}

    def _train(
        self, cells: list[tuple[str, float]], rows: Tensor
    ) -> tuple[dict[tuple[str, float], list[Model]], dict[tuple[str, float], Tensor]]:
        """Networks trained on the rows (F, n) of each fold, for each (model, rate), and which of them diverged."""
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
            StackRows(self.data.x, self.data.y, rows.repeat(len(cells), 1), self.data.train.shape[1]),
            recipe,
            seed=self.bench.seeds[:folds].tolist() * len(cells),
            progress=self.progress,
        )
        return nets, dict(zip(cells, fit.diverged.split(folds), strict=True))

    def untrained(self, name: str) -> list[Model]:
        """The untrained networks of a model, one for every fold."""
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

    def rate_scores(self, nets: list[Model], diverged: Tensor, rows: Tensor) -> list[float]:
        """The loss of a learning rate in each fold, by the protocol's metric; infinite where the network diverged."""
        scored = score_folds(self._plug_in(nets, rows), self.data.y[rows])
        metric = self.protocol.rate_metric(self.data.classes is None)
        sign = -1 if metric == "accuracy" else 1
        failed = [row[metric] is None or lost for row, lost in zip(scored, diverged.tolist(), strict=True)]
        return [math.inf if bad else sign * row[metric] for row, bad in zip(scored, failed, strict=True)]

    def test(self, nets: list[Model], tuned: Any) -> list[Row]:
        """Metrics on the test rows: of the posterior, and of the trained networks alone (names that begin with "map")."""
        y = self.data.y[self.data.test]
        posterior = score_folds(self.protocol.predict(self.bench, nets, tuned), y)
        plain = score_folds(self._plug_in(nets, self.data.test), y)
        return [
            row | {f"map_{name}": value for name, value in plain_row.items()}
            for row, plain_row in zip(posterior, plain, strict=True)
        ]


def _outputs(nets: Sequence[Model], x: Tensor) -> Tensor:
    """Outputs (E, n, c) of networks of one structure, each on its own inputs (E, n, d)."""
    parameters, buffers = stack_module_state([net.eval() for net in nets])  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        return vmap(lambda state, inputs: functional_call(nets[0], state, (inputs,)))(parameters | buffers, x)
