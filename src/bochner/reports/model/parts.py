"""Parts of a report: results of a model as sentences, tables and charts."""

from typing import Any

import numpy as np

from bochner.reports.model.page import Part, Table
from bochner.reports.model.peers import Score, verdict_on, within_two_errors
from bochner.reports.model.rows import (
    Answered,
    class_numbers,
    is_regression,
    number,
    number_text,
    percent,
    short,
)
from bochner.reports.model.strange import STRANGE_ROWS, reasons

WORST_ROWS = 10  # rows in the table of the largest errors
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


def error_card(model: Any, scores: list[Score], where: str) -> tuple[str, str, bool]:
    """The first question of a report: the error of the model beside those of other models, on rows named by ``where``."""
    ours, *others = scores
    name = short(model.target_.name)
    if is_regression(model):
        measure = "RMSE"
        text = f"On {where}, {name} is typically off by {in_units(model, ours.error)} (RMSE). "
        errors = [f"{score.name}: {in_units(model, score.error)}" for score in others]
    else:
        measure = "log loss, which counts how sure it is as well,"
        right = percent(ours.metrics["accuracy"])
        text = f"On {where}, {name} is right in {right} (log loss {number_text(ours.error)}). "
        errors = [
            f"{score.name}: {percent(score.metrics['accuracy'])} (log loss {number_text(score.error)})"
            for score in others
        ]
    verdicts = {score.name: verdict_on(ours, score) for score in others}
    words = {"better": "better than", "equal": "no different, within chance, from", "worse": "worse than"}
    comparisons = []
    for verdict, phrase in words.items():
        if names := [name for name, other in verdicts.items() if other == verdict]:
            comparisons.append(f"{phrase} {_listed(names)}")
    text += f"Instead, {', '.join(errors)}. By {measure} it is {', '.join(comparisons)}."
    return "How good is it?", text, "worse" in verdicts.values() or verdicts[others[-1].name] == "equal"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


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


def score_part(model: Any, scores: list[Score], note: str, called: str) -> tuple[Part, dict[str, Any]]:
    """Errors of all models on rows that are called, for example, "the held-out rows"; as a chart and a table."""
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
    label = f"{ERRORS[regression]} on {called}{f', in {unit}' if unit else ''}; shorter is better"
    table = Table(
        "Lower RMSE, NLPD and calibration error are better; higher R², accuracy and AUC.",
        ["model", *(names[k] for k in keys)],
        rows,
    )
    part = Part(
        "Beside other models",
        note,
        [("scores", f"Errors on {called}, with two standard errors on either side")],
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
