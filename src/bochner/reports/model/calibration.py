"""Whether intervals and probabilities can be trusted: the card, the charts and the tables of a report about that."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binom

from bochner import metrics
from bochner.reports.model.page import Part, Table
from bochner.reports.model.peers import Score, within_two_errors
from bochner.reports.model.rows import (
    COVERAGE,
    Answered,
    class_numbers,
    is_regression,
    number,
    number_text,
    numbers,
    percent,
    short,
)

INTERVAL_LEVELS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)  # probabilities of the intervals whose coverage is shown
LEVEL_ROWS = 500  # rows whose quantiles are computed
CONFIDENCE_BINS = 10  # bins of confidence in the reliability table
CHANCE = 0.05  # probability that a model whose probabilities are right is said to be off
MAX_TESTED_GROUPS = 5  # groups of about equal size, by how sure the model is, whose shares are tested together
MIN_TESTED_ROWS = 20  # rows of such a group
DRAWS = 20_000  # draws of what chance alone gives
SEED = 0  # of the draws
MAX_LEVELS = 6  # categories whose coverage is shown
MIN_GROUP_ROWS = 10  # rows of a category whose coverage is shown: fewer say nothing
FEW_ROWS = 50  # rows below which the card says that they say little


@dataclass(frozen=True)
class ConfidenceGroups:
    """Rows in groups of about equal size, by how sure the model is of its class; equally sure rows are in one group.

    Attributes:
        rows: Number of rows of each group.
        sure: Mean probability that the model gives its class.
        right: Share of rows in which it is right.
    """

    rows: np.ndarray
    sure: np.ndarray
    right: np.ndarray

    @classmethod
    def of(cls, sure: np.ndarray, right: np.ndarray) -> "ConfidenceGroups":
        """Groups of rows: the probability of the predicted class of each, and whether it is right."""
        count = max(1, min(MAX_TESTED_GROUPS, len(sure) // MIN_TESTED_ROWS))
        number = np.searchsorted(np.quantile(sure, np.arange(1, count) / count), sure)
        parts = [number == each for each in np.unique(number)]
        means = [np.array([values[members].mean() for members in parts]) for values in (sure, right)]
        return cls(np.array([members.sum() for members in parts]), np.minimum(means[0], 1), means[1])

    def differences(self, right: np.ndarray) -> np.ndarray:
        """Shares of rows that are right against what the model promises, in standard deviations of chance."""
        spread = np.sqrt(np.maximum(self.sure * (1 - self.sure), np.finfo(float).eps) / self.rows)
        return (right - self.sure) / spread

    def p_value(self) -> float:
        r"""Probability that chance alone makes the groups of a calibrated model differ as much as these.

        The statistic is $\sum_g (r_g - p_g)^2 / (p_g (1 - p_g) / n_g)$, where $n_g r_g$ is binomial with probability
        $p_g$. It is drawn, for where $p_g$ is near 1 it is far from chi-square. Errors in opposite directions do not cancel in it.
        """
        drawn = np.random.default_rng(SEED).binomial(self.rows, self.sure, (DRAWS, len(self.rows))) / self.rows
        found, chance = ((self.differences(right) ** 2).sum(-1) for right in (self.right, drawn))
        return float(np.mean(chance >= found * (1 - 1e-9)))


def calibration_card(answered: Answered, ours: Score) -> tuple[str, str, bool]:
    """The second question: whether intervals cover, or probabilities are right, as often as they promise."""
    count, model, predictions = len(ours.loss), answered.model, answered.predictions
    if is_regression(model):
        question, what = "Can its intervals be trusted?", "an interval"
        text, care = _interval_answer(ours.metrics["coverage_90"], count)
    else:
        question, what = "Can its probabilities be trusted?", "a probability"
        y: Any = answered.rows.y
        text, care = _probability_answer(predictions.max(1), predictions.argmax(1) == class_numbers(model, y))
    if count < FEW_ROWS:
        text += f" {count} rows say little about {what}."
    return question, text, care or count < FEW_ROWS


def _interval_answer(covered: float, count: int) -> tuple[str, bool]:
    """A sentence on the coverage of intervals, and whether it is a warning."""
    good = within_two_errors(covered, COVERAGE, count)
    verdict = (
        "That is what they promise, within chance."
        if good
        else "They are too narrow: take them with care."
        if covered < COVERAGE
        else "They are wider than they need to be."
    )
    return f"Its 90 % intervals hold the true value in {percent(covered)} of {count:,} rows. {verdict}", (
        covered < COVERAGE and not good
    )


def _probability_answer(sure: np.ndarray, right: np.ndarray) -> tuple[str, bool]:
    """A sentence on the probabilities of the predicted classes, and whether it is a warning."""
    groups, count = ConfidenceGroups.of(sure, right), len(sure)
    mean, share = float(sure.mean()), float(right.mean())
    text = f"It is {percent(mean)} sure on average, and right in {percent(share)} of {count:,} rows."
    away = groups.differences(groups.right)
    lowest = int(np.argmin(away))
    if groups.p_value() >= CHANCE:
        several = f", also in {len(groups.rows)} groups of rows by how sure it is" if len(groups.rows) > 1 else ""
        return f"{text} That agrees, within chance{several}.", False
    if share < mean and not within_two_errors(share, mean, count):
        return f"{text} It is too sure of itself: take its probabilities with care.", True
    if away[lowest] < -2:
        where = f"where it is {percent(groups.sure[lowest])} sure, it is right in {percent(groups.right[lowest])}"
        return f"{text} But {where}: take its probabilities with care.", True
    return f"{text} It could be surer than it is.", False


# ------------------------------------------------------------------ numbers


def interval_part(answered: Answered, names: list[str]) -> tuple[Part, dict[str, Any]]:
    """Calibration of intervals, and coverage in groups by the prediction and by the columns that come first in ``names``."""
    rows = answered.rows.spread(LEVEL_ROWS)
    y: Any = rows.y
    half = np.array(INTERVAL_LEVELS) / 2
    ends = answered.model.estimator_.predict_quantiles(rows.clean, np.concatenate([0.5 - half, 0.5 + half]))
    ends = ends.reshape(len(rows), 2, len(INTERVAL_LEVELS))
    observed = [metrics.coverage(y, ends[:, 0, k], ends[:, 1, k]) for k in range(len(INTERVAL_LEVELS))]
    chart = {
        "type": "lines",
        "x": list(INTERVAL_LEVELS),
        "y": numbers(observed),
        "diagonal": True,
        "xs": [0, 1],
        "ys": [0, 1],
    }
    chart |= {"xlabel": "probability that an interval promises", "ylabel": "share of rows that it holds"}
    groups = Table(
        "Coverage of the 90 % interval in groups of rows: quarters of the prediction, and by the category and the number that "
        f"matter most. If intervals were right, at least {100 * (1 - CHANCE):g} % of groups would lie where chance allows.",
        ["rows with", "rows", "covered", "chance allows", "mean width", "RMSE"],
        _coverage_groups(answered, names),
    )
    levels = Table(
        "Intervals of several levels.",
        ["promised", "held"],
        [[percent(a), percent(b)] for a, b in zip(INTERVAL_LEVELS, observed, strict=True)],
    )
    text = f"Points below the line: intervals are too narrow; above: too wide. From {len(rows):,} rows."
    return Part(
        "Calibration and coverage", text, [("calibration", "Observed against promised coverage")], [groups, levels]
    ), chart


def _coverage_groups(answered: Answered, names: list[str]) -> list[list[Any]]:
    """Lines of the table of groups."""
    y: Any = answered.rows.y
    groups = _quarters("prediction", answered.predictions[:, 0])
    known = {column.name: column for column in answered.model.table_.used}
    for kind, split in (("category", _levels), ("number", _quarters)):
        name = next((name for name in names if known[name].kind == kind), None)
        if name is not None:
            groups += split(short(name), answered.rows.clean[known[name].outputs[0]].to_numpy())
    lines: list[list[Any]] = []
    for name, members in groups:
        mean, low, high = answered.predictions[members].T
        count, covered = int(members.sum()), percent(metrics.coverage(y[members], low, high))
        allowed = binom.interval(1 - CHANCE, count, COVERAGE)
        chance = " to ".join(percent(float(end) / count) for end in allowed)
        lines.append([name, count, covered, chance, float(np.mean(high - low)), metrics.rmse(y[members], mean)])
    return lines


def _quarters(name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Quarters of rows by a number, each with its name; equal numbers are in one group, and missing ones in none."""
    known = ~np.isnan(values)
    if not known.any():
        return []
    index = np.searchsorted(np.quantile(values[known], (0.25, 0.5, 0.75)), values)  # NaN sorts behind all
    groups = [known & (index == quarter) for quarter in range(4)]
    return [
        (f"{name} {number_text(values[members].min())} to {number_text(values[members].max())}", members)
        for members in groups
        if members.any()
    ]


def _levels(name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Rows of the frequent categories of a column, each with its name."""
    texts = np.array(["missing" if pd.isna(value) else str(value) for value in values])
    levels, counts = np.unique(texts, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:MAX_LEVELS]
    return [(f"{name}: {short(levels[at])}", texts == levels[at]) for at in most if counts[at] >= MIN_GROUP_ROWS]


# ------------------------------------------------------------------ classes


def reliability_part(answered: Answered) -> tuple[Part, dict[str, Any]]:
    """Accuracy against confidence in bins of equal width, those of ``metrics.ece``, and for each predicted class."""
    model, predictions = answered.model, answered.predictions
    y: Any = answered.rows.y
    sure, right = predictions.max(1), predictions.argmax(1) == class_numbers(model, y)
    index = np.clip(np.ceil(sure * CONFIDENCE_BINS).astype(int) - 1, 0, CONFIDENCE_BINS - 1)
    bins = [(n, index == n) for n in np.unique(index)]
    lines = [
        [
            f"{100 * n / CONFIDENCE_BINS:.0f} to {100 * (n + 1) / CONFIDENCE_BINS:.0f} %",
            int(members.sum()),
            percent(sure[members].mean()),
            percent(right[members].mean()),
        ]
        for n, members in bins
    ]
    x, up = ([number(float(values[members].mean())) for _, members in bins] for values in (sure, right))
    chart = {"type": "lines", "x": x, "y": up, "diagonal": True, "xs": [0, 1], "ys": [0, 1]}
    chart |= {"xlabel": "probability that it gives its class", "ylabel": "share in which it is right"}
    groups = []
    for label in np.unique(predictions.argmax(1)):
        members = predictions.argmax(1) == label
        name = short(model.estimator_.classes_[label])
        groups.append([name, int(members.sum()), percent(sure[members].mean()), percent(right[members].mean())])
    header = ["rows", "mean probability", "right"]
    tables = [
        Table("By the class that is predicted.", ["predicted", *header], groups, control=len(groups) > 5),
        Table("By the probability of that class.", ["probability", *header], lines),
    ]
    text = "How often the most probable class is right. Below the line: too sure."
    return Part("Reliability", text, [("calibration", "Share right against probability")], tables), chart
