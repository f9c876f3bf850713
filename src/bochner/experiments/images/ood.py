"""CIFAR-10 against CIFAR-100 and SVHN: how well networks trained on the first tell the other two from it.

The features of one GoogLeNet are computed once (``cifar``). On them, for five models: SWAG as the published code has it, SWAG under
"bochner", and a closed-form posterior of the output layer (``heads``). Beside these the usual baselines: maximum probability,
energy, and an ensemble of heads.

5,000 training images are used for nothing but choosing the learning rate of SWAG (the paper uses the test set) and the
hyperparameters of the closed form.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bochner.datasets import load_images
from bochner.experiments.catalogue import Request, chosen
from bochner.experiments.images.cifar import Config, Features
from bochner.experiments.images.heads import CollectedHead, PublishedHead, fit_closed_form, fit_heads, make_head
from bochner.experiments.images.scoring import OUTSIDE, plain_rows, prediction_rows
from bochner.experiments.rows import Row, add_rows, provenance, read_rows
from bochner.predictive import CategoricalPredictive

NETWORKS = ("relu", "local-rbf", "rbf-sin", "local-matern32", "matern32-sin")
HEADS = ("text", "code")
SCORED_SETS = ("cifar10", *OUTSIDE)


def _swag_rows(config: Config, data: Features, name: str) -> Iterator[Row]:
    collected = CollectedHead(config, data, name)
    predictions = {name: collected.predict(data.bochner[name], outside=False) for name in SCORED_SETS}
    for row in prediction_rows(predictions, data.labels["cifar10"]):
        yield {"protocol": "bochner", **row, "swag_lr": collected.rate, "tried": collected.tried}


def _published_swag_rows(config: Config, data: Features, name: str) -> Iterator[Row]:
    collected = PublishedHead(config, data, name)
    for protocol, sets in data.published.items():
        predictions = {
            set_name: collected.predict(sets[set_name], outside=set_name != "cifar10") for set_name in SCORED_SETS
        }
        for row in prediction_rows(predictions, data.labels["cifar10"], mean_variance=True):
            yield {"protocol": protocol, **row, "swag_lr": collected.rate, "tried": collected.tried}


def _closed_form_rows(config: Config, data: Features, name: str) -> Iterator[Row]:
    posterior, chosen = fit_closed_form(config, data, name)
    predictions = {set_name: posterior.predict(data.bochner[set_name]) for set_name in SCORED_SETS}
    for row in prediction_rows(predictions, data.labels["cifar10"]):
        yield {"protocol": "bochner", **row, **chosen}


@torch.no_grad()
def _plain_rows(config: Config, data: Features, name: str) -> Iterator[Row]:
    """Baselines: the GoogLeNet's own linear layer, or one trained ReLU head."""
    if name == "googlenet":
        net, seen = data.linear, data.whole
    else:
        net, seen = make_head(config, data, name, config.seed), data.heads
        with torch.enable_grad():
            fit_heads(config, data, net, config.seed)
    for protocol, sets in seen.items():
        logits = {set_name: net(sets[set_name]) for set_name in SCORED_SETS}
        yield from plain_rows(logits, data.labels["cifar10"], protocol)


@torch.no_grad()
def _ensemble_rows(config: Config, data: Features, name: str) -> Iterator[Row]:
    """An ensemble of heads that differ in their seeds, trained as one stack."""
    seeds = [config.seed + i for i in range(config.members)]
    heads = [make_head(config, data, name, s) for s in seeds]
    with torch.enable_grad():
        fit_heads(config, data, heads, seeds)
    predictions = {
        set_name: CategoricalPredictive.from_logits(head(data.bochner[set_name]) for head in heads)
        for set_name in SCORED_SETS
    }
    for row in prediction_rows(predictions, data.labels["cifar10"]):
        yield {"protocol": "bochner", **row, "members": config.members}


class Method(NamedTuple):
    """A way to predict and score.

    Attributes:
        posterior: Its name in the rows.
        published: Whether its rows are those of the published code.
        make: Makes the rows of one model.
        models: Names of the models that it is for.
    """

    posterior: str
    published: bool
    make: Callable[[Config, Features, str], Iterator[Row]]
    models: tuple[str, ...]


METHODS = [
    Method("map", False, _plain_rows, ("googlenet", "relu")),
    Method("ensemble", False, _ensemble_rows, ("relu",)),
    Method("closed_form", False, _closed_form_rows, NETWORKS),
    Method("swag", False, _swag_rows, NETWORKS),
    Method("swag", True, _published_swag_rows, NETWORKS),
]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("head", "protocol", "posterior", "model", "score", "outside", "seed"))


def _job(row: Row) -> tuple[Any, ...]:
    """The job that made a row: head, posterior, whether as published, model and seed."""
    published = row["posterior"] == "swag" and row["protocol"].startswith("paper")
    return row["head"], row["posterior"], published, row["model"], row["seed"]


def check(_: str, request: Request) -> None:
    """Raises an error where a name is unknown, or images are missing or damaged; they are read, as hours may pass until the run."""
    chosen("models", request.models, NETWORKS)
    chosen("head", [request.head], HEADS)
    for name in SCORED_SETS:
        load_images(name)


def run(_: str, request: Request, path: Path) -> None:
    """Makes the rows that are missing from a file, under both protocols."""
    make_rows(Config(seed=request.seed, device=request.device, head=request.head), path, request)


def make_rows(config: Config, path: Path, request: Request) -> list[Row]:
    """Makes the rows that are missing from ``path``, one method and model at a time, and returns all of them."""
    finished = {_job(row) for row in read_rows(path)}
    models = (*chosen("models", request.models, NETWORKS), "googlenet")
    jobs = [
        (method, model)
        for method in METHODS
        for model in method.models
        if model in models and (config.head, method.posterior, method.published, model, config.seed) not in finished
    ]
    if not jobs:
        return read_rows(path)
    start = time.perf_counter()
    config.weights.parent.mkdir(parents=True, exist_ok=True)
    data = Features(config, request.progress)
    request.report(f"{_described(data)}; {time.perf_counter() - start:.0f} s until here")
    for number, (method, model) in enumerate(jobs, start=1):
        rows = _run_method(config, data, method, model)
        add_rows(path, rows, _key)
        outcome = "" if rows[0]["status"] == "ok" else f"  diverged: {rows[0]['reason']}"
        kind = f"{method.posterior}, published" if method.published else method.posterior
        request.report(f"[{number}/{len(jobs)}] {kind} {model}  {rows[0]['seconds']:.1f} s{outcome}")
    return read_rows(path)


def _described(data: Features) -> str:
    """The accuracy of the GoogLeNet and the speed of its features."""
    return (
        f"GoogLeNet: accuracy {data.notes['accuracy']:.4f}, trained in {data.notes['seconds']:.0f} s; features at "
        f"{data.speed['images_per_second']} images/s, {data.speed['extraction_tflops']:.1f} TFLOP/s, "
        f"{data.speed['matmul_share']:.2f} of a matrix product's rate"
    )


def _run_method(config: Config, data: Features, method: Method, model: str) -> list[Row]:
    """Rows of one method and model; where it fails, one row that gives the reason."""
    start = time.perf_counter()
    try:
        rows = [{"status": "ok", **row} for row in method.make(config, data, model)]
    except ValueError as error:  # it diverged, or its numbers are not finite
        reason: Row = {"score": "", "outside": "", "reason": str(error)}
        rows = [{"status": "diverged", "protocol": "paper" if method.published else "bochner", **reason}]
    unit = {"experiment": "cifar-ood", "head": config.head, "seed": config.seed}
    unit |= {"posterior": method.posterior, "model": model}
    origin: Row = {"seconds": round(time.perf_counter() - start, 2)}
    origin |= {f"pretrain_{key}": value for key, value in data.notes.items()} | data.speed
    return [{**unit, **row, **origin, **provenance(config.device)} for row in rows]
