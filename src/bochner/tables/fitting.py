"""From a table in a file to a fitted estimator, and from an estimator to the columns that a prediction adds."""

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from sklearn.model_selection import train_test_split

from bochner.errors import listed, shown
from bochner.estimators.base import TrainingData, are_common
from bochner.estimators.evaluation import forecast
from bochner.tables.cells import as_text, read_numbers
from bochner.tables.columns import as_cells, is_text
from bochner.tables.errors import TableError, in_both, no_column
from bochner.tables.estimators import TableClassifier, TableRegressor
from bochner.tables.files.reading import BadRow, BadRows, Piece, Source, open_table, read_table
from bochner.tables.table import MAX_INPUTS, Signs, Table
from bochner.tables.targets import Target

MIN_ROWS = 10  # rows that a fit needs
LOWEST_ROWS = 2  # rows with the lowest targets of a sample that are never held out
SPARSE_CELLS = 4  # cells of a row of totals, of which one is filled beside the word 'Total', whatever it holds
NAME_ROWS = 20  # first rows among which the name of a target is looked for that is no column
FOOTER_WORDS = frozenset(
    {"total", "totals", "subtotal", "sum", "summe", "gesamt", "gesamtergebnis", "gesamtsumme", "zwischensumme"}
    | {"итого", "average", "mean"}
)

Result = TypeVar("Result")


class Names(NamedTuple):
    """Columns that the user names.

    Attributes:
        drop: Columns to leave out.
        keep: Columns that hold no ids, codes or numbers of the rows, though they look like it.
    """

    drop: Sequence[str] = ()
    keep: Sequence[str] = ()


NO_NAMES = Names()


@dataclass
class TrainingTable:
    """A table that can be fitted.

    Attributes:
        frame: The inputs, as text.
        y: Targets, floats or labels.
        target: How the target is read.
        groups: A number for each row; equal rows have the same number.
        places: Number of the line or row at which each row stands in the file.
        columns: How the columns are read.
        bad: Rows that were left out.
        notes: What was made of the file, for the user.
        source: The files.
        sampled: Whether its rows are a sample of those in the files.
        rows: Number of rows in the files.
    """

    frame: pd.DataFrame
    y: np.ndarray
    target: Target
    groups: np.ndarray
    places: np.ndarray
    columns: Table
    source: Source
    rows: int
    sampled: bool = False
    bad: BadRows = field(default_factory=BadRows)
    notes: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """What the places count: "line" or "row"."""
        return self.source.unit


@dataclass
class FittedTable:
    """A fitted estimator, the rows that it was fitted to, and the rows that it has not seen.

    Attributes:
        estimator: A TableRegressor or a TableClassifier.
        clean: All rows of the table as numbers and categories.
        train: Indices of the rows that it was fitted to.
        held: Indices of the held-out rows whose classes it knows.
        left_out: Number of held-out rows of classes that it does not know.
        training: The training rows as the estimator has taken them.
        learnt: Number of rows that its heads have learnt from.
    """

    estimator: Any
    clean: pd.DataFrame
    train: np.ndarray
    held: np.ndarray
    left_out: int
    training: TrainingData
    learnt: int


def added_names(target: str, classes: Any) -> list[str]:
    """Names of the columns that a prediction adds; ``classes`` is None for regression."""
    names = ["mean", "std", "low", "high"] if classes is None else ["predicted", *(f"p_{name}" for name in classes)]
    return [*(f"{target}_{name}" for name in names), "ood_score", "ood"]


def check_added(names: Sequence[str], target: str, classes: Any) -> None:
    """Raises a TableError where a table has a column that a prediction would add."""
    if taken := [name for name in added_names(target, classes) if name in names]:
        raise TableError(f"The table has a column {listed(taken)}, which is what predictions are called; rename it.")


def predict_rows(estimator: Any, clean: pd.DataFrame | dict[str, np.ndarray], coverage: float) -> dict[str, np.ndarray]:
    """The columns that a prediction adds, by name.

    Args:
        estimator: A fitted TableRegressor or TableClassifier.
        clean: The rows as numbers and categories, from ``Table.transform``, or arrays by name.
        coverage: Probability of the intervals.
    """
    model = estimator.estimator_
    names = added_names(estimator.target_.name, getattr(model, "classes_", None))
    predicted = forecast(model, clean, coverage=coverage)
    columns = [*predicted.values.T, predicted.scores, predicted.scores > model.ood_threshold_]
    if hasattr(model, "classes_"):
        columns.insert(0, model.classes_[predicted.values.argmax(1)])
    return dict(zip(names, columns, strict=True))


def read_training(
    table: Path | Source,
    target: str,
    names: Names = NO_NAMES,
    task: str = "auto",
    skip_bad: bool = False,
    read: Callable[[Source], tuple[Piece, int]] | None = None,
) -> TrainingTable:
    """Reads a table to fit to.

    Args:
        table: A file, a folder or a pattern, or a table that has been opened.
        target: Name of the target.
        names: Columns to leave out and to keep.
        task: "auto", "regression" or "classification".
        skip_bad: Whether rows that cannot be used are left out.
        read: Gives the rows, all or a sample, and how many there are in all; None for all.

    Raises:
        TableError: It cannot be used; all problems are named. Bad rows are problems unless they may be skipped.
    """
    source = table if isinstance(table, Source) else open_table(table)
    path = source.path
    check_names(source, target, names)
    piece, count = read(source) if read is not None else (read_table(source), 0)
    frame, texts, sampled = piece.frame.drop(columns=target), piece.frame[target], count > len(piece.places)
    problems: list[str] = []
    signs = Signs.learn(piece.frame, names.drop)
    understood = _attempt(lambda: Target.learn(target, texts, task, signs.decimal), problems)
    y, rows = np.zeros(0), np.arange(len(frame))
    if understood is not None:
        y, rows = keep_readable(source, piece, understood, not sampled)
    if not skip_bad:
        _attempt(lambda: source.check_bad(sampled=sampled), problems)
    frame = frame.iloc[rows].reset_index(drop=True)
    if len(frame) < MIN_ROWS:
        problems.append(f"At least {MIN_ROWS} rows are needed, {path} has {len(frame)} that can be used.")
    columns = _attempt(lambda: Table.learn(frame, names.drop, signs, names.keep), problems)
    if understood is not None:
        classes = np.unique(y) if understood.task == "classification" else None
        _attempt(lambda: check_added(list(frame.columns), target, classes), problems)
    if problems or understood is None or columns is None:
        heading = [] if any(str(path) in line for line in problems) else [f"{path} cannot be fitted:"]
        raise TableError(*heading, *problems)
    groups = _equal_rows(frame[[column.name for column in columns.used]], y)
    if repeated := len(groups) - len(np.unique(groups)):
        source.notes.append(f"{repeated} rows repeat another one; equal rows are fitted or tested together")
    places, total, bad = np.array(piece.places)[rows], max(count, len(piece.places)), BadRows(source.bad)
    return TrainingTable(frame, y, understood, groups, places, columns, source, total, sampled, bad, source.notes)


def _attempt(step: Callable[[], Result], problems: list[str]) -> Result | None:
    """The result of a step; None where it fails, and then its problems are added to the list."""
    try:
        return step()
    except TableError as error:
        problems.extend(error.problems)
        return None


def _equal_rows(frame: pd.DataFrame, y: np.ndarray) -> np.ndarray:
    """A number for each row; rows that may be copies of each other, with equal inputs and target, have the same number.

    In a table of few different inputs equal rows are no copies: see ``bochner.estimators.base.are_common``.
    """
    codes = np.column_stack([pd.factorize(frame[name], use_na_sentinel=False)[0] for name in frame.columns])
    rows = pd.DataFrame(codes).assign(target=pd.factorize(y)[0])
    numbers = rows.groupby(list(rows.columns), sort=False).ngroup().to_numpy(copy=True)
    common = are_common(codes, numbers)
    numbers[common] = len(numbers) + np.nonzero(common)[0]
    return numbers


def check_names(source: Source, target: str, wanted: Names) -> None:
    """Raises a TableError unless a table has the target and the columns to leave out and to keep."""
    names, problems = source.names, in_both(*wanted)
    if len(names) > MAX_INPUTS:
        problems.append(f"{source.path} has {len(names)} columns, more than {MAX_INPUTS}; keep those that matter.")
    if target not in names:
        problems.append(
            no_column("target", target, names) + _find_names_below(source, target) + _doubt_encoding(source)
        )
    for option, found in zip(wanted._fields, wanted, strict=True):
        problems += [no_column(option, name, names) + _doubt_encoding(source) for name in found if name not in names]
    if target in wanted.drop:
        problems.append(f"The target '{target}' cannot be dropped.")
    if target in wanted.keep:
        problems.append(f"The target '{target}' cannot be kept: it is what is predicted.")
    if problems:
        raise TableError(*problems)


def _doubt_encoding(source: Source) -> str:
    """A sentence for a name that is not found in a text file whose encoding is a guess; empty for other files."""
    if source.dialect is None or source.dialect.encoding not in ("cp1252", "latin-1"):
        return ""
    return " The file is not UTF-8 and is read as Latin-1: if its letters look wrong, save it as UTF-8."


def _find_names_below(source: Source, target: str) -> str:
    """A sentence that says where the target's name stands among the first rows; empty where it does not."""
    first = next((piece for piece in source.pieces() if piece.places), None)
    near = [(bad.place, bad.cells) for bad in itertools.islice(source.bad, NAME_ROWS)]
    if first is not None:
        rows = zip(first.places[:NAME_ROWS], first.texts.head(NAME_ROWS).to_numpy(), strict=True)
        near = [(f"{source.unit} {place}", tuple(row)) for place, row in rows] + near
    for place, row in near:
        if target in [cell.strip() for cell in row]:
            return f" It stands in {place}: are these the names of the columns? Remove the lines above it."
    return ""


def names_totals(frame: pd.DataFrame) -> bool:
    """Whether the last row of a table has a cell that says no more than 'Total'."""
    return any(map(_says_total, (as_text(frame[name].iloc[-1]).strip() for name in frame.columns)))


def _says_total(cell: str) -> bool:
    """Whether a cell says 'Total', 'Grand Total:' or the like, and nothing else."""
    return bool(cell) and set(cell.casefold().rstrip(":").split()) <= FOOTER_WORDS | {"grand"}


def is_footer(frame: pd.DataFrame, decimal: str) -> bool:
    """Whether the last row of a table holds totals.

    These are sums, means and blanks, beside a word such as 'Total' or two sums at least; or a cell 'Total' and hardly any other.
    """
    last = [as_text(frame[name].iloc[-1]).strip() for name in frame.columns]
    words = [bool(FOOTER_WORDS & set(re.findall(r"[^\W\d_]+", cell.casefold()))) for cell in last]
    filled = sum(map(bool, last))
    alone = "" in last and filled > 1
    if (
        any(map(_says_total, last))
        and len(frame) >= MIN_ROWS
        and len(last) > SPARSE_CELLS
        and filled <= max(2, len(last) // SPARSE_CELLS)
    ):
        return True  # 'Grand Total' in a row of hardly anything else, though the sum may be of other rows
    if not (any(words) or alone) or len(frame) < MIN_ROWS:
        return False
    for name, cell, word in zip(frame.columns, last, words, strict=True):
        if word or not cell:
            continue
        values = as_cells(frame[name])
        numbers = read_numbers(values, decimal) if is_text(values) else np.asarray(values, dtype=float)
        above = numbers[:-1][np.isfinite(numbers[:-1])]
        with np.errstate(over="ignore"):  # the sum may be infinite
            if not len(above) or not np.isclose([above.sum(), above.mean()], numbers[-1], rtol=1e-3).any():
                return False
    return True


def keep_readable(source: Source, piece: Piece, target: Target, ends: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Targets that can be read, and the indices of their rows; the other rows are added to ``source.bad``.

    Args:
        source: The table.
        piece: Some rows of it.
        target: How the target is read.
        ends: Whether the last of the rows is the last of the table, which may hold totals.
    """
    y, bad = target.values(piece.frame[target.name])
    names_again = repeats_names(piece.frame)
    bad |= names_again
    totals = ends and is_footer(piece.frame, target.column.decimal)
    bad[-1] |= totals
    blank_rows = 0
    for row in np.nonzero(bad)[0]:
        texts = {name: as_text(piece.frame[name].iloc[row]) for name in piece.frame.columns}
        cell = texts[target.name]
        if not "".join(texts.values()).strip():
            blank_rows += 1
            continue
        problem = f"the target '{target.name}' is missing" if not cell.strip() else f"the target is '{cell}'"
        problem = "it repeats the names of the columns" if names_again[row] else problem
        problem = "it holds totals of the rows above" if totals and row == len(bad) - 1 else problem
        source.bad.append(BadRow(f"{source.unit} {piece.places[int(row)]}", problem, tuple(texts.values())))
    if blank_rows:
        source.notes.append(f"{blank_rows} rows without any cell left out")
    rows = np.nonzero(~bad)[0]
    return y[rows], rows


def repeats_names(frame: pd.DataFrame) -> np.ndarray:
    """Which rows hold the names of the columns once more, as where files were put together, (n,)."""
    again = np.full(len(frame), frame.shape[1] > 1)
    for name in frame.columns:
        if not again.any():
            break
        values = as_cells(frame[name])
        again &= (values == str(name)) if is_text(values) else False
    return again


def keep_known(
    source: Source, piece: Piece, estimator: Any, y: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Labels that a model knows, in its spelling, and their rows; the other rows are added to ``source.bad``.

    Args:
        source: The table.
        piece: Some rows of it.
        estimator: A fitted TableClassifier.
        y: Targets from ``keep_readable``.
        rows: Indices of their rows.
    """
    if not len(y):
        return y, rows
    classes = set(estimator.classes_.tolist())
    labels = estimator.labels(y)
    known = np.array([label in classes for label in labels.tolist()])
    for row, label in zip(rows[~known], labels[~known], strict=True):
        texts = tuple(as_text(piece.frame[name].iloc[row]) for name in piece.frame.columns)
        problem = f"the target is the class '{shown(label)}', which the model does not know"
        source.bad.append(BadRow(f"{source.unit} {piece.places[int(row)]}", problem, texts))
    return labels[known].astype(estimator.classes_.dtype), rows[known]


def split_rows(table: TrainingTable, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of rows to fit and of rows to test on.

    Equal rows stay together, and classes keep their shares where they have enough rows.
    """
    if share == 0:
        return np.arange(len(table.y)), np.arange(0)
    classification, may_be_held = table.target.task == "classification", np.ones(len(table.y), dtype=bool)
    if table.sampled and not classification:  # the lowest targets say whether a logarithm may be taken of all targets
        may_be_held = ~np.isin(table.groups, table.groups[np.argsort(table.y)[:LOWEST_ROWS]])
    groups, first = np.unique(table.groups[may_be_held], return_index=True)
    if len(groups) < 2:
        raise TableError("All rows are the same, so none can be held out; fit to all with --test 0.")
    y = table.y[may_be_held][first]
    counts = np.unique(y, return_counts=True)[1] if classification else np.array([2])
    tests = min(max(1, round(share * len(groups))), len(groups) - 1)
    every_class = counts.min() >= 2 and min(tests, len(groups) - tests) >= len(counts)
    _, held = train_test_split(
        np.arange(len(groups)),
        test_size=tests,
        random_state=seed,
        stratify=y if classification and every_class else None,
    )
    out = np.isin(table.groups, groups[held])
    return np.nonzero(~out)[0], np.nonzero(out)[0]


def fit_table(table: TrainingTable, *, share: float, drop: Sequence[str], **options: Any) -> FittedTable:
    """Fits an estimator to a table without a share of its rows, which is held out.

    Args:
        table: The table.
        share: Share of rows held out; 0 fits to all.
        drop: Columns to leave out.
        **options: Parameters of the estimator; ``random_state`` also splits the rows.
    """
    train, held = split_rows(table, share, options["random_state"])
    kind = TableRegressor if table.target.task == "regression" else TableClassifier
    estimator = kind(drop=drop, **options)
    estimator.check_parameters()
    began, y = time.perf_counter(), table.y
    clean = table.columns.transform(table.frame)
    training = estimator.learn_understood(table.columns, table.target, clean.iloc[train], y[train], began=began)
    table.columns, clean = estimator.table_, clean.loc[:, estimator.table_.outputs]
    estimator.verbose = estimator.estimator_.verbose = False
    known = held[np.isin(y[held], y[train])] if table.target.task == "classification" else held
    return FittedTable(estimator, clean, train, known, len(held) - len(known), training, len(train))
