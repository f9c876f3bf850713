"""A fitted estimator whose heads predict by one matrix product each, where that says the same."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bochner.estimators.evaluation import Forecast, forecast
from bochner.members.compact import CompactHead

PROBES = 128  # rows of each kind that the products are compared with the estimator on
MAX_DIFFERENCE = (
    1e-4  # of means and ends of intervals in standard deviations, of standard deviations as a share, of probabilities
)
SCORE_STEPS = (
    4.0  # steps of an OOD score, 1 / (reference rows + 1), that it may move: a row between two of them goes either way
)


def quick(estimator: Any) -> Any:
    """The estimator with heads as products in float32, or in float64; the estimator itself where both differ from it too much.

    Args:
        estimator: A fitted StationaryRegressor or StationaryClassifier with one target.
    """
    rows = _probes(estimator)
    exact = forecast(estimator, rows)
    unit = 1.0 if hasattr(estimator, "classes_") else exact.values[:, 1:2]
    for dtype in (torch.float32, torch.float64):
        try:
            candidate = _with_products(estimator, dtype)
        except torch.linalg.LinAlgError:  # an eigenvalue that is not found
            continue
        if _agree(exact, forecast(candidate, rows), unit, 1 / (1 + len(estimator.novelty_.left))):
            return candidate
    return estimator


def _with_products(estimator: Any, dtype: torch.dtype) -> Any:
    (mixture,) = estimator.mixtures_
    members = [replace(member, head=CompactHead(member.head, dtype)) for member in mixture.members]
    compact = copy.copy(estimator)
    compact.mixtures_ = [replace(mixture, members=members)]
    return compact


def _probes(estimator: Any) -> Tensor:
    """Rows to compare on: training rows, rows mixed from two of them, and rows far away."""
    features = estimator.mixtures_[0].members[0].head.features  # the first member always stands on the columns
    known = (features.anchors * features.lengthscale)[:PROBES]
    between = 0.5 * (known + known.roll(1, 0))
    return torch.cat([known, between, 3 * known.roll(2, 0) - 2 * known, 100 * known])


def _agree(exact: Forecast, found: Forecast, unit: Any, score_step: float) -> bool:
    """Whether two forecasts say the same of rows.

    Args:
        exact: The estimator's own forecast.
        found: Another one.
        unit: In what values are compared: standard deviations, (n, 1), or 1 for probabilities.
        score_step: The smallest difference between two scores.
    """
    close = abs(exact.values - found.values) <= MAX_DIFFERENCE * unit
    return bool(close.all() and (abs(exact.scores - found.scores) <= SCORE_STEPS * score_step).all())
