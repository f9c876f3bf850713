"""The paper's UCI tables beside ours, from rows; nothing here trains."""

import json
import math
from collections.abc import Iterable
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bochner.experiments.catalogue import PROTOCOLS
from bochner.experiments.rows import Row, read_rows
from bochner.files import write_text
from bochner.reports.blocks import Block, Table, as_markdown

Units = dict[tuple[int, int], Row]  # (fold, seed) -> row

# The paper's values: experiment, posterior, set, model, metric, then mean and standard deviation or None.
PAPER: dict[str, Any] = json.loads(
    resources("bochner.reports").joinpath("paper_tables.json").read_text(encoding="utf-8")
)
METRICS = {"uci-regression": ("nlpd", "rmse"), "uci-classification": ("nlpd", "accuracy", "auc")}
TITLES = {"nlpd": "NLPD", "rmse": "RMSE", "accuracy": "ACC", "auc": "AUC"}
FOLDS = 10  # folds of every set in the paper
ROUNDING = 0.005  # half a unit of the two decimals that the paper prints
RULE = (
    "Values are mean ± standard deviation over folds (the sum of squares divided by the number of folds, ddof = 0); "
    "several seeds are averaged within their fold first. The difference is ours minus the paper's. "
    "✓: our mean lies within one of the paper's standard deviations of its mean. The paper prints two decimals, so its "
    "standard deviation counts as at least 0.005, and the rounding of its mean allows another 0.005; ours is compared "
    "before it is rounded. Two standard errors of the paper's mean are 2/3 of its standard deviation (ten folds, ddof = 0), with "
    "the same allowance. Both ran on the same folds, so what folds differ by cancels in the difference, and even this is more room "
    "than chance needs; the paper lists no single folds. "
    "†k: k units diverged and are left out. n=k: k folds instead of 10. —: no value."
)
COMPARISON_RULE = (
    "NLPD, mean ± standard deviation (ddof = 0) over the folds and seeds that both protocols have; the difference is "
    "bochner minus paper, ± the standard error of its mean over folds. ✓: bochner is lower. "
    "†k: k units diverged under either protocol and are left out of both."
)

_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"[": "{[}", "*": "{*}"}  # either would be an argument of the line break before it
    | {character: f"${character}$" for character in "<>|"}
    | {"±": r"$\pm$", "−": "$-$", "✓": r"$\checkmark$", "†": r"\dag{}", "—": "---"}
)


class Key(NamedTuple):
    """The experiment, posterior, protocol, set and model of a cell of a table."""

    experiment: str
    posterior: str
    protocol: str
    set: str
    model: str


class Cell(NamedTuple):
    """One metric of one model on one set, ours and the paper's."""

    mean: float | None  # over the folds with a finite value; None where there is none
    std: float | None  # over the same folds, with ddof = 0
    folds: int  # with a row, diverged or not
    diverged: int  # units (fold and seed) without a finite value
    paper: list[float] | None  # its mean and standard deviation

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper[0]

    @property
    def within(self) -> bool:
        """Whether our mean lies within one of the paper's standard deviations, given the rounding of its print."""
        difference, (_, std) = self.difference, self.paper or (0.0, 0.0)
        return difference is not None and abs(difference) <= max(std, ROUNDING) + ROUNDING + 1e-9

    @property
    def near(self) -> bool:
        """Whether our mean lies within two standard errors of the paper's, given the rounding of its print."""
        difference, (_, std) = self.difference, self.paper or (0.0, 0.0)
        # Its standard deviations divide by the number of folds, so their standard error has one fewer under the root.
        error = max(std, ROUNDING) / math.sqrt(FOLDS - 1)
        return difference is not None and abs(difference) <= 2 * error + ROUNDING + 1e-9


def _check(index: int, row: Row) -> None:
    """Raises a ValueError for a row that lacks a key or has an unknown value."""
    metrics = METRICS.get(row.get("experiment", ""), ())
    for key in (*Key._fields, "fold", "folds", "seed", "status", *metrics):
        if key not in row:
            raise ValueError(f"Row {index} has no {key!r}.")
    if not metrics:
        raise ValueError(f"Row {index}: experiment must be one of {', '.join(METRICS)}, got {row['experiment']!r}.")
    if row["status"] not in ("ok", "diverged"):
        raise ValueError(f"Row {index}: status must be 'ok' or 'diverged', got {row['status']!r}.")


def _units(rows: Iterable[Row]) -> dict[Key, Units]:
    """Checked rows by cell, then by fold and seed, in the paper's order."""
    units: dict[Key, Units] = {}
    for index, row in enumerate(rows):
        _check(index, row)
        cell = units.setdefault(Key(*(row[name] for name in Key._fields)), {})
        unit = (row["fold"], row["seed"])
        if unit in cell and len(cell[unit]["folds"]) == len(row["folds"]):
            raise ValueError(f"Row {index} repeats an earlier row: {row['set']}, {row['model']}, fold and seed {unit}.")
        # A sweep chooses learning rate and scale over its folds: of two sweeps, the one over more folds counts.
        if unit not in cell or len(cell[unit]["folds"]) < len(row["folds"]):
            cell[unit] = row
    if not units:
        raise ValueError("There are no rows to report: run `bochner run uci-regression` or `uci-classification` first.")
    return {key: units[key] for key in sorted(units, key=_order)}


def _order(key: Key) -> tuple[int, ...]:
    """Sort key of a cell: its position in the paper's tables; names that the paper lacks come last, in the order of their rows."""
    sets = list(PAPER[key.experiment]["kfac"])
    models = list(PAPER["uci-regression"]["kfac"]["boston"])
    known = (list(METRICS), ["kfac", "swag"], ["paper", "bochner"], sets, models)
    return tuple(names.index(name) if name in names else len(names) for name, names in zip(key, known, strict=True))


def _finite(units: Units, metric: str) -> dict[tuple[int, int], float]:
    """The finite values of a metric, by fold and seed."""
    values = {unit: row[metric] for unit, row in units.items() if row["status"] == "ok"}
    return {unit: value for unit, value in values.items() if value is not None and math.isfinite(value)}


def _over_folds(values: dict[tuple[int, int], float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (ddof = 0) over folds of the mean over seeds."""
    folds: dict[int, list[float]] = {}
    for (fold, _), value in sorted(values.items()):
        folds.setdefault(fold, []).append(value)
    means = [np.mean(seeds) for seeds in folds.values()]
    return (float(np.mean(means)), float(np.std(means))) if means else (None, None)


def summarise(rows: Iterable[Row]) -> dict[Key, dict[str, Cell]]:
    """Mean, standard deviation (ddof = 0), counts and the paper's value, for every cell and metric, in the paper's order.

    Raises:
        ValueError: There are no rows, a row lacks a key, or two rows are of the same unit.
    """
    cells: dict[Key, dict[str, Cell]] = {}
    for key, units in _units(rows).items():
        paper = PAPER[key.experiment].get(key.posterior, {}).get(key.set, {}).get(key.model, {})
        for metric in METRICS[key.experiment]:
            values = _finite(units, metric)
            folds, diverged = len({fold for fold, _ in units}), len(units) - len(values)
            cells.setdefault(key, {})[metric] = Cell(*_over_folds(values), folds, diverged, paper.get(metric))
    return cells


def _number(value: float | None, form: str = ".2f", digits: int = 2) -> str:
    # Adding 0.0 turns a negative zero into a positive one.
    return "—" if value is None else f"{round(value, digits) + 0.0:{form}}".replace("-", "−")


def _spread(mean: float | None = None, std: float | None = None) -> str:
    return "—" if mean is None else f"{_number(mean)} ± {_number(std)}"


def _texts(cell: Cell) -> list[str]:
    """Our value, the paper's and the difference, with their marks."""
    folds = f" n={cell.folds}" if cell.folds < FOLDS else ""
    dagger = f" †{cell.diverged}" if cell.diverged else ""
    difference = _number(cell.difference, "+.2f") + " ✓" * cell.within
    return [_spread(cell.mean, cell.std) + folds + dagger, _spread(*cell.paper or ()), difference]


def _counts(cells: dict[Key, dict[str, Cell]], metric: str) -> str:
    """How many cells lie within one of the paper's standard deviations, and which do not."""
    compared = {key: metrics[metric] for key, metrics in cells.items() if metrics[metric].paper}
    if not compared:
        return f"{TITLES[metric]}: the paper has no value for these cells."
    num_within = sum(cell.within for cell in compared.values())
    text = f"{TITLES[metric]}: {num_within} of {len(compared)} cells within one of the paper's standard deviations"
    text += f", {sum(cell.near for cell in compared.values())} within two standard errors of its mean"
    if differences := [cell.difference for cell in compared.values() if cell.difference is not None]:
        text += f"; the mean difference is {_number(float(np.mean(differences)), '+.3f', 3)}"
    if diverged := sum(cell.diverged > 0 for cell in compared.values()):
        text += f" ({diverged} of the {len(compared)} with diverged units left out)"
    rest = [
        f"{key.set} {key.model} (ours {_number(cell.mean)}, paper {_spread(*cell.paper or ())})"
        for key, cell in compared.items()
        if not cell.within
    ]
    return f"{text}. Beyond one standard deviation: {', '.join(rest)}." if rest else f"{text}."


def _sections(rows: Iterable[Row]) -> list[tuple[str, list[str], dict[str, Table]]]:
    """Title, counts and one table per set, for each experiment, posterior and protocol."""
    cells = summarise(rows)
    sections = []
    for group in dict.fromkeys(key[:3] for key in cells):
        chosen, metrics = {key: values for key, values in cells.items() if key[:3] == group}, METRICS[group[0]]
        header = ["model", *(text for m in metrics for text in (f"{TITLES[m]} ours", "paper", "difference"))]
        tables = {key.set: [header] for key in chosen}
        for key, values in chosen.items():
            tables[key.set].append([key.model, *(text for metric in metrics for text in _texts(values[metric]))])
        sections.append(("{}, {}, protocol {}".format(*group), [_counts(chosen, metric) for metric in metrics], tables))
    return sections


def blocks(rows: Iterable[Row]) -> list[Block]:
    """Ours, the paper's and the difference: the rule, then per section its counts and a table per set."""
    blocks = [Block(text=(RULE,))]
    for title, counts, tables in _sections(rows):
        blocks.append(Block(title, text=tuple(counts)))
        blocks += [Block(title, name, table=table) for name, table in tables.items()]
    return blocks


def _latex_table(caption: str, table: Table) -> str:
    width = len(table[0])
    lines = [" & ".join(text.translate(_LATEX) for text in line) + r" \\" for line in table]
    size = r"\scriptsize" if width <= 7 else r"\tiny"  # what fits the width of an article's page
    start = (
        rf"\begin{{table}}[htbp]\centering\caption{{{caption.translate(_LATEX)}}}{size}\setlength{{\tabcolsep}}{{3pt}}"
    )
    body = [rf"\begin{{tabular}}{{{'l' * width}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return "\n".join([start, *body, r"\end{tabular}", r"\end{table}"])


def latex(rows: Iterable[Row]) -> str:
    """The content of ``blocks`` for a LaTeX article that loads booktabs and amssymb."""
    parts = [r"% Needs \usepackage{booktabs,amssymb}.", RULE.translate(_LATEX)]
    for title, counts, tables in _sections(rows):
        parts += [rf"\subsection*{{{title.translate(_LATEX)}}}", *(line.translate(_LATEX) for line in counts)]
        parts += [_latex_table(f"{title}: {name}", table) for name, table in tables.items()]
    return "\n\n".join(parts) + "\n"


def _paired(key: Key, ours: Units, theirs: Units) -> tuple[list[str], bool]:
    """A line of the comparison over the units of both protocols, and whether "bochner" has the lower NLPD."""
    shared = ours.keys() & theirs.keys()
    pair = [_finite({unit: units[unit] for unit in shared}, "nlpd") for units in (ours, theirs)]
    finite = pair[0].keys() & pair[1].keys()
    (mean, std), (other, spread) = (_over_folds({unit: values[unit] for unit in finite}) for values in pair)
    difference = None if mean is None or other is None else mean - other
    lower = difference is not None and difference < 0
    folds: dict[int, list[float]] = {}
    for unit in finite:
        folds.setdefault(unit[0], []).append(pair[0][unit] - pair[1][unit])
    means = [float(np.mean(values)) for values in folds.values()]
    error = f" ± {_number(float(np.std(means, ddof=1)) / math.sqrt(len(means)))}" if len(means) > 1 else ""
    text = _number(difference, "+.2f") + error + " ✓" * lower + (f" †{len(shared - finite)}" if shared - finite else "")
    count = str(len({fold for fold, _ in shared}))
    return [key.set, key.model, _spread(mean, std), _spread(other, spread), text, count], lower


def has_both_protocols(rows: Iterable[Row]) -> bool:
    """Whether there are rows of each protocol, so that they can be compared."""
    return {row["protocol"] for row in rows} >= set(PROTOCOLS)


def comparison(rows: Iterable[Row]) -> list[Block]:
    """Protocol ``bochner`` against protocol ``paper`` in NLPD, over the folds and seeds that both have."""
    units = _units(rows)
    sections: dict[str, list[tuple[list[str], bool]]] = {}
    for key, theirs in units.items():
        ours = units.get(key._replace(protocol="bochner"), {})
        if key.protocol == "paper" and ours.keys() & theirs.keys():
            sections.setdefault(f"{key.experiment}, {key.posterior}", []).append(_paired(key, ours, theirs))
    if not sections:
        raise ValueError("There is nothing to compare: no unit has rows under both protocols, bochner and paper.")
    blocks = [Block(text=(COMPARISON_RULE,))]
    header = ["set", "model", "bochner", "paper", "difference", "folds"]
    for title, lines in sections.items():
        count = f"Protocol bochner has the lower NLPD in {sum(lower for _, lower in lines)} of {len(lines)} cells."
        blocks.append(Block(title, text=(count,), table=[header, *(line for line, _ in lines)]))
    return blocks


def headline(rows: Iterable[Row]) -> Block:
    """The paper's claim by set and protocol: NLPD of the twelve periodic models against the other four."""
    cells = {key: values["nlpd"].mean for key, values in summarise(rows).items()}
    header = (
        "experiment",
        "posterior",
        "protocol",
        "set",
        "periodic: mean",
        "best",
        "others: mean",
        "best",
        "periodic best",
    )
    table: Table = [list(header)]
    for group in dict.fromkeys(key[:4] for key in cells):
        means = {key.model: mean for key, mean in cells.items() if key[:4] == group and mean is not None}
        others = {name: means[name] for name in means if name == "relu" or name.startswith("local-")}
        periodic = {name: means[name] for name in means if name not in others}
        if not (others and periodic):
            continue
        texts = [
            text
            for part in (periodic, others)
            for text in (
                _number(float(np.mean(list(part.values())))),
                f"{_number(min(part.values()))} ({min(part, key=lambda name: part[name])})",
            )
        ]
        table.append([*group, *texts, "✓" if min(periodic.values()) < min(others.values()) else ""])
    rule = "NLPD, mean over folds. The best of twelve models has more chances to be lucky than the best of four."
    return Block("Periodic models against the others", text=(rule,), table=table)


def write(paths: Iterable[Path], target: Path) -> list[Path]:
    """Writes tables.md and tables.tex from files of rows; returns their paths."""
    rows = [row for path in paths for row in read_rows(path)]
    parts = [*blocks(rows), headline(rows)]
    if has_both_protocols(rows):
        parts += comparison(rows)
    files = {target / "tables.md": as_markdown(parts), target / "tables.tex": latex(rows)}
    for path, content in files.items():
        write_text(path, content)
    return list(files)
