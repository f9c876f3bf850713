"""Saving and loading of fitted estimators."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bochner.errors import one_of
from bochner.estimators.base import DEVICES
from bochner.storage.container import (
    Json,
    ModelFileError,
    as_json,
    check_key,
    damaged,
    declared,
    on_cpu,
    open_container,
    write_container,
)
from bochner.storage.reading import ESTIMATORS, TABLE_ESTIMATORS, build_estimator, check_values
from bochner.storage.schema import estimator_rules
from bochner.storage.writing import estimator_parts


@dataclass(frozen=True)
class SavedModel:
    """The contents of a model file.

    Attributes:
        estimator: The fitted estimator.
        about: Versions and sizes.
    """

    estimator: Any
    about: Json


def save(path: str | Path, estimator: Any, *, key: bytes | None = None) -> Path:
    """Writes a fitted estimator to a file, as a whole or not at all. The same model gives the same bytes.

    Args:
        path: The file; by custom its name ends in .bochner.
        estimator: A fitted TableRegressor, TableClassifier, StationaryRegressor or StationaryClassifier.
        key: Secret of a signature (HMAC-SHA256), such as ``secrets.token_bytes(32)``; ``load`` then needs the same key.
    """
    check_key(key)
    kinds = [*(kind.__name__ for kind in TABLE_ESTIMATORS.values()), *ESTIMATORS]
    name = type(estimator).__name__
    if name not in kinds or not (hasattr(estimator, "columns_") or hasattr(estimator, "table_")):
        unfitted = " without a fit" if name in kinds else ""
        raise ValueError(
            f"The estimator parameter must be a fitted {' or '.join(kinds)}, got {name}{unfitted} instead."
        )
    try:
        content, tensors = estimator_parts(estimator)
        content, tensors = as_json(content), on_cpu(tensors)
        check_values(estimator_rules(content, declared(tensors)), tensors)
        build_estimator(content, tensors, "cpu")
    except Exception as error:
        raise ValueError(f"This estimator could not be read back, so it is not written ({error}).") from error
    return write_container(Path(path), content, tensors, key)


def load(path: str | Path, *, device: str = "auto", key: bytes | None = None) -> SavedModel:
    """Reads a model. Nothing in the file is run; a file that no ``save`` wrote is refused with a ModelFileError.

    Args:
        path: A file that ``save`` wrote.
        device: Device of the model: "auto" (a GPU where there is one), "cpu" or "cuda".
        key: The key that the file was saved with. A file without a signature is refused where there is a key, and a signed file
            where there is none.
    """
    path = Path(path)
    one_of("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("The device parameter asks for a GPU ('cuda'), but torch sees none; use device='cpu'.")
    with open_container(path, key) as container:
        content = container.content
        if content.get("estimator") == "StationaryHead":
            raise ModelFileError(f"{path} holds a StationaryHead; use StationaryHead.load(path, network).")
        try:
            rules = estimator_rules(content, container.entries)
            tensors = container.read_tensors(key)
            check_values(rules, tensors)
            estimator = build_estimator(content, tensors, device)
        except ModelFileError:
            raise
        except (ValueError, ArithmeticError, RuntimeError) as error:
            if "allocate" in str(error):  # too little memory, which is no fault of the file
                raise
            raise damaged(path, error) from error
    about = {name: content[name] for name in ("format", "bochner", "torch")}
    return SavedModel(estimator, about | {"estimator": type(estimator).__name__, "bytes": container.size})
