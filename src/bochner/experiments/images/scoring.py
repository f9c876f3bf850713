"""Rows for the table and figures of CIFAR-10: how well scores tell images of other sets from its own."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from bochner import metrics
from bochner.experiments.rows import Row

OUTSIDE = ("cifar100", "svhn-1083")
FULL_SIZE = {"cifar100": 10_000, "svhn-1083": 26_032}  # images of the test sets that the paper scores

SCORES: dict[str, Callable[[Any], Tensor]] = {
    "entropy": lambda p: p.entropy,
    "marginal_variance": lambda p: p.marginal_variance,
}


def _numbers(values: Tensor) -> np.ndarray:
    return values.double().cpu().numpy()


def _scored(scores: dict[str, Tensor]) -> list[Row]:
    """For each set outside, how well a score tells it from CIFAR-10.

    ``aupr_full`` is the AUPR of the same separation at the base rate of the whole sets; ``aupr_trapezoid`` is the same with
    straight lines between the points of the curve, as in the paper.
    """
    inside = _numbers(scores["cifar10"])
    weight = {name: FULL_SIZE[name] / len(scores[name]) for name in OUTSIDE}
    return [
        {
            "outside": name,
            "aupr_full": metrics.ood_aupr(inside, _numbers(scores[name]), weight=weight[name]),
            "aupr_trapezoid": metrics.ood_aupr(inside, _numbers(scores[name]), weight=weight[name], trapezoid=True),
            "auc": metrics.ood_auc(inside, _numbers(scores[name])),
            "aupr": metrics.ood_aupr(inside, _numbers(scores[name])),
            "fpr95": metrics.fpr95(inside, _numbers(scores[name])),
        }
        for name in OUTSIDE
    ]


def _histogram_row(scores: dict[str, Tensor], entropy: dict[str, Tensor]) -> Row:
    """The row for the figures: histograms of a score over the sets, and the images of lowest and highest entropy."""
    values = {name: _numbers(score) for name, score in scores.items()}
    top = max(float(v.max()) for v in values.values())
    counts = {name: np.histogram(v, bins=50, range=(0, top))[0].tolist() for name, v in values.items()}
    order = {name: np.argsort(_numbers(score), kind="stable") for name, score in entropy.items()}
    ends = {
        "lowest": {n: o[:10].tolist() for n, o in order.items()},
        "highest": {n: o[-10:].tolist() for n, o in order.items()},
    }
    return {"outside": "histogram", "top": top, "counts": counts, **ends}


def prediction_rows(predictions: dict[str, Any], y: Tensor, *, mean_variance: bool = False) -> list[Row]:
    """Rows of one posterior: for every score, each set outside, and the histogram.

    With ``mean_variance`` the marginal variance is the mean over the classes, as in the published code, not their sum.
    """
    inside = predictions["cifar10"]
    common = {
        "accuracy": metrics.accuracy(y.cpu(), inside.probabilities.cpu()),
        "nlpd": -float(inside.log_prob(y).mean()),
    }
    entropy = {name: p.entropy for name, p in predictions.items()}
    rows = []
    for score, of in SCORES.items():
        divisor = inside.probabilities.shape[-1] if mean_variance and score == "marginal_variance" else 1
        scores = {name: of(p) / divisor for name, p in predictions.items()}
        rows += [{"score": score, **common, **row} for row in [*_scored(scores), _histogram_row(scores, entropy)]]
    return rows


def plain_rows(logits: dict[str, Tensor], y: Tensor, protocol: str) -> Iterator[Row]:
    """Maximum probability and energy of a network's outputs, in float64: many confident images would tie in float32."""
    logits = {name: f.double() for name, f in logits.items()}
    log_p = {name: f.log_softmax(-1) for name, f in logits.items()}
    inside = log_p["cifar10"]
    common = {"accuracy": metrics.accuracy(y.cpu(), inside.exp().cpu())}
    common["nlpd"] = -float(inside.gather(-1, y[:, None]).mean())
    for score, of in {
        "max_probability": {name: -p.max(-1).values for name, p in log_p.items()},
        "energy": {name: -f.logsumexp(-1) for name, f in logits.items()},
    }.items():
        yield from ({"protocol": protocol, "score": score, **common, **row} for row in _scored(of))
