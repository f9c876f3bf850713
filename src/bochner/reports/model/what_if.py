"""What a model would say of a few rows if their values were others: one column at a time, or several together.

Every answer is the model's own, from before the page is made: the page only chooses among them.
"""

from typing import Any

import numpy as np
import pandas as pd

from bochner.estimators.evaluation import forecast
from bochner.reports.model.columns import MAX_CLASSES, described, donors, labels_of, movable, moved, repeated
from bochner.reports.model.rows import Rows, is_regression, numbers, short, shown_values

# Combinations grow quickly: with these numbers they are 343 of a row. With many classes they would fill the page.
JOINT_COLUMNS = 3  # columns that are moved together, the most important ones
JOINT_VALUES = 6  # values of each of them, beside that of the row


def what_if(
    model: Any, names: list[str], pool: Rows, chosen: Rows, titles: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """For some rows: predictions and OOD scores when one column takes other values, and when several columns do.

    Each list has an entry for each row; the second one is empty with a single column, and with many classes. Among the values of a
    column is that of the row itself, at ``start``. The answers for several columns are in the order of their values, those of the
    last column fastest.
    """
    columns, asked = movable(model, names, pool), []
    joined = columns[:JOINT_COLUMNS] if is_regression(model) or len(model.estimator_.classes_) <= MAX_CLASSES else []
    panels: list[dict[str, Any]] = []  # what gets answers, in the order of ``asked``
    alone, together = [], []
    for place, title in enumerate(titles):
        row = chosen.take([place])
        head = {"name": title, "line": row.places[0]}
        tried = [_tried(column, pool, row) for column in columns]
        panels += (curves := [_described(column, *pair, row) for column, pair in zip(columns, tried, strict=True)])
        asked += [_combined(row, [column], [at]) for column, (at, _) in zip(columns, tried, strict=True)]
        alone.append(head | {"columns": curves})
        if len(joined) < 2:
            continue
        tried = [_tried(column, pool, row, JOINT_VALUES) for column in joined]
        joint = head | {"columns": [_described(column, *pair, row) for column, pair in zip(joined, tried, strict=True)]}
        asked.append(_combined(row, joined, [at for at, _ in tried]))
        panels.append(joint)
        together.append(joint)
    predicted = forecast(model.estimator_, pd.concat(asked))  # one call: many calls take long, many rows hardly longer
    predictions, strange = shown_values(model, predicted), predicted.scores
    ends = np.cumsum([len(rows) for rows in asked])
    for panel, rows, end in zip(panels, asked, ends, strict=True):
        part = slice(end - len(rows), end)
        panel |= {"answers": [numbers(line) for line in predictions[part]], "strange": numbers(strange[part])}
    return alone, together


def _described(column: Any, at: Rows, start: int, row: Rows) -> dict[str, Any]:
    """A column and the values that are tried, as the page shows them."""
    labels, x = labels_of(column, at)
    if column.kind == "category" and labels[start] != "missing":  # the model may see no more than 'other values'
        labels[start] = short(row.frame[column.name].iloc[0])
    return described(column) | {"labels": labels, "x": x, "start": start}


def _combined(row: Rows, columns: list[Any], tried: list[Rows]) -> pd.DataFrame:
    """The inputs of a row with every combination of values of some columns, those of the last column fastest."""
    places = np.indices([len(at) for at in tried]).reshape(len(tried), -1)
    rows = repeated(row.clean, places.shape[1])
    for column, at, own in zip(columns, tried, places, strict=True):
        rows = moved(rows, column, at.clean.iloc[own])
    return rows


def _tried(column: Any, pool: Rows, row: Rows, most: int | None = None) -> tuple[Rows, int]:
    """Rows whose values of a column are tried, at most so many, with the row itself among them in order; and its position."""
    first = column.outputs[0]
    row_value = row.clean[first].iloc[0]
    at = pool.take(donors(column, pool))
    if most is not None:
        at = at.take(range(min(most, len(at)))) if column.kind == "category" else at.spread(most)
    values = at.clean[first]
    same = values.isna().to_numpy() if pd.isna(row_value) else (values == row_value).to_numpy()
    at = at.take(np.nonzero(~same)[0])
    start = 0
    if column.kind != "category" and not pd.isna(row_value):
        start = int(np.sum(at.clean[first].to_numpy(dtype=float) < float(row_value)))
    pairs = ((at.frame, row.frame), (at.clean, row.clean))
    frame, clean = (pd.concat([part.iloc[:start], own, part.iloc[start:]]) for part, own in pairs)
    return Rows(frame, clean, [*at.places[:start], row.places[0], *at.places[start:]]), start
