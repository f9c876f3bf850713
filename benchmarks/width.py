"""Finite width against the exact GP on boston's first fold, with the GP's own hyperparameters.

    BOCHNER_DATA=folder python benchmarks/width.py

Matérn-3/2, paired Sobol features, closed-form head, K frequencies; NLPD and RMSE on standardised targets.
"""

import csv
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bochner import Gaussian, Matern, Model, StationaryLayer
from bochner.experiments.rows import provenance
from bochner.metrics import nlpd, rmse
from bochner.posteriors.closed_form import ClosedForm
from bochner.posteriors.gp import GaussianProcess


def boston_first_fold():
    """The paper's preprocessing (without ``rad``) and its first fold, standardised by the training rows."""
    path = Path(os.environ.get("BOCHNER_DATA", ".")) / "boston.csv"
    if not path.exists():
        sys.exit(
            f"{path} is missing: point BOCHNER_DATA to the folder that holds boston.csv (13 columns, target medv)."
        )
    with path.open() as file:
        rows = list(csv.DictReader(file))
    names = [n for n in rows[0] if n.lower() not in ("rad", "medv", "")]
    x = np.array([[float(r[n]) for n in names] for r in rows])
    y = np.array([[float(r["medv"])] for r in rows])
    random.seed(1)
    order: Any = np.arange(len(x))
    random.shuffle(order)
    test, train = order[: len(x) // 10], order[len(x) // 10 :]
    x, y = (v - v[train].mean(0) for v in (x, y))
    x, y = (torch.from_numpy(v / v[train].std(0)) for v in (x, y))
    return x[train], y[train], x[test], y[test]


def main() -> None:
    x, y, x_test, y_test = boston_first_fold()
    dim = x.shape[1]
    gp = GaussianProcess(Matern(1.5), x, y, lengthscale=torch.full((dim,), 3.0), noise=0.3).tune(steps=200)
    hyper = {n: v.double() for n, v in gp.hyperparameters.items()}

    def show(name: str, prediction, **extra) -> None:
        scores = {"nlpd": nlpd(prediction.log_prob(y_test)), "rmse": rmse(y_test, prediction.mean)}
        print(json.dumps({"benchmark": "width", "model": name, **extra, **scores, "seed": 0, **provenance()}))

    show("exact GP", gp.predict(x_test), evidence=gp.log_marginal_likelihood)
    for num in (250, 500, 1000, 2000, 4000):
        options = {"kernel": "matern32", "activation": "paired", "frequencies": "sobol", "dtype": torch.float64}
        generator = torch.Generator().manual_seed(0)
        layer = StationaryLayer(dim, 2 * num, lengthscale=hyper["lengthscale"], generator=generator, **options)
        model = Model(layer, 1, Gaussian(hyper["noise"].item()), amplitude=hyper["amplitude"].item())
        posterior = ClosedForm(model, x, y)
        show("closed form", posterior.predict(x_test), K=num, evidence=posterior.log_marginal_likelihood)


if __name__ == "__main__":
    main()
