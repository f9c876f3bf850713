"""Fitted estimators on disk: one safetensors file with JSON in its header. Loading reads numbers and names; it never runs code.

The header carries the version of the format and a SHA-256 of the whole file (computed with zeros in its own place), so that
damage is found before anything is used. What the file says is then checked against what such a model must look like. Sums over
the training rows are stored and, for networks with hidden layers, up to 17 values of every column; never the rows.
"""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

import bochner
from bochner import activations
from bochner.committee import Member
from bochner.estimator_base import TRAINED_WIDTH
from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.files import write_bytes
from bochner.likelihoods import Categorical, Gaussian
from bochner.models import Model
from bochner.networks import Intervals
from bochner.posteriors.closed_form import ClosedForm, Statistics
from bochner.posteriors.closed_form_classifier import ClosedFormClassifier
from bochner.posteriors.laplace import Laplace
from bochner.spectra import RBF, Exponential, Matern

FORMAT = 3
ESTIMATORS: dict[str, Any] = {"StationaryRegressor": StationaryRegressor, "StationaryClassifier": StationaryClassifier}
SPECTRA: dict[str, Any] = {"RBF": RBF, "Matern": Matern, "Exponential": Exponential}
NUMBERS = ("amplitude_", "ood_threshold_", "y_mean_", "y_scale_")
UNSIGNED = b"0" * 64


class ModelFileError(ValueError):
    """A file that is not a model, or not one that can be trusted or read."""


@dataclass(frozen=True)
class SavedModel:
    """What a file holds.

    Attributes:
        estimator: The fitted estimator.
        table: How a table becomes its inputs, where it was fitted from the command line; JSON.
        about: Versions and sizes.
    """

    estimator: Any
    table: dict[str, Any] | None
    about: dict[str, Any]


def _kernel_to_json(kernel: Any) -> Any:
    if isinstance(kernel, tuple | list):
        return [_kernel_to_json(own) for own in kernel]
    if isinstance(kernel, str):
        return kernel
    return {"type": type(kernel).__name__, **dataclasses.asdict(kernel)}  # pyright: ignore[reportArgumentType]


def _kernel_from_json(kernel: Any) -> Any:
    if isinstance(kernel, list):
        return tuple(_kernel_from_json(own) for own in kernel)
    if isinstance(kernel, str):
        return kernel
    options = {k: v for k, v in kernel.items() if k != "type"}
    return SPECTRA[kernel["type"]](**options)


def save(path: str | Path, estimator: Any, *, table: dict[str, Any] | None = None) -> Path:
    """Writes a fitted estimator to a file, as a whole or not at all.

    Args:
        path: Where to; by custom it ends in .bochner.
        estimator: A fitted StationaryRegressor or StationaryClassifier.
        table: JSON that comes back with the model.
    """
    if type(estimator).__name__ not in ESTIMATORS or not hasattr(estimator, "members_"):
        raise ValueError(
            f"The estimator parameter must be a fitted {' or '.join(ESTIMATORS)}, got {type(estimator).__name__}"
            f"{' without a fit' if type(estimator).__name__ in ESTIMATORS else ''} instead."
        )
    parameters = estimator.get_params() | {
        "kernel": _kernel_to_json(estimator.kernel),
        "activation": activations.resolve(estimator.activation).name,
        "hidden": list(estimator.hidden),
        "random_state": int(estimator.random_state) if isinstance(estimator.random_state, Integral) else None,
    }
    statistics = estimator.statistics_
    streams = isinstance(estimator.members_[0].posterior, ClosedForm)  # then its sums are those of its first network
    tensors = {} if streams else _sums_to_tensors(statistics)
    tensors |= {"x_mean": torch.from_numpy(estimator.x_mean_), "x_scale": torch.from_numpy(estimator.x_scale_)}
    members = []
    for number, member in enumerate(estimator.members_):
        kernel = _kernel_to_json(member.model.layer.spectrum)
        members.append({"weight": member.weight, "group": member.group, "kernel": kernel})
        found, more = _member_to_tensors(member)
        tensors |= {f"{number}.{name}": value for name, value in found.items()}
        members[-1] |= more
    content: dict[str, Any] = {
        "format": FORMAT,
        "bochner": bochner.__version__,
        "torch": str(torch.__version__),
        "estimator": type(estimator).__name__,
        "parameters": parameters,
        "numbers": {name: getattr(estimator, name) for name in NUMBERS if hasattr(estimator, name)},
        "rows": statistics.count,
        "feature_names": list(estimator.feature_names_in_) if hasattr(estimator, "feature_names_in_") else None,
        "table": table,
        "members": members,
    }
    if isinstance(estimator, StationaryClassifier):
        content["classes"] = estimator.classes_.tolist()
        content["class_type"] = estimator.classes_.dtype.str
    path = Path(path)
    # NumPy's numbers, which a grid search puts into parameters, are written as plain ones.
    text = json.dumps(content, allow_nan=False, default=lambda value: value.item())
    kept = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    try:
        _restore(json.loads(text), kept, "cpu")
    except Exception as error:
        raise ValueError(f"This estimator could not be read back, so it is not written ({error}).") from error
    data = serialise(kept, metadata={"bochner": text, "sha256": UNSIGNED.decode()})
    digest = hashlib.sha256(data).hexdigest().encode()
    write_bytes(path, data.replace(b'"sha256":"' + UNSIGNED, b'"sha256":"' + digest, 1))
    return path


def _sums_to_tensors(sums: Statistics) -> dict[str, Tensor]:
    return {"gram": sums.gram, "projection": sums.projection, "square": sums.square.reshape(1)}


def _member_to_tensors(member: Member) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The numbers of a network and its posterior, and what else there is to know of the latter."""
    posterior = member.posterior
    tensors = {f"model.{name}": value for name, value in member.model.state_dict().items()}
    if isinstance(posterior, ClosedForm):
        return tensors | _sums_to_tensors(posterior.statistics), {"amplitude": posterior.amplitude}
    if isinstance(posterior, ClosedFormClassifier):
        own = {"mean": posterior.mean, "factor": posterior.factor}
        return tensors | own, {"draws": {"samples": posterior.samples, "seed": posterior.seed}}
    own = {f"laplace.{i}.{j}": t for i, part in enumerate(posterior.state) for j, t in enumerate(part)}
    return tensors | own, {}


def _content(path: Path, data: bytes) -> dict[str, Any]:
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


def load(path: str | Path, *, device: str = "auto") -> SavedModel:
    """Reads a model. Nothing in the file is run; a file that is not as it was written is refused with a ModelFileError.

    Args:
        path: A file that ``save`` wrote.
        device: Where to compute: "auto" (a GPU where there is one), "cpu" or "cuda".
    """
    path = Path(path)
    if not path.is_file():
        kind = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise ModelFileError(f"{path} {kind}; give the file that 'bochner fit' or bochner.storage.save wrote.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("The device parameter asks for a GPU ('cuda'), but torch sees none; use device='cpu'.")
    data = path.read_bytes()
    try:
        content = _content(path, data)
        tensors = parse(data)
        estimator = _restore(content, tensors, device)
    except ModelFileError:
        raise
    except Exception as error:
        raise ModelFileError(
            f"{path} does not hold what a model must hold ({type(error).__name__}: {error}); save it again."
        ) from error
    about = {name: content[name] for name in ("format", "bochner", "torch", "estimator", "rows")}
    return SavedModel(estimator, content["table"], about | {"bytes": len(data)})


def _restore(content: dict[str, Any], tensors: dict[str, Tensor], device: str) -> Any:
    """The estimator that a checked file describes."""
    parameters = content["parameters"] | {"kernel": _kernel_from_json(content["parameters"]["kernel"])}
    parameters |= {"hidden": tuple(parameters["hidden"]), "device": device}
    estimator = ESTIMATORS[content["estimator"]](**parameters)
    estimator._check_parameters()
    for name, value in content["numbers"].items():
        if name not in NUMBERS or not isinstance(value, float):
            raise ValueError(f"unknown number {name}")
        setattr(estimator, name, value)
    estimator.x_mean_, estimator.x_scale_ = tensors["x_mean"].numpy(), tensors["x_scale"].numpy()
    estimator.n_features_in_ = len(estimator.x_mean_)
    if content["feature_names"] is not None:
        estimator.feature_names_in_ = np.array(content["feature_names"], dtype=object)
    classes = 1
    if "classes" in content:
        estimator.classes_ = np.array(content["classes"], dtype=np.dtype(content["class_type"]))
        classes = len(estimator.classes_)
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} is not finite")
    device = estimator._device()
    held = {name: value.to(device) for name, value in tensors.items()}
    estimator.members_ = []
    for number, about in enumerate(content["members"]):
        own = {name.partition(".")[2]: t for name, t in held.items() if name.partition(".")[0] == str(number)}
        estimator.members_.append(_restore_member(estimator, about, own, classes, content["rows"]))
    weights = [member.weight for member in estimator.members_]
    if not 0.999 < sum(weights) < 1.001 or min(weights) <= 0:
        raise ValueError("the weights are not positive, or do not add up to 1")
    estimator.model_ = estimator.members_[0].model
    if not isinstance(estimator.members_[0].posterior, ClosedForm):
        estimator.statistics_ = _sums(estimator.model_, held, content["rows"])
    estimator._describe()
    estimator._factorise()
    return estimator


def _sums(model: Model, tensors: dict[str, Tensor], rows: int) -> Statistics:
    width = model.layer.out_features
    if tensors["gram"].shape != (width, width) or len(tensors["projection"]) != width:
        raise ValueError("the width does not agree with the sums")
    return Statistics(tensors["gram"], tensors["projection"], tensors["square"][0], rows)


def _restore_intervals(state: dict[str, Tensor], columns: int) -> Intervals:
    column, left, width = (state[f"extractor.0.{name}"] for name in ("column", "left", "width"))
    whole = column.dtype == torch.int64 and column.ndim == 1 and bool(((column >= 0) & (column < columns)).all())
    if not whole or column.shape != left.shape or column.shape != width.shape or not bool((width > 0).all()):
        raise ValueError("the intervals do not agree with the columns")
    return Intervals(column, left, width)


def _restore_member(
    estimator: Any, about: dict[str, Any], tensors: dict[str, Tensor], classes: int, rows: int
) -> Member:
    """A network and its posterior, from tensors whose shapes must agree with the parameters."""
    state = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    beside = _restore_intervals(state, estimator.n_features_in_) if "extractor.0.column" in state else None
    width = int(estimator.width)
    if beside is not None and estimator.posterior == "closed_form":
        width = min(width, TRAINED_WIDTH)
    outputs = activations.resolve(estimator.activation).outputs
    if len(state["layer.weight"]) != width // outputs:
        raise ValueError("the width does not agree with the weights")
    likelihood = Categorical() if classes > 1 else Gaussian()
    options = {"kernel": _kernel_from_json(about["kernel"]), "width": width}
    options["lengthscale"] = torch.ones_like(state["layer.log_lengthscale"])
    model = estimator._network(estimator.n_features_in_, classes, likelihood, 0, beside, **options)
    model.load_state_dict(state)
    model.eval()
    if estimator.posterior == "laplace":
        x = torch.zeros(2, estimator.n_features_in_, dtype=torch.float64, device=model.layer.weight.device)
        y = torch.arange(2, device=x.device) if classes > 1 else x[:, :1]
        posterior: Any = Laplace(model, x, y)
        posterior.state = [
            tuple(tensors[f"laplace.{i}.{j}"] for j in range(len(part))) for i, part in enumerate(posterior.state)
        ]
    elif classes > 1:
        options = {**about["draws"], "classes": classes}
        posterior = ClosedFormClassifier.from_moments(model, tensors["mean"], tensors["factor"], **options)
    else:
        posterior = ClosedForm.from_statistics(model, _sums(model, tensors, rows), amplitude=about["amplitude"])
    return Member(model, posterior, float(about["weight"]), int(about["group"]))
