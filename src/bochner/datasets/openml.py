"""Downloading data sets from OpenML into the same plain files that `load` reads."""

import csv
import gzip
import hashlib
import io
import tempfile
import warnings
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from bochner.datasets.builtin import BUILT_IN
from bochner.datasets.checks import Check, check, sum_path
from bochner.datasets.images import IMAGES
from bochner.datasets.loading import NAMES, check_name, read_table
from bochner.datasets.tables import AIRFOIL, CELLS, TABLES, Table, data_folder
from bochner.files import write_bytes, write_text

# The number of each set on OpenML. Its banana set (1460) has 5,300 other points: the paper's 400 are not there.
IDS = {
    "boston": 531,
    "concrete": 44959,
    "airfoil": 44957,
    "elevators": 216,
    "diabetes": 37,
    "adult": 1590,
    "connect-4": 40668,
    "covtype": 1596,
}

# Columns of our files, in OpenML's order, the target last.
COLUMNS: dict[str, Sequence[str]] = {
    "boston": "crim zn indus chas nox rm age dis rad tax ptratio black lstat medv".split(),
    "concrete": (
        *("cement", "furnace_slag", "fly_ash", "water", "super_plasticizer"),
        *("coarse_agg", "fine_agg", "age", "compressive_strength"),
    ),
    "airfoil": (*AIRFOIL, "Sound"),
    "adult": (
        *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
        *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
    ),
    "connect-4": (*CELLS, "class"),
}
DIABETES_CLASSES = {"tested_negative": "0", "tested_positive": "1"}
CONNECT4_CELLS = {"0": "b", "1": "o", "2": "x"}
CONNECT4_CLASSES = {"0": "draw", "1": "loss", "2": "win"}


def _download(number: int) -> Any:
    """A set as OpenML sends it. This parser needs no pandas."""
    from sklearn import datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one for each attempt that failed; the error that follows says it
        return datasets.fetch_openml(data_id=number, as_frame=False, parser="liac-arff", cache=False, n_retries=1)


def _text(value: object) -> str:
    """A cell as our files write it: whole numbers without a point, a missing value as a question mark."""
    if isinstance(value, float | np.floating):
        number = float(value)
        return "?" if np.isnan(number) else str(int(number)) if number.is_integer() else repr(number)
    return "?" if value is None else str(value).strip()


def _cells(bunch: Any) -> list[list[str]]:
    """The rows of a download as texts, the target last, with names instead of their codes."""
    columns = []
    for index, name in enumerate(bunch.feature_names):
        values, known = bunch.data[:, index], (bunch.categories or {}).get(name)
        if known is not None:
            values = [known[int(v)] if v >= 0 else None for v in values]  # a missing name is NaN or -1
        columns.append([_text(value) for value in values])
    columns.append([_text(value) for value in bunch.target])
    return [list(row) for row in zip(*columns, strict=True)]


def _numbers(bunch: Any) -> np.ndarray:
    """The rows of a download as numbers, without a detour through text: covtype has 32 million cells."""
    columns = []
    for index, name in enumerate(bunch.feature_names):
        values, known = bunch.data[:, index], (bunch.categories or {}).get(name)
        columns.append(values if known is None else np.array(known, dtype=np.float64)[values.astype(np.int64)])
    return np.stack([*columns, np.asarray(bunch.target).astype(np.float64)], axis=1)


def _csv(rows: list[list[str]], header: Sequence[str] | None) -> bytes:
    """Rows as the bytes of a CSV file."""
    if header and len(rows[0]) != len(header):
        raise ValueError(f"it has {len(rows[0])} columns, not {len(header)}")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows] if header else rows)
    return text.getvalue().encode()


def _encode(name: str, bunch: Any) -> bytes:
    """The bytes of the file that `load` reads."""
    file = io.BytesIO()
    if name == "covtype":
        data = _numbers(bunch).astype(np.int16)
        np.savez_compressed(file, x=data[:, :-1], y=data[:, -1].astype(np.int8))
        return file.getvalue()
    if name == "elevators":
        from scipy.io import savemat

        data = _numbers(bunch)
        savemat(file, {"data": data - data.mean(axis=0)}, do_compression=True)  # centred, as the paper's file is
        return file.getvalue()
    rows = _cells(bunch)
    if name == "diabetes":
        rows = [[*row[:-1], DIABETES_CLASSES.get(row[-1], row[-1])] for row in rows]
    if name == "connect-4":
        rows = [[CONNECT4_CELLS.get(c, c) for c in row[:-1]] + [CONNECT4_CLASSES.get(row[-1], row[-1])] for row in rows]
    data = _csv(rows, COLUMNS.get(name))
    return gzip.compress(data, mtime=0) if TABLES[name].file.endswith(".gz") else data


def _verify(table: Table, data: bytes) -> None:
    """Raises a ValueError unless the bytes are a file of a data set that can be read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, table.file)
        path.write_bytes(data)
        read_table(table, path)


def _write(path: Path, data: bytes) -> None:
    """Writes a file and the note of its checksum."""
    try:
        write_bytes(path, data)
        write_text(sum_path(path), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n")
    except OSError as error:
        raise OSError(f"The folder {path.parent} cannot be written to ({error.strerror or error}).") from error


def fetch(name: str, folder: Path | None = None) -> Check:
    """Downloads a data set from OpenML into the data folder, and checks it; a good file is left alone.

    OpenML's copies may have other rows, another order or another coding than the paper's files; the check then says
    'differs'.

    Raises:
        ValueError: If there is no such set, OpenML does not have it, or what came is not that set.
        OSError: If OpenML cannot be reached or the folder cannot be written to.
    """
    check_name(name, (*NAMES, *IMAGES))
    result = check(name, folder)
    if name in BUILT_IN or result.status in ("ok", "differs"):
        return result
    path = data_folder(folder) / {**TABLES, **IMAGES}[name].file
    by_hand = f"put {path.name} into {path.parent} by hand, or set BOCHNER_DATA to a folder that has it"
    if name not in IDS:
        raise ValueError(f"The data set '{name}' is not fetched from OpenML; {by_hand}.")
    table = TABLES[name]
    try:
        bunch = _download(IDS[name])
    except (OSError, ValueError, HTTPException) as error:
        raise ConnectionError(
            f"The data set '{name}' could not be fetched from OpenML ({error}). Check the connection, or {by_hand}."
        ) from error
    try:
        data = _encode(name, bunch)
        _verify(table, data)
    except ValueError as error:
        raise ValueError(f"What OpenML sent is not the data set '{name}': {error}; {by_hand}.") from error
    _write(path, data)
    return check(name, folder)
