"""A table understood: what its columns are. Learnt once, kept in the model file as plain data, applied to new tables."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from bochner.errors import listed, printable, shown
from bochner.tables import cells
from bochner.tables.columns import (
    UNREADABLE_SHARE,
    Column,
    Read,
    as_cells,
    changed_units,
    holds_lists,
    is_text,
    read_column,
    votes_of,
)
from bochner.tables.errors import TableError
from bochner.tables.targets import Target
from bochner.tables.understanding import ROW_NUMBERS, adapted, understand, understand_choices

MAX_INPUTS = 2000  # numbers that a row may become
CHANCE_ERRORS = 3.0  # standard errors above which a number of unseen values is not chance
MIN_JUDGED_CELLS = 20  # cells from which on a column may be said to have changed its kind
REWRITTEN = (
    "written in another way than in training"  # what is said of a column whose decimal sign or date format changed
)


@dataclass(frozen=True)
class Table:
    """How the columns of a table become numbers and categories.

    Attributes:
        columns: All columns but the target, in order, used or dropped.
    """

    columns: tuple[Column, ...]

    @classmethod
    def learn(
        cls, frame: pd.DataFrame, drop: Sequence[str] = (), signs: "Signs | None" = None, keep: Sequence[str] = ()
    ) -> "Table":
        """Decides what every column of a DataFrame is.

        Args:
            frame: The table, without its target.
            drop: Columns to leave out.
            signs: The decimal signs of the file, target included; by default those of the frame.
            keep: Columns that hold no ids, codes or numbers of the rows, whatever they look like.
        """
        signs = signs or Signs.learn(frame, drop)
        columns = [
            Column(str(name), "dropped", "dropped, as asked")
            if str(name) in drop
            else _understood(frame[name], signs, str(name) in keep)
            for name in frame.columns
        ]
        if all(column.kind == "dropped" for column in columns):
            columns = [
                _kept_row_numbers(frame[name], signs) if column.note.startswith(ROW_NUMBERS) else column
                for name, column in zip(frame.columns, columns, strict=True)
            ]
        table = cls(tuple(columns))
        table._check_outputs()
        _check_used(table)
        if (inputs := sum(max(1, len(c.levels)) * len(c.outputs) for c in table.used)) > MAX_INPUTS:
            raise TableError(
                f"The table becomes {inputs} inputs, more than {MAX_INPUTS}; leave columns out with --drop."
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
        """A line for each column that says what was done with it."""
        return [printable(f"{column.name}: {column.note}") for column in self.columns]

    def check_names(self, names: Sequence[str]) -> None:
        """Raises a TableError where columns are missing; their order does not matter."""
        missing = [column.name for column in self.used if column.name not in names]
        if missing:
            strange = [name for name in names if name not in {column.name for column in self.columns}]
            hint = f" It has {listed(strange)}, which the model does not know." if strange else ""
            raise TableError(
                f"The table lacks the column {listed(missing)} that the model was fitted with; add it, its cells may be "
                f"empty.{hint}"
            )

    def transform(self, frame: pd.DataFrame, changes: "Changes | None" = None) -> pd.DataFrame:
        """Numbers and categories, from a table with the columns of training.

        Args:
            frame: The table.
            changes: Collects what differs from training.

        Raises:
            TableError: Columns are missing or hold another kind of values; all such columns are named.
        """
        self.check_names([str(name) for name in frame.columns])
        if len(set(map(str, frame.columns))) < frame.shape[1]:
            raise TableError("The table has more than one column of the same name; rename or leave out the others.")
        names = {str(name): name for name in frame.columns}
        changes = Changes() if changes is None else changes
        inputs: dict[str, np.ndarray] = {}
        problems = []
        for column in self.used:
            values = as_cells(frame[names[column.name]])
            read = read_column(column, values)
            inputs |= read.values
            if not is_text(values):
                changes.add_bare(column.name, changed_units(column, values)[1], column.unit)
            if changes.add(column, values, read):
                _, example = changes.unreadable[column.name]
                problems.append(
                    f"Column '{column.name}' held {_plural(column)} in training, and now '{shown(example)}'."
                )
        if problems:
            raise TableError(*problems)
        return pd.DataFrame(inputs)

    def adapted(self, rows: pd.DataFrame | dict[str, Any], target: Target | None = None) -> tuple["Table", list[str]]:
        """The same table for new rows that write numbers or dates in another way, and a line for each such column.

        Args:
            rows: The new rows; or their cells by name of the column, as ``as_cells`` gives them.
            target: Where its column is among them too, it helps to tell the decimal sign.
        """
        by_name = rows if isinstance(rows, dict) else _cells_by_name(rows, self.used, target)
        votes, decimal = _decimal_votes(by_name, self.used, target)
        columns = tuple(
            adapted(column, by_name[column.name], decimal, votes.get(column.name)) if column.name in by_name else column
            for column in self.columns
        )
        lines = [f"{new.name}: {REWRITTEN}" for new, old in zip(columns, self.columns, strict=True) if new is not old]
        for column in columns if decimal is None else []:
            vote = votes.get(column.name)
            if vote is not None and not vote.sign and vote.grouped and vote.open == column.decimal:
                sign = {".": "point", ",": "comma"}[vote.open]
                lines.append(f"{column.name}: {sign} taken as decimal sign as in training, which the cells leave open")
        return Table(columns), lines

    def adapted_target(self, frame: pd.DataFrame, target: Target) -> tuple[Target, list[str]]:
        """The same target for new rows that write its numbers in another way, and lines that say what differs."""
        if target.task != "regression":
            return target, []
        by_name = _cells_by_name(frame, self.used, target)
        votes, decimal = _decimal_votes(by_name, self.used, target)
        column = adapted(target.column, by_name[target.name], decimal, votes.get(target.name))
        lines = [] if column == target.column else [f"{target.name}: {REWRITTEN}"]
        if bare := changed_units(column, by_name[target.name])[1]:
            lines.append(_describe_bare(target.name, bare, column.unit))
        return replace(target, column=column), lines

    def decimal_sign(self, frame: pd.DataFrame) -> str | None:
        """The decimal sign of new rows; None where the cells do not tell it."""
        return _decimal_votes(_cells_by_name(frame, self.used), self.used)[1]

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data for the model file."""
        return [asdict(column) for column in self.columns]

    @classmethod
    def from_json(cls, content: Any) -> "Table":
        """A table from the plain data of a model file; a ValueError unless they describe columns."""
        if not isinstance(content, list) or not content:
            raise ValueError("the columns are not a list")
        return cls(tuple(map(Column.from_json, content)))


def _cells_by_name(frame: pd.DataFrame, used: list[Column], target: Target | None = None) -> dict[str, Any]:
    """Cells of the columns that are used, and of the target where it is given, by name."""
    names = {str(name): name for name in frame.columns}
    wanted = [column.name for column in used] + ([] if target is None else [target.name])
    return {name: as_cells(frame[names[name]]) for name in wanted if name in names}


def _decimal_votes(
    by_name: dict[str, Any], used: list[Column], target: Target | None = None
) -> tuple[dict[str, cells.Votes], str | None]:
    """What each column of numbers says about the decimal sign, by name, and the sign that follows from all of them."""
    kinds = {column.name: column.kind for column in used} | (
        {} if target is None else {target.name: target.column.kind}
    )
    votes = {name: votes_of(values, known=True) for name, values in by_name.items() if kinds[name] == "number"}
    return votes, cells.file_sign(votes.values())


def without_empty(table: Table, clean: pd.DataFrame) -> Table:
    """A table without the columns that have no value in the rows to learn from.

    Args:
        table: What the columns are.
        clean: These rows as numbers and categories.

    Raises:
        TableError: No column is left.
    """
    empty = set(clean.columns[clean.isna().all()])
    if not empty or not len(clean):
        return table
    note = "dropped, no values among the rows to learn from"
    filled = Table(tuple(Column(c.name, "dropped", note) if {*c.outputs} & empty else c for c in table.columns))
    _check_used(filled)
    return filled


def _check_used(table: Table) -> None:
    """Raises a TableError where every column is dropped."""
    if not table.used:
        raise TableError("There is no column to predict from.", *(f"  {line}" for line in table.summary()))


def _understood(series: Any, signs: "Signs", keep: bool) -> Column:
    """What a column of a DataFrame is; ``keep`` as in ``understand``."""
    name, values = str(series.name), as_cells(series)
    if has_number_choices(series):
        column = understand_choices(name, values)
    else:
        column = understand(name, values, signs.decimal, signs.votes[name], keep)
    if column.kind == "number" and pd.api.types.is_timedelta64_dtype(series.dtype):
        column = replace(column, note=column.note.replace("number", "duration → hours", 1))
    if column.kind != "dropped" and holds_lists(series):
        column = Column(name, "dropped", "dropped, holds lists or records")
    return replace(column, note=f"{column.note}; it cannot be kept") if keep and column.kind == "dropped" else column


def _kept_row_numbers(series: Any, signs: "Signs") -> Column:
    """A column that numbers the rows, as a column of numbers."""
    column = _understood(series, signs, keep=True)
    return replace(column, note=f"{column.note}; it numbers the rows, but there is nothing else to predict from")


def _describe_bare(name: str, count: int, unit: str) -> str:
    """What is said of numbers that lack the unit of training."""
    return f"{name}: {count} cells without '{unit}', which all had in training; the numbers are taken as they are"


def has_number_choices(series: Any) -> bool:
    """Whether pandas holds a column as categories that are numbers."""
    kind = series.dtype
    return isinstance(kind, pd.CategoricalDtype) and pd.api.types.is_numeric_dtype(kind.categories.dtype)


@dataclass(frozen=True)
class Signs:
    """The decimal sign of a file, which is one decision from all its columns.

    Attributes:
        decimal: The sign; None where no column tells it.
        votes: The evidence from each column, by name.
    """

    decimal: str | None
    votes: dict[str, cells.Votes]

    @classmethod
    def learn(cls, frame: pd.DataFrame, drop: Sequence[str] = (), target: pd.Series | None = None) -> "Signs":
        """The sign from the columns of a DataFrame without those in ``drop``, and from a target that is not among them."""
        votes = {str(name): votes_of(as_cells(frame[name])) for name in frame.columns if str(name) not in drop}
        target_votes = [] if target is None else [votes_of(as_cells(target))]
        return cls(cells.file_sign([*votes.values(), *target_votes]), votes)


def _plural(column: Column) -> str:
    return {"truth": "yes and no", "number": "numbers"}.get(column.kind, f"{column.kind}s")


class Changes:
    """Differences between new rows and the training table, counted over all pieces of the new rows.

    Attributes:
        present: Number of cells with a value, by column.
        unreadable: Number of cells that cannot be read as in training and the first such cell, by column.
        missing: Number of cells without a value, by column that had none in training.
        units: The new unit and the unit in training, by column.
        bare: Number of cells that lack the unit of training and that unit, by column.
        unseen: Number of cells in no category of training that is not rare, and the first such cell, by column.
        rare: Share of such cells in training, by column.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all differences."""
        self.present: Counter[str] = Counter()
        self.unreadable: dict[str, tuple[int, str]] = {}
        self.missing: Counter[str] = Counter()
        self.units: dict[str, tuple[str, str]] = {}
        self.bare: dict[str, tuple[int, str]] = {}
        self.unseen: dict[str, tuple[int, str]] = {}
        self.rare: dict[str, float] = {}

    def add(self, column: Column, values: Any, read: Read) -> bool:
        """Counts the cells of one more piece of a column; True where most cells so far cannot be read as in training."""
        self.present[column.name] += int((~read.absent).sum())
        if wrong := int(read.unreadable.sum()):
            first = str(values[int(read.unreadable.argmax())])
            before, first = self.unreadable.get(column.name, (0, first))
            self.unreadable[column.name] = (before + wrong, first)
        if not column.missing and read.absent.any():
            self.missing[column.name] += int(read.absent.sum())
        if column.kind == "category":
            self._count_unseen(column, values, read)
        if is_text(values):  # a number in a request is in the unit that the service names
            unit, bare = changed_units(column, values)
            if unit is not None:
                self.units.setdefault(column.name, (unit, column.unit))
            self.add_bare(column.name, bare, column.unit)
        present, (wrong, _) = self.present[column.name], self.unreadable.get(column.name, (0, ""))
        return present >= MIN_JUDGED_CELLS and wrong > UNREADABLE_SHARE * present

    def _count_unseen(self, column: Column, values: Any, read: Read) -> None:
        """Counts cells in no category of training that is not rare."""
        known, levels = frozenset(column.levels), read.values[column.name].tolist()
        unseen = [at for at in np.nonzero(~read.absent)[0].tolist() if levels[at] not in known]
        if unseen:
            before, first = self.unseen.get(column.name, (0, cells.as_text(values[unseen[0]])))
            self.unseen[column.name] = (before + len(unseen), first)
            # Where all of many rows are such, it is no chance, however many there were in training.
            by_chance = len(unseen) < max(MIN_JUDGED_CELLS, int((~read.absent).sum()))
            self.rare[column.name] = min(self.rare.get(column.name, 1.0), column.rare if by_chance else 0.0)

    def add_bare(self, name: str, count: int, unit: str) -> None:
        """Counts cells of a column that lack the unit of training."""
        if count:
            self.bare[name] = (self.bare.get(name, (0, unit))[0] + count, unit)

    def add_all(self, other: "Changes") -> None:
        """Adds the differences of other rows."""
        self.present.update(other.present)
        self.missing.update(other.missing)
        for name, (count, example) in other.unreadable.items():
            before, first = self.unreadable.get(name, (0, example))
            self.unreadable[name] = (before + count, first)
        for name, (count, example) in other.unseen.items():
            before, first = self.unseen.get(name, (0, example))
            self.unseen[name] = (before + count, first)
        for name, share in other.rare.items():
            self.rare[name] = min(share, self.rare.get(name, 1.0))
        self.units = other.units | self.units
        for name, (count, unit) in other.bare.items():
            self.add_bare(name, count, unit)

    def lines(self) -> list[str]:
        """What differs, a line for each column."""
        unreadable = [
            f"{name}: {count} cells cannot be read as in training, such as '{shown(example)}'; they count as missing"
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
        bare = [_describe_bare(name, count, unit) for name, (count, unit) in self.bare.items()]
        return [printable(line) for line in unreadable + missing + units + bare + self._unseen_lines()]

    def _unseen_lines(self) -> list[str]:
        """What is said of cells in no category of training; of columns with rare ones where there are more than by chance."""
        lines = []
        for name, (count, example) in self.unseen.items():
            present, share = self.present[name], self.rare[name]
            expected = present * share
            if not share:
                lines.append(
                    f"{name}: {count} of {present} cells hold values not seen in training, such as '{shown(example)}'"
                )
            elif count > expected + CHANCE_ERRORS * math.sqrt(expected * (1 - share) + 1):
                lines.append(
                    f"{name}: {count} of {present} cells hold rare values or some not seen in training, such as "
                    f"'{shown(example)}', where {expected:.0f} were to be expected"
                )
        return lines
