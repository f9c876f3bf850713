"""Parts of a report: results of a model as sentences, tables and charts."""

from typing import Any

import numpy as np

from bochner import metrics
from bochner.reports.model.page import Part, Table
from bochner.reports.model.peers import Score, verdict_on, within_two_errors
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
from bochner.reports.model.strange import STRANGE_ROWS, reasons

WORST_ROWS = 10  # rows in the table of the largest errors
INTERVAL_LEVELS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)  # probabilities of the intervals whose coverage is shown
LEVEL_ROWS = 500  # rows whose quantiles are computed
CONFIDENCE_BINS = 10  # bins of confidence in the reliability table
MAX_MATRIX_CLASSES = 12  # classes in a confusion matrix
SHOWN_ROWS = 300  # rows in the table of rows
SHOWN_COLUMNS = 30  # columns in the table of rows
NO_ERROR = 1e-12  # size of a metric below which it is a rounding error
ERRORS = {True: "root mean squared error (RMSE)", False: "log loss (NLPD)"}


def in_units(model: Any, value: float) -> str:
    """An amount of the target, in its unit where it has one."""
    unit = model.target_.column.unit if is_regression(model) else ""
    return f"{number_text(value)} {unit}".strip()


# ------------------------------------------------------------------ questions and answers


def error_card(model: Any, scores: list[Score]) -> tuple[str, str, bool]:
    """The first question of a report: the error of the model beside those of other models."""
    ours, *others = scores
    count = len(ours.loss)
    name = short(model.target_.name)
    if is_regression(model):
        text = (
            f"On {count:,} rows that it has not seen, {name} is typically off by {in_units(model, ours.error)} (RMSE). "
        )
        text += "Instead, " + ", ".join(f"{score.name}: {in_units(model, score.error)}" for score in others) + "."
    else:
        right = ours.metrics["accuracy"]
        text = f"On {count:,} rows that it has not seen, {name} is right in {percent(right)} (log loss {number_text(ours.error)}). "
        text += (
            "Instead, "
            + ", ".join(
                f"{score.name}: {percent(score.metrics['accuracy'])} ({number_text(score.error)})" for score in others
            )
            + "."
        )
    verdicts = {score.name: verdict_on(ours, score) for score in others}
    words = {"better": "better than", "equal": "no different, within chance, from", "worse": "worse than"}
    comparisons = []
    for verdict, phrase in words.items():
        if names := [name for name, other in verdicts.items() if other == verdict]:
            comparisons.append(f"{phrase} {_listed(names)}")
    text += f" It is {', '.join(comparisons)}."
    return "How good is it?", text, "worse" in verdicts.values() or verdicts[others[-1].name] == "equal"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def calibration_card(model: Any, ours: Score, predictions: np.ndarray) -> tuple[str, str, bool]:
    """The second question: whether intervals cover, or probabilities are right, as often as they promise."""
    count = len(ours.loss)
    if is_regression(model):
        covered, what = ours.metrics["coverage_90"], "interval"
        good = within_two_errors(covered, COVERAGE, count)
        text = f"Its 90 % intervals hold the true value in {percent(covered)} of {count:,} rows."
        verdict = (
            "That is what they promise, within chance."
            if good
            else "They are too narrow: take them with care."
            if covered < COVERAGE
            else "They are wider than they need to be."
        )
        question = "Can its intervals be trusted?"
    else:
        sure, right = float(predictions.max(1).mean()), ours.metrics["accuracy"]
        good, what = within_two_errors(right, sure, count), "probability"
        text = f"It is {percent(sure)} sure on average, and right in {percent(right)} of {count:,} rows."
        verdict = (
            "That agrees, within chance."
            if good
            else "It is too sure of itself: take its probabilities with care."
            if right < sure
            else "It could be surer than it is."
        )
        question = "Can its probabilities be trusted?"
    if count < 50:
        verdict += f" {count} rows say little about {'an' if what[0] == 'i' else 'a'} {what}."
    return question, f"{text} {verdict}", "with care" in verdict or count < 50


def novelty_card(model: Any, flagged: int, count: int) -> tuple[str, str, bool]:
    """The third question: how many rows are unlike the training data."""
    expected = model.estimator_.false_alarm
    share = flagged / max(count, 1)
    text = f"{flagged:,} of {count:,} rows ({percent(share)}) are flagged as unlike the training data. "
    more = share > expected and not within_two_errors(share, expected, count)
    text += f"Of ordinary rows {percent(expected)} would be" + (
        ": these rows differ, and what is answered of them is less sure." if more else ", so that is no surprise."
    )
    return "Which rows are unlike the data?", text, more


def _rounded(value: float | None) -> float | None:
    """A metric without rounding errors: an error of 2e-16 is 0."""
    return None if value is None else 0.0 if abs(value) < NO_ERROR else value


def score_part(model: Any, scores: list[Score], note: str) -> tuple[Part, dict[str, Any]]:
    """Errors of all models, as a chart and a table."""
    regression = is_regression(model)
    names = {"rmse": "RMSE", "r2": "R²", "coverage_90": "90 % interval covers", "width_90": "its mean width"}
    names |= {"accuracy": "accuracy", "nlpd": "NLPD", "ece": "calibration error", "auc": "AUC"}
    keys = [key for key in names if key in scores[0].metrics]
    rows = [[score.name, *(_rounded(score.metrics.get(key)) for key in keys)] for score in scores]
    unit = model.target_.column.unit if regression else ""
    items = [
        {
            "name": score.name,
            "value": number(score.error),
            "low": number(score.error - 2 * score.error_se),
            "high": number(score.error + 2 * score.error_se),
            "plain": place > 0,
        }
        for place, score in enumerate(scores)
    ]
    label = f"{ERRORS[regression]} on held-out rows{f', in {unit}' if unit else ''}; shorter is better"
    table = Table(
        "Lower RMSE, NLPD and calibration error are better; higher R², accuracy and AUC.",
        ["model", *(names[k] for k in keys)],
        rows,
    )
    part = Part(
        "Beside other models",
        note,
        [("scores", "Errors on held-out rows, with two standard errors on either side")],
        [table],
    )
    return part, {"type": "bars", "items": items, "xlabel": label}


# ------------------------------------------------------------------ rows


def row_header(answered: Answered) -> list[str]:
    """Names of the columns that the model adds to a row."""
    known = answered.rows.y is not None
    if is_regression(answered.model):
        columns = ["predicted", f"low ({100 * answered.coverage:g} %)", "high"]
        return [*columns, *(["actual", "residual"] if known else []), "strangeness", "flagged"]
    return ["predicted", "probability", *(["actual", "its probability"] if known else []), "strangeness", "flagged"]


def row_cells(answered: Answered) -> list[list[Any]]:
    """The values that the model adds to each row, in the order of ``row_header``."""
    model, y = answered.model, answered.rows.y
    classes = getattr(model.estimator_, "classes_", None)
    lines: list[list[Any]] = []
    for place, prediction in enumerate(answered.predictions):
        if classes is None:
            line = [float(value) for value in prediction]
            line += [] if y is None else [float(y[place]), float(y[place] - prediction[0])]
        else:
            best = int(prediction.argmax())
            line = [short(classes[best]), float(prediction[best])]
            if y is not None:
                line += [short(y[place]), float(prediction[class_numbers(model, y[[place]])[0]])]
        strange = bool(answered.scores[place] > model.estimator_.ood_threshold_)
        lines.append([*line, float(answered.scores[place]), "yes" if strange else "no"])
    return lines


def rows_table(answered: Answered, names: list[str], caption: str, *, key: str = "") -> Table:
    """Rows with their predictions, and their cells as in the file."""
    header = [answered.unit, *row_header(answered), *(short(name) for name in names)]
    cells = [[short(text) for text in answered.rows.frame[name].astype(str)] for name in names]
    lines = [
        [str(answered.rows.places[place]), *line, *(column[place] for column in cells)]
        for place, line in enumerate(row_cells(answered))
    ]
    return Table(caption, header, lines, control=True, key=key)


def strange_part(answered: Answered) -> Part:
    """The rows with the highest OOD scores, and for each the column that makes it strange."""
    strangest = answered.take(np.argsort(-answered.scores, kind="stable")[:STRANGE_ROWS])
    why = reasons(strangest.model, strangest.rows, strangest.scores)
    header = [strangest.unit, "strange column", "its value", *row_header(strangest)]
    lines = [[str(strangest.rows.places[i]), *why[i], *line] for i, line in enumerate(row_cells(strangest))]
    text = (
        "Strangeness goes from 0 to 1: at 0.95 one ordinary row in twenty looks as strange. Rows above "
        f"{number_text(strangest.model.estimator_.ood_threshold_)} are flagged. The strange column is the one whose typical value "
        "makes the row most ordinary."
    )
    return Part(
        "The strangest rows", text, (), [Table(f"The {len(strangest)} strangest rows.", header, lines, control=True)]
    )


def worst_table(answered: Answered, loss: np.ndarray, names: list[str]) -> Part:
    """The rows with the largest errors."""
    worst = answered.take(np.argsort(-loss, kind="stable")[:WORST_ROWS])
    table = rows_table(worst, names, f"The {len(worst)} largest errors.")
    text = f"{worst.flagged} of these {len(worst)} rows are flagged as unlike the training data."
    return Part("The worst errors", text, (), [table])


# ------------------------------------------------------------------ how sure


def residual_part(answered: Answered) -> tuple[Part, dict[str, Any]]:
    """Residuals against predictions; for classes, the probability of the actual class against strangeness."""
    model, predictions, scores = answered.model, answered.predictions, answered.scores
    threshold = model.estimator_.ood_threshold_
    y: Any = answered.rows.y
    if is_regression(model):
        x, up, title = predictions[:, 0], y - predictions[:, 0], "Residuals against prediction"
        chart = {"xlabel": "predicted", "ylabel": "actual − predicted", "level": 0}
    else:
        x, up = scores, predictions[np.arange(len(y)), class_numbers(model, y)]
        title = "Probability of the actual class"
        chart = {"xlabel": "strangeness", "ylabel": "probability of the actual class", "ys": [0, 1]}
    points = [
        [number(float(a)), number(float(b)), place, bool(s > threshold)]
        for place, (a, b, s) in enumerate(zip(x, up, scores, strict=True))
    ]
    text = f"Each point is a row, {len(answered):,} of them; flagged rows have another colour. Point at one to read its values."
    return Part(title, text, [("residuals", title)]), {"type": "points", "points": points, **chart}


def interval_part(answered: Answered) -> tuple[Part, dict[str, Any]]:
    """Calibration of intervals, and coverage in quarters of the prediction."""
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
        "Coverage of the 90 % interval in quarters of the prediction.",
        ["quarter", "predicted from", "to", "rows", "covered", "mean width", "RMSE"],
        _quarters(answered.rows.y, answered.predictions),
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


def _quarters(y: Any, predictions: np.ndarray) -> list[list[Any]]:
    order = np.argsort(predictions[:, 0], kind="stable")
    lines: list[list[Any]] = []
    for place, at in enumerate(np.array_split(order, 4)):
        if len(at):
            mean, low, high = predictions[at].T
            ends = [float(mean.min()), float(mean.max())]
            covered = percent(metrics.coverage(y[at], low, high))
            lines.append(
                [f"{place + 1}", *ends, len(at), covered, float(np.mean(high - low)), metrics.rmse(y[at], mean)]
            )
    return lines


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


def confusion_part(answered: Answered) -> Part:
    """Rows by their actual and their predicted class."""
    model, predictions = answered.model, answered.predictions
    y: Any = answered.rows.y
    classes = model.estimator_.classes_
    actual, predicted = class_numbers(model, y), predictions.argmax(1)
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(counts, (actual, predicted), 1)
    most = np.sort(np.argsort(-(counts.sum(0) + counts.sum(1)), kind="stable")[:MAX_MATRIX_CLASSES])
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    rows = [[short(classes[i]), *(int(counts[i, j]) for j in most)] for i in most]
    cut = (
        f" The {MAX_MATRIX_CLASSES} most frequent of {len(classes)} classes."
        if len(classes) > MAX_MATRIX_CLASSES
        else ""
    )
    table = Table(
        f"Rows of each actual class (lines) by predicted class (columns).{cut}",
        ["actual", *(short(classes[j]) for j in most)],
        rows,
        shades=[[float(shares[i, j]) for j in most] for i in most],
    )
    return Part("Confusion matrix", "The larger its share of the line, the stronger the colour of a cell.", (), [table])
