"""The effect of columns: their importance, how predictions depend on each, and predictions of single rows with changes.

A column of the file may be several inputs of the model (a date is days, month and weekday). They move together: every value that
is tried is that of a real row, the donor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from bochner.estimators.evaluation import forecast
from bochner.reports.model.rows import (
    COVERAGE,
    Rows,
    centres,
    is_regression,
    losses,
    mean_error,
    number,
    number_text,
    numbers,
    short,
    shown_values,
)

REPEATS = 5  # shuffles of a column
SHUFFLED_ROWS = 8000  # rows that are predicted for the importances, over all columns and repeats
CALL_ROWS = 2000  # rows of one call
MAX_SHUFFLED_ROWS = 200  # held-out rows that are shuffled
MAX_MEASURED_COLUMNS = 30  # columns that are measured; a single shuffle chooses them where there are more
MAX_CURVES = 8  # columns with a dependence plot
CURVE_ROWS = 30  # rows whose predictions a dependence plot follows
MAX_GRID_VALUES = 15  # values of a column that are tried
MAX_CATEGORIES = 12  # most categories of a column that are tried
MAX_CLASSES = 8  # most classes that a dependence plot offers
BAND_QUANTILES = (0.1, 0.9)  # quantiles of the rows' curves
SEED = 0  # of the shuffles


@dataclass(frozen=True)
class Importance:
    """How much worse predictions become when a column is shuffled.

    Attributes:
        name: Name of the column.
        mean: Mean increase of RMSE or log loss over the shuffles.
        std: Its standard deviation over them.
    """

    name: str
    mean: float
    std: float


def importances(model: Any, held: Rows, say: Callable[[str], None]) -> list[Importance]:
    """Importances of the columns of the file, the largest first."""
    used = model.table_.used
    rng = np.random.default_rng(SEED)
    if len(used) > MAX_MEASURED_COLUMNS:
        few = held.spread(max(6, SHUFFLED_ROWS // len(used)))
        first = {column.name: increase[0] for column, increase in _increases(model, few, used, 1, rng)}
        used = sorted(used, key=lambda column: -first[column.name])[:MAX_MEASURED_COLUMNS]
    rows = held.spread(min(MAX_SHUFFLED_ROWS, max(30, SHUFFLED_ROWS // (REPEATS * len(used)))))
    say(f"the report shuffles {len(used)} columns of {len(rows)} rows, {REPEATS} times each")
    ranked = [
        Importance(column.name, float(np.mean(increases)), float(np.std(increases, ddof=1)))
        for column, increases in _increases(model, rows, used, REPEATS, rng)
    ]
    return sorted(ranked, key=lambda importance: -importance.mean)


def _increases(
    model: Any, rows: Rows, used: Any, repeats: int, rng: np.random.Generator
) -> list[tuple[Any, list[float]]]:
    """Increases of the error of rows when a column is shuffled among them, for each column and repeat."""
    y: Any = rows.y
    before = mean_error(model, losses(model, y, centres(model, rows.clean)))
    size, increases = repeats * len(rows), []
    step = max(1, CALL_ROWS // size)  # columns of a call: many short calls take long
    for first in range(0, len(used), step):
        chunk = used[first : first + step]
        asked = _repeated(rows.clean, repeats * len(chunk))
        for place, column in enumerate(chunk):
            order = np.concatenate([rng.permutation(len(rows)) for _ in range(repeats)])
            for name in column.outputs:
                values = np.array(asked[name])
                values[place * size : (place + 1) * size] = rows.clean[name].to_numpy()[order]
                asked[name] = values
        loss = losses(model, np.tile(y, repeats * len(chunk)), centres(model, asked)).reshape(len(chunk), repeats, -1)
        increases += [
            (column, [mean_error(model, one) - before for one in part])
            for column, part in zip(chunk, loss, strict=True)
        ]
    return increases


def _repeated(clean: pd.DataFrame, times: int) -> pd.DataFrame:
    return clean.iloc[np.tile(np.arange(len(clean)), times)].reset_index(drop=True)


def moved(clean: pd.DataFrame, column: Any, donors: pd.DataFrame) -> pd.DataFrame:
    """Rows that have, in one column of the file, the values of other rows."""
    return clean.assign(**{name: donors[name].to_numpy() for name in column.outputs})


def donors(column: Any, pool: Rows) -> np.ndarray:
    """Positions of rows whose values of a column cover it: its frequent categories, or quantiles of its numbers; in order."""
    values = pool.clean[column.outputs[0]]
    if column.kind == "category":
        texts = values.astype(object).where(values.notna(), "missing").astype(str)
        counts = texts.value_counts(sort=True)
        names = texts.to_numpy()
        return np.array([int(np.argmax(names == level)) for level in counts.index[:MAX_CATEGORIES]])
    present = np.nonzero(values.notna().to_numpy())[0]
    present_values = values.to_numpy(dtype=float)[present]
    levels = np.unique(np.quantile(present_values, np.linspace(0.01, 0.99, MAX_GRID_VALUES), method="nearest"))
    if len(np.unique(present_values)) <= MAX_GRID_VALUES:
        levels = np.unique(present_values)
    return np.array([present[int(np.argmax(present_values == level))] for level in levels])


def _labels(column: Any, rows: Rows) -> tuple[list[str], list[float | None]]:
    """Labels of the values of a column, and their positions on an axis."""
    values = rows.clean[column.outputs[0]]
    if column.kind == "category":
        return ["missing" if pd.isna(value) else short(value) for value in values], [None] * len(rows)
    x = numbers(values.to_numpy(dtype=float))
    if column.kind == "number":
        return ["missing" if value is None else number_text(value) for value in x], x
    return [short(text) or "missing" for text in rows.frame[column.name].astype(str)], x


def dependence(
    model: Any, names: list[str], pool: Rows, held: Rows, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """For some columns by name: mean of the rows' predictions at each value, and the middle 80 % of them."""
    rows, curve_data = held.spread(CURVE_ROWS), []
    say(f"the report moves {min(len(names), MAX_CURVES)} columns of {len(rows)} rows")
    classes = 1 if is_regression(model) else min(MAX_CLASSES, len(model.estimator_.classes_))
    for column in _columns(model, names):
        at = pool.take(donors(column, pool))
        asked = moved(_repeated(rows.clean, len(at)), column, at.clean.iloc[np.repeat(np.arange(len(at)), len(rows))])
        curves = centres(model, asked).reshape(len(at), len(rows), -1)[:, :, :classes]
        labels, x = _labels(column, at)
        parts = {
            "mean": curves.mean(1),
            "low": np.quantile(curves, BAND_QUANTILES[0], 1),
            "high": np.quantile(curves, BAND_QUANTILES[1], 1),
        }
        answer = {key: [numbers(line) for line in values.T] for key, values in parts.items()}
        curve_data.append(_described(column) | {"labels": labels, "x": x} | answer)
    return curve_data


def _columns(model: Any, names: list[str]) -> list[Any]:
    by_name = {column.name: column for column in model.table_.used}
    return [by_name[name] for name in names[:MAX_CURVES]]


def what_if(
    model: Any, names: list[str], pool: Rows, chosen: Rows, titles: list[str], coverage: float = COVERAGE
) -> list[dict[str, Any]]:
    """For some rows: predictions and OOD scores when one column takes other values, among them that of the row itself."""
    rows_data, asked = [], []
    for place, title in enumerate(titles):
        row, curves = chosen.take([place]), []
        for column in _columns(model, names):
            at, start = _with_own(column, pool, row)
            asked.append(moved(_repeated(row.clean, len(at)), column, at.clean))
            labels, x = _labels(column, at)
            curves.append(_described(column) | {"labels": labels, "x": x, "start": start})
        rows_data.append({"name": title, "line": row.places[0], "columns": curves})
    every = pd.concat(asked)  # one call: many calls take long, many rows hardly longer
    predicted = forecast(model.estimator_, every, coverage=coverage)
    predictions, strange = shown_values(model, predicted), predicted.scores
    ends = np.cumsum([len(rows) for rows in asked])
    for curve, end in zip((curve for row in rows_data for curve in row["columns"]), ends, strict=True):
        part = slice(end - len(curve["labels"]), end)
        curve |= {"answers": [numbers(line) for line in predictions[part]], "strange": numbers(strange[part])}
    return rows_data


def _described(column: Any) -> dict[str, Any]:
    """The name of a column, and how the page draws it."""
    kinds = {"line": column.kind not in ("category", "truth"), "dates": column.kind in ("date", "time")}
    return {"name": short(column.name), **kinds}


def _with_own(column: Any, pool: Rows, row: Rows) -> tuple[Rows, int]:
    """Rows whose values of a column are tried, with the row itself among them in order, and the position of the row."""
    first = column.outputs[0]
    row_value = row.clean[first].iloc[0]
    at = pool.take(donors(column, pool))
    values = at.clean[first]
    same = values.isna().to_numpy() if pd.isna(row_value) else (values == row_value).to_numpy()
    at = at.take(np.nonzero(~same)[0])
    start = 0
    if column.kind != "category" and not pd.isna(row_value):
        start = int(np.sum(at.clean[first].to_numpy(dtype=float) < float(row_value)))
    frames = [pd.concat([part.iloc[:start], row_part, part.iloc[start:]]) for part, row_part in _pairs(at, row)]
    places = [*at.places[:start], row.places[0], *at.places[start:]]
    return Rows(frames[0], frames[1], places), start


def _pairs(at: Rows, row: Rows) -> list[tuple[Any, Any]]:
    """Pairs of the cells of both, and of the inputs of both."""
    return [(at.frame, row.frame), (at.clean, row.clean)]


def importance_chart(importances: list[Importance]) -> list[dict[str, Any]]:
    """Data of a bar chart, with a standard deviation on either side."""
    return [
        {
            "name": short(importance.name),
            "value": number(importance.mean),
            "low": number(importance.mean - importance.std),
            "high": number(importance.mean + importance.std),
        }
        for importance in importances
    ]
