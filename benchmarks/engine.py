"""Time of a training step of the paper's sixteen UCI networks as one stack, beside its floors.

    python benchmarks/engine.py [--device cuda] [--copies 40] [--batch 50] [--profile]

Floors: the parameters are read forward and backward, their gradients written, and parameters, gradients and momenta read and
parameters and momenta written by the optimiser: 8 passes, 32 bytes; in bfloat16 26, for products and gradients have two bytes, and
the optimiser writes the copy that products read. And 6 FLOP for each weight and row. Bandwidth and matrix rate are
measured in the same run.
"""

import argparse
import copy
import json
import time

import torch

from bochner.experiments.rows import provenance
from bochner.experiments.zoo import MODELS, Shape, build
from bochner.training.map import Recipe, fit_map, sgd


def wait(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def ceilings(device: str, precision: str) -> tuple[float, float]:
    """Bytes per second of a large copy, and FLOP per second of a large matrix product."""
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    num = 2**28 if device == "cuda" else 2**25
    a, b = torch.randn(num, device=device), torch.empty(num, device=device)
    side = 8192 if device == "cuda" else 2048
    m = torch.randn(side, side, device=device, dtype=torch.bfloat16 if precision == "bfloat16" else torch.float32)
    best = [float("inf"), float("inf")]
    for _ in range(5):
        start = wait(device)
        b.copy_(a)
        middle = wait(device)
        torch.mm(m, m)
        best = [min(best[0], middle - start), min(best[1], wait(device) - middle)]
    return 8 * num / best[0], 2 * side**3 / best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--copies", type=int, default=40, help="networks of each model")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--inputs", type=int, default=12)
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    shape = Shape("paper", None, 2000, (1000, 1000, 500, 25))
    names = sorted(args.models, key=lambda name: MODELS[name][1])  # members of one activation follow each other
    first = [build(n, args.inputs, shape, 0).to(args.device) for n in names]
    stack = [copy.deepcopy(m) for m in first for _ in range(args.copies)]
    rates = [r for _ in first for r in sorted([5e-5, 1e-4, 5e-4, 1e-3] * (args.copies // 4 + 1))[: args.copies]]
    seeds = [i % 10 for i in range(len(stack))]
    rows, steps = 10 * args.batch, 300
    x = torch.randn(rows, args.inputs, device=args.device)
    y = torch.randn(rows, 1, device=args.device)

    def train(epochs: int) -> float:
        start = wait(args.device)
        fit_map(stack, x, y, Recipe(epochs, args.batch, sgd, rates, 0.01, precision=args.precision), seed=seeds)
        return wait(args.device) - start

    train(1)
    base, longer = train(1), train(1 + steps // 10)
    step = (longer - base) / steps
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            train(1)
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=70))
    bandwidth, rate = ceilings(args.device, args.precision)
    weights = len(stack) * sum(p.numel() for p in first[0].parameters())
    row = {
        "benchmark": "engine",
        "networks": len(stack),
        "batch": args.batch,
        "precision": args.precision,
        "step_ms": 1e3 * step,
        "overhead_s": base - 10 * step,
        "traffic_floor_ms": 1e3 * (26 if args.precision == "bfloat16" else 32) * weights / bandwidth,
        "matmul_floor_ms": 1e3 * 6 * args.batch * weights / rate,
        "copy_gb_s": bandwidth / 1e9,
        "matmul_tflop_s": rate / 1e12,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None,
    }
    print(json.dumps({**row, **provenance(args.device)}), flush=True)


if __name__ == "__main__":
    main()
