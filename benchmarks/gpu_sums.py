"""Sums of heads over generated rows on a GPU, beside the floor of two matrix products; and a whole fit to batches.

    python benchmarks/gpu_sums.py [--rows 100000000] [--fit-rows 5000000] [--device cuda] [--out results/benchmarks/gpu-sums.jsonl]

A regressor learns hyperparameters, networks and anchors from a sample of 50,000 rows of 20 numbers. Then the sums of its heads are
taken over rows that the GPU generates, and the heads are made of the sums. The floor of a row is, for every head, one triangular
solve and half of a Gram matrix of that size, timed alone on as many rows. The whole fit goes through ``fit_batches``, with batches
from the processor, twice: first for the sample, then for the sums. Adds one row.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bochner.estimators import Settings, StationaryRegressor
from bochner.experiments.rows import add_rows, provenance
from bochner.members.heads import GaussianHead
from bochner.posteriors.closed_form import Statistics
from bochner.streaming.moments import MomentCollector, RegressionSums, add_sums, from_lower_half

COLUMNS = 20
BATCH_ROWS = 1_000_000
HOST_ROWS = 100_000  # rows of a batch from the processor


def generated(rows: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Rows of 20 normal numbers, and a target of five of them."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float64, device=device)
    noise = torch.randn(rows, generator=generator, dtype=torch.float64, device=device)
    return x, torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3].abs() + x[:, 4] + 0.3 * noise


class Batches:
    """Batches from the processor that begin anew each time."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, start in enumerate(range(0, self.rows, HOST_ROWS)):
            yield generated(min(HOST_ROWS, self.rows - start), number, "cpu")


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def floor_of(size: int, rows: int, device: str) -> float:
    """A row's seconds in one triangular solve and half a Gram matrix."""
    factor = torch.eye(size, dtype=torch.float64, device=device) + 0.01 * torch.ones(
        size, size, dtype=torch.float64, device=device
    ).tril(-1)
    phi = torch.randn(size, rows, dtype=torch.float64, device=device)
    gram = torch.zeros(size, size, dtype=torch.float64, device=device)
    best = float("inf")
    for _ in range(4):
        start = now(device)
        half = torch.linalg.solve_triangular(factor, phi, upper=False)
        middle = now(device)
        gram.addmm_(half, half.mT)
        best = min(best, middle - start + (now(device) - middle) / 2)
    return best / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--fit-rows", type=int, default=5_000_000)
    parser.add_argument("--sample-rows", type=int, default=50_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/gpu-sums.jsonl"))
    args = parser.parse_args()
    device = args.device
    options = {"random_state": 0, "device": device, "settings": Settings(sample_rows=args.sample_rows)}
    start = now(device)
    model = StationaryRegressor(**options).fit_batches(Batches(args.fit_rows))
    fitted = now(device) - start
    members = model.mixtures_[0].members
    no_keys = torch.zeros(0, dtype=torch.uint64).numpy()
    sums = MomentCollector(model, no_keys, no_keys, no_keys).empty().sums
    mean, std = (torch.tensor([getattr(c, n) for c in model.columns_.columns]) for n in ("mean", "scale"))
    mean, std = mean.to(device).double(), std.to(device).double()
    weight = torch.ones(BATCH_ROWS, dtype=torch.float64, device=device)
    generating = 0.0
    start = now(device)
    for number in range(args.rows // BATCH_ROWS):
        began = now(device)
        x, y = generated(BATCH_ROWS, number, device)
        generating += now(device) - began
        add_sums(model.mixtures_, sums, (x - mean) / std, y.cpu().numpy(), weight)
    took = now(device) - start
    start = now(device)
    for member, total in zip(members, sums[0], strict=True):
        assert isinstance(total, RegressionSums)
        statistics = Statistics(from_lower_half(total.gram), total.projection, total.square, float(total.weight))
        GaussianHead(member.head.features, statistics, member.head.amplitude, member.head.noise)
    heads = now(device) - start
    sizes = [len(member.head.features.anchors) for member in members]
    floor = sum(floor_of(size, min(131_072, args.rows), device) for size in sizes)
    rows = BATCH_ROWS * (args.rows // BATCH_ROWS)
    row = {
        "benchmark": "gpu-sums", "rows": rows, "columns": COLUMNS, "heads": sizes, "seconds": round(took, 2),
        "generating_seconds": round(generating, 2), "heads_seconds": round(heads, 3), "rows_a_second": round(rows / took),
        "floor_rows_a_second": round(1 / floor), "share_of_floor": round(floor * rows / (took - generating), 3),
        "fit_rows": args.fit_rows,
        "sample_rows": args.sample_rows, "fit_seconds": round(fitted, 1),
        "fit_rows_a_second": round(args.fit_rows / fitted),
    }  # fmt: skip
    row |= provenance(device)
    print(json.dumps(row), flush=True)
    add_rows(args.out, [row], lambda r: (r["rows"], r["device"], r["commit"]))


if __name__ == "__main__":
    main()
