"""GoogLeNet on CIFAR-10: its training, its file of weights outside the repository, and its features of images."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bochner.experiments.images.crops import shift
from bochner.files import write_bytes
from bochner.networks import googlenet, linear
from bochner.training.randomness import counter_permutation

Labelled = tuple[Tensor, Tensor]  # images and their classes

CLASSES = 10  # of CIFAR-10
CHUNK = 1000  # images at a time


@dataclass(frozen=True)
class Schedule:
    """How GoogLeNet is trained: SGD with Nesterov's momentum 0.9, the rate rising linearly and falling linearly to zero.

    Attributes:
        epochs: Epochs.
        batch_size: Images in a minibatch.
        lr: The largest learning rate.
        rise: Share of the epochs in which the rate rises.
        weight_decay: Weight decay.
        shrink: Divisor of the network's numbers of channels, for tests.
    """

    epochs: int = 30
    batch_size: int = 512
    lr: float = 0.4
    rise: float = 0.2
    weight_decay: float = 5e-4
    shrink: int = 1

    def rate(self, progress: float) -> float:
        """Learning rate after a share of the steps."""
        return self.lr * min(progress / self.rise, (1 - progress) / (1 - self.rise))


def network(schedule: Schedule, seed: int) -> nn.Sequential:
    """GoogLeNet with a linear layer for the ten classes, untrained."""
    generator = torch.Generator().manual_seed(seed)
    extractor = googlenet(width=schedule.shrink, generator=generator)
    return nn.Sequential(extractor, linear(1024 // schedule.shrink, CLASSES, generator=generator))


class Pictures:
    """Colour images on a device, standardised by the channels of the training images."""

    def __init__(self, train: Tensor, device: str) -> None:
        values = train.to(device).float().flatten(0, 2)
        self.mean, self.std = values.mean(0)[:, None, None], values.std(0)[:, None, None]
        self.device = device

    def __call__(self, images: Tensor) -> Tensor:
        """Images (n, h, w, 3) uint8 as (n, 3, h, w)."""
        pixels = images.to(self.device).permute(0, 3, 1, 2).float()
        return ((pixels - self.mean) / self.std).contiguous(memory_format=torch.channels_last)

    def plain(self, images: Tensor) -> Tensor:
        """Images as (n, 3, h, w) with pixels in [0, 1], not standardised."""
        pixels = images.to(self.device).permute(0, 3, 1, 2).float() / 255
        return pixels.contiguous(memory_format=torch.channels_last)


def _autocast(device: str) -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda"))


def _write(path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Replaces a file of weights as a whole."""
    kept = {name: t.contiguous().cpu() for name, t in tensors.items()}
    write_bytes(path, serialise(kept, {k: str(v) for k, v in notes.items()}))


def _read(path: Path, training: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and notes of a file that the same training wrote."""
    try:
        with safe_open(path, "pt") as file:  # pyright: ignore[reportGeneralTypeIssues]
            tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"The file {path} cannot be read as weights ({error}); delete it and run again.") from error
    if notes.get("training") != training:
        raise ValueError(
            f"The file {path} was not made by this training ({training}) but by {notes.get('training')}; delete it and run again."
        )
    return tensors, notes


def pretrained(
    path: Path, schedule: Schedule, seed: int, *, train: Labelled, test: Labelled, progress: bool = False
) -> tuple[nn.Sequential, dict[str, Any]]:
    """The trained network, from its file if it exists, and accuracy, seconds and epochs of its training.

    After every epoch the state is saved beside the file: an interrupted run continues from it.

    Args:
        path: File of the weights.
        schedule: How to train.
        seed: Seed of the weights, the order and the augmentation.
        train: Training images, (n, 3, h, w), on the device, and their classes.
        test: The same to test on, for the accuracy that is noted.
        progress: Whether to show a bar.
    """
    net = network(schedule, seed).to(train[0].device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    training = _described(schedule, seed, train)
    if not path.exists():
        partial = path.with_name(f"{path.stem}-partial{path.suffix}")
        seconds = fit(net, partial, schedule, seed, train, progress=progress)
        classes = _predict(net, test[0]).argmax(-1)
        notes = {"accuracy": (classes == test[1]).double().mean().item(), "seconds": round(seconds, 1)}
        _write(path, net.state_dict(), notes | {"epochs": schedule.epochs, "training": training})
        partial.unlink(missing_ok=True)
    tensors, notes = _read(path, training)
    net.load_state_dict(tensors)
    return net.eval(), {k: float(notes[k]) for k in ("accuracy", "seconds", "epochs")}


def _described(schedule: Schedule, seed: int, train: Labelled) -> str:
    """A description that is equal for equal trainings."""
    return f"{schedule}, seed {seed}, {len(train[0])} images"


def fit(
    net: nn.Module, partial: Path, schedule: Schedule, seed: int, train: Labelled, *, progress: bool = False
) -> float:
    """Trains in place, continuing an interrupted run; returns the seconds of the whole training."""
    (images, labels), training = train, _described(schedule, seed, train)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=0.0, momentum=0.9, nesterov=True, weight_decay=schedule.weight_decay
    )
    first, seconds = _resume(net, optimizer, partial, training)
    num, size, device = len(images), schedule.batch_size, images.device.type
    steps = -(-num // size)
    seeds = torch.tensor([seed], device=images.device)
    net.train()
    for epoch in track(range(first, schedule.epochs), "pretraining", disable=not progress, transient=True):
        start = time.perf_counter()
        order = counter_permutation(seeds, epoch, num)[0]
        for step, index in enumerate(order.split(size)):
            rate = schedule.rate((epoch + (step + 1) / steps) / schedule.epochs)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with _autocast(device):
                loss = F.cross_entropy(
                    net(shift(images[index], 4, seed, epoch * steps + step, mirror=True)), labels[index]
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not torch.isfinite(loss):  # pyright: ignore[reportPossiblyUnboundVariable]
            raise ValueError(f"Pretraining diverged in epoch {epoch + 1}; lower its learning rate.")
        seconds += time.perf_counter() - start
        buffers = {f"momentum.{n}": optimizer.state[p]["momentum_buffer"] for n, p in net.named_parameters()}
        _write(partial, net.state_dict() | buffers, {"epochs": epoch + 1, "seconds": seconds, "training": training})
    net.eval()
    return seconds


def _resume(net: nn.Module, optimizer: torch.optim.Optimizer, partial: Path, training: str) -> tuple[int, float]:
    """Loads the state of an interrupted run; returns its finished epochs and its seconds."""
    if not partial.exists():
        return 0, 0.0
    tensors, notes = _read(partial, training)
    for name, p in net.named_parameters():
        optimizer.state[p]["momentum_buffer"] = tensors.pop(f"momentum.{name}").to(p)
    net.load_state_dict(tensors)
    return int(notes["epochs"]), float(notes["seconds"])


@torch.no_grad()
def _predict(net: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    with _autocast(images.device.type):
        return torch.cat([net(part) for part in images.split(CHUNK)]).float()


def features(net: nn.Sequential, images: Tensor, *, statistics_of: Tensor | None = None) -> Tensor:
    """Features of images by the extractor, (n, 1024).

    Args:
        net: The trained network.
        images: Images, (n, 3, h, w).
        statistics_of: Images whose averages every BatchNorm takes in place of the training set's; the published code takes those
            of the set that is scored.
    """
    if statistics_of is None:
        return _predict(net[0].eval(), images)
    kept = {name: value.clone() for name, value in net[0].state_dict().items()}
    norms = [m for m in net[0].modules() if isinstance(m, nn.BatchNorm2d)]
    net[0].train()
    try:
        seen = 0
        for part in statistics_of.split(CHUNK):
            seen += len(part)
            for norm in norms:
                norm.momentum = len(part) / seen  # an average over images, whatever the size of the last batch
            _predict(net[0], part)
        return _predict(net[0].eval(), images)
    finally:
        for norm in norms:
            norm.momentum = 0.1
        net[0].load_state_dict(kept)
        net[0].eval()


def training_features(net: nn.Sequential, images: Tensor, *, seed: int, stream: int) -> Tensor:
    """Features of cropped and mirrored images with BatchNorm in training mode: each batch by its own statistics."""
    kept = {name: value.clone() for name, value in net[0].state_dict().items()}
    net[0].train()
    try:
        return _predict(net[0], shift(images, 4, seed, stream, mirror=True))
    finally:
        net[0].load_state_dict(kept)
        net[0].eval()


def flop(net: nn.Module, image: Tensor) -> int:
    """Floating-point operations of one image, (1, 3, h, w), forward."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(image)
    return counter.get_total_flops()


def matmul_rate(device: str) -> float:
    """FLOP per second of a large matrix product, in bfloat16 on CUDA: the reference for the speed of the features."""
    cuda = device.startswith("cuda")
    side = 8192 if cuda else 1024
    a = torch.ones(side, side, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    best = math.inf
    for _ in range(5):
        start = now(device)
        torch.mm(a, a)
        best = min(best, now(device) - start)
    return 2 * side**3 / best


def now(device: str) -> float:
    """The clock in seconds, after the device has finished its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()
