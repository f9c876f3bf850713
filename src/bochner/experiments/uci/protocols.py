"""The two protocols of the UCI tables, as two objects with the same methods.

``choose_rate`` chooses a learning rate for all folds by their validation rows, ``tune`` learns what else the prediction needs from
the same rows, ``predict`` predicts the test rows, and ``choice`` gives the entries of a row that record these choices. Beside these
a protocol says which columns are standardised and how SWAG trains. ``Paper`` does what the published code did, ``Bochner`` what a
careful statistician would do.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from bochner.datasets.tables import ADULT_NUMERIC
from bochner.experiments.published import linear_search
from bochner.experiments.published_laplace import PublishedLaplace
from bochner.experiments.rows import Row
from bochner.experiments.uci.data import Data
from bochner.models import Model
from bochner.posteriors.laplace import Laplace
from bochner.posteriors.learning_rate import tune_learning_rate
from bochner.predictive import CategoricalPredictive, GaussianPredictive, Predictive
from bochner.training.map import adam, sgd, tf32

Tuned = TypeVar("Tuned")
OptimizerMaker = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


FOLDS = tuple(range(10))


@dataclass(frozen=True)
class Config:
    """Settings of a sweep; sizes and grids are the paper's.

    Attributes:
        experiment: "uci-regression" or "uci-classification".
        protocol: "bochner" or "paper".
        posterior: "kfac", or "swag" for classification.
        seed: Seed of every draw.
        device: Where to compute.
        folds: Numbers of the folds.
        epochs: Epochs of training.
        hidden: Widths of the extractor's layers.
        width: Units of the model layer.
        rates: Learning rates that are tried.
        scales: Scales of the posterior's covariance that are tried under "paper".
        grid_draws: Posterior samples while a scale or a rate is chosen.
        draws: Posterior samples for the test rows.
        noise_points: Noise inputs that the scale is chosen with.
        noise_weight: Weight of their NLPD beside that of the validation rows.
        swag_epochs: Epochs that SWAG is collected from.
        swag_trials: Learning rates that are tried for SWAG.
        precision: Precision of matrix products.
    """

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


@dataclass
class Bench:
    """The data and settings that the networks of one set train and are tested with.

    Attributes:
        config: Settings of the sweep.
        data: The set, cut into folds.
        batch: Rows of a minibatch.
        seeds: The seed of each fold.
    """

    config: Config
    data: Data
    batch: int
    seeds: Tensor


class Protocol(ABC, Generic[Tuned]):
    """The decisions of one protocol; ``Tuned`` is what ``tune`` learns.

    Attributes:
        swag_optimizer: Optimiser of a SWAG network before its posterior is collected.
    """

    swag_optimizer: OptimizerMaker

    @abstractmethod
    def scaled_columns(self, name: str) -> Collection[str] | None:
        """Names of the columns of a set that are standardised; None for all."""

    @abstractmethod
    def search_swag_rate(self, loss: Callable[[float], float], config: Config) -> float:
        """The learning rate of SWAG that a search finds, by a loss that may be NaN."""

    @abstractmethod
    def rate_metric(self, regression: bool) -> str:
        """The metric of validation rows that learning rates are compared by."""

    @abstractmethod
    def choose_rate(self, scores: np.ndarray) -> int:
        """Which of the rates (rising) to take, by their scores in each fold, (rates, folds), lower better."""

    @abstractmethod
    def tune(self, bench: Bench, nets: list[Model], fit_rows: Tensor, check_rows: Tensor) -> Tuned:
        """Learns from the validation rows what else the prediction needs, beside the rate."""

    @abstractmethod
    def predict(self, bench: Bench, nets: list[Model], tuned: Tuned) -> Predictive:
        """The prediction of the test rows of every fold."""

    @abstractmethod
    def choice(self, tuned: Tuned, fold: int) -> Row:
        """The entries of a row that record what was tuned for its fold."""


class Bochner(Protocol[Tensor | None]):
    """The rate by validation density, the posterior of the output layer given all training rows and the prior, held-out noise.

    SWAG networks train by Adam first; Bayesian optimisation on a logarithmic scale finds SWAG's rate.
    """

    swag_optimizer = staticmethod(adam)

    def scaled_columns(self, name: str) -> None:
        """All columns."""

    def search_swag_rate(self, loss: Callable[[float], float], config: Config) -> float:
        """By Bayesian optimisation."""
        return tune_learning_rate(loss, trials=config.swag_trials, seed=config.seed)[0]

    def rate_metric(self, regression: bool) -> str:  # noqa: ARG002
        """The log density, of targets as of classes."""
        return "nlpd"

    def choose_rate(self, scores: np.ndarray) -> int:
        """The smallest rate whose mean is above the best by no more than the standard error of their difference.

        And in no fold by more than the spread of the best over folds: a rate at the edge of what trains at all may not survive
        the retraining on more rows.
        """
        best = int(scores.mean(1).argmin())
        if scores.shape[1] < 2 or not np.isfinite(scores[best]).all():
            return best
        worse = scores[: best + 1] - scores[best]
        error = np.where(np.isfinite(worse), worse, 0.0).std(1, ddof=1) / math.sqrt(scores.shape[1])
        return int(np.argmax((worse.mean(1) <= error) & (worse.max(1) <= scores[best].std())))

    def tune(self, bench: Bench, nets: list[Model], fit_rows: Tensor, check_rows: Tensor) -> Tensor | None:
        """Each fold's noise, for regression."""
        if bench.data.classes is not None:
            return None
        prediction: Any = self._posterior(bench, nets, fit_rows).predict(bench.data.x[check_rows], own=True)
        return held_out_noise(prediction, bench.data.y[check_rows])

    def predict(self, bench: Bench, nets: list[Model], tuned: Tensor | None) -> Predictive:
        """By the full Laplace posterior of the output layer."""
        generator = torch.Generator().manual_seed(bench.config.seed)
        posterior = self._posterior(bench, nets, bench.data.train)
        prediction: Any = posterior.predict(bench.data.x[bench.data.test], own=True, generator=generator)
        return prediction if tuned is None else GaussianPredictive(prediction.mean, prediction.f_variance, tuned)

    def _posterior(self, bench: Bench, nets: list[Model], rows: Tensor) -> Laplace:
        return Laplace(nets, bench.data.x[rows], bench.data.y[rows], structure="last_layer")

    def choice(self, tuned: Tensor | None, fold: int) -> Row:
        """The posterior, and the fold's noise."""
        return {"structure": "last_layer"} | ({} if tuned is None else {"noise": float(tuned[fold])})


class Paper(Protocol[float]):
    """The rate by validation error, a variance scale by validation plus noise inputs, 50 draws of the published KFAC posterior.

    SWAG networks train by SGD with momentum first, though the text calls it Adam; a linear grid finds SWAG's rate.
    """

    swag_optimizer = staticmethod(sgd)

    def scaled_columns(self, name: str) -> Collection[str] | None:
        """All columns, but of adult only those that are numbers: the published code leaves its 0/1 columns as they are."""
        return ADULT_NUMERIC if name == "adult" else None

    def search_swag_rate(self, loss: Callable[[float], float], config: Config) -> float:
        """On the published grid."""
        return linear_search(loss, trials=config.swag_trials)[0]

    def rate_metric(self, regression: bool) -> str:
        """The error of targets, the accuracy of classes."""
        return "rmse" if regression else "accuracy"

    def choose_rate(self, scores: np.ndarray) -> int:
        """The best mean over folds."""
        return int(scores.mean(1).argmin())

    def tune(self, bench: Bench, nets: list[Model], fit_rows: Tensor, check_rows: Tensor) -> float:
        """The scale with the lowest sum of validation NLPD and weighted NLPD at noise inputs, over all folds."""
        config, data = bench.config, bench.data
        generator = torch.Generator().manual_seed(config.seed)
        noise = 4 * torch.rand(config.noise_points, data.x.shape[1], generator=generator) - 2
        x = torch.cat([data.x[check_rows], noise.to(data.x).expand(len(nets), -1, -1)], 1)
        posterior = self.posterior(bench, nets, fit_rows)
        cut, scores = check_rows.shape[1], []
        draws = self._draws(posterior, x, config.scales, config.grid_draws)
        for i in range(len(config.scales)):
            prediction = self._average([d[i] for d in draws], posterior)
            each = self.scale_scores(prediction, data.y[check_rows], cut, config.noise_weight)
            scores.append(float(each[torch.isfinite(each)].mean()))  # a diverged fold is left out
        return config.scales[int(np.argmin(np.where(np.isnan(scores), np.inf, scores)))]

    @staticmethod
    def scale_scores(prediction: Predictive, y: Tensor, cut: int, weight: float) -> Tensor:
        """Each fold's validation NLPD plus, with a weight, that of 0 or of all classes at noise inputs: (F,)."""
        if isinstance(prediction, GaussianPredictive):
            points = prediction.mean.shape[1] - cut
            log_prob = prediction.log_prob(torch.cat([y, y.new_zeros(len(y), points, 1)], 1))
        else:
            log_p: Tensor = prediction.log_probabilities  # pyright: ignore[reportAttributeAccessIssue]
            log_prob = torch.cat([log_p[:, :cut].gather(-1, y[..., None])[..., 0], log_p[:, cut:].mean(-1)], 1)
        return -log_prob[:, :cut].mean(1) - weight * log_prob[:, cut:].mean(1)

    def predict(self, bench: Bench, nets: list[Model], tuned: float) -> Predictive:
        """By draws of the KFAC posterior at the chosen scale."""
        posterior = self.posterior(bench, nets, bench.data.train)
        draws = self._draws(posterior, bench.data.x[bench.data.test], [tuned], bench.config.draws)
        return self._average([d[0] for d in draws], posterior)

    def posterior(self, bench: Bench, nets: list[Model], rows: Tensor) -> PublishedLaplace:
        """The published posterior, whose curvature is that of the first batch."""
        first = rows[:, : bench.batch]
        seeds = bench.seeds[: len(rows)].to(bench.data.x.device)
        return PublishedLaplace(nets, bench.data.x[first], bench.data.y[first], num_data=rows.shape[1], seeds=seeds)

    def _draws(self, posterior: PublishedLaplace, x: Tensor, scales: Sequence[float], num: int) -> list[Tensor]:
        with tf32(x.is_cuda):  # as in training
            return list(posterior.outputs(x, scales=scales, num=num))

    def _average(self, outputs: list[Tensor], posterior: PublishedLaplace) -> Predictive:
        """One Gaussian of the mean and variance of the draws of f, or mean class probabilities."""
        if outputs[0].shape[-1] == 1:
            f = torch.stack(outputs)
            return GaussianPredictive(f.mean(0), f.var(0, correction=0), posterior.noise)
        return CategoricalPredictive.from_logits(outputs)

    def choice(self, tuned: float, fold: int) -> Row:  # noqa: ARG002
        """The scale."""
        return {"scale": tuned}


PROTOCOLS: dict[str, Protocol[Any]] = {"bochner": Bochner(), "paper": Paper()}


def held_out_noise(prediction: GaussianPredictive, y: Tensor) -> Tensor:
    """The noise of each fold, (F,), that maximises the density of its validation targets, given the variance of f.

    Residuals of the training rows are too small, for the network has seen them. The search is between a hundredth of the
    residuals' root mean square and ten times it; a fold whose prediction is not finite has noise NaN.
    """
    noises = []
    for residual, variance in zip((y - prediction.mean).double(), prediction.f_variance.double(), strict=True):
        square, scale = residual.square(), float(residual.square().mean().sqrt())

        def loss(log_noise: float, square: Tensor = square, variance: Tensor = variance) -> float:
            total = variance + math.exp(2 * log_noise)
            return float((0.5 * square / total + 0.5 * total.log()).mean())

        if not (math.isfinite(scale) and scale > 0 and bool(torch.isfinite(variance).all())):
            noises.append(math.nan)
            continue
        bounds = (math.log(scale / 100), math.log(scale * 10))
        best: Any = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-8})
        noises.append(math.exp(best.x))
    return torch.tensor(noises).to(prediction.mean)
