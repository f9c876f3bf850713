"""Tables and figures of the image experiments, from their rows; nothing here trains."""

import contextlib
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bochner.datasets import load_images
from bochner.experiments.rows import read_rows
from bochner.files import write_text
from bochner.reports.blocks import Block, Table, as_markdown
from bochner.reports.theory import save_figure

Row = dict[str, Any]

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
SETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn-1083": "SVHN (1,083 images)"}
SET_COLORS = {"cifar10": "#4472b5", "cifar100": "#d9902f", "svhn-1083": "#2aab61"}
POSTERIORS = {
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


def _curves(rows: list[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows of each protocol, posterior and model, in the order of their angles: of the smallest seed that did not diverge."""
    fine = [row for row in rows if row["status"] == "ok"]
    chosen: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(fine, key=lambda r: (r["seed"], r["angle"])):
        own = chosen.setdefault((row["protocol"], row["posterior"], row["model"]), [])
        if not own or row["seed"] == own[0]["seed"]:
            own.append(row)
    return dict(sorted(chosen.items(), key=lambda item: (*item[0][:2], list(LABELS).index(item[0][2]))))


def rotation_figure(rows: list[Row], protocol: str) -> Figure:
    """Accuracy, mean confidence and NLPD against the angle: a line of panels for each posterior, the paper's curves dotted."""
    curves = {key: own for key, own in _curves(rows).items() if key[0] == protocol}
    kinds = [kind for kind in POSTERIORS if any(key[1] == kind for key in curves)]
    figure = Figure(figsize=(10, 2.9 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), len(PANELS), sharex=True, squeeze=False)
    for line, kind in enumerate(kinds):
        for axes, (metric, title) in zip(panels[line], PANELS.items(), strict=True):
            for (_, posterior, model), own in curves.items():
                if posterior != kind:
                    continue
                angles = [row["angle"] for row in own]
                axes.plot(angles, [row[metric] for row in own], color=COLORS[model], label=LABELS[model])
                if (paper := _paper_curve(own[0], metric)) is not None:
                    axes.plot(range(0, 361, 10), paper, ":", color=COLORS[model], linewidth=1)
            _plain(axes, title if line == 0 else "")
            axes.set_xticks([0, 90, 180, 270, 360])
        panels[line, 0].set_ylabel(POSTERIORS[kind])
    for axes in panels[-1]:
        axes.set_xlabel("rotation, degrees")
    panels[0, 0].legend(fontsize=7)
    return figure


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def rotation_table(rows: list[Row]) -> Table:
    """For every protocol, posterior and model: upright, at 90°, and the distance from the paper's curves."""
    table: Table = [
        [
            *(
                "protocol",
                "posterior",
                "model",
                "ACC 0°",
                "confidence 0°",
                "ACC 90°",
                "confidence 90°",
                "NLPD 90° (paper)",
            ),
            *("Δ ACC mean / worst", "Δ confidence mean / worst", "s"),
        ]
    ]
    first = min(row["seed"] for row in rows)
    for (protocol, posterior, model), own in _curves(rows).items():
        at, seed = {row["angle"]: row for row in own}, own[0]["seed"]
        cells = [
            protocol,
            POSTERIORS[posterior],
            LABELS[model] + ("" if seed == first else f", seed {seed}"),
            *(f"{at[0][k]:.3f}" for k in ("accuracy", "confidence")),
        ]
        cells += [f"{at[90][k]:.3f}" for k in ("accuracy", "confidence")]
        paper = _paper_curve(own[0], "nlpd")
        cells.append(f"{at[90]['nlpd']:.2f}" + (f" ({paper[9]:.2f})" if paper else ""))
        for metric in ("accuracy", "confidence"):
            curve = _paper_curve(own[0], metric)
            gap = None if curve is None else np.abs(np.subtract([row[metric] for row in own], curve))
            cells.append("—" if gap is None else f"{gap.mean():.3f} / {gap.max():.3f}")
        table.append([*cells, f"{own[0]['seconds']:.0f}"])
    return table


def _first_seed(rows: list[Row]) -> list[Row]:
    """Rows of the smallest seed that did not diverge."""
    ended = [row for row in rows if row["status"] == "ok"]
    seed = min((row["seed"] for row in ended), default=None)
    return [row for row in ended if row["seed"] == seed]


def ood_blocks(rows: list[Row]) -> list[Block]:
    """A table for each head: AUC, AUPR and FPR95 of every method; beside the rows of its protocol the paper's in brackets."""
    paper, rows = _json("paper_ood.json"), _first_seed(rows)
    table: Table = [["posterior", "protocol", "model", "score", "ACC", "NLPD"]]
    table[0] += [f"{title} {m}" for title in (SETS["cifar100"], SETS["svhn-1083"]) for m in ("AUC", "AUPR", "FPR95")]
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        if row["outside"] != "histogram":
            key = (row["head"], row["posterior"], row["protocol"], row["score"], row["model"])
            groups.setdefault(key, {})[row["outside"]] = row
    found = [Block(text=(AUPR_RULE if rows else "Every method diverged.",))]
    for head in dict.fromkeys(key[0] for key in groups):
        lines = table.copy()
        order = sorted(
            (key for key in groups if key[0] == head),
            key=lambda k: (list(POSTERIORS).index(k[1]), k[2], k[3], list(LABELS).index(k[4])),
        )
        for key in order:
            _, posterior, protocol, score, model = key
            own = groups[key]
            first = own["cifar100"]
            cells = [POSTERIORS[posterior], protocol, LABELS[model], SCORES[score]]
            cells += [f"{first['accuracy']:.4f}", f"{first['nlpd']:.3f}"]
            known = paper.get(score, {}).get(model, {}) if (posterior, protocol) == ("swag", "paper") else {}
            for name in ("cifar100", "svhn-1083"):
                theirs = known.get(name.split("-")[0], {})
                # Beside the paper's stands an AUPR of its kind, where the rows have one.
                area = "aupr_trapezoid" if known and "aupr_trapezoid" in own[name] else "aupr_full"
                for metric, column in (("auc", "auc"), ("aupr", area), ("fpr95", "fpr95")):
                    cells.append(f"{own[name][column]:.3f}" + (f" ({theirs[metric]:.3f})" if metric in theirs else ""))
            lines.append(cells)
        found.append(Block(text=(f"Head: {head}",), table=lines))
    return found


def ood_figure(rows: list[Row], head: str, posterior: str, protocol: str) -> Figure:
    """Histograms of entropy and marginal variance over the three sets, a line for each model."""
    chosen = [r for r in _first_seed(rows) if (r["head"], r["posterior"], r["protocol"]) == (head, posterior, protocol)]
    by = {(r["model"], r["score"]): r for r in chosen if r["outside"] == "histogram"}
    models = [m for m in LABELS if (m, "entropy") in by]
    figure = Figure(figsize=(8, 1.9 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    for line, model in zip(panels, models, strict=True):
        for axes, score in zip(line, ("entropy", "marginal_variance"), strict=True):
            row = by[model, score]
            edges = np.linspace(0, row["top"], 51)
            for name, counts in row["counts"].items():
                share = np.asarray(counts) / max(1, sum(counts))
                axes.stairs(share, edges, fill=True, alpha=0.45, color=SET_COLORS[name], label=SETS[name])
            _plain(axes, SCORES[score] if model == models[0] else "")
            axes.set_yticks([])
        line[0].set_ylabel(LABELS[model], fontsize=8)
    panels[0, 0].legend(fontsize=7)
    return figure


def extreme_images_figure(rows: list[Row], head: str, posterior: str, protocol: str, model: str) -> Figure:
    """Of each set the five images with the lowest entropy (left) and the five with the highest; reads the sets of images."""
    row = next(
        r
        for r in _first_seed(rows)
        if (r["head"], r["posterior"], r["protocol"], r["model"]) == (head, posterior, protocol, model)
        and r["outside"] == "histogram"
    )
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
    found = [Block(path.stem, table=rotation_table(read_rows(path))) for path in sorted(folder.glob("rotated-*.jsonl"))]
    if rows := read_rows(folder / "cifar-ood.jsonl"):
        found += [replace(block, title="cifar-ood") for block in ood_blocks(rows)]
    return found


def write(folder: Path, target: Path) -> list[Path]:
    """Writes the tables of the image experiments into images.md, and their figures; returns all paths.

    The figure of images is left out where the sets are not at hand.
    """
    figures: dict[str, Figure] = {}
    for path in sorted(folder.glob("rotated-*.jsonl")):
        rows = read_rows(path)
        for protocol in sorted({row["protocol"] for row in rows if row["status"] == "ok"}):
            figures[f"{path.stem}-{protocol}"] = rotation_figure(rows, protocol)
    if rows := read_rows(folder / "cifar-ood.jsonl"):
        drawn = [r for r in _first_seed(rows) if r["outside"] == "histogram"]
        for key in sorted({(r["head"], r["posterior"], r["protocol"]) for r in drawn}):
            figures["-".join(("cifar-ood", *key))] = ood_figure(rows, *key)
            models = {r["model"] for r in drawn if (r["head"], r["posterior"], r["protocol"]) == key}
            if key[1] == "swag":
                with contextlib.suppress(FileNotFoundError):
                    last = max(models, key=list(LABELS).index)
                    figures["-".join(("cifar-images", *key))] = extreme_images_figure(rows, *key, model=last)
    written = [target / "images.md", *(target / f"{name}.svg" for name in figures)]
    write_text(written[0], as_markdown(blocks(folder)))
    for path, figure in zip(written[1:], figures.values(), strict=True):
        save_figure(figure, path)
    return written
