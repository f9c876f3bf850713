"""Tables in files: reading CSV and Parquet, and turning columns into numbers in a way that is written down and saved.

- numbers stay; where some are missing in training, the median takes their place and a column says which;
- booleans become 0 and 1;
- texts with at most a hundred different values become one column for each; a value that was not seen in training is none of them.

Everything else is an error that says what to do: dates, free text, identifiers, empty columns, infinite numbers.
"""

import csv
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bochner.activations import unknown

CATEGORIES = 100
ROWS = 50_000  # read at a time
SUFFIXES = (".csv", ".parquet")
TRUTH = {"true": 1.0, "false": 0.0}


class TableError(ValueError):
    """A table that cannot be used, with the cause and the remedy."""


# ------------------------------------------------------------------ reading


def check_file(path: Path) -> None:
    """Raises a TableError unless the path is a readable file of a known kind."""
    if path.is_dir():
        raise TableError(f"{path} is a folder; give a file that ends in {' or '.join(SUFFIXES)}.")
    if not path.exists():
        raise TableError(f"{path} does not exist; check the name and the folder.")
    if path.suffix.lower() not in SUFFIXES:
        raise TableError(f"{path} must end in {' or '.join(SUFFIXES)}; convert or rename it.")
    if path.stat().st_size == 0:
        raise TableError(f"{path} is empty; it needs a line of column names and at least one row.")


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise TableError(
            f"Reading {path} needs pyarrow: install bochner with the extra 'parquet', or use CSV."
        ) from error
    try:
        return pq.ParquetFile(path)
    except Exception as error:
        raise TableError(f"{path} is not a Parquet file that can be read ({error}).") from error


def look(path: Path) -> tuple[list[str], int]:
    """Names of the columns and the number of rows, after a look at every line of a CSV file for the right number of fields."""
    check_file(path)
    if path.suffix.lower() == ".parquet":
        file = _parquet(path)
        names, rows = list(file.schema_arrow.names), int(file.metadata.num_rows)
    else:
        names, rows = _check_lines(path)
    if rows == 0:
        raise TableError(f"{path} has column names but no rows.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TableError(f"{path} has more than one column named {_quoted(twice)}; rename or remove the others.")
    blank = [i for i, name in enumerate(names, start=1) if not str(name).strip()]
    if blank:
        raise TableError(f"{path} has no name for column {blank[0]}; give it one in the first line.")
    return names, rows


def _check_lines(path: Path) -> tuple[list[str], int]:
    with path.open("rb") as file:
        while block := file.read(2**20):
            if b"\0" in block:
                raise TableError(f"{path} is not a CSV file (it holds null bytes).")
    rows = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            names = next(reader, [])
            if len(names) == 1 and ";" in names[0]:
                raise TableError(f"{path} looks separated by semicolons; save it with commas.")
            for row in reader:
                if row and len(row) != len(names):
                    raise TableError(
                        f"{path}, line {reader.line_num}: {len(row)} fields where the first line names {len(names)}; "
                        "correct that line."
                    )
                rows += bool(row)
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not UTF-8 text (byte {error.start}: {error.reason}); save it as UTF-8.") from error
    except csv.Error as error:
        raise TableError(f"{path} is not a CSV file ({error}).") from error
    return names, rows


def read_chunks(path: Path, texts: tuple[str, ...] = (), rows: int | None = None) -> Iterator[Any]:
    """A checked table in pieces; the columns in ``texts`` are read as text, whatever a piece of them looks like."""
    rows = rows or ROWS
    if path.suffix.lower() == ".parquet":
        for batch in _parquet(path).iter_batches(batch_size=rows):
            yield batch.to_pandas()
        return
    options: Any = {"encoding": "utf-8-sig", "low_memory": False, "dtype": dict.fromkeys(texts, str)}
    try:
        yield from pd.read_csv(path, chunksize=rows, **options)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise TableError(f"{path} cannot be read as CSV ({str(error).strip()}).") from error


def read(path: Path) -> Any:
    """A whole table, checked."""
    return next(iter(read_chunks(path, rows=look(path)[1])))


def _quoted(names: Any) -> str:
    shown = [f"'{name}'" for name in list(names)[:5]]
    return ", ".join(shown) + (" …" if len(list(names)) > 5 else "")


# ------------------------------------------------------------------ columns to numbers


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Attributes:
        name: Its name.
        kind: "number", "boolean" or "category".
        fill: What takes the place of a missing number.
        missing: Whether a column says where values were missing.
        categories: The texts that get a column of their own.
    """

    name: str
    kind: str
    fill: float = 0.0
    missing: bool = False
    categories: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Names of the numbers it becomes."""
        own = [f"{self.name} = {c}" for c in self.categories] if self.kind == "category" else [self.name]
        return own + ([f"{self.name} is missing"] if self.missing else [])


def _truth(values: Any) -> Any:
    """Booleans as 0 and 1, and NaN for what is neither."""
    return values.astype(str).str.lower().map(TRUTH)


def _describe(values: Any) -> Column:
    """What a column is, from its training values."""
    name, present = str(values.name), values.dropna()
    missing = len(present) < len(values)
    if present.empty:
        raise TableError(f"Column '{name}' has no values; leave it out with --drop.")
    if pd.api.types.is_bool_dtype(present) or bool(_truth(present).notna().all()):
        return Column(name, "boolean", float(_truth(present).mean().round()), missing)
    if pd.api.types.is_numeric_dtype(present):
        numbers = present.astype(float)
        if not np.isfinite(numbers).all():
            raise TableError(f"Column '{name}' holds infinite numbers; replace them.")
        return Column(name, "number", float(numbers.median()), missing)
    if pd.api.types.is_datetime64_any_dtype(present):
        raise TableError(_dates(name, present.iloc[0]))
    texts = present.astype(str)
    levels = texts.value_counts()
    if len(levels) > CATEGORIES:
        raise TableError(_too_many(name, texts, len(levels)))
    return Column(name, "category", 0.0, missing, tuple(sorted(levels.index)))


def _dates(name: str, example: object) -> str:
    return f"Column '{name}' holds dates ('{example}'); turn them into numbers (days since a start) or leave it out with --drop."


def _too_many(name: str, texts: Any, levels: int) -> str:
    """Why a column of text cannot be used, as precisely as its values allow."""
    numbers: Any = pd.to_numeric(texts, errors="coerce")
    if numbers.notna().mean() > 0.8:
        bad = texts[numbers.isna()]
        return (
            f"Column '{name}' holds numbers and {len(bad)} entries that are not, the first in row {bad.index[0] + 1}: "
            f"'{bad.iloc[0]}'; correct or empty them."
        )
    if pd.to_datetime(texts.head(50), errors="coerce", format="ISO8601").notna().all():
        return _dates(name, texts.iloc[0])
    return f"Column '{name}' holds {levels} different texts, more than {CATEGORIES}; leave it out with --drop, or group them."


@dataclass(frozen=True)
class Encoder:
    """How a table becomes numbers: learnt from the training table, saved with the model.

    Attributes:
        columns: What is used, in the order of the training table.
        target: The column that is predicted.
        dropped: Columns that were there and are not used.
    """

    columns: tuple[Column, ...]
    target: str
    dropped: tuple[str, ...] = ()

    @classmethod
    def fit(cls, frame: Any, target: str, dropped: tuple[str, ...] = ()) -> "Encoder":
        """Looks at a training table."""
        for name in (target, *dropped):
            if name not in frame.columns:
                raise TableError(unknown("target" if name == target else "drop", name, map(str, frame.columns)))
        if target in dropped:
            raise TableError(f"The target '{target}' cannot be dropped.")
        used = [name for name in frame.columns if name != target and name not in dropped]
        if not used:
            raise TableError(f"There is no column to predict '{target}' from.")
        return cls(tuple(_describe(frame[name]) for name in used), target, dropped)

    @property
    def names(self) -> list[str]:
        """Names of the numbers, in order."""
        return [name for column in self.columns for name in column.names()]

    def check_columns(self, names: list[str], where: Path) -> None:
        """Raises a TableError for columns that are missing or unknown; their order does not matter."""
        used = [column.name for column in self.columns]
        missing = [name for name in used if name not in names]
        extra = [name for name in names if name not in (*used, self.target, *self.dropped)]
        if missing:
            hint = f" It has {_quoted(extra)}, which the model does not know." if extra else ""
            raise TableError(f"{where} lacks the column {_quoted(missing)} that the model was fitted with.{hint}")
        if extra:
            raise TableError(f"{where} has the column {_quoted(extra)} that the model was not fitted with; remove it.")

    def transform(self, frame: Any) -> np.ndarray:
        """Numbers, (n, d)."""
        return np.column_stack([self._numbers(column, frame[column.name]) for column in self.columns])

    def _numbers(self, column: Column, values: Any) -> np.ndarray:
        absent = values.isna().to_numpy()
        if column.kind == "category":
            texts = values.astype(str).to_numpy()
            parts = [(texts == category) & ~absent for category in column.categories]
        else:
            numbers: Any = _truth(values) if column.kind == "boolean" else pd.to_numeric(values, errors="coerce")
            bad = numbers.isna().to_numpy() & ~absent
            if bad.any():
                at = int(bad.argmax())
                kind = "a boolean" if column.kind == "boolean" else "a number"
                raise TableError(
                    f"Column '{column.name}', row {values.index[at] + 1}: '{values.iloc[at]}' is not {kind}, as it was in training."
                )
            if not np.isfinite(numbers.dropna().astype(float)).all():
                raise TableError(f"Column '{column.name}' holds infinite numbers; replace them.")
            parts = [numbers.astype(float).fillna(column.fill).to_numpy()]
        return np.column_stack([*parts, *([absent] if column.missing else [])]).astype(float)

    def to_json(self) -> dict[str, Any]:
        """For the model file."""
        return {"columns": [asdict(c) for c in self.columns], "target": self.target, "dropped": list(self.dropped)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Encoder":
        """From the model file."""
        columns = tuple(Column(**{**c, "categories": tuple(c["categories"])}) for c in content["columns"])
        return cls(columns, content["target"], tuple(content["dropped"]))


def numbers(values: Any, target: str) -> np.ndarray:
    """A target's values as finite numbers."""
    if not pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values):
        raise TableError(f"The target '{target}' holds text, such as '{values.iloc[0]}'; regression needs numbers.")
    found = values.to_numpy(dtype=float)
    if not np.isfinite(found).all():
        raise TableError(f"The target '{target}' holds infinite numbers; replace them or remove those rows.")
    return found


def check_target(frame: Any, target: str, task: str) -> tuple[np.ndarray, str]:
    """The target's values and the task: "regression" or "classification"."""
    values: Any = frame[target]
    absent = values.isna()
    if absent.any():
        raise TableError(
            f"The target '{target}' is missing in {int(absent.sum())} rows, the first is row "
            f"{int(absent.to_numpy().argmax()) + 1}; remove those rows."
        )
    distinct, numeric = (
        values.nunique(),
        pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values),
    )
    if distinct < 2:
        raise TableError(
            f"The target '{target}' has the same value in every row ('{values.iloc[0]}'); there is nothing to learn."
        )
    if task == "auto":
        task = "regression" if numeric and distinct > 2 else "classification"
    if task == "regression":
        return numbers(values, target), task
    if distinct > CATEGORIES:
        raise TableError(
            f"The target '{target}' has {distinct} different values, more than {CATEGORIES} classes; is it a regression?"
        )
    return values.astype(str).to_numpy(dtype=str), task
