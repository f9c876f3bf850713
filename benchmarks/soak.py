"""A soak: an hour of predictions and of `partial_fit` on a stream that drifts. Memory must stay flat and no number may get lost.

Two estimators learn from the same drifting stream: one batch by batch, the other all at once at the end. A regressor for arrays, a
classifier and a regressor for tables predict in between.

Run: python benchmarks/soak.py --seconds 3600    (prints a line a minute; writes a row to results/benchmarks/soak.jsonl)
"""

import argparse
import copy
import gc
import time
from pathlib import Path

import numpy as np
import pandas as pd

from bochner import StationaryClassifier, StationaryRegressor, TableRegressor
from bochner.experiments.rows import provenance, read_rows, write_rows

BATCH_ROWS = 20
WARM_UP_SHARE = 0.1  # of the time, in which caches fill; memory is compared with that at its end


def resident_mib() -> float:
    """Memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def stream(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of rows whose inputs wander and whose target grows slowly, the same for the same number."""
    rng = np.random.default_rng([seed, number])
    x = rng.uniform(-2, 2, (BATCH_ROWS, 3)) + np.sin(number / 500)
    return x, np.sin(2 * x[:, 0]) * x[:, 1] + 1e-5 * number + 0.1 * rng.standard_normal(BATCH_ROWS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/soak.jsonl"))
    arguments = parser.parse_args()

    rng = np.random.default_rng(arguments.seed)
    x = rng.uniform(-3, 3, (400, 3))
    y = np.sin(2 * x[:, 0]) * x[:, 1] + 0.1 * rng.standard_normal(400)
    frame = pd.DataFrame({"price": [f"${v:,.2f}" for v in 1000 * x[:, 0]], "kind": rng.choice(["a", "b"], 400)})
    quick = {"hidden_layer_sizes": (), "random_state": 0}
    streamed = StationaryRegressor(**quick).partial_fit(x, y)
    at_once = copy.deepcopy(streamed)
    classifier = StationaryClassifier(**quick).fit(x, y > 0)
    table = TableRegressor(**quick).fit(frame, y)
    before = classifier.predict_proba(x), table.predict(frame)

    start, batches, lines, base, last = time.monotonic(), 0, 0, 0.0, 0.0
    memory = []
    while (elapsed := time.monotonic() - start) < arguments.seconds:
        streamed.partial_fit(*stream(batches, arguments.seed))
        batches += 1
        streamed.predict(x, return_std=True)
        streamed.ood_score(x)
        np.testing.assert_array_equal(classifier.predict_proba(x), before[0])
        if batches % 10 == 0:
            np.testing.assert_array_equal(table.predict(frame), before[1])
        if elapsed > lines * arguments.seconds / 60:
            gc.collect()
            memory.append(resident_mib())
            lines += 1
            print(f"{elapsed:7.0f} s  {batches} batches  {memory[-1]:.1f} MiB", flush=True)
    warm = memory[int(WARM_UP_SHARE * len(memory)) :]
    base, last = warm[0], max(warm)

    parts = [stream(number, arguments.seed) for number in range(batches)]
    at_once.partial_fit(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))
    new = rng.uniform(-3, 3, (200, 3))
    pairs = zip(streamed.predict(new, return_std=True), at_once.predict(new, return_std=True), strict=True)
    difference = max(float(np.abs(one - other).max()) for one, other in pairs)
    row = {"benchmark": "soak", "seed": arguments.seed, **provenance(), "seconds": round(time.monotonic() - start)}
    row |= {"batches": batches, "rows": batches * BATCH_ROWS, "mib_after_warm_up": round(base, 1)}
    row |= {"mib_most_later": round(last, 1), "growth": round(last / base - 1, 5), "difference_to_batch": difference}
    write_rows(arguments.out, [*read_rows(arguments.out), row])
    print(row)


if __name__ == "__main__":
    main()
