"""A head on networks that are trained already, compared with the usual OOD scores.

    BOCHNER_DATA=folder python benchmarks/attach.py digits
    BOCHNER_DATA=folder python benchmarks/attach.py cifar --network googlenet|residual     (a GPU; trains it for some minutes)
    python benchmarks/attach.py memory
    python benchmarks/attach.py report

Rows go to results/attach. ``digits`` trains two small convolutional networks on MNIST and shows them rotated and inverted digits,
noise, CIFAR-10 in grey and letters drawn from fonts. ``memory`` streams 100,000 and 1,000,000 rows, each in a process of its own.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.font_manager
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bochner import StationaryHead, metrics
from bochner.datasets import load_images
from bochner.experiments.images.pretraining import Pictures, Schedule, fit, network
from bochner.experiments.rows import Row, add_rows, provenance, read_rows
from bochner.files import write_text
from bochner.members.features import squared_distances
from bochner.networks import linear, residual_net

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HELD_OUT = 5000  # training images that only calibrate
NEIGHBOURS = 10  # the score is the distance to this neighbour
Sets = dict[str, Tensor]


# ---------------------------------------------------------------------- images


def letters(num: int) -> Tensor:
    """Letters that look like no digit, in the fonts that come with matplotlib."""
    fonts = sorted(
        {
            f.fname
            for f in matplotlib.font_manager.fontManager.ttflist
            if "DejaVuSans" in f.fname or "DejaVuSerif" in f.fname
        }
    )
    fonts = [name for name in fonts if "Display" not in name]
    rng, drawn = np.random.default_rng(0), []
    for _ in range(num):
        font = ImageFont.truetype(fonts[rng.integers(len(fonts))], int(rng.integers(18, 24)))
        letter = "ABCDEFGHKMNPQRTUVWXYabdefghknrty"[rng.integers(32)]
        image = Image.new("L", (28, 28))
        pen = ImageDraw.Draw(image)
        left, top, right, bottom = pen.textbbox((0, 0), letter, font=font)
        pen.text(((28 - left - right) / 2, (28 - top - bottom) / 2), letter, fill=255, font=font)
        drawn.append(np.asarray(image))
    return torch.from_numpy(np.stack(drawn)).float()[:, None] / 255


def strange_digits(test: Tensor) -> Sets:
    """Images that are unlike the digits a network was trained on."""
    grey = torch.from_numpy(load_images("cifar10").x_test[:2000]).float().mean(-1)[:, None] / 255
    return {
        "rotated": torch.rot90(test[:2000], 1, (2, 3)),
        "inverted": 1 - test[2000:4000],
        "noise": torch.rand(2000, 1, 28, 28, generator=torch.Generator().manual_seed(0)),
        "cifar10 in grey": F.interpolate(grey, size=28, mode="bilinear"),
        "letters": letters(2000),
    }


def digit_network(seed: int, x: Tensor, y: Tensor) -> nn.Sequential:
    """A small convolutional network, trained in the usual way."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 49, 128),
        nn.ReLU(),
        nn.Dropout(0.2) if seed == 0 else nn.Identity(),
        nn.Linear(128, 10),
    )
    epochs, size = 4, 128
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, epochs=epochs, steps_per_epoch=-(-len(x) // size))
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(size):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


# ---------------------------------------------------------------------- other scores


@torch.no_grad()
def peers(net: nn.Sequential, x: Tensor, y: Tensor, sets: Sets) -> dict[str, Sets]:
    """Scores of every image by the usual methods: maximum probability, energy, Mahalanobis distance, nearest neighbours."""

    def features(images: Tensor) -> Tensor:
        return torch.cat([net[:-1](part) for part in images.split(1000)]).double()

    train_features, last = features(x[:20_000]), net[-1]
    labels = y[:20_000]
    centres = torch.stack([train_features[labels == c].mean(0) for c in range(10)])
    residuals = train_features - centres[labels]
    covariance = residuals.mT @ residuals / len(train_features)
    covariance.diagonal().add_(1e-6 * covariance.diagonal().sum())
    root = torch.linalg.inv(torch.linalg.cholesky(covariance)).mT
    unit = F.normalize(train_features)
    scores_by_set: dict[str, Sets] = {}
    for name, images in sets.items():
        image_features = features(images)
        logits = last(image_features.float()).double()
        nearest = squared_distances(image_features, train_features).kthvalue(NEIGHBOURS, 1).values
        nearest_unit = squared_distances(F.normalize(image_features), unit).kthvalue(NEIGHBOURS, 1).values
        scores_by_set[name] = {
            "maximum probability": -torch.softmax(logits, 1).max(1).values,
            "energy": -torch.logsumexp(logits, 1),
            "Mahalanobis": squared_distances(image_features @ root, centres @ root).min(1).values,
            "nearest neighbours": nearest,
            "nearest neighbours, normalised": nearest_unit,
        }
    return {
        score: {name: values[score] for name, values in scores_by_set.items()}
        for score in next(iter(scores_by_set.values()))
    }


def temperature_scaled(logits: Tensor, labels: Tensor, new: Tensor) -> Tensor:
    """New logits at the temperature that maximises the probability of held-out labels."""
    tried = torch.logspace(-1, 1, 400, base=2, dtype=torch.float64, device=logits.device)
    losses = torch.stack([F.cross_entropy(t * logits, labels) for t in tried])
    return tried[losses.argmin()] * new


@torch.no_grad()
def outputs(net: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([net(part) for part in images.split(1000)]).double()


def compare(name: str, seed: int, net: nn.Sequential, split: dict[str, tuple[Tensor, Tensor]], sets: Sets) -> list[Row]:
    """One row for the head and one for every other score."""
    (x, y), held, (test, truth) = split["train"], split["held_out"], split["test"]
    logits, calibrated = outputs(net, test), temperature_scaled(outputs(net, held[0]), held[1], outputs(net, test))
    shared = {"set": name, "seed": seed, "accuracy": metrics.accuracy(truth.cpu(), torch.softmax(logits, 1).cpu())}
    shared |= {"nlpd": F.cross_entropy(logits, truth).item(), "nlpd_scaled": F.cross_entropy(calibrated, truth).item()}
    rows = []
    for score, values in peers(net, x, y, {"test": test} | sets).items():
        areas = {k: metrics.ood_auc(values["test"].cpu(), v.cpu()) for k, v in values.items() if k != "test"}
        rows.append(shared | {"score": score, "auroc": areas})
    began = time.perf_counter()
    head = StationaryHead.fit(
        net, DataLoader(TensorDataset(x, y), 1000), DataLoader(TensorDataset(*held), 1000), progress=False
    )
    head_row = {"seconds": time.perf_counter() - began, "kernel": head.kernel, "lengthscale": head.lengthscale}
    head_row |= {"power": head.power, "temperature": head.temperature}
    prediction: Any = head.predict(test)
    inside = head.ood_score(test)
    head_row["nlpd"] = -prediction.log_prob(truth).mean().item()
    head_row["accuracy"] = metrics.accuracy(truth.cpu(), prediction.probabilities.cpu())
    head_row["ece"] = metrics.ece(truth.cpu(), prediction.probabilities.cpu())
    head_row["false_alarms"] = (inside > head.threshold).double().mean().item()
    head_row["auroc"] = {k: metrics.ood_auc(inside.cpu(), head.ood_score(v).cpu()) for k, v in sets.items()}
    predictions: dict[str, Any] = {k: head.predict(v) for k, v in sets.items()}
    head_row["confidence"] = {k: p.confidence.mean().item() for k, p in predictions.items()}
    return [row | provenance(DEVICE) for row in [*rows, shared | {"score": "StationaryHead"} | head_row]]


def keep(options: argparse.Namespace, rows: list[Row]) -> None:
    add_rows(options.out / "rows.jsonl", rows, lambda row: (row["set"], row["seed"], row["score"]))
    for row in rows:
        print(row["set"], row["seed"], row["score"], {k: round(v, 3) for k, v in row["auroc"].items()}, flush=True)


def run_digits(options: argparse.Namespace) -> None:
    data = load_images("mnist")
    x, test = (torch.from_numpy(part).float()[:, None] / 255 for part in (data.x_train, data.x_test))
    y, truth = (torch.from_numpy(part).long() for part in (data.y_train, data.y_test))
    sets = strange_digits(test)
    for seed in range(2):
        net = digit_network(seed, x[HELD_OUT:], y[HELD_OUT:])
        split = {"train": (x[HELD_OUT:], y[HELD_OUT:]), "held_out": (x[:HELD_OUT], y[:HELD_OUT]), "test": (test, truth)}
        keep(options, compare("digits", seed, net, split, sets))


def run_cifar(options: argparse.Namespace) -> None:
    data = load_images("cifar10")
    show = Pictures(torch.from_numpy(data.x_train), DEVICE)
    x, test = (show(torch.from_numpy(part)) for part in (data.x_train, data.x_test))
    y, truth = (torch.from_numpy(part).long().to(DEVICE) for part in (data.y_train, data.y_test))
    sets = {name: show(torch.from_numpy(load_images(name).x_test)) for name in ("cifar100", "svhn-1083")}
    schedule = Schedule(epochs=options.epochs)
    net = network(schedule, 0)
    if options.network == "residual":
        generator = torch.Generator().manual_seed(0)
        net = nn.Sequential(residual_net(generator=generator), linear(512, 10, generator=generator))
    net = net.to(DEVICE, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    cut = len(x) - HELD_OUT
    began = time.perf_counter()
    fit(net, options.out / f"{options.network}-partial.safetensors", schedule, 0, (x[:cut], y[:cut]))
    seconds = time.perf_counter() - began
    split = {"train": (x[:cut], y[:cut]), "held_out": (x[cut:], y[cut:]), "test": (test, truth)}
    rows = compare(f"cifar10, {options.network}", 0, net.eval(), split, sets)
    keep(options, [row | {"training_seconds": seconds} for row in rows])


# ---------------------------------------------------------------------- memory


class GeneratedRows:
    """Batches of generated rows, drawn when they are read."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows // 1000

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(len(self)):
            generator = torch.Generator().manual_seed(number)
            y = torch.randint(3, (1000,), generator=generator)
            yield torch.randn(1000, 20, generator=generator) + 2 * F.one_hot(y, 20), y


def run_memory(options: argparse.Namespace) -> None:
    if options.rows is None:
        for rows in (100_000, 1_000_000):
            subprocess.run(
                [sys.executable, __file__, "memory", "--rows", str(rows), "--out", str(options.out)], check=True
            )
        return
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    began = time.perf_counter()
    StationaryHead.fit(net, GeneratedRows(options.rows), progress=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row = {"set": "memory", "rows": options.rows, "seconds": time.perf_counter() - began, "peak_bytes": peak}
    add_rows(options.out / "memory.jsonl", [row | provenance("cpu")], lambda row: (row["rows"],))
    print(row)


# ---------------------------------------------------------------------- the page


def table(rows: list[Row]) -> Iterator[str]:
    """AUROC of every score, mean over seeds, and the quality of the predictions."""
    sets = list(rows[0]["auroc"])
    yield f"| score | {' | '.join(sets)} | worst |"
    yield "|---" * (len(sets) + 2) + "|"
    for score in dict.fromkeys(row["score"] for row in rows):
        score_rows = [row for row in rows if row["score"] == score]
        means = [np.mean([row["auroc"][name] for row in score_rows]) for name in sets]
        yield f"| {score} | {' | '.join(f'{v:.3f}' for v in means)} | {min(means):.3f} |"
    head = [row for row in rows if row["score"] == "StationaryHead"]

    def mean(key: str, of: list[Row]) -> float:
        return float(np.mean([row[key] for row in of]))

    plain = [row for row in rows if row["score"] == "energy"]
    yield ""
    yield (
        f"Accuracy {mean('accuracy', plain):.4f} before and {mean('accuracy', head):.4f} after; NLL {mean('nlpd', plain):.4f}, "
        f"at its best temperature {mean('nlpd_scaled', plain):.4f}, with the head {mean('nlpd', head):.4f}; "
        f"{mean('false_alarms', head):.3f} of test images flagged at 0.05; attached in {mean('seconds', head):.1f} s."
    )


def run_report(options: argparse.Namespace) -> None:
    rows = read_rows(options.out / "rows.jsonl")
    lines = [
        "# Heads on trained networks, in numbers",
        "",
        "Made by `python benchmarks/attach.py report`. AUROC, mean over seeds.",
    ]
    for name in dict.fromkeys(row["set"] for row in rows):
        lines += ["", f"## {name}", "", *table([row for row in rows if row["set"] == name])]
    lines += ["", "## Memory", "", "| rows | seconds | peak, GiB |", "|---|---|---|"]
    for row in read_rows(options.out / "memory.jsonl"):
        lines.append(f"| {row['rows']:,} | {row['seconds']:.1f} | {row['peak_bytes'] / 2**30:.2f} |")
    write_text(options.out / "attach.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


COMMANDS: dict[str, Callable[[Any], None]] = {
    "digits": run_digits,
    "cifar": run_cifar,
    "memory": run_memory,
    "report": run_report,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--network", choices=("googlenet", "residual"), default="googlenet")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/attach"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    COMMANDS[options.command](options)


if __name__ == "__main__":
    main()
