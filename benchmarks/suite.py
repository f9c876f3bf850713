"""The suite of 27 tables, five folds each: the estimators without arguments beside the models that people would pick instead.

    BOCHNER_DATA=folder python benchmarks/suite.py run [--tables c_wine ...] [--jobs 2]
    BOCHNER_DATA=folder python benchmarks/suite.py report

``run`` writes rows to results/suite; a row that is there is not made again. ``report`` sets them beside the rows of
suite-peers.jsonl, which comes with the data: the same folds, probabilities clipped at 1e-3 and renormalised, targets standardised
by the training rows. CatBoost and NGBoost are among them; they were run in an environment of their own.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from matplotlib.figure import Figure
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neighbors import LocalOutlierFactor

from bochner import metrics
from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.experiments.rows import Row, add_rows, provenance, read_rows

CLASS_PEERS = ("svc", "forest", "logistic", "boosting", "catboost", "gp")
REGRESSION_PEERS = ("gp", "ridge", "forest", "boosting")
CLIP = 1e-3
DETECTORS = ("ours", "isolation_forest", "local_outlier_factor", "mahalanobis")

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def data_folder() -> Path:
    return Path(os.environ["BOCHNER_DATA"])


def split_of(name: str, fold: int) -> Split:
    """Training and test rows of a fold; regression targets standardised by the training rows."""
    with np.load(data_folder() / "suite.npz") as data:
        x, y = data[f"{name}_x"].astype(float), data[f"{name}_y"]
    if name.startswith("c_"):
        train, test = list(StratifiedKFold(5, shuffle=True, random_state=0).split(x, y))[fold]
        return x[train], y[train], x[test], y[test]
    train, test = list(KFold(5, shuffle=True, random_state=0).split(x))[fold]
    mean, scale = y[train].mean(), y[train].std()
    return x[train], (y[train] - mean) / scale, x[test], (y[test] - mean) / scale


def score_classes(model: Any, new: np.ndarray, truth: np.ndarray) -> Row:
    labels = np.searchsorted(model.classes_, truth)
    p = np.clip(model.predict_proba(new), CLIP, 1)
    p /= p.sum(1, keepdims=True)
    log_prob = np.log(p[np.arange(len(labels)), labels])
    return {"nlpd": metrics.nlpd(log_prob), "accuracy": metrics.accuracy(labels, p), "ece": metrics.ece(labels, p)}


def score_regression(model: Any, new: np.ndarray, truth: np.ndarray) -> Row:
    mean, std = model.predict(new, return_std=True)
    low, high = model.predict_interval(new).T
    inside = (truth >= low) & (truth <= high)
    quartile = np.digitize(mean, np.quantile(mean, (0.25, 0.5, 0.75)))
    gaussian = 0.5 * np.log(2 * np.pi * std**2) + 0.5 * ((truth - mean) / std) ** 2
    return {
        "nlpd": float(-model.log_prob(new, truth).mean()),
        "nlpd_of_moments": float(gaussian.mean()),
        "rmse": metrics.rmse(truth, mean),
        "coverage_90": float(inside.mean()),
        "coverage_by_quartile": [float(inside[quartile == q].mean()) for q in range(4)],
    }


def strange_rows(x: np.ndarray, new: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Held-out rows with columns permuted independently, and shifted in one column by 3 and by 10 standard deviations."""
    rng = np.random.default_rng(seed)
    scale = np.where(x.std(0) > 0, x.std(0), 1.0)
    rows_by_kind = {"permuted": np.column_stack([rng.permutation(column) for column in new.T])}
    for size in (3, 10):
        moved, column = new.copy(), rng.integers(new.shape[1], size=len(new))
        moved[np.arange(len(new)), column] += size * rng.choice([-1, 1], len(new)) * scale[column]
        rows_by_kind[f"shifted_{size}"] = moved
    return rows_by_kind


def detect(model: Any, x: np.ndarray, new: np.ndarray, seed: int) -> Row:
    """AUROC of strange rows against real ones, for each detector and kind of strangeness."""
    mean, scale = x.mean(0), np.where(x.std(0) > 0, x.std(0), 1.0)
    z = (x - mean) / scale
    forest = IsolationForest(random_state=0).fit(z)
    local = LocalOutlierFactor(novelty=True, n_neighbors=min(20, len(z) - 1)).fit(z)
    precision = np.linalg.pinv(np.cov(z.T).reshape(z.shape[1], -1) + 1e-6 * np.eye(z.shape[1]))
    scores = {
        "ours": model.ood_score,
        "isolation_forest": lambda rows: -forest.score_samples((rows - mean) / scale),
        "local_outlier_factor": lambda rows: -local.score_samples((rows - mean) / scale),
        "mahalanobis": lambda rows: (((rows - mean) / scale) @ precision * ((rows - mean) / scale)).sum(1),
    }
    aurocs: Row = {"false_alarms": float(np.mean(model.ood_score(new) > model.ood_threshold_))}
    for kind, rows in strange_rows(x, new, seed).items():
        truth = np.repeat([0, 1], len(new))
        for name, score in scores.items():
            aurocs[f"auroc_{kind}_{name}"] = float(roc_auc_score(truth, np.concatenate([score(new), score(rows)])))
    return aurocs


def far_away(model: Any, x: np.ndarray) -> Row:
    """Predictions a hundred standard deviations away from the data, beside the prior."""
    z = np.random.default_rng(0).standard_normal((200, x.shape[1]))
    rows = x.mean(0) + 100 * z / np.linalg.norm(z, axis=1, keepdims=True) * np.where(x.std(0) > 0, x.std(0), 1.0)
    if hasattr(model, "classes_"):
        away = np.abs(model.predict_proba(rows) - 1 / len(model.classes_)).max(1)
        return {"far_mean": float(away.mean()), "far_high": float(np.quantile(away, 0.95))}
    return {"far_mean": float((model.predict(rows, return_std=True)[1] / model.prior_std_).mean())}


def run_one(name: str, fold: int) -> Row:
    x, y, new, truth = split_of(name, fold)
    began = time.perf_counter()
    model: Any = (StationaryClassifier if name.startswith("c_") else StationaryRegressor)(random_state=0).fit(x, y)
    seconds = time.perf_counter() - began
    scores = (score_classes if name.startswith("c_") else score_regression)(model, new, truth)
    head = {"table": name, "fold": fold, "seed": 0, "rows": len(x), "seconds": seconds}
    return head | scores | detect(model, x, new, fold) | far_away(model, x) | provenance("cpu")


def run(options: argparse.Namespace) -> None:
    path = options.out / "rows.jsonl"
    done = {(row["table"], row["fold"]) for row in read_rows(path)}
    with np.load(data_folder() / "suite.npz") as data:
        names = sorted({name[:-2] for name in data.files})
    wanted = [(name, fold) for name in options.tables or names for fold in range(5) if (name, fold) not in done]
    rows: Any = Parallel(options.jobs, return_as="generator_unordered")(delayed(run_one)(*job) for job in wanted)
    for row in rows:
        add_rows(path, [row], lambda r: (r["table"], r["fold"]))
        print(row["table"], row["fold"], f"{row['nlpd']:.3f} in {row['seconds']:.1f} s", flush=True)


# ---------------------------------------------------------------------- the report


def table_means(kind: str, peers: tuple[str, ...], out: Path) -> dict[str, dict[str, float]]:
    """Mean NLPD over folds of each table, of ours and of the peers that ran on it."""
    rows: list[Row] = [row | {"model": "ours"} for row in read_rows(out / "rows.jsonl")]
    rows += [json.loads(line) for line in (data_folder() / "suite-peers.jsonl").read_text().splitlines()]
    means: dict[str, dict[str, float]] = {}
    for name in sorted({row["table"] for row in rows if row["table"].startswith(kind)}):
        for model in ("ours", *peers):
            values = [row["nlpd"] for row in rows if (row["table"], row["model"]) == (name, model)]
            if len(values) == 5:
                means.setdefault(name, {})[model] = float(np.mean(values))
    return means


def ranks(means: dict[str, dict[str, float]], model: str) -> list[int]:
    """Rank of a model on each table that it ran on, among all that ran there."""
    return [1 + sum(v < values[model] for v in values.values()) for values in means.values() if model in values]


def markdown(means: dict[str, dict[str, float]], models: tuple[str, ...]) -> list[str]:
    lines = [f"| table | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|"]
    for name, values in means.items():
        best = min(values.values())
        cells = [
            f"**{values[m]:.3f}**" if values.get(m) == best else f"{values[m]:.3f}" if m in values else ""
            for m in models
        ]
        lines.append(f"| {name[2:]} | {' | '.join(cells)} |")
    shared = [values for values in means.values() if all(m in values for m in models if m != "gp")]
    cells = [f"{np.mean([values[m] for values in shared if m in values]):.3f}" if m != "gp" else "" for m in models]
    lines.append(f"| mean | {' | '.join(cells)} |")
    lines.append(f"| mean rank | {' | '.join(f'{np.mean(ranks(means, m)):.2f}' for m in models)} |")
    return lines


def picture(means: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Mean ranks, the smaller the better."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    for axes, (title, tables) in zip(figure.subplots(1, 2), means.items(), strict=True):
        models = list(dict.fromkeys(m for table in tables.values() for m in table))
        values = {m: float(np.mean(ranks(tables, m))) for m in models}
        order = sorted(values, key=lambda m: -values[m])
        axes.barh(order, [values[m] for m in order], color=["#4472b5" if m == "ours" else "#b8bec8" for m in order])
        axes.set(title=title, xlabel="mean rank, by negative log predictive density")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def report(options: argparse.Namespace) -> None:
    rows = read_rows(options.out / "rows.jsonl")
    classes = table_means("c_", CLASS_PEERS, options.out)
    regression = table_means("r_", REGRESSION_PEERS, options.out)
    lines = ["# The suite in numbers", "", "Made by `python benchmarks/suite.py report`: NLPD, mean over five folds."]
    lines += ["", "## Classes", "", *markdown(classes, ("ours", *CLASS_PEERS))]
    lines += ["", "## Regression", "", *markdown(regression, ("ours", *REGRESSION_PEERS))]

    def mean(name: str, kept: Any) -> float:
        return float(
            np.mean(
                [
                    np.mean([r[name] for r in rows if r["table"] == t])
                    for t in sorted({r["table"] for r in rows if kept(r)})
                ]
            )
        )

    lines += ["", "## Calibration, and rows unlike the data", "", "| what | mean over tables |", "|---|---|"]
    lines.append(f"| ECE, classes | {mean('ece', lambda r: r['table'].startswith('c_')):.3f} |")
    small = mean("coverage_90", lambda r: r["table"].startswith("r_") and r["rows"] * 1.25 < 300)
    lines.append(f"| coverage of 90 %, tables below 300 rows | {small:.3f} |")
    large = [r["coverage_by_quartile"] for r in rows if r["table"].startswith("r_") and r["rows"] * 1.25 > 300]
    lines.append(f"| by quartile of the predicted mean, above | {', '.join(f'{v:.3f}' for v in np.mean(large, 0))} |")
    lines.append(
        f"| standard deviation far away over the prior's | {mean('far_mean', lambda r: r['table'].startswith('r_')):.3f} |"
    )
    far_high = mean("far_high", lambda r: r["table"].startswith("c_"))
    lines.append(f"| largest distance from uniform far away, 95 % quantile | {far_high:.3f} |")
    lines.append(f"| false alarms at 0.05 | {mean('false_alarms', lambda _: True):.3f} |")
    kinds = ("permuted", "shifted_3", "shifted_10")
    lines += ["", f"| AUROC | {' | '.join(kinds)} | mean |", "|---|---|---|---|---|"]
    for detector in DETECTORS:
        aurocs = [mean(f"auroc_{kind}_{detector}", lambda _: True) for kind in kinds]
        lines.append(f"| {detector} | {' | '.join(f'{v:.3f}' for v in aurocs)} | {np.mean(aurocs):.3f} |")
    (options.out / "suite.md").write_text("\n".join(lines) + "\n")
    picture({"classes": classes, "regression": regression}, options.out / "ranks.svg")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--tables", nargs="*", default=None)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "suite")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    {"run": run, "report": report}[options.what](options)


if __name__ == "__main__":
    main()
