"""Figures of the theory experiments, drawn from their rows."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bochner.experiments.rows import Row

COLORS = {"rbf": "#4472b5", "matern52": "#8570b7", "matern32": "#2aab61", "exponential": "#d3434e"}
LABELS = {"rbf": "RBF", "matern52": "Matérn-5/2", "matern32": "Matérn-3/2", "exponential": "Exponential"}
TITLES = {"sin": "Sinusoidal", "sincos": "Sine–cosine", "triangle": "Triangle wave", "periodic_relu": "Periodic ReLU"}


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def activation_figure(rows: list[Row]) -> Figure:
    """The four periodic activations, ours solid and the paper's scaling dashed."""
    figure = Figure(figsize=(10, 2.4), layout="constrained")
    panels = figure.subplots(1, len(TITLES), sharey=True)
    for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
        for row in (r for r in rows if r["activation"] == name):
            unit = row["scaling"] == "unit"
            axes.plot(
                row["z"],
                row["value"],
                "-" if unit else "--",
                color="#4472b5" if unit else "#d3434e",
                label=row["scaling"],
            )
        axes.set(title=title, xlabel="z", xticks=np.pi * np.arange(-2, 3), xticklabels=["−2π", "−π", "0", "π", "2π"])
        axes.legend(title="scaling", fontsize=7, title_fontsize=7, loc="lower right")
        _clean(axes)
    panels[0].set_ylabel("σ(z)")
    return figure


def covariance_figure(rows: list[Row]) -> Figure:
    """Monte Carlo covariances (solid) on their exact counterparts (dashed)."""
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    panels = figure.subplots(1, len(TITLES), sharey=True)
    for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
        for row in (r for r in rows if r["activation"] == name):
            axes.plot(row["r"], row["monte_carlo"], color=COLORS[row["kernel"]], label=LABELS[row["kernel"]])
            axes.plot(row["r"], row["exact"], "k--", linewidth=0.8)
        axes.set(title=title, xlabel="r")
        _clean(axes)
    panels[0].set_ylabel("κ(r)")
    panels[-1].legend(fontsize=7)
    return figure


def gram_figure(rows: list[Row]) -> Figure:
    """Nine Gram matrices, infinite width on the left of each pair and finite on the right."""
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    panels = figure.subplots(3, 6)
    for i, row in enumerate(rows):
        for j, width in enumerate(("infinite", "finite")):
            axes = panels[i // 3, 2 * (i % 3) + j]
            n = row["points"]
            axes.imshow(np.asarray(row[width]).reshape(n, n), cmap="viridis", extent=(-3, 3, 3, -3))
            axes.set(xticks=[], yticks=[])
            caption = "infinite" if j == 0 else f"{row['networks']:,} × {row['units']} units"
            axes.set_title(f"{row['prior']}\n{caption}" if j == 0 else f"\n{caption}", fontsize=8)
    return figure


def mixture_figure(rows: list[Row]) -> Figure:
    """The exact kernel of the triangle wave against its first harmonic, and their difference."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    for column, kernel in enumerate(kernels):
        chosen = [r for r in rows if r["kernel"] == kernel]
        for row in chosen:
            label, style = f"all harmonics, {row['scaling']} scaling", "--" if row["scaling"] == "paper" else "-"
            panels[0, column].plot(row["r"], row["full"], style, label=label)
            panels[1, column].semilogy(row["r"], np.abs(row["difference"]), style, label=f"{row['scaling']} scaling")
        panels[0, column].plot(chosen[0]["r"], chosen[0]["first"], "k:", label="first harmonic")
        panels[0, column].set(title=LABELS[kernel])
        panels[1, column].set(xlabel="r", ylim=(1e-9, 1e-1))
        _clean(panels[0, column])
        _clean(panels[1, column])
    panels[0, 0].set_ylabel("κ(r)")
    panels[1, 0].set_ylabel("|difference|")
    panels[0, 2].legend(fontsize=7)
    return figure


def gram_error_figure(rows: list[Row]) -> Figure:
    """Error of the Gram matrix against the number of units, for three ways of drawing them."""
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    styles = {"iid": "-", "orthogonal": ":", "sobol": "--"}
    for (line, dim), (column, kernel) in (
        (a, b) for a in enumerate((1, 5)) for b in enumerate(("rbf", "matern32", "exponential"))
    ):
        axes = panels[line, column]
        for activation, color in (("sin", "#4472b5"), ("paired", "#2aab61")):
            for method, style in styles.items():
                chosen = [
                    r
                    for r in rows
                    if (r["dim"], r["kernel"], r["activation"], r["frequencies"]) == (dim, kernel, activation, method)
                ]
                axes.loglog(
                    [r["K"] for r in chosen],
                    [r["error"] for r in chosen],
                    style,
                    color=color,
                    label=f"{activation}, {method}",
                )
        paper = [r for r in rows if r["dim"] == dim and r["kernel"] == kernel and r["paper"] is not None]
        axes.loglog([r["K"] for r in paper], [r["paper"] for r in paper], "kx", label="paper (sin)")
        axes.set_title(f"{LABELS[kernel]}, d = {dim}")
        _clean(axes)
    for axes in panels[1]:
        axes.set_xlabel("units K")
    for axes in panels[:, 0]:
        axes.set_ylabel("mean absolute error")
    panels[0, 2].legend(fontsize=7)
    return figure


def extrapolation_figure(rows: list[Row]) -> Figure:
    """Mean and 95 % band of each network, inside its data and far outside."""
    titles = {
        "relu": "ReLU: extrapolates",
        "local_rbf": "local RBF: variance fades",
        "paired": "stationary: returns to the prior",
    }
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    panels = figure.subplots(1, len(rows), sharey=True)
    for axes, row in zip(panels, rows, strict=True):
        mean, std = np.asarray(row["mean"]), np.asarray(row["std"])
        axes.fill_between(row["grid"], mean - 1.96 * std, mean + 1.96 * std, color="#4472b5", alpha=0.25, linewidth=0)
        axes.plot(row["grid"], mean, color="#4472b5")
        axes.plot(row["x"], row["y"], "k.", markersize=3)
        axes.set(title=titles[row["activation"]], xlabel="x", ylim=(-6, 6), xlim=(-8, 8))
        _clean(axes)
    panels[0].set_ylabel("f(x), 95 % band of y")
    return figure


FIGURES: dict[str, Callable[[list[Row]], Figure]] = {
    "activations": activation_figure,
    "covariances": covariance_figure,
    "gram": gram_figure,
    "mixture": mixture_figure,
    "gram-error": gram_error_figure,
    "extrapolation": extrapolation_figure,
}
