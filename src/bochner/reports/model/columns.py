"""The effect of columns: their importance, and how predictions depend on each.

A column of the file may be several inputs of the model (a date is days, month and weekday). They move together: every value that
is tried is that of a real row, the donor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from bochner.reports.model.page import Table
from bochner.reports.model.rows import (
    Rows,
    centres,
    is_regression,
    losses,
    mean_error,
    number,
    number_text,
    numbers,
    short,
)

REPEATS = 5  # shuffles of a column
SHUFFLED_ROWS = 8000  # rows that are predicted for the importances, over all columns and repeats
SCREENED_ROWS = 100_000  # rows that are predicted, over all columns, to choose those that are measured
CALL_ROWS = 2000  # rows of one call
MAX_SHUFFLED_ROWS = 200  # rows that are shuffled
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
    if (screened := _screened_rows(model, held)) is not None:
        say(
            f"the report shuffles {len(used)} columns of {len(screened)} rows, to choose {MAX_MEASURED_COLUMNS} columns"
        )
        first = {column.name: increase[0] for column, increase in _increases(model, screened, used, 1, rng)}
        used = sorted(used, key=lambda column: -first[column.name])[:MAX_MEASURED_COLUMNS]
    rows = _shuffled_rows(model, held)
    say(f"the report shuffles {len(used)} columns of {len(rows)} rows, {REPEATS} times each")
    ranked = [
        Importance(column.name, float(np.mean(increases)), float(np.std(increases, ddof=1)))
        for column, increases in _increases(model, rows, used, REPEATS, rng)
    ]
    return sorted(ranked, key=lambda importance: -importance.mean)


def _screened_rows(model: Any, held: Rows) -> Rows | None:
    """The rows on which one shuffle of each column chooses the columns that are measured; None where all are."""
    count = len(model.table_.used)
    return None if count <= MAX_MEASURED_COLUMNS else held.spread(min(MAX_SHUFFLED_ROWS, SCREENED_ROWS // count))


def _shuffled_rows(model: Any, held: Rows) -> Rows:
    """The rows on which importances are measured."""
    count = min(len(model.table_.used), MAX_MEASURED_COLUMNS)
    return held.spread(min(MAX_SHUFFLED_ROWS, max(30, SHUFFLED_ROWS // (REPEATS * count))))


def importance_note(model: Any, held: Rows, error: str, called: str) -> str:
    """Says how importances of an error were measured, and on which rows, called for example 'the held-out rows'."""
    text = (
        f"How much larger the {error} becomes when a column is shuffled among {len(_shuffled_rows(model, held))} of {called}. "
        f"Bars are means of {REPEATS} shuffles, whiskers a standard deviation on either side. "
        "Columns that say the same share their importance."
    )
    if (screened := _screened_rows(model, held)) is not None:
        text += (
            f" Of {len(model.table_.used)} columns {MAX_MEASURED_COLUMNS} are shown: those with the largest increase "
            f"after one shuffle among {len(screened)} rows."
        )
    return text


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
        asked = repeated(rows.clean, repeats * len(chunk))
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


def repeated(clean: pd.DataFrame, times: int) -> pd.DataFrame:
    """All rows so many times, one copy after the other."""
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


def labels_of(column: Any, rows: Rows) -> tuple[list[str], list[float | None]]:
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
    rows, columns = held.spread(CURVE_ROWS), movable(model, names, pool)
    say(f"the report moves {len(columns)} columns of {len(rows)} rows")
    classes = 1 if is_regression(model) else min(MAX_CLASSES, len(model.estimator_.classes_))
    curve_data = []
    for column in columns:
        at = pool.take(donors(column, pool))
        asked = moved(repeated(rows.clean, len(at)), column, at.clean.iloc[np.repeat(np.arange(len(at)), len(rows))])
        curves = centres(model, asked).reshape(len(at), len(rows), -1)[:, :, :classes]
        labels, x = labels_of(column, at)
        parts = {
            "mean": curves.mean(1),
            "low": np.quantile(curves, BAND_QUANTILES[0], 1),
            "high": np.quantile(curves, BAND_QUANTILES[1], 1),
        }
        answer = {key: [numbers(line) for line in values.T] for key, values in parts.items()}
        curve_data.append(described(column) | {"labels": labels, "x": x} | answer)
    return curve_data


def movable(model: Any, names: list[str], pool: Rows) -> list[Any]:
    """The first of some columns by name, but for those without any value in the pool."""
    known = {
        column.name: column for column in model.table_.used if pool.clean[column.outputs[0]].notna().to_numpy().any()
    }
    return [known[name] for name in names if name in known][:MAX_CURVES]


def described(column: Any) -> dict[str, Any]:
    """The name of a column, and how the page draws it."""
    kinds = {"line": column.kind not in ("category", "truth"), "dates": column.kind in ("date", "time")}
    return {"name": short(column.name), **kinds}


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


def importance_table(importances: list[Importance]) -> Table:
    """The numbers of the bar chart."""
    rows = [[short(importance.name), importance.mean, importance.std] for importance in importances]
    return Table(
        "Increase of the error by column.", ["column", "mean increase", "standard deviation"], rows, folded=True
    )


def dependence_table(curves: list[dict[str, Any]], classes: list[str]) -> Table:
    """The numbers of all dependence plots: a line for each column, value and class."""
    rows: list[list[Any]] = []
    for own in curves:
        for place, lines in enumerate(zip(own["mean"], own["low"], own["high"], strict=True)):
            named = [classes[place]] if len(classes) > 1 else []
            rows += [
                [own["name"], label, *named, *values] for label, *values in zip(own["labels"], *lines, strict=True)
            ]
    header = ["column", "value", *(["class"] if len(classes) > 1 else []), "mean", "band from", "to"]
    return Table("Mean prediction and band by column and value.", header, rows, control=True, folded=True)
