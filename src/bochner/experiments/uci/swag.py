"""SWAG on the UCI classification sets. Its script is not published; "paper" is as the text has it, and its sibling for CIFAR.

20 epochs of training, then SGD for 40 from which the posterior is collected. The learning rate of the second part is found by the
validation density, one rate for all folds; then everything is trained again on all training rows, with the lengthscale fixed at
what the first training ended with. Under "paper" the first part is SGD with momentum, though the text calls it Adam, and the rate
comes from a linear grid; under "bochner" it is Adam, and Bayesian optimisation on a logarithmic scale.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bochner.experiments.rows import Row
from bochner.experiments.uci.data import Data, score_folds
from bochner.experiments.zoo import Shape, build
from bochner.models import Model
from bochner.posteriors.swag import DivergedError, Swag, tune_learning_rate
from bochner.training.map import Recipe, adam, fit_map, sgd


def steps(progress: float) -> float:
    """A tenth of the rate after half of the epochs, and a hundredth after three quarters."""
    return 1.0 if progress < 0.5 else (0.1 if progress < 0.75 else 0.01)


def linear_search(
    score: Callable[[float], float], *, bounds: tuple[float, float] = (0.001, 3.0), trials: int = 12
) -> tuple[float, list[tuple[float, float]]]:
    """The published search: the rate with the lowest score on an even grid; scores that are not finite do not count.

    Returns:
        The best rate, and all pairs of rate and score.
    """
    tried = [(float(rate), float(score(float(rate)))) for rate in np.linspace(*bounds, trials)]
    finite = [pair for pair in tried if math.isfinite(pair[1])]
    if not finite:
        raise DivergedError(f"No learning rate between {bounds[0]} and {bounds[1]} gave a finite score.")
    return min(finite, key=lambda pair: pair[1])[0], tried


# What differs between the protocols: the optimiser of the first phase, and the search for the rate of the second.
FIRST_PHASE = {"paper": sgd, "bochner": adam}
SEARCHES: dict[str, Callable[..., tuple[float, list[tuple[float, float]]]]] = {
    "paper": lambda score, config: linear_search(score, trials=config.swag_trials),
    "bochner": lambda score, config: tune_learning_rate(score, trials=config.swag_trials, seed=config.seed),
}


class _Stack:
    """Networks of one activation, every model in every fold, that train as one stack."""

    def __init__(self, config: Any, data: Data, names: list[str], batch: int) -> None:
        self.config, self.data, self.batch = config, data, batch
        self.names, self.count = names, len(config.folds)
        folds = [1000 * config.seed + f for f in config.folds]
        shape, size = Shape(config.protocol, data.classes, config.width, config.hidden), data.x.shape[1]
        self.first = [build(n, size, shape, s).to(config.device) for n in names for s in folds]
        self.seeds = folds * len(names)
        optimizer = FIRST_PHASE[config.protocol]
        self.recipe = Recipe(config.epochs, batch, optimizer, 1e-4, 0.01, steps, precision=config.precision)

    def train(self, nets: list[Model], rows: Tensor) -> Tensor:
        """Trains in place; says which networks diverged."""
        options: Any = {"seed": self.seeds, "num_data": self.data.train.shape[1]}
        rows = rows.repeat(len(self.names), 1)
        return fit_map(nets, self.data.x, self.data.y, self.recipe, rows=rows, **options).diverged

    def of_folds(self, nets: list[Model], folds: int) -> list[Model]:
        """Copies of every model's networks of the first folds."""
        return [copy.deepcopy(net) for i, net in enumerate(nets) if i % self.count < folds]

    def score(self, nets: list[Model], rows: Tensor, rates: list[float], where: Tensor, draws: int) -> list[Row]:
        """Metrics of every network of the first folds, (F, n), on its rows ``where``, after collecting at its rate."""
        data, config = self.data, self.config
        seen, asked = rows.repeat(len(self.names), 1), where.repeat(len(self.names), 1)
        seeds = self.seeds[: len(rows)] * len(self.names)
        sizes: Any = {"epochs": config.swag_epochs, "rank": 20, "batch_size": self.batch, "precision": config.precision}
        swag = Swag(nets, data.x, data.y, lr=rates, seed=seeds, rows=seen, **sizes)
        generator = torch.Generator(config.device).manual_seed(config.seed)
        prediction = swag.predict(data.x[asked], draws, own=True, generator=generator)
        return score_folds(prediction, data.y[asked])


def swag_rows(config: Any, data: Data, names: list[str], batch: int, rate_folds: int) -> dict[str, list[Row]]:
    """Metrics and choices of models of one activation, for each in every fold; the first ``rate_folds`` choose the rate."""
    stack = _Stack(config, data, names, batch)
    fit_rows, check_rows = data.halves()
    count = len(stack.seeds)
    trained = [copy.deepcopy(m) for m in stack.first]
    stack.train(trained, fit_rows)
    hold_lengthscales(trained, trained)

    @cache
    def scores(rate: float) -> list[float]:
        """The mean validation NLPD of each model; NaN where a fold diverged."""
        try:
            nets, rows = stack.of_folds(trained, rate_folds), (fit_rows[:rate_folds], check_rows[:rate_folds])
            found = stack.score(nets, rows[0], [rate] * len(nets), rows[1], config.grid_draws)
        except DivergedError:
            return [math.nan] * len(names)
        values = np.array([math.nan if row["nlpd"] is None else row["nlpd"] for row in found])
        return values.reshape(len(names), -1).mean(1).tolist()

    rates = [_search(config, lambda rate, i=i: scores(rate)[i]) for i in range(len(names))]
    rows: list[Row] = [{"nlpd": None, "accuracy": None, "auc": None}] * count
    if any(rates):
        hold_lengthscales(stack.first, trained)
        lost = stack.train(stack.first, data.train).tolist()
        # A model without a rate trains beside the others, at one that does no harm; its rows say that it diverged.
        every = [rate or 1e-4 for rate in rates for _ in config.folds]
        try:
            found = stack.score(stack.first, data.train, every, data.test, config.draws)
            without = [rate is None for rate in rates for _ in config.folds]
            failed = [a or b for a, b in zip(lost, without, strict=True)]
            rows = [dict.fromkeys(row) if bad else row for row, bad in zip(found, failed, strict=True)]
        except DivergedError:
            pass
    size = stack.count
    return {name: [{**row, "lr": rates[i]} for row in rows[i * size : (i + 1) * size]] for i, name in enumerate(names)}


def _search(config: Any, score: Callable[[float], float]) -> float | None:
    """The rate of one model by its protocol's search; None where every rate diverged."""
    try:
        return SEARCHES[config.protocol](score, config)[0]
    except DivergedError:
        return None


@torch.no_grad()
def hold_lengthscales(nets: Sequence[Model], source: Sequence[Model]) -> None:
    """Gives every network the lengthscale of its source and freezes it."""
    for net, given in zip(nets, source, strict=True):
        own, values = dict(net.layer.named_parameters()), dict(given.layer.named_parameters())
        for name in own.keys() & {"log_lengthscale", "multiplier"}:
            own[name].copy_(values[name])
            own[name].requires_grad_(False)
