"""The commands put together."""

import os
import sys
from typing import Annotated

import typer

import bochner
from bochner.cli import experiments, models
from bochner.cli.data import data
from bochner.cli.output import say, survive

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Neural networks that know what they do not know.")


def _print_version(value: bool) -> None:
    if value:
        say(f"bochner {bochner.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Neural networks that know what they do not know."""


for command in (
    *(experiments.run, experiments.report, experiments.demo),
    *(models.fit, models.predict, models.evaluate, models.info),
):
    app.command()(command)
app.add_typer(data, name="data")


def start() -> None:
    """The command line, for an output that may know few letters, be full or be closed."""
    survive()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:  # typer ends quietly where the reader of its output is gone
        print(f"The output cannot be written: {error.strerror}.", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left has nowhere to go
        sys.exit(1)
