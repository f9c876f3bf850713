"""Commands for people with a table: fit, predict, evaluate, info. Options in, text out; ``jobs`` does the work."""

import csv
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bochner.cli.files import STDOUT, Files, check_model_file
from bochner.cli.output import note, say
from bochner.cli.process import start_time
from bochner.errors import unknown_name
from bochner.tables.files.paths import ARROW_SUFFIXES, PATTERN_CHARACTERS, files_of, suffix_of

if TYPE_CHECKING:
    from bochner.cli.jobs import Fitted

QUICK_SECONDS = 10.0  # seconds that --quick allows
NOTABLE_OVERRUN = 1.2  # factor on the budget from which on a line says why it was not kept
MAX_WIDTH = 10_000  # units of a hidden layer
MAX_LAYERS = 20  # hidden layers
TASKS = ("auto", "regression", "classification")

Engine = Annotated[
    str,
    typer.Option(help="'local' or 'ray': where a table larger than memory is worked on; RAY_ADDRESS names a cluster."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Device = Annotated[str, typer.Option(help="'auto', 'cpu' or 'cuda'.")]
ModelFile = Annotated[Path, typer.Argument(help="A model that 'bochner fit' wrote.")]
TableFile = Annotated[
    Path, typer.Argument(help="A CSV, Excel, Parquet, Feather or Arrow file, a folder of them, or a pattern.")
]
Report = Annotated[Path | None, typer.Option(help="Also write an HTML report there.")]
SkipBad = Annotated[
    bool, typer.Option(help="Leave out rows that cannot be used, and list them in NAME-bad-rows.csv beside the output.")
]
TargetName = Annotated[str, typer.Option(help="Column to predict.")]
ModelOut = Annotated[Path, typer.Option(help="Where the model goes.")]
Task = Annotated[str, typer.Option(help="'auto', 'regression' or 'classification'.")]
Drop = Annotated[list[str] | None, typer.Option(help="Columns to leave out, comma-separated or one option for each.")]
Keep = Annotated[
    list[str] | None,
    typer.Option(help="Columns that are no ids, codes or numbers of the rows, though they look like it; as --drop."),
]
Test = Annotated[float, typer.Option(help="Share of rows held out to measure with; 0 fits to all.", min=0, max=0.9)]
Kernel = Annotated[str, typer.Option(help="'matern32', 'matern52', 'rbf', 'exponential'; several with commas.")]
Hidden = Annotated[
    str, typer.Option(help="Widths of the hidden layers of networks trained from 200 rows on; '' for none.")
]
FalseAlarm = Annotated[float, typer.Option(help="Share of ordinary rows that may be flagged.")]
Budget = Annotated[float | None, typer.Option(help="Seconds that it may take, but for the report.", min=1)]
Quick = Annotated[bool, typer.Option(help=f"The same as --budget {QUICK_SECONDS:g}.")]
Seed = Annotated[int, typer.Option(help="Seed of every draw.", min=0, max=2**31 - 1)]
PredictionOut = Annotated[
    Path | None,
    typer.Option(
        help="Where it goes: .csv, .parquet or - ; by default NAME-predictions.csv or .parquet beside the table."
    ),
]
Coverage = Annotated[float, typer.Option(help="Probability of the interval.")]


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _column_names(columns: Sequence[str], *options: Sequence[str] | None) -> list[list[str]]:
    """Names of columns in each option: one column's name, or several with commas; names with commas stand in quotes."""
    found = []
    for texts in options:
        names: list[str] = []
        for text in texts or []:
            if text in columns:
                names.append(text)
            else:
                rows = csv.reader(text.splitlines(keepends=True), skipinitialspace=True)
                names += [name.strip() for row in rows for name in row]
        found.append([name for name in names if name])
    return found


def _widths(hidden: str) -> tuple[int, ...]:
    try:
        widths = tuple(map(int, _names(hidden)))
    except ValueError as error:
        raise ValueError(f"The option --hidden must be widths such as 200,25, got {hidden[:50]!r} instead.") from error
    if len(widths) > MAX_LAYERS or any(width > MAX_WIDTH for width in widths):
        raise ValueError(
            f"The option --hidden must be up to {MAX_LAYERS} widths up to {MAX_WIDTH}, got {hidden[:50]!r} instead."
        )
    return widths


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


def _show(values: dict[str, Any], as_json: bool) -> None:
    """Prints named values, a line for each, or all as one JSON object."""
    if as_json:
        print(json.dumps(values, allow_nan=False))
        return
    for name, value in values.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        say(f"  {TITLES.get(name, name):<42} {shown}")


def _beside(table: Path, ending: str) -> Path:
    """A file beside a table with an ending after its name; of a pattern, which is no name, the ending alone in this folder."""
    if not table.exists() and any(character in str(table) for character in PATTERN_CHARACTERS):
        return Path(ending)
    named = table if table.name and table.name != ".." else table.resolve()
    stem = named.name if table.is_dir() else named.name[: len(named.name) - len(suffix_of(named))]
    return named.parent / f"{stem}-{ending}"


def _bad_rows_file(table: Path, wanted: bool, out: Path | None = None) -> Path | None:
    """The path for the list of rows that were left out; None where such rows are an error."""
    beside = _beside(table, "bad-rows.csv")
    return None if not wanted else beside if out is None else out.with_name(beside.name)


def _default_output(table: Path) -> Path:
    """The path for predictions where the user names none: of the kind of the table, if predictions can be of that kind."""
    kind = suffix_of(files_of(table)[0])
    suffix = ".parquet" if kind in ARROW_SUFFIXES else ".csv" if kind == ".xlsx" else kind.removesuffix(".gz")
    return _beside(table, f"predictions{suffix}")


def _budget(seconds: float | None, quick: bool) -> float:
    """Seconds that it may take, but for the report."""
    if seconds is not None and quick:
        raise ValueError(f"The options --budget and --quick exclude each other: --quick is --budget {QUICK_SECONDS:g}.")
    return QUICK_SECONDS if quick else math.inf if seconds is None else seconds


def fit(
    table: TableFile,
    target: TargetName,
    out: ModelOut = Path("model.bochner"),
    task: Task = "auto",
    drop: Drop = None,
    keep: Keep = None,
    test: Test = 0.2,
    kernel: Kernel = "matern32,rbf",
    hidden: Hidden = "200,200,25",
    false_alarm: FalseAlarm = 0.05,
    report: Report = None,
    budget: Budget = None,
    quick: Quick = False,
    skip_bad_rows: SkipBad = False,
    seed: Seed = 0,
    device: Device = "auto",
    engine: Engine = "local",
    as_json: Json = False,
) -> None:
    """Fits a model to a table as it is, and says how well it does on rows it has not seen.

    Dates, currencies, yes and no, ids, texts and missing values are recognised; a line says what was done with each column.

    Examples:
        bochner fit houses.csv --target price
        bochner fit churn.csv --target left --drop name --report churn.html --quick
    """
    began, seconds = start_time(), _budget(budget, quick)
    files = Files(table, out, report, _bad_rows_file(table, skip_bad_rows, out))
    _check_fit(files, task, test)
    from bochner.cli.jobs import fit_file
    from bochner.estimators import Settings
    from bochner.streaming.tables import TableSampler
    from bochner.tables.files.reading import open_table
    from bochner.tables.fitting import Names, read_training

    options = _checked_options(kernel, hidden, engine, false_alarm=false_alarm, device=device, random_state=seed)
    note(f"reading {table}")
    source = open_table(table)
    drop, keep = _column_names(source.names, drop, keep)
    sampler = TableSampler(target, Settings().sample_rows, seed, engine, note)
    rows = read_training(source, target, Names(drop, keep), task, skip_bad_rows, sampler)
    read = time.perf_counter() - began
    result = fit_file(files, rows, share=test, drop=drop, keep=keep, deadline=began + seconds, engine=engine, **options)
    _note_overrun(seconds, {"starting and reading": read} | result.seconds)
    if report is not None and report not in result.written:
        note("no report: no held-out row is of a class that was learned")
    _tell_json(result) if as_json else _tell(result)


def _checked_options(kernel: str, hidden: str, engine: str, **options: Any) -> dict[str, Any]:
    """Parameters of the estimator, after a check of them and of the engine that needs no table."""
    from bochner.streaming.engines import check_engine
    from bochner.tables.estimators import TableRegressor

    check_engine(engine)
    options |= {"kernel": _names(kernel), "hidden_layer_sizes": _widths(hidden), "verbose": True}
    TableRegressor(**options).check_parameters()
    return options


def _note_overrun(allowed: float, seconds: dict[str, float]) -> None:
    """Says that a budget was not kept, and where the time up to the written model went; all in seconds."""
    took = sum(seconds.values())
    if took > NOTABLE_OVERRUN * allowed:
        parts = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items())
        note(f"{allowed:g} s were too few, the model took {took:.1f} s: {parts}")


def _check_fit(files: Files, task: str, test: float) -> None:
    """Raises a ValueError for files and options that cannot be used, before any work is done."""
    if STDOUT in (files.out, files.report):
        raise ValueError("The outputs of fit must be files, got '-' instead.")
    files.check()
    if files.report is not None and test == 0:
        raise ValueError("The report measures on held-out rows: give --test a share above 0, or no --report.")
    if task not in TASKS:
        raise ValueError(unknown_name("task", task, TASKS))


def _tell_json(result: "Fitted") -> None:
    """Prints what ``_tell`` says as one JSON object, for programs."""
    answer: dict[str, Any] = {"model": str(result.written[0]), "task": result.table.target.task}
    answer |= {"rows": result.fitted.learnt, "inputs": len(result.model.table_.outputs)}
    answer |= {"left_out": len(result.table.bad), "summary": result.summary, "held_out": result.metrics}
    print(json.dumps(answer, allow_nan=False))


def _tell(result: "Fitted") -> None:
    """Prints what the columns were taken for, what was fitted, how good it is, and where it was written."""
    model, fitted = result.model, result.fitted
    rows, held = fitted.learnt, len(fitted.held) + fitted.left_out
    for line in result.summary:
        say(f"  {line}")
    say(f"{model.target_.task} of '{model.target_.name}' from {len(model.table_.outputs)} columns")
    detail = "; the others measure it (--test 0 fits to all)" if held else ""
    say(f"fitted to {rows} of {rows + held} rows{detail}")
    if result.table.bad:
        say(f"{len(result.table.bad)} rows cannot be used and are left out: {result.written[-1]}")
    if result.metrics:
        detail = f" ({fitted.left_out} of classes without a row to learn from are left out)" if fitted.left_out else ""
        measured, count = result.metrics["rows"], len(fitted.held)
        timed = "" if measured == count else f", {measured} of {count} for the time"
        say(f"on held-out rows{detail}{timed}:")
        _show(result.metrics, as_json=False)
    say(f"written: {'  '.join(str(path) for path in result.written)}")
    say(f"next: bochner predict {result.written[0]} NEW.csv")


def predict(
    model: ModelFile,
    table: TableFile,
    out: PredictionOut = None,
    coverage: Coverage = 0.9,
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
    if not 0 < coverage or not 0.5 + coverage / 2 < 1:  # its upper end is a quantile below 1, also when rounded
        raise ValueError(f"The option --coverage must lie between 0 and 1, got {coverage} instead.")
    out = out or _default_output(table)
    if out == STDOUT and as_json:
        raise ValueError("The options --json and --out - both write to standard output; choose one.")
    bad_rows = _bad_rows_file(table, skip_bad_rows, None if out == STDOUT else out)
    files = Files(table, out, report, bad_rows)
    files.check(model)
    from bochner.cli.jobs import predict_file

    result = predict_file(files, model, coverage=coverage, device=device)
    if as_json:
        print(json.dumps({"out": str(out), "rows": result.rows, "flagged": result.flagged, "notes": result.notes}))
        return
    tell = note if out == STDOUT else say
    written = "  ".join(str(path) for path in result.written)
    tell(f"{result.rows} rows, {result.flagged} unlike the training data; written: {written}")
    for line in result.notes:
        tell(f"  {line}")


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
    files = Files(table, None, report, _bad_rows_file(table, skip_bad_rows))
    files.check(model)
    from bochner.cli.jobs import evaluate_file, write_page

    result = evaluate_file(files, model, device)
    _show(result.metrics, as_json)
    for line in [] if as_json else result.notes:
        say(f"  {line}")
    if result.make_page is not None:  # made last: where that fails, the metrics are said nevertheless
        path = write_page(files, result.make_page())
        if not as_json:
            say(f"  written: {path}")


def info(model: ModelFile, as_json: Json = False) -> None:
    """Shows what a model file holds.

    Example:
        bochner info model.bochner
    """
    check_model_file(model)
    from bochner.estimators.base import as_kernels
    from bochner.members.member import describe_members
    from bochner.storage import load

    saved = load(model, device="cpu")
    values: dict[str, Any] = dict(saved.about)
    table = saved.estimator if hasattr(saved.estimator, "table_") else None
    estimator = saved.estimator if table is None else table.estimator_
    kernels = as_kernels(estimator.kernel)
    values |= {"kernel": ", ".join(map(str, kernels)), "hidden_layer_sizes": list(estimator.hidden_layer_sizes)}
    values["false_alarm"] = estimator.false_alarm
    values["members"] = "; ".join(describe_members(mixture.members) for mixture in estimator.mixtures_)
    if table is not None:
        values["target"] = table.target_.name
        values["columns"] = "; ".join(table.summary_[:-1])
    if hasattr(estimator, "classes_"):
        values["classes"] = ", ".join(map(str, estimator.classes_))
    else:
        values["noise"] = estimator.noise_ if len(estimator.mixtures_) == 1 else list(map(float, estimator.noise_))
    values["ood_threshold"] = estimator.ood_threshold_
    _show(values, as_json)
