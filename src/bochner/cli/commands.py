"""All commands put together as one typer application."""

from typing import Annotated

import typer

import bochner
from bochner.cli import experiments, models
from bochner.cli.data import data
from bochner.cli.output import guarded, say
from bochner.cli.serve import serve

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
    serve,
):
    app.command()(guarded(command))
app.add_typer(data, name="data")
