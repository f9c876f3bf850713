"""A trained network that says which images are like nothing it has seen: one call, and a picture of scores.

A small convolutional network learns 8×8 digits as usual. `StationaryHead.fit` attaches a head to it; then digits, digits upside
down, other signs and noise are shown with their scores, red where they are flagged.

Run: python examples/trained_network.py    (some ten seconds; writes trained_network.svg)
"""

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bochner import StationaryHead

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
labels = torch.tensor(digits.target)
train, held, test = torch.randperm(len(images)).split([1000, 300, 497])

network = nn.Sequential(
    nn.Conv2d(1, 16, 3),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(576, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
for _ in range(15):
    for rows in train[torch.randperm(len(train))].split(50):
        optimizer.zero_grad()
        F.cross_entropy(network(images[rows]), labels[rows]).backward()
        optimizer.step()


def loader(rows: torch.Tensor) -> DataLoader:
    """Some of the digits, in batches."""
    return DataLoader(TensorDataset(images[rows], labels[rows]), 100)


head = StationaryHead.fit(network, loader(train), loader(held), progress=False)

shapes = torch.zeros(4, 1, 8, 8)
shapes[0, 0, ::2, ::2] = shapes[0, 0, 1::2, 1::2] = 1  # a chessboard
shapes[1, 0, 2:6, 2:6] = 1  # a square
shapes[2, 0, torch.arange(8), torch.arange(8)] = shapes[2, 0, torch.arange(8), torch.arange(7, -1, -1)] = 1  # a cross
shapes[3, 0, 3:5] = 1  # a bar
shown = {
    "digits": images[test],
    "upside down": images[test].flip(2),
    "shapes": shapes,
    "noise": torch.rand(500, 1, 8, 8),
}
print("images        flagged   confidence: network   head")
for name, some in shown.items():
    flagged = (head.ood_score(some) > head.threshold).double().mean()
    with torch.no_grad():
        before = network(some).softmax(-1).max(-1).values.mean()
    after = head.predict(some).confidence.mean()
    print(f"{name:<12} {flagged:8.2f} {before:21.2f} {after:6.2f}")

figure = Figure(figsize=(8, 4.6), layout="constrained")
axes = figure.subplots(4, 8)
for (name, some), row in zip(shown.items(), axes, strict=True):
    scores = head.ood_score(some[:8])
    for place in row:
        place.axis("off")
    for place, image, score in zip(row, some[:8], scores, strict=False):
        place.imshow(image[0].numpy(), cmap="gray_r")
        place.set_title(f"{score:.2f}", color="tab:red" if score > head.threshold else "black", fontsize=9)
    row[0].text(-0.3, 0.5, name, transform=row[0].transAxes, rotation=90, ha="center", va="center")
figure.savefig("trained_network.svg")
