"""Tables in files that are larger than memory: a sample of their rows, and what the heads learn from all rows."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from bochner.streaming.engines import map_portions
from bochner.streaming.learning import AllRowsLearner
from bochner.streaming.moments import MomentCollector, Moments
from bochner.streaming.sample import Sample
from bochner.tables.cells import as_text
from bochner.tables.errors import TableError
from bochner.tables.files.reading import BadRow, BadRows, Piece, Portion, Source, joined
from bochner.tables.fitting import FittedTable, TrainingTable, keep_readable, names_totals
from bochner.tables.table import Changes

PORTION_ROWS = 200_000  # rows of a portion, where a file can be read in portions


@dataclass(frozen=True)
class Task:
    """A portion of a table to work on.

    Attributes:
        number: Its number.
        portion: The portion.
        is_last: Whether the table ends with it.
    """

    number: int
    portion: Portion
    is_last: bool


def _tasks(source: Source) -> list[Task]:
    """The portions of a table in order."""
    portions = source.portions(PORTION_ROWS)
    return [Task(number, portion, number == len(portions) - 1) for number, portion in enumerate(portions)]


def _pieces(source: Source, task: Task) -> Iterator[Piece]:
    """The pieces of a portion; of the last one without a last row that says 'Total', which is added to ``source.bad``.

    A row of totals in memory is known by its sums, too. Here the rows above are not at hand.
    """
    waiting: Piece | None = None
    for piece in source.pieces(portion=task.portion):
        if waiting is not None:
            yield waiting
        waiting = piece
    if waiting is None:
        return
    if task.is_last and waiting.places and names_totals(waiting.frame):
        texts = tuple(as_text(waiting.frame[name].iloc[-1]) for name in waiting.frame.columns)
        source.bad.append(BadRow(f"{source.unit} {waiting.places[-1]}", "it holds totals of the rows above", texts))
        waiting = Piece(waiting.frame.iloc[:-1], waiting.places[:-1])
    yield waiting


@dataclass(frozen=True)
class TableSampler:
    """Reads a table: the whole of it where it fits into memory, else a sample of its rows.

    Attributes:
        target: Name of the target.
        max_rows: Largest number of rows in memory.
        seed: Seed of the sample.
        engine: "local" or "ray".
        say: Shows a line to the user.
    """

    target: str
    max_rows: int
    seed: int
    engine: str
    say: Callable[[str], None]

    def __call__(self, source: Source) -> tuple[Piece, int]:
        """The rows, and how many rows the whole table has."""
        pieces: list[Piece] = []
        count = 0
        for piece in source.pieces():
            if piece.places:
                pieces.append(piece)
                count += len(piece.places)
            if count > self.max_rows:
                break
        else:
            if not pieces:
                source.raise_empty()
            return joined(pieces), count
        del pieces
        sampled = self._sampled(source)
        give_back_memory()
        return sampled

    def _sampled(self, source: Source) -> tuple[Piece, int]:
        self.say(
            f"more than {self.max_rows:,} rows: drawing a sample of them, from which columns and networks are learnt"
        )
        sample, bad = Sample(self.max_rows), BadRows()
        draw = _Drawing(source.resolved(), self.target, self.max_rows, self.seed)

        def portions() -> Iterator[tuple[Task, float]]:
            for task in _tasks(source):
                # With the key a portion sends few rows that the sample will not keep.
                yield task, sample.largest_key

        for drawn, bad_rows in map_portions(draw, portions(), self.engine):
            sample.merge(drawn)
            bad.extend(bad_rows)
        source.bad = bad
        frame, _, places = sample.in_order()
        return Piece(frame, places.tolist()), sample.rows


@dataclass(frozen=True)
class _Drawing:
    """Draws from the rows of a portion."""

    source: Source
    target: str
    max_rows: int
    seed: int

    def __call__(self, task_and_key: tuple[Task, float]) -> tuple[Sample, BadRows]:
        task, largest_key = task_and_key
        source, sample = replace(self.source, notes=[], bad=BadRows()), Sample(self.max_rows, largest_key)
        number, generator = task.number, np.random.default_rng([self.seed, task.number])
        for piece in _pieces(source, task):
            if piece.places:
                sample.add((piece.frame, piece.frame[self.target], np.array(piece.places)), number, generator)
        return sample, source.bad


@dataclass
class _Learnt:
    """What a portion of a table gives.

    Attributes:
        moments: Sums over its rows.
        changes: What differs from the sample.
        bad: Rows that cannot be used.
        unknown: Number of rows of classes that the sample lacks.
        read: Number of rows, usable or not.
    """

    moments: Moments
    changes: Changes
    bad: BadRows
    unknown: int = 0
    read: int = 0

    def add(self, other: "_Learnt") -> None:
        """Adds what another portion gives."""
        self.moments.add(other.moments)
        self.changes.add_all(other.changes)
        self.bad.extend(other.bad)
        self.unknown += other.unknown
        self.read += other.read


@dataclass(frozen=True)
class _Learning:
    """Takes the sums of heads over the rows of a portion."""

    source: Source
    table: TrainingTable
    collector: MomentCollector

    def __call__(self, task: Task) -> _Learnt:
        source, table, collector = replace(self.source, notes=[], bad=BadRows()), self.table, self.collector
        learnt = _Learnt(collector.empty(task.number), Changes(), source.bad)
        classes = getattr(collector.estimator, "classes_", None)
        for piece in _pieces(source, task):
            if not piece.places:
                continue
            try:
                y, at = keep_readable(source, piece, table.target, ends=False)
                known = np.ones(len(y), dtype=bool) if classes is None else np.isin(y, classes)
                clean = table.columns.transform(piece.frame.iloc[at[known]], learnt.changes)
            except TableError as error:
                where = f"{source.path}, from {source.unit} {piece.places[0]} on: "
                raise TableError(*(where + problem for problem in error.problems)) from error
            learnt.read += len(piece.places)
            learnt.unknown += int((~known).sum())
            if known.any():
                numbers = collector.estimator._target_numbers(y[known])
                collector.take(learnt.moments, clean, numbers, np.ones(len(numbers)))
        return learnt


def give_back_memory() -> None:
    """Gives memory that is free again back to the system, where the C library offers it: glibc keeps gigabytes for later."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def learn_from_all(
    fitted: FittedTable, table: TrainingTable, *, engine: str, skip_bad: bool, say: Callable[[str], None]
) -> None:
    """Lets the heads of a model that was fitted to a sample of a table learn from all its rows, but for those held out.

    Args:
        fitted: The model and its sample; both change.
        table: The table.
        engine: "local" or "ray".
        skip_bad: Whether rows that cannot be used are left out; otherwise they are an error.
        say: Shows a line to the user.
    """
    give_back_memory()  # the fit needed far more than what follows
    source, estimator = table.source, fitted.estimator.estimator_
    rows = np.concatenate([fitted.train, fitted.held])
    held = np.arange(len(fitted.train), len(rows))
    learner = AllRowsLearner(estimator, fitted.training, (fitted.clean.iloc[rows], table.y[rows]), held)
    slim = replace(table, frame=table.frame.iloc[:0], groups=table.groups[:0], places=table.places[:0])
    while True:
        work = _Learning(source.resolved(), slim, learner.collector)
        total = _Learnt(learner.collector.empty(), Changes(), BadRows())
        gpus = int(estimator._device() == "cuda")
        for learnt in map_portions(work, _tasks(source), engine, gpus):
            total.add(learnt)
            say(f"the heads have learnt from {total.moments.rows:,} of {table.rows:,} rows")
        if total.read != table.rows:
            raise TableError(f"{source.path} has changed: it had {table.rows:,} rows at first, and now {total.read:,}.")
        source.bad = table.bad = total.bad
        if not skip_bad:
            source.check_bad()
        if learner.finish_pass(total.moments):
            break
    fitted.learnt = total.moments.rows - total.moments.held
    table.notes += total.changes.lines()
    if total.unknown:
        table.notes.append(f"{total.unknown} rows are of classes that the sample lacks; they are left out")
    table.notes.append(
        f"{table.rows:,} rows: columns and networks are learnt from {len(table.y):,} of them, heads from all"
    )
