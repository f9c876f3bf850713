"""The tables and figures that follow from the rows of one experiment."""

from pathlib import Path

from matplotlib.figure import Figure

from bochner.experiments.rows import read_rows
from bochner.reports import images, theory, toys
from bochner.reports.theory import save_figure


def draw(name: str, rows: Path) -> list[Path]:
    """Draws what an experiment's rows show, beside them; returns the files. Tables of UCI sets are made by ``reports.tables``."""
    folder = rows.parent
    if name in theory.FIGURES:
        return _save({folder / f"{name}.svg": theory.FIGURES[name](read_rows(rows))})
    if name in toys.DRAWN_FROM:
        suffix, found = rows.stem.removeprefix(name), read_rows(rows)
        figures = {figure: toys.FIGURES[figure](found) for figure in toys.DRAWN_FROM[name]}
        return _save({folder / f"{n}{suffix}.{kind}": f for n, f in figures.items() for kind in ("svg", "png")})
    return images.write(folder, folder) if name.startswith(("rotated", "cifar")) else []


def _save(figures: dict[Path, Figure]) -> list[Path]:
    for path, figure in figures.items():
        save_figure(figure, path)
    return list(figures)
