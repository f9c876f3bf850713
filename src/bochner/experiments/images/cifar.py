"""Settings and features for CIFAR-10 against other sets: one GoogLeNet, trained once, gives the features of all images.

The published code shows images in [0, 1] to a GoogLeNet that was trained on standardised images. Its three protocols differ in the
BatchNorm of images outside: "paper" takes the statistics of the set that is scored, as the code does, "paper-train-bn" those of the
training images, and "paper-guess" those of the GoogLeNet's own training, on standardised images: a guess at what made the paper's
table.
"""

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from bochner.datasets import data_folder, load_images
from bochner.experiments.images.pretraining import (
    CHUNK,
    Pictures,
    Schedule,
    features,
    flop,
    matmul_rate,
    now,
    pretrained,
    training_features,
)
from bochner.experiments.images.scoring import OUTSIDE


@dataclass(frozen=True)
class Config:
    """Settings of CIFAR-10 against other sets; those of training and SWAG are the paper's.

    Attributes:
        seed: Seed of every draw.
        device: Where to compute.
        head: "text" for a model layer of 512 units on the features, as in the paper's text; "code" for 2,000 units behind a fixed
            random projection to 25 features, as in its code.
        schedule: How GoogLeNet is trained.
        held_out: Number of training images that only choose hyperparameters.
        epochs: Epochs of Adam.
        published_epochs: Epochs of SGD under "paper"; the code has 50 where the text says 20 of Adam.
        dropout: Dropout of the features under "paper".
        views: Number of random crops of each training image under "paper"; every epoch uses the next of them.
        batch_size: Images in a minibatch.
        swag_epochs: Epochs from which SWAG is collected.
        rank: Number of deviations that SWAG keeps.
        trials: Number of learning rates that are tried for SWAG.
        draws: Number of posterior samples.
        closed_width: Units of the closed form.
        lengthscales: Lengthscales that are tried for the closed form, in units of the median distance between features.
        amplitudes: Prior standard deviations that are tried for the closed form.
        closed_draws: Samples of the closed form's outputs; they cost little.
        search_width: Units of the closed form while its hyperparameters are tried.
        members: Number of heads in the ensemble.
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
    """Features of all images, each computed once, and their classes.

    Attributes:
        labels: Classes of "train", "held_out" and "cifar10" (the test images).
        bochner: What heads see under "bochner": features by set, with the BatchNorm of the training set.
        whole: The GoogLeNet's features by protocol and set; under "paper" sets outside have a BatchNorm of their own.
        heads: What heads see, by protocol and set: ``whole``, projected where the head has a projection.
        views: Under "paper": features of random crops of the training images.
        published: Features of images in [0, 1] by protocol and set, as the published code has them.
        projection: The fixed random projection of the head "code"; None for "text".
        linear: The GoogLeNet's linear layer.
        notes: Accuracy, seconds and epochs of the GoogLeNet's training.
        speed: How fast the features were computed.
    """

    def __init__(self, config: Config, progress: bool) -> None:
        data = load_images("cifar10")
        train, labels = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train).long().to(config.device)
        test, truth = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test).long().to(config.device)
        show, cut = Pictures(train, config.device), len(train) - config.held_out
        self.labels = {"train": labels[:cut], "held_out": labels[cut:], "cifar10": truth}
        pixels = {"train": train[:cut], "held_out": train[cut:], "cifar10": test}
        pixels |= {name: torch.from_numpy(load_images(name).x_test) for name in OUTSIDE}
        images = {name: show(x) for name, x in pixels.items()}
        net, self.notes = pretrained(
            config.weights,
            config.schedule,
            config.seed,
            train=(images["train"], labels[:cut]),
            test=(images["cifar10"], truth),
            progress=progress,
        )
        self.linear = copy.deepcopy(net[1])
        self._standardised(config, net, images)
        del images
        self._published(config, net, {name: show.plain(x) for name, x in pixels.items()})
        self.heads, self.projection = self.whole, None
        if config.head == "code":
            self._project(config)

    def _standardised(self, config: Config, net: nn.Sequential, images: dict[str, Tensor]) -> None:
        """Features of standardised images, and the speed of the extraction."""
        features(net, images["train"][:CHUNK])  # the libraries choose and load their kernels before the clock starts
        start = now(config.device)
        self.bochner = {name: features(net, x) for name, x in images.items()}
        seconds, num = now(config.device) - start, sum(len(x) for x in images.values())
        rate = num * flop(net[0], images["train"][:1]) / seconds
        self.speed = {"images_per_second": round(num / seconds), "extraction_tflops": rate / 1e12}
        self.speed["matmul_share"] = rate / matmul_rate(config.device)
        adapted = {name: features(net, images[name], statistics_of=images[name]) for name in OUTSIDE}
        self.whole = {"paper": self.bochner | adapted, "bochner": self.bochner}

    def _project(self, config: Config) -> None:
        """Puts the features of heads behind a fixed random projection and a ReLU."""
        wide = self.bochner["train"].shape[1]
        matrix = torch.randn(wide, 25, generator=torch.Generator().manual_seed(config.seed)) / math.sqrt(wide)
        self.projection = projection = matrix.to(config.device)
        self.heads = {
            protocol: {name: (x @ projection).relu() for name, x in sets.items()}
            for protocol, sets in self.whole.items()
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
        by_training = dict(zip(others, adapted, strict=True))
        outside = {name: plain[name] for name in OUTSIDE}
        self.published = {
            "paper": by_training | {name: features(net, x, statistics_of=x) for name, x in outside.items()},
            "paper-train-bn": by_training,
            "paper-guess": by_training | {name: features(net, x) for name, x in outside.items()},
        }
