"""Rotated digits: networks trained on upright ones, tested at every angle (the paper's MNIST figures).

Under "paper": pixels in [0, 1], random crops while training, the published model layer and its KFAC posterior with scale 1, test
images turned by nearest neighbour. Under "bochner": standardised pixels, no crops; KFAC of the whole training set with the prior in
it, predicting with the linearised network; and the closed form, a Laplace posterior of the output layer at its own mode given the
features.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bochner import metrics
from bochner.datasets import load_images
from bochner.experiments.crops import shift
from bochner.experiments.published import PublishedLaplace
from bochner.experiments.rows import Row, add_rows, provenance, read_rows
from bochner.experiments.zoo import assemble
from bochner.models import Model
from bochner.networks import digit_net
from bochner.posteriors.closed_form_classifier import ClosedFormClassifier
from bochner.posteriors.laplace import Laplace
from bochner.predictive import CategoricalPredictive, Predictive
from bochner.randomness import counter_uniform
from bochner.training import Recipe, fit_map, sgd, tf32

NETWORKS = ("relu", "local-rbf", "rbf-sin", "rbf-sincos")
CHUNK = 2500  # images at a time
HELD_OUT = 0.1  # share of the training images that choose how sure KFAC is under "bochner"
PUBLISHED_MULTIPLIER = 0.2  # what the published networks multiply their features with at first, ReLU too


@dataclass(frozen=True)
class Config:
    """Settings of a run; those of ``EXPERIMENTS["rotated-mnist"]`` are the paper's.

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
        lengthscale: Where that starts under "bochner", but for ReLU, which has 1; under "paper" it is 5 for every model.
        width: Units of the model layer.
        crop: How far, in pixels, images are shifted in training under "paper".
        draws: Posterior samples.
        posteriors: What to predict with under "bochner"; under "paper" it is "map" and "kfac".
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


EXPERIMENTS = {
    "rotated-mnist": Config(),
    # Small enough for a laptop; the linearised KFAC of a convolution would take most of the time.
    "rotated-digits": Config(
        *("rotated-digits", "digits"),
        epochs=30,
        lr=1e-2,
        scale_lr=1e-3,
        lengthscale=1.0,
        width=500,
        crop=1,
        posteriors=("map", "closed_form"),
    ),
}


def steps(progress: float) -> float:
    """The schedule under "bochner": 0.15 of the rate after 25 of 50 epochs and 0.15 of that after 37."""
    return 1.0 if progress < 0.5 else (0.15 if progress < 0.74 else 0.0225)


def published_steps(progress: float) -> float:
    """The published schedule: every one of 50 epochs multiplies the rate by 0.9 from 26 on and by 0.81 from 38, to 0.0225.

    The text has two falls to 0.9 in all, at epochs 25 and 37.
    """
    epoch = round(50 * progress, 9)  # of 50, whatever the number of epochs
    return 0.9 ** (max(0, int(epoch) - 25) + max(0, int(epoch) - 37))


def rotate(images: Tensor, degrees: Tensor | float, *, mode: str = "bilinear") -> Tensor:
    """Images (n, c, h, w) turned counter-clockwise about their centre, with zeros where nothing was.

    Args:
        images: The images.
        degrees: One angle, or one for each image, (n,).
        mode: How pixels are looked up: "bilinear" or "nearest".
    """
    angle = torch.deg2rad(torch.as_tensor(degrees, dtype=images.dtype, device=images.device)).expand(len(images))
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    turn = torch.stack([cos, -sin, zero, sin, cos, zero], -1).reshape(-1, 2, 3)
    grid = F.affine_grid(turn, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode=mode, padding_mode="zeros", align_corners=False)


class _Digits:
    """Images on the device: pixels in [0, 1] to turn, and what a network sees of them under a protocol."""

    def __init__(self, name: str, device: str, protocol: str, held_out: float) -> None:
        data = load_images(name)

        def pixels(values: Any) -> Tensor:
            return torch.from_numpy(values).to(device)[:, None].float() / 255

        def labels(values: Any) -> Tensor:
            return torch.from_numpy(values).to(device).long()

        self.train, self.test = pixels(data.x_train), pixels(data.x_test)
        self.y_train, self.y_test = labels(data.y_train), labels(data.y_test)
        count = int(held_out * len(self.train))
        self.held, self.y_held = self.train[:count], self.y_train[:count]
        self.train, self.y_train = self.train[count:], self.y_train[count:]
        self.published = protocol == "paper"
        self.mean, self.std = self.train.mean(), self.train.std()

    def shown(self, pixels: Tensor) -> Tensor:
        """Pixels as they are under "paper", standardised by the training images under "bochner"."""
        return pixels.clone() if self.published else (pixels - self.mean) / self.std

    def turned(self, angle: int, seed: int) -> Tensor:
        """The test images at an angle; under "paper" each by its own, drawn from [angle, angle + 1]°, and by nearest neighbour."""
        if not self.published:
            return self.shown(rotate(self.test, angle))
        seeds = torch.tensor([seed], device=self.test.device)
        return rotate(self.test, angle + counter_uniform(seeds, angle, len(self.test))[0], mode="nearest")


def _train(config: Config, name: str, data: _Digits, progress: bool) -> tuple[Model, bool]:
    """The network at its MAP estimate, and whether training went wrong."""
    generator = torch.Generator().manual_seed(config.seed + 2**32)
    published = config.protocol == "paper"
    start = 1 / PUBLISHED_MULTIPLIER if published else (1.0 if name == "relu" else config.lengthscale)
    shape: Any = {"protocol": config.protocol, "seed": config.seed, "width": config.width, "lengthscale": start}
    model = assemble(name, digit_net(data.train.shape[-1], generator=generator), 25, 10, **shape).to(config.device)
    seen = data.shown(data.train)
    epoch = 0

    def crop(_: Any) -> None:
        """Gives the next epoch its own crops, in the memory that training reads from."""
        nonlocal epoch
        seen.copy_(data.shown(shift(data.train, config.crop, config.seed, epoch)))
        epoch += 1

    if published:
        crop(None)
    schedule = published_steps if published else steps
    recipe = Recipe(config.epochs, config.batch_size, sgd, config.lr, config.scale_lr, schedule, tf32=True)
    options: Any = {"seed": config.seed, "after_epoch": crop if published else None, "progress": progress}
    fit = fit_map(model, seen, data.y_train, recipe, **options)
    return model.eval(), bool(fit.diverged.any())


class _Posteriors:
    """Predictions of one trained network, by the name of the posterior."""

    def __init__(self, config: Config, model: Model, data: _Digits) -> None:
        self.config, self.model = config, model
        x, y = data.shown(data.train), data.y_train
        self.names = ("map", "kfac") if config.protocol == "paper" else config.posteriors
        if config.protocol == "paper":
            first, seeds = slice(config.batch_size), torch.tensor([config.seed], device=x.device)
            published = PublishedLaplace([model], x[None, first], y[None, first], num_data=len(x), seeds=seeds)
            self.drawn = [
                {n: p[0] for n, p in each.items()} for each in published.networks(scale=1.0, num=config.draws)
            ]
            return
        if "kfac" in self.names:
            self.kfac = Laplace(model, x, y)
            self.kfac.tune_prior(data.shown(data.held), data.y_held)
        if "closed_form" in self.names:
            # The extractor stays as it is, so it is applied once.
            self.head = copy.deepcopy(model)
            self.head.extractor = nn.Identity()
            generator = torch.Generator().manual_seed(config.seed)
            self.closed_form = ClosedFormClassifier(
                self.head, self._extract(x), y, samples=config.draws, generator=generator
            )

    def chosen(self, name: str) -> Row:
        """What held-out images have chosen."""
        if name != "kfac" or self.config.protocol == "paper":
            return {}
        return {"prior_multiplier": self.kfac.prior_multipliers[0], "temperature": self.kfac.temperature}

    @torch.no_grad()
    def _extract(self, x: Tensor) -> Tensor:
        return torch.cat([self.model.extractor(part) for part in x.split(CHUNK)])

    @torch.no_grad()
    def predict(self, name: str, x: Tensor) -> Predictive:
        """The prediction at images (n, 1, h, w) as the network sees them."""
        parts = x.split(CHUNK)
        if name == "map":
            return CategoricalPredictive.from_logits([torch.cat([self.model(part) for part in parts])])
        if name == "closed_form":
            return self.closed_form.predict(self._extract(x))
        if self.config.protocol == "bochner":
            generator = torch.Generator(x.device).manual_seed(self.config.seed)
            return self.kfac.predict(x, samples=self.config.draws, chunk=1000, generator=generator)
        return CategoricalPredictive.from_logits(
            torch.cat([functional_call(self.model, drawn, (part,)) for part in parts]) for drawn in self.drawn
        )


def _measure(prediction: Any, y: Tensor) -> Row:
    """What the paper's figure shows, and the calibration error."""
    p, labels = prediction.probabilities.cpu(), y.cpu()
    row = {"accuracy": metrics.accuracy(labels, p), "confidence": float(prediction.confidence.mean())}
    return row | {"nlpd": metrics.nlpd(prediction.log_prob(y).cpu()), "ece": metrics.ece(labels, p)}


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("protocol", "model", "posterior", "angle", "seed"))


def run_network(config: Config, name: str, *, progress: bool = False) -> list[Row]:
    """Rows of one network: one for each posterior and angle."""
    start = time.perf_counter()
    tuned = config.protocol == "bochner" and "kfac" in config.posteriors
    data = _Digits(config.images, config.device, config.protocol, HELD_OUT if tuned else 0.0)
    model, failed = _train(config, name, data, progress)
    common: Row = {"experiment": config.experiment, "protocol": config.protocol, "model": name, "seed": config.seed}
    common |= {"status": "diverged" if failed else "ok", "lengthscale": model.layer.lengthscale.item()}
    common["train_seconds"] = round(time.perf_counter() - start, 2)
    found: list[Row] = []
    posteriors = None if failed else _Posteriors(config, model, data)
    for angle in config.angles:
        turned = data.turned(angle, config.seed)
        for kind in posteriors.names if posteriors else ("map",):
            with tf32(config.device.startswith("cuda") and kind != "closed_form"):
                values = _measure(posteriors.predict(kind, turned), data.y_test) if posteriors else {}
            found.append(
                {"posterior": kind, "angle": angle, **values, **(posteriors.chosen(kind) if posteriors else {})}
            )
    origin = {"seconds": round(time.perf_counter() - start, 2), **provenance(config.device)}
    return [{**common, **row, **origin} for row in found]


def run(
    config: Config,
    path: Path,
    *,
    models: Sequence[str] = NETWORKS,
    progress: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Makes the rows that are missing from ``path``, one network at a time, and returns all of them."""
    have = {(row["protocol"], row["model"], row["seed"]) for row in read_rows(path)}
    for name in models:
        if (config.protocol, name, config.seed) not in have:
            rows = run_network(config, name, progress=progress)
            add_rows(path, rows, _key)
            state = "" if rows[0]["status"] == "ok" else "   diverged; remove its rows to try again with another --seed"
            report(f"{name:<12} {rows[0]['seconds']:5.1f} s   {path}{state}")
    return read_rows(path)
