"""Regression in one dimension: what the model says between, beside and far from the data.

Run: python examples/regression_1d.py    (a few seconds; writes regression_1d.svg where it is run)
"""

import numpy as np
from matplotlib.figure import Figure

from bochner.estimators import StationaryRegressor

rng = np.random.default_rng(0)
x = np.sort(np.concatenate([rng.uniform(-2, -0.5, 30), rng.uniform(0.5, 2, 30)]))
y = np.sin(4 * x) + 0.1 * rng.standard_normal(60)

model = StationaryRegressor(kernel="matern52", random_state=0).fit(x[:, None], y)
print(f"prior {model.prior_std_:.2f}, noise {model.noise_:.2f} (the data were made with 0.10)")

for place, where in (("among the data", 1.0), ("in the gap", 0.0), ("far away", 8.0)):
    mean, std = model.predict([[where]], return_std=True)
    score = model.ood_score([[where]])[0]
    alarm = "unlike the data" if score > model.ood_threshold_ else "like the data"
    print(f"{place:<15} x = {where:3.0f}: {mean[0]:5.2f} ± {std[0]:.2f}, score {score:.4f} ({alarm})")

grid = np.linspace(-8, 8, 200)
mean = model.predict(grid[:, None])
low, high = model.predict_interval(grid[:, None], coverage=0.9).T
figure = Figure(figsize=(7, 3), layout="constrained")
axes = figure.subplots()
axes.fill_between(grid, low, high, alpha=0.25, label="90 % interval")
axes.plot(grid, mean, label="mean")
axes.plot(grid, model.sample_y(grid[:, None], 3), color="grey", linewidth=0.5)
axes.plot(x, y, "k.", markersize=4, label="data")
axes.legend(loc="upper right")
figure.savefig("regression_1d.svg")
print("Figure: regression_1d.svg")
