"""Loading a data set by name, and the paper's folds."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bochner.datasets.builtin import BUILT_IN
from bochner.datasets.images import IMAGES
from bochner.datasets.tables import TABLES, Arrays, Table, data_folder, is_there
from bochner.errors import unknown_name

NAMES = (*TABLES, *BUILT_IN)  # what `load` reads; images are for `load_images`


@dataclass(frozen=True)
class Dataset:
    """A data set as arrays, in raw units.

    Attributes:
        name: The name it was loaded by.
        x: Inputs, float64 of shape (N, d), not standardised.
        y: Targets, float64 of shape (N,), or labels from 0, int64 of shape (N,).
        classes: Number of classes, None for regression.
        features: Names of the inputs.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    classes: int | None
    features: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """One line about a data set: its size, and where it is ('built in', 'missing', or its file in the data folder)."""

    name: str
    rows: int
    inputs: int
    classes: int | None
    where: str


def check_name(name: str, choices: Sequence[str] = NAMES) -> None:
    """Raises a ValueError with the nearest known name if there is no such data set."""
    if name not in choices:
        raise ValueError(unknown_name("name", name, choices))


def read_table(table: Table, path: Path) -> Arrays:
    """Reads a file and checks its content; a ValueError says in a few words what is wrong."""
    try:
        x, y, features = table.read(path)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except Exception as error:  # csv, gzip, zipfile, zlib, NumPy and SciPy have a dozen ways to refuse a damaged file
        raise ValueError(str(error) or type(error).__name__) from error
    if x.shape != (table.rows, table.inputs) or y.shape != (table.rows,):
        raise ValueError(
            f"it holds {len(x)} rows of {x.shape[-1]} inputs and {len(y)} targets, not {table.rows} of {table.inputs}"
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("it holds NaN or infinite values")
    if table.classes is not None and not np.array_equal(np.unique(y), np.arange(table.classes)):
        raise ValueError(f"it does not hold the {table.classes} classes that it should")
    return x, y, features


def load(name: str, folder: Path | None = None) -> Dataset:
    """Loads a data set.

    Args:
        name: One of `NAMES`.
        folder: Where the files are; by default the folder in the environment variable BOCHNER_DATA, else
            `$XDG_CACHE_HOME/bochner` or `~/.cache/bochner`.

    Raises:
        ValueError: If there is no set of that name, or its file is damaged.
        FileNotFoundError: If its file is not in the folder.
    """
    check_name(name)
    if name in BUILT_IN:
        x, y, features = BUILT_IN[name].make()
        return Dataset(name, x, y, BUILT_IN[name].classes, features)
    table = TABLES[name]
    path = data_folder(folder) / table.file
    if not is_there(path):
        raise FileNotFoundError(
            f"The file {table.file} of the data set '{name}' is not in {path.parent}. "
            f"Run `bochner data fetch {name}`, which says so where OpenML lacks it, or set BOCHNER_DATA to the folder "
            "that holds it."
        )
    try:
        x, y, features = read_table(table, path)
    except ValueError as error:
        raise ValueError(
            f"The file {path} cannot be read as the data set '{name}': {error}. "
            f"Run `bochner data check {name}`; if it is damaged, delete it and fetch or copy it again."
        ) from error
    return Dataset(name, x, y, table.classes, features)


def summaries(folder: Path | None = None) -> list[Summary]:
    """One line about every data set; no file is opened."""

    def where(file: str) -> str:
        return file if is_there(data_folder(folder) / file) else "missing"

    lines = [Summary(name, t.rows, t.inputs, t.classes, where(t.file)) for name, t in TABLES.items()]
    for name, images in IMAGES.items():
        rows = sum(shape[0] for part, shape in images.shapes.items() if part.startswith("x_"))
        inputs = math.prod(images.shapes["x_test"][1:])
        lines.append(Summary(name, rows, inputs, images.classes, where(images.file)))
    return lines + [Summary(name, b.rows, b.inputs, b.classes, "built in") for name, b in BUILT_IN.items()]


def folds(num_rows: int, count: int = 10) -> list[tuple[np.ndarray, np.ndarray]]:
    """The paper's folds: row indices of the training and the test part of each.

    Rows are shuffled as by `random.seed(1); random.shuffle(rows)`. Fold s tests on places s * (N // count) up to
    (s + 1) * (N // count) of that order and trains on all others, in that order; the last N % count rows are
    always training data. The global random state is not touched.
    """
    if not 2 <= count <= num_rows:
        raise ValueError(f"The count parameter must be from 2 to the number of rows, got {count=} and {num_rows=}.")
    rows = list(range(num_rows))
    random.Random(1).shuffle(rows)
    order, size = np.array(rows), num_rows // count
    cuts = [(s * size, (s + 1) * size) for s in range(count)]
    return [(np.concatenate([order[:start], order[stop:]]), order[start:stop].copy()) for start, stop in cuts]
