"""A StationaryHead in a file: its JSON and tensors, the rules for them, and back.

The network is not in the file. The file holds a digest of its parameters, and is only read together with that network.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from bochner.attach.answers import CLASS_ORDER_SIZE, Answer
from bochner.attach.batches import Tapped, unwrapped
from bochner.attach.head import HeadFacts, StationaryHead
from bochner.attach.nearness import KERNELS, LENGTH_WEIGHT, MAX_USUAL_LENGTH, ROW_PRECISION, Nearness, Space
from bochner.attach.novelty import TAIL_SHARE, Novelty, Tail, cues_of
from bochner.members.features import JITTER, KernelFeatures
from bochner.storage.container import (
    Json,
    ModelFileError,
    Tensors,
    as_json,
    check_key,
    damaged,
    declared,
    on_cpu,
    open_container,
    versions,
    write_container,
)
from bochner.storage.reading import check_values, unpacked
from bochner.storage.rules import (
    Entry,
    TensorRule,
    check_entries,
    list_of,
    number,
    one_of,
    optional,
    record,
    require,
    rows_of,
    text,
    truth,
    whole,
)
from bochner.storage.schema import POSITIVE, VERSIONS
from bochner.storage.tensors import MAX_ANCHORS, MAX_REFERENCES, triangle
from bochner.storage.writing import packed

KIND = "StationaryHead"
CONSTANTS = {  # of the formulas that saved heads predict with, see bochner.storage.schema
    "kernel jitter": JITTER,
    "row precision": ROW_PRECISION,
    "weight of lengths": LENGTH_WEIGHT,
    "usual lengths": MAX_USUAL_LENGTH,
    "tail share": TAIL_SHARE,
    "order of classes": CLASS_ORDER_SIZE,
}
TRIAL_FEATURES = (0.0, 1.0, -1.0, 1e6)  # entries of the rows that every head must predict finite numbers for
MAX_OUTPUTS = 100_000
MAX_FEATURES = 10_000_000

ANSWER = record(
    {
        "power": number(1e-3, 1e3),
        "edge": number(0.0, 1 - 1e-9),
        "temperature": optional(number(1e-12, 1e12)),
        "shrinks": truth,
        "noise": optional(list_of(number(1e-150, 1e110), shortest=1, longest=MAX_OUTPUTS)),
        "centre": optional(list_of(number(-1e110, 1e110), shortest=1, longest=MAX_OUTPUTS)),
        "spread": optional(list_of(number(0.0, 1e110), shortest=1, longest=MAX_OUTPUTS)),
    }
)
HEAD = record(
    VERSIONS
    | {
        "estimator": one_of(KIND),
        "constants": one_of(CONSTANTS),
        "network": text,
        "layer": text,
        "features": whole(1, MAX_FEATURES),
        "classes": truth,
        "false_alarm": number(1e-12, 1 - 1e-12),
        "rows": whole(1, 10**15),
        "kernel": one_of(*KERNELS),
        "scale": POSITIVE,
        "unit": POSITIVE,
        "directions": truth,
        "answer": ANSWER,
    }
)


def head_rules(content: Json, entries: Mapping[str, Entry]) -> dict[str, TensorRule]:
    """Judges the JSON of a head's file and the declared sizes of its tensors; returns the rules for the tensors' values.

    Raises:
        WrongValue: Something is not as in any file that ``StationaryHead.save`` wrote.
    """
    HEAD(content, "")
    classes, features, answer = content["classes"], content["features"], content["answer"]
    directions = content["directions"]
    lists = [answer[name] for name in ("noise", "centre", "spread")]
    require(classes == (answer["temperature"] is not None), "a head for classes, and no other, has a temperature")
    require(all((values is None) == classes for values in lists), "a head for numbers, and no other, has a noise")
    require(classes or not directions, "a head for numbers has no directions")
    require(classes or len({len(values) for values in lists}) == 1, "the noise must have an entry for each output")
    anchors = rows_of(entries, "anchors", MAX_ANCHORS)
    known = rows_of(entries, "statistic", MAX_REFERENCES)
    rules = {
        "anchors": TensorRule((anchors, features + directions), -1e60, 1e60),
        "factor": TensorRule((triangle(anchors),), -1e60, 1e60),
        "centre": TensorRule((2 if directions else features,), -1e60, 1e60),
        "spread": TensorRule((), 1e-150, 1e60),
        "statistic": TensorRule((known,), 0.0, 1e60, increasing=True),
        **{f"tail{n}": TensorRule((known,), -1e60, 1e60, increasing=True) for n in range(1 + classes)},
    }
    check_entries(rules, entries)
    return rules


# ------------------------------------------------------------------ writing and reading


def write_head(path: Path, head: StationaryHead, key: bytes | None = None) -> Path:
    """Writes a head to a file, as a whole or not at all. The same head gives the same bytes."""
    check_key(key)
    if head._tapped.digest != head._tapped.made_for:
        raise ValueError(
            "The network has changed since the head was fitted to it, for instance by training; fit the head again."
        )
    near, answer, novelty, facts = head._near, head._answer, head._novelty, head._facts
    vectors = {"noise": answer.noise, "centre": answer.centre, "spread": answer.spread}
    content: Json = versions() | {
        "estimator": KIND,
        "constants": CONSTANTS,
        "network": head._tapped.made_for,
        "layer": head._tapped.name,
        "features": head._tapped.layer.in_features,
        "classes": facts.classes,
        "false_alarm": facts.false_alarm,
        "rows": facts.rows,
        "kernel": near.kernel,
        "scale": near.scale,
        "unit": near.space.unit,
        "directions": near.space.directions,
        "answer": {name: getattr(answer, name) for name in ("power", "edge", "temperature", "shrinks")}
        | {name: None if value is None else value.tolist() for name, value in vectors.items()},
    }
    tensors = {"anchors": near.phi.anchors, "factor": packed(near.factor)}
    tensors |= {"centre": near.space.centre, "spread": near.space.scale}
    tensors |= {"statistic": novelty.statistic.known}
    tensors |= {f"tail{number}": tail.known for number, tail in enumerate(novelty.tails)}
    try:
        content, tensors = as_json(content), on_cpu(tensors)
        check_values(head_rules(content, declared(tensors)), tensors)
        _build(content, tensors, head._tapped)
    except Exception as error:
        raise ValueError(f"This head could not be read back, so it is not written ({error}).") from error
    return write_container(path, content, tensors, key)


def read_head(path: Path, network: nn.Module, key: bytes | None = None) -> StationaryHead:
    """Reads a head for the network that it was made for; a ModelFileError for any other file or network."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"The network parameter must be an nn.Module, got {type(network).__name__} instead.")
    if any(value.is_meta for value in network.parameters()):
        raise ValueError("The network parameter must hold numbers, got a network on torch's meta device instead.")
    with open_container(path, key) as container:
        content = container.content
        if content.get("estimator") != KIND:
            raise ModelFileError(f"{path} does not hold a StationaryHead; bochner.storage.load reads estimators.")
        try:
            rules = head_rules(content, container.entries)
            tensors = container.read_tensors(key)
            check_values(rules, tensors)
            return _build(content, tensors, _tapped(path, network, content))
        except ModelFileError:
            raise
        except (ValueError, ArithmeticError, RuntimeError) as error:
            if "allocate" in str(error):  # too little memory, which is no fault of the file
                raise
            raise damaged(path, error) from error


def _tapped(path: Path, network: nn.Module, content: Json) -> Tapped:
    """The network with its features; a ModelFileError where it is not the one that the head was made for."""
    other = f"{path} was made for another network"
    if content["layer"] not in dict(unwrapped(network).named_modules()):
        raise ModelFileError(f"{other}: this one has no layer {content['layer']!r:.100}.")
    tapped = Tapped(network, content["layer"])
    if tapped.made_for != content["network"]:
        raise ModelFileError(f"{other}: parameters or buffers differ.")
    require(tapped.layer.in_features == content["features"], "the features must be those of the network's layer")
    return tapped


def _build(content: Json, tensors: Tensors, tapped: Tapped) -> StationaryHead:
    """The head that contents of a file describe, after a trial prediction."""
    tensors = {name: value.to(tapped.device) for name, value in tensors.items()}
    anchors, unit, scale = tensors["anchors"], float(content["unit"]), float(content["scale"])
    classes: bool = content["classes"]
    directions: bool = content["directions"]
    require(not directions or float(tensors["centre"][1]) > 0, "the smallest length must be positive")
    space = Space(directions, tensors["centre"], tensors["spread"], unit)
    phi = KernelFeatures(KERNELS[content["kernel"]], torch.full_like(anchors[0], scale * unit), anchors)
    factor = unpacked(tensors["factor"], len(anchors))
    require(bool((factor.diagonal() > 0).all()), "the factor must have a positive diagonal")
    near = Nearness(space, content["kernel"], scale, phi, factor)
    described = content["answer"]
    noise, centre, spread = (
        None if described[name] is None else torch.tensor(described[name], dtype=torch.float64, device=tapped.device)
        for name in ("noise", "centre", "spread")
    )
    power, edge = float(described["power"]), float(described["edge"])
    answer = Answer(power, edge, described["temperature"], noise, centre, spread, described["shrinks"])
    novelty = Novelty([Tail(tensors[f"tail{n}"]) for n in range(1 + classes)], Tail(tensors["statistic"]))
    facts = HeadFacts(classes, float(content["false_alarm"]), content["rows"])
    head = StationaryHead(tapped, near, answer, novelty, facts)
    _try(head, content["features"])
    return head


@torch.no_grad()
def _try(head: StationaryHead, features: int) -> None:
    """Raises a WrongValue unless the head predicts finite numbers for a few rows of features."""
    near, answer = head._near, head._answer
    entries = torch.tensor(TRIAL_FEATURES, dtype=torch.float64, device=near.factor.device)
    left = near.left(entries[:, None].repeat(1, features))
    outputs = entries[:, None].repeat(1, 2 if answer.noise is None else len(answer.noise))
    predicted = answer(outputs, left)
    score = head._novelty(cues_of(left, outputs, head._facts.classes))
    values = [left, score, predicted.entropy, torch.tensor(head.threshold)]
    require(all(bool(torch.isfinite(value).all()) for value in values), "a trial prediction is not finite")
    require(0 <= head.threshold <= 1, "the threshold must be from 0 to 1")
