"""Columns: what each one is, in words that a user reads and in plain data that a model file keeps, and what its cells say.

A column becomes one or more columns of numbers, or one of categories, which is what the estimators of ``bochner.estimators`` take:
these scale numbers, and know missing values and categories that they have never seen.
"""

import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from bochner.tables import cells, dates
from bochner.tables.cells import as_text, plain_form

READABLE_SHARE = 0.8  # share of cells that must be numbers, dates or times for a column to be of these
UNREADABLE_SHARE = 0.5  # share of cells that cannot be read above which a column is not what it was taken for
RARE = "other values"  # the category of all rare ones
KINDS = ("number", "truth", "date", "time", "category", "text", "dropped")
# Inputs beside the days: their names in pandas.
DATE_PARTS = {"month": "month", "weekday": "day_of_week", "hour": "hour"}
# How a column of numbers, dates or times may be written.
STYLES = frozenset({"", cells.AMOUNTS}) | dates.STYLES
WORD = re.compile(r"[^\W\d_]{3,}")  # a word of a text: three letters or more
UNIT_SOMETIMES = "cells without"  # of the note of a column of numbers some of which had no unit in training


@dataclass(frozen=True)
class Column:
    """What a column is and how its cells are read.

    Attributes:
        name: Its name in the table.
        kind: One of KINDS.
        note: What was done with it, for the user.
        decimal: Decimal sign of numbers.
        unit: Currency or unit of numbers.
        style: Format of dates or times; of numbers AMOUNTS of ``cells``, or "".
        first: The first date.
        parts: What dates become ("days", "month", "weekday", "hour"), or the frequent words of a text.
        levels: Categories that are not rare.
        rare: Share of cells in rare categories, which count as one; 0 where there are none.
        missing: Whether cells were missing in training.
    """

    name: str
    kind: str
    note: str
    decimal: str = "."
    unit: str = ""
    style: str = ""
    first: str = ""
    parts: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    rare: float = 0.0
    missing: bool = False

    @property
    def outputs(self) -> list[str]:
        """Names of the columns that it becomes."""
        if self.kind == "date":
            return [f"{self.name} ({part})" for part in self.parts]
        if self.kind == "text":
            return [f"{self.name} (words)", *(f"{self.name} has '{word}'" for word in self.parts)]
        return [] if self.kind == "dropped" else [self.name]

    @classmethod
    def from_json(cls, content: Any) -> "Column":
        """A column from the plain data of a model file; a ValueError unless every field is of its type."""
        known: dict[str, Any] = dict(content) if isinstance(content, dict) else {}
        if set(known) != {field.name for field in fields(cls)}:
            raise ValueError("a column is not described")
        texts = ("name", "kind", "note", "decimal", "unit", "style", "first")
        lists = [known["parts"], known["levels"]]
        good = all(isinstance(known[key], str) for key in texts)
        good = good and all(
            isinstance(texts, list | tuple) and all(isinstance(v, str) for v in texts) for texts in lists
        )
        good = good and isinstance(known["missing"], bool) and isinstance(known["rare"], float | int)
        good = good and known["kind"] in KINDS and known["decimal"] in (".", ",") and known["style"] in STYLES
        if good and known["kind"] == "date":
            first = pd.to_datetime(known["first"], errors="coerce")
            good = not pd.isna(first) and len(lists[0]) > 0 and set(lists[0]) <= {"days", *DATE_PARTS}
        if not good:
            raise ValueError(f"the column {known['name']!r:.60} is not as it must be")
        known |= {"parts": tuple(lists[0]), "levels": tuple(lists[1]), "rare": float(known["rare"])}
        return cls(**known)


def as_cells(series: Any) -> Any:
    """A column as numbers or dates where its type says so, else as an array of texts."""
    if isinstance(series.dtype, pd.CategoricalDtype):
        return np.array([as_text(value) for value in series.astype(object)], dtype=object)
    if pd.api.types.is_timedelta64_dtype(series.dtype):
        return series.dt.total_seconds().to_numpy(dtype=float) / 3600  # hours
    if pd.api.types.is_bool_dtype(series.dtype):
        return np.array(["" if pd.isna(value) else str(bool(value)) for value in series], dtype=object)
    if pd.api.types.is_numeric_dtype(series.dtype) and not pd.api.types.is_complex_dtype(series.dtype):
        values = series.to_numpy(dtype=float, na_value=np.nan)
        return np.where(np.isfinite(values), values, np.nan)
    if pd.api.types.is_datetime64_any_dtype(series.dtype):
        return pd.DatetimeIndex(series.dt.tz_localize(None))  # a weekday is that of the place
    # Far quicker than one by one. The check of missing cells is ours: of pandas' own type for text, "string" says nothing of them.
    if pd.api.types.infer_dtype(series, skipna=False) == "string" and not series.hasnans:
        return series.to_numpy(dtype=object)
    return np.array([as_text(value) for value in series], dtype=object)


def is_text(values: Any) -> bool:
    """Whether cells from ``as_cells`` are texts."""
    return not isinstance(values, pd.DatetimeIndex) and values.dtype == object


def votes_of(values: Any, known: bool = False) -> cells.Votes:
    """What a column's cells, from ``as_cells``, say about the decimal sign; ``known`` where they are known to be numbers."""
    return cells.decimal_votes(values, READABLE_SHARE, known) if is_text(values) else cells.Votes()


def changed_units(column: Column, values: Any) -> tuple[str | None, int]:
    """A unit of a column of numbers that training did not have, and the number of cells that lack the unit of training.

    The second is 0 where some cells lacked it in training too.
    """
    if column.kind != "number" or isinstance(values, pd.DatetimeIndex):
        return None, 0
    always = bool(column.unit) and UNIT_SOMETIMES not in column.note
    if not is_text(values):
        return None, int(np.isfinite(values).sum()) if always else 0
    counts = cells.count_units(values, column.decimal, column.style == cells.AMOUNTS)
    known = ("", cells.unit_key(column.unit))
    strange = next((unit for unit in counts if cells.unit_key(unit) not in known), None)
    return strange, counts[""] if always else 0


def holds_lists(series: Any) -> bool:
    """Whether cells of a column are lists, arrays or records, which are no single value."""
    if series.dtype != object or pd.api.types.infer_dtype(series, skipna=True) != "mixed":
        return False
    return any(map(pd.api.types.is_list_like, series))


def missing_words(values: np.ndarray) -> frozenset[str]:
    """Words for 'missing' in a column of text: beside '+', '-' is an answer."""
    return cells.MISSING_WORDS - {"-"} if (values == "+").any() else cells.MISSING_WORDS


# ------------------------------------------------------------------ what its cells say


@dataclass
class Read:
    """The cells of a column as numbers or categories.

    Attributes:
        values: The columns that it becomes, by name: floats, or texts with None where they are missing.
        absent: Cells without a value.
        unreadable: Cells with a value that cannot be read as what the column is.
    """

    values: dict[str, np.ndarray]
    absent: np.ndarray
    unreadable: np.ndarray


def read_column(column: Column, values: Any) -> Read:
    """Reads the cells of a column, from ``as_cells``, as what it was understood to be."""
    words = cells.MISSING_NUMBERS if column.kind in ("number", "date", "time", "truth") else cells.MISSING_WORDS
    if isinstance(values, pd.DatetimeIndex):
        absent = np.asarray(values.isna())
    elif values.dtype == object:
        answers = column.levels if column.kind == "category" else ("-",) * ("-" not in missing_words(values))
        absent = cells.is_missing(values, words - frozenset(answers))
    else:
        absent = np.isnan(values)
    if column.kind == "date":
        dates = _read_date(column, values)
        parts = _date_parts(column, dates)
        return Read(dict(zip(column.outputs, parts, strict=True)), absent, np.asarray(dates.isna()) & ~absent)
    if column.kind in ("category", "text"):
        return Read(_read_texts(column, _as_text_array(values), absent), absent, np.zeros(len(values), dtype=bool))
    numbers = _read_number(column, values)
    return Read({column.name: np.where(absent, np.nan, numbers)}, absent, np.isnan(numbers) & ~absent)


def _read_number(column: Column, values: Any) -> np.ndarray:
    if isinstance(values, pd.DatetimeIndex):
        return np.full(len(values), np.nan)
    if values.dtype != object:
        return values.astype(float)
    if column.kind == "time":
        return dates.read_times(values, column.style)
    if column.kind == "truth":
        truths = cells.read_truths(values)
        numbers = cells.read_numbers(values, column.decimal)  # 1 and 0 are as good as yes and no
        return np.where(np.isnan(truths) & np.isin(numbers, (0.0, 1.0)), numbers, truths)
    return cells.read_numbers(values, column.decimal, column.style == cells.AMOUNTS)


def _read_date(column: Column, values: Any) -> pd.DatetimeIndex:
    if isinstance(values, pd.DatetimeIndex):
        return values
    return dates.read_dates(_as_text_array(values), column.style or "ISO8601")


def _date_parts(column: Column, dates: pd.DatetimeIndex) -> list[np.ndarray]:
    days = np.asarray((dates - pd.Timestamp(column.first)) / pd.Timedelta(days=1), dtype=float)
    parts = {part: getattr(dates, name) for part, name in DATE_PARTS.items()} | {"days": days}
    return [np.asarray(parts[part], dtype=float) for part in column.parts]


def _as_text_array(values: Any) -> np.ndarray:
    """Cells as texts; whole numbers without '.0', as in a file."""
    if isinstance(values, pd.DatetimeIndex):
        return np.array([as_text(value) for value in pd.Series(values)], dtype=object)
    if values.dtype != object:
        texts = [str(int(value)) if value.is_integer() else as_text(value) for value in values.tolist()]
        return np.array(texts, dtype=object)
    return values


def _read_texts(column: Column, texts: np.ndarray, absent: np.ndarray) -> dict[str, np.ndarray]:
    if column.kind == "text":
        count = np.array([len(text.split()) for text in texts], dtype=float)
        words = [set(WORD.findall(text.casefold())) for text in texts]
        flags = [np.array([word in row for row in words], dtype=float) for word in column.parts]
        parts = [np.where(absent, np.nan, part) for part in (count, *flags)]
        return dict(zip(column.outputs, parts, strict=True))
    known = frozenset(column.levels)

    def read(text: str) -> str:
        level = plain_form(text).casefold()
        return level if level in known or not column.rare else RARE

    levels = cells.once_each(texts, read)
    levels[absent] = None
    return {column.name: levels}
