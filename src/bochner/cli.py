"""Command line. Parsing and printing only: the work is done elsewhere."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import bochner
from bochner.activations import unknown

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Neural networks that know what they do not know.")
console = Console(highlight=False)

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


@app.command()
def run(
    names: Annotated[
        list[str], typer.Argument(help="activations, covariances, gram, mixture, gram-error, extrapolation.")
    ],
    out: Out = Path("results/theory"),
    seed: Seed = 0,
) -> None:
    """Runs experiments of the paper: rows and figures.

    Example: bochner run gram gram-error --out results/theory
    """
    from bochner.experiments.theory import EXPERIMENTS

    for name in names:
        if name not in EXPERIMENTS:
            raise typer.BadParameter(unknown("names", name, EXPERIMENTS))
    _run_theory(names, _folder(out), seed)


@app.command()
def demo(out: Out = Path("demo"), seed: Seed = 0) -> None:
    """Shows what the library is for, on generated data, in half a minute."""
    from bochner.experiments.rows import read_rows
    from bochner.experiments.theory import EXPERIMENTS

    folder = _folder(out)
    console.print(
        "A periodic network is a stationary Gaussian process: the theorem in numbers, and what it does to predictions.\n"
    )
    _run_theory(list(EXPERIMENTS), folder, seed)
    console.print(
        "\nThree networks far from their data (x = 8; the data end at 2), mean ± standard deviation, and the prior's there:"
    )
    for row in read_rows(folder / "extrapolation.jsonl"):
        far = f"{row['far_mean']:6.2f} ± {row['far_std']:.2f}"
        console.print(f"  {row['activation']:<10} {far:<16} prior ± {row['far_prior_std']:.2f}")
    console.print(
        f"\nDone. Open the figures in {folder.resolve()} with a browser, extrapolation.svg first;", soft_wrap=True
    )
    console.print("each has its numbers beside it as .jsonl. Next: the examples in README.md.")


data = typer.Typer(no_args_is_help=True, help="Lists, checks and fetches data sets.")
app.add_typer(data, name="data")


def _data_names(names: list[str]) -> list[str]:
    """The names, after a look at every one, so that a misspelt one stops the command before any work."""
    from bochner.datasets import NAMES

    for name in names:
        if name not in NAMES:
            raise typer.BadParameter(unknown("names", name, NAMES))
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
    from bochner.datasets import NAMES, check

    failed = False
    for name in _data_names(names or list(NAMES)):
        found = check(name)
        console.print(f"{name:<17} {found.status:<9} {found.message}", soft_wrap=True, markup=False)
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
        console.print(f"{name:<17} {status:<9} {message}", soft_wrap=True, markup=False)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
