"""What the commands for tables do with files: fit, predict, evaluate. Everything is checked before anything is written."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bochner.cli.files import Files
from bochner.cli.output import note
from bochner.estimators.evaluation import measure
from bochner.files import write_text
from bochner.reports.model import Collected, Heading, Rows, measured_report, predicted_report
from bochner.storage import load, save
from bochner.tables import fitting
from bochner.tables.errors import TableError, listed
from bochner.tables.reading import Source, open_table, read_table
from bochner.tables.table import Changes
from bochner.tables.writing import check_output_kind, write_bad_rows, writer

PROGRESS_ROWS = 100_000  # after which predict says how far it is


@dataclass
class Fitted:
    """What a fit did.

    Attributes:
        model: The estimator for tables.
        rows: The table.
        parts: Rows that it learnt from, rows that it did not, and how many were left out.
        metrics: Those of held-out rows.
        written: Files.
    """

    model: Any
    rows: Any
    parts: Any
    metrics: dict[str, Any]
    written: list[Path]

    @property
    def summary(self) -> list[str]:
        """What was made of the file and of each column."""
        return [*self.rows.notes, *self.model.summary_]


def fit_file(files: Files, rows: fitting.TrainingTable, *, share: float, drop: Sequence[str], **options: Any) -> Fitted:
    """Fits a model to a table that was read, measures it on a share of the rows, and writes model and report.

    Args:
        files: Where the model and the report go.
        rows: The table.
        share: Share of rows held out; 0 fits to all.
        drop: Columns to leave out.
        **options: Parameters of the estimator.
    """
    parts = fitting.fit_table(rows, share=share, drop=drop, **options)
    model, page, metrics = parts.estimator, None, {}
    if len(parts.held[1]):
        held, y = model.clean(parts.held[0]), parts.held[1]
        metrics = measure(model.estimator_, held, y)
        if files.report is not None:  # a report that fails leaves no model behind
            train, own = (
                Rows(part[0], model.clean(part[0]), rows.places[part[0].index].tolist(), part[1])
                for part in (parts.train, parts.held)
            )
            heading = Heading(f"{files.table.name}: {rows.target.name}", rows.unit, rows.notes)
            page = measured_report(model, own, heading, train=train, say=note)
    assert files.out is not None
    save(files.out, model)
    written = [files.out]
    if page is not None:
        written += _write_page(files.report, page, f"The model is in {files.out}; its report could not be written")
    return Fitted(model, rows, parts, metrics, [*written, *_list_bad(files, rows.bad)])


def _list_bad(files: Files, bad: list[Any]) -> list[Path]:
    """Lists rows that cannot be used, where there are any; returns the file."""
    if not bad or files.bad_rows is None:
        return []
    write_bad_rows(files.bad_rows, bad)
    return [files.bad_rows]


def _write_page(path: Path | None, page: Any, what: str) -> list[Path]:
    """Writes a report; says what there is and what is not, where it could not be written."""
    assert path is not None
    try:
        write_text(path, page.render())
    except OSError as error:
        raise ValueError(f"{what} ({error.strerror or error}).") from error
    return [path]


def load_model(model: Path, device: str) -> Any:
    """The estimator for tables that a file holds."""
    estimator = load(model, device=device).estimator
    if not hasattr(estimator, "table_"):
        raise ValueError(f"{model} was not fitted from a table; use it from Python with bochner.storage.load.")
    return estimator


@dataclass
class Predicted:
    """What a prediction did.

    Attributes:
        rows: How many rows were predicted.
        flagged: How many are unlike the training data.
        notes: What is not as it was in training.
        written: Files.
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
    source = open_table(files.table)
    assert files.out is not None
    check_output_kind(files.out, source)
    estimator = load_model(model, device)
    kept = None if files.report is None else Collected(estimator)
    done = _predict_pieces(estimator, source, files, coverage, kept)
    done.written = [files.out]
    if listed_at := _list_bad(files, source.bad):
        done.notes.append(f"{len(source.bad)} rows cannot be used and are left out: {listed_at[0]}")
    if kept is not None and done.rows:
        heading = Heading(f"{files.table.name}: {estimator.target_.name}", source.unit, done.notes)
        page = predicted_report(estimator, kept, heading, coverage=coverage)
        what = f"The predictions are in {files.out}; their report could not be written"
        done.written += _write_page(files.report, page, what)
    return done


def _predict_pieces(estimator: Any, source: Source, files: Files, coverage: float, kept: Collected | None) -> Predicted:
    """Predicts a table piece by piece."""
    table, target = estimator.table_, estimator.target_
    table.check_names([name for name in source.names if name != target.name])
    fitting.check_added(source.names, target.name, getattr(estimator, "classes_", None))
    known = {target.name, *(column.name for column in table.columns)}
    extra = [name for name in source.names if name not in known]
    done = Predicted(
        notes=[*source.notes, *([f"columns that the model does not use: {listed(extra)}"] if extra else [])]
    )
    changes, pieces = Changes(), source.pieces()
    first = next(pieces, None)
    if first is None and not source.bad:
        raise TableError(f"{source.path} has column names but no rows.")
    decimal = "."
    if first is not None:
        table, written = table.adapted(first.texts)
        done.notes += written
        decimal = table.signs(first.texts)[1] or "."
    pieces = itertools.chain([] if first is None else [first], pieces)
    del first  # a piece is in memory no longer than it is worked on
    assert files.out is not None
    with writer(files.out, source, decimal) as take:
        for piece in pieces:
            clean = table.transform(piece.texts, changes)
            added = fitting.predict_rows(estimator, clean, coverage)
            take(piece, added)
            if kept is not None:
                kept.take(piece.texts, piece.places, clean, added)
            done.rows, done.flagged = done.rows + len(piece.texts), done.flagged + int(added["ood"].sum())
            if done.rows % PROGRESS_ROWS == 0:
                note(f"{done.rows} rows")
        if files.bad_rows is None:
            source.check_bad()
    done.notes += changes.lines()
    return done


def evaluate_file(files: Files, model: Path, device: str) -> tuple[dict[str, Any], list[str]]:
    """Measures a model on a table that has the target: metrics, and what is to be said of the table."""
    estimator, source = load_model(model, device), open_table(files.table)
    target, changes, table = estimator.target_, Changes(), estimator.table_
    table.check_names([name for name in source.names if name != target.name])
    if target.name not in source.names:
        raise ValueError(
            f"{files.table} lacks the target '{target.name}'; use 'bochner predict' for tables without it."
        )
    piece = read_table(source)
    target, said = table.adapted_target(piece.texts, target)
    y, rows = fitting.keep_readable(source, piece, target)
    if files.bad_rows is None:
        source.check_bad()
    if not len(rows):
        raise ValueError(f"{files.table} has no row with a target that can be read.")
    frame = piece.texts.iloc[rows]
    how, notes = table.adapted(frame, target)
    if hasattr(estimator, "classes_"):
        y = estimator.labels(y)
        if strange := sorted(set(y) - set(estimator.classes_)):
            raise ValueError(f"{files.table} has the class '{strange[0]}', which the model does not know.")
    clean = how.transform(frame, changes)
    metrics = measure(estimator.estimator_, clean, y)
    notes = [*source.notes, *notes, *said, *changes.lines()]
    if listed_at := _list_bad(files, source.bad):
        notes.append(f"{len(source.bad)} rows cannot be used and are left out: {listed_at[0]}")
    if files.report is not None:
        own = Rows(frame, clean, [piece.places[i] for i in rows], y)
        heading = Heading(f"{files.table.name}: {target.name}", source.unit, notes)
        page = measured_report(estimator, own, heading, say=note)
        notes += [f"written: {path}" for path in _write_page(files.report, page, "The report could not be written")]
    return metrics, notes
