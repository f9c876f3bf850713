"""The tables and figures that follow from the rows of one experiment."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from bochner.experiments.rows import Row, read_rows
from bochner.reports import images, theory, toys
from bochner.reports.blocks import MissingRowsError
from bochner.reports.figures import save_figure


def command_of(path: Path) -> str:
    """The command that makes a file of rows, without its folder."""
    protocol = " --protocol paper" if path.stem.endswith("-paper") else ""
    return f"bochner run {path.stem.removesuffix('-paper')}{protocol}"


def how_to_make(path: Path, error: MissingRowsError) -> str:
    """A sentence that says which rows a file lacks, and how to make them."""
    return (
        f"The file {path.name} lacks {error}; an older version may have made it. Remove the file and run "
        f"{command_of(path)} --out {path.parent}."
    )


def draw(name: str, path: Path) -> list[Path]:
    """Draws the figures of an experiment beside its file of rows; returns their files.

    The tables of UCI sets are made by ``reports.tables``.

    Raises:
        MissingRowsError: Rows of some figure are missing. The other figures are drawn first.
    """
    folder = path.parent
    if name in theory.FIGURES:
        return _save({(folder / f"{name}.svg",): theory.FIGURES[name]}, path)
    if name in toys.DRAWN_FROM:
        suffix = path.stem.removeprefix(name)
        files = {n: tuple(folder / f"{n}{suffix}.{kind}" for kind in ("svg", "png")) for n in toys.DRAWN_FROM[name]}
        return _save({files[figure]: toys.FIGURES[figure] for figure in toys.DRAWN_FROM[name]}, path)
    return images.write(folder, folder) if name.startswith(("rotated", "cifar")) else []


def _save(figures: dict[tuple[Path, ...], Callable[[list[Row]], Figure]], path: Path) -> list[Path]:
    """Draws figures from a file of rows and saves each under its paths."""
    rows, saved, problems = read_rows(path), [], []
    for targets, make in figures.items():
        try:
            figure = make(rows)
        except MissingRowsError as error:
            problems.append(str(error))
            continue
        for target in targets:
            save_figure(figure, target)
            saved.append(target)
    if problems:
        raise MissingRowsError(how_to_make(path, MissingRowsError(" and ".join(problems))))
    return saved
