"""The target: whether it is a number or a class, how its cells are read, and which spellings are one class.

One rule holds for labels. Labels are equal where their text is, without blanks around it and with single blanks within; é is one
letter however it is written. Labels that are numbers are equal where the numbers are: '1', '1.0' and '1e0' are one class. All words
for yes are one class where every label is a word for yes or no. Nothing else is merged: 'a' and 'A' are two classes. The note of a
target says which labels were merged.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from bochner.errors import listed
from bochner.tables import cells
from bochner.tables.cells import as_text, plain_form
from bochner.tables.columns import UNREADABLE_SHARE, Column, as_cells, changed_units, is_text, read_column, votes_of
from bochner.tables.errors import TableError
from bochner.tables.understanding import FEW_LEVELS, ROW_NUMBERS, understand

MAX_CLASSES = 100
FAR_FACTOR = 50  # times that the largest target may be as large as the next one before a note asks whether it is one
MIN_SIZE = 1e-100  # of the largest target of a regression: the squares of smaller ones vanish
MAX_MERGERS_SHOWN = 5  # classes of several spellings that a note lists
# Remarks on a column that say nothing of a target, whose missing and unreadable cells make bad rows.
MISSING_REMARKS = re.compile(r"; \d+ (?:cells that are none, such as '.*', count as )?missing", re.DOTALL)


@dataclass(frozen=True)
class Target:
    """The column that is predicted.

    Attributes:
        name: Its name.
        task: "regression" or "classification".
        column: How its cells are read; for classes of yes and no ``levels`` holds the two labels.
        note: What it was taken for, for the user.
    """

    name: str
    task: str
    column: Column
    note: str

    @classmethod
    def learn(cls, name: str, values: Any, task: str = "auto", decimal: str | None = None) -> "Target":
        """Decides what a target is.

        Args:
            name: The target's name.
            values: Its cells, a Series.
            task: "auto", "regression" or "classification".
            decimal: The decimal sign where the cells leave a doubt.

        Raises:
            TableError: It cannot be what the task asks for.
        """
        target_cells = as_cells(values)
        if isinstance(target_cells, pd.DatetimeIndex):
            raise TableError(_dates_message(name, [str(target_cells[0])] if len(target_cells) else []))
        column = _understood(target_cells, decimal)
        present = ~find_missing(target_cells, column)
        labels = _as_labels(values, target_cells)[present]
        sign = column.decimal if column.kind == "number" else "."
        classes = sorted(set(cells.once_each(labels, lambda text: plain_form(text, sign)).tolist()))
        if len(classes) < 2:
            raise TableError(_one_value_message(name, classes, int((~present).sum())))
        if column.kind == "date":
            raise TableError(_dates_message(name, classes))
        if "several units" in column.note and task != "classification":
            units = column.note.partition("(")[2].rstrip(")")
            raise TableError(f"The target '{name}' is in several units ({units}); convert them to one.")
        numeric = column.kind == "number"
        codes = [label for label in classes if len(label) > 1 and label[0] == "0" and label.isdigit()]
        if task == "auto":
            task = (
                "regression"
                if numeric and len(classes) > 2 and (not codes or len(classes) > FEW_LEVELS)
                else "classification"
            )
        if task == "regression":
            numbers = target_cells[present]
            learnt = cls._regression(name, column if numeric else _forced_number(name, numbers, decimal), numbers)
            remark = f"; zeros in front, as in {listed(codes, 1)}, do not count"
            return replace(learnt, note=learnt.note + remark) if codes else learnt
        if len(classes) > min(MAX_CLASSES, max(2, len(labels) / 2)):
            raise TableError(_many_classes_message(name, len(classes), target_cells[present], decimal))
        return cls._classes(
            name,
            labels,
            sign,
            is_truth=column.kind == "truth" and all(label.casefold() in cells.TRUTHS for label in classes),
        )

    @classmethod
    def _regression(cls, name: str, column: Column, present: Any) -> "Target":
        note = MISSING_REMARKS.sub("", column.note)
        column = Column("target", "number", note, decimal=column.decimal, unit=column.unit, style=column.style)
        numbers = read_column(column, present).values[column.name]
        if float(np.nanmax(np.abs(numbers))) < MIN_SIZE:
            raise TableError(f"The target '{name}' holds numbers below {MIN_SIZE:g} in size; give it in other units.")
        sizes = np.sort(np.abs(numbers[np.isfinite(numbers)]))
        if len(sizes) > 2 and sizes[-1] / FAR_FACTOR > sizes[-2]:
            note += f"; {sizes[-1]:g} is much larger than any other, {sizes[-2]:g}: is it one?"
        return cls(name, "regression", column, note)

    @classmethod
    def _classes(cls, name: str, labels: np.ndarray, decimal: str, is_truth: bool) -> "Target":
        column = Column("target", "category", "", decimal=decimal)
        if is_truth:
            column = Column("target", "category", "", levels=_find_truths(labels))
        read = cells.once_each(labels, _LabelReader(column))
        names = sorted(set(read.tolist()))
        remarks = _describe_mergers(labels, read)
        if len({label.casefold() for label in names}) < len(names):
            remarks.append("upper and lower case are different classes")
        note = "; ".join([f"{len(names)} classes, {listed(names)}", *remarks])
        dash = ("-",) * ("-" in names)  # a class, and no word for missing, in every piece of the table and in new ones
        return cls(name, "classification", replace(column, note=note, parts=dash), note)

    def values(self, series: Any) -> tuple[np.ndarray, np.ndarray]:
        """Targets of a Series, floats or labels, and which rows have none that can be read.

        Raises:
            TableError: They are in another unit than in training.
        """
        target_cells = as_cells(series)
        if self.task == "classification":
            labels = cells.once_each(_as_labels(series, target_cells), _LabelReader(self.column))
            return labels.astype(str), find_missing(target_cells, self.column)
        if (unit := changed_units(self.column, target_cells)[0]) is not None:
            before = f"'{self.column.unit}'" if self.column.unit else "no unit"
            raise TableError(f"The target '{self.name}' is in '{unit}', and had {before} in training; convert it.")
        if isinstance(target_cells, pd.DatetimeIndex):
            return np.full(len(target_cells), np.nan), np.ones(len(target_cells), dtype=bool)
        numbers = read_column(self.column, target_cells).values[self.column.name]
        return numbers, np.isnan(numbers)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the model file."""
        return {"name": self.name, "task": self.task, "column": asdict(self.column), "note": self.note}

    @classmethod
    def from_json(cls, content: Any) -> "Target":
        """A target from the plain data of a model file; a ValueError unless they describe one."""
        texts = [content.get(key) for key in ("name", "task", "note")] if isinstance(content, dict) else [None]
        if not all(isinstance(text, str) for text in texts) or set(content) != {"name", "task", "column", "note"}:
            raise ValueError("the target is not described")
        column = Column.from_json(content["column"])
        expected = {"regression": "number", "classification": "category"}.get(content["task"])
        if column.kind != expected:
            raise ValueError(f"the task {content['task']!r} does not fit the target")
        return cls(content["name"], content["task"], column, content["note"])


def _one_value_message(name: str, classes: list[str], empty: int) -> str:
    """What is said of a target with one value at most."""
    if classes and empty:
        return (
            f"The target '{name}' has one value, {listed(classes)}, and {empty} cells without any; if these mean no, write a word "
            "for it there."
        )
    return (
        f"The target '{name}' has the same value in every row ({listed(classes) or 'none'}); there is nothing to learn."
    )


def _understood(target_cells: Any, decimal: str | None) -> Column:
    """The target as a column, which may number the rows."""
    column = understand("target", target_cells, decimal)
    rows = column.note.startswith(ROW_NUMBERS)
    return understand("target", target_cells, decimal, keep=True) if rows else column


def find_missing(values: Any, column: Column) -> np.ndarray:
    """Rows whose target is missing; a class may be called None."""
    if isinstance(values, pd.DatetimeIndex) or values.dtype != object:
        return np.asarray(pd.isna(values))
    if column.kind == "number":
        return cells.is_missing(values, cells.MISSING_NUMBERS)
    return cells.is_missing(values, cells.MISSING_WORDS - {*column.levels, *column.parts})


# ------------------------------------------------------------------ classes


class _LabelReader:
    """Gives each spelling of a label the name of its class."""

    def __init__(self, column: Column) -> None:
        self.decimal = column.decimal
        self.names = {label.casefold(): label for label in column.levels}
        truths = {cells.TRUTHS.get(label.casefold()): label for label in column.levels}
        self.truths = truths if set(truths) == {0.0, 1.0} else {}

    def __call__(self, text: str) -> str:
        label = plain_form(text, self.decimal)
        folded = label.casefold()
        return self.names.get(folded) or self.truths.get(cells.TRUTHS.get(folded)) or label


def _as_labels(series: pd.Series, target_cells: Any) -> np.ndarray:
    """Every cell as text; whole numbers with all their digits."""
    if is_text(target_cells):
        return target_cells
    return np.array([plain_form(as_text(value)) for value in series], dtype=object)


def _find_truths(labels: np.ndarray) -> tuple[str, ...]:
    """The first word for yes and the first word for no, in the order in which they come."""
    first: dict[float, str] = {}
    for label in cells.once_each(labels, plain_form).tolist():
        first.setdefault(cells.TRUTHS[label.casefold()], label)
    return tuple(first.values())


def _describe_mergers(labels: np.ndarray, read: np.ndarray) -> list[str]:
    """Which spellings are one class, and which are written in another way."""
    spellings: dict[str, set[str]] = {}
    for label, name in zip(labels.tolist(), read.tolist(), strict=True):
        spellings.setdefault(name, set()).add(label)
    remarks = [
        f"{listed(sorted(written))} are one class"
        if len(written) > 1
        else f"{listed([*written])} is read as {listed([name])}"
        for name, written in sorted(spellings.items())
        if written != {name}
    ]
    rest = len(remarks) - MAX_MERGERS_SHOWN
    return remarks[:MAX_MERGERS_SHOWN] + ([f"and {rest} more such classes"] if rest > 0 else [])


# ------------------------------------------------------------------ messages, and numbers among words


def _dates_message(name: str, examples: Sequence[str]) -> str:
    shown = f" ({listed(examples, 1)})" if examples else ""
    return (
        f"The target '{name}' holds dates{shown}; turn them into numbers (days since a start) or into names of classes."
    )


def _many_classes_message(name: str, count: int, present: Any, decimal: str | None) -> str:
    words = _find_words(present, decimal)
    remedy = "a regression?"
    if 0 < len(words) < UNREADABLE_SHARE * len(present):
        remedy = (
            f"{len(words)} cells are not numbers, such as {listed([*words[:1]])}; correct them, or leave them out with "
            "--task regression --skip-bad-rows."
        )
    return f"The target '{name}' has {count} different values in {len(present)} rows, too many for classes; {remedy}"


def _find_words(present: Any, decimal: str | None) -> np.ndarray:
    """Cells that are not numbers."""
    if not is_text(present):
        return present[:0]
    sign, _ = cells.column_sign(votes_of(present, known=True), decimal)
    return present[np.isnan(cells.read_numbers(present, sign, cells.has_thousands(present)))]


def _forced_number(name: str, present: Any, decimal: str | None) -> Column:
    """How the cells of a target are read as numbers though some are none; a TableError where most are none."""
    words = _find_words(present, decimal)
    if len(words) > UNREADABLE_SHARE * len(present):
        raise TableError(
            f"The target '{name}' holds text in {len(words)} of {len(present)} cells, such as {listed([*words[:1]])}; "
            "regression needs numbers."
        )
    if not is_text(present):
        return Column("target", "number", "number")
    sign, _ = cells.column_sign(votes_of(present, known=True), decimal)
    amounts = cells.has_thousands(present)
    units = cells.unit_spellings(cells.count_units(present, sign, amounts))
    signs = sorted(spellings[0] for spellings in units)
    if len(units) > 1:
        raise TableError(f"The target '{name}' is in several units ({', '.join(signs[:5])}); convert them to one.")
    note, unit = (f"number in {signs[0]}", signs[0]) if signs else ("number", "")
    return Column("target", "number", note, decimal=sign, unit=unit, style=cells.AMOUNTS if amounts else "")
