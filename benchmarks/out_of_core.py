"""Time and peak memory of `bochner fit` on generated Parquet files, beside the floor: reading the file and two matrix products.

    python benchmarks/out_of_core.py 100000 1000000 10000000 [--out results/benchmarks/out-of-core.jsonl]

Each number is a table's rows, of 20 columns: 16 numbers, a category, a date, a truth and a whole number. The floor of a row is what
reading costs, and for every head one triangular solve and half of a Gram matrix, timed alone here. Adds a row for each table.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from bochner.experiments.rows import Row, add_rows, provenance
from bochner.storage import load

GROUP_ROWS = 100_000
TIMED_ROWS = 4096


def write_table(path: Path, rows: int) -> None:
    """Generates a table, a group of rows at a time."""
    writer = None
    for start in range(0, rows, GROUP_ROWS):
        rng = np.random.default_rng([0, start])
        n = min(GROUP_ROWS, rows - start)
        frame = pd.DataFrame({f"x{i}": rng.normal(size=n) for i in range(16)})
        frame["kind"] = rng.choice(["flat", "house", "loft", "villa"], n)
        frame["sold"] = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 2000, n), unit="D")
        frame["garden"] = rng.random(n) < 0.3
        frame["rooms"] = rng.integers(1, 9, n)
        f = np.sin(2 * frame["x0"]) + frame["x1"] * frame["x2"] + np.abs(frame["x3"]) + frame["garden"] * frame["x4"]
        frame["y"] = f + 0.2 * frame["rooms"] + 0.3 * rng.normal(size=n)
        table = pa.Table.from_pandas(frame, preserve_index=False)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def seconds_to_read(path: Path) -> float:
    began = time.perf_counter()
    for batch in pq.ParquetFile(path).iter_batches(batch_size=20_000):
        batch.to_pandas()
    return time.perf_counter() - began


def seconds_of_products(sizes: list[int]) -> float:
    """A row's seconds in one triangular solve and one product of half a Gram matrix for every head."""
    total = 0.0
    for size in sizes:
        factor = torch.eye(size, dtype=torch.float64) + 0.01 * torch.ones(size, size, dtype=torch.float64).tril()
        phi = torch.randn(size, TIMED_ROWS, dtype=torch.float64)
        gram = torch.zeros(size, size, dtype=torch.float64)
        times = []
        for _ in range(4):
            began = time.perf_counter()
            half = torch.linalg.solve_triangular(factor, phi, upper=False)
            middle = time.perf_counter()
            gram.addmm_(half, half.mT)
            times.append((middle - began) + (time.perf_counter() - middle) / 2)
        total += min(times) / TIMED_ROWS
    return total


def measure(rows: int, folder: Path) -> Row:
    path, model = folder / f"t{rows}.parquet", folder / f"m{rows}.bochner"
    write_table(path, rows)
    reading = seconds_to_read(path)
    command = [sys.executable, "-m", "bochner.cli", "fit", str(path), "--target", "y", "--out", str(model), "--json"]
    timed = ["/usr/bin/time", "-v", *command] if Path("/usr/bin/time").exists() else command
    began = time.perf_counter()
    done = subprocess.run(timed, capture_output=True, text=True, check=True)
    took = time.perf_counter() - began
    peak = re.search(r"Maximum resident set size \(kbytes\): (\d+)", done.stderr)
    if peak is None:  # the kernel keeps the largest child of this process, and tables come in rising order
        import resource

        peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    else:
        peak_gib = int(peak[1]) / 2**20
    answer = json.loads(done.stdout.splitlines()[-1])
    heads = load(model).estimator.estimator_.mixtures_[0].members
    products = seconds_of_products([len(member.head.features.anchors) for member in heads])
    path.unlink()
    return {
        "experiment": "out-of-core", "rows": rows, "columns": 20, "seconds": round(took, 1), "peak_gib": round(peak_gib, 3),
        "rows_a_second": round(rows / took), "heads": len(heads), "reading_seconds": round(reading, 2),
        "products_microseconds_a_row": round(1e6 * products, 1),
        "floor_rows_a_second": round(rows / (2 * reading + rows * products)),
        "nlpd": answer["held_out"]["nlpd"], "learnt_from": answer["rows"], "threads": os.cpu_count(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/out-of-core.jsonl"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for rows in sorted(options.rows):
            row = measure(rows, Path(folder)) | provenance()
            print(json.dumps(row), flush=True)
            add_rows(options.out, [row], lambda r: (r["rows"], r["commit"] or ""))


if __name__ == "__main__":
    main()
