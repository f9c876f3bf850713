"""SWAG on the UCI classification sets. Its script is not published; "paper" is as the text has it, and its sibling for CIFAR.

20 epochs of training, then SGD for 40 from which the posterior is collected. The learning rate of the second part is found by the
validation density, one rate for all folds; then everything is trained again on all training rows, with the lengthscale fixed at
what the first training ended with. Under "paper" the first part is SGD with momentum, though the text calls it Adam, and the rate
comes from a linear grid; under "bochner" it is Adam, and Bayesian optimisation on a logarithmic scale.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bochner.experiments.data import Data, measure
from bochner.experiments.zoo import build
from bochner.models import Model
from bochner.posteriors.swag import DivergedError, Swag, tune_learning_rate
from bochner.predictive import Predictive
from bochner.training import Recipe, adam, fit_map, sgd

Row = dict[str, Any]


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


def swag_rows(config: Any, data: Data, name: str, batch: int) -> list[Row]:
    """Metrics and choices of one model in every fold."""
    fit_rows, check_rows = data.halves()
    seeds = [1000 * config.seed + f for f in config.folds]
    shape: Any = {"protocol": config.protocol, "hidden": config.hidden, "width": config.width}
    first = [build(name, data.x.shape[1], data.classes, seed=s, **shape).to(config.device) for s in seeds]
    published = config.protocol == "paper"
    recipe = Recipe(config.epochs, batch, sgd if published else adam, 1e-4, 0.01, steps, tf32=True)

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
        if published:
            rate, _ = linear_search(score, trials=config.swag_trials)
        else:
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
