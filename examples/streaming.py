"""Rows that arrive in batches: `partial_fit` keeps sums, not rows, and ends where one fit on all of them would.

The first batch sets the scales, lengthscales, noise and amplitude; later ones move the posterior only. With several networks, as by
default, the same is true of each.

Run: python examples/streaming.py    (a few seconds)
"""

import numpy as np
import torch

from bochner import ClosedForm
from bochner.estimators import StationaryRegressor

rng = np.random.default_rng(0)
x = rng.uniform(-2, 2, (2000, 2))
y = np.sin(2 * x[:, 0]) * x[:, 1] + 0.1 * rng.standard_normal(2000)
new = rng.uniform(-2, 2, (500, 2))
truth = np.sin(2 * new[:, 0]) * new[:, 1]

model = StationaryRegressor(kernel="matern32", width=200, hidden=(), random_state=0)  # one network
for batch in range(0, 2000, 400):
    model.partial_fit(x[batch : batch + 400], y[batch : batch + 400])
    mean, std = model.predict(new, return_std=True)
    print(f"{batch + 400:5d} rows: error {np.sqrt(np.mean((mean - truth) ** 2)):.3f}, mean std {std.mean():.3f}")

# The same hyperparameters and all rows at once, in the standardised units that the estimator works in.
inputs = torch.from_numpy((x - model.x_mean_) / model.x_scale_)
targets = torch.from_numpy((y - model.y_mean_) / model.y_scale_)[:, None]
whole = ClosedForm(model.model_, inputs, targets, amplitude=model.amplitude_)
prediction = whole.predict(torch.from_numpy((new - model.x_mean_) / model.x_scale_))

difference = np.abs(prediction.mean[:, 0].numpy() * model.y_scale_ + model.y_mean_ - mean).max()
print(f"largest difference to one fit on all rows: {difference:.1e}")
assert difference < 1e-6
