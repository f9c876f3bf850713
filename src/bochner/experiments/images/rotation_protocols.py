"""The two protocols of rotated digits, as two objects with the same methods, and their settings.

Under "paper": pixels in [0, 1], random crops while training, the published model layer and its KFAC posterior with scale 1, test
images turned by nearest neighbour. Under "bochner": standardised pixels, no crops; KFAC of the whole training set and the prior,
predicting with the linearised network; and the closed form, a Laplace posterior of the output layer at its own mode given the
features.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bochner.datasets import load_images
from bochner.experiments.images.crops import shift
from bochner.experiments.published_laplace import PublishedLaplace
from bochner.experiments.rows import Row
from bochner.experiments.zoo import Shape, assemble
from bochner.models import Model
from bochner.networks import digit_net
from bochner.posteriors.closed_form_classifier import ClosedFormClassifier
from bochner.posteriors.laplace import Laplace
from bochner.predictive import CategoricalPredictive, Predictive
from bochner.training.map import Recipe, fit_map, sgd
from bochner.training.randomness import counter_uniform

Predict = Callable[[Tensor], Predictive]

CHUNK = 2500  # images at a time
HELD_OUT_SHARE = 0.1  # share of the training images that choose the width of KFAC under "bochner"
PUBLISHED_MULTIPLIER = 0.2  # first factor on the features of the published networks, also of ReLU


@dataclass(frozen=True)
class Config:
    """Settings of a run of rotated digits; the defaults are the paper's.

    Attributes:
        experiment: Its name, for the rows.
        images: The set of images.
        protocol: "paper" or "bochner".
        seed: Seed of every draw.
        device: Where to compute.
        epochs: Epochs of SGD.
        batch_size: Images in a minibatch.
        lr: Learning rate. Under "bochner" it falls to 0.15 of what it was after half of the epochs and after 37 of 50.
        scale_lr: Learning rate of the lengthscale, a tenth of the network's.
        lengthscale: The first lengthscale under "bochner", except for ReLU, which has 1; under "paper" it is 5 for every model.
        width: Units of the model layer.
        crop: Most pixels by which images are shifted in training under "paper".
        draws: Number of posterior samples.
        posteriors: Names of the posteriors under "bochner"; under "paper" these are "map" and "kfac".
        angles: Rotations of the test set, in degrees.
    """

    experiment: str = "rotated-mnist"
    images: str = "mnist"
    protocol: str = "bochner"
    seed: int = 0
    device: str = "cpu"
    epochs: int = 50
    batch_size: int = 64
    lr: float = 1e-3
    scale_lr: float = 1e-4
    lengthscale: float = 0.2
    width: int = 2000
    crop: int = 4
    draws: int = 30
    posteriors: tuple[str, ...] = ("map", "kfac", "closed_form")
    angles: tuple[int, ...] = tuple(range(0, 361, 10))


def steps(progress: float) -> float:
    """Factor of the learning rate under "bochner": 0.15 after 25 of 50 epochs, and 0.15² after 37."""
    return 1.0 if progress < 0.5 else (0.15 if progress < 0.74 else 0.0225)


def published_steps(progress: float) -> float:
    """Factor of the learning rate in the published code: every epoch from 26 of 50 multiplies it by 0.9, from 38 by 0.81.

    It ends at 0.0225. The paper's text has only two falls to 0.9, at epochs 25 and 37.
    """
    epoch = round(50 * progress, 9)  # of 50, for any number of epochs
    return 0.9 ** (max(0, int(epoch) - 25) + max(0, int(epoch) - 37))


def rotate(images: Tensor, degrees: Tensor | float, *, mode: str = "bilinear") -> Tensor:
    """Images (n, c, h, w) turned counter-clockwise about their centre and padded with zeros.

    Args:
        images: The images.
        degrees: One angle, or one for each image, (n,).
        mode: Interpolation: "bilinear" or "nearest".
    """
    angle = torch.deg2rad(torch.as_tensor(degrees, dtype=images.dtype, device=images.device)).expand(len(images))
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    turn = torch.stack([cos, -sin, zero, sin, cos, zero], -1).reshape(-1, 2, 3)
    grid = F.affine_grid(turn, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode=mode, padding_mode="zeros", align_corners=False)


class Protocol(ABC):
    """One protocol of rotated digits: what networks see, how they train, and what predicts.

    Args:
        config: Settings of the run.
        held_out: Share of the training images that only choose the width of a posterior.
    """

    def __init__(self, config: Config, held_out: float = 0.0) -> None:
        data = load_images(config.images)

        def pixels(values: np.ndarray | None) -> Tensor:
            return torch.as_tensor(values).to(config.device)[:, None].float() / 255

        def labels(values: np.ndarray | None) -> Tensor:
            return torch.as_tensor(values).to(config.device).long()

        self.config = config
        self.train, self.test = pixels(data.x_train), pixels(data.x_test)
        self.y_train, self.y_test = labels(data.y_train), labels(data.y_test)
        count = int(held_out * len(self.train))
        self.held, self.y_held = self.train[:count], self.y_train[:count]
        self.train, self.y_train = self.train[count:], self.y_train[count:]

    @abstractmethod
    def shown(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] as the network takes them."""

    @abstractmethod
    def turned(self, angle: int) -> Tensor:
        """The test images turned by an angle, as the network takes them."""

    @abstractmethod
    def fit(self, name: str, progress: bool = False) -> tuple[Model, bool]:
        """The network at its MAP estimate, and whether training went wrong."""

    @abstractmethod
    def posteriors(self, model: Model) -> dict[str, tuple[Predict, Row]]:
        """By name, a function that predicts at images as the network takes them, and the posterior's entries of a row."""

    def _network(self, name: str, lengthscale: float) -> Model:
        config = self.config
        generator = torch.Generator().manual_seed(config.seed + 2**32)
        extractor = digit_net(self.train.shape[-1], generator=generator)
        shape = Shape(config.protocol, 10, config.width, lengthscale=lengthscale)
        return assemble(name, extractor, 25, shape, config.seed).to(config.device)

    def _recipe(self, schedule: Callable[[float], float]) -> Recipe:
        config = self.config
        return Recipe(
            config.epochs, config.batch_size, sgd, config.lr, config.scale_lr, schedule=schedule, precision="tf32"
        )

    @staticmethod
    def _trained(model: Model) -> Predict:
        """The prediction of a trained network itself."""
        return lambda x: CategoricalPredictive.from_logits([torch.cat([model(part) for part in x.split(CHUNK)])])


class Bochner(Protocol):
    """Standardised pixels; KFAC of all layers, its width chosen by held-out images; the closed form of the output layer."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, HELD_OUT_SHARE if "kfac" in config.posteriors else 0.0)
        self.mean, self.std = self.train.mean(), self.train.std()

    def shown(self, pixels: Tensor) -> Tensor:
        """Pixels standardised by the training images."""
        return (pixels - self.mean) / self.std

    def turned(self, angle: int) -> Tensor:
        """The test images turned by the angle, bilinear."""
        return self.shown(rotate(self.test, angle))

    def fit(self, name: str, progress: bool = False) -> tuple[Model, bool]:
        """Without crops; the rate falls twice."""
        model = self._network(name, 1.0 if name == "relu" else self.config.lengthscale)
        recipe, images = self._recipe(steps), self.shown(self.train)
        fit = fit_map(model, images, self.y_train, recipe, seed=self.config.seed, progress=progress)
        return model.eval(), bool(fit.diverged.any())

    def posteriors(self, model: Model) -> dict[str, tuple[Predict, Row]]:
        """The posteriors that the settings name."""
        makers = {"map": self._map, "kfac": self._kfac, "closed_form": self._closed_form}
        return {name: makers[name](model) for name in self.config.posteriors}

    def _map(self, model: Model) -> tuple[Predict, Row]:
        return self._trained(model), {}

    def _kfac(self, model: Model) -> tuple[Predict, Row]:
        kfac = Laplace(model, self.shown(self.train), self.y_train)
        kfac.tune_prior(self.shown(self.held), self.y_held)

        def predict(x: Tensor) -> Predictive:
            generator = torch.Generator(x.device).manual_seed(self.config.seed)
            return kfac.predict(x, samples=self.config.draws, chunk=1000, generator=generator)

        return predict, {"prior_multiplier": kfac.prior_multipliers[0], "temperature": kfac.temperature}

    def _closed_form(self, model: Model) -> tuple[Predict, Row]:
        head = copy.deepcopy(model)  # the extractor stays as it is, so it is applied once
        head.extractor = nn.Identity()

        @torch.no_grad()
        def extract(x: Tensor) -> Tensor:
            return torch.cat([model.extractor(part) for part in x.split(CHUNK)])

        generator = torch.Generator().manual_seed(self.config.seed)
        features = extract(self.shown(self.train))
        posterior = ClosedFormClassifier(head, features, self.y_train, samples=self.config.draws, generator=generator)
        return lambda x: posterior.predict(extract(x)), {}


class Paper(Protocol):
    """Pixels in [0, 1], crops in training, images turned by nearest neighbour, the published KFAC posterior at scale 1."""

    def shown(self, pixels: Tensor) -> Tensor:
        """Pixels as they are."""
        return pixels.clone()

    def turned(self, angle: int) -> Tensor:
        """The test images, each turned by its own random angle from [angle, angle + 1]°, by nearest neighbour."""
        seeds = torch.tensor([self.config.seed], device=self.test.device)
        return rotate(self.test, angle + counter_uniform(seeds, angle, len(self.test))[0], mode="nearest")

    def fit(self, name: str, progress: bool = False) -> tuple[Model, bool]:
        """With new random crops in every epoch, in the memory that training reads from."""
        config, epochs = self.config, itertools.count()
        model, images = self._network(name, 1 / PUBLISHED_MULTIPLIER), self.shown(self.train)

        def crop(_: object) -> None:
            images.copy_(self.shown(shift(self.train, config.crop, config.seed, next(epochs))))

        crop(None)
        recipe = self._recipe(published_steps)
        fit = fit_map(model, images, self.y_train, recipe, seed=config.seed, after_epoch=crop, progress=progress)
        return model.eval(), bool(fit.diverged.any())

    def posteriors(self, model: Model) -> dict[str, tuple[Predict, Row]]:
        """The trained network, and draws of its KFAC posterior."""
        first = slice(self.config.batch_size)
        x, y = self.shown(self.train[first])[None], self.y_train[None, first]
        seeds = torch.tensor([self.config.seed], device=x.device)
        published = PublishedLaplace([model], x, y, num_data=len(self.train), seeds=seeds)
        draws = [{n: p[0] for n, p in each.items()} for each in published.networks(scale=1.0, num=self.config.draws)]

        def predict(images: Tensor) -> Predictive:
            return CategoricalPredictive.from_logits(
                torch.cat([functional_call(model, drawn, (part,)) for part in images.split(CHUNK)]) for drawn in draws
            )

        return {"map": (self._trained(model), {}), "kfac": (predict, {})}


PROTOCOLS: dict[str, Callable[[Config], Protocol]] = {"bochner": Bochner, "paper": Paper}
