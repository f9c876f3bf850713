"""A data set cut into the paper's folds, and the metrics of each fold."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bochner import metrics
from bochner.datasets import Dataset, folds
from bochner.experiments.rows import Row
from bochner.predictive import GaussianPredictive, Predictive


@dataclass
class Data:
    """A data set cut into folds, each standardised by its own training rows.

    Attributes:
        x: Inputs of all folds one after another, (F·N, d).
        y: Targets, (F·N, 1) floats or (F·N,) labels.
        train: Rows of x for training in each fold, (F, n).
        test: Rows of x for testing, (F, m).
        classes: Number of classes, None for regression.
    """

    x: Tensor
    y: Tensor
    train: Tensor
    test: Tensor
    classes: int | None

    @classmethod
    def of(cls, data: Dataset, chosen: Sequence[int], device: str, *, scaled: Collection[str] | None = None) -> "Data":
        """Cuts and standardises; a column that is constant in training stays at zero.

        Args:
            data: The data set.
            chosen: Its folds, by number.
            device: Where the tensors go.
            scaled: Names of the inputs to standardise; all of them by default. The others stay as they are.
        """
        splits = [folds(len(data.x))[f] for f in chosen]
        fixed = np.array([scaled is not None and name not in scaled for name in data.features])
        inputs, targets = [], []
        for train, _ in splits:
            inputs.append(np.where(fixed, data.x, _standardise(data.x, train)))
            targets.append(_standardise(data.y[:, None], train) if data.classes is None else data.y)
        offset = torch.arange(len(splits))[:, None] * len(data.x)
        x = torch.from_numpy(np.concatenate(inputs)).float()
        y = torch.from_numpy(np.concatenate(targets))
        train = torch.from_numpy(np.stack([t for t, _ in splits])).long() + offset
        test = torch.from_numpy(np.stack([t for _, t in splits])).long() + offset
        y = y.float() if data.classes is None else y.long()
        return cls(x.to(device), y.to(device), train.to(device), test.to(device), data.classes)

    def halves(self) -> tuple[Tensor, Tensor]:
        """Training rows without, and of, the last fifth, which validates: (F, n₁) and (F, n₂)."""
        cut = int(0.8 * self.train.shape[1])
        return self.train[:, :cut], self.train[:, cut:]


def _standardise(values: np.ndarray, train: np.ndarray) -> np.ndarray:
    mean, std = values[train].mean(0), values[train].std(0)
    return (values - mean) / np.where(std > 0, std, 1.0)


def score_folds(prediction: Predictive, y: Tensor) -> list[Row]:
    """Metrics of each fold, in standardised units; None for all of them where a prediction is not finite."""
    log_prob = prediction.log_prob(y).double().cpu().numpy()
    score = _score_targets if isinstance(prediction, GaussianPredictive) else _score_classes
    values = prediction.mean if isinstance(prediction, GaussianPredictive) else prediction.probabilities  # pyright: ignore[reportAttributeAccessIssue]
    folds = zip(values.double().cpu().numpy(), log_prob, y.cpu().numpy(), strict=True)
    return [score(predicted, density, target) for predicted, density, target in folds]


def _score_targets(mean: np.ndarray, log_prob: np.ndarray, target: np.ndarray) -> Row:
    if not (np.isfinite(log_prob).all() and np.isfinite(mean).all()):
        return {"nlpd": None, "rmse": None}
    return {"nlpd": metrics.nlpd(log_prob), "rmse": metrics.rmse(target, mean)}


def _score_classes(p: np.ndarray, log_prob: np.ndarray, target: np.ndarray) -> Row:
    if not (np.isfinite(log_prob).all() and np.isfinite(p).all()):
        return {"nlpd": None, "accuracy": None, "auc": None}
    accuracy, auc = metrics.accuracy(target, p), metrics.auc(target, p)
    return {"nlpd": metrics.nlpd(log_prob), "accuracy": accuracy, "auc": auc}
