"""The tensors in the file of an estimator: every one with its shape and range."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from bochner.storage.container import Json
from bochner.storage.rules import Entry, TensorRule, rows_of

MAX_ANCHORS = 20_000  # of a head on columns or on a network; the default is 900
MAX_SPREAD_ANCHORS = 2_000  # of the spread, whose file size grows more slowly than its memory; the default is 200
MAX_REFERENCES = 10_000_000  # scores of known rows that new rows are compared with; the default is about 2,000


def triangle(size: int) -> int:
    """Number of entries of a symmetric matrix that are stored: those of its lower triangle."""
    return size * (size + 1) // 2


def inputs_of(content: Json) -> tuple[int, int]:
    """Number of inputs before those that say 'never seen', and of all inputs."""
    plain = 0
    for column in content["columns"]:
        categories = column["categories"]
        plain += 1 + (column["missing"] > 0) if categories is None else len(categories)
    return plain, plain + sum(column["categories"] is not None for column in content["columns"])


def _member_tensors(
    prefix: str, entries: Mapping[str, Entry], inputs: int, outputs: Mapping[str, int]
) -> dict[str, TensorRule]:
    """Rules for a member; ``outputs`` names its last tensor and that tensor's columns."""
    anchors = rows_of(entries, f"{prefix}anchors", MAX_ANCHORS)
    rules = {
        "anchors": TensorRule((anchors, inputs), -1e60, 1e60),
        "lengthscale": TensorRule((inputs,), 1e-60, 1e60),
        "gram": TensorRule((triangle(anchors),), -1e60, 1e60),
        **{name: TensorRule((anchors, columns)) for name, columns in outputs.items()},
    }
    return {prefix + name: rule for name, rule in rules.items()}


def _network_tensors(prefix: str, entries: Mapping[str, Entry], plain: int, widths: list[int]) -> dict[str, TensorRule]:
    """Rules for a network: its intervals, its layers and its lengthscale."""
    name = f"{prefix}0.column"
    intervals = entries[name].shape[0] if name in entries and len(entries[name].shape) == 1 else 0
    single: dict[str, Any] = {"dtype": torch.float32}
    rules = {
        "0.column": TensorRule((intervals,), 0, plain - 1, dtype=torch.int64),
        "0.left": TensorRule((intervals,), -1e9, 1e9, **single),
        "0.width": TensorRule((intervals,), 1e-9, 1e9, **single),
        "2.lengthscale": TensorRule(
            entries.get(f"{prefix}2.lengthscale", Entry(torch.float32, ())).shape[:1], 1e-12, 1e12, **single
        ),
    }
    sizes = [plain + intervals, *widths]
    for layer, (narrow, wide) in enumerate(itertools.pairwise(sizes)):
        rules[f"1.{2 * layer}.weight"] = TensorRule((wide, narrow), -1e12, 1e12, **single)
        rules[f"1.{2 * layer}.bias"] = TensorRule((wide,), -1e12, 1e12, **single)
    return {prefix + name: rule for name, rule in rules.items()}


def _mixture_tensors(prefix: str, mixture: Json, content: Json, entries: Mapping[str, Entry]) -> dict[str, TensorRule]:
    plain, inputs = inputs_of(content)
    rules: dict[str, TensorRule] = {}
    deep, networks = 0, mixture["networks"]
    if networks is not None:
        deep = networks["widths"][-1] + inputs
        for place in range(networks["count"]):
            rules |= _network_tensors(f"{prefix}network{place}.", entries, plain, networks["widths"])
    outputs = {"projection": 1}
    if "classes" in content:
        outputs = {"weights": 1 if len(content["classes"]) == 2 else len(content["classes"])}
    for place, member in enumerate(mixture["members"]):
        size = inputs if member["network"] is None else deep
        rules |= _member_tensors(f"{prefix}member{place}.", entries, size, outputs)
    spread_about = mixture.get("spread")
    if spread_about is not None and spread_about["lengthscale"] is not None:
        anchors = rows_of(entries, f"{prefix}spread.anchors", MAX_SPREAD_ANCHORS)
        width = 1 if spread_about["mean_only"] else inputs + 1
        rules[f"{prefix}spread.anchors"] = TensorRule((anchors, width), -1e60, 1e60)
        rules[f"{prefix}spread.weights"] = TensorRule((anchors,), -1e12, 1e12)
    return rules


def tensor_rules(content: Json, entries: Mapping[str, Entry]) -> dict[str, TensorRule]:
    """Rules for the values of all tensors, from an estimator's JSON and the declared sizes of its tensors."""
    rules = {
        "novelty.factor": TensorRule((triangle(inputs_of(content)[1] + 1),), -1e60, 1e60),
        "novelty.left": TensorRule((rows_of(entries, "novelty.left", MAX_REFERENCES),), 0, 1, increasing=True),
        "novelty.leverage": TensorRule(
            (rows_of(entries, "novelty.leverage", MAX_REFERENCES),), 0, 1e100, increasing=True
        ),
    }
    for place, mixture in enumerate(content["mixtures"]):
        rules |= _mixture_tensors(f"{place}.", mixture, content, entries)
    return rules
