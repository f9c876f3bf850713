"""Whether `bochner fit --budget SECONDS` keeps its time, on generated tables with numbers, a category and a date.

    python benchmarks/budget.py [--out results/benchmarks/budget.jsonl]

The time is that from the call to the end of the process, from outside: with the start of Python, which the budget counts from its
first line on, and with the exit. Nothing else should run on the machine. Adds a row for each table and budget.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from bochner.experiments.rows import Row, add_rows, provenance

BUDGETS = (5, 10, 20)  # seconds
TABLES = ((300, 6), (2000, 12), (20_000, 10))  # rows and columns beside the target


def write_table(path: Path, rows: int, columns: int) -> None:
    """Numbers but for two columns: a category and a date."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({f"x{i}": rng.normal(size=rows).round(4) for i in range(columns - 2)})
    frame["kind"] = rng.choice(["flat", "house", "loft", "villa"], rows)
    days = rng.integers(0, 2000, rows)
    frame["sold"] = np.datetime_as_string(np.datetime64("2020-01-01") + days.astype("timedelta64[D]"))
    f = np.sin(2 * frame["x0"]) + frame["x1"] * frame["x2"] + (frame["kind"] == "villa") + np.sin(days / 200)
    frame["y"] = (f + 0.3 * rng.normal(size=rows)).round(4)
    frame.to_csv(path, index=False)


def measure(table: Path, rows: int, columns: int, budget: int) -> Row:
    model = table.with_suffix(".bochner")
    command = [sys.executable, "-m", "bochner.cli", "fit", str(table), "--target", "y", "--out", str(model)]
    began = time.perf_counter()
    done = subprocess.run([*command, "--budget", str(budget), "--json"], capture_output=True, text=True, check=True)
    took = time.perf_counter() - began
    held_out = json.loads(done.stdout.splitlines()[-1])["held_out"]
    said = [line for line in done.stderr.splitlines() if "too few" in line]
    return {
        "experiment": "budget", "rows": rows, "columns": columns, "budget": budget, "seconds": round(took, 2),
        "overrun": round(took / budget, 3), "said": said[0] if said else None, "nlpd": round(held_out["nlpd"], 4),
        "measured_rows": held_out["rows"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/budget.jsonl"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for rows, columns in TABLES:
            table = Path(folder) / f"t{rows}.csv"
            write_table(table, rows, columns)
            for budget in BUDGETS:
                row = measure(table, rows, columns, budget) | provenance()
                print(json.dumps(row), flush=True)
                add_rows(options.out, [row], lambda r: (r["rows"], r["columns"], r["budget"], r["commit"] or ""))


if __name__ == "__main__":
    main()
