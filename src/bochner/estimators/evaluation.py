"""Metrics of a fitted estimator on rows that it has not learnt from."""

from typing import Any

import numpy as np
from scipy.stats import norm
from sklearn.metrics import r2_score

from bochner import metrics
from bochner.predictive import central_interval


def mixture_metrics(y: np.ndarray, mean: np.ndarray, log_density: np.ndarray, interval: np.ndarray) -> dict[str, float]:
    """RMSE, NLPD, coverage and mean width of the 90 % interval, and R² from two rows on; of any predictive distribution.

    Args:
        y: Targets, (n,).
        mean: Predictive means, (n,).
        log_density: Log predictive density of each target, (n,).
        interval: Ends of the 90 % interval of each row, (n, 2).
    """
    low, high = interval.T
    scores = {"rmse": metrics.rmse(y, mean), "nlpd": metrics.nlpd(log_density)}
    scores |= {"coverage_90": metrics.coverage(y, low, high), "width_90": float(np.mean(high - low))}
    return scores | ({"r2": float(r2_score(y, mean))} if len(y) > 1 else {})


def regression_metrics(y: np.ndarray, mean: np.ndarray, std: np.ndarray) -> dict[str, float]:
    """``mixture_metrics`` where every predictive distribution is a Gaussian."""
    return mixture_metrics(y, mean, norm.logpdf(y, mean, std), np.column_stack(central_interval(mean, std, 0.9)))


def class_metrics(labels: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """Accuracy, NLPD and ECE, and AUC where there are two classes and rows of both classes."""
    log_prob = np.log(np.maximum(p[np.arange(len(labels)), labels], np.finfo(float).tiny))
    scores = {"accuracy": metrics.accuracy(labels, p), "nlpd": metrics.nlpd(log_prob), "ece": metrics.ece(labels, p)}
    return scores | ({"auc": metrics.auc(labels, p)} if p.shape[1] == 2 == len(np.unique(labels)) else {})


def measure(estimator: Any, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Metrics of a fitted estimator on rows that it has not learnt from, and the share of rows beyond its threshold."""
    common = {"rows": len(x), "flagged": float(np.mean(estimator.ood_score(x) > estimator.ood_threshold_))}
    if hasattr(estimator, "classes_"):
        return common | class_metrics(np.searchsorted(estimator.classes_, y), estimator.predict_proba(x))
    interval = estimator.predict_interval(x, 0.9)
    return common | mixture_metrics(y, estimator.predict(x), estimator.log_prob(x, y), interval)
