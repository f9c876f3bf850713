"""The sections of a report on a folder of results: the paper's tables and figures beside ours, from rows; nothing here trains."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from bochner.experiments.rows import Row, read_rows
from bochner.reports import images, tables, theory, toys
from bochner.reports.blocks import Block, MissingRowsError
from bochner.reports.drawing import command_of, how_to_make
from bochner.reports.page import Section

FIGURE_TITLES = {
    "activations": "periodic activations",
    "covariances": "covariances they induce",
    "gram": "Gram matrices of nine priors",
    "mixture": "the error of keeping one harmonic",
    "gram-error": "the error of finite width",
    "extrapolation": "far from the data",
    "teaser": "banana, infinite and finite width",
    "comparisons_app_meanvar": "banana, mean and variance",
    "comparisons_app": "banana, number of units",
    "regression": "regression in one dimension",
    "regression-finite": "the same by networks of ten units",
}
KINDS = ("theory", "toys", "uci", "images")

# What a run is told by, beside its time, which all of its rows repeat: posteriors may share a run or not.
RUN = ("experiment", "set", "model", "prior", "method", "head", "protocol", "seed")


def _run(row: Row) -> tuple[object, float | None]:
    """What tells the run of a row from others, and its time."""
    if "file_seconds" in row:
        return None, row["file_seconds"]
    return tuple(row.get(each) for each in RUN), row.get("seconds", row.get("run_seconds"))


def _short(commit: str) -> str:
    """The first digits of a commit, and whether the code differed from it."""
    return commit[:7] + ("-dirty" if commit.endswith("-dirty") else "")


def _made(rows: list[Row], command: str) -> str:
    """The command that makes rows again, and time, hardware and commits of these rows."""
    hardware = ", ".join(dict.fromkeys(row["hardware"] for row in rows if row.get("hardware")))
    commits = ", ".join(dict.fromkeys(_short(row["commit"]) for row in rows if row.get("commit")))
    times = [seconds for _, seconds in {_run(row) for row in rows} if seconds is not None]
    times += {row["pretrain_seconds"] for row in rows if "pretrain_seconds" in row}
    if other := sorted({row["seed"] for row in rows if row.get("seed")}):
        command += ", and with " + " and ".join(f"--seed {seed}" for seed in other)
    time = f"{sum(times):{'.0f' if sum(times) >= 10 else '.2g'}} s" if times else "a time that the rows do not hold"
    return f"Command: {command}. Made in {time}, on {hardware}, by commit {commits}."


def _drawn(title: str, draw: Callable[[list[Row]], Figure], path: Path, rows: list[Row]) -> Section:
    """A figure under the first sentence of its function and how its rows were made; where some are missing, how to make them."""
    try:
        figure = draw(rows)
    except MissingRowsError as error:
        return Section(title, how_to_make(path, error))
    what = (inspect.getdoc(draw) or "").split("\n\n")[0]
    return Section(title, figures=(figure,), captions=(f"{what} {_made(rows, command_of(path))}",))


def _sections(blocks: Iterable[Block], untitled: str, *, prefix: str = "") -> list[Section]:
    """Blocks of other reports as sections; blocks without a title get the title ``untitled``."""
    sections = []
    for block in blocks:
        heading = prefix + block.title if block.title else untitled
        title = f"{heading}: {block.part}" if block.part else heading
        sections.append(Section(title, "\n\n".join(block.text), block.table))
    return sections


def _theory(folder: Path) -> list[Section]:
    paths = {name: folder / f"{name}.jsonl" for name in theory.FIGURES}
    return [
        _drawn(f"Theory: {FIGURE_TITLES[name]}", draw, paths[name], rows)
        for name, draw in theory.FIGURES.items()
        if (rows := read_rows(paths[name]))
    ]


def _toys(folder: Path) -> list[Section]:
    sections = []
    for experiment, figures in toys.DRAWN_FROM.items():
        for suffix, protocol in (("", ""), ("-paper", ", protocol paper")):
            path = folder / f"{experiment}{suffix}.jsonl"
            if rows := read_rows(path):
                titles = {name: f"Toys: {FIGURE_TITLES[name]}{protocol}" for name in figures}
                sections += [_drawn(title, toys.FIGURES[name], path, rows) for name, title in titles.items()]
    return sections


def _uci(folder: Path) -> list[Section]:
    rows = [row for path in sorted(folder.glob("uci-*.jsonl")) for row in read_rows(path)]
    sections = _sections(tables.blocks(rows), "UCI: how to read the tables") if rows else []
    if rows:
        kinds = dict.fromkeys((row["experiment"], row["posterior"], row["protocol"]) for row in rows)
        made = [
            _made(
                [row for row in rows if (row["experiment"], row["posterior"], row["protocol"]) == kind],
                "bochner run {} --posterior {} --protocol {}".format(*kind),
            )
            for kind in kinds
        ]
        sections.append(Section("UCI: how the rows were made", "\n\n".join(made)))
        sections += _sections([tables.headline(rows)], "")
    if rows and tables.has_both_protocols(rows):
        sections += _sections(tables.comparison(rows), "UCI: both protocols", prefix="both protocols: ")
    return sections


def _with_figures(section: Section, drawn: dict[str, Figure]) -> Section:
    return replace(section, figures=tuple(drawn.values()), captions=tuple(drawn))


def _rotation(name: str, rows: list[Row]) -> list[Section]:
    section, drawn = Section(f"Images: {name}", table=images.rotation_table(rows)), {}
    for protocol in sorted({row["protocol"] for row in rows if row["status"] == "ok"}):
        what = f"Protocol {protocol}: against the angle; the paper's curves dotted, where it has them."
        made = _made([row for row in rows if row["protocol"] == protocol], f"bochner run {name} --protocol {protocol}")
        drawn[f"{what} {made}"] = images.rotation_figure(rows, protocol)
    return [_with_figures(section, drawn)]


def _ood(rows: list[Row], head: str) -> Section:
    """The rule of the table, the table and the histograms of one head, in one section."""
    rows = [row for row in rows if row["head"] == head]
    blocks = images.ood_blocks(rows)
    drawn = {
        f"{images.POSTERIOR_TITLES[posterior]}, protocol {protocol}: shares of the images of each set.": images.ood_figure(
            histogram_rows
        )
        for (_, posterior, protocol), histogram_rows in images.histograms(rows).items()
    }
    text = [*blocks[0].text, _made(rows, f"bochner run cifar-ood --head {head}")]
    section = Section(f"Images: cifar-ood, head {head}", "\n\n".join(text), blocks[-1].table)
    return _with_figures(section, drawn)


def _images(folder: Path) -> list[Section]:
    sections = []
    for path in sorted(folder.glob("rotated-*.jsonl")):
        if rows := read_rows(path):
            sections += _rotation(path.stem, rows)
    rows = read_rows(folder / "cifar-ood.jsonl")
    for head in dict.fromkeys(row["head"] for row in rows):
        sections.append(_ood(rows, head))
    return sections


def results_sections(folder: Path) -> list[Section]:
    """Tables and figures of all rows under ``folder``: in its folders theory, toys, uci and images, as far as they are there.

    Raises:
        ValueError: None of them holds rows.
    """
    parts = zip(KINDS, (_theory, _toys, _uci, _images), strict=True)
    sections = [section for kind, read in parts for section in read(folder / kind)]
    if not sections:
        raise ValueError(
            f"There are no rows in the folders {', '.join(KINDS)} of {folder}; make some with bochner run."
        )
    return sections
