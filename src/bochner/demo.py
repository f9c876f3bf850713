"""The demonstration: a ReLU network and a stationary one on the same data, near it and far from it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.layers import StationaryLayer
from bochner.likelihoods import Categorical, Gaussian, Likelihood
from bochner.models import Model
from bochner.posteriors.closed_form import ClosedForm, tune_marginal
from bochner.posteriors.closed_form_classifier import ClosedFormClassifier
from bochner.reports.page import Section

FAR = 10.0  # distance from the origin; the data end at about 2
WIDTH = 200  # units of the ReLU networks
AMPLITUDE = 4.0  # prior standard deviation of the ReLU network's outputs, for classes

Curve = Callable[
    [np.ndarray], np.ndarray
]  # rows to mean, standard deviation, low and high end of the 90 % interval, (n, 4)
Area = Callable[[np.ndarray], np.ndarray]  # rows to class probabilities, (n, c)


@dataclass(frozen=True)
class Demo:
    """What the demonstration found.

    Attributes:
        curve: For each network mean and standard deviation on the data (mean over rows) and at ``FAR``, of the 1-D set.
        arcs: For each network mean confidence on the two arcs and at distance ``FAR`` from the origin, and the share of rows there
            that are flagged; NaN for the ReLU network, which has no score.
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


def _rows(x: np.ndarray) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def _relu_network(
    inputs: int, outputs: int, likelihood: Likelihood, generator: torch.Generator, amplitude: float = 1.0
) -> Model:
    layer = StationaryLayer(inputs, WIDTH, activation="relu", generator=generator, dtype=torch.float64)
    return Model(layer, outputs, likelihood, amplitude=amplitude, generator=generator)


def relu_curve(x: np.ndarray, y: np.ndarray, seed: int) -> Curve:
    """A ReLU network for the curve: noise, lengthscale and amplitude by the marginal likelihood, output layer integrated out."""
    model = _relu_network(x.shape[1], 1, Gaussian(0.3), torch.Generator().manual_seed(seed))
    tune_marginal(model, _rows(x), _rows(y)[:, None])
    posterior = ClosedForm(model, _rows(x), _rows(y)[:, None])

    def predict(new: np.ndarray) -> np.ndarray:
        found = posterior.predict(_rows(new))
        return torch.cat([found.mean, found.std, *found.interval(0.9)], 1).numpy()

    return predict


def relu_arcs(x: np.ndarray, labels: np.ndarray, seed: int) -> Area:
    """A ReLU network for the arcs, output layer integrated out."""
    generator = torch.Generator().manual_seed(seed)
    model = _relu_network(x.shape[1], 2, Categorical(), generator, AMPLITUDE)
    posterior = ClosedFormClassifier(model, _rows(x), torch.from_numpy(labels), generator=generator)

    def predict(new: np.ndarray) -> np.ndarray:
        found: Any = posterior.predict(_rows(new))
        return found.probabilities.numpy()

    return predict


def _stationary_curve(model: StationaryRegressor) -> Curve:
    return lambda new: np.column_stack([*model.predict(new, return_std=True), model.predict_interval(new, 0.9)])


def run(seed: int) -> Demo:
    """Fits both networks to both sets. Neither has hidden layers before its last one: these could bring far rows near."""
    x, y = curve_data(seed)
    regressor = StationaryRegressor(hidden_layer_sizes=(), random_state=seed).fit(x, y)
    lines = {"ReLU": relu_curve(x, y, seed), "stationary": _stationary_curve(regressor)}
    points, labels = arc_data(seed)
    classifier = StationaryClassifier(hidden_layer_sizes=(), random_state=seed).fit(points, labels)
    areas: dict[str, Area] = {"ReLU": relu_arcs(points, labels, seed), "stationary": classifier.predict_proba}
    turn = np.linspace(0, 2 * math.pi, 100, endpoint=False)
    far = FAR * np.stack([np.cos(turn), np.sin(turn)], 1)
    curve = {}
    for name, line in lines.items():
        mean, std, *_ = line(np.array([[FAR]]))[0]
        curve[name] = {"near_std": float(line(x)[:, 1].mean()), "far_mean": float(mean), "far_std": float(std)}
    flagged = {"stationary": float(np.mean(classifier.ood_score(far) > classifier.ood_threshold_))}
    arcs = {
        name: {
            "near_confidence": float(area(points).max(1).mean()),
            "far_confidence": float(area(far).max(1).mean()),
            "far_flagged": flagged.get(name, math.nan),
        }
        for name, area in areas.items()
    }
    return Demo(curve, arcs, _sections(curve, arcs, curve_figure(lines, x, y), arc_figure(areas, points, labels)))


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.0f} %"


def _sections(curve: Any, arcs: Any, line: Figure, area: Figure) -> list[Section]:
    curve_table = [["network", "standard deviation on the data", f"prediction at x = {FAR:g}"]]
    curve_table += [[n, f"{v['near_std']:.2f}", f"{v['far_mean']:.2f} ± {v['far_std']:.2f}"] for n, v in curve.items()]
    arc_table = [["network", "confidence on the data", f"confidence at distance {FAR:g}", "rows flagged there"]]
    arc_table += [
        [n, f"{v['near_confidence']:.2f}", f"{v['far_confidence']:.2f}", _share(v["far_flagged"])]
        for n, v in arcs.items()
    ]
    one = "Both fit the data. Away from them the ReLU network goes on along a line, and the stationary one falls back on its prior."
    two = "Two classes. Far away the ReLU network is as sure as ever; to the stationary one the classes become equally probable."
    return [
        Section("A curve", one, curve_table, (line,), ("Mean and 90 % interval",)),
        Section("Two arcs", two, arc_table, (area,), ("Probability of the second class, from blue (0) to red (1)",)),
    ]


def curve_figure(lines: dict[str, Curve], x: np.ndarray, y: np.ndarray) -> Figure:
    """Mean and 90 % interval of each network."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    grid = np.linspace(-8, 8, 400)[:, None]
    for axes, (name, line) in zip(figure.subplots(1, 2, sharey=True), lines.items(), strict=True):
        mean, _, low, high = line(grid).T
        axes.fill_between(grid[:, 0], low, high, alpha=0.25, color="#4472b5", linewidth=0)
        axes.plot(grid[:, 0], mean, color="#4472b5")
        axes.plot(x[:, 0], y, ".", color="black", markersize=3)
        axes.set(title=name, ylim=(-6, 6), xlabel="x")
    return figure


def arc_figure(areas: dict[str, Area], x: np.ndarray, y: np.ndarray) -> Figure:
    """Probability of the second class over the plane."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    side = np.linspace(-5, 5, 80)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    for axes, (name, area) in zip(figure.subplots(1, 2), areas.items(), strict=True):
        p = area(grid)[:, 1].reshape(80, 80)
        axes.imshow(p, origin="lower", extent=(-5, 5, -5, 5), cmap="RdBu_r", vmin=0, vmax=1)
        axes.scatter(*x.T, c=y, cmap="RdBu_r", s=4, edgecolors="black", linewidths=0.3)
        axes.set(title=name, xticks=[], yticks=[])
    return figure
