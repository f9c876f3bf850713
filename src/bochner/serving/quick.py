"""A fitted estimator whose heads predict by one matrix product each, where that says the same."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bochner.estimators.evaluation import Forecast, forecast
from bochner.members.compact import CompactHead

PROBES = 300  # rows of each kind that the products are compared with the estimator on
# Probabilities of the intervals that are compared, and the largest difference of means and ends in standard deviations, of standard
# deviations as a share, and of probabilities. What is promised is 1e-4; the usual interval leaves a margin for other rows.
MAX_DIFFERENCES = {0.9: 1e-5, 0.999999: 1e-4}
# How far an OOD score may move: so many of its steps, 1 / (reference rows + 1), for a row between two of them goes either way, and
# never farther than the difference.
MAX_SCORE_STEPS = 4.0
MAX_SCORE_DIFFERENCE = 0.02


def quick(estimator: Any) -> Any:
    """The estimator with heads as products in float32, or in float64; the estimator itself where both differ from it too much.

    Args:
        estimator: A fitted StationaryRegressor or StationaryClassifier with one target.
    """
    rows = _probes(estimator)
    exact = {coverage: forecast(estimator, rows, coverage=coverage) for coverage in MAX_DIFFERENCES}
    for dtype in (torch.float32, torch.float64):
        try:
            candidate = _with_products(estimator, dtype)
        except torch.linalg.LinAlgError:  # an eigenvalue that is not found
            continue
        if all(
            _agree(estimator, exact[coverage], forecast(candidate, rows, coverage=coverage), most)
            for coverage, most in MAX_DIFFERENCES.items()
        ):
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
    between, near = 0.5 * (known + known.roll(1, 0)), known + 1e-3 * known.roll(1, 0)
    return torch.cat([known, near, between, 3 * known.roll(2, 0) - 2 * known, 100 * known])


def _agree(estimator: Any, exact: Forecast, found: Forecast, most: float) -> bool:
    """Whether two forecasts say the same of rows, and flag the same ones.

    Args:
        estimator: The estimator.
        exact: Its own forecast.
        found: Another one.
        most: Largest difference, in standard deviations or of probabilities.
    """
    unit = 1.0 if hasattr(estimator, "classes_") else exact.values[:, 1:2]
    close = abs(exact.values - found.values) <= most * unit
    moved = abs(exact.scores - found.scores)
    steps = min(MAX_SCORE_STEPS / (1 + len(estimator.novelty_.left)), MAX_SCORE_DIFFERENCE)
    same_flags = (exact.scores > estimator.ood_threshold_) == (found.scores > estimator.ood_threshold_)
    return bool(close.all() and (moved <= steps).all() and same_flags.all())
