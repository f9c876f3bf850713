"""What more rows bring, beside gradient boosting on the same rows: negative log predictive density (NLPD) and seconds.

    python benchmarks/more_rows.py generated 10000 100000 1000000 [--out results/benchmarks/more-rows.jsonl]
    python benchmarks/more_rows.py covtype 10000 100000 500000

The first rows of a shuffled table are learnt from; 20,000 others are predicted. ``generated`` is the regression of
``benchmarks/out_of_core.py`` in numbers alone; ``covtype`` has seven classes (read from BOCHNER_DATA). Boosting has the same
rows and the same time: a third of it for each of three learning rates, which end sooner where a tenth of the rows gets no more
probable. The rate with the best density on that tenth counts. Its density for a regression is normal, with the standard
deviation of that tenth's residuals. Adds a row for each size.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from bochner import StationaryClassifier, StationaryRegressor
from bochner.experiments.rows import Row, add_rows, provenance

TEST_ROWS = 20_000
BATCH_ROWS = 20_000
LEARNING_RATES = (0.03, 0.1, 0.3)
TREES_AT_ONCE = 50  # trees between two looks at the clock
LEAST_PROBABILITY = 1e-12  # of a class, in log losses

Arrays = tuple[np.ndarray, np.ndarray]
Score = Callable[[np.ndarray, np.ndarray], float]  # NLPD of inputs and targets


def generated(rows: int) -> Arrays:
    """Twenty numbers, of which seven matter, and a target with noise 0.3: no forecast has a lower NLPD than 0.215."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 20))
    x[:, 18], x[:, 19] = rng.random(rows) < 0.3, rng.integers(1, 9, rows)
    f = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + np.abs(x[:, 3]) + x[:, 18] * x[:, 4] + 0.2 * x[:, 19]
    return x, f + 0.3 * rng.normal(size=rows)


def covtype(rows: int) -> Arrays:
    from bochner import datasets

    data = datasets.load("covtype")
    order = np.random.default_rng(0).permutation(len(data.x))[:rows]
    return data.x[order], data.y[order]


def ours(x: np.ndarray, y: np.ndarray, classes: bool) -> Score:
    batches = [(x[start : start + BATCH_ROWS], y[start : start + BATCH_ROWS]) for start in range(0, len(x), BATCH_ROWS)]
    model = (StationaryClassifier if classes else StationaryRegressor)(random_state=0).fit_batches(batches)
    if isinstance(model, StationaryRegressor):
        return lambda x, y: -float(np.mean(model.log_prob(x, y)))
    return lambda x, y: _class_nlpd(model, x, y)


def _class_nlpd(model: StationaryClassifier | HistGradientBoostingClassifier, x: np.ndarray, y: np.ndarray) -> float:
    probabilities = np.clip(model.predict_proba(x), LEAST_PROBABILITY, 1)
    return float(log_loss(y, probabilities / probabilities.sum(1, keepdims=True), labels=model.classes_))


def boosting(x: np.ndarray, y: np.ndarray, classes: bool, seconds: float) -> Score:
    fit, judge = train_test_split(np.arange(len(y)), test_size=0.1, random_state=0, stratify=y if classes else None)
    x_fit, x_judge, y_fit, y_judge = x[fit], x[judge], y[fit], y[judge]
    kind = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    options = {"max_leaf_nodes": 63, "early_stopping": True, "warm_start": True, "random_state": 0}
    scores = []
    for rate in LEARNING_RATES:
        end = time.perf_counter() + seconds / len(LEARNING_RATES)
        model = kind(learning_rate=rate, max_iter=TREES_AT_ONCE, **options).fit(
            x_fit, y_fit, X_val=x_judge, y_val=y_judge
        )
        while model.n_iter_ == model.max_iter and time.perf_counter() < end:
            model.set_params(max_iter=model.max_iter + TREES_AT_ONCE).fit(x_fit, y_fit, X_val=x_judge, y_val=y_judge)
        scores.append(_score_of(model, x_judge, y_judge))
    return min(scores, key=lambda score: score(x_judge, y_judge))


def _score_of(
    model: HistGradientBoostingClassifier | HistGradientBoostingRegressor, x_judge: np.ndarray, y_judge: np.ndarray
) -> Score:
    if isinstance(model, HistGradientBoostingClassifier):
        return lambda x, y: _class_nlpd(model, x, y)
    std = float(np.std(y_judge - model.predict(x_judge)))
    return lambda x, y: float(
        np.mean(0.5 * ((y - model.predict(x)) / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi))
    )


def measure(name: str, rows: int) -> Row:
    classes = name == "covtype"
    x, y = (covtype if classes else generated)(TEST_ROWS + rows)
    x_test, y_test, x, y = x[:TEST_ROWS], y[:TEST_ROWS], x[TEST_ROWS:], y[TEST_ROWS:]
    row: Row = {"benchmark": "more-rows", "set": name, "rows": len(x), "test_rows": TEST_ROWS}
    began = time.perf_counter()
    scores = {"ours": ours(x, y, classes)}
    row["ours_seconds"] = round(time.perf_counter() - began, 1)
    began = time.perf_counter()
    scores["boosting"] = boosting(x, y, classes, row["ours_seconds"])
    row["boosting_seconds"] = round(time.perf_counter() - began, 1)
    row |= {f"{method}_nlpd": round(score(x_test, y_test), 4) for method, score in scores.items()}
    return row | provenance()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=("generated", "covtype"))
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/more-rows.jsonl"))
    options = parser.parse_args()
    for rows in sorted(options.rows):
        row = measure(options.set, rows)
        print(json.dumps(row), flush=True)
        add_rows(options.out, [row], lambda r: (r["set"], r["rows"]))


if __name__ == "__main__":
    main()
