"""Tables in files that are larger than memory: a sample of their rows, and what the heads learn from all rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bochner.streaming.engines import map_portions
from bochner.streaming.learning import AllRowsLearner
from bochner.streaming.moments import MomentCollector, Moments
from bochner.streaming.sample import Sample
from bochner.tables.errors import TableError
from bochner.tables.fitting import FittedTable, TrainingTable, keep_readable
from bochner.tables.reading import BadRow, Piece, Portion, Source, joined
from bochner.tables.table import Changes

PORTION_ROWS = 200_000  # rows of a portion, where a file can be read in portions


@dataclass(frozen=True)
class TableSampler:
    """Reads a table: the whole of it where it fits into memory, else a sample of its rows.

    Attributes:
        target: Name of the target.
        most: Largest number of rows in memory.
        seed: Seed of the sample.
        engine: "local" or "ray".
        say: Shows a line to the user.
    """

    target: str
    most: int
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
            if count > self.most:
                break
        else:
            if not pieces:
                source.raise_empty()
            return joined(pieces), count
        del pieces
        return self._sampled(source)

    def _sampled(self, source: Source) -> tuple[Piece, int]:
        self.say(f"more than {self.most:,} rows: drawing a sample of them, from which columns and networks are learnt")
        sample, bad = Sample(self.most), []
        draw = _Drawing(source, self.target, self.most, self.seed)
        for drawn, bad_rows in map_portions(draw, enumerate(source.portions(PORTION_ROWS)), self.engine):
            sample.merge(drawn)
            bad += bad_rows
        source.bad[:] = bad
        frame, _, places = sample.in_order()
        return Piece(frame, places.tolist()), sample.rows


@dataclass(frozen=True)
class _Drawing:
    """Draws from the rows of a portion."""

    source: Source
    target: str
    most: int
    seed: int

    def __call__(self, numbered: tuple[int, Portion]) -> tuple[Sample, list[BadRow]]:
        number, portion = numbered
        source, sample = replace(self.source, notes=[], bad=[]), Sample(self.most)
        generator = np.random.default_rng([self.seed, number])
        for piece in source.pieces(portion=portion):
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
    """

    moments: Moments
    changes: Changes
    bad: list[BadRow]
    unknown: int = 0

    def add(self, other: "_Learnt") -> None:
        """Adds what another portion gives."""
        self.moments.add(other.moments)
        self.changes.add_all(other.changes)
        self.bad += other.bad
        self.unknown += other.unknown


@dataclass(frozen=True)
class _Learning:
    """Takes the sums of heads over the rows of a portion."""

    source: Source
    table: TrainingTable
    collector: MomentCollector

    def __call__(self, portion: Portion) -> _Learnt:
        source, table, collector = replace(self.source, notes=[], bad=[]), self.table, self.collector
        learnt = _Learnt(collector.empty(), Changes(), source.bad)
        classes = getattr(collector.estimator, "classes_", None)
        for piece in source.pieces(portion=portion):
            if not piece.places:
                continue
            try:
                y, at = keep_readable(source, piece, table.target, ends=False)
                known = np.ones(len(y), dtype=bool) if classes is None else np.isin(y, classes)
                clean = table.columns.transform(piece.frame.iloc[at[known]], learnt.changes)
            except TableError as error:
                where = f"{source.path}, from {source.unit} {piece.places[0]} on: "
                raise TableError(*(where + problem for problem in error.problems)) from error
            learnt.unknown += int((~known).sum())
            if known.any():
                numbers = collector.estimator._target_numbers(y[known])
                collector.take(learnt.moments, clean, numbers, np.ones(len(numbers)))
        return learnt


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
    source, estimator = table.source, fitted.estimator.estimator_
    learner = AllRowsLearner(estimator, fitted.training, (fitted.clean.iloc[fitted.held], table.y[fitted.held]))
    slim = replace(table, frame=table.frame.iloc[:0], groups=table.groups[:0], places=table.places[:0])
    while True:
        work = _Learning(source, slim, learner.collector)
        total = _Learnt(learner.collector.empty(), Changes(), [])
        gpus = int(estimator._device() == "cuda")
        for learnt in map_portions(work, source.portions(PORTION_ROWS), engine, gpus):
            total.add(learnt)
            say(f"the heads have learnt from {total.moments.rows:,} of {table.rows:,} rows")
        source.bad[:] = table.bad[:] = total.bad
        if not skip_bad:
            source.check_bad()
        if learner.finish_pass(total.moments):
            break
    fitted.learnt = total.moments.rows - len(fitted.held)
    table.notes += total.changes.lines()
    if total.unknown:
        table.notes.append(f"{total.unknown} rows are of classes that the sample lacks; they are left out")
    table.notes.append(
        f"{table.rows:,} rows: columns and networks are learnt from {len(table.y):,} of them, heads from all"
    )
