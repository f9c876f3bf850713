"""A CSV file with text and missing values, from file to predictions, by the command line.

Run: python examples/table_csv.py    (some ten seconds; everything is written into a temporary folder)
"""

import csv
import random
import subprocess
import sys
import tempfile
from pathlib import Path

rng = random.Random(0)
DISTRICTS = {"north": 0, "harbour": 60, "old town": 40}  # what a place adds to the price


def flat() -> dict[str, object]:
    """A flat and its price; the floor is missing now and then."""
    area, floor, district = rng.uniform(30, 140), rng.randint(0, 9), rng.choice(list(DISTRICTS))
    price = 3 * area + 4 * floor + DISTRICTS[district] + rng.gauss(0, 15)
    shown = "" if rng.random() < 0.05 else floor
    return {"area": round(area, 1), "floor": shown, "district": district, "price": round(price, 1)}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Rows as a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def bochner(*words: str | Path) -> None:
    """Runs the command line in this Python and shows what it says."""
    print("$ bochner", *(Path(word).name for word in words), flush=True)
    subprocess.run([sys.executable, "-m", "bochner.cli", *map(str, words)], check=True)


with tempfile.TemporaryDirectory() as folder:
    train, new, model, out = (
        Path(folder) / name for name in ("train.csv", "new.csv", "model.bochner", "predictions.csv")
    )
    write(train, [flat() for _ in range(150)])
    palace = {"area": 2000, "floor": 0, "district": "old town"}
    write(new, [{key: row[key] for key in palace} for row in [*(flat() for _ in range(4)), palace]])

    bochner("fit", train, "--target", "price", "--out", model)
    bochner("predict", model, new, "--out", out)
    print("\nthe last row is a palace of 2,000 m²:")
    print(out.read_text(encoding="utf-8"))
