"""Two arcs of points, two classes: how sure is a network among them, and how sure far away?

The same closed-form posterior of the output layer stands on ReLU units and on stationary ones.

Run: python examples/banana.py    (a few seconds; writes banana.svg where it is run)
"""

import numpy as np
import torch
from matplotlib.figure import Figure

from bochner import Categorical, ClosedFormClassifier, Model, StationaryLayer


def two_arcs(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Points along two arcs that reach into each other, with noise, and which arc each belongs to."""
    label = np.arange(rows) % 2
    angle = rng.uniform(0, np.pi, rows)
    x = np.stack([np.cos(angle), np.sin(angle)], 1) * np.where(label, -1, 1)[:, None] + label[:, None] * [1.0, 0.4]
    return x + 0.15 * rng.standard_normal((rows, 2)), label


def probabilities(posterior: ClosedFormClassifier, points: np.ndarray) -> np.ndarray:
    """Probability of each class at each point."""
    return posterior.predict(torch.from_numpy(points)).probabilities.numpy()


rng = np.random.default_rng(0)
x, y = two_arcs(200, rng)
inside, labels = two_arcs(300, rng)
angle = np.linspace(0, 2 * np.pi, 100, endpoint=False)
outside = 20 * np.stack([np.cos(angle), np.sin(angle)], 1)

grid = np.stack(np.meshgrid(np.linspace(-6, 7, 53), np.linspace(-6, 6, 49)), -1)
figure = Figure(figsize=(8, 3.6), layout="constrained")
panels = figure.subplots(1, 2, sharey=True)
print("mean probability of the chosen class")
for axes, activation in zip(panels, ("relu", "paired"), strict=True):
    generator = torch.Generator().manual_seed(0)
    layer = StationaryLayer(2, 400, kernel="matern32", activation=activation, generator=generator, dtype=torch.float64)
    model = Model(layer, 2, Categorical(), amplitude=4.0, generator=generator)
    posterior = ClosedFormClassifier(model, torch.from_numpy(x), torch.from_numpy(y), generator=generator)
    for place, points in (("among", inside), ("far", outside)):
        print(f"  {activation:<7} {place:<6} {probabilities(posterior, points).max(1).mean():.2f}")
    accuracy = (probabilities(posterior, inside).argmax(1) == labels).mean()
    print(f"  {activation:<7} accuracy among new points: {accuracy:.2f}")
    p = probabilities(posterior, grid.reshape(-1, 2))[:, 1].reshape(grid.shape[:2])
    shown = axes.pcolormesh(grid[..., 0], grid[..., 1], p, vmin=0, vmax=1, cmap="RdBu", rasterized=True)
    axes.scatter(*x.T, c=y, s=4, cmap="RdBu", edgecolors="k", linewidths=0.2)
    axes.set_title(f"{activation}: probability of class 1")
figure.colorbar(shown, ax=panels)
figure.savefig("banana.svg")
print("Figure: banana.svg")
