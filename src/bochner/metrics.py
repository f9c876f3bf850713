"""Metrics of predictions: functions of arrays that return a float. Lower is better unless the docstring says otherwise.

Out-of-distribution metrics take the scores of both sets, higher meaning more out of distribution, and count the
out-of-distribution inputs as positives.
"""

from numbers import Integral, Real

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import auc as area
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve


def _finite_arrays(**values: ArrayLike) -> list[np.ndarray]:
    """Float arrays, after checking that each is finite and not empty."""
    arrays = []
    for name, value in values.items():
        try:
            array = np.asarray(value, dtype=float)
        except (TypeError, ValueError) as error:
            raise ValueError(f"The {name} parameter must hold numbers: {error}.") from error
        if np.iscomplexobj(value):
            raise ValueError(f"The {name} parameter must hold real numbers, got complex ones.")
        if array.size == 0 or not np.isfinite(array).all():
            raise ValueError(
                f"The {name} parameter must hold at least one number and no NaN or infinity, got shape {array.shape}."
            )
        arrays.append(array)
    return arrays


def rmse(y: ArrayLike, mean: ArrayLike) -> float:
    """Root mean squared error."""
    y_, mean_ = _finite_arrays(y=y, mean=mean)
    if y_.shape != mean_.shape:
        raise ValueError(f"The mean parameter must have the shape of y, {y_.shape}, got {mean_.shape} instead.")
    return float(np.sqrt(np.mean((y_ - mean_) ** 2)))


def nlpd(log_prob: ArrayLike, *, target_scale: float = 1.0) -> float:
    """Mean negative log predictive density.

    Args:
        log_prob: Log density of each target, in the units that the model was trained in.
        target_scale: The number that targets were divided by before training. The density in original units is the density
            in the model's units divided by it. 1 keeps the units of the model.
    """
    if isinstance(target_scale, bool) or not isinstance(target_scale, Real) or not 0 < target_scale <= 1e300:
        raise ValueError(f"The target_scale parameter must be positive and finite, got {target_scale!r} instead.")
    return float(-np.mean(_finite_arrays(log_prob=log_prob)[0]) + np.log(target_scale))


def _labels_and_probabilities(y: ArrayLike, probabilities: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Class labels (n,) and probabilities (n, c) as arrays, after checking that labels are the numbers of columns."""
    (probabilities,) = _finite_arrays(probabilities=probabilities)
    if probabilities.ndim != 2:
        raise ValueError(f"The probabilities parameter must have shape (n, c), got {probabilities.shape} instead.")
    labels = np.asarray(y)
    if labels.shape != probabilities.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"The y parameter must hold {len(probabilities)} integer labels, one for each row of probabilities, "
            f"got {labels.dtype} of shape {labels.shape}."
        )
    if labels.min() < 0 or labels.max() >= probabilities.shape[1]:
        raise ValueError(
            f"The y parameter must hold labels from 0 to {probabilities.shape[1] - 1}, the columns of probabilities, "
            f"got {labels.min()} to {labels.max()}."
        )
    return labels, probabilities


def accuracy(y: ArrayLike, probabilities: ArrayLike) -> float:
    """Share of rows whose most probable class is right; higher is better."""
    labels, p = _labels_and_probabilities(y, probabilities)
    return float(np.mean(p.argmax(-1) == labels))


def auc(y: ArrayLike, probabilities: ArrayLike) -> float:
    """Area under the ROC curve; for more than two classes the mean over one-against-rest. Higher is better."""
    labels, p = _labels_and_probabilities(y, probabilities)
    if len(np.unique(labels)) < 2:
        raise ValueError(f"AUC needs at least two classes among the labels, got only {np.unique(labels).tolist()}.")
    if p.shape[-1] == 2:
        return float(roc_auc_score(labels, p[:, 1]))
    return float(roc_auc_score(labels, p / p.sum(-1, keepdims=True), multi_class="ovr", labels=np.arange(p.shape[-1])))


def brier(y: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean squared distance between probabilities and the one-hot label, between 0 and 2."""
    labels, p = _labels_and_probabilities(y, probabilities)
    return float(np.mean(np.sum((p - np.eye(p.shape[-1])[labels]) ** 2, -1)))


def ece(y: ArrayLike, probabilities: ArrayLike, *, bins: int = 15) -> float:
    """Expected calibration error: |accuracy − confidence| averaged over equal-width bins of confidence."""
    labels, p = _labels_and_probabilities(y, probabilities)
    if isinstance(bins, bool) or not isinstance(bins, Integral) or not 1 <= bins <= 10**6:
        raise ValueError(f"The bins parameter must be an integer from 1 to 1000000, got {bins!r} instead.")
    confidence, correct = p.max(-1), p.argmax(-1) == labels
    index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(index, weights=correct - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(p))


def coverage(y: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> float:
    """Share of targets inside their interval; best when it equals the nominal coverage."""
    y_, low, high = _finite_arrays(y=y, lower=lower, upper=upper)
    if not y_.shape == low.shape == high.shape:
        raise ValueError(
            f"The lower and upper parameters must have the shape of y, {y_.shape}, got {low.shape} and {high.shape} instead."
        )
    return float(np.mean((low <= y_) & (y_ <= high)))


def _ood_labels_and_scores(inside: ArrayLike, outside: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Labels (0 inside, 1 outside) and scores of all inputs."""
    scores = [a.ravel() for a in _finite_arrays(inside=inside, outside=outside)]
    return np.repeat([0, 1], [len(s) for s in scores]), np.concatenate(scores)


def ood_auc(inside: ArrayLike, outside: ArrayLike) -> float:
    """Probability that an outside input scores above an inside one; higher is better."""
    return float(roc_auc_score(*_ood_labels_and_scores(inside, outside)))


def ood_aupr(inside: ArrayLike, outside: ArrayLike, *, weight: float = 1.0, trapezoid: bool = False) -> float:
    """Average precision of detecting the outside inputs; higher is better, and chance level is their share.

    Args:
        inside: Scores of the inputs that are in distribution.
        outside: Scores of those that are not.
        weight: How many inputs each outside one stands for, where they are a sample of a larger set.
        trapezoid: Whether to join the points of the curve by straight lines: common, but too optimistic.
    """
    labels, scores = _ood_labels_and_scores(inside, outside)
    weights = np.where(labels == 1, weight, 1.0)
    if trapezoid:
        precision, recall, _ = precision_recall_curve(labels, scores, sample_weight=weights)
        return float(area(recall, precision))
    return float(average_precision_score(labels, scores, sample_weight=weights))


def fpr95(inside: ArrayLike, outside: ArrayLike) -> float:
    """Share of inside inputs flagged at the threshold that flags 95 % of the outside ones."""
    fpr, tpr, _ = roc_curve(*_ood_labels_and_scores(inside, outside), drop_intermediate=False)
    return float(fpr[np.argmax(tpr >= 0.95)])
