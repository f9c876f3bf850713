"""Commands for people with a table: fit, predict, evaluate, info. Parsing, printing and files; the work is done elsewhere."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bochner.files import partial

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Device = Annotated[str, typer.Option(help="'auto', 'cpu' or 'cuda'.")]
ModelFile = Annotated[Path, typer.Argument(help="A model that 'bochner fit' wrote.")]
TableFile = Annotated[Path, typer.Argument(help="A CSV or Parquet file.")]


@contextlib.contextmanager
def problems() -> Iterator[None]:
    """Turns what users can cause into one line on stderr and exit status 1."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        errors.print(f"{where}{error.strerror or error}.", style="red", soft_wrap=True, markup=False)
        raise typer.Exit(1) from error
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        errors.print("There is not enough memory; use fewer rows or columns.", style="red", soft_wrap=True)
        raise typer.Exit(1) from error
    except ValueError as error:
        errors.print(" ".join(str(error).split()), style="red", soft_wrap=True, markup=False)
        raise typer.Exit(1) from error


def _check_output(path: Path, *inputs: Path) -> Path:
    """Raises unless a file can be written there without touching an input, before any work is done."""
    if path.is_dir():
        raise ValueError(f"The output {path} is a folder; give a file name.")
    if not path.parent.is_dir():
        raise ValueError(f"The folder {path.parent} for the output does not exist; make it first.")
    if any(path.exists() and path.samefile(given) for given in inputs if given.exists()):
        raise ValueError(f"The output {path} is an input of this command; choose another name.")
    probe = partial(path)
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"The output {path} cannot be written ({error.strerror}); choose another folder.") from error
    return path


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


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
        console.print(f"  {TITLES.get(name, name):<42} {shown}", soft_wrap=True, markup=False)


def _check_request(table: Path, out: Path, report: Path | None, task: str, test: float) -> None:
    from bochner.activations import unknown

    if task not in ("auto", "regression", "classification"):
        raise ValueError(unknown("task", task, ("auto", "regression", "classification")))
    _check_output(out, table)
    if report is not None:
        _check_output(report, table, out)
        if test == 0:
            raise ValueError("The report measures on held-out rows: give --test a share above 0, or no --report.")


def fit(
    table: TableFile,
    target: Annotated[str, typer.Option(help="Column to predict.")],
    out: Annotated[Path, typer.Option(help="Where the model goes.")] = Path("model.bochner"),
    task: Annotated[str, typer.Option(help="'auto', 'regression' or 'classification'.")] = "auto",
    drop: Annotated[str, typer.Option(help="Columns to leave out, comma-separated.")] = "",
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
    report: Annotated[Path | None, typer.Option(help="Also write an HTML report there.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of every draw.", min=0, max=2**31 - 1)] = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Fits a model to a table and says how well it does on rows it has not seen.

    Examples:
        bochner fit houses.csv --target price
        bochner fit churn.csv --target left --drop id,name --report churn.html
    """
    from bochner.estimators import StationaryRegressor
    from bochner.evaluation import measure
    from bochner.reports.model import model_sections
    from bochner.reports.page import write
    from bochner.storage import save
    from bochner.tabular import fit_table

    with problems():
        _check_request(table, out, report, task, test)
        options: Any = {"kernel": _names(kernel), "hidden_layer_sizes": _widths(hidden), "false_alarm": false_alarm}
        options |= {"device": device, "random_state": seed}
        StationaryRegressor(**options).check_parameters()
        fitted = fit_table(
            table, target, dropped=_names(drop), task=task, share=test, verbose=errors.is_terminal, **options
        )
        found = measure(fitted.estimator, *fitted.held) if len(fitted.held[0]) else {}
        names, sections = fitted.encoder.names, []
        if report is not None:  # a report that fails leaves no model behind
            sections = model_sections(fitted.estimator, fitted.train, fitted.held, columns=names, target=target)
        save(out, fitted.estimator, table=fitted.encoder.to_json())
        if report is not None:
            write(report, f"{table.name}: {target}", sections)
    if as_json:
        answer = {"model": str(out), "task": fitted.task, "rows": len(fitted.train[0]), "inputs": len(names)}
        answer["held_out"] = found
        print(json.dumps(answer, allow_nan=False))
    else:
        _tell(fitted, found, [out] if report is None else [out, report])


def _tell(fitted: Any, found: dict[str, Any], written: list[Path]) -> None:
    """What was fitted, how well it does, and where it is."""
    rows, held = len(fitted.train[0]), len(fitted.held[0]) + fitted.left_out
    inputs, target = len(fitted.encoder.names), fitted.encoder.target
    console.print(f"{fitted.task} of '{target}' from {inputs} inputs", soft_wrap=True, markup=False)
    rest = "; the others measure it (--test 0 fits to all)" if held else ""
    console.print(f"fitted to {rows} of {rows + held} rows{rest}", soft_wrap=True)
    if found:
        rest = f" ({fitted.left_out} of classes without a row to learn from are left out)" if fitted.left_out else ""
        console.print(f"on held-out rows{rest}:")
        _show(found, as_json=False)
    console.print(f"written: {'  '.join(str(p) for p in written)}", soft_wrap=True, markup=False)
    console.print(f"next: bochner predict {written[0]} NEW.csv", soft_wrap=True, markup=False)


def _load(model: Path, device: str) -> tuple[Any, Any]:
    """The estimator and how a table becomes its inputs."""
    from bochner.frames import Encoder
    from bochner.storage import load

    saved = load(model, device=device)
    if saved.table is None:
        raise ValueError(f"{model} was not fitted from a table; use it from Python with bochner.storage.load.")
    return saved.estimator, Encoder.from_json(saved.table)


@contextlib.contextmanager
def _writer(path: Path) -> Iterator[Any]:
    """Takes pieces and their new columns; the file appears when all are written, and not at all otherwise."""
    part = partial(path)
    parquet: list[Any] = []

    def to_csv(piece: Any, added: dict[str, np.ndarray]) -> None:
        frame = piece if hasattr(piece, "assign") else piece.to_pandas(ignore_metadata=True)
        frame.assign(**added).to_csv(part, mode="a", index=False, header=not part.exists())

    def to_parquet(piece: Any, added: dict[str, np.ndarray]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pandas(piece, preserve_index=False) if hasattr(piece, "assign") else piece
        for name, values in added.items():
            table = table.append_column(name, pa.array(values))
        if not parquet:
            parquet.append(pq.ParquetWriter(part, table.schema))
        parquet[0].write_table(table)

    try:
        yield to_parquet if path.suffix.lower() == ".parquet" else to_csv
        for handle in parquet:
            handle.close()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def predict(
    model: ModelFile,
    table: TableFile,
    out: Annotated[
        Path | None,
        typer.Option(help="Where it goes: .csv or .parquet; by default beside the table, NAME-predictions.csv."),
    ] = None,
    coverage: Annotated[float, typer.Option(help="Probability of the interval.")] = 0.9,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Adds predictions to a table: mean, standard deviation and interval, or class probabilities; OOD score and flag.

    The table is read in pieces, so that its size does not matter. Columns may come in any order.

    Example:
        bochner predict model.bochner new.csv --out predictions.csv
    """
    from bochner import frames, tabular

    with problems():
        if not 0 < coverage < 1:
            raise ValueError(f"The option --coverage must lie between 0 and 1, got {coverage} instead.")
        names, rows = frames.look(table)
        out = out or table.with_name(f"{table.stem}-predictions{table.suffix}")
        if out.suffix.lower() not in frames.SUFFIXES:
            raise ValueError(f"The output {out} must end in {' or '.join(frames.SUFFIXES)}.")
        _check_output(out, table, model)
        estimator, encoder = _load(model, device)
        encoder.check_columns(names, table)
        flagged = filled = 0
        with _writer(out) as take, _progress(rows) as advance:
            for piece, texts in frames.read_chunks(table):
                added = tabular.predict_table(estimator, encoder, texts, coverage)
                take(piece, added)
                flagged, filled = flagged + int(added["ood"].sum()), filled + encoder.filled(texts)
                advance(len(texts))
    if as_json:
        print(json.dumps({"out": str(out), "rows": rows, "flagged": flagged, "filled": filled}))
        return
    console.print(f"{rows} rows, {flagged} unlike the training data; written: {out}", soft_wrap=True, markup=False)
    _tell_filled(filled)


def _tell_filled(cells: int) -> None:
    """How many values are guesses, if any."""
    if cells:
        text = f"{cells} cells are missing in columns that were complete in training; their medians stand in."
        console.print(text, soft_wrap=True)


@contextlib.contextmanager
def _progress(rows: int) -> Iterator[Any]:
    """A bar over the rows, where there is a terminal to show it on."""
    parts = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*parts, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        job = bar.add_task("", total=rows)
        yield lambda count: bar.advance(job, count)


def evaluate(model: ModelFile, table: TableFile, device: Device = "auto", as_json: Json = False) -> None:
    """Measures a model on a table that has the target.

    Example:
        bochner evaluate model.bochner test.csv
    """
    from bochner import frames
    from bochner.evaluation import measure

    with problems():
        estimator, encoder = _load(model, device)
        names, _ = frames.look(table)
        encoder.check_columns(names, table)
        if encoder.target not in names:
            raise ValueError(
                f"{table} lacks the target '{encoder.target}'; use 'bochner predict' for tables without it."
            )
        frame = frames.read(table)
        frames.check_complete(frame[encoder.target], encoder.target)
        if hasattr(estimator, "classes_"):
            y = frame[encoder.target].to_numpy(dtype=str)
            if strange := sorted(set(y) - set(estimator.classes_)):
                raise ValueError(f"{table} has the class '{strange[0]}', which the model does not know.")
        else:
            y = frames.numbers(frame[encoder.target], encoder.target)
        _show(measure(estimator, encoder.transform(frame), y), as_json)
    if not as_json:
        _tell_filled(encoder.filled(frame))


def info(model: ModelFile, as_json: Json = False) -> None:
    """Shows what a model file holds.

    Example:
        bochner info model.bochner
    """
    from bochner.estimators.members import describe
    from bochner.storage import load

    with problems():
        saved = load(model, device="cpu")
    found: dict[str, Any] = dict(saved.about)
    estimator = saved.estimator
    kernels = estimator.kernel if isinstance(estimator.kernel, tuple | list) else (estimator.kernel,)
    found |= {"kernel": ", ".join(map(str, kernels)), "hidden_layer_sizes": list(estimator.hidden_layer_sizes)}
    found["false_alarm"] = estimator.false_alarm
    found["members"] = "; ".join(describe(mixture.members) for mixture in estimator.mixtures_)
    if saved.table is not None:
        found["target"] = saved.table["target"]
        found["columns"] = ", ".join(f"{c['name']} ({c['kind']})" for c in saved.table["columns"])
    if hasattr(estimator, "classes_"):
        found["classes"] = ", ".join(map(str, estimator.classes_))
    else:
        found["noise"] = estimator.noise_ if len(estimator.mixtures_) == 1 else list(map(float, estimator.noise_))
    found["ood_threshold"] = estimator.ood_threshold_
    _show(found, as_json)
