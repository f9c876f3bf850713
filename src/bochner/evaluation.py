"""How well a fitted estimator does on rows that it has not seen."""

from typing import Any

import numpy as np
from sklearn.metrics import r2_score, roc_auc_score

from bochner import metrics


def measure(estimator: Any, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Metrics of a fitted estimator on rows that it has not seen."""
    flagged = float(np.mean(estimator.ood_score(x) > estimator.ood_threshold_))
    common = {"rows": len(x), "flagged": flagged}
    if hasattr(estimator, "classes_"):
        p = estimator.predict_proba(x)
        labels = np.searchsorted(estimator.classes_, y)
        chosen = np.clip(p[np.arange(len(x)), labels], 1e-300, None)
        found = {
            "accuracy": metrics.accuracy(labels, p),
            "nlpd": float(-np.log(chosen).mean()),
            "ece": metrics.ece(labels, p),
        }
        if p.shape[1] == 2 and len(set(labels)) == 2:
            found["auc"] = float(roc_auc_score(labels, p[:, 1]))
        return common | found
    mean, std = estimator.predict(x, return_std=True)
    low, high = estimator.predict_interval(x, 0.9).T
    z = (y - mean) / std
    return common | {
        "rmse": float(np.sqrt(np.mean((y - mean) ** 2))),
        "nlpd": float(np.mean(0.5 * z**2 + np.log(std) + 0.5 * np.log(2 * np.pi))),
        "coverage_90": float(np.mean((low <= y) & (y <= high))),
        **({"r2": float(r2_score(y, mean))} if len(x) > 1 else {}),
    }
