"""Fitted estimators on disk: one safetensors file with JSON in its header. Loading reads numbers and names; it never runs code.

The header carries the version of the format and a SHA-256 of the whole file (computed with zeros in its own place), so that
damage is found before anything is used. What the file says is then checked against what such a model must look like: names, types,
sizes that follow from each other, finite numbers. Like any Gaussian process a model holds training rows: the anchors of its heads.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor, nn

import bochner
from bochner.estimators import Settings, StationaryClassifier, StationaryRegressor
from bochner.estimators.classification import ClassMixture
from bochner.estimators.columns import Column, Columns
from bochner.estimators.novelty import Novelty
from bochner.estimators.regression import RegressionMixture
from bochner.estimators.spread import Spread
from bochner.estimators.targets import TargetMap
from bochner.files import write_bytes
from bochner.members.extractors import Extractors, make_extractor, scaled
from bochner.members.features import KernelFeatures
from bochner.members.heads import GaussianHead, SoftmaxHead
from bochner.members.member import Member
from bochner.networks import Intervals
from bochner.posteriors.closed_form import Statistics
from bochner.priors.spectra import RBF, Exponential, Matern
from bochner.tables.estimators import TableClassifier, TableRegressor
from bochner.tables.table import Table
from bochner.tables.targets import Target

FORMAT = 6
ESTIMATORS: dict[str, Any] = {"StationaryRegressor": StationaryRegressor, "StationaryClassifier": StationaryClassifier}
TABLE_ESTIMATORS: dict[str, Any] = {"StationaryRegressor": TableRegressor, "StationaryClassifier": TableClassifier}
SPECTRA: dict[str, Any] = {"RBF": RBF, "Matern": Matern, "Exponential": Exponential}
UNSIGNED = b"0" * 64

Tensors = dict[str, Tensor]
Json = dict[str, Any]


class ModelFileError(ValueError):
    """A file that is not a model, or not one that can be trusted or read."""


@dataclass(frozen=True)
class SavedModel:
    """What a file holds.

    Attributes:
        estimator: The fitted estimator.
        about: Versions and sizes.
    """

    estimator: Any
    about: Json


# ------------------------------------------------------------------ to a file


def save(path: str | Path, estimator: Any) -> Path:
    """Writes a fitted estimator to a file, as a whole or not at all.

    Args:
        path: Where to; by custom it ends in .bochner.
        estimator: A fitted TableRegressor, TableClassifier, StationaryRegressor or StationaryClassifier.
    """
    kinds = [*(kind.__name__ for kind in TABLE_ESTIMATORS.values()), *ESTIMATORS]
    name = type(estimator).__name__
    if name not in kinds or not (hasattr(estimator, "columns_") or hasattr(estimator, "table_")):
        unfitted = " without a fit" if name in kinds else ""
        raise ValueError(
            f"The estimator parameter must be a fitted {' or '.join(kinds)}, got {name}{unfitted} instead."
        )
    table = None
    if hasattr(estimator, "table_"):
        table = {
            "columns": estimator.table_.to_json(),
            "target": estimator.target_.to_json(),
            "drop": list(estimator.drop),
        }
        estimator = estimator.estimator_
    content, tensors = _content_of(estimator)
    content["table"] = table
    path = Path(path)
    # NumPy's numbers, which a grid search puts into parameters, are written as plain ones.
    text = json.dumps(content, allow_nan=False, default=lambda value: value.item())
    kept = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    try:
        _restore(json.loads(text), kept, "cpu")
    except Exception as error:
        raise ValueError(f"This estimator could not be read back, so it is not written ({error}).") from error
    return _write(path, text, kept)


def _write(path: Path, text: str, tensors: Tensors) -> Path:
    """A file of tensors and JSON, with its checksum."""
    data = serialise(tensors, metadata={"bochner": text, "sha256": UNSIGNED.decode()})
    digest = hashlib.sha256(data).hexdigest().encode()
    write_bytes(path, data.replace(b'"sha256":"' + UNSIGNED, b'"sha256":"' + digest, 1))
    return path


def write_sealed(path: Path, kind: str, content: Json, tensors: Tensors) -> Path:
    """Writes a model of another kind than the estimators, as a whole or not at all."""
    versions = {"format": FORMAT, "bochner": bochner.__version__, "torch": torch.__version__, "estimator": kind}
    text = json.dumps(content | versions, allow_nan=False)
    return _write(path, text, {name: t.detach().cpu().contiguous() for name, t in tensors.items()})


def read_sealed(path: Path, kind: str) -> tuple[Json, Tensors]:
    """Reads it back, after a look at its checksum and version."""
    data = _read(path)
    content = _content(path, data)
    if content["estimator"] != kind:
        raise ModelFileError(f"{path} holds a {content['estimator']}, not a {kind}.")
    tensors = parse(data)
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ModelFileError(f"{path} does not hold what a model must hold: {name} is not finite.")
    return content, tensors


def _read(path: Path) -> bytes:
    if not path.is_file():
        kind = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise ModelFileError(f"{path} {kind}; give the file that 'bochner fit' or bochner.storage.save wrote.")
    return path.read_bytes()


def _content_of(estimator: Any) -> tuple[Json, Tensors]:
    """Everything that describes a fitted estimator: JSON and tensors."""
    seed = estimator.random_state
    parameters = estimator.get_params(deep=False) | {
        "kernel": _kernel_to_json(estimator.kernel),
        "hidden_layer_sizes": list(estimator.hidden_layer_sizes),
        "random_state": int(seed) if isinstance(seed, Integral) else None,
        "settings": None if estimator.settings is None else dataclasses.asdict(estimator.settings),
    }
    classes = isinstance(estimator, StationaryClassifier)
    described, tensors = [], {}
    for number, mixture in enumerate(estimator.mixtures_):
        own, more = _mixture_to_parts(mixture)
        described.append(own)
        tensors |= {f"{number}.{name}": value for name, value in more.items()}
    novelty = estimator.novelty_
    tensors |= {"novelty.factor": _packed(novelty.factor)}
    tensors |= {"novelty.left": novelty.left, "novelty.leverage": novelty.leverage}
    content: Json = {
        "format": FORMAT,
        "bochner": bochner.__version__,
        "torch": str(torch.__version__),
        "estimator": type(estimator).__name__,
        "parameters": parameters,
        "ood_threshold": estimator.ood_threshold_,
        "features": int(estimator.n_features_in_),
        "feature_names": list(estimator.feature_names_in_) if hasattr(estimator, "feature_names_in_") else None,
        "columns": [dataclasses.asdict(column) for column in estimator.columns_.columns],
        "unseen": estimator.columns_.unseen,
        "mixtures": described,
    }
    if classes:
        content["classes"], content["class_type"] = estimator.classes_.tolist(), estimator.classes_.dtype.str
    else:
        content["one_target"] = bool(estimator._one_target)
    return content, tensors


def _kernel_to_json(kernel: Any) -> Any:
    if isinstance(kernel, tuple | list):
        return [_kernel_to_json(own) for own in kernel]
    if isinstance(kernel, str):
        return kernel
    fields = {f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel) if f.init}
    return {"type": type(kernel).__name__, **fields}


def _mixture_to_parts(mixture: Any) -> tuple[Json, Tensors]:
    """A mixture as JSON and tensors."""
    members, tensors = [], {}
    for number, member in enumerate(mixture.members):
        features = member.head.features
        about: Json = {
            "weight": member.weight,
            "network": member.network,
            "kernel": _kernel_to_json(features.spectrum),
            "amplitude": member.head.amplitude,
        }
        own = {"lengthscale": features.lengthscale, "anchors": features.anchors}
        if isinstance(member.head, GaussianHead):
            sums = member.head.sums
            about |= {"noise": member.head.noise, "square": float(sums.square), "total": sums.count}
            about["map"] = {k: v for k, v in dataclasses.asdict(member.map).items() if v not in (math.inf, -math.inf)}
            own |= {"gram": _packed(sums.gram), "projection": sums.projection}
        else:
            about["averaging"] = member.head.averaging
            own |= {"gram": _packed(member.head.gram), "weights": member.head.weights}
        members.append(about)
        tensors |= {f"member{number}.{name}": value for name, value in own.items()}
    content: Json = {"members": members, "networks": 0}
    if mixture.extractors is not None:
        content["networks"] = len(mixture.extractors.modules)
        for number, module in enumerate(mixture.extractors.modules):
            tensors |= {f"network{number}.{name}": value for name, value in module.state_dict().items()}
    if isinstance(mixture, RegressionMixture):
        spread = mixture.spread
        content["spread"] = {"constant": spread.constant, "mean_only": spread.mean_only}
        if spread.features is not None and spread.weights is not None:
            content["spread"]["lengthscale"] = float(spread.features.lengthscale[0])
            tensors |= {"spread.anchors": spread.features.anchors, "spread.weights": spread.weights}
    return content, tensors


def _packed(matrix: Tensor) -> Tensor:
    """The lower triangle of a symmetric matrix, row by row."""
    return matrix[tuple(torch.tril_indices(len(matrix), len(matrix)))]


# ------------------------------------------------------------------ from a file


def load(path: str | Path, *, device: str = "auto") -> SavedModel:
    """Reads a model. Nothing in the file is run; a file that is not as it was written is refused with a ModelFileError.

    Args:
        path: A file that ``save`` wrote.
        device: Where to compute: "auto" (a GPU where there is one), "cpu" or "cuda".
    """
    path = Path(path)
    data = _read(path)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("The device parameter asks for a GPU ('cuda'), but torch sees none; use device='cpu'.")
    try:
        content = _content(path, data)
        estimator = _restore(content, parse(data), device)
    except ModelFileError:
        raise
    except Exception as error:
        raise ModelFileError(
            f"{path} does not hold what a model must hold ({type(error).__name__}: {error}); save it again."
        ) from error
    about = {name: content[name] for name in ("format", "bochner", "torch", "estimator")}
    about["estimator"] = type(estimator).__name__
    return SavedModel(estimator, about | {"bytes": len(data)})


def _content(path: Path, data: bytes) -> Json:
    """The JSON of a file whose digest is right."""
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size] if 8 + size <= len(data) else b""
    found = re.findall(rb'"sha256":"([0-9a-f]{64})"', header)
    if len(found) != 1:
        raise ModelFileError(
            f"{path} is not a model of bochner, or it was cut short; save the model again, or fetch the file again."
        )
    at = data.index(b'"sha256":"' + found[0]) + len(b'"sha256":"')
    digest = hashlib.sha256(data[:at] + UNSIGNED + data[at + 64 :]).hexdigest()
    if digest.encode() != found[0]:
        raise ModelFileError(f"{path} is damaged or was edited: its checksum does not match; fetch or save it again.")
    content = json.loads(json.loads(header)["__metadata__"]["bochner"])
    if content["format"] != FORMAT:
        raise ModelFileError(
            f"{path} has format {content['format']}, and this bochner ({bochner.__version__}) reads format {FORMAT}; it was "
            f"written by bochner {content['bochner']}: use that version."
        )
    return content


def _check(right: bool, what: str) -> None:
    if not right:
        raise ValueError(what)


def _number(value: Any, what: str, *, positive: bool = False) -> float:
    """A finite number."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _check(good and (value > 0 or not positive), f"{what} is {value!r}")
    return float(value)


def _restore(content: Json, tensors: Tensors, device: str) -> Any:
    """The estimator that a checked file describes."""
    for name, value in tensors.items():
        _check(not value.is_floating_point() or bool(torch.isfinite(value).all()), f"{name} is not finite")
    parameters: Json = dict(content["parameters"]) | {"device": device}
    parameters["kernel"] = _kernel_from_json(parameters["kernel"])
    parameters["hidden_layer_sizes"] = tuple(parameters["hidden_layer_sizes"])
    if parameters["settings"] is not None:
        parameters["settings"] = Settings(**parameters["settings"])
    estimator = ESTIMATORS[content["estimator"]](**parameters)
    estimator.check_parameters()
    estimator.columns_ = _restore_columns(content)
    estimator.n_features_in_ = len(estimator.columns_.columns)
    if (names := content["feature_names"]) is not None:
        _check(
            len(names) == estimator.n_features_in_ and all(isinstance(n, str) for n in names), "the names of columns"
        )
        estimator.feature_names_in_ = np.array(names, dtype=object)
    estimator.ood_threshold_ = _number(content["ood_threshold"], "ood_threshold")
    place = torch.device(estimator._device())
    held = {name: value.to(place) for name, value in tensors.items()}
    estimator.novelty_ = _restore_novelty(held, len(estimator.columns_.group))
    latent = 1
    if isinstance(estimator, StationaryClassifier):
        estimator.classes_ = _restore_classes(content)
        latent = 1 if len(estimator.classes_) == 2 else len(estimator.classes_)
    mixtures = []
    for number, about in enumerate(content["mixtures"]):
        own = {name.partition(".")[2]: t for name, t in held.items() if name.partition(".")[0] == str(number)}
        mixtures.append(_restore_mixture(about, own, estimator, latent))
    estimator.mixtures_ = mixtures
    if isinstance(estimator, StationaryClassifier):
        _check(len(mixtures) == 1, "there must be one mixture")
    else:
        estimator._one_target = bool(content["one_target"])
        _check(len(mixtures) == 1 or (len(mixtures) > 1 and not estimator._one_target), "the number of targets")
        estimator._describe()
    return estimator if content["table"] is None else _restore_table(content["table"], estimator)


def _restore_table(about: Json, estimator: Any) -> Any:
    """The estimator for tables around the one that learns from numbers and categories."""
    table, target, drop = Table.from_json(about["columns"]), Target.from_json(about["target"]), about["drop"]
    _check(isinstance(drop, list) and all(isinstance(name, str) for name in drop), "the columns to leave out")
    kind = TABLE_ESTIMATORS[type(estimator).__name__]
    _check(target.task == kind._task, "the target does not fit the estimator")
    _check(table.outputs == list(getattr(estimator, "feature_names_in_", [])), "the columns do not fit the estimator")
    found = kind(**estimator.get_params(deep=False), drop=tuple(drop))
    found.table_, found.target_, found.estimator_ = table, target, estimator
    found.n_features_in_ = len(table.columns)
    return found


def _kernel_from_json(kernel: Any) -> Any:
    if isinstance(kernel, list):
        return tuple(_kernel_from_json(own) for own in kernel)
    if isinstance(kernel, str):
        return kernel
    return SPECTRA[kernel["type"]](**{k: v for k, v in kernel.items() if k != "type"})


def _restore_columns(content: Json) -> Columns:
    columns = []
    for about in content["columns"]:
        column = Column(**(about | {"shares": tuple(about["shares"])}))
        for value, what in ((column.mean, "mean"), (column.missing, "share of missing values")):
            _number(value, f"the {what} of column {column.name}")
        _number(column.scale, f"the scale of column {column.name}", positive=True)
        if column.categories is not None:
            texts = tuple(column.categories)
            _check(all(isinstance(c, str) for c in texts) and list(texts) == sorted(set(texts)), "categories")
            shares = tuple(_number(s, "the share of a category") for s in column.shares)
            _check(len(shares) == len(texts) > 0, "categories and their shares differ in number")
            column = dataclasses.replace(column, categories=texts, shares=shares)
        columns.append(column)
    _check(0 < len(columns) == content["features"], "the number of columns")
    return Columns(tuple(columns), _number(content["unseen"], "unseen", positive=True))


def _restore_classes(content: Json) -> np.ndarray:
    labels, kind = content["classes"], np.dtype(content["class_type"] if len(content["class_type"]) < 20 else "O").kind
    _check(isinstance(labels, list) and len(labels) >= 2 and kind in "biufUO", "the classes")
    classes = np.array(labels, dtype=object if kind == "O" else None)
    if kind in "biuf":
        classes = classes.astype(np.dtype(content["class_type"]))
    _check(classes.ndim == 1 and len(np.unique(classes)) == len(classes), "the classes are not different")
    return classes


def _restore_mixture(about: Json, tensors: Tensors, estimator: Any, latent: int) -> Any:
    """A mixture, from tensors whose shapes must follow from each other."""
    columns: Columns = estimator.columns_
    group = columns.group
    extractors = _restore_networks(about["networks"], tensors, estimator)
    deep = 0
    if extractors is not None:
        deep = int(estimator.hidden_layer_sizes[-1]) + len(group)
    members = []
    for number, own in enumerate(about["members"]):
        network = own["network"]
        _check(
            network is None or (extractors is not None and network in range(about["networks"])), "a network is missing"
        )
        held = {k.partition(".")[2]: t for k, t in tensors.items() if k.partition(".")[0] == f"member{number}"}
        inputs = len(group) if network is None else deep
        head, target_map = _restore_head(own, held, inputs, latent, isinstance(estimator, StationaryClassifier))
        members.append(Member(_number(own["weight"], "a weight", positive=True), head, network, target_map))
    _check(0.999 < sum(member.weight for member in members) < 1.001, "the weights do not add up to 1")
    nobody = np.zeros(0), torch.zeros(0, dtype=torch.int64)  # the rows that judged are not kept
    if isinstance(estimator, StationaryClassifier):
        return ClassMixture(members, extractors, *nobody)
    return RegressionMixture(members, extractors, _restore_spread(about["spread"], tensors, len(group)), *nobody)


def _restore_head(about: Json, tensors: Tensors, inputs: int, latent: int, classes: bool) -> tuple[Any, Any]:
    """A head and, for regression, the map of its target."""
    anchors, lengthscale, packed = tensors["anchors"], tensors["lengthscale"], tensors["gram"]
    outputs = tensors["weights" if classes else "projection"]
    size = len(anchors)
    shapes = [(anchors, (size, inputs)), (lengthscale, (inputs,)), (packed, (size * (size + 1) // 2,))]
    for value, shape in [*shapes, (outputs, (size, latent))]:
        _check(value.dtype == torch.float64 and tuple(value.shape) == shape and size > 0, "a head's sizes do not agree")
    _check(bool((lengthscale > 0).all()), "a lengthscale is not positive")
    features = KernelFeatures(_kernel_from_json(about["kernel"]), lengthscale, anchors)
    lower = _unpacked(packed, size)
    gram = lower + lower.tril(-1).mT
    amplitude = _number(about["amplitude"], "an amplitude", positive=True)
    if classes:
        averaging = _number(about["averaging"], "the averaging")
        _check(0 <= averaging <= 1, "the averaging is not a share")
        return SoftmaxHead(features, gram, amplitude, outputs, averaging), None
    noise = _number(about["noise"], "a noise", positive=True)
    square = torch.tensor(_number(about["square"], "a sum"), dtype=torch.float64, device=gram.device)
    sums = Statistics(gram, outputs, square, _number(about["total"], "a sum", positive=True))
    return GaussianHead(features, sums, amplitude, noise), _restore_map(about["map"])


def _restore_map(about: Json) -> TargetMap:
    _check(about["kind"] in ("identity", "log", "power"), f"the map {about['kind']!r} is not known")
    numbers = {name: _number(value, f"{name} of the map") for name, value in about.items() if name != "kind"}
    found = TargetMap(about["kind"], **numbers)
    _check(found.scale > 0 and found.spread > 0 and 0 <= found.power <= 2, "the map's numbers")
    return found


def _unpacked(packed: Tensor, size: int) -> Tensor:
    """A lower triangle from its entries, row by row."""
    matrix = torch.zeros(size, size, dtype=torch.float64, device=packed.device)
    matrix[tuple(torch.tril_indices(size, size))] = packed
    return matrix


def _restore_novelty(tensors: Tensors, inputs: int) -> Novelty:
    packed, left, leverage = (tensors[f"novelty.{name}"] for name in ("factor", "left", "leverage"))
    right = tuple(packed.shape) == ((inputs + 1) * (inputs + 2) // 2,) and left.ndim == leverage.ndim == 1
    _check(right and len(left) > 0 < len(leverage), "the sizes of the score")
    _check(bool((left.diff() >= 0).all()) and bool((leverage.diff() >= 0).all()), "the score's values are not sorted")
    factor = _unpacked(packed, inputs + 1)
    _check(bool((factor.diagonal() > 0).all()), "the score's factor")
    return Novelty(factor, left, leverage)


def _restore_spread(about: Json, tensors: Tensors, inputs: int) -> Spread:
    constant, mean_only = _number(about["constant"], "the spread"), bool(about["mean_only"])
    if "spread.anchors" not in tensors:
        return Spread(constant)
    anchors, weights = tensors["spread.anchors"], tensors["spread.weights"]
    width = 1 if mean_only else inputs + 1
    _check(
        tuple(anchors.shape) == (len(weights), width) and weights.ndim == 1 and len(weights) > 0, "the spread's sizes"
    )
    lengthscale = torch.full_like(anchors[0], _number(about["lengthscale"], "the spread's lengthscale", positive=True))
    return Spread(constant, KernelFeatures(RBF(), lengthscale, anchors), weights, mean_only)


def _restore_networks(count: int, tensors: Tensors, estimator: Any) -> Extractors | None:
    """Networks whose sizes are those of the tensors in the file."""
    _check(isinstance(count, int) and not isinstance(count, bool) and count >= 0, "the number of networks")
    if count == 0:
        return None
    columns: Columns = estimator.columns_
    hidden = tuple(int(size) for size in estimator.hidden_layer_sizes)
    modules: list[nn.Module] = []
    for number in range(count):
        state = {k.partition(".")[2]: t for k, t in tensors.items() if k.partition(".")[0] == f"network{number}"}
        intervals = _restore_intervals(state, columns.plain)
        widths = [columns.plain + len(intervals.column), *hidden]
        layers = sorted((n for n in state if re.fullmatch(r"1\.\d+\.weight", n)), key=lambda n: int(n.split(".")[1]))
        shapes = [tuple(state[name].shape) for name in layers]
        _check(shapes == [(b, a) for a, b in itertools.pairwise(widths)], "a network's sizes do not agree")
        generator = torch.Generator().manual_seed(0)
        lengthscale = state["2.lengthscale"]
        _check(lengthscale.numel() == 1 and bool((lengthscale > 0).all()), "a network's lengthscale")
        module = scaled(make_extractor(intervals, columns.plain, hidden, generator), torch.ones_like(lengthscale))
        module.load_state_dict(state)
        modules.append(module.to(lengthscale.device).eval().requires_grad_(False))
    return Extractors(modules, columns.plain, len(columns.columns), hidden[-1])


def _restore_intervals(state: Tensors, inputs: int) -> Intervals:
    column, left, width = (state[f"0.{name}"] for name in ("column", "left", "width"))
    whole = column.dtype == torch.int64 and column.ndim == 1 and bool(((column >= 0) & (column < inputs)).all())
    right = whole and column.shape == left.shape == width.shape and bool((width > 0).all())
    _check(right, "the intervals do not agree with the columns")
    return Intervals(column, left, width)
