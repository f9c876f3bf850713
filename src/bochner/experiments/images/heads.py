"""Heads on CIFAR-10 features and their posteriors: SWAG, SWAG as published, and the closed form.

The published code trains heads by SGD on crops and mirror images with dropout 0.1, BatchNorm in training mode. It draws with twice
SWAG's covariance, and for images outside without its low-rank part.
"""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bochner.experiments.images.cifar import Config, Features
from bochner.experiments.images.pretraining import CLASSES
from bochner.experiments.published import linear_search
from bochner.experiments.rows import Row
from bochner.experiments.uci.swag import hold_lengthscales
from bochner.experiments.zoo import Shape, assemble
from bochner.models import Model
from bochner.networks import SeededDropout
from bochner.posteriors.closed_form_classifier import ClosedFormClassifier, Solver
from bochner.posteriors.learning_rate import DivergedError, tune_learning_rate
from bochner.posteriors.mixture import drawn_outputs
from bochner.posteriors.swag import Snapshots, Swag
from bochner.predictive import CategoricalPredictive, Predictive
from bochner.training.map import Recipe, adam, fit_map, sgd


def make_head(config: Config, data: Features, name: str, seed: int, shape: Shape | None = None) -> Model:
    """A head on the features of ``data``, by default that of the paper's text."""
    shape = shape or Shape("paper", CLASSES, config.width, lengthscale=1.0)
    return assemble(name, nn.Sequential(), data.bochner["train"].shape[1], shape, seed).to(config.device)


def fit_heads(config: Config, data: Features, heads: Model | list[Model], seed: int | list[int]) -> None:
    """Trains heads in place by Adam, as in the paper's text; raises an error if one diverges."""
    recipe = Recipe(config.epochs, config.batch_size, adam, 1e-4, 1e-5, precision="tf32")
    fit = fit_map(heads, data.bochner["train"], data.labels["train"], recipe, seed=seed)
    if bool(fit.diverged.any()):
        raise DivergedError("Training of a head diverged.")


class CollectedHead:
    """A head, its SWAG posterior, and the learning rate that the held-out images chose."""

    def __init__(self, config: Config, data: Features, name: str) -> None:
        self.config, self.data, self.labels = config, data, data.labels["train"]
        self.x, self.held_out = self._images()
        first = self._head(name)
        trained = copy.deepcopy(first)
        self._fit(trained)
        for head in (trained, first):  # both keep the lengthscale of the first training from here on
            hold_lengthscales([head], [trained])

        def score(rate: float) -> float:
            try:
                swag = self._collect(copy.deepcopy(trained), rate)
            except DivergedError:
                return math.nan
            prediction = swag.predict(self.held_out, config.draws, generator=self._generator(0))
            return -float(prediction.log_prob(data.labels["held_out"]).mean())

        self.rate, self.tried = self._search(score)
        self._fit(first)
        self.swag = self._collect(first, self.rate)

    def _images(self) -> tuple[Tensor, Tensor]:
        """Features to train on, and those of the held-out images."""
        return self.data.bochner["train"], self.data.bochner["held_out"]

    def _head(self, name: str) -> Model:
        return make_head(self.config, self.data, name, self.config.seed)

    def _fit(self, head: Model) -> None:
        fit_heads(self.config, self.data, head, self.config.seed)

    def _search(self, score: Callable[[float], float]) -> tuple[float, list[tuple[float, float]]]:
        return tune_learning_rate(score, trials=self.config.trials, seed=self.config.seed)

    def _next_epoch(self) -> None:
        """Nothing changes from epoch to epoch."""

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator(self.config.device).manual_seed(self.config.seed + stream)

    def _collect(self, head: Model, rate: float) -> Swag:
        config = self.config
        snapshots = Snapshots(rate, config.swag_epochs, config.rank, config.batch_size, config.seed)
        return Swag(head, self.x, self.labels, snapshots, after_epoch=self._next_epoch)

    def predict(self, x: Tensor, *, outside: bool) -> Predictive:  # noqa: ARG002
        """Prediction at features (n, d)."""
        return self.swag.predict(x, self.config.draws, generator=self._generator(1))


class PublishedHead(CollectedHead):
    """A head with its SWAG posterior as in the published code.

    It trains by SGD on changing views with dropout, a linear grid finds its rate, and its draws differ for images outside.
    """

    def _images(self) -> tuple[Tensor, Tensor]:
        self.epoch = 0
        return self.data.views[0].clone(), self.data.published["paper"]["held_out"]

    def _head(self, name: str) -> Model:
        config, matrix = self.config, self.data.projection
        extractor = nn.Sequential(SeededDropout(config.dropout, self.x.shape[1]))
        size = self.x.shape[1] if matrix is None else matrix.shape[1]
        if matrix is not None:
            extractor.append(fixed := nn.Linear(*matrix.shape, bias=False))
            fixed.weight = nn.Parameter(matrix.mT.contiguous(), requires_grad=False)
        shape = Shape("paper", CLASSES, config.width, lengthscale=1.0)
        return assemble(name, extractor, size, shape, config.seed).to(config.device)

    def _fit(self, head: Model) -> None:
        config = self.config
        recipe = Recipe(config.published_epochs, config.batch_size, sgd, 1e-4, 1e-5, precision="tf32")
        fit = fit_map(head, self.x, self.labels, recipe, seed=config.seed, after_epoch=lambda _: self._next_epoch())
        if bool(fit.diverged.any()):
            raise DivergedError("Training of a head diverged.")

    def _search(self, score: Callable[[float], float]) -> tuple[float, list[tuple[float, float]]]:
        return linear_search(score, trials=self.config.trials)

    def _next_epoch(self) -> None:
        """Gives the next epoch the next view, in the memory that training reads from."""
        self.epoch += 1
        self.x.copy_(self.data.views[self.epoch % len(self.data.views)])

    def predict(self, x: Tensor, *, outside: bool) -> Predictive:
        """Prediction from twice SWAG's covariance inside; outside from its diagonal part alone."""
        low_rank = 0.0 if outside else 1.0
        generator = self._generator(1)
        drawn = self.swag.sample_weights(self.config.draws, diagonal=1.0, low_rank=low_rank, generator=generator)
        outputs = drawn_outputs(self.swag.model.eval(), drawn, self.swag.fixed | self.swag.buffers, x)
        return CategoricalPredictive.from_logits(outputs[:, 0])


def fit_closed_form(config: Config, data: Features, name: str) -> tuple[ClosedFormClassifier, Row]:
    """Posterior of the output layer on units drawn from the prior, and its hyperparameters, chosen by the held-out images."""
    x, y = data.bochner["train"], data.labels["train"]
    subset = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(config.seed))[:1000].to(x.device)]
    median = float(torch.pdist(subset).median())

    def fit(share: float, amplitude: float, width: int, steps: int, draws: int) -> ClosedFormClassifier:
        head = make_head(config, data, name, config.seed, Shape("bochner", CLASSES, width, lengthscale=share * median))
        generator = torch.Generator().manual_seed(config.seed)
        head.output.log_amplitude.data.fill_(math.log(amplitude))
        solver = Solver(steps=steps, full_limit=0)
        return ClosedFormClassifier(head, x, y, samples=draws, solver=solver, generator=generator)

    def score(share: float, amplitude: float) -> float:
        posterior = fit(share, amplitude, config.search_width, 20, config.draws)
        loss = -float(posterior.predict(data.bochner["held_out"]).log_prob(data.labels["held_out"]).mean())
        return math.inf if math.isnan(loss) else loss

    grid = [(share, amplitude) for share in config.lengthscales for amplitude in config.amplitudes]
    share, amplitude = min(grid, key=lambda pair: score(*pair))
    chosen = {"lengthscale": share * median, "median_distance": median, "amplitude": amplitude}
    return fit(share, amplitude, config.closed_width, 100, config.closed_draws), chosen | {"width": config.closed_width}
