"""Cost of the model layer, forward and backward, as a ratio to nn.Linear + ReLU of the same shape in the same run.

    python benchmarks/layer.py [--device cuda] [--compile]

Prints one JSON row for each activation.
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn

from bochner import StationaryLayer
from bochner.experiments.rows import provenance

BATCH, INPUTS, OUTPUTS = 500, 25, 2000
NAMES = ["sin", "sincos", "paired", "triangle", "periodic_relu", "local_rbf", "local_matern"]


def stepper(module: nn.Module, device: str, batch: int):
    x = torch.randn(batch, INPUTS, device=device, requires_grad=True)
    grad = torch.randn(batch, OUTPUTS, device=device)
    wanted = [x, *(p for p in module.parameters())]

    def step() -> None:
        torch.autograd.grad(module(x), wanted, grad)

    return step


def seconds(step, device: str, repeats: int) -> float:
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) / repeats
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        step()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats


def graphed(step):
    """One CUDA graph of the step: what is left is the kernels' own time, not Python's."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--batch", type=int, default=BATCH)
    args = parser.parse_args()
    modules: dict[str, nn.Module] = {"linear+relu": nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.ReLU())}
    modules |= {name: StationaryLayer(INPUTS, OUTPUTS, activation=name) for name in NAMES}
    steps = {}
    for name, module in modules.items():
        module = module.to(args.device)
        step = stepper(torch.compile(module) if args.compile else module, args.device, args.batch)  # pyright: ignore[reportArgumentType]
        for _ in range(5):
            step()
        steps[name] = graphed(step) if args.device != "cpu" else step
    repeats = 1 if args.device == "cpu" else 50
    # Interleaved, so that a slow spell of the machine falls on all of them alike.
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(200 if args.device == "cpu" else 20):
        for name, step in steps.items():
            times[name].append(seconds(step, args.device, repeats))
    base = statistics.median(times["linear+relu"])
    for name, values in times.items():
        row = {
            "benchmark": "layer",
            "activation": name,
            "batch": args.batch,
            "milliseconds": round(1e3 * statistics.median(values), 4),
            "ratio": round(statistics.median(values) / base, 3),
            "compiled": args.compile,
            **provenance(args.device),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
