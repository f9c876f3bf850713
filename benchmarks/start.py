"""Seconds from a call to its end where nothing is computed: an import, the help, and a misspelt file.

    python benchmarks/start.py [--out results/benchmarks/start.jsonl]

Medians of five runs, each in a process of its own; the first run, which may have to write bytecode, is not counted. Beside them the
same of Python alone. Adds a row for each case.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bochner.experiments.rows import Row, add_rows, provenance

RUNS = 5
CASES = {
    "python": ["-c", "pass"],
    "import bochner": ["-c", "import bochner"],
    "bochner --help": ["-m", "bochner.cli", "--help"],
    "missing file": ["-m", "bochner.cli", "fit", "no.csv", "--target", "y"],
}


def measure(name: str, folder: str) -> Row:
    seconds = []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, *CASES[name]], capture_output=True, text=True, cwd=folder)
        seconds.append(time.perf_counter() - began)
        assert done.returncode == int(name == "missing file"), done.stderr
    return {
        "experiment": "start", "case": name, "seconds": round(statistics.median(seconds[1:]), 3),
        "fastest": round(min(seconds[1:]), 3), "slowest": round(max(seconds[1:]), 3), "runs": RUNS,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/start.jsonl"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            row = measure(name, folder) | provenance()
            print(json.dumps(row), flush=True)
            add_rows(options.out, [row], lambda r: (r["case"], r["commit"] or ""))


if __name__ == "__main__":
    main()
