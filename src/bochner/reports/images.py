"""Tables and figures of the image experiments, from their rows; nothing here trains."""

import json
import warnings
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bochner.datasets import load_images
from bochner.experiments.rows import Row, read_rows
from bochner.files import write_text
from bochner.reports.blocks import Block, Table, as_markdown
from bochner.reports.figures import save_figure

COLORS = {
    "relu": "#4472b5",
    "local-rbf": "#d3434e",
    "rbf-sin": "#2aab61",
    "rbf-sincos": "#8570b7",
    "local-matern32": "#d3434e",
    "matern32-sin": "#2aab61",
}
LABELS = {
    "relu": "ReLU",
    "local-rbf": "local RBF",
    "rbf-sin": "RBF (sin)",
    "rbf-sincos": "RBF (sin–cos)",
    "local-matern32": "local Matérn-3/2",
    "matern32-sin": "Matérn-3/2 (sin)",
    "googlenet": "GoogLeNet itself",
}
PANELS = {"accuracy": "accuracy", "confidence": "mean confidence", "nlpd": "NLPD"}
OUTSIDE = ("cifar100", "svhn-1083")  # sets that are not CIFAR-10
SETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn-1083": "SVHN (1,083 images)"}
SET_COLORS = {"cifar10": "#4472b5", "cifar100": "#d9902f", "svhn-1083": "#2aab61"}
POSTERIOR_TITLES = {
    "map": "MAP",
    "kfac": "KFAC Laplace",
    "closed_form": "closed form",
    "swag": "SWAG",
    "ensemble": "ensemble",
}
SCORES = {
    "entropy": "entropy",
    "marginal_variance": "marginal variance",
    "max_probability": "maximum probability",
    "energy": "energy",
}


AUPR_RULE = (
    "SVHN is the first 1,083 images of its training set, without labels. Its AUPR is given at the base rate of the whole test set "
    "of 26,032, as the paper's is: each image counts 24 times. In brackets the paper's values."
)


def _json(name: str) -> Any:
    return json.loads(files("bochner.reports").joinpath(name).read_text(encoding="utf-8"))


def _paper_curve(row: Row, metric: str) -> list[float] | None:
    """The paper's curve of a model and posterior, whatever the protocol of the row; None where it has none."""
    if row["experiment"] != "rotated-mnist" or row["posterior"] not in ("map", "kfac"):
        return None
    return _json("paper_mnist.json")[row["posterior"]][metric][row["model"]]


Curves = dict[tuple[str, str, str], list[Row]]  # (protocol, posterior, model) -> rows in the order of their angles


def _curves(rows: list[Row]) -> Curves:
    """Rows of each protocol, posterior and model, in the order of their angles: of the smallest seed that did not diverge."""
    finished = [row for row in rows if row["status"] == "ok"]
    curves: Curves = {}
    for row in sorted(finished, key=lambda r: (r["seed"], r["angle"])):
        curve = curves.setdefault((row["protocol"], row["posterior"], row["model"]), [])
        if not curve or row["seed"] == curve[0]["seed"]:
            curve.append(row)
    return dict(sorted(curves.items(), key=lambda item: (*item[0][:2], list(LABELS).index(item[0][2]))))


def rotation_figure(rows: list[Row], protocol: str) -> Figure:
    """Accuracy, mean confidence and NLPD against the angle: a line of panels for each posterior, the paper's curves dotted."""
    curves = {key: curve for key, curve in _curves(rows).items() if key[0] == protocol}
    posteriors = [name for name in POSTERIOR_TITLES if any(key[1] == name for key in curves)]
    figure = Figure(figsize=(10, 2.9 * len(posteriors)), layout="constrained")
    panels = figure.subplots(len(posteriors), len(PANELS), sharex=True, squeeze=False)
    for line, posterior in enumerate(posteriors):
        models = {key[2]: curve for key, curve in curves.items() if key[1] == posterior}
        for axes, (metric, title) in zip(panels[line], PANELS.items(), strict=True):
            for model, curve in models.items():
                axes.plot(
                    [row["angle"] for row in curve],
                    [row[metric] for row in curve],
                    color=COLORS[model],
                    label=LABELS[model],
                )
                if (paper := _paper_curve(curve[0], metric)) is not None:
                    axes.plot(range(0, 361, 10), paper, ":", color=COLORS[model], linewidth=1)
            _plain(axes, title if line == 0 else "")
            axes.set_xticks([0, 90, 180, 270, 360])
        panels[line, 0].set_ylabel(POSTERIOR_TITLES[posterior])
    for axes in panels[-1]:
        axes.set_xlabel("rotation, degrees")
    panels[0, 0].legend(fontsize=7)
    return figure


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


ROTATION_HEADER = [
    *("protocol", "posterior", "model", "ACC 0°", "confidence 0°", "ACC 90°", "confidence 90°", "NLPD 90° (paper)"),
    *("Δ ACC mean / worst", "Δ confidence mean / worst", "s"),
]


def rotation_table(rows: list[Row]) -> Table:
    """For every protocol, posterior and model: upright, at 90°, and the distance from the paper's curves.

    A value whose row is missing is a dash.
    """
    table: Table = [ROTATION_HEADER]
    first = min((row["seed"] for row in rows), default=0)
    for (protocol, posterior, model), curve in _curves(rows).items():
        by_angle, seed = {row["angle"]: row for row in curve}, curve[0]["seed"]
        label = LABELS[model] + ("" if seed == first else f", seed {seed}")
        values = [
            f"{by_angle[angle][metric]:.3f}" if angle in by_angle else "—"
            for angle in (0, 90)
            for metric in ("accuracy", "confidence")
        ]
        paper = _paper_curve(curve[0], "nlpd")
        nlpd = f"{by_angle[90]['nlpd']:.2f}" + (f" ({paper[9]:.2f})" if paper else "") if 90 in by_angle else "—"
        gaps = [_gap_to_paper(curve, metric) for metric in ("accuracy", "confidence")]
        seconds = f"{curve[0]['seconds']:.0f}"
        table.append([protocol, POSTERIOR_TITLES[posterior], label, *values, nlpd, *gaps, seconds])
    return table


def _gap_to_paper(curve: list[Row], metric: str) -> str:
    """Mean and largest distance of a curve from the paper's; a dash where either has no value."""
    paper = _paper_curve(curve[0], metric)
    known = {10 * index: value for index, value in enumerate(paper or [])}
    gaps = [abs(row[metric] - known[row["angle"]]) for row in curve if row["angle"] in known]
    return f"{np.mean(gaps):.3f} / {max(gaps):.3f}" if gaps else "—"


def first_seed(rows: list[Row]) -> list[Row]:
    """Rows of the smallest seed that did not diverge."""
    finished = [row for row in rows if row["status"] == "ok"]
    seed = min((row["seed"] for row in finished), default=None)
    return [row for row in finished if row["seed"] == seed]


OOD_HEADER = [
    *("posterior", "protocol", "model", "score", "ACC", "NLPD"),
    *(f"{SETS[name]} {metric}" for name in OUTSIDE for metric in ("AUC", "AUPR", "FPR95")),
]


def ood_blocks(rows: list[Row]) -> list[Block]:
    """A table for each head: AUC, AUPR and FPR95 of every method; beside the rows of its protocol the paper's in brackets."""
    rows = first_seed(rows)
    methods: dict[tuple[str, ...], dict[str, Row]] = {}  # by the set outside
    for row in rows:
        if row["outside"] != "histogram":
            key = (row["head"], row["posterior"], row["protocol"], row["score"], row["model"])
            methods.setdefault(key, {})[row["outside"]] = row
    ordered = sorted(methods, key=lambda k: (list(POSTERIOR_TITLES).index(k[1]), k[2], k[3], list(LABELS).index(k[4])))
    blocks = [Block(text=(AUPR_RULE if rows else "Every method diverged.",))]
    for head in dict.fromkeys(key[0] for key in methods):
        lines = [_ood_line(key, methods[key]) for key in ordered if key[0] == head]
        blocks.append(Block(text=(f"Head: {head}",), table=[OOD_HEADER, *lines]))
    return blocks


def _ood_line(key: tuple[str, ...], by_set: dict[str, Row]) -> list[str]:
    """A line of the table: how well one score tells each set outside from CIFAR-10; a dash where a row is missing."""
    _, posterior, protocol, score, model = key
    known = _json("paper_ood.json").get(score, {}).get(model, {}) if (posterior, protocol) == ("swag", "paper") else {}
    inside = next(iter(by_set.values()))
    cells = [POSTERIOR_TITLES[posterior], protocol, LABELS[model], SCORES[score]]
    cells += [f"{inside['accuracy']:.4f}", f"{inside['nlpd']:.3f}"]
    for name in OUTSIDE:
        row, paper = by_set.get(name), known.get(name.split("-")[0], {})
        if row is None:
            cells += ["—"] * 3
            continue
        # The paper's AUPR has straight lines between its points; beside it stands ours of that kind, where the rows have it.
        area = "aupr_trapezoid" if known and "aupr_trapezoid" in row else "aupr_full"
        for metric, column in (("auc", "auc"), ("aupr", area), ("fpr95", "fpr95")):
            cells.append(f"{row[column]:.3f}" + (f" ({paper[metric]:.3f})" if metric in paper else ""))
    return cells


def histograms(rows: list[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Histogram rows of each head, posterior and protocol, in alphabetical order."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in first_seed(rows):
        if row["outside"] == "histogram":
            groups.setdefault((row["head"], row["posterior"], row["protocol"]), []).append(row)
    return dict(sorted(groups.items()))


def ood_figure(rows: list[Row]) -> Figure:
    """Histograms of entropy and marginal variance over the three sets, a line for each model, from histogram rows."""
    by_score = {(row["model"], row["score"]): row for row in rows}
    models = [model for model in LABELS if any(key[0] == model for key in by_score)]
    figure = Figure(figsize=(8, 1.9 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    for line, model in zip(panels, models, strict=True):
        for axes, score in zip(line, ("entropy", "marginal_variance"), strict=True):
            if (model, score) in by_score:
                _draw_histograms(axes, by_score[model, score])
            _plain(axes, SCORES[score] if model == models[0] else "")
            axes.set_yticks([])
        line[0].set_ylabel(LABELS[model], fontsize=8)
    panels[0, 0].legend(fontsize=7)
    return figure


def _draw_histograms(axes: Axes, row: Row) -> None:
    edges = np.linspace(0, row["top"], 51)
    for name, counts in row["counts"].items():
        share = np.asarray(counts) / max(1, sum(counts))
        axes.stairs(share, edges, fill=True, alpha=0.45, color=SET_COLORS[name], label=SETS[name])


def extreme_images_figure(row: Row) -> Figure:
    """Of each set the five images with the lowest entropy (left) and the five with the highest; reads the sets of images.

    Args:
        row: The histogram row of one model.
    """
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(len(SETS), 10)
    for line, (name, title) in zip(panels, SETS.items(), strict=True):
        images = load_images(name).x_test
        for axes, index in zip(line, row["lowest"][name][:5] + row["highest"][name][-5:], strict=True):
            axes.imshow(images[index])
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(title, fontsize=7)
    return figure


def blocks(folder: Path) -> list[Block]:
    """The tables of all image experiments in a folder."""
    tables = [
        Block(path.stem, table=rotation_table(read_rows(path))) for path in sorted(folder.glob("rotated-*.jsonl"))
    ]
    if rows := read_rows(folder / "cifar-ood.jsonl"):
        tables += [replace(block, title="cifar-ood") for block in ood_blocks(rows)]
    return tables


def write(folder: Path, target: Path) -> list[Path]:
    """Writes the tables of the image experiments into images.md, and their figures; returns all paths.

    The figures of single images are left out, with a warning, where their sets are not in the data folder.
    """
    figures: dict[str, Figure] = {}
    absent = ""  # why the figures of images are not drawn
    for path in sorted(folder.glob("rotated-*.jsonl")):
        rows = read_rows(path)
        for protocol in sorted({row["protocol"] for row in rows if row["status"] == "ok"}):
            figures[f"{path.stem}-{protocol}"] = rotation_figure(rows, protocol)
    for key, rows in histograms(read_rows(folder / "cifar-ood.jsonl")).items():
        figures["-".join(("cifar-ood", *key))] = ood_figure(rows)
        if key[1] == "swag":
            last = max(rows, key=lambda row: list(LABELS).index(row["model"]))
            try:
                figures["-".join(("cifar-images", *key))] = extreme_images_figure(last)
            except FileNotFoundError as error:
                absent = str(error)
    if absent:
        warnings.warn(f"The figures of single images are left out. {absent}", stacklevel=2)
    written = [target / "images.md", *(target / f"{name}.svg" for name in figures)]
    write_text(written[0], as_markdown(blocks(folder)))
    for path, figure in zip(written[1:], figures.values(), strict=True):
        save_figure(figure, path)
    return written
