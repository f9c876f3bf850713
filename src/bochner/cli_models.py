"""Commands for people with a table: fit, predict, evaluate, info. Parsing, printing and files; the work is done elsewhere.

What is heavy is imported within the commands, after what can be said without it: a misspelt file name need not wait for torch.
"""

import contextlib
import csv
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bochner.files import check_outputs
from bochner.tables.errors import TableError, check_file, shortened

# What users write is never markup: a column may be called d:on:d or [/red].
console = Console(highlight=False, markup=False, emoji=False)
errors = Console(stderr=True, highlight=False, markup=False, emoji=False)

QUICK_SECONDS = 10.0  # what --quick stands for
PROGRESS_ROWS = 100_000  # after which predict says how far it is
FITTING_SHARE = 0.85  # of a budget, with what comes before; the rest is for measuring, writing and ending

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Device = Annotated[str, typer.Option(help="'auto', 'cpu' or 'cuda'.")]
ModelFile = Annotated[Path, typer.Argument(help="A model that 'bochner fit' wrote.")]
TableFile = Annotated[Path, typer.Argument(help="A CSV, Excel or Parquet file.")]
Report = Annotated[Path | None, typer.Option(help="Also write an HTML report there.")]
SkipBad = Annotated[
    bool, typer.Option(help="Leave out rows that cannot be used, and list them in NAME-bad-rows.csv beside the output.")
]


@contextlib.contextmanager
def problems() -> Iterator[None]:
    """Turns what users can cause into one message on stderr and exit status 1."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _refuse(f"{where}{error.strerror or error}.", error)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        _refuse("There is not enough memory; use fewer rows or columns.", error)
    except TableError as error:
        _refuse("\n".join(" ".join(line.split()) for line in shortened(error.problems)), error)
    except ValueError as error:
        _refuse(" ".join(str(error).split()), error)


def _refuse(message: str, error: BaseException) -> None:
    errors.print(message, style="red", soft_wrap=True)
    raise typer.Exit(1) from error


def _note(text: str) -> None:
    """A line about what goes on, on stderr."""
    errors.print(f"bochner: {text}", soft_wrap=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _drop_names(given: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Columns to leave out: each option is the name of one, or several with commas; names with commas stand in quotes."""
    found: list[str] = []
    for text in given:
        found += [text] if text in names else [name.strip() for name in next(csv.reader([text], skipinitialspace=True))]
    return tuple(name for name in found if name)


def _widths(hidden: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _names(hidden)))
    except ValueError as error:
        raise ValueError(f"The option --hidden must be widths such as 200,25, got {hidden!r} instead.") from error


TITLES = {
    "rows": "rows",
    "rmse": "root mean squared error",
    "nlpd": "negative log predictive density",
    "r2": "R²",
    "coverage_90": "coverage of the 90 % interval",
    "width_90": "mean width of that interval",
    "accuracy": "accuracy",
    "ece": "calibration error",
    "auc": "AUC",
    "flagged": "share flagged as unlike the training data",
}


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    for name, value in found.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        console.print(f"  {TITLES.get(name, name):<42} {shown}", soft_wrap=True)


def _bad_rows_file(out: Path, table: Path) -> Path:
    """Where rows that were left out are listed."""
    return out.with_name(f"{table.stem}-bad-rows.csv")


def _budget(seconds: float | None, quick: bool, began: float) -> float | None:
    """Seconds that are left for fitting."""
    if seconds is not None and quick:
        raise ValueError(f"The options --budget and --quick exclude each other: --quick is --budget {QUICK_SECONDS:g}.")
    if quick:
        seconds = QUICK_SECONDS
    return None if seconds is None else max(1e-3, FITTING_SHARE * seconds - (time.perf_counter() - began))


def fit(
    table: TableFile,
    target: Annotated[str, typer.Option(help="Column to predict.")],
    out: Annotated[Path, typer.Option(help="Where the model goes.")] = Path("model.bochner"),
    task: Annotated[str, typer.Option(help="'auto', 'regression' or 'classification'.")] = "auto",
    drop: Annotated[
        list[str] | None, typer.Option(help="Columns to leave out, comma-separated or one option for each.")
    ] = None,
    test: Annotated[
        float, typer.Option(help="Share of rows held out to measure with; 0 fits to all.", min=0, max=0.9)
    ] = 0.2,
    kernel: Annotated[
        str, typer.Option(help="'matern32', 'matern52', 'rbf', 'exponential'; several with commas.")
    ] = "matern32,rbf",
    hidden: Annotated[
        str, typer.Option(help="Widths of the hidden layers of networks trained from 200 rows on; '' for none.")
    ] = "200,200,25",
    false_alarm: Annotated[float, typer.Option(help="Share of ordinary rows that may be flagged.")] = 0.05,
    report: Report = None,
    budget: Annotated[float | None, typer.Option(help="Seconds that it may take, but for the report.", min=1)] = None,
    quick: Annotated[bool, typer.Option(help=f"The same as --budget {QUICK_SECONDS:g}.")] = False,
    skip_bad_rows: SkipBad = False,
    seed: Annotated[int, typer.Option(help="Seed of every draw.", min=0, max=2**31 - 1)] = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Fits a model to a table as it is, and says how well it does on rows it has not seen.

    Dates, currencies, yes and no, ids, texts and missing values are recognised; a line says what was done with each column.

    Examples:
        bochner fit houses.csv --target price
        bochner fit churn.csv --target left --drop name --report churn.html --quick
    """
    began = time.perf_counter()
    with problems():
        check_file(table)
        bad_rows = [_bad_rows_file(out, table)] if skip_bad_rows else []
        _check_fit(table, [out, *([report] if report else []), *bad_rows], task, report is not None and test == 0)
        _budget(budget, quick, began)
        from bochner.evaluation import measure
        from bochner.storage import save
        from bochner.tables.estimators import TableRegressor
        from bochner.tables.fitting import fit_table, read_training
        from bochner.tables.reading import open_table
        from bochner.tables.writing import write_bad_rows

        options: Any = {"kernel": _names(kernel), "hidden_layer_sizes": _widths(hidden), "false_alarm": false_alarm}
        options |= {"device": device, "random_state": seed, "verbose": True}
        TableRegressor(**options).check_parameters()
        _note(f"reading {table}")
        drops = _drop_names(drop or [], open_table(table).names)
        rows = read_training(table, target, drops, task, skip_bad_rows)
        options["budget"] = _budget(budget, quick, began)
        fitted = fit_table(rows, share=test, drop=drops, **options)
        model = fitted.estimator
        held = (model.clean(fitted.held[0]), fitted.held[1]) if len(fitted.held[1]) else None
        found = measure(model.estimator_, *held) if held is not None else {}
        page = None
        if report is not None and held is not None:  # a report that fails leaves no model behind
            from bochner.reports.model import Rows, measured_report

            train, own = (
                Rows(part[0], model.clean(part[0]), rows.places[part[0].index].tolist(), part[1])
                for part in (fitted.train, fitted.held)
            )
            about: Any = {"title": f"{table.name}: {target}", "unit": rows.unit, "notes": rows.notes}
            page = measured_report(model, own, train=train, say=_note, **about)
        save(out, model)
        if rows.bad:
            write_bad_rows(bad_rows[0], rows.bad)
        if report is not None and page is not None:
            _write_page(report, page, f"The model is in {out}; its report could not be written")
    summary = [*rows.notes, *model.summary_]
    if report is not None and page is None:
        _note("no report: no held-out row is of a class that was learned")
    written = [out, *([report] if report and page else []), *(bad_rows if rows.bad else [])]
    if as_json:
        answer: dict[str, Any] = {"model": str(out), "task": rows.target.task, "rows": len(fitted.train[1])}
        answer |= {
            "inputs": len(model.table_.outputs),
            "left_out": len(rows.bad),
            "summary": summary,
            "held_out": found,
        }
        print(json.dumps(answer, allow_nan=False))
    else:
        _tell(fitted, found, summary, len(rows.bad), written)


def _check_report(report: Path | None) -> None:
    if report == Path("-"):
        raise ValueError("The report must be a file, got '-' instead.")


def _check_fit(table: Path, outputs: list[Path], task: str, report_without_rows: bool) -> None:
    """Raises a ValueError for options that cannot be, before any work is done."""
    if Path("-") in outputs:
        raise ValueError("The outputs of fit must be files, got '-' instead.")
    check_outputs(outputs, [table])
    if report_without_rows:
        raise ValueError("The report measures on held-out rows: give --test a share above 0, or no --report.")
    if task not in (tasks := ("auto", "regression", "classification")):
        from bochner.activations import unknown

        raise ValueError(unknown("task", task, tasks))


def _write_page(path: Path, page: Any, what: str) -> None:
    """Writes a report; says what there is and what is not, where it could not be written."""
    from bochner.experiments.rows import write_text

    try:
        write_text(path, page.render())
    except OSError as error:
        raise ValueError(f"{what} ({error.strerror or error}).") from error


def _tell(fitted: Any, found: dict[str, Any], summary: list[str], left_out: int, written: list[Path]) -> None:
    """What was done with the columns, what was fitted, how well it does, and where it is."""
    model = fitted.estimator
    rows, held = len(fitted.train[1]), len(fitted.held[1]) + fitted.left_out
    for line in summary:
        console.print(f"  {line}", soft_wrap=True)
    task, inputs = model.target_.task, len(model.table_.outputs)
    console.print(f"{task} of '{model.target_.name}' from {inputs} columns", soft_wrap=True)
    rest = "; the others measure it (--test 0 fits to all)" if held else ""
    console.print(f"fitted to {rows} of {rows + held} rows{rest}", soft_wrap=True)
    if left_out:
        console.print(f"{left_out} rows cannot be used and are left out: {written[-1]}", soft_wrap=True)
    if found:
        rest = f" ({fitted.left_out} of classes without a row to learn from are left out)" if fitted.left_out else ""
        console.print(f"on held-out rows{rest}:")
        _show(found, as_json=False)
    console.print(f"written: {'  '.join(str(p) for p in written)}", soft_wrap=True)
    console.print(f"next: bochner predict {written[0]} NEW.csv", soft_wrap=True)


def _load(model: Path, device: str) -> Any:
    """The estimator for tables that a file holds."""
    from bochner.storage import load

    estimator = load(model, device=device).estimator
    if not hasattr(estimator, "table_"):
        raise ValueError(f"{model} was not fitted from a table; use it from Python with bochner.storage.load.")
    return estimator


def _default_output(table: Path) -> Path:
    suffix = ".csv" if table.suffix.lower() == ".xlsx" else table.suffix
    return table.with_name(f"{table.stem}-predictions{suffix}")


def predict(
    model: ModelFile,
    table: TableFile,
    out: Annotated[
        Path | None,
        typer.Option(help="Where it goes: .csv, .parquet or - ; by default beside the table, NAME-predictions.csv."),
    ] = None,
    coverage: Annotated[float, typer.Option(help="Probability of the interval.")] = 0.9,
    report: Report = None,
    skip_bad_rows: SkipBad = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Adds predictions to a table: mean, standard deviation and interval, or class probabilities; OOD score and flag.

    The table is read in pieces, so that its size does not matter. Columns may come in any order.

    Example:
        bochner predict model.bochner new.csv --out predictions.csv --report predictions.html
    """
    with problems():
        if not 0 < coverage < 1:
            raise ValueError(f"The option --coverage must lie between 0 and 1, got {coverage} instead.")
        check_file(table)
        out = out or _default_output(table)
        to_stdout = out == Path("-")
        bad_rows = _bad_rows_file(table if to_stdout else out, table)
        outputs = [*([] if to_stdout else [out]), *([bad_rows] if skip_bad_rows else []), *([report] if report else [])]
        _check_report(report)
        check_outputs(outputs, [table, model])
        if to_stdout and as_json:
            raise ValueError("The options --json and --out - both write to standard output; choose one.")
        from bochner.tables.reading import open_table
        from bochner.tables.writing import check_output_kind, write_bad_rows

        source = open_table(table)
        check_output_kind(out, source)
        estimator, kept = _load(model, device), None
        if report is not None:
            from bochner.reports.model import Collected

            kept = Collected(estimator)
        rows, flagged, notes = _predict_pieces(estimator, source, out, coverage, skip_bad_rows, kept)
        if source.bad:
            write_bad_rows(bad_rows, source.bad)
            notes.append(f"{len(source.bad)} rows cannot be used and are left out: {bad_rows}")
        if report is not None and kept is not None and rows:
            from bochner.reports.model import predicted_report

            about: Any = {"title": f"{table.name}: {estimator.target_.name}", "unit": source.unit, "notes": notes}
            page = predicted_report(estimator, kept, coverage=coverage, **about)
            _write_page(report, page, f"The predictions are in {out}; their report could not be written")
    if as_json:
        print(json.dumps({"out": str(out), "rows": rows, "flagged": flagged, "notes": notes}))
        return
    to = errors if to_stdout else console
    written = f"{out}  {report}" if report is not None and rows else str(out)
    to.print(f"{rows} rows, {flagged} unlike the training data; written: {written}", soft_wrap=True)
    for line in notes:
        to.print(f"  {line}", soft_wrap=True)


def _predict_pieces(
    estimator: Any, source: Any, out: Path, coverage: float, skip_bad: bool, kept: Any = None
) -> tuple[int, int, list[str]]:
    """Predicts a table piece by piece: its rows, how many are flagged, and what is not as it was in training."""
    from bochner.tables import fitting
    from bochner.tables.errors import listed
    from bochner.tables.table import Changes
    from bochner.tables.writing import writer

    table, target = estimator.table_, estimator.target_
    table.check_names([name for name in source.names if name != target.name])
    fitting.check_added(source.names, target.name, getattr(estimator, "classes_", None))
    known = {target.name, *(column.name for column in table.columns)}
    extra = [name for name in source.names if name not in known]
    notes = [*source.notes, *([f"columns that the model does not use: {listed(extra)}"] if extra else [])]
    rows = flagged = 0
    changes, pieces = Changes(), source.pieces()
    first = next(pieces, None)
    if first is None and not source.bad:
        raise TableError(f"{source.path} has column names but no rows.")
    decimal = "."
    if first is not None:
        table, written = table.adapted(first.texts)
        notes += written
        decimal = table.decimal(first.texts) or "."
    pieces = itertools.chain([] if first is None else [first], pieces)
    del first  # a piece is in memory no longer than it is worked on
    with writer(out, source, decimal) as take:
        for piece in pieces:
            clean = table.transform(piece.texts, changes)
            added = fitting.predict_rows(estimator, clean, coverage)
            take(piece, added)
            if kept is not None:
                kept.take(piece.texts, piece.places, clean, added)
            rows, flagged = rows + len(piece.texts), flagged + int(added["ood"].sum())
            if rows % PROGRESS_ROWS == 0:
                _note(f"{rows} rows")
        if not skip_bad:
            source.check_bad()
    return rows, flagged, [*notes, *changes.lines()]


def evaluate(
    model: ModelFile,
    table: TableFile,
    report: Report = None,
    skip_bad_rows: SkipBad = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measures a model on a table that has the target.

    Example:
        bochner evaluate model.bochner test.csv --report test.html
    """
    with problems():
        check_file(table)
        bad_rows = _bad_rows_file(table, table)
        _check_report(report)
        check_outputs([*([bad_rows] if skip_bad_rows else []), *([report] if report else [])], [table, model])
        from bochner.evaluation import measure
        from bochner.tables.fitting import keep_readable
        from bochner.tables.reading import open_table, read_table
        from bochner.tables.table import Changes
        from bochner.tables.writing import write_bad_rows

        estimator, source = _load(model, device), open_table(table)
        target, changes = estimator.target_, Changes()
        estimator.table_.check_names([name for name in source.names if name != target.name])
        if target.name not in source.names:
            raise ValueError(f"{table} lacks the target '{target.name}'; use 'bochner predict' for tables without it.")
        piece = read_table(source)
        target, said = estimator.table_.adapted_target(piece.texts, target)
        y, rows = keep_readable(source, piece, target)
        if not skip_bad_rows:
            source.check_bad()
        if not len(rows):
            raise ValueError(f"{table} has no row with a target that can be read.")
        frame = piece.texts.iloc[rows]
        how, notes = estimator.table_.adapted(frame, target)
        notes += said
        if hasattr(estimator, "classes_"):
            y = estimator.labels(y)
            if strange := sorted(set(y) - set(estimator.classes_)):
                raise ValueError(f"{table} has the class '{strange[0]}', which the model does not know.")
        clean = how.transform(frame, changes)
        found = measure(estimator.estimator_, clean, y)
        notes = [*source.notes, *notes, *changes.lines()]
        if source.bad:
            write_bad_rows(bad_rows, source.bad)
            notes.append(f"{len(source.bad)} rows cannot be used and are left out: {bad_rows}")
        if report is not None:
            from bochner.reports.model import Rows, measured_report

            own = Rows(frame, clean, [piece.places[i] for i in rows], y)
            about: Any = {"title": f"{table.name}: {target.name}", "unit": source.unit, "notes": notes}
            _write_page(report, measured_report(estimator, own, say=_note, **about), "The report could not be written")
            notes.append(f"written: {report}")
    _show(found, as_json)
    for line in [] if as_json else notes:
        console.print(f"  {line}", soft_wrap=True)


def info(model: ModelFile, as_json: Json = False) -> None:
    """Shows what a model file holds.

    Example:
        bochner info model.bochner
    """
    with problems():
        if not model.is_file():
            raise ValueError(
                f"{model} {'is a folder, not a file' if model.is_dir() else 'does not exist'}; give a model file."
            )
        from bochner.estimators.members import describe
        from bochner.storage import load

        saved = load(model, device="cpu")
    found: dict[str, Any] = dict(saved.about)
    table = saved.estimator if hasattr(saved.estimator, "table_") else None
    estimator = saved.estimator if table is None else table.estimator_
    kernels = estimator.kernel if isinstance(estimator.kernel, tuple | list) else (estimator.kernel,)
    found |= {"kernel": ", ".join(map(str, kernels)), "hidden_layer_sizes": list(estimator.hidden_layer_sizes)}
    found["false_alarm"] = estimator.false_alarm
    found["members"] = "; ".join(describe(mixture.members) for mixture in estimator.mixtures_)
    if table is not None:
        found["target"] = table.target_.name
        found["columns"] = "; ".join(table.summary_[:-1])
    if hasattr(estimator, "classes_"):
        found["classes"] = ", ".join(map(str, estimator.classes_))
    else:
        found["noise"] = estimator.noise_ if len(estimator.mixtures_) == 1 else list(map(float, estimator.noise_))
    found["ood_threshold"] = estimator.ood_threshold_
    _show(found, as_json)


def survive_output() -> None:
    """Lets letters that standard output does not know become question marks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
