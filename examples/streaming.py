"""Rows that arrive in batches: `partial_fit` keeps sums, and many small batches end where a single large one does.

The first batch sets what the columns mean, the hyperparameters, the members and their weights; later ones move the posterior of
every member, exactly.

Run: python examples/streaming.py    (a few seconds)
"""

import copy

import numpy as np

from bochner.estimators import StationaryRegressor

rng = np.random.default_rng(0)
x = rng.uniform(-2, 2, (2000, 2))
y = np.sin(2 * x[:, 0]) * x[:, 1] + 0.1 * rng.standard_normal(2000)
new = rng.uniform(-2, 2, (500, 2))
truth = np.sin(2 * new[:, 0]) * new[:, 1]


def show(rows: int) -> None:
    """How far the predictions of new rows are off, and how sure they are."""
    mean, std = model.predict(new, return_std=True)
    print(f"{rows:5d} rows: error {np.sqrt(np.mean((mean - truth) ** 2)):.3f}, mean std {std.mean():.3f}")


model = StationaryRegressor(hidden_layer_sizes=(), random_state=0)  # no trained networks: quicker
model.partial_fit(x[:400], y[:400])
show(400)
whole = copy.deepcopy(model).partial_fit(x[400:], y[400:])  # all other rows at once
for batch in range(400, 2000, 400):
    model.partial_fit(x[batch : batch + 400], y[batch : batch + 400])
    show(batch + 400)

difference = np.abs(model.predict(new) - whole.predict(new)).max()
print(f"largest difference to all other rows at once: {difference:.1e}")
assert difference < 1e-6
