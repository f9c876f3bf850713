"""CIFAR-10 against CIFAR-100 and SVHN: what networks trained on the first make of the other two.

One GoogLeNet, trained here, gives the features; they are computed once. On them, for five models: SWAG as the published code has
it, SWAG as it should be ("bochner"), and a closed-form posterior of the output layer, which needs no training but a choice of
lengthscale and amplitude. Beside them what people compare with: maximum probability, energy, and an ensemble of heads.

The published code shows images in [0, 1] to a GoogLeNet that was trained on standardised ones, and trains heads by SGD on crops
and mirror images with dropout 0.1, BatchNorm in training mode. It draws with twice SWAG's covariance, outside without its low-
rank part. Its three protocols differ in the BatchNorm of images outside: "paper" takes the statistics of the set that is scored,
as the code does, "paper-train-bn" those of the training images, and "paper-guess" those that GoogLeNet was trained with, of
standardised images: a guess at what made the paper's table.

5,000 training images are held out of everything, to choose the learning rate of SWAG (the paper uses the test set) and the
hyperparameters of the closed form.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bochner.datasets import data_folder, load_images
from bochner.experiments.catalogue import Request, chosen
from bochner.experiments.images.pretraining import (
    CHUNK,
    CLASSES,
    Pictures,
    Schedule,
    features,
    flop,
    matmul_rate,
    now,
    pretrained,
    training_features,
)
from bochner.experiments.images.scoring import OUTSIDE, plain_rows, prediction_rows
from bochner.experiments.published import linear_search
from bochner.experiments.rows import Row, add_rows, provenance, read_rows
from bochner.experiments.uci.swag import hold_lengthscales
from bochner.experiments.zoo import Shape, assemble
from bochner.models import Model
from bochner.networks import SeededDropout
from bochner.posteriors.closed_form_classifier import ClosedFormClassifier
from bochner.posteriors.mixture import drawn_outputs
from bochner.posteriors.swag import DivergedError, Swag, tune_learning_rate
from bochner.predictive import CategoricalPredictive
from bochner.training.map import Recipe, adam, fit_map, sgd

NETWORKS = ("relu", "local-rbf", "rbf-sin", "local-matern32", "matern32-sin")
HEADS = ("text", "code")


@dataclass(frozen=True)
class Config:
    """Settings; those of training and SWAG are the paper's.

    Attributes:
        seed: Seed of every draw.
        device: Where to compute.
        head: "text" for a model layer of 512 units on the features, as the paper says; "code" for 2,000 behind a fixed random
            projection to 25, as its code has it.
        schedule: How GoogLeNet is trained.
        held_out: Training images that only choose hyperparameters.
        epochs: Epochs of Adam.
        published_epochs: Epochs of SGD under "paper"; the code has 50 where the text says 20 of Adam.
        dropout: Dropout of the features under "paper".
        views: Crops of the training images under "paper"; every epoch sees the next of them.
        batch_size: Images in a minibatch.
        swag_epochs: Epochs from which SWAG is collected.
        rank: Deviations that it keeps.
        trials: Learning rates that are tried for it.
        draws: Posterior samples.
        closed_width: Units of the closed form.
        lengthscales: Those tried for it, in units of the median distance between features.
        amplitudes: Prior standard deviations tried for it.
        closed_draws: Its draws of the outputs, which cost next to nothing.
        search_width: Units while hyperparameters are tried.
        members: Heads in the ensemble.
    """

    seed: int = 0
    device: str = "cpu"
    head: str = "text"
    schedule: Schedule = field(default_factory=Schedule)
    held_out: int = 5000
    epochs: int = 20
    published_epochs: int = 50
    dropout: float = 0.1
    views: int = 4
    batch_size: int = 128
    swag_epochs: int = 40
    rank: int = 20
    trials: int = 12
    draws: int = 30
    closed_width: int = 4000
    lengthscales: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0, 2.0)
    amplitudes: tuple[float, ...] = (1.0, 3.0, 10.0)
    closed_draws: int = 1000
    search_width: int = 500
    members: int = 5

    @property
    def width(self) -> int:
        """Units of the model layer."""
        return 512 if self.head == "text" else 2000

    @property
    def weights(self) -> Path:
        """File of the trained GoogLeNet, in the data folder."""
        return data_folder() / f"googlenet-cifar10-{self.seed}.safetensors"


class Features:
    """Features of all images, each computed once: with the training set's BatchNorm, and of sets outside with their own too."""

    def __init__(self, config: Config, progress: bool) -> None:
        data = load_images("cifar10")
        images = {name: torch.from_numpy(load_images(name).x_test) for name in OUTSIDE}
        train, labels = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train).long().to(config.device)
        show = Pictures(train, config.device)
        cut = len(train) - config.held_out
        inside = show(torch.from_numpy(data.x_test))
        truth = torch.from_numpy(data.y_test).long().to(config.device)
        seen = show(train[:cut])
        known = {"train": (seen, labels[:cut]), "test": (inside, truth)}
        net, self.notes = pretrained(config.weights, config.schedule, config.seed, **known, progress=progress)
        self.labels = {"train": labels[:cut], "held_out": labels[cut:], "cifar10": truth}
        sets = {"train": seen, "held_out": show(train[cut:]), "cifar10": inside}
        sets |= {name: show(x) for name, x in images.items()}
        features(net, seen[:CHUNK])  # libraries choose and load their kernels
        start = now(config.device)
        self.bochner = {name: features(net, x) for name, x in sets.items()}
        seconds, num = now(config.device) - start, sum(len(x) for x in sets.values())
        rate = num * flop(net[0], seen[:1]) / seconds
        self.speed = {"images_per_second": round(num / seconds), "extraction_tflops": rate / 1e12}
        self.speed["matmul_share"] = rate / matmul_rate(config.device)
        own = self.bochner | {name: features(net, sets[name], statistics_of=sets[name]) for name in OUTSIDE}
        self.linear, self.whole = copy.deepcopy(net[1]), {"paper": own, "bochner": self.bochner}
        self.heads = self.whole
        del sets, seen
        plain = {"train": train[:cut], "held_out": train[cut:], "cifar10": torch.from_numpy(data.x_test), **images}
        self._published(config, net, {name: show.plain(x) for name, x in plain.items()})
        self.projection = None
        if config.head == "code":
            wide = self.bochner["train"].shape[1]
            matrix = torch.randn(wide, 25, generator=torch.Generator().manual_seed(config.seed)) / math.sqrt(wide)
            self.projection = matrix.to(config.device)
            self.heads = {
                protocol: {name: (x @ self.projection).relu() for name, x in which.items()}
                for protocol, which in self.whole.items()
            }
            self.bochner = self.heads["bochner"]

    def _published(self, config: Config, net: nn.Sequential, plain: dict[str, Tensor]) -> None:
        """Features of images in [0, 1]: views of the training images, and every other set under the three protocols."""
        self.views = [
            training_features(net, plain["train"], seed=config.seed, stream=view) for view in range(config.views)
        ]
        others = {name: x for name, x in plain.items() if name != "train"}
        sizes = [len(x) for x in others.values()]
        adapted = features(net, torch.cat(list(others.values())), statistics_of=plain["train"]).split(sizes)
        known = dict(zip(others, adapted, strict=True))
        outside = {name: plain[name] for name in OUTSIDE}
        self.published = {
            "paper": known | {name: features(net, x, statistics_of=x) for name, x in outside.items()},
            "paper-train-bn": known,
            "paper-guess": known | {name: features(net, x) for name, x in outside.items()},
        }


def _head(config: Config, data: Features, name: str, seed: int, shape: Shape | None = None) -> Model:
    """A head on the features as they are; by default as the paper's text has it."""
    shape = shape or Shape("paper", CLASSES, config.width, lengthscale=1.0)
    return assemble(name, nn.Sequential(), data.bochner["train"].shape[1], shape, seed).to(config.device)


def _fit(config: Config, data: Features, heads: Model | list[Model], seed: Any) -> None:
    """Trains heads as the paper's text says."""
    recipe = Recipe(config.epochs, config.batch_size, adam, 1e-4, 1e-5, precision="tf32")
    fit = fit_map(heads, data.bochner["train"], data.labels["train"], recipe, seed=seed)
    if bool(fit.diverged.any()):
        raise DivergedError("Training of a head diverged.")


class _Collected:
    """A head, its SWAG posterior, and the learning rate that the held-out images chose."""

    def __init__(self, config: Config, data: Features, name: str) -> None:
        self.config, self.data, self.labels = config, data, data.labels["train"]
        self.x, self.held_out = self._images()
        first = self._head(name)
        trained = copy.deepcopy(first)
        self._fit(trained)
        for head in (trained, first):  # both from here on at what the first training found
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
        return _head(self.config, self.data, name, self.config.seed)

    def _fit(self, head: Model) -> None:
        _fit(self.config, self.data, head, self.config.seed)

    def _search(self, score: Callable[[float], float]) -> tuple[float, list[tuple[float, float]]]:
        return tune_learning_rate(score, trials=self.config.trials, seed=self.config.seed)

    def _next_epoch(self) -> None:
        """Nothing changes from epoch to epoch."""

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator(self.config.device).manual_seed(self.config.seed + stream)

    def _collect(self, head: Model, rate: float) -> Swag:
        config = self.config
        sizes: Any = {"epochs": config.swag_epochs, "rank": config.rank, "batch_size": config.batch_size}
        options: Any = {"seed": config.seed, "after_epoch": self._next_epoch}
        return Swag(head, self.x, self.labels, lr=rate, **sizes, **options)

    def predict(self, x: Tensor, *, outside: bool) -> Any:  # noqa: ARG002
        """Prediction at features."""
        return self.swag.predict(x, self.config.draws, generator=self._generator(1))


class _Published(_Collected):
    """The same as the published code has it: SGD on changing views, dropout, a linear grid, draws that differ outside."""

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
        options: Any = {"seed": config.seed, "after_epoch": lambda _: self._next_epoch()}
        if bool(fit_map(head, self.x, self.labels, recipe, **options).diverged.any()):
            raise DivergedError("Training of a head diverged.")

    def _search(self, score: Callable[[float], float]) -> tuple[float, list[tuple[float, float]]]:
        return linear_search(score, trials=self.config.trials)

    def _next_epoch(self) -> None:
        """Gives the next epoch the next view, in the memory that training reads from."""
        self.epoch += 1
        self.x.copy_(self.data.views[self.epoch % len(self.data.views)])

    def predict(self, x: Tensor, *, outside: bool) -> Any:
        """Prediction from twice SWAG's covariance inside; outside from its diagonal part alone."""
        shares: Any = {"diagonal": 1.0, "low_rank": 0.0 if outside else 1.0}
        drawn = self.swag.sample_weights(self.config.draws, **shares, generator=self._generator(1))
        outputs = drawn_outputs(self.swag.model.eval(), drawn, self.swag.fixed | self.swag.buffers, x)
        return CategoricalPredictive.from_logits(outputs[:, 0])


def _closed_form(config: Config, data: Features, name: str) -> tuple[ClosedFormClassifier, Row]:
    """Posterior of the output layer on units drawn from the prior, with the choices that the held-out images make."""
    x, y = data.bochner["train"], data.labels["train"]
    some = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(config.seed))[:1000].to(x.device)]
    median = float(torch.pdist(some).median())

    def fit(share: float, amplitude: float, width: int, steps: int, draws: int) -> ClosedFormClassifier:
        head = _head(config, data, name, config.seed, Shape("bochner", CLASSES, width, lengthscale=share * median))
        generator = torch.Generator().manual_seed(config.seed)
        head.output.log_amplitude.data.fill_(math.log(amplitude))
        rest: Any = {"samples": draws, "steps": steps, "generator": generator}
        return ClosedFormClassifier(head, x, y, full_limit=0, **rest)

    def score(share: float, amplitude: float) -> float:
        posterior = fit(share, amplitude, config.search_width, 20, config.draws)
        loss = -float(posterior.predict(data.bochner["held_out"]).log_prob(data.labels["held_out"]).mean())
        return math.inf if math.isnan(loss) else loss

    grid = [(share, amplitude) for share in config.lengthscales for amplitude in config.amplitudes]
    share, amplitude = min(grid, key=lambda pair: score(*pair))
    chosen = {"lengthscale": share * median, "median_distance": median, "amplitude": amplitude}
    return fit(share, amplitude, config.closed_width, 100, config.closed_draws), chosen | {"width": config.closed_width}


def _swag_rows(config: Config, data: Features, name: str) -> Iterator[Row]:
    collected = _Collected(config, data, name)
    predictions = {which: collected.predict(data.bochner[which], outside=False) for which in ("cifar10", *OUTSIDE)}
    for row in prediction_rows(predictions, data.labels["cifar10"]):
        yield {"protocol": "bochner", **row, "swag_lr": collected.rate, "tried": collected.tried}


def _published_swag_rows(config: Config, data: Features, name: str) -> Iterator[Row]:
    collected = _Published(config, data, name)
    for protocol, sets in data.published.items():
        predictions = {
            which: collected.predict(sets[which], outside=which != "cifar10") for which in ("cifar10", *OUTSIDE)
        }
        for row in prediction_rows(predictions, data.labels["cifar10"], mean_variance=True):
            yield {"protocol": protocol, **row, "swag_lr": collected.rate, "tried": collected.tried}


def _closed_form_rows(config: Config, data: Features, name: str) -> Iterator[Row]:
    posterior, chosen = _closed_form(config, data, name)
    predictions = {which: posterior.predict(data.bochner[which]) for which in ("cifar10", *OUTSIDE)}
    for row in prediction_rows(predictions, data.labels["cifar10"]):
        yield {"protocol": "bochner", **row, **chosen}


@torch.no_grad()
def _plain_rows(config: Config, data: Features, name: str) -> Iterator[Row]:
    """Baselines: the GoogLeNet's own linear layer, or one trained ReLU head."""
    if name == "googlenet":
        net, seen = data.linear, data.whole
    else:
        net, seen = _head(config, data, name, config.seed), data.heads
        with torch.enable_grad():
            _fit(config, data, net, config.seed)  # pyright: ignore[reportArgumentType]
    for protocol, sets in seen.items():
        logits = {which: net(sets[which]) for which in ("cifar10", *OUTSIDE)}
        yield from plain_rows(logits, data.labels["cifar10"], protocol)


@torch.no_grad()
def _ensemble_rows(config: Config, data: Features, name: str) -> Iterator[Row]:
    """An ensemble of heads that differ in their seeds, trained as one stack."""
    seeds = [config.seed + i for i in range(config.members)]
    heads = [_head(config, data, name, s) for s in seeds]
    with torch.enable_grad():
        _fit(config, data, heads, seeds)
    predictions = {
        which: CategoricalPredictive.from_logits(head(data.bochner[which]) for head in heads)
        for which in ("cifar10", *OUTSIDE)
    }
    for row in prediction_rows(predictions, data.labels["cifar10"]):
        yield {"protocol": "bochner", **row, "members": config.members}


# Posterior, whether its rows are those of the published code, how they are made, and the models.
METHODS: list[tuple[str, bool, Callable[[Config, Features, str], Iterator[Row]], tuple[str, ...]]] = [
    ("map", False, _plain_rows, ("googlenet", "relu")),
    ("ensemble", False, _ensemble_rows, ("relu",)),
    ("closed_form", False, _closed_form_rows, NETWORKS),
    ("swag", False, _swag_rows, NETWORKS),
    ("swag", True, _published_swag_rows, NETWORKS),
]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("head", "protocol", "posterior", "model", "score", "outside", "seed"))


def _job(row: Row) -> tuple[Any, ...]:
    """What made a row: the head, the posterior, whether as published, the model and the seed."""
    published = row["posterior"] == "swag" and row["protocol"].startswith("paper")
    return row["head"], row["posterior"], published, row["model"], row["seed"]


def check(_: str, request: Request) -> None:
    """Whether all names are known and the images are there."""
    chosen("models", request.models, NETWORKS)
    chosen("head", [request.head], HEADS)
    for images in ("cifar10", *OUTSIDE):
        load_images(images)


def run(_: str, request: Request, path: Path) -> None:
    """Makes the rows that are missing from a file, under both protocols."""
    make_rows(Config(seed=request.seed, device=request.device, head=request.head), path, request)


def make_rows(config: Config, path: Path, request: Request) -> list[Row]:
    """Makes the rows that are missing from ``path``, one method and model at a time, and returns all of them."""
    have = {_job(row) for row in read_rows(path)}
    models, report = chosen("models", request.models, NETWORKS), request.report
    jobs = [
        (posterior, published, name, make)
        for posterior, published, make, names in METHODS
        for name in names
        if name in (*models, "googlenet") and (config.head, posterior, published, name, config.seed) not in have
    ]
    if not jobs:
        return read_rows(path)
    start = time.perf_counter()
    config.weights.parent.mkdir(parents=True, exist_ok=True)
    data = Features(config, request.progress)
    common: Row = {"experiment": "cifar-ood", "head": config.head, "seed": config.seed}
    extractor = {f"pretrain_{k}": v for k, v in data.notes.items()} | data.speed
    report(
        f"GoogLeNet: accuracy {data.notes['accuracy']:.4f}, trained in {data.notes['seconds']:.0f} s; features at "
        f"{data.speed['images_per_second']} images/s, {data.speed['extraction_tflops']:.1f} TFLOP/s, "
        f"{data.speed['matmul_share']:.2f} of a matrix product's rate; {time.perf_counter() - start:.0f} s until here"
    )
    for number, (posterior, published, name, make) in enumerate(jobs, start=1):
        start = time.perf_counter()
        try:
            found = [{"status": "ok", **row} for row in make(config, data, name)]
        except ValueError as error:  # a divergence, or numbers that are not finite: a row says so
            reason: Row = {"score": "", "outside": "", "reason": str(error)}
            found = [{"status": "diverged", "protocol": "paper" if published else "bochner", **reason}]
        unit = {**common, "posterior": posterior, "model": name}
        origin: Row = {"seconds": round(time.perf_counter() - start, 2), **extractor, **provenance(config.device)}
        add_rows(path, [{**unit, **row, **origin} for row in found], _key)
        state = "" if found[0]["status"] == "ok" else f"  diverged: {found[0]['reason']}"
        kind = f"{posterior}, published" if published else posterior
        report(f"[{number}/{len(jobs)}] {kind} {name}  {origin['seconds']:.1f} s{state}")
    return read_rows(path)
