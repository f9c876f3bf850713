"""A messy table against its hand-cleaned form: how much is lost by leaving the cleaning to the library.

Run: python benchmarks/messy.py    (some minutes on two cores; prints a row for each form, and the loss)
"""

import argparse
import json
import platform
import time

import numpy as np
import pandas as pd
import torch

import bochner
from bochner import TableRegressor

MAKERS = ["Audi", "BMW", "Ford", "Kia", "Opel", "Seat", "Volvo", "VW"]


def make(rows: int, seed: int) -> tuple[pd.DataFrame, pd.DataFrame, np.ndarray]:
    """The same cars twice: as a sales platform exports them, and as a careful person would clean them; and log prices."""
    rng = np.random.default_rng(seed)
    km, age = rng.gamma(2, 40_000, rows).round(), rng.integers(0, 16, rows).astype(float)
    maker = rng.choice([*MAKERS, *(f"small maker {i}" for i in range(40))], rows, p=[0.12] * 8 + [0.001] * 40)
    day = pd.date_range("2024-01-01", periods=700)[rng.integers(0, 700, rows)]
    fee, share, warranty = (
        rng.uniform(50, 900, rows).round(2),
        rng.uniform(0, 40, rows).round(1),
        rng.random(rows) < 0.4,
    )
    level = dict(zip(MAKERS, rng.normal(0, 0.3, len(MAKERS)), strict=True))
    y = 10 - km / 150_000 - 0.08 * age + np.array([level.get(name, -0.4) for name in maker]) + 0.1 * warranty
    y = y + 0.15 * np.sin(2 * np.pi * np.asarray(day.day_of_year) / 365) - 0.002 * share + rng.normal(0, 0.15, rows)
    age[rng.random(rows) < 0.1] = np.nan
    messy = pd.DataFrame(
        {
            "ad_id": [f"AD{i:06}" for i in rng.permutation(rows)],
            "Listed On": day.strftime("%d/%m/%Y"),
            "mileage": [f"{v:,.0f} km" for v in km],
            "age": ["n/a" if np.isnan(v) else f"{v:.0f}" for v in age],
            "maker": [
                name.upper() if flip else f"{name} " for name, flip in zip(maker, rng.random(rows) < 0.2, strict=True)
            ],
            "fee": [f"${v:,.2f}" for v in fee],
            "discount": [f"{v} %" for v in share],
            "warranty": np.where(warranty, "yes", "no"),
            "country": "Germany",
        }
    )
    clean = pd.DataFrame(
        {
            "days": np.asarray((day - pd.Timestamp("2024-01-01")) / pd.Timedelta(days=1)),
            "month": day.month,
            "weekday": day.day_of_week,
            "mileage": km,
            "age": age,
            "maker": [name if name in MAKERS else "other" for name in maker],
            "fee": fee,
            "discount": share,
            "warranty": warranty.astype(float),
        }
    )
    return messy, clean, np.round(np.exp(y), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000, help="rows to fit to; as many again measure")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--columns-only", action="store_true", help="no networks: a few seconds")
    options = parser.parse_args()
    losses = []
    for seed in range(options.seeds):
        messy, clean, price = make(2 * options.rows, seed)
        text = pd.Series([f"${v:,.2f}" for v in price], name="price")
        scores = {}
        for form, frame, y in (("messy", messy, text), ("clean", clean, pd.Series(price, name="price"))):
            start = time.perf_counter()
            hidden = () if options.columns_only else (200, 200, 25)
            model = TableRegressor(random_state=0, hidden_layer_sizes=hidden)
            model.fit(frame[: options.rows], y[: options.rows])
            seconds = time.perf_counter() - start
            scores[form] = -float(model.log_prob(frame[options.rows :], y[options.rows :]).mean())
            about = {"hardware": f"{platform.machine()}, {torch.get_num_threads()} threads", "torch": torch.__version__}
            row = {
                "benchmark": "messy",
                "form": form,
                "rows": options.rows,
                "seed": seed,
                "nlpd": round(scores[form], 4),
            }
            print(json.dumps(row | {"seconds": round(seconds, 1), "bochner": bochner.__version__} | about), flush=True)
        losses.append(scores["messy"] - scores["clean"])
    print(json.dumps({"benchmark": "messy", "loss": round(float(np.mean(losses)), 4)}))


if __name__ == "__main__":
    main()
