"""Rotated digits: networks trained on upright digits, tested at every angle (the paper's MNIST figures)."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bochner import metrics
from bochner.datasets import load_images
from bochner.experiments.catalogue import Request, chosen
from bochner.experiments.images.rotation_protocols import PROTOCOLS, Config
from bochner.experiments.rows import Row, add_rows, provenance, read_rows
from bochner.training.map import tf32

NETWORKS = ("relu", "local-rbf", "rbf-sin", "rbf-sincos")

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


def score_images(prediction: Any, y: Tensor) -> Row:
    """The metrics of the paper's figure, and the calibration error."""
    p, labels = prediction.probabilities.cpu(), y.cpu()
    row = {"accuracy": metrics.accuracy(labels, p), "confidence": float(prediction.confidence.mean())}
    return row | {"nlpd": metrics.nlpd(prediction.log_prob(y).cpu()), "ece": metrics.ece(labels, p)}


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("protocol", "model", "posterior", "angle", "seed"))


@torch.no_grad()
def run_network(config: Config, name: str, *, progress: bool = False) -> list[Row]:
    """Rows of one network: one for each posterior and angle."""
    start = time.perf_counter()
    protocol = PROTOCOLS[config.protocol](config)
    with torch.enable_grad():
        model, failed = protocol.fit(name, progress)
        common: Row = {"experiment": config.experiment, "protocol": config.protocol, "model": name, "seed": config.seed}
        common |= {"status": "diverged" if failed else "ok", "lengthscale": model.layer.lengthscale.item()}
        common["train_seconds"] = round(time.perf_counter() - start, 2)
        posteriors = {} if failed else protocol.posteriors(model)
    rows: list[Row] = [] if posteriors else [{"posterior": "map", "angle": angle} for angle in config.angles]
    for angle in config.angles if posteriors else ():
        turned = protocol.turned(angle)
        for kind, (predict, choice) in posteriors.items():
            with tf32(config.device.startswith("cuda") and kind != "closed_form"):
                values = score_images(predict(turned), protocol.y_test)
            rows.append({"posterior": kind, "angle": angle, **values, **choice})
    origin = {"seconds": round(time.perf_counter() - start, 2), **provenance(config.device)}
    return [{**common, **row, **origin} for row in rows]


def check(name: str, request: Request) -> None:
    """Raises an error where a name is unknown, or images are missing or damaged; they are read, as hours may pass until the run."""
    chosen("models", request.models, NETWORKS)
    load_images(EXPERIMENTS[name].images)


def run(name: str, request: Request, path: Path) -> None:
    """Makes the rows that are missing from a file, one network at a time."""
    config = replace(EXPERIMENTS[name], protocol=request.protocol, seed=request.seed, device=request.device)
    make_rows(config, path, request)


def make_rows(config: Config, path: Path, request: Request) -> list[Row]:
    """Makes the rows that are missing from ``path``, one network at a time, and returns all of them."""
    finished = {(row["protocol"], row["model"], row["seed"]) for row in read_rows(path)}
    for model in chosen("models", request.models, NETWORKS):
        if (config.protocol, model, config.seed) not in finished:
            rows = run_network(config, model, progress=request.progress)
            add_rows(path, rows, _key)
            state = "" if rows[0]["status"] == "ok" else "   diverged; remove its rows to try again with another --seed"
            request.report(f"{model:<12} {rows[0]['seconds']:5.1f} s   {path}{state}")
    return read_rows(path)
