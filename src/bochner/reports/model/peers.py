"""The models that a user would try instead, fitted to the same rows and the same encoded columns; and how all of them do."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV

from bochner.estimators.evaluation import Forecast, class_metrics, forecast_metrics, regression_metrics
from bochner.reports.model.rows import Rows, class_numbers, is_regression, losses, mean_error, shown_values

TREES = 100  # trees of the random forest
TREE_ROWS = 5000  # most rows that a tree learns from: a report on a large table must not take long
SEED = 0  # of the random forest
OURS = "this model"


@dataclass(frozen=True)
class Score:
    """The results of one model on rows that it has not seen.

    Attributes:
        name: Name of the model.
        metrics: As ``bochner evaluate`` names them.
        error: RMSE, or log loss.
        error_se: Its standard error over the rows.
        loss: Squared error, or log loss, of each row.
    """

    name: str
    metrics: dict[str, float]
    error: float
    error_se: float
    loss: np.ndarray


def score(model: Any, name: str, metrics: dict[str, float], y: np.ndarray, predictions: np.ndarray) -> Score:
    """The score of a model from its metrics and its predictions, (n, 1 or more) or class probabilities."""
    loss = losses(model, y, predictions)
    error = mean_error(model, loss)
    spread = float(loss.std(ddof=1)) / math.sqrt(len(loss)) if len(loss) > 1 else 0.0
    return Score(name, metrics, error, spread / (2 * error) if is_regression(model) and error else spread, loss)


def own_score(model: Any, held: Rows, predicted: Forecast) -> Score:
    """The score of the reported model itself, from its forecast of the rows."""
    y: Any = held.y
    return score(model, OURS, forecast_metrics(model.estimator_, y, predicted), y, shown_values(model, predicted))


def constant_score(model: Any, name: str, known: np.ndarray, y: np.ndarray) -> Score:
    """The score of a constant prediction: mean and standard deviation, or class shares, of known targets."""
    if is_regression(model):
        return _gaussian(model, name, y, np.full(len(y), known.mean()), float(known.std()))
    shares = np.array([np.mean(known == label) for label in model.estimator_.classes_])
    return _probabilities(model, name, y, np.tile(shares, (len(y), 1)))


def peer_scores(model: Any, train: Rows, held: Rows, say: Callable[[str], None]) -> list[Score]:
    """Scores of a linear model, a random forest and the mean, fitted to ``train``."""
    encode = model.estimator_.columns_.transform
    x, new = encode(train.clean), encode(held.clean)
    known: Any = train.y
    y: Any = held.y
    fit = _regressions if is_regression(model) else _classifications
    say(f"the report fits a linear model and a random forest to {len(train)} rows, to compare with")
    name = "the mean" if is_regression(model) else "class shares"
    return [*fit(model, x, known, new, y), constant_score(model, name, known, y)]


def _regressions(model: Any, x: np.ndarray, known: np.ndarray, new: np.ndarray, y: np.ndarray) -> list[Score]:
    """Scores of Gaussian predictions whose standard deviation is that of the errors on rows that a fit left out."""
    # Targets near 1: ridge's penalties and sums of squares are of that size.
    centre, scale = float(known.mean()), float(known.std()) or 1.0
    scaled = (known - centre) / scale
    line: Any = RidgeCV(alphas=np.logspace(-3, 3, 7)).fit(x, scaled)
    trees: Any = RandomForestRegressor(TREES, oob_score=True, max_samples=_per_tree(x), random_state=SEED)
    trees.fit(x, scaled)
    missed = float(np.sqrt(np.mean((scaled - trees.oob_prediction_) ** 2)))
    means = [centre + scale * peer.predict(new) for peer in (line, trees)]
    widths = [scale * math.sqrt(-line.best_score_), scale * missed]
    names = ("a linear model", "a random forest")
    return [_gaussian(model, name, y, mean, width) for name, mean, width in zip(names, means, widths, strict=True)]


def _per_tree(x: np.ndarray) -> int | None:
    return TREE_ROWS if len(x) > TREE_ROWS else None


def _gaussian(model: Any, name: str, y: np.ndarray, mean: np.ndarray, std: float) -> Score:
    metrics = regression_metrics(y, mean, np.full(len(y), max(std, np.finfo(float).tiny)))
    return score(model, name, metrics, y, mean[:, None])


def _classifications(model: Any, x: np.ndarray, known: np.ndarray, new: np.ndarray, y: np.ndarray) -> list[Score]:
    labels = class_numbers(model, known)
    line = LogisticRegression(max_iter=5000).fit(x, labels)
    trees = RandomForestClassifier(TREES, max_samples=_per_tree(x), random_state=SEED).fit(x, labels)
    # A forest says 0 where no tree votes for a class. One vote for each class more keeps its log loss finite.
    votes = TREES * np.asarray(trees.predict_proba(new)) + 1
    shares = votes / votes.sum(1, keepdims=True)
    return [
        _probabilities(model, "a linear model", y, line.predict_proba(new)),
        _probabilities(model, "a random forest", y, shares),
    ]


def _probabilities(model: Any, name: str, y: np.ndarray, p: np.ndarray) -> Score:
    return score(model, name, class_metrics(class_numbers(model, y), p), y, p)


def verdict_on(ours: Score, peer: Score) -> str:
    """'better', 'equal' or 'worse': equal where the mean difference of the rows' losses is within two standard errors."""
    difference = ours.loss - peer.loss
    error = difference.std(ddof=1) / math.sqrt(len(difference)) if len(difference) > 1 else math.inf
    if abs(difference.mean()) <= 2 * error:
        return "equal"
    return "better" if difference.mean() < 0 else "worse"


def within_two_errors(observed: float, expected: float, count: int) -> bool:
    """Whether a share of ``count`` rows is within two standard errors of what it should be."""
    error = math.sqrt(max(expected * (1 - expected), 0.25 / max(count, 1)) / max(count, 1))
    return abs(observed - expected) <= float(norm.ppf(0.9772)) * error
