"""A table understood: its columns and its target. Learnt once, kept in the model file as plain data, applied to new tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd

from bochner.tables import cells
from bochner.tables.columns import (
    DATE_PARTS,
    KINDS,
    Column,
    Read,
    adapted,
    as_cells,
    canonical,
    is_text,
    read_column,
    understand,
    understand_choices,
    votes_of,
)
from bochner.tables.errors import TableError, listed, printable

MOST_INPUTS = 2000  # numbers that a row may become
MOST_CLASSES = 100
UNREADABLE = 0.5  # share of cells that no longer read as in training from which on a column has changed its kind
JUDGED_CELLS = 20  # cells from which on that share is judged
ANOTHER_WAY = "written in another way than in training"
TINY = 1e-100  # targets below in size have squares that vanish


@dataclass(frozen=True)
class Table:
    """How a table becomes numbers and categories.

    Attributes:
        columns: All columns but the target, in order, used or dropped.
    """

    columns: tuple[Column, ...]

    @classmethod
    def learn(cls, frame: Any, drop: Sequence[str] = (), signs: "Signs | None" = None) -> "Table":
        """Looks at every column of a DataFrame.

        Args:
            frame: The table, without its target.
            drop: Columns to leave out.
            signs: The decimal signs of the file, target included; by default those of the frame.
        """
        signs = signs or Signs.learn(frame, drop)
        columns = []
        for name in frame.columns:
            if str(name) in drop:
                columns.append(Column(str(name), "dropped", "dropped, as asked"))
            elif has_number_choices(frame[name]):
                columns.append(understand_choices(str(name), as_cells(frame[name])))
            else:
                columns.append(understand(str(name), as_cells(frame[name]), signs.decimal, signs.votes[str(name)]))
        table = cls(tuple(columns))
        table._check_outputs()
        if not table.used:
            raise TableError("There is no column to predict from.", *(f"  {line}" for line in table.summary()))
        if (inputs := sum(max(1, len(c.levels)) * len(c.outputs) for c in table.used)) > MOST_INPUTS:
            raise TableError(
                f"The table becomes {inputs} inputs, more than {MOST_INPUTS}; leave columns out with --drop."
            )
        return table

    def _check_outputs(self) -> None:
        """Raises a TableError where two columns become columns of the same name."""
        sources: dict[str, str] = {}
        for column in self.used:
            for name in column.outputs:
                if name in sources:
                    raise TableError(
                        f"The columns '{sources[name]}' and '{column.name}' would both become '{name}'; rename one."
                    )
                sources[name] = column.name

    @property
    def used(self) -> list[Column]:
        """Columns that are not dropped."""
        return [column for column in self.columns if column.kind != "dropped"]

    @property
    def outputs(self) -> list[str]:
        """Names of the columns of numbers and categories."""
        return [name for column in self.used for name in column.outputs]

    def summary(self) -> list[str]:
        """What was done with each column, a line each."""
        return [printable(f"{column.name}: {column.note}") for column in self.columns]

    def check_names(self, names: Sequence[str]) -> None:
        """Raises a TableError where columns are missing; their order does not matter."""
        missing = [column.name for column in self.used if column.name not in names]
        if missing:
            strange = [name for name in names if name not in {column.name for column in self.columns}]
            hint = f" It has {listed(strange)}, which the model does not know." if strange else ""
            raise TableError(f"The table lacks the column {listed(missing)} that the model was fitted with.{hint}")

    def transform(self, frame: Any, changes: "Changes | None" = None) -> pd.DataFrame:
        """Numbers and categories, from a table with the columns of training.

        Args:
            frame: The table.
            changes: Collects what is not as it was in training.

        Raises:
            TableError: Columns are missing, or have changed their kind: all of them are named.
        """
        self.check_names([str(name) for name in frame.columns])
        if len(set(map(str, frame.columns))) < frame.shape[1]:
            raise TableError("The table has more than one column of the same name; rename or leave out the others.")
        by_name = {str(name): frame[name] for name in frame.columns}
        changes = Changes() if changes is None else changes
        found: dict[str, np.ndarray] = {}
        problems = []
        for column in self.used:
            values = as_cells(by_name[column.name])
            read = read_column(column, values)
            found |= read.values
            if changes.add(column, values, read):
                _, example = changes.unreadable[column.name]
                problems.append(f"Column '{column.name}' held {_plural(column)} in training, and now '{example}'.")
        if problems:
            raise TableError(*problems)
        return pd.DataFrame(found)

    def adapted(self, frame: Any, target: "Target | None" = None) -> tuple["Table", list[str]]:
        """The same where a new table writes numbers or dates in another way, and a line for each such column.

        Args:
            frame: The new table.
            target: Where its column is in the table too, it helps to tell the decimal sign.
        """
        found, decimal = self.signs(frame, target)
        columns = tuple(adapted(own, found[own.name], decimal) if own.name in found else own for own in self.columns)
        lines = [f"{now.name}: {ANOTHER_WAY}" for now in columns if now not in self.columns]
        return Table(columns), lines

    def adapted_target(self, frame: Any, target: "Target") -> tuple["Target", list[str]]:
        """A target where a new table, which holds it too, writes its numbers in another way, and a line that says so."""
        found, decimal = self.signs(frame, target)
        column = adapted(target.column, found[target.name], decimal)
        if target.task != "regression" or column == target.column:
            return target, []
        return replace(target, column=column), [f"{target.name}: {ANOTHER_WAY}"]

    def signs(self, frame: Any, target: "Target | None" = None) -> tuple[dict[str, Any], str | None]:
        """Cells of the columns that are used, by name, and the decimal sign of those that are numbers, where they tell."""
        names = {str(name): name for name in frame.columns}
        columns = {column.name: column for column in self.used}
        if target is not None:
            columns[target.name] = target.column
        found = {name: as_cells(frame[names[name]]) for name in columns if name in names}
        numbers = [values for name, values in found.items() if columns[name].kind == "number"]
        return found, cells.file_sign(votes_of(values, known=True) for values in numbers)

    def to_json(self) -> list[dict[str, Any]]:
        """For the model file."""
        return [asdict(column) for column in self.columns]

    @classmethod
    def from_json(cls, content: Any) -> "Table":
        """From the model file; a ValueError unless it describes columns."""
        return cls(tuple(_column_from_json(own) for own in _list(content)))


def has_number_choices(series: Any) -> bool:
    """Whether pandas holds a column as categories that are numbers."""
    kind = series.dtype
    return isinstance(kind, pd.CategoricalDtype) and pd.api.types.is_numeric_dtype(kind.categories.dtype)


@dataclass(frozen=True)
class Signs:
    """Which decimal sign a file has: one decision from all its columns.

    Attributes:
        decimal: The sign; None where no column tells.
        votes: What each column says.
    """

    decimal: str | None
    votes: dict[str, cells.Votes]

    @classmethod
    def learn(cls, frame: Any, drop: Sequence[str] = (), target: Any = None) -> "Signs":
        """From the columns of a DataFrame but those in ``drop``, and from a target, a Series, which it does not hold."""
        votes = {str(name): votes_of(as_cells(frame[name])) for name in frame.columns if str(name) not in drop}
        also = [] if target is None else [votes_of(as_cells(target))]
        return cls(cells.file_sign([*votes.values(), *also]), votes)


def _plural(column: Column) -> str:
    return {"truth": "yes and no", "number": "numbers"}.get(column.kind, f"{column.kind}s")


class Changes:
    """What a new table has that the training table had not; counted over its pieces.

    Attributes:
        present: Cells with a value, by column.
        unreadable: Cells that cannot be read as in training, and the first of them.
        missing: Cells without a value, where training had none.
        units: Units that training did not have.
    """

    def __init__(self) -> None:
        self.present: Counter[str] = Counter()
        self.unreadable: dict[str, tuple[int, str]] = {}
        self.missing: Counter[str] = Counter()
        self.units: dict[str, tuple[str, str]] = {}

    def add(self, column: Column, values: Any, read: Read) -> bool:
        """Counts the cells of a piece of a column; whether it has changed its kind, as far as it has been seen."""
        self.present[column.name] += int((~read.absent).sum())
        if wrong := int(read.unreadable.sum()):
            first = str(values[int(read.unreadable.argmax())])
            before, first = self.unreadable.get(column.name, (0, first))
            self.unreadable[column.name] = (before + wrong, first)
        if not column.missing and read.absent.any():
            self.missing[column.name] += int(read.absent.sum())
        if (unit := strange_unit(column, values)) is not None:
            self.units.setdefault(column.name, (unit, column.unit))
        present, (wrong, _) = self.present[column.name], self.unreadable.get(column.name, (0, ""))
        return present >= JUDGED_CELLS and wrong > UNREADABLE * present

    def lines(self) -> list[str]:
        """A line for each column."""
        unreadable = [
            f"{name}: {count} cells cannot be read as in training, such as '{example}'; they count as missing"
            for name, (count, example) in self.unreadable.items()
        ]
        missing = [
            f"{name}: {count} cells are missing, none was in training; such rows count as strange"
            for name, count in self.missing.items()
        ]
        units = [
            f"{name}: now in '{now}', in training in '{before or 'no unit'}'; the numbers are taken as they are"
            for name, (now, before) in self.units.items()
        ]
        return [printable(line) for line in unreadable + missing + units]


def strange_unit(column: Column, values: Any) -> str | None:
    """A unit of a column of numbers that training did not have; None where there is none."""
    if column.kind != "number" or not is_text(values):
        return None
    return next((unit for unit in cells.count_units(values, column.decimal) if unit not in ("", column.unit)), None)


# ------------------------------------------------------------------ the target


@dataclass(frozen=True)
class Target:
    """The column that is predicted.

    Attributes:
        name: Its name.
        task: "regression" or "classification".
        column: How its cells are read.
        note: What it was taken for.
    """

    name: str
    task: str
    column: Column
    note: str

    @classmethod
    def learn(cls, name: str, values: Any, task: str = "auto", decimal: str | None = None) -> "Target":
        """Looks at a target's cells, a Series.

        Args:
            name: The target's name.
            values: Its cells.
            task: "auto", "regression" or "classification".
            decimal: The decimal sign where the cells leave a doubt.

        Raises:
            TableError: It cannot be what the task asks for.
        """
        found = as_cells(values)
        if isinstance(found, pd.DatetimeIndex):
            raise TableError(f"The target '{name}' holds dates; turn them into numbers (days since a start).")
        column = understand("target", found, decimal)
        absent = target_missing(found, column)
        present = found[~absent]
        levels = _levels(present)
        if len(levels) < 2:
            raise TableError(
                f"The target '{name}' has the same value in every row ({listed(levels) or 'none'}); there is nothing to learn."
            )
        if column.kind == "date":
            raise TableError(f"The target '{name}' holds dates ({listed(levels, 1)}); turn them into numbers.")
        if "several units" in column.note and task != "classification":
            units = column.note.partition("(")[2].rstrip(")")
            raise TableError(f"The target '{name}' is in several units ({units}); convert them to one.")
        numeric = column.kind == "number"
        if task == "auto":
            task = "regression" if numeric and len(levels) > 2 else "classification"
        if task == "regression":
            return cls._regression(name, column if numeric else _forced_number(name, present, decimal), present)
        return cls._classes(name, present, levels, column.kind == "truth", decimal)

    @classmethod
    def _regression(cls, name: str, column: Column, present: np.ndarray) -> "Target":
        numbers = read_column(_plain_number(column), present).values[column.name]
        largest = float(np.nanmax(np.abs(numbers)))
        if largest < TINY:
            raise TableError(f"The target '{name}' holds numbers below {TINY:g} in size; give it in other units.")
        note = column.note.partition(";")[0]
        return cls(name, "regression", _plain_number(column), note)

    @classmethod
    def _classes(cls, name: str, present: np.ndarray, levels: list[str], truth: bool, decimal: str | None) -> "Target":
        if len(levels) > min(MOST_CLASSES, max(2, len(present) / 2)):
            words = _words_among_numbers(present, decimal)
            remedy = "a regression?"
            if 0 < len(words) < UNREADABLE * len(present):
                remedy = (
                    f"{len(words)} cells are not numbers, such as '{words[0]}'; correct them, or leave them out with "
                    "--task regression --skip-bad-rows."
                )
            raise TableError(
                f"The target '{name}' has {len(levels)} different values in {len(present)} rows, too many for classes; "
                f"{remedy}"
            )
        if truth and len({level.casefold() for level in levels}) < len(levels):  # Yes, yes and no
            first: dict[str, str] = {}
            for text in cells.once_each(present, canonical):
                first.setdefault(text.casefold(), text)
            note = f"{len(first)} classes, {listed(sorted(first.values()))}; upper and lower case are one"
            return cls(name, "classification", Column("target", "category", note, levels=tuple(first.values())), note)
        note = f"{len(levels)} classes, {listed(levels)}"
        written = {str(value) for value in pd.unique(present)}
        if merged := sorted(written - set(levels)):
            note += (
                f"; {listed([f'{text}' for text in merged])} taken for {listed(sorted({canonical(t) for t in merged}))}"
            )
        if len({level.casefold() for level in levels}) < len(levels):
            note += "; upper and lower case are different classes"
        return cls(name, "classification", Column("target", "category", note), note)

    def values(self, series: Any) -> tuple[np.ndarray, np.ndarray]:
        """Targets, floats or texts, and which rows have none that can be read.

        Raises:
            TableError: They are in another unit than in training.
        """
        found = as_cells(series)
        if self.task == "regression":
            if (unit := strange_unit(self.column, found)) is not None:
                before = f"'{self.column.unit}'" if self.column.unit else "no unit"
                raise TableError(f"The target '{self.name}' is in '{unit}', and had {before} in training; convert it.")
            if isinstance(found, pd.DatetimeIndex):
                return np.full(len(found), np.nan), np.ones(len(found), dtype=bool)
            numbers = read_column(self.column, found).values[self.column.name]
            return numbers, np.isnan(numbers)
        texts = found if found.dtype == object else np.array([str(value) for value in found], dtype=object)
        spelling = {level.casefold(): level for level in self.column.levels}  # where upper and lower case are one

        def read(text: str) -> str:
            plain = canonical(text)
            return spelling.get(plain.casefold(), plain)

        return cells.once_each(texts, read).astype(str), target_missing(found, self.column)

    def to_json(self) -> dict[str, Any]:
        """For the model file."""
        return {"name": self.name, "task": self.task, "column": asdict(self.column), "note": self.note}

    @classmethod
    def from_json(cls, content: Any) -> "Target":
        """From the model file; a ValueError unless it describes a target."""
        texts = [content.get(key) for key in ("name", "task", "note")] if isinstance(content, dict) else [None]
        if not all(isinstance(text, str) for text in texts) or set(content) != {"name", "task", "column", "note"}:
            raise ValueError("the target is not described")
        column = _column_from_json(content["column"])
        expected = {"regression": "number", "classification": "category"}.get(content["task"])
        if column.kind != expected:
            raise ValueError(f"the task {content['task']!r} does not fit the target")
        return cls(content["name"], content["task"], column, content["note"])


def _words_among_numbers(present: np.ndarray, decimal: str | None) -> np.ndarray:
    """Cells that are not numbers."""
    if not is_text(present):
        return present[:0]
    sign, _ = cells.column_sign(votes_of(present, known=True), decimal)
    return present[np.isnan(cells.read_numbers(present, sign))]


def _forced_number(name: str, present: np.ndarray, decimal: str | None) -> Column:
    """How the cells of a target are read as numbers though some are none; a TableError where most are none."""
    words = _words_among_numbers(present, decimal)
    if len(words) > UNREADABLE * len(present):
        raise TableError(
            f"The target '{name}' holds text in {len(words)} of {len(present)} cells, such as '{words[0]}'; "
            "regression needs numbers."
        )
    if not is_text(present):
        return Column("target", "number", "number")
    sign, _ = cells.column_sign(votes_of(present, known=True), decimal)
    units = sorted(unit for unit in cells.count_units(present, sign) if unit)
    if len(units) > 1:
        raise TableError(f"The target '{name}' is in several units ({', '.join(units[:5])}); convert them to one.")
    unit = units[0] if units else ""
    return Column("target", "number", f"number in {unit}" if unit else "number", decimal=sign, unit=unit)


def _plain_number(column: Column) -> Column:
    return Column("target", "number", column.note, decimal=column.decimal, unit=column.unit)


def _levels(present: np.ndarray) -> list[str]:
    """Different values in their plain form, sorted."""
    if present.dtype == object:
        return sorted(set(cells.once_each(present, canonical).tolist()))
    return sorted({canonical(str(value)) for value in pd.unique(present)})


def target_missing(values: Any, column: Column) -> np.ndarray:
    """Rows whose target is missing; a class may be called None."""
    if isinstance(values, pd.DatetimeIndex) or values.dtype != object:
        return np.asarray(pd.isna(values))
    if column.kind == "number":
        return cells.is_missing(values, cells.MISSING_NUMBERS)
    return cells.is_missing(values, cells.MISSING_WORDS - ({"-"} if (values == "+").any() else set()))


# ------------------------------------------------------------------ from the model file


def _list(content: Any) -> list[Any]:
    if not isinstance(content, list) or not content:
        raise ValueError("the columns are not a list")
    return content


def _column_from_json(content: Any) -> Column:
    """A column whose every field is of its type."""
    known: dict[str, Any] = dict(content) if isinstance(content, dict) else {}
    names = {own.name for own in fields(Column)}
    if set(known) != names:
        raise ValueError("a column is not described")
    texts = ("name", "kind", "note", "decimal", "unit", "style", "first")
    lists = [known["parts"], known["levels"]]
    good = all(isinstance(known[key], str) for key in texts)
    good = good and all(isinstance(own, list | tuple) and all(isinstance(v, str) for v in own) for own in lists)
    good = good and all(isinstance(known[key], bool) for key in ("rare", "missing"))
    good = good and known["kind"] in KINDS and known["decimal"] in (".", ",") and known["style"] in cells.STYLES
    if good and known["kind"] == "date":
        first = pd.to_datetime(known["first"], errors="coerce")
        good = not pd.isna(first) and len(lists[0]) > 0 and set(lists[0]) <= {"days", *DATE_PARTS}
    if not good:
        raise ValueError(f"the column {known['name']!r:.60} is not as it must be")
    known |= {"parts": tuple(lists[0]), "levels": tuple(lists[1])}
    return Column(**known)
