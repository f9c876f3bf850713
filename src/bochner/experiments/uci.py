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
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from bochner.datasets import load
from bochner.datasets.tables import ADULT_NUMERIC
from bochner.experiments.data import Data, measure
from bochner.experiments.published import PublishedLaplace, decay, noises
from bochner.experiments.rows import provenance
from bochner.experiments.swag import swag_rows
from bochner.experiments.zoo import MODELS, build, by_activation
from bochner.models import Model
from bochner.posteriors.laplace import Laplace
from bochner.predictive import CategoricalPredictive, GaussianPredictive, Predictive
from bochner.training import Recipe, fit_stacks, sgd, tf32

Row = dict[str, Any]

SETS: dict[str, dict[str, int]] = {
    "uci-regression": {"boston": 50, "concrete": 50, "airfoil": 50, "elevators": 500},
    "uci-classification": {"diabetes": 50, "adult": 500, "connect-4": 500, "covtype": 500},
}

# Columns that the published code standardises, where these are not all: the 0/1 columns of adult stay as they are.
PUBLISHED_SCALED = {"adult": ADULT_NUMERIC}
FOLDS = tuple(range(10))
PROTOCOLS = ("bochner", "paper")
POSTERIORS = ("kfac", "swag")


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

    @classmethod
    def swag(cls, **options: Any) -> "Config":
        """The paper's SWAG networks: d-1000-1000-500-50-c, 20 epochs before the posterior is collected."""
        return cls(posterior="swag", hidden=(1000, 1000, 500), width=50, epochs=20, **options)


def run_set(config: Config, name: str, models: Sequence[str], *, progress: bool = False) -> list[Row]:
    """All rows of one data set for the given models: one for each model and fold."""
    start = time.perf_counter()
    scaled = PUBLISHED_SCALED.get(name) if config.protocol == "paper" else None
    data = Data.of(load(name), config.folds, config.device, scaled=scaled)
    batch = SETS[config.experiment][name]
    ordered = by_activation(models)
    if config.posterior == "swag":
        groups = itertools.groupby(ordered, key=lambda model: MODELS[model][1])
        results = {k: v for _, some in groups for k, v in swag_rows(config, data, list(some), batch).items()}
    else:
        results = _Sweep(config, data, batch, progress).run(ordered)
    seconds = (time.perf_counter() - start) / len(models)
    common = {"experiment": config.experiment, "protocol": config.protocol, "posterior": config.posterior, "set": name}
    rows, origin = [], provenance(config.device)
    for model in models:
        for i, fold in enumerate(config.folds):
            own = results[model][i]
            status = "diverged" if any(v is None for v in own.values()) else "ok"
            unit = {"model": model, "fold": fold, "folds": list(config.folds), "seed": config.seed, "status": status}
            rows.append({**common, **unit, **own, "seconds": round(seconds, 3), **origin})
    return rows


class _Sweep:
    """Grid, selection, retraining and testing for a list of models that train as one stack."""

    def __init__(self, config: Config, data: Data, batch: int, progress: bool) -> None:
        self.config, self.data, self.batch, self.progress = config, data, batch, progress
        self.count = len(config.folds)
        self.seeds = torch.tensor([1000 * config.seed + f for f in config.folds])
        self.untrained: dict[str, list[Model]] = {}

    def run(self, names: list[str]) -> dict[str, list[Row]]:
        """Rows of metrics and choices, by model and fold."""
        fit_rows, check_rows = self.data.halves()
        rates = list(self.config.rates)
        grid = [(name, rate) for name in names for rate in rates]
        nets, bad = self._train(grid, fit_rows)
        chosen: dict[str, float] = {}
        kept: dict[str, list[Model]] = {}
        for name in names:
            scores = np.array([self._rate_scores(nets[name, r], bad[name, r], check_rows) for r in rates])
            chosen[name] = rates[self._choose(scores)]
            kept[name] = nets[name, chosen[name]]
        del nets
        tuned = {name: self._tune(kept[name], fit_rows, check_rows) for name in names}
        del kept
        final, lost = self._train([(name, chosen[name]) for name in names], self.data.train)
        out = {}
        for name in names:
            rows = self._test(final[name, chosen[name]], tuned[name])
            failed = lost[name, chosen[name]].tolist()
            out[name] = [
                {**(dict.fromkeys(row) if f else row), "lr": chosen[name], **self._choice(tuned[name], i)}
                for i, (row, f) in enumerate(zip(rows, failed, strict=True))
            ]
        return out

    def _train(
        self, cells: list[tuple[str, float]], rows: Tensor
    ) -> tuple[dict[tuple[str, float], list[Model]], dict[tuple[str, float], Tensor]]:
        """Networks of every fold for each (model, rate), and which of them diverged."""
        config = self.config
        nets = {cell: [copy.deepcopy(m) for m in self._first(cell[0])] for cell in cells}
        recipe = Recipe(
            config.epochs,
            self.batch,
            sgd,
            [rate for _, rate in cells for _ in self.seeds],
            scale_lr=0.01,
            schedule=decay(config.epochs),
            tf32=True,
        )
        fit = fit_stacks(
            [model for cell in cells for model in nets[cell]],
            self.data.x,
            self.data.y,
            recipe,
            seed=self.seeds.tolist() * len(cells),
            rows=rows.repeat(len(cells), 1),
            num_data=self.data.train.shape[1],
            progress=self.progress,
        )
        bad = dict(zip(cells, fit.diverged.split(self.count), strict=True))
        return nets, bad

    def _first(self, name: str) -> list[Model]:
        """The untrained networks of every fold."""
        if name not in self.untrained:
            shape: Any = {"protocol": self.config.protocol, "hidden": self.config.hidden, "width": self.config.width}
            size = self.data.x.shape[1]
            drawn = [build(name, size, self.data.classes, seed=int(s), **shape) for s in self.seeds]
            self.untrained[name] = [m.to(self.config.device) for m in drawn]
        return self.untrained[name]

    def _plug_in(self, nets: list[Model], rows: Tensor) -> Predictive:
        """Prediction of the trained networks themselves, each on its own rows."""
        f = _outputs(nets, self.data.x[rows])
        if self.data.classes is None:
            return GaussianPredictive(f, torch.zeros_like(f), noises(nets))
        return CategoricalPredictive.from_logits([f])

    def _rate_scores(self, nets: list[Model], bad: Tensor, rows: Tensor) -> list[float]:
        """What the learning rate is chosen by, lower better, for each fold; infinite where it diverged."""
        found = measure(self._plug_in(nets, rows), self.data.y[rows])
        name = "nlpd" if self.config.protocol == "bochner" else ("rmse" if self.data.classes is None else "accuracy")
        sign = -1 if name == "accuracy" else 1
        failed = [row[name] is None or lost for row, lost in zip(found, bad.tolist(), strict=True)]
        return [math.inf if f else sign * row[name] for row, f in zip(found, failed, strict=True)]

    def _choose(self, scores: np.ndarray) -> int:
        """Which of the rates (rising) to take, by their scores in each fold, (rates, folds).

        Under "paper" the best mean. Under "bochner" the smallest rate whose mean is above the best by no more than the standard
        error of their difference, and in no fold by more than the spread of the best over folds: a rate at the edge of what trains
        at all may not survive the retraining on more rows.
        """
        best = int(scores.mean(1).argmin())
        if self.config.protocol == "paper" or scores.shape[1] < 2 or not np.isfinite(scores[best]).all():
            return best
        worse = scores[: best + 1] - scores[best]
        error = np.where(np.isfinite(worse), worse, 0.0).std(1, ddof=1) / math.sqrt(scores.shape[1])
        return int(np.argmax((worse.mean(1) <= error) & (worse.max(1) <= scores[best].std())))

    def _tune(self, nets: list[Model], fit_rows: Tensor, check_rows: Tensor) -> Any:
        """What is learnt from the validation rows besides the rate: a variance scale, or each fold's noise."""
        if self.config.protocol == "paper":
            return self._variance_scale(nets, fit_rows, check_rows)
        if self.data.classes is not None:
            return None
        prediction: Any = self._posterior(nets, fit_rows).predict(self.data.x[check_rows], own=True)
        return _held_out_noise(prediction, self.data.y[check_rows])

    def _variance_scale(self, nets: list[Model], fit_rows: Tensor, check_rows: Tensor) -> float:
        """The scale with the lowest sum of validation NLPD and weighted NLPD at noise inputs, over all folds."""
        config, data = self.config, self.data
        noise = (
            4 * torch.rand(config.noise_points, data.x.shape[1], generator=torch.Generator().manual_seed(config.seed))
            - 2
        )
        x = torch.cat([data.x[check_rows], noise.to(data.x).expand(self.count, -1, -1)], 1)
        posterior = self._published(nets, fit_rows)
        cut, scores = check_rows.shape[1], []
        draws = self._draws(posterior, x, config.scales, config.grid_draws)
        for i in range(len(config.scales)):
            prediction = self._drawn([d[i] for d in draws], posterior)
            each = self._scale_scores(prediction, data.y[check_rows], cut)
            scores.append(float(each[torch.isfinite(each)].mean()))  # a diverged fold has no say
        return config.scales[int(np.argmin(np.where(np.isnan(scores), np.inf, scores)))]

    def _scale_scores(self, prediction: Predictive, y: Tensor, cut: int) -> Tensor:
        """Each fold's validation NLPD plus, with weight λ, that of 0 or of all classes at noise inputs: (F,)."""
        weight = self.config.noise_weight
        if isinstance(prediction, GaussianPredictive):
            points = prediction.mean.shape[1] - cut
            target = torch.cat([y, y.new_zeros(self.count, points, 1)], 1)
            log_prob = prediction.log_prob(target)
        else:
            log_p: Tensor = prediction.log_probabilities  # pyright: ignore[reportAttributeAccessIssue]
            log_prob = torch.cat([log_p[:, :cut].gather(-1, y[..., None])[..., 0], log_p[:, cut:].mean(-1)], 1)
        return -log_prob[:, :cut].mean(1) - weight * log_prob[:, cut:].mean(1)

    def _published(self, nets: list[Model], rows: Tensor) -> PublishedLaplace:
        first = rows[:, : self.batch]
        seeds = self.seeds.to(self.data.x.device)
        return PublishedLaplace(nets, self.data.x[first], self.data.y[first], num_data=rows.shape[1], seeds=seeds)

    def _draws(self, posterior: PublishedLaplace, x: Tensor, scales: Sequence[float], num: int) -> list[Tensor]:
        with tf32(x.is_cuda):  # as in training
            return list(posterior.outputs(x, scales=scales, num=num))

    def _drawn(self, outputs: list[Tensor], posterior: PublishedLaplace) -> Predictive:
        """The published prediction from draws of f: one Gaussian of their mean and variance, or mean class probabilities."""
        if self.data.classes is None:
            f = torch.stack(outputs)
            return GaussianPredictive(f.mean(0), f.var(0, correction=0), posterior.noise)
        return CategoricalPredictive.from_logits(outputs)

    def _posterior(self, nets: list[Model], rows: Tensor) -> Laplace:
        return Laplace(nets, self.data.x[rows], self.data.y[rows], structure="last_layer")

    def _test(self, nets: list[Model], tuned: Any) -> list[Row]:
        """Metrics on the test rows, of the posterior and of the trained networks alone."""
        config, data = self.config, self.data
        x, y = data.x[data.test], data.y[data.test]
        if config.protocol == "paper":
            posterior = self._published(nets, data.train)
            draws = self._draws(posterior, x, [tuned], config.draws)
            prediction = self._drawn([d[0] for d in draws], posterior)
        else:
            generator = torch.Generator().manual_seed(config.seed)
            prediction: Any = self._posterior(nets, data.train).predict(x, own=True, generator=generator)
            if tuned is not None:
                prediction = GaussianPredictive(prediction.mean, prediction.f_variance, tuned)
        plain = measure(self._plug_in(nets, data.test), y)
        return [
            {**own, **{f"map_{n}": v for n, v in mapped.items()}}
            for own, mapped in zip(measure(prediction, y), plain, strict=True)
        ]

    def _choice(self, tuned: Any, fold: int) -> Row:
        if self.config.protocol == "paper":
            return {"scale": tuned}
        return {"structure": "last_layer"} | ({} if tuned is None else {"noise": float(tuned[fold])})


def _outputs(nets: Sequence[Model], x: Tensor) -> Tensor:
    """Outputs (E, n, c) of networks of one structure, each on its own inputs (E, n, d)."""
    numbers, buffers = stack_module_state([m.eval() for m in nets])  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        return vmap(lambda p, own: functional_call(nets[0], p, (own,)))(numbers | buffers, x)


def _held_out_noise(prediction: GaussianPredictive, y: Tensor) -> Tensor:
    """The noise of each fold, (F,), under which its validation targets are most probable, given the variance of f.

    Residuals of the training rows are too small, for the network has seen them. The search is between a hundredth of the
    residuals' root mean square and ten times it; a fold whose prediction is not finite has noise NaN.
    """
    found = []
    for residual, variance in zip((y - prediction.mean).double(), prediction.f_variance.double(), strict=True):
        square, scale = residual.square(), float(residual.square().mean().sqrt())

        def loss(log_noise: float, square: Tensor = square, variance: Tensor = variance) -> float:
            total = variance + math.exp(2 * log_noise)
            return float((0.5 * square / total + 0.5 * total.log()).mean())

        if not (math.isfinite(scale) and scale > 0 and bool(torch.isfinite(variance).all())):
            found.append(math.nan)
            continue
        bounds = (math.log(scale / 100), math.log(scale * 10))
        best: Any = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-8})
        found.append(math.exp(best.x))
    return torch.tensor(found).to(prediction.mean)
