"""The closed form at many rows, as a multiple of the bare feature and Gram products in the same run.

python benchmarks/closed_form.py [--device cuda] [--rows 1000000]
"""

import argparse
import json
import time

import torch

from bochner import Gaussian, Model, StationaryLayer
from bochner.experiments.rows import provenance
from bochner.posteriors.closed_form import ClosedForm

INPUTS, WIDTH, CHUNK = 20, 2000, 65_536


def seconds(work, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    layer = StationaryLayer(INPUTS, WIDTH, kernel="matern32", lengthscale=3.0, generator=generator, device=args.device)
    model = Model(layer, 1, Gaussian(0.1), generator=generator)
    x = torch.randn(args.rows, INPUTS, device=args.device)
    y = torch.sin(x[:, :1]) + 0.1 * torch.randn(args.rows, 1, device=args.device)

    def floor() -> None:
        gram = torch.zeros(WIDTH, WIDTH, device=args.device)
        for xb in x.split(CHUNK):
            phi = xb @ layer.weight.detach().T
            gram += phi.T @ phi

    posterior = []
    work = {"floor": floor, "closed_form": lambda: posterior.append(ClosedForm(model, x, y, chunk=CHUNK))}
    for job in work.values():
        seconds(job, args.device)
    times = {name: min(seconds(job, args.device) for _ in range(5)) for name, job in work.items()}
    prediction = posterior[-1].predict(x[:1000])
    rmse = (prediction.mean - torch.sin(x[:1000, :1])).square().mean().sqrt().item()
    row = {"benchmark": "closed_form", "rows": args.rows, "width": WIDTH, "rmse": rmse}
    row |= {f"{name}_s": round(value, 4) for name, value in times.items()}
    row["ratio"] = round(times["closed_form"] / times["floor"], 3)
    print(json.dumps({**row, **provenance(args.device)}))


if __name__ == "__main__":
    main()
