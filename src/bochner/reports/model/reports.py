"""Whole reports: on a model, from rows with known targets, and on predictions."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import sklearn
import torch

import bochner
from bochner.estimators.base import as_kernels
from bochner.estimators.evaluation import Forecast, forecast
from bochner.members.member import describe_members
from bochner.reports.model import calibration, parts
from bochner.reports.model.collecting import Collected
from bochner.reports.model.columns import (
    BAND_QUANTILES,
    CURVE_ROWS,
    MAX_CLASSES,
    dependence,
    dependence_table,
    importance_chart,
    importance_note,
    importance_table,
    importances,
)
from bochner.reports.model.page import Page, Part, Table
from bochner.reports.model.peers import constant_score, own_score, peer_scores
from bochner.reports.model.rows import (
    COVERAGE,
    Answered,
    Rows,
    is_regression,
    number,
    number_text,
    numbers,
    percent,
    short,
    shown_values,
)
from bochner.reports.model.what_if import what_if

Say = Callable[[str], None]
PEERS_NOTE = (
    "The others are scikit-learn's: ridge or logistic regression, a forest of 100 trees, and a constant. For numbers, the spread "
    "of the first two is that of their errors on rows that a fit left out. A tree sees 5000 rows at most; a forest's classes get "
    "one vote each on top."
)
CONSTANT_NOTE = (
    "The comparison knows these very rows: no constant does better on them. The report of 'bochner fit' has a linear model and a "
    "random forest beside it; they need the rows that the model learned from."
)


@dataclass(frozen=True)
class Heading:
    """The head of a report.

    Attributes:
        title: Title of the page.
        unit: Whether the places of rows are numbers of a "line" or of a "row".
        notes: Lines about how the file was read.
        file: Name of the table; empty where it has none.
        learnt: Number of rows that the model learned from, where these are more than a sample that other models learn from.
    """

    title: str
    unit: str = "row"
    notes: Sequence[str] = ()
    file: str = ""
    learnt: int | None = None


def measured_report(
    model: Any, held: Rows, heading: Heading, *, predicted: Forecast | None = None, train: Rows | None = None, say: Say
) -> Page:
    """The report on a model for tables, from rows with known targets.

    Args:
        model: A fitted TableRegressor or TableClassifier.
        held: The rows.
        heading: Title and notes.
        predicted: What the model says of the rows, with their targets, if that is known already.
        train: The rows that the model was fitted to, if known: other models are fitted to them and compared. The model has then not
            seen the other rows; else nobody knows.
        say: Called with a line of text before each step.
    """
    if held.y is None or not len(held):
        raise ValueError(f"The held parameter must hold rows and their targets, got {len(held)} rows.")
    if predicted is None:
        say(f"the report predicts {len(held)} rows")
        predicted = forecast(model.estimator_, held.clean, held.y, COVERAGE)
    answered = Answered(model, held, shown_values(model, predicted), predicted.scores, heading.unit)
    ours = own_score(model, held, predicted)
    same = "the mean of these rows" if is_regression(model) else "class shares of these rows"
    others = peer_scores(model, train, held, say) if train else [constant_score(model, same, held.y, held.y)]
    cards = [parts.error_card(model, [ours, *others], _where(heading, train, len(held)))]
    cards += [calibration.calibration_card(answered, ours), parts.novelty_card(model, answered.flagged, len(held))]
    page = Page(heading.title, _note(model, heading, train, len(held)), cards)
    called = "the held-out rows" if train else "these rows"
    _add(page, "scores", parts.score_part(model, [ours, *others], _comparison_note(heading, train), called))
    names = _add_columns(page, answered, train or held, ours.loss, called, say)
    some = answered.spread(parts.SHOWN_ROWS)
    _add(page, "residuals", parts.residual_part(some))
    if is_regression(model):
        _add(page, "calibration", calibration.interval_part(answered, names))
    else:
        page.parts.append(parts.confusion_part(answered))
        _add(page, "calibration", calibration.reliability_part(answered))
    page.parts += [parts.worst_table(answered, ours.loss, names), parts.strange_part(answered)]
    page.parts += [_rows_part(some, names, len(held)), *_about(model, heading.notes)]
    return page


def _where(heading: Heading, train: Rows | None, count: int) -> str:
    """Names the rows that are measured: of an evaluation nobody knows whether the model has seen them."""
    if train:
        return f"{count:,} rows that it has not seen"
    return f"the {count:,} rows of {short(heading.file)}" if heading.file else f"these {count:,} rows"


def _comparison_note(heading: Heading, train: Rows | None) -> str:
    """Says what the other models are, and which rows each model learns from."""
    if not train:
        return CONSTANT_NOTE
    if heading.learnt is None:
        return f"All models learn from the same rows and the same encoded columns. {PEERS_NOTE}"
    return (
        f"The heads of this model learn from {heading.learnt:,} rows, its columns and networks from a sample of {len(train):,}. "
        f"The other models learn from this sample, with the same encoded columns. {PEERS_NOTE}"
    )


def _add(page: Page, name: str, part: tuple[Part, dict[str, Any]]) -> None:
    page.parts.append(part[0])
    page.charts[name] = part[1]


def _note(model: Any, heading: Heading, train: Rows | None, count: int) -> str:
    learned = f"{count:,} rows"
    if train:
        learned = f"{heading.learnt or len(train):,} rows learned from, {count:,} held out"
    kind = "a number" if is_regression(model) else f"one of {len(model.estimator_.classes_)} classes"
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return f"Target: {short(model.target_.name)}, {kind}. {learned}. {when}."


# ------------------------------------------------------------------ columns


def _add_columns(page: Page, answered: Answered, pool: Rows, loss: np.ndarray, called: str, say: Say) -> list[str]:
    """Adds importance, dependence and what-if; returns names of columns, the most important first.

    Args:
        page: The page.
        answered: The rows that are measured.
        pool: Rows whose values columns may take.
        loss: The loss of each measured row.
        called: What the measured rows are called in a text.
        say: Called with a line of text before each step.
    """
    model, held = answered.model, answered.rows
    ranked = importances(model, held, say)
    error = parts.ERRORS[is_regression(model)]
    text, charts = importance_note(model, held, error, called), [("importance", "Permutation importance")]
    chart = {"type": "bars", "items": importance_chart(ranked), "xlabel": f"increase of the {error}"}
    _add(page, "importance", (Part("Which columns matter", text, charts, [importance_table(ranked)]), chart))
    names = [importance.name for importance in ranked]
    if curves := dependence(model, names, pool, held, say):
        _add(page, "dependence", _dependence_part(model, curves, min(CURVE_ROWS, len(held))))
        say("the report moves the columns of a few rows, one at a time and together")
        _add_what_if(page, answered, pool, loss, names)
    return [*names, *(column.name for column in model.table_.used if column.name not in names)][: parts.SHOWN_COLUMNS]


def _dependence_part(model: Any, curves: list[dict[str, Any]], count: int) -> tuple[Part, dict[str, Any]]:
    """The plots of how predictions depend on columns, from the predictions of ``count`` rows."""
    (classes, first), charts = _classes(model), [("dependence", "Dependence on a column")]
    middle = 100 * (BAND_QUANTILES[1] - BAND_QUANTILES[0])
    text = (
        f"The mean prediction of {count} rows when one column takes other values and the rest stay. The band, or whisker, holds "
        f"the middle {middle:.0f} % of these rows. It shows what the model does, not what causes what."
    )
    chart = {"type": "dependence", "columns": curves, "classes": classes[:MAX_CLASSES], "first": first}
    chart["ylabel"] = f"predicted {short(model.target_.name)}"
    return Part("How predictions move", text, charts, [dependence_table(curves, classes[:MAX_CLASSES])]), chart


def _classes(model: Any) -> tuple[list[str], int]:
    """Names of the classes, and the one that is shown first: of two the second."""
    if is_regression(model):
        return [], 0
    names = [short(name) for name in model.estimator_.classes_]
    return names, 1 if len(names) == 2 else 0


def _add_what_if(page: Page, answered: Answered, pool: Rows, loss: np.ndarray, names: list[str]) -> None:
    """Adds the panels in which values of a row are moved: one column at a time, and the most important ones together."""
    model, predictions, strange = answered.model, answered.predictions, answered.scores
    order = np.argsort(predictions[:, 0], kind="stable")
    picks = {
        "an ordinary row": int(np.argmin(strange)),
        "a middle prediction": int(order[len(order) // 2]),
        "a low prediction" if is_regression(model) else "sure of another class": int(order[len(order) // 20]),
        "a high prediction" if is_regression(model) else "sure of the first class": int(order[-1 - len(order) // 20]),
        "the worst error": int(np.argmax(loss)),
        "the strangest row": int(np.argmax(strange)),
    }
    titles = [f"{name} ({answered.unit} {answered.rows.places[at]})" for name, at in picks.items()]
    alone, together = what_if(model, names, pool, answered.rows.take(list(picks.values())), titles)
    common = {"classes": _classes(model)[0], "ylabel": f"predicted {short(model.target_.name)}"}
    common |= {"threshold": number(model.estimator_.ood_threshold_), "band": f"{100 * COVERAGE:.0f} %"}
    page.charts["what_if"] = {"type": "whatIf", "rows": alone} | common
    charts = [("what_if", "Prediction of the chosen row, one column moved")]
    if together:
        page.charts["together"] = {"type": "together", "rows": together} | common
        charts.append(("together", "Prediction of the chosen row, several columns moved"))
    text = (
        "Choose a row and move one column at a time: all other columns keep the row's values."
        f"{' Below, the most important columns move together.' if together else ''} The predictions were computed when this page "
        f"was made, for {len(picks)} rows and the values that the sliders stop at."
    )
    page.parts.append(Part("What if", text, charts))


def _rows_part(answered: Answered, names: list[str], count: int) -> Part:
    """The rows themselves; ``count`` is how many there are in all."""
    cut = f"{len(answered):,} of {count:,} rows" if len(answered) < count else f"All {count:,} rows"
    used = len(answered.model.table_.used)
    columns = f", {len(names)} of {used} columns" if len(names) < used else ""
    table = parts.rows_table(answered, names, f"{cut}{columns}.", key="rows")
    return Part("Rows", "Click a heading to sort. Long cells are cut.", (), [table])


# ------------------------------------------------------------------ predictions


def predicted_report(model: Any, kept: Collected, heading: Heading, *, coverage: float) -> Page:
    """A short report on predictions for rows whose targets are not known.

    Args:
        model: A fitted TableRegressor or TableClassifier.
        kept: The collected rows.
        heading: Title and notes.
        coverage: Probability of the intervals.
    """
    rows, predictions, scores, first = kept.kept()
    answered = Answered(model, rows, predictions, scores, heading.unit, coverage)
    beginning = answered.take(first)
    card = ("What is this?", _predicted_sentence(model, kept, beginning.predictions), False)
    note = _note(model, heading, None, kept.rows)
    page = Page(heading.title, note, [card, parts.novelty_card(model, kept.flagged, kept.rows)])
    _add(page, "predictions", _classes_part(kept) if not is_regression(model) else _predictions_part(beginning))
    names = [column.name for column in model.table_.used][: parts.SHOWN_COLUMNS]
    page.parts += [parts.strange_part(answered), _rows_part(beginning, names, kept.rows), *_about(model, heading.notes)]
    return page


def _predicted_sentence(model: Any, kept: Collected, predictions: np.ndarray) -> str:
    text = f"Predictions of {short(model.target_.name)} for {kept.rows:,} rows. "
    if is_regression(model):
        low, middle, high = (parts.in_units(model, float(v)) for v in np.quantile(predictions[:, 0], (0.1, 0.5, 0.9)))
        which = f" of the first {len(predictions):,}" if len(predictions) < kept.rows else ""
        text += f"The median{which} is {middle}; eight in ten lie between {low} and {high}."
    else:
        text += (
            "; ".join(f"{short(name)}: {percent(count / kept.rows)}" for name, count in kept.classes.most_common(5))
            + "."
        )
    return text + " How good they are cannot be seen without the true values: 'bochner evaluate' measures it."


def _classes_part(kept: Collected) -> tuple[Part, dict[str, Any]]:
    """How often each class is predicted."""
    counts = [(short(name), count) for name, count in kept.classes.most_common(parts.MAX_MATRIX_CLASSES)]
    label = "Rows by predicted class"
    table = Table(f"{label}.", ["predicted", "rows"], counts, folded=True)
    items = [{"name": name, "value": count} for name, count in counts]
    chart = {"type": "bars", "items": items, "xlabel": "rows"}
    return Part("Predictions", "", [("predictions", label)], [table]), chart


def _predictions_part(beginning: Answered) -> tuple[Part, dict[str, Any]]:
    """Predictions of the first rows, from the lowest to the highest, in their bands."""
    order = np.argsort(beginning.predictions[:, 0], kind="stable")
    mean, low, high = beginning.predictions[order].T
    flags = beginning.scores[order] > beginning.model.estimator_.ood_threshold_
    points = [[place + 1, number(float(mean[place])), int(row), bool(flags[place])] for place, row in enumerate(order)]
    chart = {"type": "points", "points": points, "low": numbers(low), "high": numbers(high)}
    chart |= {"xlabel": "rows, sorted by prediction", "ylabel": f"predicted {short(beginning.model.target_.name)}"}
    label = f"Predictions of the first {len(mean):,} rows, with bands of {100 * beginning.coverage:g} %"
    text = "Each point is a row; flagged rows have another colour. Point at one to read its values."
    return Part("Predictions", text, [("predictions", label)]), chart


# ------------------------------------------------------------------ settings


def _about(model: Any, notes: Sequence[str]) -> list[Part]:
    """The last parts of every report: how columns and file were read, the settings and the versions."""
    columns: list[list[Any]] = [[short(column.name), short(column.note, 300)] for column in model.table_.columns]
    columns.append([short(model.target_.name), short(f"the target, {model.target_.note}", 300)])
    table = Table("What was done with each column.", ["column", "taken as"], columns, control=len(columns) > 10)
    inner = model.estimator_
    kernels = as_kernels(inner.kernel)
    settings = {
        "kernel": ", ".join(map(str, kernels)),
        "hidden layers": ", ".join(map(str, inner.hidden_layer_sizes)) or "none",
        "members": describe_members(inner.mixtures_[0].members),
        "false alarm": percent(inner.false_alarm),
        "flagged above": number_text(inner.ood_threshold_),
        "seed": str(inner.random_state),
        "budget": "none" if inner.budget is None else f"{inner.budget:.3g} s",
    }
    if is_regression(model):
        settings |= {
            "prior standard deviation": parts.in_units(model, inner.prior_std_),
            "noise": parts.in_units(model, inner.noise_),
        }
    versions = {"bochner": bochner, "torch": torch, "scikit-learn": sklearn}
    settings["versions"] = ", ".join(f"{name} {module.__version__}" for name, module in versions.items())
    settings["Python"] = platform.python_version()
    lines = [[name, short(value, 300)] for name, value in settings.items()]
    settings_table = Table("Settings of the model, and versions.", ["setting", "value"], lines)
    file_part = [Part("What was made of the file", " ".join(short(f"{line}.", 300) for line in notes))] if notes else []
    return [Part("Columns", "", (), [table]), *file_part, Part("Settings", "", (), [settings_table])]
