"""Figures of the toy experiments, drawn from their rows."""

from collections.abc import Callable, Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from bochner.experiments.rows import Row
from bochner.experiments.theory import NINE
from bochner.experiments.toys import converged
from bochner.reports.blocks import MissingRowsError
from bochner.reports.theory import LABELS, TITLES

CLASS_COLORS = ("#d3434e", "#ffffff", "#4472b5")  # class 0, both equally probable, class 1
PROBABILITY_COLORS = LinearSegmentedColormap.from_list("probability", CLASS_COLORS)
TEASER_MODELS = {
    "relu": "ArcCos-1 / ReLU",
    "local_matern32": "Matérn-3/2-NN (local)",
    "local_rbf": "RBF-NN (local)",
    "exponential-sin": "Exponential",
    "matern32-sin": "Matérn-3/2",
    "rbf-sin": "RBF",
}
KERNELS = ("exponential", "matern32", "rbf")
OTHERS = ("relu", "local_rbf", "local_matern32")  # models that are not periodic


def _panel(axes: Axes, row: Row, data: Row | None = None, key: str = "mean") -> None:
    """Probability of class 1 (red to blue, white where undecided) or its variance (black is 0, white 0.12), and the data.

    The image is embedded as it is, without resampling, to keep the file small.
    """
    side = np.asarray(row[key]).reshape(row["grid"], row["grid"])
    square = (-row["extent"], row["extent"]) * 2
    options = (
        {"cmap": PROBABILITY_COLORS, "vmin": 0, "vmax": 1}
        if key == "mean"
        else {"cmap": "gray", "vmin": 0, "vmax": 0.12}
    )
    axes.imshow(side, origin="lower", extent=square, interpolation="none", **options)  # pyright: ignore[reportArgumentType]
    if data is not None:
        x, y = np.asarray(data["x"]).reshape(-1, 2), np.asarray(data["y"])
        axes.scatter(*x.T, s=2, linewidths=0, c=np.where(y == 1, "#1d3a6b", "#7d1620"), rasterized=True)
    axes.set(xticks=[], yticks=[], xlim=square[:2], ylim=square[:2])


def _convergence(row: Row) -> str:
    """R-hat and effective sample size of a network, marked where it did not converge."""
    mark = "" if converged(row) else "not converged: "
    return f"{row['method']}: {mark}R-hat {row['r_hat']:.3f}, ESS {row['ess']:.0f}"


def _is_sampled(row: Row) -> bool:
    """Whether a row is of a sampled network, whichever sampler made it."""
    return row["method"] not in ("data", "gp")


def _choose(rows: list[Row], *, sampled: bool, names: Iterable[str], key: str = "model") -> dict[str, Row]:
    """Rows of sampled networks, or of Gaussian processes, by the names of their models or priors; all names must be there."""
    chosen = {row[key]: row for row in rows if row["method"] != "data" and _is_sampled(row) == sampled}
    if missing := [name for name in names if name not in chosen]:
        raise MissingRowsError(f"rows of {'networks' if sampled else 'Gaussian processes'} for {', '.join(missing)}")
    return chosen


def _data(rows: list[Row]) -> Row:
    """The row that holds the data."""
    for row in rows:
        if row["method"] == "data":
            return row
    raise MissingRowsError("the row of the data (method 'data')")


def teaser_figure(rows: list[Row]) -> Figure:
    """Banana: Gaussian processes above, sampled networks of finite width below; each with its confidence far away."""
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    panels = figure.subplots(2, len(TEASER_MODELS))
    for line, (sampled, label) in enumerate(((False, "infinite width"), (True, "finite width"))):
        chosen = _choose(rows, sampled=sampled, names=TEASER_MODELS)
        for axes, (name, title) in zip(panels[line], TEASER_MODELS.items(), strict=True):
            _panel(axes, chosen[name], _data(rows))
            far = f"confidence at |x| = 10: {chosen[name]['far_confidence']:.2f}"
            axes.set_xlabel(f"{far}\n{_convergence(chosen[name])}" if sampled else far, fontsize=7)
            if line == 0:
                axes.set_title(title, fontsize=9)
        panels[line, 0].set_ylabel(label)
    return figure


def mean_variance_figure(rows: list[Row]) -> Figure:
    """Mean and variance of the class probability: a line for each periodic activation, and one for the others."""
    lines = [[f"{kernel}-{name}" for kernel in KERNELS] for name in TITLES] + [list(OTHERS)]
    chosen = _choose(rows, sampled=True, names=[name for line in lines for name in line])
    figure = Figure(figsize=(12, 10), layout="constrained")
    panels = figure.subplots(len(TITLES) + 1, 6)
    for line, names in enumerate(lines):
        for column, name in enumerate(names):
            mean, variance = panels[line, 2 * column], panels[line, 2 * column + 1]
            _panel(mean, chosen[name], _data(rows))
            _panel(variance, chosen[name], key="variance")
            mean.set_xlabel(_convergence(chosen[name]), fontsize=6)
            title = LABELS[KERNELS[column]] if line < len(TITLES) else TEASER_MODELS[name]
            if line in (0, len(TITLES)):
                mean.set_title(f"{title}\nmean", fontsize=9)
                variance.set_title(f"{title}\nvariance", fontsize=9)
    for axes, title in zip(panels[:, 0], [*TITLES.values(), "others"], strict=True):
        axes.set_ylabel(title)
    return figure


def width_figure(rows: list[Row]) -> Figure:
    """Banana for several numbers of units, under the exponential and the RBF kernel."""
    widths = sorted({row["units"] for row in rows if _is_sampled(row)})
    columns = [(kernel, units) for kernel in ("exponential", "rbf") for units in widths]
    names = [f"{kernel}-{name}-{units}" for name in TITLES for kernel, units in columns]
    chosen = _choose(rows, sampled=True, names=names or ["any width"])
    figure = Figure(figsize=(4 * len(widths), 8), layout="constrained")
    panels = figure.subplots(len(TITLES), len(columns))
    for line, (name, title) in enumerate(TITLES.items()):
        for column, (kernel, units) in enumerate(columns):
            row = chosen[f"{kernel}-{name}-{units}"]
            _panel(panels[line, column], row, _data(rows))
            panels[line, column].set_xlabel(_convergence(row), fontsize=6)
            if line == 0:
                panels[0, column].set_title(f"{LABELS[kernel]}, K = {units}", fontsize=9)
        panels[line, 0].set_ylabel(title)
    return figure


def _regression(rows: list[Row], *, sampled: bool) -> Figure:
    """Nine panels: mean, 95 % of the posterior of f (dark) and of the prediction of y (light), and the data."""
    chosen, data = _choose(rows, sampled=sampled, names=NINE, key="prior"), _data(rows)
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(3, 3, sharex=True, sharey=True)
    for axes, row in zip(panels.flat, (chosen[prior] for prior in NINE), strict=True):
        grid, mean = np.asarray(row["grid"]), np.asarray(row["mean"])
        for key, color in (("std_y", "#ffe5cf"), ("std", "#dbd0c3")):
            half = 1.96 * np.asarray(row[key])
            axes.fill_between(grid, mean - half, mean + half, color=color, linewidth=0)
        axes.plot(grid, mean, color="#4472b5")
        if not sampled:
            axes.plot(grid, row["paper"], "k--", linewidth=0.9, label=f"paper, off by {row['paper_difference']:.2f}")
            axes.legend(fontsize=7, loc="upper right")
        axes.plot(data["x"], data["y"], "k.", markersize=3)
        axes.set(xlim=(-5, 5), ylim=(-3, 3))
        axes.set_title(row["prior"] + (f"\n{_convergence(row)}" if sampled else ""), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def regression_figure(rows: list[Row]) -> Figure:
    """One-dimensional regression by Gaussian processes, the paper's means dashed."""
    return _regression(rows, sampled=False)


def finite_regression_figure(rows: list[Row]) -> Figure:
    """One-dimensional regression by sampled networks of ten units."""
    return _regression(rows, sampled=True)


FIGURES: dict[str, Callable[[list[Row]], Figure]] = {
    "teaser": teaser_figure,
    "comparisons_app_meanvar": mean_variance_figure,
    "comparisons_app": width_figure,
    "regression": regression_figure,
    "regression-finite": finite_regression_figure,
}

# The experiments, and the figures that are drawn from the rows of each.
DRAWN_FROM = {
    "banana": ("teaser", "comparisons_app_meanvar"),
    "banana-width": ("comparisons_app",),
    "toy-1d": ("regression", "regression-finite"),
}
