"""Command line. Parsing and printing only: the work is done elsewhere."""

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import bochner
from bochner import cli_models

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Neural networks that know what they do not know.")
console = Console(highlight=False, markup=False, emoji=False)

Out = Annotated[Path, typer.Option(help="Folder for rows and figures; made if missing.")]
Seed = Annotated[int, typer.Option(help="Seed of every draw.", min=0, max=2**31 - 1)]


def _print_version(value: bool) -> None:
    if value:
        console.print(f"bochner {bochner.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Neural networks that know what they do not know."""


def _folder(out: Path) -> Path:
    """Makes the output folder, before any work is done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".bochner-write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise typer.BadParameter(
            f"The folder {out} cannot be written to ({error.strerror}); choose another with --out."
        ) from error
    return out


def _run_toys(names: list[str], out: Path, seed: int, protocol: str) -> None:
    """Runs toy experiments one after another: rows first, then figures from the rows. Those of "paper" have it in their names."""
    import jax

    from bochner.experiments.rows import provenance, read_rows, write_rows
    from bochner.experiments.toys import EXPERIMENTS, Config
    from bochner.experiments.uci import PROTOCOLS
    from bochner.reports.theory import save_figure
    from bochner.reports.toys import DRAWN_FROM, FIGURES

    suffix = "-paper" if _word(protocol, PROTOCOLS, "protocol") == "paper" else ""
    for name in names:
        path = out / f"{name}{suffix}.jsonl"
        common = {"experiment": name, "seed": seed, "protocol": protocol}
        have = read_rows(path)
        if not (have and all(have[0].get(key) == value for key, value in common.items())):
            start = time.perf_counter()
            rows = EXPERIMENTS[name](Config(seed=seed, protocol=protocol, progress=console.is_terminal))
            origin = provenance("cuda" if jax.default_backend() == "gpu" else "cpu") | {"jax": jax.__version__}
            write_rows(path, [{**common, **origin, **row} for row in rows])
            console.print(f"{name:<12} {time.perf_counter() - start:5.1f} s   {path}", soft_wrap=True)
        for figure in DRAWN_FROM[name]:
            for kind in ("svg", "png"):
                save_figure(FIGURES[figure](read_rows(path)), out / f"{figure}{suffix}.{kind}")
            console.print(f"{figure:<12} {out / f'{figure}{suffix}.svg'}", soft_wrap=True)


def _run_theory(names: list[str], out: Path, seed: int) -> None:
    """Runs theory experiments one after another: rows first, then the figure from the rows."""
    from bochner.experiments.rows import provenance, read_rows, write_rows
    from bochner.experiments.theory import EXPERIMENTS, Config
    from bochner.reports.theory import FIGURES, save_figure

    common = {"seed": seed, "protocol": "bochner", **provenance()}
    for name in names:
        path, figure = out / f"{name}.jsonl", out / f"{name}.svg"
        have = read_rows(path)
        if have and figure.exists() and all(have[0].get(key) == value for key, value in common.items()):
            console.print(f"{name:<12}  already   {path}   {figure}", soft_wrap=True)
            continue
        start = time.perf_counter()
        with console.status(f"{name} ..."):
            rows = EXPERIMENTS[name](Config(seed=seed))
            seconds = time.perf_counter() - start
            write_rows(path, [{"experiment": name, **common, **row} for row in rows])
            save_figure(FIGURES[name](read_rows(path)), figure)
        console.print(f"{name:<12} {seconds:5.1f} s   {path}   {figure}", soft_wrap=True)


def unknown(parameter: str, value: Any, known: Iterable[Any]) -> str:
    """What to say of a name that is not known; torch is loaded for it only now."""
    from bochner.activations import unknown

    return unknown(parameter, value, known)


def _words(text: str | None, known: Iterable[str], option: str) -> list[str]:
    """Names from a comma-separated list, all known ones by default."""
    known = list(known)
    chosen = known if text is None else [word.strip() for word in text.split(",") if word.strip()]
    if not chosen:
        raise typer.BadParameter(f"The {option} parameter must name at least one of {', '.join(known)}, got {text!r}.")
    for word in chosen:
        if word not in known:
            raise typer.BadParameter(unknown(option, word, known))
    return list(dict.fromkeys(chosen))


def _word(text: str, known: Iterable[str], option: str) -> str:
    """One name out of the known ones."""
    if text not in known:
        raise typer.BadParameter(unknown(option, text, known))
    return text


def _device(name: str) -> str:
    """The device that is meant, before any work is done."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    _word(name, ["auto", "cpu", "cuda"], "device")
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("The device parameter asks for a GPU (cuda), but torch sees none; use --device cpu.")
    return name


def _fold_numbers(text: str | None) -> tuple[int, ...]:
    from bochner.experiments.uci import FOLDS

    return tuple(int(word) for word in _words(text, [str(f) for f in FOLDS], "folds"))


def _run_uci(
    name: str, out: Path, seed: int, protocol: str, posterior: str, sets: str | None, models: str | None, **rest: Any
) -> None:
    """Makes the missing rows of a table and says where they are."""
    from bochner.datasets import check, load
    from bochner.experiments.sweep import ENGINES, sweep
    from bochner.experiments.uci import POSTERIORS, PROTOCOLS, SETS, Config
    from bochner.experiments.zoo import MODELS

    _word(protocol, PROTOCOLS, "protocol")
    _word(posterior, POSTERIORS, "posterior")
    _word(rest["engine"], ENGINES, "engine")
    if posterior == "swag" and name != "uci-classification":
        raise typer.BadParameter("The posterior 'swag' is part of uci-classification only, as in the paper.")
    chosen, networks = _words(sets, SETS[name], "sets"), _words(models, MODELS, "models")
    common: Any = {"experiment": name, "protocol": protocol, "seed": seed, "folds": _fold_numbers(rest["folds"])}
    common["device"] = _device(rest["device"])
    config = Config.swag(**common) if posterior == "swag" else Config(**common)
    for each in chosen:
        load(each)
        if (found := check(each)).status == "bad":
            raise ValueError(f"The data set {each} cannot be used. {found.message}")
    path = _folder(out) / f"{name}.jsonl"
    sweep(
        config,
        chosen,
        networks,
        path,
        engine=rest["engine"],
        workers=rest["workers"],
        progress=console.is_terminal,
        report=lambda line: console.print(line, soft_wrap=True),
    )
    console.print(f"Rows: {path}. Tables: bochner report {out}", soft_wrap=True)


def _run_rotation(name: str, out: Path, seed: int, protocol: str, models: str | None, device: str) -> None:
    """Makes the missing rows of a rotation experiment, network by network, then its table and figures."""
    from dataclasses import replace

    from bochner.experiments.rotation import EXPERIMENTS, NETWORKS, run
    from bochner.experiments.uci import PROTOCOLS

    _word(protocol, PROTOCOLS, "protocol")
    config = replace(EXPERIMENTS[name], protocol=protocol, seed=seed, device=_device(device))
    chosen = _words(models, NETWORKS, "models")
    options: Any = {"progress": console.is_terminal, "report": lambda line: console.print(line, soft_wrap=True)}
    run(config, _folder(out) / f"{name}.jsonl", models=chosen, **options)
    report(out)


def _run_ood(out: Path, seed: int, head: str, models: str | None, device: str) -> None:
    """Makes the missing rows of CIFAR-10 against other sets, under both protocols, then their table and figures."""
    from bochner.experiments.ood import NETWORKS, Config, run

    chosen = _words(models, NETWORKS, "models")
    config = Config(seed=seed, device=_device(device), head=head)
    _folder(config.weights.parent)
    path = _folder(out) / "cifar-ood.jsonl"
    options: Any = {"progress": console.is_terminal, "report": lambda line: console.print(line, soft_wrap=True)}
    run(config, path, models=chosen, **options)
    report(out)


def _check_images(names: list[str], models: str | None, head: str) -> None:
    """Whether the sets and models of all image experiments are there, before any of them runs."""
    from bochner.datasets import load_images
    from bochner.experiments import ood, rotation

    for name in names:
        if name in rotation.EXPERIMENTS:
            _words(models, rotation.NETWORKS, "models")
            load_images(rotation.EXPERIMENTS[name].images)
        if name == "cifar-ood":
            _words(models, ood.NETWORKS, "models")
            _word(head, ood.HEADS, "head")
            for images in ("cifar10", *ood.OUTSIDE):
                load_images(images)


@app.command()
def run(
    names: Annotated[
        list[str],
        typer.Argument(
            help="activations, covariances, gram, mixture, gram-error, extrapolation; banana, banana-width, toy-1d; "
            "uci-regression, uci-classification; rotated-digits, rotated-mnist, cifar-ood."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for rows and figures; results/KIND by default.")] = None,
    seed: Seed = 0,
    protocol: Annotated[
        str, typer.Option(help="UCI, rotated, toys: 'bochner', or 'paper' as the code did it.")
    ] = "bochner",
    posterior: Annotated[str, typer.Option(help="UCI: 'kfac' or, for classes, 'swag'.")] = "kfac",
    sets: Annotated[str | None, typer.Option(help="UCI: data sets, comma-separated; all by default.")] = None,
    models: Annotated[str | None, typer.Option(help="UCI, images: models, comma-separated; all by default.")] = None,
    folds: Annotated[str | None, typer.Option(help="UCI: folds 0 to 9, comma-separated; all by default.")] = None,
    device: Annotated[str, typer.Option(help="UCI, images: 'auto', 'cpu' or 'cuda'.")] = "auto",
    engine: Annotated[str, typer.Option(help="UCI: 'local', 'ray' or 'dask'.")] = "local",
    workers: Annotated[int, typer.Option(help="UCI: jobs at a time.", min=1)] = 1,
    head: Annotated[str, typer.Option(help="CIFAR: 'text' (512 units) or 'code' (2,000 behind 25).")] = "text",
) -> None:
    """Runs experiments of the paper: rows and figures. What is there already is not made again.

    Examples:
        bochner run gram gram-error --out results/theory
        bochner run uci-regression --protocol paper --sets boston --models rbf-sin,relu
    """
    from bochner.experiments.rotation import EXPERIMENTS as ROTATIONS
    from bochner.experiments.theory import EXPERIMENTS
    from bochner.experiments.toys import EXPERIMENTS as TOYS
    from bochner.experiments.uci import SETS

    for name in names:
        if name not in (known := [*EXPERIMENTS, *TOYS, *SETS, *ROTATIONS, "cifar-ood"]):
            raise typer.BadParameter(unknown("names", name, known))
    try:
        _check_images(names, models, head)
        if theory := [name for name in names if name in EXPERIMENTS]:
            _run_theory(theory, _folder(out or Path("results/theory")), seed)
        if toys := [name for name in names if name in TOYS]:
            _run_toys(toys, _folder(out or Path("results/toys")), seed, protocol)
        for name in (name for name in names if name in SETS):
            options: Any = {"folds": folds, "device": device, "engine": engine, "workers": workers}
            _run_uci(name, out or Path("results/uci"), seed, protocol, posterior, sets, models, **options)
        for name in (name for name in names if name in ROTATIONS):
            _run_rotation(name, out or Path("results/images"), seed, protocol, models, device)
        if "cifar-ood" in names:
            _run_ood(out or Path("results/images"), seed, head, models, device)
    except (OSError, ValueError) as error:
        console.print(str(error), style="red", soft_wrap=True)
        raise typer.Exit(1) from error


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder with rows.")] = Path("results/uci"),
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
        raise typer.BadParameter(f"There are no rows in {folder} (files {kinds}); make some with bochner run.")
    from bochner.reports import images as image_reports
    from bochner.reports import page, results
    from bochner.reports import tables as table_reports

    target = _folder(out or folder)
    try:
        written = table_reports.write(tables, target) if tables else []
        if whole:
            sections = results.results_sections(folder)
            written = [page.write(target / "report.html", "The paper's experiments, again", sections)]
        written += image_reports.write(folder, target) if images else []
    except ValueError as error:
        console.print(f"The rows in {folder} cannot be used: {error}", style="red", soft_wrap=True)
        raise typer.Exit(1) from error
    console.print("   ".join(str(path) for path in written), soft_wrap=True)


@app.command()
def demo(out: Out = Path("demo"), seed: Seed = 0) -> None:
    """Fits a ReLU and a stationary network to the same data and shows who is sure far from it: one picture, three lines."""
    from bochner.demo import run
    from bochner.reports.page import write
    from bochner.reports.theory import save_figure

    folder = _folder(out)
    console.print("A ReLU network and a stationary one learn the same two classes ...\n")
    found = run(seed)
    for line in found.lines():
        console.print(line, soft_wrap=True, highlight=False)
    save_figure(found.figure, folder / "demo.svg")
    page = write(folder / "report.html", "Networks that know what they do not know", found.sections())
    console.print(f"\nPicture: {folder / 'demo.svg'}   Report: {page}", soft_wrap=True)
    if _has_screen():
        typer.launch(str(page.resolve()))
    console.print(
        "Next, with a table of your own: bochner fit YOUR.csv --target COLUMN --report report.html", soft_wrap=True
    )


def _has_screen() -> bool:
    """Whether someone sits in front of a screen: then a page may be opened there."""
    window = sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    return window and sys.stdout.isatty()


for command in (cli_models.fit, cli_models.predict, cli_models.evaluate, cli_models.info):
    app.command()(command)

data = typer.Typer(no_args_is_help=True, help="Lists, checks and fetches data sets.")
app.add_typer(data, name="data")


def _data_names(names: list[str]) -> list[str]:
    """The names, after a look at every one, so that a misspelt one stops the command before any work."""
    from bochner.datasets import IMAGES, NAMES

    for name in names:
        if name not in (known := [*NAMES, *IMAGES]):
            raise typer.BadParameter(unknown("names", name, known))
    return names


@data.command("list")
def list_data() -> None:
    """Shows every data set, its size, and where its file is."""
    from rich.table import Table

    from bochner.datasets import data_folder, summaries

    table = Table("name", "task", "rows", "inputs", "classes", "where", box=None)
    for line in summaries():
        task, classes = ("regression", "") if line.classes is None else ("classification", str(line.classes))
        table.add_row(line.name, task, str(line.rows), str(line.inputs), classes, line.where)
    console.print(table)
    console.print(
        f"\nFiles are looked for in {data_folder()}; set BOCHNER_DATA to another folder.", soft_wrap=True, markup=False
    )


@data.command("check")
def check_data(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; all of them by default.")] = None,
) -> None:
    """Verifies files against their known sums. Exit status 1: one is damaged, or a named one is missing."""
    from bochner.datasets import IMAGES, NAMES, check

    failed = False
    for name in _data_names(names or [*NAMES, *IMAGES]):
        found = check(name)
        console.print(f"{name:<17} {found.status:<9} {found.message}", soft_wrap=True)
        failed |= found.status == "bad" or (found.status == "missing" and bool(names))
    if failed:
        raise typer.Exit(1)


@data.command("fetch")
def fetch_data(names: Annotated[list[str], typer.Argument(help="Data sets to download from OpenML.")]) -> None:
    """Downloads data sets into the data folder and checks them. Good files are left alone."""
    from bochner.datasets import fetch

    failed = False
    for name in _data_names(names):
        try:
            found = fetch(name)
            status, message = found.status, found.message
        except (ValueError, OSError) as error:
            status, message, failed = "failed", str(error), True
        console.print(f"{name:<17} {status:<9} {message}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def start() -> None:
    """The command line, for an output that may know few letters, be full or be closed."""
    cli_models.survive_output()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:  # typer ends quietly where the reader of its output is gone
        print(f"The output cannot be written: {error.strerror}.", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left has nowhere to go
        sys.exit(1)


if __name__ == "__main__":
    start()
