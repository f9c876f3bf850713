"""SWAG on the UCI classification sets, as the paper's text has it (its script is not published).

Adam for 20 epochs, then SGD for 40 from which the posterior is collected. The learning rate of the second part is found by
Bayesian optimisation of the validation density, one rate for all folds; then everything is trained again on all training rows, with
the lengthscale fixed at what the first training ended with.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bochner.experiments.data import Data, measure
from bochner.experiments.zoo import build
from bochner.models import Model
from bochner.posteriors.swag import DivergedError, Swag, tune_learning_rate
from bochner.predictive import Predictive
from bochner.training import Recipe, adam, fit_map

Row = dict[str, Any]


def steps(progress: float) -> float:
    """A tenth of the rate after half of the epochs, and a hundredth after three quarters."""
    return 1.0 if progress < 0.5 else (0.1 if progress < 0.75 else 0.01)


def swag_rows(config: Any, data: Data, name: str, batch: int) -> list[Row]:
    """Metrics and choices of one model in every fold."""
    fit_rows, check_rows = data.halves()
    seeds = [1000 * config.seed + f for f in config.folds]
    shape: Any = {"protocol": config.protocol, "hidden": config.hidden, "width": config.width}
    first = [build(name, data.x.shape[1], data.classes, seed=s, **shape).to(config.device) for s in seeds]
    recipe = Recipe(config.epochs, batch, adam, 1e-4, 0.01, steps, tf32=True)

    def train(nets: list[Model], rows: Tensor) -> Tensor:
        return fit_map(nets, data.x, data.y, recipe, seed=seeds, rows=rows, num_data=data.train.shape[1]).diverged

    def collect(nets: list[Model], rows: Tensor, rate: float, where: Tensor, draws: int) -> Predictive:
        posterior = Swag(
            nets, data.x, data.y, lr=rate, epochs=config.swag_epochs, rank=20, batch_size=batch, seed=seeds, rows=rows
        )
        generator = torch.Generator(config.device).manual_seed(config.seed)
        return posterior.predict(data.x[where], draws, own=True, generator=generator)

    trained = [copy.deepcopy(m) for m in first]
    train(trained, fit_rows)
    hold_lengthscales(trained, trained)

    def score(rate: float) -> float:
        try:
            prediction = collect(copy.deepcopy(trained), fit_rows, rate, check_rows, config.grid_draws)
        except DivergedError:
            return math.nan
        values = [row["nlpd"] for row in measure(prediction, data.y[check_rows])]
        return math.nan if None in values else float(np.mean(values))

    rate = None
    try:
        rate, _ = tune_learning_rate(score, trials=config.swag_trials, seed=config.seed)
        hold_lengthscales(first, trained)
        lost = train(first, data.train).tolist()
        rows = measure(collect(first, data.train, rate, data.test, config.draws), data.y[data.test])
    except DivergedError:
        return [{"nlpd": None, "accuracy": None, "auc": None, "lr": rate} for _ in seeds]
    return [{**(dict.fromkeys(row) if bad else row), "lr": rate} for row, bad in zip(rows, lost, strict=True)]


@torch.no_grad()
def hold_lengthscales(nets: Sequence[Model], source: Sequence[Model]) -> None:
    """Gives every network the lengthscale of its source and freezes it."""
    for net, given in zip(nets, source, strict=True):
        own, values = dict(net.layer.named_parameters()), dict(given.layer.named_parameters())
        for name in own.keys() & {"log_lengthscale", "multiplier"}:
            own[name].copy_(values[name])
            own[name].requires_grad_(False)
