"""The demonstration: a ReLU network and a stationary one learn the same two classes, and how sure each is far from the data."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from bochner.estimators import StationaryClassifier
from bochner.layers import StationaryLayer
from bochner.likelihoods import Categorical
from bochner.models import Model
from bochner.posteriors.closed_form_classifier import ClosedFormClassifier

FAR_DISTANCE = 10.0  # distance from the middle of the data, which end at about 2
MAX_DISTANCE = 20.0  # largest distance in the picture
RELU_UNITS = 200  # units of the ReLU network
RELU_AMPLITUDE = 4.0  # prior standard deviation of its outputs

ClassProbabilities = Callable[[np.ndarray], np.ndarray]  # rows (n, 2) to class probabilities (n, 2)


@dataclass(frozen=True)
class Demo:
    """Results of the demonstration.

    Attributes:
        accuracy: Accuracy of each network on new rows like the training rows.
        near: Mean confidence of each network on these rows.
        far: Mean confidence of each network at distance ``FAR_DISTANCE``.
        flagged: Share of rows that the stationary network flags as unlike its data, "near" and "far".
        figure: The picture.
    """

    accuracy: dict[str, float]
    near: dict[str, float]
    far: dict[str, float]
    flagged: dict[str, float]
    figure: Figure

    def lines(self) -> list[str]:
        """Three lines that describe the picture."""
        relu, ours = "ReLU", "stationary"
        right = f"accuracy {self.accuracy[relu]:.2f} and {self.accuracy[ours]:.2f}"
        sure = f"sure to {self.near[relu]:.2f} (ReLU) and {self.near[ours]:.2f} (stationary)"
        far = f"the ReLU network is still sure to {self.far[relu]:.2f}; the stationary one says {self.far[ours]:.2f}"
        strange, ordinary = (f"{self.flagged[place]:.0%}" for place in ("far", "near"))
        return [
            f"On the data both are right: {right}, {sure}.",
            f"At distance {FAR_DISTANCE:g}, where nothing was seen, {far}, and 0.50 means 'I do not know'.",
            f"The stationary network flags {strange} of the rows there as unlike its data, and {ordinary} of new ordinary rows.",
        ]


def arc_data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two interlocking arcs, one for each class: inputs (200, 2) and labels (200,)."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, math.pi, 200)
    label = np.arange(200) % 2
    x = np.stack([np.cos(angle) - 0.5 + label, np.where(label, 0.25 - np.sin(angle), np.sin(angle) - 0.25)], 1)
    return x + 0.12 * rng.normal(size=x.shape), label


def ring(distance: float) -> np.ndarray:
    """Points at a distance from the origin, evenly over all directions: (100, 2)."""
    turn = np.linspace(0, 2 * math.pi, 100, endpoint=False)
    return distance * np.stack([np.cos(turn), np.sin(turn)], 1)


def relu_network(x: np.ndarray, labels: np.ndarray, seed: int) -> ClassProbabilities:
    """A layer of ReLU units, output layer integrated out."""
    generator = torch.Generator().manual_seed(seed)
    layer = StationaryLayer(x.shape[1], RELU_UNITS, activation="relu", generator=generator, dtype=torch.float64)
    model = Model(layer, 2, Categorical(), amplitude=RELU_AMPLITUDE, generator=generator)
    posterior = ClosedFormClassifier(model, _rows(x), torch.from_numpy(labels), generator=generator)

    def predict(new: np.ndarray) -> np.ndarray:
        prediction: Any = posterior.predict(_rows(new))
        return prediction.probabilities.numpy()

    return predict


def _rows(x: np.ndarray) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def run(seed: int) -> Demo:
    """Fits both networks. Neither has hidden layers before its last: such layers could map far rows close to the data."""
    x, labels = arc_data(seed)
    fresh, truth = arc_data(seed + 1)
    classifier = StationaryClassifier(hidden_layer_sizes=(), random_state=seed).fit(x, labels)
    networks: dict[str, ClassProbabilities] = {
        "ReLU": relu_network(x, labels, seed),
        "stationary": classifier.predict_proba,
    }
    far = ring(FAR_DISTANCE)

    def flagged_share(rows: np.ndarray) -> float:
        return float(np.mean(classifier.ood_score(rows) > classifier.ood_threshold_))

    return Demo(
        accuracy={name: float(np.mean(network(fresh).argmax(1) == truth)) for name, network in networks.items()},
        near={name: float(network(fresh).max(1).mean()) for name, network in networks.items()},
        far={name: float(network(far).max(1).mean()) for name, network in networks.items()},
        flagged={"near": flagged_share(fresh), "far": flagged_share(far)},
        figure=picture(networks, x, labels),
    )


def picture(networks: dict[str, ClassProbabilities], x: np.ndarray, labels: np.ndarray) -> Figure:
    """How sure each network is over the plane, and against the distance from the data."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    *maps, curve = figure.subplots(1, 3)
    side = np.linspace(-FAR_DISTANCE, FAR_DISTANCE, 80)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    distances = np.linspace(0, MAX_DISTANCE, 41)
    for axes, (name, network), colour in zip(maps, networks.items(), ("#b5513f", "#3f51b5"), strict=True):
        sure = network(grid).max(1).reshape(80, 80)
        extent = (-FAR_DISTANCE, FAR_DISTANCE, -FAR_DISTANCE, FAR_DISTANCE)
        axes.imshow(sure, origin="lower", extent=extent, cmap="viridis", vmin=0.5, vmax=1)
        axes.scatter(*x.T, c=labels, cmap="gray", s=4, edgecolors="black", linewidths=0.3)
        axes.set(title=f"{name}: sure of its class", xticks=[-10, 0, 10], yticks=[-10, 0, 10])
        curve.plot(distances, [network(ring(d)).max(1).mean() for d in distances], label=name, color=colour)
    figure.colorbar(maps[0].images[0], ax=maps, label="confidence")
    curve.axvspan(0, 2, color="#00000018", linewidth=0)
    curve.text(0.2, 0.46, "data", fontsize=8)
    curve.axhline(0.5, color="grey", linewidth=0.8, linestyle=":")
    curve.set(title="mean confidence", xlabel="distance", ylim=(0.45, 1.02))
    curve.legend(loc="center right")
    return figure
