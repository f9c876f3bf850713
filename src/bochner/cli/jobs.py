"""The work of the commands for tables: fit, predict and evaluate on files. Everything is checked before anything is written."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bochner.cli.files import Files
from bochner.cli.output import note
from bochner.cli.process import note_finished
from bochner.errors import listed
from bochner.estimators.evaluation import Forecast, forecast, forecast_metrics
from bochner.files import write_text
from bochner.storage.models import load, save
from bochner.tables import fitting
from bochner.tables.cells import as_text
from bochner.tables.files.reading import BadRows, Source, open_table, read_table
from bochner.tables.files.writing import check_output_kind, write_bad_rows, writer
from bochner.tables.table import Changes

if TYPE_CHECKING:
    from bochner.reports.model import Collected
    from bochner.reports.model.page import Page

PROGRESS_ROWS = 100_000  # rows between two lines of progress of predict
FITTING_SHARE = 0.85  # share of the time left after reading that goes to the fit; the rest is for measuring and writing
TIMED_ROWS = 256  # held-out rows that are predicted first where time is short, to learn how many more there is time for


@dataclass
class Fitted:
    """The result of a fit.

    Attributes:
        model: The estimator for tables.
        table: The table that was read.
        fitted: The fitted estimator, and which rows were held out.
        metrics: Metrics on the held-out rows, or on as many as there was time for; empty where there are none.
        written: Files that were written, the model first.
        seconds: Where the time went from the table that was read to the written model: "fitting", and "measuring and writing".
    """

    model: Any
    table: fitting.TrainingTable
    fitted: fitting.FittedTable
    metrics: dict[str, Any]
    written: list[Path]
    seconds: dict[str, float]

    @property
    def summary(self) -> list[str]:
        """Lines that say what the file and each column were taken for."""
        return [*self.table.notes, *self.model.summary_]


def fit_file(
    files: Files,
    table: fitting.TrainingTable,
    *,
    share: float,
    drop: Sequence[str],
    deadline: float = math.inf,
    engine: str = "local",
    **options: Any,
) -> Fitted:
    """Fits a model to a table, measures it on a share of the rows, and writes model and report.

    Args:
        files: Where the model and the report go.
        table: The table.
        share: Share of rows held out; 0 fits to all.
        drop: Columns to leave out.
        deadline: When all but the report should be ready, on the clock of ``time.perf_counter``.
        engine: "local" or "ray": where the heads learn from a table that is larger than memory.
        **options: Parameters of the estimator.
    """
    if deadline < math.inf:
        options["budget"] = max(1e-3, FITTING_SHARE * (deadline - time.perf_counter()))
    began = time.perf_counter()
    fitted = fitting.fit_table(table, share=share, drop=drop, **options)
    model, metrics, of_all = fitted.estimator, {}, None
    if table.sampled and deadline == math.inf:
        from bochner.streaming.tables import learn_from_all

        learn_from_all(fitted, table, engine=engine, skip_bad=files.bad_rows is not None, say=note)
    fit_ended = time.perf_counter()
    if len(fitted.held):
        measured = fitted.held[_in_time(fitted, deadline)]
        y = table.y[measured]
        predicted = forecast(model.estimator_, fitted.clean.iloc[measured], y)
        metrics = forecast_metrics(model.estimator_, y, predicted)
        of_all = predicted if len(measured) == len(fitted.held) else None
    assert files.out is not None
    save(files.out, model)
    note_finished(files.out)
    seconds = {"fitting": fit_ended - began, "measuring and writing": time.perf_counter() - fit_ended}
    bad = _list_bad(files, table.bad)
    written = [files.out]
    if files.report is not None and len(fitted.held):  # after the model: a report that fails does not lose the fit
        written.append(write_page(files, _held_out_report(files, table, fitted, of_all)))
    return Fitted(model, table, fitted, metrics, [*written, *bad], seconds)


def _in_time(fitted: fitting.FittedTable, deadline: float) -> np.ndarray:
    """Positions of the held-out rows to measure with: all, or as many, evenly spaced, as can be predicted before the deadline."""
    count = len(fitted.held)
    if deadline == math.inf or count <= 2 * TIMED_ROWS:
        return np.arange(count)
    start = time.perf_counter()
    forecast(fitted.estimator.estimator_, fitted.clean.iloc[fitted.held[:TIMED_ROWS]])
    now = time.perf_counter()
    rows = int(TIMED_ROWS * (deadline - now) / (now - start))
    return np.unique(np.linspace(0, count - 1, min(count, max(TIMED_ROWS, rows))).round().astype(int))


def _held_out_report(
    files: Files, table: fitting.TrainingTable, fitted: fitting.FittedTable, predicted: Forecast | None
) -> "Page":
    """The report on the held-out rows of a fit, from what the model says of them if that is known already."""
    from bochner.reports.model import Heading, Rows, measured_report

    train, held = (
        Rows(table.frame.iloc[at].map(as_text), fitted.clean.iloc[at], table.places[at].tolist(), table.y[at])
        for at in (fitted.train, fitted.held)
    )
    learnt = fitted.learnt if fitted.learnt > len(fitted.train) else None
    title = f"{files.table.name}: {table.target.name}"
    heading = Heading(title, table.unit, table.notes, files.table.name, learnt)
    return measured_report(fitted.estimator, held, heading, predicted=predicted, train=train, say=note)


def _list_bad(files: Files, bad: BadRows) -> list[Path]:
    """Writes the list of rows that cannot be used, if there are any; returns its path."""
    if files.bad_rows is None:
        return []
    if not bad:
        if files.bad_rows.is_file():
            note(f"no row was left out; {files.bad_rows} is of an earlier run")
        return []
    write_bad_rows(files.bad_rows, bad)
    note_finished(files.bad_rows)
    return [files.bad_rows]


def write_page(files: Files, page: "Page") -> Path:
    """Writes a report; returns its path."""
    assert files.report is not None
    write_text(files.report, page.render())
    note_finished(files.report)
    return files.report


def load_model(model: Path, device: str) -> Any:
    """The estimator for tables that a file holds."""
    estimator = load(model, device=device).estimator
    if not hasattr(estimator, "table_"):
        raise ValueError(f"{model} was not fitted from a table; use it from Python with bochner.storage.load.")
    return estimator


@dataclass
class Predicted:
    """The result of a prediction.

    Attributes:
        rows: Number of rows that were predicted.
        flagged: Number of rows that are unlike the training data.
        notes: Lines that say what differs from the training table.
        written: Files that were written, the predictions first.
    """

    rows: int = 0
    flagged: int = 0
    notes: list[str] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)


def predict_file(files: Files, model: Path, *, coverage: float, device: str) -> Predicted:
    """Adds predictions to a table, piece by piece, and writes a report on them.

    Args:
        files: The table, and where it goes with its new columns.
        model: A model file.
        coverage: Probability of the intervals.
        device: Where to compute.
    """
    from bochner.reports.model import Collected, Heading, predicted_report

    source = open_table(files.table)
    assert files.out is not None
    check_output_kind(files.out, source)
    estimator = load_model(model, device)
    collected = None if files.report is None else Collected(estimator)
    result = _predict_pieces(estimator, source, files, coverage, collected)
    note_finished(files.out)
    result.written = [files.out]
    if listed_at := _list_bad(files, source.bad):
        result.notes.append(f"{len(source.bad)} rows cannot be used and are left out: {listed_at[0]}")
    if collected is not None:
        heading = Heading(f"{files.table.name}: {estimator.target_.name}", source.unit, result.notes)
        page = predicted_report(estimator, collected, heading, coverage=coverage)
        result.written.append(write_page(files, page))
    return result


def _predict_pieces(
    estimator: Any, source: Source, files: Files, coverage: float, collected: "Collected | None"
) -> Predicted:
    """Predicts a table piece by piece."""
    table, target = estimator.table_, estimator.target_
    table.check_names([name for name in source.names if name != target.name])
    fitting.check_added(source.names, target.name, getattr(estimator, "classes_", None))
    known = {target.name, *(column.name for column in table.columns)}
    extra = [name for name in source.names if name not in known]
    result = Predicted(
        notes=[*source.notes, *([f"columns that the model does not use: {listed(extra)}"] if extra else [])]
    )
    changes, pieces = Changes(), (piece for piece in source.pieces() if piece.places)
    first = next(pieces, None)
    if first is None:
        source.raise_empty()
    table, written = table.adapted(first.frame)
    result.notes += written
    decimal = table.decimal_sign(first.frame) or "."
    pieces = itertools.chain([first], pieces)
    del first  # a piece is in memory no longer than it is worked on
    assert files.out is not None
    with writer(files.out, source, decimal) as take:
        for piece in pieces:
            clean = table.transform(piece.frame, changes)
            added = fitting.predict_rows(estimator, clean, coverage)
            take(piece, added)
            if collected is not None:
                collected.take(piece.texts, piece.places, clean, added)
            result.rows, result.flagged = result.rows + len(piece.frame), result.flagged + int(added["ood"].sum())
            if result.rows % PROGRESS_ROWS == 0:
                note(f"{result.rows} rows")
        if files.bad_rows is None:
            source.check_bad()
    result.notes += changes.lines()
    return result


@dataclass
class Evaluated:
    """The result of an evaluation.

    Attributes:
        metrics: Metrics on the rows of the table.
        notes: Lines that say what the table was taken for, and what differs from the training table.
        make_page: Makes the report; None where none is wanted.
    """

    metrics: dict[str, Any]
    notes: list[str]
    make_page: "Callable[[], Page] | None" = None


def evaluate_file(files: Files, model: Path, device: str) -> Evaluated:
    """Measures a model on a table that has the target."""
    estimator, source = load_model(model, device), open_table(files.table)
    target, changes, table = estimator.target_, Changes(), estimator.table_
    table.check_names([name for name in source.names if name != target.name])
    if target.name not in source.names:
        raise ValueError(
            f"{files.table} lacks the target '{target.name}'; use 'bochner predict' for tables without it."
        )
    piece = read_table(source)
    target, target_notes = table.adapted_target(piece.frame, target)
    y, rows = fitting.keep_readable(source, piece, target)
    if hasattr(estimator, "classes_"):
        y, rows = fitting.keep_known(source, piece, estimator, y, rows)
    if files.bad_rows is None:
        source.check_bad()
    if not len(rows):
        raise ValueError(f"{files.table} has no row with a target that can be read.")
    frame = piece.frame.iloc[rows]
    adapted, column_notes = table.adapted(frame, target)
    clean = adapted.transform(frame, changes)
    predicted = forecast(estimator.estimator_, clean, y)
    notes = [*source.notes, *column_notes, *target_notes]
    result = Evaluated(forecast_metrics(estimator.estimator_, y, predicted), notes)
    result.notes += changes.lines()
    if listed_at := _list_bad(files, source.bad):
        result.notes.append(f"{len(source.bad)} rows cannot be used and are left out: {listed_at[0]}")
    if files.report is not None:
        from bochner.reports.model import Heading, Rows, measured_report

        evaluated = Rows(frame.map(as_text), clean, [piece.places[row] for row in rows], y)
        heading = Heading(f"{files.table.name}: {target.name}", source.unit, result.notes, files.table.name)
        result.make_page = partial(measured_report, estimator, evaluated, heading, predicted=predicted, say=note)
    return result
