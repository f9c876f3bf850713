"""The estimators without arguments: the paper's ten folds, noise that grows, and what a fit costs.

    BOCHNER_DATA=folder python benchmarks/default.py folds [--sets boston ...] [--folds 0 1 ...] [--seeds 0]
    python benchmarks/default.py noise
    python benchmarks/default.py cost [--rows 50 500 5000 50000]
    python benchmarks/default.py report

Rows go to results/default (--out); a row that is there is not made again. Targets are standardised by the training rows.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import make_friedman1
from sklearn.model_selection import cross_val_score

from bochner import metrics
from bochner.datasets import folds, load
from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.experiments.rows import Row, add_rows, provenance, read_rows
from bochner.storage import save

REGRESSION = ("boston", "concrete", "airfoil", "elevators")
CLASSES = ("diabetes", "adult", "connect-4")
FAR, DIRECTIONS = 100.0, 200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def far_rows(x: np.ndarray) -> np.ndarray:
    """Rows a hundred standard deviations from the mean in random directions."""
    z = np.random.default_rng(0).standard_normal((DIRECTIONS, x.shape[1]))
    scale = x.std(0)
    return x.mean(0) + FAR * z / np.linalg.norm(z, axis=1, keepdims=True) * np.where(scale > 0, scale, 1.0)


def score_regressor(model: Any, x: np.ndarray, new: np.ndarray, truth: np.ndarray) -> Row:
    """Metrics on new rows, and how nearly predictions far away have the prior's spread."""
    mean, low_high = model.predict(new), model.predict_interval(new)
    ratio = model.predict(far_rows(x), return_std=True)[1] / model.prior_std_
    return {
        "nlpd": float(-model.log_prob(new, truth).mean()),
        "rmse": metrics.rmse(truth, mean),
        "coverage_90": metrics.coverage(truth, *low_high.T),
        "far_mean": float(ratio.mean()),
        "far_low": float(np.quantile(ratio, 0.05)),
    }


def score_classifier(model: Any, x: np.ndarray, new: np.ndarray, truth: np.ndarray) -> Row:
    """Metrics on new rows, and how nearly classes are equally probable far away."""
    p = model.predict_proba(new)
    away = np.abs(model.predict_proba(far_rows(x)) - 1 / p.shape[1]).max(1)
    return {
        "nlpd": float(-model.log_prob(new, truth).mean()),
        "accuracy": metrics.accuracy(truth, p),
        "ece": metrics.ece(truth, p),
        "far_mean": float(away.mean()),
        "far_high": float(np.quantile(away, 0.95)),
    }


def fit_and_score(x: np.ndarray, y: np.ndarray, new: np.ndarray, truth: np.ndarray, seed: int) -> Row:
    """One fit of the default to standardised targets or labels."""
    classes = y.dtype.kind != "f"
    mean, scale = (0, 1) if classes else (y.mean(), y.std())
    y, truth = ((v - mean) / scale if not classes else v for v in (y, truth))
    began = time.perf_counter()
    model: Any = (StationaryClassifier if classes else StationaryRegressor)(random_state=seed).fit(x, y)
    seconds = time.perf_counter() - began
    metrics_row = (score_classifier if classes else score_regressor)(model, x, new, truth)
    members = model.mixtures_[0].members
    on_networks = sum(member.weight for member in members if member.network is not None)
    return metrics_row | {"on_networks": on_networks, "members": len(members), "seconds": seconds}


def key(row: Row) -> tuple[Any, ...]:
    return row["set"], row["fold"], row["seed"]


def run_folds(options: argparse.Namespace) -> None:
    path = options.out / "folds.jsonl"
    done = {key(row) for row in read_rows(path)}
    for name in options.sets:
        data = load(name)
        for seed in options.seeds:
            for fold in options.folds:
                if (name, fold, seed) in done:
                    continue
                train, test = folds(len(data.x))[fold]
                metrics_row = fit_and_score(data.x[train], data.y[train], data.x[test], data.y[test], seed)
                row = {"set": name, "fold": fold, "seed": seed, "rows": len(train)} | metrics_row | provenance(DEVICE)
                add_rows(path, [row], key)
                print(name, fold, seed, {k: round(v, 3) for k, v in metrics_row.items()}, flush=True)


# ---------------------------------------------------------------------- noise that grows


def run_noise(options: argparse.Namespace) -> None:
    """Coverage in quartiles of a column along which the noise grows tenfold."""
    coverages = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x = rng.uniform(-1, 1, (3000, 5))
        noise = 0.1 * 10 ** ((x[:, 0] + 1) / 2)
        y = np.sin(3 * x[:, 1]) + x[:, 2] * x[:, 3] + noise * rng.standard_normal(3000)
        model = StationaryRegressor(random_state=seed).fit(x[:1000], y[:1000])
        low, high = model.predict_interval(x[1000:]).T
        inside = (y[1000:] >= low) & (y[1000:] <= high)
        quartile = np.digitize(x[1000:, 0], np.quantile(x[1000:, 0], (0.25, 0.5, 0.75)))
        coverages.append([float(inside[quartile == q].mean()) for q in range(4)])
    row = {
        "set": "growing-noise",
        "coverage_90": np.mean(coverages, 0).tolist(),
        "each": coverages,
        **provenance("cpu"),
    }
    add_rows(options.out / "noise.jsonl", [row], lambda r: (r["set"],))
    print(row)


# ---------------------------------------------------------------------- what a fit costs


def cost_data(kind: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten columns; for classes three, by thirds of the target."""
    x, y = make_friedman1(rows, n_features=10, noise=1.0, random_state=0)
    return x, y if kind == "regression" else np.digitize(y, np.quantile(y, (1 / 3, 2 / 3)))


def run_cost(options: argparse.Namespace) -> None:
    """Each size in a process of its own, so that its peak is its own."""
    if len(options.rows) > 1 or options.kind is None:
        for kind in ("regression", "classes"):
            for rows in options.rows:
                command = [sys.executable, __file__, "cost", "--kind", kind, "--rows", str(rows)]
                subprocess.run([*command, "--out", str(options.out)], check=True)
        return
    (rows,) = options.rows
    x, y = cost_data(options.kind, rows)
    model: Any = (StationaryRegressor if options.kind == "regression" else StationaryClassifier)(random_state=0)
    began = time.perf_counter()
    model.fit(x, y)
    found = {"seconds": time.perf_counter() - began, "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as folder:
        found["file_bytes"] = save(Path(folder) / "model", model).stat().st_size
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if rows == 500:
        for jobs in (1, 2):
            began = time.perf_counter()
            cross_val_score(model, x, y, cv=10, n_jobs=jobs)
            found[f"cross_val_seconds_{jobs}"] = time.perf_counter() - began
    row = {"kind": options.kind, "rows": rows, **found, **provenance(DEVICE)}
    add_rows(options.out / "cost.jsonl", [row], lambda r: (r["kind"], r["rows"]))
    print(row, flush=True)


# ---------------------------------------------------------------------- the report


def cell(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values):.3f}"


def table(rows: list[Row], sets: tuple[str, ...], columns: tuple[str, ...]) -> list[str]:
    """A line for each set: mean ± standard deviation over fits of each column."""
    lines = [f"| set | fits | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for name in sets:
        own = [row for row in rows if row["set"] == name]
        if own:
            lines.append(f"| {name} | {len(own)} | {' | '.join(cell([r[c] for r in own]) for c in columns)} |")
    return lines


def run_report(options: argparse.Namespace) -> None:
    """Writes every table to default.md beside the rows."""
    found = read_rows(options.out / "folds.jsonl")
    lines = [
        "# The default in numbers",
        "",
        "Made by `python benchmarks/default.py report`. ± is the standard deviation.",
    ]
    columns = ("nlpd", "rmse", "coverage_90", "far_mean", "far_low", "on_networks", "seconds")
    lines += ["", "## Regression, the paper's ten folds", "", *table(found, REGRESSION, columns)]
    columns = ("nlpd", "accuracy", "ece", "far_mean", "far_high", "on_networks", "seconds")
    lines += ["", "## Classes, the paper's ten folds", "", *table(found, CLASSES, columns)]
    for row in read_rows(options.out / "noise.jsonl"):
        shown = ", ".join(f"{share:.3f}" for share in row["coverage_90"])
        lines += ["", "## Noise that grows tenfold along a column", "", f"Coverage of 90 % by quartile: {shown}"]
    if rows := read_rows(options.out / "cost.jsonl"):
        lines += ["", "## Cost", "", "| kind | rows | seconds | peak memory, GiB | file, MB |", "|---|---|---|---|---|"]
        lines += [
            f"| {r['kind']} | {r['rows']:,} | {r['seconds']:.1f} | {r['peak_bytes'] / 2**30:.2f} "
            f"| {r['file_bytes'] / 1e6:.1f} |"
            for r in rows
        ]
        for r in [r for r in rows if "cross_val_seconds_1" in r]:
            ratio = r["cross_val_seconds_1"] / r["cross_val_seconds_2"]
            lines += ["", f"cross_val_score of 500 rows, {r['kind']}: two jobs are {ratio:.2f} times as fast as one."]
    (options.out / "default.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = {"folds": run_folds, "noise": run_noise, "cost": run_cost, "report": run_report}
    parser.add_argument("what", choices=runs)
    parser.add_argument("--sets", nargs="*", default=[*REGRESSION, *CLASSES])
    parser.add_argument("--folds", nargs="*", type=int, default=list(range(10)))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--kind", choices=("regression", "classes"), default=None)
    parser.add_argument("--rows", nargs="*", type=int, default=[50, 500, 5_000, 50_000])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "default")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runs[options.what](options)


if __name__ == "__main__":
    main()
