"""Commands for data sets: list, check, fetch."""

from typing import Annotated

import typer

from bochner.cli.output import console, guarded, say
from bochner.errors import unknown_name

data = typer.Typer(no_args_is_help=True, help="Lists, checks and fetches data sets.")


def _checked(names: list[str]) -> list[str]:
    """The names of data sets; an error for the first unknown one, before any work is done."""
    from bochner.datasets import IMAGES, NAMES

    for name in names:
        if name not in (known := [*NAMES, *IMAGES]):
            raise typer.BadParameter(unknown_name("names", name, known))
    return names


@data.command("list")
@guarded
def list_data() -> None:
    """Shows every data set, its size, and where its file is."""
    from rich.table import Table

    from bochner.datasets import data_folder, summaries

    table = Table("name", "task", "rows", "inputs", "classes", "where", box=None)
    for line in summaries():
        task, classes = ("regression", "") if line.classes is None else ("classification", str(line.classes))
        table.add_row(line.name, task, str(line.rows), str(line.inputs), classes, line.where)
    console.print(table)
    console.print()
    say(f"Files are looked for in {data_folder()}; set BOCHNER_DATA to another folder.")


@data.command("check")
@guarded
def check_data(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; all of them by default.")] = None,
) -> None:
    """Compares files with their known checksums. Exit status 1: a file is damaged, or a named one is missing."""
    from bochner.datasets import IMAGES, NAMES, check

    failed = False
    for name in _checked(names or [*NAMES, *IMAGES]):
        result = check(name)
        say(f"{name:<17} {result.status:<9} {result.message}")
        failed |= result.status == "bad" or (result.status == "missing" and bool(names))
    if failed:
        raise typer.Exit(1)


@data.command("fetch")
@guarded
def fetch_data(names: Annotated[list[str], typer.Argument(help="Data sets to download from OpenML.")]) -> None:
    """Downloads data sets into the data folder and checks them. Good files are left alone."""
    from bochner.datasets import fetch

    failed = False
    for name in _checked(names):
        try:
            result = fetch(name)
            status, message = result.status, result.message
        except (ValueError, OSError) as error:
            status, message, failed = "failed", str(error), True
        say(f"{name:<17} {status:<9} {message}")
    if failed:
        raise typer.Exit(1)
