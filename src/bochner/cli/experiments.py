"""Commands for the paper's experiments: run, report, demo."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from bochner.cli.output import console, has_screen, make_folder, say
from bochner.cli.process import note_finished
from bochner.errors import unknown_name

MAX_WORKERS = 1024  # processes of a sweep
MAX_FOLD_DIGITS = 4  # digits of a fold's number

Out = Annotated[Path, typer.Option(help="Folder for rows and figures; made if missing.")]
Seed = Annotated[int, typer.Option(help="Seed of every draw.", min=0, max=2**31 - 1)]
RowsOut = Annotated[Path | None, typer.Option(help="Folder for rows and figures; results/KIND by default.")]
Names = Annotated[
    list[str],
    typer.Argument(
        help="'all', or activations, covariances, gram, mixture, gram-error, extrapolation; banana, banana-width, toy-1d; "
        "uci-regression, uci-classification; rotated-digits, rotated-mnist, cifar-ood."
    ),
]
ProtocolName = Annotated[str, typer.Option(help="UCI, rotated, toys: 'bochner', or 'paper' as the code did it.")]
Posterior = Annotated[str, typer.Option(help="UCI: 'kfac' or, for classes, 'swag'.")]
Sets = Annotated[str | None, typer.Option(help="UCI: data sets, comma-separated; all by default.")]
Models = Annotated[str | None, typer.Option(help="UCI, images: models, comma-separated; all by default.")]
Folds = Annotated[str | None, typer.Option(help="UCI: folds 0 to 9, comma-separated; all by default.")]
Device = Annotated[str, typer.Option(help="UCI, images: 'auto', 'cpu' or 'cuda'.")]
Engine = Annotated[str, typer.Option(help="UCI: 'local', 'ray' or 'dask'.")]
Workers = Annotated[int, typer.Option(help="UCI: jobs at a time.", min=1, max=MAX_WORKERS)]
Head = Annotated[str, typer.Option(help="CIFAR: 'text' (512 units) or 'code' (2,000 behind 25).")]


def _words(text: str | None) -> tuple[str, ...] | None:
    """Names from a comma-separated list; None where there is no list."""
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def _fold_numbers(text: str | None) -> tuple[Any, ...] | None:
    """Numbers where the words are numbers; ``check`` refuses the other words and lists the known folds."""
    words = _words(text)
    if words is None:
        return None
    return tuple(int(word) if word.isdecimal() and len(word) <= MAX_FOLD_DIGITS else word for word in words)


def _device(name: str) -> str:
    """The torch device of an option; a ValueError where there is none, before any work is done."""
    import torch

    if name not in (known := ["auto", "cpu", "cuda"]):
        raise ValueError(unknown_name("device", name, known))
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("The device parameter asks for a GPU (cuda), but torch sees none; use --device cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


@contextlib.contextmanager
def _foreign_rows(place: Path) -> Iterator[None]:
    """Turns errors in showing rows into a ValueError: ``read_rows`` checks columns and types, but not how values fit together."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError) as error:
        raise ValueError(
            f"The rows in {place} cannot be shown ({type(error).__name__}: {error}); "
            "remove the lines that bochner run did not write."
        ) from error


def run(
    names: Names,
    out: RowsOut = None,
    seed: Seed = 0,
    protocol: ProtocolName = "bochner",
    posterior: Posterior = "kfac",
    sets: Sets = None,
    models: Models = None,
    folds: Folds = None,
    device: Device = "auto",
    engine: Engine = "local",
    workers: Workers = 1,
    head: Head = "text",
) -> None:
    """Runs experiments of the paper: rows and figures. What is there already is not made again.

    Examples:
        bochner run gram gram-error --out results/theory
        bochner run uci-regression --protocol paper --sets boston --models rbf-sin,relu
        bochner run all --protocol paper
    """
    from bochner.experiments.catalogue import EXPERIMENTS, Request, everything
    from bochner.reports.drawing import draw

    for name in names:
        if name not in (known := ["all", *EXPERIMENTS]):
            raise ValueError(unknown_name("names", name, known))
    options: Any = {"sets": _words(sets), "models": _words(models), "folds": _fold_numbers(folds), "head": head}
    options |= {"device": _device(device), "engine": engine, "workers": workers}
    request = Request(seed, protocol, posterior=posterior, progress=console.is_terminal, report=say, **options)
    chosen = everything(request) if "all" in names else [(EXPERIMENTS[name], request) for name in names]
    for experiment, its_request in chosen:
        experiment.check(its_request)
    for experiment, its_request in chosen:
        folder = make_folder(out or Path("results") / experiment.folder)
        note_finished(folder, "The same command makes the rows that are missing")
        rows = experiment.run(its_request, folder)
        with _foreign_rows(rows):
            figures = [str(path) for path in draw(experiment.name, rows)]
        say("   ".join(figures) or f"Tables: bochner report {rows.parent}")


def report(
    folder: Annotated[Path, typer.Argument(help="Folder with rows.")] = Path("results"),
    out: Annotated[Path | None, typer.Option(help="Where tables and figures go; the same folder by default.")] = None,
) -> None:
    """Turns rows into the paper's tables and figures, ours beside the paper's. Never trains.

    With a folder of such folders, everything goes on one HTML page, report.html.

    Examples:
        bochner report results/uci
        bochner report results --out /tmp
    """
    tables = sorted(folder.glob("uci-*.jsonl"))
    images = [*folder.glob("rotated-*.jsonl"), *folder.glob("cifar-ood.jsonl")]
    whole = not tables and not images and any((folder / part).is_dir() for part in ("theory", "toys", "uci", "images"))
    if not tables and not images and not whole:
        kinds = "uci-*.jsonl, rotated-*.jsonl, cifar-ood.jsonl"
        raise ValueError(f"There are no rows in {folder} (files {kinds}); make some with bochner run.")
    from bochner.reports import images as image_reports
    from bochner.reports import page, results
    from bochner.reports import tables as table_reports

    target = make_folder(out or folder)
    written: list[Path] = []
    with _foreign_rows(folder):
        if tables:
            written += table_reports.write(tables, target)
        if images:
            written += image_reports.write(folder, target)
        if whole:
            sections = results.results_sections(folder)
            written.append(page.write(target / "report.html", "The paper's experiments, again", sections))
    say("   ".join(str(path) for path in written))


def demo(out: Out = Path("demo"), seed: Seed = 0) -> None:
    """Fits a ReLU and a stationary network to the same data and shows who is sure far from it: one picture, three lines."""
    from bochner.experiments.demo import run
    from bochner.reports.demo import demo_sections
    from bochner.reports.figures import save_figure
    from bochner.reports.page import write

    folder = make_folder(out)
    say("A ReLU network and a stationary one learn the same two classes ...")
    console.print()
    result = run(seed)
    for line in result.lines():
        say(line)
    save_figure(result.figure, folder / "demo.svg")
    note_finished(folder / "demo.svg")
    page = write(folder / "report.html", "Networks that know what they do not know", demo_sections(result))
    console.print()
    say(f"Picture: {folder / 'demo.svg'}   Report: {page}")
    if has_screen():
        typer.launch(str(page.resolve()))
    say("Next, with a table of your own: bochner fit YOUR.csv --target COLUMN --report report.html")
