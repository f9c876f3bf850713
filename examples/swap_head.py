"""A small convolutional network on 8×8 digits: swap its head for a stationary one, then show it noise.

The network is trained with its linear head as usual. `swap_head` keeps its features and puts a stationary layer on them; the
output layer is then integrated out. The lengthscale is the median distance between features, and rows that were held out choose
the amplitude; no weight is trained again.

Run: python examples/swap_head.py    (some ten seconds)
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bochner import ClosedFormClassifier, swap_head
from bochner.posteriors.closed_form_classifier import Solver

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
labels = torch.tensor(digits.target)
train, held, test = torch.randperm(len(images)).split([1000, 300, 497])
noise = torch.rand(500, 1, 8, 8)  # images of nothing

network = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(128, 32),
    nn.Linear(32, 10),
)
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
for _ in range(12):
    for rows in train[torch.randperm(len(train))].split(50):
        optimizer.zero_grad()
        F.cross_entropy(network(images[rows]), labels[rows]).backward()
        optimizer.step()


with torch.no_grad():
    lengthscale = float(torch.pdist(network[:-1](images[train])).median())


def stationary(amplitude: float) -> ClosedFormClassifier:
    """The posterior of a stationary head with 100 units on the trained features; always the same units."""
    generator = torch.Generator().manual_seed(0)
    layer = {"kernel": "matern32", "activation": "paired", "lengthscale": lengthscale}
    model = swap_head(network, width=100, amplitude=amplitude, generator=generator, **layer)
    # full_limit=0 leaves out what the classes' weights have to do with each other, which takes most of the time.
    return ClosedFormClassifier(model, images[train], labels[train], solver=Solver(full_limit=0), generator=generator)


def held_out(amplitude: float) -> float:
    """Mean log probability of the held-out labels."""
    return float(stationary(amplitude).predict(images[held]).log_prob(labels[held]).mean())


best = max((2.0, 4.0, 8.0), key=held_out)
print(f"lengthscale {lengthscale:.1f}; amplitude {best:g} is the best on held-out rows\n")
posterior = stationary(best)


def linear(x: Tensor) -> Tensor:
    """Probabilities of the network as it was trained."""
    with torch.no_grad():
        return network(x).softmax(-1)


print("head         accuracy   confidence: digits   noise")
for name, predict in (("linear", linear), ("stationary", lambda x: posterior.predict(x).probabilities)):
    p, q = predict(images[test]), predict(noise)
    accuracy = (p.argmax(-1) == labels[test]).double().mean()
    print(f"{name:<10} {accuracy:10.3f}   {p.max(-1).values.mean():18.3f}   {q.max(-1).values.mean():5.3f}")
