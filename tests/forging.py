"""Forged model files: copies of small valid models with one hostile change, under a right checksum.

``templates`` fits the models, ``forgeries`` changes one place of a file, and ``outcome`` says what loading and predicting come to.
Every forgery must be refused by ``load`` with a ModelFileError, or load and predict finite numbers of the right shape.
"""

import copy
import hashlib
import json
import math
import random
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor, nn

from bochner import Matern, StationaryHead
from bochner.estimators import Settings, StationaryClassifier, StationaryRegressor
from bochner.storage import ModelFileError, load, save
from bochner.tables.errors import TableError
from bochner.tables.estimators import TableClassifier, TableRegressor

ZEROS = b"0" * 64  # stands in the place of the checksum while it is computed
SMALL = Settings(
    wide_anchors=15, class_anchors=15, deep_numbers=500, network_rows=40, least_steps=5, most_steps=5, member_floor=0.0
)
ROWS = 50


@dataclass(frozen=True)
class Template:
    """A valid model file.

    Attributes:
        data: Its bytes.
        x: Rows to predict.
        network: The network of a StationaryHead; None for an estimator.
    """

    data: bytes
    x: Any
    network: nn.Module | None = None


@dataclass(frozen=True)
class Parts:
    """Contents of a model file: the JSON of its header, and its tensors."""

    content: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, data: bytes) -> "Parts":
        size = int.from_bytes(data[:8], "little")
        return cls(json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["bochner"]), parse(data))

    def data(self) -> bytes:
        """A file of these parts with a right checksum."""
        tensors = {name: value.contiguous().clone() for name, value in self.tensors.items()}
        return sealed(serialise(tensors, metadata={"bochner": json.dumps(self.content), "sha256": ZEROS.decode()}))


def sealed(data: bytes) -> bytes:
    """A file with zeros for a checksum, with the right checksum in their place."""
    digest = hashlib.sha256(data).hexdigest().encode()
    return data.replace(b'"sha256":"' + ZEROS, b'"sha256":"' + digest, 1)


def unsealed(data: bytes) -> bytes:
    """A file with zeros in the place of its checksum."""
    at = data.index(b'"sha256":"') + len(b'"sha256":"')
    return data[:at] + ZEROS + data[at + 64 :]


# ------------------------------------------------------------------ valid models


def templates(folder: Path) -> dict[str, Template]:
    """Small models of every kind, as files; a few seconds."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3))
    y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=ROWS)
    frame = pd.DataFrame(x, columns=list("abc")).assign(d=np.where(x[:, 2] > 0, "u", "v"))
    frame.loc[:4, "a"] = np.nan
    table = frame.assign(
        day=pd.date_range("2026-01-01", periods=ROWS).strftime("%d.%m.%Y"),
        at=[f"{i % 24:02d}:{i:02d}" for i in range(ROWS)],
        fee=[f"€ {v:.2f}".replace(".", ",") for v in y + 9],
        yes=np.where(x[:, 1] > 0, "yes", "no"),
        say=[f"this is the {'big' if i % 3 else 'small'} house number {i} of {i * 7}" for i in range(ROWS)],
    )
    three = np.where(y > 0.5, 2, np.where(y < -0.5, -1, 0))
    deep: dict[str, Any] = {"settings": SMALL, "hidden_layer_sizes": (4, 3), "random_state": 0}
    wide = deep | {"hidden_layer_sizes": ()}
    models = {
        "regressor": (StationaryRegressor(**wide), x, y),
        "networks": (StationaryRegressor(kernel=("rbf", Matern(nu=2.5)), **deep), x, y),
        "two targets": (StationaryRegressor(**wide), frame, np.stack([np.exp(y), y], 1)),
        "classifier": (StationaryClassifier(**wide), frame, np.where(y > 0, "up", "down")),
        "class networks": (StationaryClassifier(kernel="exponential", **deep), x, three),
        "table": (TableRegressor(drop=("b",), **wide), table, [f"${v:.2f}" for v in np.exp(y)]),
        "class table": (TableClassifier(**wide), table, np.where(y > 0, "up", "down")),
    }
    found = {}
    for name, (model, rows, target) in models.items():
        found[name] = Template(save(folder / "template", model.fit(rows, target)).read_bytes(), rows)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double().requires_grad_(False)
    rows = torch.from_numpy(x)
    for name, target in (("head", torch.from_numpy((y > 0).astype(int))), ("number head", network(rows) + 0.1)):
        head = StationaryHead.fit(network, [(rows, target)], progress=False)
        found[name] = Template(head.save(folder / "template").read_bytes(), rows, network)
    return found


# ------------------------------------------------------------------ hostile changes

NESTED: Any = []
for _ in range(300):
    NESTED = [NESTED]
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 0.5, -0.5, 1e-300, 1e300, -1e300, 10**9, 10**30, 10**400),
    *(math.nan, math.inf, -math.inf, "", "x", "exec", "a\0b", "\ud800", "a\nb", "<U500000000", "O", "a" * 10_000),
    *([], [[]], {}, {"type": "exec"}, [30_000, 30_000], [1] * 10_000, ["a", "a"], [0.5, 0.5], NESTED),
]
EXTRA = {"surprise": 1}


def _paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places of all values in JSON."""
    if path:
        yield path
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield from _paths(value, (*path, key))


def _variants(value: Any) -> list[Any]:
    """Values of the same type that are like the one that is there."""
    if isinstance(value, bool) or value is None:
        return [not value]
    if isinstance(value, int | float):
        return [-value, value * 1e6, value * 1e-6, value + 1, str(value), [value], int(value)]
    if isinstance(value, str):
        return [value + "x", value.upper(), value[:-1], [value], value * 2]
    if isinstance(value, list):
        return [value[::-1], value[1:], value[:-1], value + value, [*value, None], dict.fromkeys(map(str, value), 1)]
    names = list(value)
    renamed = {("x" + name if name == names[0] else name): own for name, own in value.items()} if names else EXTRA
    return [value | EXTRA, renamed, list(value.values()), *({k: v for k, v in value.items() if k != n} for n in names)]


def _json_forgery(parts: Parts, rng: random.Random) -> tuple[str, bytes]:
    content = copy.deepcopy(parts.content)
    path = rng.choice(list(_paths(content)))
    place = content
    for key in path[:-1]:
        place = place[key]
    value = rng.choice(HOSTILE) if rng.random() < 0.6 else rng.choice(_variants(place[path[-1]]))
    place[path[-1]] = value
    return f"{'.'.join(map(str, path))} = {value!r:.40}", Parts(content, parts.tensors).data()


def _filled(number: float) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.full_like(t.double(), number).to(t.dtype if t.is_floating_point() else torch.float64)


def _first(number: float) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        value = value.clone().to(torch.promote_types(value.dtype, torch.float32))
        value.view(-1)[:1] = torch.tensor(number, dtype=torch.float64).to(value.dtype)
        return value

    return change


TENSOR_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    **{str(kind): lambda t, kind=kind: t.to(kind) for kind in (torch.float32, torch.float16, torch.int64, torch.bool)},
    "float64": lambda t: t.double(),
    "bfloat16": lambda t: t.to(torch.bfloat16),
    "flat": lambda t: t.reshape(-1),
    "one more dimension": lambda t: t[None],
    "transposed": lambda t: t.T if t.ndim == 2 else t.reshape(1, -1),
    "without the last": lambda t: t[:-1] if t.ndim else t,
    "twice": lambda t: torch.cat([t, t]) if t.ndim else t.repeat(2),
    "empty": lambda t: t.reshape(-1)[:0],
    "reversed": lambda t: t.flip(0) if t.ndim else -t,
    "negative": lambda t: -t.double(),
    "shifted": lambda t: t + 1,
    "large": lambda t: t * 1e12,
    "small": lambda t: t * 1e-12,
    **{f"all {v:g}": _filled(v) for v in (0.0, 1.0, -1.0, 1e300, 1e-300, math.nan)},
    **{f"first {v:g}": _first(v) for v in (math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, 1e-30, 1e300)},
}


def _tensor_forgery(parts: Parts, rng: random.Random) -> tuple[str, bytes]:
    tensors, names = dict(parts.tensors), sorted(parts.tensors)
    name, other, kind = rng.choice(names), rng.choice(names), rng.random()
    if kind < 0.04:
        what, _ = f"{name} is missing", tensors.pop(name)
    elif kind < 0.08:
        what = f"{name} has another name"
        tensors[name + "x"] = tensors.pop(name)
    elif kind < 0.12:
        what, tensors["surprise"] = "one tensor more", torch.zeros(3)
    elif kind < 0.25:
        what = f"{name} and {other} are exchanged"
        tensors[name], tensors[other] = tensors[other], tensors[name]
    else:
        change = rng.choice(list(TENSOR_CHANGES))
        what, tensors[name] = f"{name}: {change}", TENSOR_CHANGES[change](tensors[name])
    return what, Parts(parts.content, tensors).data()


HEADER_VALUES = [-1, 0, 1, 7, 10**6, 10**12, 2**63, 2**64, "x", None, [], 1.5, "F128", "F32", "I64", "BOOL", "F16"]


def _file_forgery(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """A change of the file around the JSON and the tensors: lengths, offsets, shapes, types, what follows."""
    size = int.from_bytes(data[:8], "little")
    header, rest, kind = unsealed(data)[8 : 8 + size], data[8 + size :], rng.random()
    if kind < 0.2:
        length = rng.choice([0, 1, size - 1, size + 1, size + 8, len(data), 2**31, 2**40, 2**63, 2**64 - 1])
        return f"a header of {length} bytes", sealed(struct.pack("<Q", length) + header + rest)
    if kind < 0.4:
        rest = rng.choice([rest[: rng.randrange(len(rest))], rest + b"x" * rng.choice([1, 8, 1000]), b"", rest[1:]])
        return f"{len(rest)} bytes of tensors", sealed(data[:8] + header + rest)
    described = json.loads(header)
    names = [name for name in described if name != "__metadata__"]
    name, key = rng.choice(names), rng.choice(["dtype", "shape", "data_offsets", "all", "metadata"])
    if key == "all":
        described[name] = rng.choice(HEADER_VALUES)
    elif key == "metadata":
        described["__metadata__"]["bochner"] = rng.choice(["", "{}", "[]", "1", "[" * 5000, '{"format": 6}', "NaN"])
    elif key == "dtype" or rng.random() < 0.2:
        described[name][key] = rng.choice(HEADER_VALUES)
    else:
        described[name][key] = [*described[name][key], 1]
        described[name][key][rng.randrange(len(described[name][key]))] = rng.choice(HEADER_VALUES)
        described[name][key] = described[name][key][: rng.choice([None, 2, -1])]
    text = json.dumps(described, separators=(",", ":")).encode()
    return f"{name}: another {key}", sealed(struct.pack("<Q", len(text)) + text + rest)


def forgeries(template: Template, seed: int) -> Iterator[tuple[str, bytes]]:
    """What was changed, and the forged file; without end."""
    rng, parts = random.Random(seed), Parts.of(template.data)
    while True:
        kind = rng.random()
        if kind < 0.6:
            yield _json_forgery(parts, rng)
        elif kind < 0.9:
            yield _tensor_forgery(parts, rng)
        else:
            yield _file_forgery(template.data, rng)


def large_forgeries(made: dict[str, Template]) -> Iterator[tuple[str, str, bytes]]:
    """Kind of model, change and file, for changes that ask for much memory or time."""

    def edit(kind: str, what: str, change: Callable[[Any, dict[str, Tensor]], Any]) -> tuple[str, str, bytes]:
        parts = Parts.of(made[kind].data)
        change(parts.content, parts.tensors)
        return kind, what, parts.data()

    def longest(content: Any, _: Any) -> None:
        content["columns"][3].update(categories=["u", "v" * 2**22], shares=[0.5, 0.5])

    def spread(content: Any, tensors: dict[str, Tensor]) -> None:
        content["mixtures"][0]["spread"] = {"constant": 0.0, "mean_only": True, "lengthscale": 1.0}
        tensors["0.spread.anchors"] = torch.linspace(0, 1, 30_000, dtype=torch.float64)[:, None]
        tensors["0.spread.weights"] = torch.zeros(30_000, dtype=torch.float64)

    for sizes in ([30_000, 30_000], [1] * 100_000):
        yield edit("networks", "hidden layers", lambda c, _, s=sizes: c["parameters"].update(hidden_layer_sizes=s))
        about = {"count": 1, "widths": sizes}
        yield edit("networks", "networks", lambda c, _, n=about: c["mixtures"][0].update(networks=n))
    yield edit("networks", "number of networks", lambda c, _: c["mixtures"][0].update(networks=10**9))
    yield edit("classifier", "type of classes", lambda c, _: c.update(class_type="<U500000000"))
    yield edit("classifier", "samples", lambda c, _: c.update(samples=10**9))
    yield edit("classifier", "one long class", lambda c, _: c.update(classes=["a", "b" * 2**24]))
    yield edit("classifier", "a million classes", lambda c, _: c.update(classes=[f"{n:07d}" for n in range(10**6)]))
    yield edit("two targets", "one long category", longest)
    yield edit("regressor", "many anchors of the spread", spread)
    yield edit("regressor", "nested JSON", lambda c, _: c.update(columns=NESTED))
    header = b'{"__metadata__":{"bochner":"","sha256":"' + ZEROS + b'"}'
    for what, more in (("empty lists", b"[" + b"[]," * 10_000_000 + b"0]"), ("deep lists", b"[" * 30_000_000)):
        text = header + b',"x":' + more + b"}"
        yield "regressor", what, sealed(struct.pack("<Q", len(text)) + text)


def write_sparse(path: Path, size: int) -> None:
    """A file that says it holds one tensor, and takes no room on the disk."""
    described = {"novelty.left": {"dtype": "F64", "shape": [size // 8], "data_offsets": [0, size]}}
    text = json.dumps({"__metadata__": {"bochner": '{"format": 8}', "sha256": ZEROS.decode()}} | described).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)


# ------------------------------------------------------------------ what comes of them


def outcome(path: Path, template: Template) -> str:
    """'refused' or 'right'; else 'crash in load: …', 'crash in predict: …' or 'wrong numbers: …'."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if template.network is not None:
                model: Any = StationaryHead.load(path, template.network)
            else:
                model = load(path, device="cpu").estimator
        except ModelFileError:
            return "refused"
        except Exception as error:
            return f"crash in load: {type(error).__name__}: {error!s:.80}"
        try:
            wrong = _wrong_numbers(model, template)
        except TableError:  # the model was made for another kind of column, and says which
            return "right"
        except ValueError as error:
            # A file whose table is gone is one of an estimator for arrays, which asks for the columns it was fitted to.
            if not hasattr(model, "table_") and str(error).startswith("X lacks the column"):
                return "right"
            return f"crash in predict: ValueError: {error!s:.80}"
        except Exception as error:
            return f"crash in predict: {type(error).__name__}: {error!s:.80}"
    return f"wrong numbers: {wrong}" if wrong else "right"


def _wrong_numbers(model: Any, template: Template) -> str:
    """What is not as it must be among the predictions of the template's rows; '' where all is right."""
    x, rows = template.x, len(template.x)
    score = np.asarray(model.ood_score(x))
    checks = {"score": score.shape == (rows,) and bool(((score >= 0) & (score <= 1)).all())}
    checks["threshold"] = 0 <= (model.threshold if template.network is not None else model.ood_threshold_) <= 1
    if template.network is not None:
        found = model.predict(x)
        if hasattr(found, "probabilities"):
            probability, shape = found.probabilities.numpy(), (rows, 2)
        else:
            probability, shape = None, (rows, 2)
            checks["mean"] = found.mean.shape == shape and bool(found.mean.isfinite().all())
            checks["std"] = found.std.shape == shape and bool((found.std.isfinite() & (found.std > 0)).all())
    elif hasattr(model, "classes_"):
        probability, shape = model.predict_proba(x), (rows, len(model.classes_))
        checks["labels"] = model.predict(x).shape == (rows,)
    else:
        probability, inner = None, getattr(model, "estimator_", model)
        shape = (rows,) if inner._one_target else (rows, len(inner.mixtures_))
        mean, std = model.predict(x, return_std=True)
        checks["mean"] = mean.shape == shape and bool(np.isfinite(mean).all())
        checks["std"] = std.shape == shape and bool((np.isfinite(std) & (std > 0)).all())
        checks["interval"] = bool(np.isfinite(model.predict_interval(x)).all())
        checks["info"] = bool(np.isfinite(np.r_[inner.noise_, inner.prior_std_, inner.log_marginal_likelihood_]).all())
    if probability is not None:
        checks["probability"] = probability.shape == shape and bool(np.allclose(probability.sum(1), 1))
    return ", ".join(name for name, right in checks.items() if not right)
