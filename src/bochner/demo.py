"""The demonstration: a ReLU network and a stationary one on the same data, near it and far from it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.reports.model import model_sections
from bochner.reports.page import Section

ACTIVATIONS = {"ReLU": "relu", "stationary": "paired"}
FAR = 10.0  # distance from the origin; the data end at about 2


@dataclass(frozen=True)
class Demo:
    """What the demonstration found.

    Attributes:
        curve: For each network mean and standard deviation on the data (mean over rows) and at ``FAR``, of the 1-D set.
        arcs: For each network mean confidence on the two arcs and at distance ``FAR`` from the origin.
        sections: The report.
    """

    curve: dict[str, dict[str, float]]
    arcs: dict[str, dict[str, float]]
    sections: list[Section]


def curve_data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A noisy wave on two intervals, with a gap between them: (80, 1) and (80,)."""
    rng = np.random.default_rng(seed)
    x = np.concatenate([rng.uniform(-2, -0.5, 40), rng.uniform(0.7, 2, 40)])
    return x[:, None], np.sin(3 * x) + 0.1 * rng.normal(size=80)


def arc_data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two arcs that hold each other, one for each class: (200, 2) and (200,)."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, math.pi, 200)
    label = np.arange(200) % 2
    x = np.stack([np.cos(angle) - 0.5 + label, np.where(label, 0.25 - np.sin(angle), np.sin(angle) - 0.25)], 1)
    return x + 0.12 * rng.normal(size=x.shape), label


def run(seed: int) -> Demo:
    """Fits both networks to both sets."""
    x, y = curve_data(seed)
    options: Any = {"kernel": "matern32", "width": 500, "random_state": seed}
    lines = {name: StationaryRegressor(activation=a, **options).fit(x, y) for name, a in ACTIVATIONS.items()}
    points, labels = arc_data(seed)
    areas = {name: StationaryClassifier(activation=a, **options).fit(points, labels) for name, a in ACTIVATIONS.items()}
    turn = np.linspace(0, 2 * math.pi, 100, endpoint=False)
    far = FAR * np.stack([np.cos(turn), np.sin(turn)], 1)
    curve = {}
    for name, model in lines.items():
        (mean,), (std,) = model.predict([[FAR]], return_std=True)
        near = float(model.predict(x, return_std=True)[1].mean())
        curve[name] = {"near_std": near, "far_mean": float(mean), "far_std": float(std)}
    arcs = {
        name: {
            "near_confidence": float(model.predict_proba(points).max(1).mean()),
            "far_confidence": float(model.predict_proba(far).max(1).mean()),
            "near_flagged": float(np.mean(model.ood_score(points) > model.ood_threshold_)),
            "far_flagged": float(np.mean(model.ood_score(far) > model.ood_threshold_)),
        }
        for name, model in areas.items()
    }
    sections = _sections(curve, arcs, curve_figure(lines, x, y), arc_figure(areas, points, labels))
    fresh = curve_data(seed + 1)
    own = model_sections(lines["stationary"], (x, y), fresh, columns=["x"], target="y")
    return Demo(curve, arcs, [*sections, *own])


def _sections(curve: Any, arcs: Any, line: Figure, area: Figure) -> list[Section]:
    curve_table = [["network", "standard deviation on the data", f"prediction at x = {FAR:g}"]]
    curve_table += [[n, f"{v['near_std']:.2f}", f"{v['far_mean']:.2f} ± {v['far_std']:.2f}"] for n, v in curve.items()]
    arc_table = [["network", "confidence on the data", f"confidence at distance {FAR:g}", "rows flagged there"]]
    arc_table += [
        [n, f"{v['near_confidence']:.2f}", f"{v['far_confidence']:.2f}", f"{100 * v['far_flagged']:.0f} %"]
        for n, v in arcs.items()
    ]
    one = "Both fit the data. Away from them the ReLU network goes on along a line, and the stationary one falls back on its prior."
    two = "Two classes. Far away the ReLU network is as sure as ever; to the stationary one the classes become equally probable."
    return [
        Section("A curve", one, curve_table, (line,), ("Mean and 90 % interval",)),
        Section("Two arcs", two, arc_table, (area,), ("Probability of the second class, from blue (0) to red (1)",)),
    ]


def curve_figure(models: dict[str, Any], x: np.ndarray, y: np.ndarray) -> Figure:
    """Mean and 90 % interval of each network."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    grid = np.linspace(-8, 8, 400)[:, None]
    for axes, (name, model) in zip(figure.subplots(1, 2, sharey=True), models.items(), strict=True):
        low, high = model.predict_interval(grid).T
        axes.fill_between(grid[:, 0], low, high, alpha=0.25, color="#4472b5", linewidth=0)
        axes.plot(grid[:, 0], model.predict(grid), color="#4472b5")
        axes.plot(x[:, 0], y, ".", color="black", markersize=3)
        axes.set(title=name, ylim=(-6, 6), xlabel="x")
    return figure


def arc_figure(models: dict[str, Any], x: np.ndarray, y: np.ndarray) -> Figure:
    """Probability of the second class over the plane."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    side = np.linspace(-5, 5, 80)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    for axes, (name, model) in zip(figure.subplots(1, 2), models.items(), strict=True):
        p = model.predict_proba(grid)[:, 1].reshape(80, 80)
        axes.imshow(p, origin="lower", extent=(-5, 5, -5, 5), cmap="RdBu_r", vmin=0, vmax=1)
        axes.scatter(*x.T, c=y, cmap="RdBu_r", s=4, edgecolors="black", linewidths=0.3)
        axes.set(title=name, xticks=[], yticks=[])
    return figure
