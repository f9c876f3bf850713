"""NUTS on the banana set (400 points, 30 units, 4 chains): diagnostics, and confidence far from the data.

    BOCHNER_DATA=folder python benchmarks/banana.py [--models rbf-sin relu] [--samples 1000]

Far means 64 points on the circle of radius 10 around the origin.
"""

import argparse
import csv
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from bochner import Categorical, Model, StationaryLayer
from bochner.experiments.rows import provenance
from bochner.posteriors.nuts import Nuts
from bochner.posteriors.samples import Sampling

MODELS = {
    "rbf-sin": ("rbf", "sin"),
    "matern32-sin": ("matern32", "sin"),
    "exponential-sin": ("exponential", "sin"),
    "rbf-triangle": ("rbf", "triangle"),
    "relu": ("rbf", "relu"),
}


def banana() -> tuple[torch.Tensor, torch.Tensor]:
    path = Path(os.environ.get("BOCHNER_DATA", ".")) / "banana.csv"
    if not path.exists():
        sys.exit(f"{path} is missing: point BOCHNER_DATA to the folder that holds banana.csv (columns x1, x2, class).")
    with path.open() as file:
        rows = [[float(v) for v in row] for row in list(csv.reader(file))[1:]]
    table = torch.tensor(rows, dtype=torch.float64)
    return table[:, :2], (table[:, 2] > table[:, 2].min()).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--target-accept", type=float, default=0.9)
    parser.add_argument("--chain-method", default="vectorized", help="parallel is faster with a core for each chain")
    args = parser.parse_args()
    x, y = banana()
    angle = torch.linspace(0, 2 * math.pi, 65, dtype=torch.float64)[:-1]
    far = 10 * torch.stack([angle.cos(), angle.sin()], -1)
    grid = torch.cartesian_prod(*[torch.linspace(-3, 3, 13, dtype=torch.float64)] * 2)
    for name in args.models:
        kernel, activation = MODELS[name]
        generator = torch.Generator().manual_seed(0)
        layer = StationaryLayer(2, 30, kernel=kernel, activation=activation, generator=generator, dtype=torch.float64)
        model = Model(layer, 2, Categorical(), generator=generator)
        start = time.perf_counter()
        sampling = Sampling(warmup=args.warmup, samples=args.samples, target_accept=args.target_accept)
        posterior = Nuts(model, x, y, sampling, chain_method=args.chain_method)
        seconds = time.perf_counter() - start
        # Probabilities, which is what a user sees, rather than logits, which softmax leaves unidentified.
        p = torch.softmax(posterior.outputs(grid), -1)[..., 1].numpy()
        predictions: Any = posterior.predict(x), posterior.predict(far)
        inside, outside = predictions
        row = {
            "benchmark": "banana",
            "model": name,
            "units": 30,
            "chains": 4,
            "samples": args.samples,
            "seconds": round(seconds, 1),
            "divergences": posterior.divergences,
            "r_hat": round(float(split_gelman_rubin(p).max()), 4),
            "ess": round(float(effective_sample_size(p).min()), 1),
            "accuracy": (inside.probabilities.argmax(-1) == y).double().mean().item(),
            "far_mean_probability": outside.probabilities[:, 1].mean().item(),
            "far_worst_probability": (outside.probabilities[:, 1] - 0.5).abs().max().item() + 0.5,
            "far_mean_confidence": outside.confidence.mean().item(),
            "seed": 0,
        }
        print(json.dumps({**row, **provenance()}), flush=True)


if __name__ == "__main__":
    main()
