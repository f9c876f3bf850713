"""SWAG on the UCI classification sets. Its script is not published: "paper" follows the text, and the published script for CIFAR.

A network trains for 20 epochs, then by SGD for 40 more, from which the posterior is collected. The validation density chooses the
learning rate of the second part, one rate for all folds. Then everything is trained again on all training rows, with the
lengthscale fixed at its value after the first training. The protocol chooses the optimiser of the first part and the search for
the rate of the second.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from bochner.experiments.rows import Row
from bochner.experiments.uci.data import score_folds
from bochner.experiments.uci.protocols import PROTOCOLS, Bench
from bochner.experiments.zoo import Shape, build
from bochner.models import Model
from bochner.posteriors.learning_rate import DivergedError
from bochner.posteriors.swag import Snapshots, Swag
from bochner.training.map import Recipe, fit_map

SWAG_RANK = 20  # deviations that the low-rank part of SWAG's covariance keeps


def steps(progress: float) -> float:
    """Factor of the learning rate: a tenth after half of the epochs, a hundredth after three quarters."""
    return 1.0 if progress < 0.5 else (0.1 if progress < 0.75 else 0.01)


class _Stack:
    """Networks of one activation, every model in every fold, that train as one stack: model by model, the folds in order."""

    def __init__(self, bench: Bench, names: list[str]) -> None:
        config, data = bench.config, bench.data
        self.bench, self.names, self.num_folds = bench, names, len(config.folds)
        fold_seeds = [int(seed) for seed in bench.seeds]
        shape, num_inputs = Shape(config.protocol, data.classes, config.width, config.hidden), data.x.shape[1]
        self.untrained = [build(n, num_inputs, shape, s).to(config.device) for n in names for s in fold_seeds]
        self.seeds = fold_seeds * len(names)
        optimizer = PROTOCOLS[config.protocol].swag_optimizer
        self.recipe = Recipe(config.epochs, bench.batch, optimizer, 1e-4, 0.01, steps, precision=config.precision)

    def train(self, nets: list[Model], rows: Tensor) -> Tensor:
        """Trains in place on the rows (F, n) of each fold; returns which networks diverged."""
        data = self.bench.data
        rows = rows.repeat(len(self.names), 1)
        num_data = data.train.shape[1]
        return fit_map(nets, data.x, data.y, self.recipe, rows=rows, seed=self.seeds, num_data=num_data).diverged

    def of_folds(self, nets: list[Model], folds: int) -> list[Model]:
        """Copies of every model's networks of the first folds."""
        return [copy.deepcopy(net) for i, net in enumerate(nets) if i % self.num_folds < folds]

    def score(
        self, nets: list[Model], rates: list[float], fit_rows: Tensor, test_rows: Tensor, draws: int
    ) -> list[Row]:
        """Metrics of every network of the first folds on its test rows (F, m), after SWAG on its rows (F, n) at its rate."""
        data, config = self.bench.data, self.bench.config
        collected, tested = fit_rows.repeat(len(self.names), 1), test_rows.repeat(len(self.names), 1)
        seeds = self.seeds[: len(fit_rows)] * len(self.names)
        snapshots = Snapshots(rates, config.swag_epochs, SWAG_RANK, self.bench.batch, seeds, config.precision)
        swag = Swag(nets, data.x, data.y, snapshots, rows=collected)
        generator = torch.Generator(config.device).manual_seed(config.seed)
        prediction = swag.predict(data.x[tested], draws, own=True, generator=generator)
        return score_folds(prediction, data.y[tested])


def swag_rows(bench: Bench, names: list[str], rate_folds: int) -> dict[str, list[Row]]:
    """Metrics and choices of models of one activation, for each in every fold; the first ``rate_folds`` choose the rate."""
    stack = _Stack(bench, names)
    fit_rows, check_rows = bench.data.halves()
    trained = [copy.deepcopy(net) for net in stack.untrained]
    stack.train(trained, fit_rows)
    hold_lengthscales(trained, trained)
    rates = _choose_rates(stack, trained, fit_rows[:rate_folds], check_rows[:rate_folds])
    rows: list[Row] = [{"nlpd": None, "accuracy": None, "auc": None}] * len(stack.seeds)
    if any(rates):
        hold_lengthscales(stack.untrained, trained)
        rows = _test_rows(stack, rates, rows)
    folds = stack.num_folds
    return {
        name: [{**row, "lr": rates[i]} for row in rows[i * folds : (i + 1) * folds]] for i, name in enumerate(names)
    }


def _choose_rates(stack: _Stack, trained: list[Model], fit_rows: Tensor, check_rows: Tensor) -> list[float | None]:
    """The learning rate of each model by its protocol's search over the first folds; None where every rate diverged."""
    config, folds = stack.bench.config, len(fit_rows)

    @cache
    def losses(rate: float) -> list[float]:
        """The mean validation NLPD of each model; NaN where a fold diverged."""
        nets = stack.of_folds(trained, folds)
        try:
            rows = stack.score(nets, [rate] * len(nets), fit_rows, check_rows, config.grid_draws)
        except DivergedError:
            return [math.nan] * len(stack.names)
        values = np.array([math.nan if row["nlpd"] is None else row["nlpd"] for row in rows])
        return values.reshape(len(stack.names), -1).mean(1).tolist()

    def search(loss: Callable[[float], float]) -> float | None:
        try:
            return PROTOCOLS[config.protocol].search_swag_rate(loss, config)
        except DivergedError:
            return None

    return [search(lambda rate, i=i: losses(rate)[i]) for i in range(len(stack.names))]


def _test_rows(stack: _Stack, rates: list[float | None], diverged_rows: list[Row]) -> list[Row]:
    """Metrics of every network on its test rows after training on all training rows; None where it diverged."""
    bench = stack.bench
    failed = stack.train(stack.untrained, bench.data.train).tolist()
    network_rates = [rate for rate in rates for _ in range(stack.num_folds)]
    # A model without a rate trains beside the others, at a harmless one; its rows say that it diverged.
    harmless = [rate or 1e-4 for rate in network_rates]
    try:
        rows = stack.score(stack.untrained, harmless, bench.data.train, bench.data.test, bench.config.draws)
    except DivergedError:
        return diverged_rows
    without_result = [lost or rate is None for lost, rate in zip(failed, network_rates, strict=True)]
    return [dict.fromkeys(row) if empty else row for row, empty in zip(rows, without_result, strict=True)]


@torch.no_grad()
def hold_lengthscales(nets: Sequence[Model], sources: Sequence[Model]) -> None:
    """Gives every network the lengthscale of its source and freezes it."""
    for net, source in zip(nets, sources, strict=True):
        parameters, values = dict(net.layer.named_parameters()), dict(source.layer.named_parameters())
        for name in parameters.keys() & {"log_lengthscale", "multiplier"}:
            parameters[name].copy_(values[name])
            parameters[name].requires_grad_(False)
