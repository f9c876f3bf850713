"""Rows of a table in a report, and their predictions: every call of the model for a whole report goes through here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from bochner.estimators.evaluation import Forecast

Positions = Sequence[int] | range | np.ndarray

COVERAGE = 0.9  # probability of the intervals in a report
MAX_SHOWN_LETTERS = 60  # most letters of a cell or name that are shown


@dataclass(frozen=True)
class Rows:
    """Rows of a table.

    Attributes:
        frame: The cells as they are in the file.
        clean: The numbers and categories that the model sees of them.
        places: For each row, its line or row number in the file.
        y: Targets, floats or labels; None where they are not known.
    """

    frame: pd.DataFrame
    clean: pd.DataFrame
    places: Sequence[int]
    y: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.clean)

    def take(self, at: Positions) -> "Rows":
        """The rows at some positions."""
        at = np.asarray(at, dtype=int)
        y = None if self.y is None else self.y[at]
        return Rows(self.frame.iloc[at], self.clean.iloc[at], [self.places[i] for i in at], y)

    def spread(self, most: int) -> "Rows":
        """At most so many of them, evenly spaced."""
        return self if len(self) <= most else self.take(np.linspace(0, len(self) - 1, most).round())


@dataclass(frozen=True)
class Answered:
    """Rows with their predictions and OOD scores.

    Attributes:
        model: A fitted TableRegressor or TableClassifier.
        rows: The rows.
        predictions: Mean and both ends of the interval, (n, 3); or class probabilities, (n, c).
        scores: OOD scores, (n,).
        unit: Whether the places of rows are numbers of a "line" or of a "row".
        coverage: Probability of the intervals.
    """

    model: Any
    rows: Rows
    predictions: np.ndarray
    scores: np.ndarray
    unit: str
    coverage: float = COVERAGE

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, at: Positions) -> "Answered":
        """The rows at some positions."""
        at = np.asarray(at, dtype=int)
        return replace(self, rows=self.rows.take(at), predictions=self.predictions[at], scores=self.scores[at])

    def spread(self, most: int) -> "Answered":
        """At most so many of them, evenly spaced."""
        return self if len(self) <= most else self.take(np.linspace(0, len(self) - 1, most).round())

    @property
    def flagged(self) -> int:
        """Number of rows that are flagged as unlike the training data."""
        return int(np.sum(self.scores > self.model.estimator_.ood_threshold_))


def is_regression(model: Any) -> bool:
    """Whether a model for tables predicts a number."""
    return model.target_.task == "regression"


def shown_values(model: Any, predicted: Forecast) -> np.ndarray:
    """The predictions of a forecast that a report shows: mean and both ends of the interval, (n, 3); or probabilities, (n, c)."""
    return predicted.centres_and_ends if is_regression(model) else predicted.values


def centres(model: Any, clean: pd.DataFrame) -> np.ndarray:
    """Predictions without intervals: means, (n, 1), or class probabilities, (n, c)."""
    inner = model.estimator_
    return inner.predict(clean)[:, None] if is_regression(model) else inner.predict_proba(clean)


def class_numbers(model: Any, y: np.ndarray) -> np.ndarray:
    """The column of ``predict_proba`` that each label is."""
    return np.searchsorted(model.estimator_.classes_, y)


def losses(model: Any, y: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Squared error of each row, or minus the log probability of its class; from ``shown_values`` or ``centres``."""
    if is_regression(model):
        return (y - predictions[:, 0]) ** 2
    probability = predictions[np.arange(len(y)), class_numbers(model, y)]
    return -np.log(np.maximum(probability, np.finfo(float).tiny))


def mean_error(model: Any, loss: np.ndarray) -> float:
    """RMSE, or mean log loss, of losses of rows."""
    return math.sqrt(float(loss.mean())) if is_regression(model) else float(loss.mean())


def short(text: Any, most: int = MAX_SHOWN_LETTERS) -> str:
    """A text on one line, cut where it is longer than ``most`` letters."""
    plain = " ".join(str(text).encode("utf-8", "replace").decode().split())
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def number(value: float | None) -> float | None:
    """A number rounded to ten digits, for the data of a page; None where it is missing or not finite.

    The page shows up to nine of them, see ``number_text``.
    """
    return None if value is None or not math.isfinite(value) else float(f"{value:.10g}")


def numbers(values: Any) -> list[float | None]:
    """Several numbers, rounded as by ``number``."""
    return [number(float(value)) for value in values]


def number_text(value: float | None) -> str:
    """A number as text: four digits, with commas from 10,000 on, so that a year has none. ``show`` in page.js has the same rule."""
    value = number(value)
    if value is None:
        return "—"
    if value != 0 and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3g}".replace("-", "−")
    digits = 0 if value == round(value) else max(0, 3 - math.floor(math.log10(abs(value))))
    apart = "," if abs(value) >= 1e4 else ""
    return f"{value or 0:{apart}.{digits}f}".replace("-", "−")


def percent(share: float) -> str:
    """A share as text, in percent."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"
