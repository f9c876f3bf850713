"""From a table in a file to a fitted estimator, and from an estimator to the columns that a prediction adds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.model_selection import train_test_split

from bochner import frames
from bochner.activations import unknown
from bochner.estimators import StationaryClassifier, StationaryRegressor

INPUTS = 2000  # most numbers that a row may become
SMALLEST = 10  # rows

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class FittedTable:
    """An estimator and where it comes from.

    Attributes:
        estimator: The fitted estimator.
        encoder: How a table becomes its inputs.
        task: "regression" or "classification".
        train: Inputs and targets that it was fitted to.
        held: Those it was not, as far as their classes are known.
        left_out: Held-out rows of classes without a row to learn from.
    """

    estimator: Any
    encoder: frames.Encoder
    task: str
    train: Arrays
    held: Arrays
    left_out: int


def added_names(target: str, classes: Any) -> list[str]:
    """Names of the columns that a prediction adds; ``classes`` is None for regression."""
    own = ["mean", "std", "low", "high"] if classes is None else ["predicted", *(f"p_{name}" for name in classes)]
    return [*(f"{target}_{name}" for name in own), "ood_score", "ood"]


def predict_table(estimator: Any, encoder: frames.Encoder, frame: Any, coverage: float) -> dict[str, np.ndarray]:
    """The columns that a prediction adds to a table of text, by name."""
    x, names = encoder.transform(frame), added_names(encoder.target, getattr(estimator, "classes_", None))
    score = estimator.ood_score(x)
    unlike = (score, score > estimator.ood_threshold_)
    if hasattr(estimator, "classes_"):
        p = estimator.predict_proba(x)
        return dict(zip(names, (estimator.classes_[p.argmax(1)], *p.T, *unlike), strict=True))
    mean, std = estimator.predict(x, return_std=True)
    low, high = estimator.predict_interval(x, coverage).T
    return dict(zip(names, (mean, std, low, high, *unlike), strict=True))


def _read(path: Path, target: str, dropped: tuple[str, ...], task: str) -> tuple[Any, np.ndarray, str]:
    """The table as text, the target's values and the task, after every check that needs no work."""
    names, rows = frames.look(path)
    if rows < SMALLEST:
        raise frames.TableError(f"At least {SMALLEST} rows are needed, {path} has {rows}.")
    if len(names) > INPUTS:
        raise frames.TableError(f"{path} has {len(names)} columns, more than {INPUTS}; keep those that matter.")
    for name in (target, *dropped):
        if name not in names:
            raise frames.TableError(unknown("target" if name == target else "drop", name, names))
    frame = frames.read(path)
    y, task = frames.check_target(frame, target, task)
    added = added_names(target, np.unique(y) if task == "classification" else None)
    if taken := sorted((set(names) - {target}) & set(added)):
        raise frames.TableError(f"{path} has a column '{taken[0]}', which is what predictions are called; rename it.")
    return frame, y, task


def _split(y: np.ndarray, task: str, share: float, seed: int) -> Arrays:
    """Rows to fit and rows to test on; every class keeps its share where it has rows enough."""
    if share == 0:
        return np.arange(len(y)), np.arange(0)
    counts = np.unique(y, return_counts=True)[1] if task == "classification" else np.array([2])
    tests = max(1, round(share * len(y)))
    stratify = y if task == "classification" and counts.min() >= 2 and tests >= len(counts) else None
    train, test = train_test_split(np.arange(len(y)), test_size=tests, random_state=seed, stratify=stratify)
    return np.sort(train), np.sort(test)


def fit_table(
    path: Path,
    target: str,
    *,
    dropped: tuple[str, ...] = (),
    task: str = "auto",
    share: float = 0.2,
    verbose: bool = False,
    **options: Any,
) -> FittedTable:
    """Fits an estimator to a table, but for a share of its rows.

    Args:
        path: A CSV or Parquet file.
        target: The column to predict.
        dropped: Columns to leave out.
        task: "auto", "regression" or "classification".
        share: Share of rows held out; 0 fits to all.
        verbose: Whether to say what takes time.
        **options: Parameters of the estimator; ``random_state`` also splits the rows.
    """
    frame, y, task = _read(path, target, dropped, task)
    train, held = _split(y, task, share, options["random_state"])
    encoder = frames.Encoder.fit(frame, target, dropped, train)
    if len(encoder.names) > INPUTS:
        inputs = len(encoder.names)
        raise frames.TableError(f"{path} becomes {inputs} inputs, more than {INPUTS}; choose columns with --drop.")
    x = encoder.transform(frame)
    kind = StationaryRegressor if task == "regression" else StationaryClassifier
    estimator = kind(**options, verbose=verbose).fit(x[train], y[train])
    estimator.verbose = False
    known = held[np.isin(y[held], y[train])] if task == "classification" else held
    return FittedTable(estimator, encoder, task, (x[train], y[train]), (x[known], y[known]), len(held) - len(known))
