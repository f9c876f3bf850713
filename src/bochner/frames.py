"""Tables in files: reading CSV and Parquet, and turning columns into numbers in a way that is written down and saved.

Every cell is read as text, so that what a column is does not depend on the piece of the file that is read. Then:

- numbers stay; an empty cell, NA, N/A, NaN or null is missing: the median takes its place, and where some were missing in
  training a further column says which;
- true and false become 1 and 0;
- texts with at most a hundred different values become one column for each; a value that was not seen in training is none of them.

Everything else is an error that says what to do: dates, free text, identifiers, numbers with a word among them or with commas in
them, empty columns, infinite numbers.
"""

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

CATEGORIES = 100
ROWS = 50_000  # read at a time
INDEX = "__index_level_"  # how pandas names an index in a Parquet file
SUFFIXES = (".csv", ".parquet")
TRUTH = {"true": 1.0, "false": 0.0}
ABSENT = ("", "NA", "N/A", "NaN", "nan", "null")


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
        names, rows = [n for n in file.schema_arrow.names if not n.startswith(INDEX)], int(file.metadata.num_rows)
    else:
        names, rows = _check_lines(path)
    if rows == 0:
        raise TableError(f"{path} has column names but no rows.")
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
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
            for mark, name in ((";", "semicolons"), ("\t", "tabs")):
                if len(names) == 1 and mark in names[0]:
                    raise TableError(f"{path} looks separated by {name}; save it with commas.")
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


def read_chunks(path: Path, rows: int | None = None) -> Iterator[tuple[Any, Any]]:
    """A checked table in pieces: as it is (a frame, or an Arrow table for Parquet), and with every cell as text."""
    if path.suffix.lower() == ".parquet":
        yield from _parquet_chunks(path, rows or ROWS)
        return
    options: Any = {"encoding": "utf-8-sig", "dtype": str, "keep_default_na": False, "na_filter": False}
    try:
        pieces: Any
        with pd.read_csv(path, chunksize=rows or ROWS, **options) as pieces:  # pyright: ignore[reportGeneralTypeIssues]
            for frame in pieces:
                yield frame, frame
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise TableError(f"{path} cannot be read as CSV ({str(error).strip()}).") from error


def _parquet_chunks(path: Path, rows: int) -> Iterator[tuple[Any, Any]]:
    import pyarrow as pa

    start = 0
    for batch in _parquet(path).iter_batches(batch_size=rows):
        table = pa.Table.from_batches([batch])
        table = table.select([name for name in table.column_names if not name.startswith(INDEX)])
        # Through Python objects: an integer column with holes stays one of integers.
        columns = {
            name: ["" if v is None or v != v else str(v) for v in table[name].to_pylist()]
            for name in table.column_names
        }
        yield table, pd.DataFrame(columns, index=range(start, start + len(batch)), dtype=str)
        start += len(batch)


def read(path: Path) -> Any:
    """A whole table, checked, with every cell as text."""
    return pd.concat([texts for _, texts in read_chunks(path, rows=look(path)[1])])


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
    return values.str.strip().str.lower().map(TRUTH)


def _numbers(values: Any) -> Any:
    """Numbers, and NaN for what is none."""
    return pd.to_numeric(values.str.strip(), errors="coerce")


def _describe(values: Any, rows: np.ndarray) -> Column:
    """What a column is, from all its values; its median and its categories from the training rows alone."""
    name = str(values.name)
    present = values[~values.isin(ABSENT)]
    train = values.iloc[rows]
    train, missing = train[~train.isin(ABSENT)], bool(train.isin(ABSENT).any())
    if train.empty:
        raise TableError(f"Column '{name}' has no values; leave it out with --drop.")
    if _truth(present).notna().all():
        return Column(name, "boolean", float(_truth(train).mean().round()), missing)
    if (numbers := _numbers(present)).notna().all():
        if not np.isfinite(numbers).all():
            raise TableError(f"Column '{name}' holds infinite numbers; replace them.")
        return Column(name, "number", float(_numbers(train).median()), missing)
    texts = values[values != ""]
    levels = texts.nunique()
    if problem := _not_categories(name, texts, levels):
        raise TableError(problem)
    train = values.iloc[rows]
    return Column(name, "category", 0.0, bool((train == "").any()), tuple(sorted(set(train) - {""})))


def _not_categories(name: str, texts: Any, levels: int) -> str:
    """Why a column of text cannot be used, as precisely as its values allow; empty where it can."""
    remedy = "; leave it out with --drop, or group its values."
    numbers = _numbers(texts[~texts.isin(ABSENT)])
    if numbers.notna().mean() > 0.8:
        bad = numbers[numbers.isna()]
        first = bad.index[0]
        return (
            f"Column '{name}' holds numbers and {len(bad)} entries that are not, the first in row {first + 1}: "
            f"'{texts[first]}'; correct or empty them."
        )
    if _numbers(texts.str.replace(",", "")).notna().mean() > 0.8:
        return f"Column '{name}' holds numbers with commas in them, such as '{texts.iloc[0]}'; write them without."
    if levels > 1 and pd.to_datetime(texts.head(50), errors="coerce", format="ISO8601").notna().all():
        example = texts.iloc[0]
        return f"Column '{name}' holds dates ('{example}'); turn them into numbers (days since a start) or drop it with --drop."
    if levels > CATEGORIES:
        return f"Column '{name}' holds {levels} different texts, more than {CATEGORIES}{remedy}"
    if levels > max(10, len(texts) / 2):
        return f"Column '{name}' holds {levels} different texts in {len(texts)} rows: names or identifiers{remedy}"
    return ""


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
    def fit(cls, frame: Any, target: str, dropped: tuple[str, ...], rows: np.ndarray) -> "Encoder":
        """Looks at a table of text: at all of it to tell what each column is, and at the given rows to learn from."""
        if target in dropped:
            raise TableError(f"The target '{target}' cannot be dropped.")
        used = [name for name in frame.columns if name != target and name not in dropped]
        if not used:
            raise TableError(f"There is no column to predict '{target}' from.")
        return cls(tuple(_describe(frame[name], rows) for name in used), target, dropped)

    @property
    def names(self) -> list[str]:
        """Names of the numbers, in order."""
        return [name for column in self.columns for name in column.names()]

    def check_columns(self, names: list[str], where: Path) -> None:
        """Raises a TableError for columns that are missing or unknown; their order does not matter."""
        used, there = [column.name for column in self.columns], set(names)
        known = {*used, self.target, *self.dropped}
        missing, extra = [name for name in used if name not in there], [name for name in names if name not in known]
        if missing:
            hint = f" It has {_quoted(extra)}, which the model does not know." if extra else ""
            raise TableError(f"{where} lacks the column {_quoted(missing)} that the model was fitted with.{hint}")
        if extra:
            raise TableError(f"{where} has the column {_quoted(extra)} that the model was not fitted with; remove it.")

    def transform(self, frame: Any) -> np.ndarray:
        """Numbers, (n, d), from a table of text."""
        return np.column_stack([self._values(column, frame[column.name]) for column in self.columns])

    def filled(self, frame: Any) -> int:
        """Cells that are missing in columns that were complete in training: the median stands in, and nothing says so."""
        complete = [column for column in self.columns if not column.missing and column.kind != "category"]
        return sum(int(frame[column.name].isin(ABSENT).sum()) for column in complete)

    def _values(self, column: Column, values: Any) -> np.ndarray:
        if column.kind == "category":
            texts = values.to_numpy(dtype=object)
            parts, absent = [texts == category for category in column.categories], texts == ""
        else:
            absent = values.isin(ABSENT).to_numpy()
            numbers = _truth(values) if column.kind == "boolean" else _numbers(values)
            bad = numbers.isna().to_numpy() & ~absent
            if bad.any():
                at = int(bad.argmax())
                kind = "a boolean" if column.kind == "boolean" else "a number"
                where = f"Column '{column.name}', row {values.index[at] + 1}"
                raise TableError(f"{where}: '{values.iloc[at]}' is not {kind}, as it was in training.")
            if not np.isfinite(numbers.dropna()).all():
                raise TableError(f"Column '{column.name}' holds infinite numbers; replace them.")
            parts = [numbers.fillna(column.fill).to_numpy(dtype=float)]
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
    found = _numbers(values)
    if found.isna().any():
        first = values[found.isna()].iloc[0]
        raise TableError(f"The target '{target}' holds text, such as '{first}'; regression needs plain numbers.")
    if not np.isfinite(found).all():
        raise TableError(f"The target '{target}' holds infinite numbers; replace them or remove those rows.")
    return found.to_numpy(dtype=float)


def check_complete(values: Any, target: str) -> None:
    """Raises a TableError where a target is missing. A class may be called NA; a number may not."""
    absent = values.isin(ABSENT) if _numbers(values).notna().mean() > 0.5 else values == ""
    if absent.any():
        first = int(absent.to_numpy().argmax()) + 1
        raise TableError(
            f"The target '{target}' is missing in {int(absent.sum())} rows, the first is row {first}; remove those rows."
        )


def check_target(frame: Any, target: str, task: str) -> tuple[np.ndarray, str]:
    """The target's values and the task: "regression" or "classification"."""
    values: Any = frame[target]
    check_complete(values, target)
    distinct, numeric = values.nunique(), bool(_numbers(values).notna().all())
    if distinct < 2:
        raise TableError(
            f"The target '{target}' has the same value in every row ('{values.iloc[0]}'); there is nothing to learn."
        )
    if task == "auto":
        task = "regression" if numeric and distinct > 2 else "classification"
    if task == "regression":
        return numbers(values, target), task
    if not numeric and (problem := _not_categories(target, values, distinct)).count("numbers"):
        raise TableError(f"The target: {problem}")
    if distinct > min(CATEGORIES, len(values) / 2):
        raise TableError(
            f"The target '{target}' has {distinct} different values in {len(values)} rows, too many for classes; a regression?"
        )
    return values.to_numpy(dtype=str), task
