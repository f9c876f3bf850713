"""Verifying the files of data sets."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bochner.datasets.builtin import BUILT_IN
from bochner.datasets.images import IMAGES, image_sum, read_images
from bochner.datasets.loading import NAMES, check_name, read_table
from bochner.datasets.tables import TABLES, data_folder, is_there


@dataclass(frozen=True)
class Check:
    """The result of checking one data set.

    Attributes:
        name: The data set.
        status: 'ok' for the very data the paper's numbers rest on; 'differs' for a file that `fetch` wrote and that
            is whole, but whose rows, order or coding are not the known ones; 'bad', 'missing' and 'built in'.
        message: The status as a sentence.
    """

    name: str
    status: Literal["ok", "differs", "bad", "missing", "built in"]
    message: str


def content_sum(x: np.ndarray, y: np.ndarray) -> str:
    """SHA-256 of a data set's arrays, whatever file they came from and whatever the machine's byte order."""
    digest = hashlib.sha256(repr(x.shape).encode())
    # Adding zero turns -0.0 into 0.0: equal numbers must have equal sums.
    digest.update(np.ascontiguousarray(x + 0.0, dtype="<f8").data)
    digest.update(np.ascontiguousarray(y + 0, dtype="<f8" if y.dtype.kind == "f" else "<i8").data)
    return digest.hexdigest()


def file_sum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sum_path(path: Path) -> Path:
    """The small file beside a fetched one that holds its SHA-256, in the format of `sha256sum`."""
    return path.with_name(f"{path.name}.sha256")


def _is_as_fetched(path: Path, digest: str) -> bool:
    """Whether a file still has the sum that `fetch` noted."""
    sum_file = sum_path(path)
    return sum_file.is_file() and sum_file.read_text(errors="replace").split()[:1] == [digest]


def _check_images(name: str, path: Path) -> Check:
    """As `check`, for a set of images: its arrays are what counts, not how they are packed."""
    if not is_there(path):
        return Check(name, "missing", f"{path.name} is not in {path.parent}")
    try:
        same = image_sum(read_images(name, path)) == IMAGES[name].content
    except ValueError as error:
        return Check(name, "bad", f"{path} is damaged: {error}; delete it and copy it again")
    if same:
        return Check(name, "ok", str(path))
    return Check(name, "bad", f"{path} does not hold the known images, so some of it has changed; copy it again")


def check(name: str, folder: Path | None = None) -> Check:
    """Verifies a data set's file: its bytes, shapes and values.

    A file is good if its bytes are the known ones and, where they may be packed differently (covtype), if the loaded
    arrays are. A file that `fetch` wrote must have the bytes that it wrote.
    """
    check_name(name, (*NAMES, *IMAGES))
    if name in IMAGES:
        return _check_images(name, data_folder(folder) / IMAGES[name].file)
    if name in BUILT_IN:
        return Check(name, "built in", "needs no file")
    table, path = TABLES[name], data_folder(folder) / TABLES[name].file
    if not is_there(path):
        return Check(name, "missing", f"{table.file} is not in {path.parent}")
    remedy = f"delete it and run `bochner data fetch {name}`, or copy it again"
    try:
        digest = file_sum(path)
        fetched = _is_as_fetched(path, digest)
        x, y, _ = read_table(table, path)
    except (ValueError, OSError) as error:
        return Check(name, "bad", f"{path} is damaged: {error}; {remedy}")
    same = content_sum(x, y) == table.content
    if same and (fetched or table.sha256 in (None, digest)):
        return Check(name, "ok", str(path))
    if fetched:
        return Check(name, "differs", f"{path} is as fetched, but its rows, order or coding are not the paper's")
    return Check(name, "bad", f"{path} does not have the known SHA-256, so some of it has changed; {remedy}")
