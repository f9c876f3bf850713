"""Which rows are unlike the training data, and which column makes them so."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from bochner.reports.model.rows import Rows, number_text, percent, short

STRANGE_ROWS = 20  # rows in the table of strange rows
CANDIDATE_COLUMNS = 10  # columns of a row, the rarest values first, that are replaced by a typical value one at a time
MIN_SCORE_FALL = 0.005  # least fall of the score, when a column is replaced, for the column to be named
MIN_FAR_DISTANCE = 3.0  # standard deviations from the mean from which on a number is called far


@dataclass(frozen=True)
class _Value:
    """A value of an input: its rarity, comparable to standard deviations, and a description."""

    rarity: float
    words: str


def _value(known: Any, value: Any) -> _Value:
    """The rarity of a value of an input, by the statistics of its column in ``columns_``."""
    missing = pd.isna(value)
    if known.categories is not None:
        text = "missing" if missing else str(value)
        if text not in known.categories:
            return _Value(math.inf, f"{short(text)}: never seen in training")
        share = known.shares[known.categories.index(text)]
        return _Value(
            math.sqrt((1 - share) / max(share, 1e-12)), f"{short(text)}: {percent(share)} of the training rows"
        )
    if missing:
        rare = math.sqrt((1 - known.missing) / known.missing) if known.missing else math.inf
        return _Value(rare, f"missing: {percent(known.missing)} of the training rows")
    away = (float(value) - known.mean) / known.scale
    side = "above" if away > 0 else "below"
    return _Value(
        abs(away),
        f"{number_text(float(value))}: {abs(away):.1f} standard deviations {side} the mean, {number_text(known.mean)}",
    )


def _typical(known: Any) -> Any:
    """The mean of a column, or its most frequent category."""
    return known.mean if known.categories is None else known.categories[int(np.argmax(known.shares))]


def reasons(model: Any, rows: Rows, scores: np.ndarray) -> list[tuple[str, str]]:
    """For each row the column that makes it strange (of a date or text, the part of it) and what is strange about its value.

    It is the column whose typical value in place of the row's own lowers the score most. Where none does, it is the column with a
    value far from all others, or the row is strange as a combination.
    """
    inner, used = model.estimator_, model.table_.used
    known = dict(zip(model.table_.outputs, inner.columns_.columns, strict=True))
    typical = {name: _typical(column) for name, column in known.items()}
    rarest, asked = [], []
    for place in range(len(rows)):
        row = rows.clean.iloc[place]
        values = {name: _value(column, row[name]) for name, column in known.items()}
        worst = {column: max(column.outputs, key=lambda name: values[name].rarity) for column in used}
        ordered = sorted(used, key=lambda column: -values[worst[column]].rarity)[:CANDIDATE_COLUMNS]
        rarest.append([(worst[column], values[worst[column]]) for column in ordered])
        asked += [rows.clean.iloc[[place]].assign(**{n: typical[n] for n in column.outputs}) for column in ordered]
    if not asked:
        return []
    replaced = inner.ood_score(pd.concat(asked)[list(known)]).reshape(len(rows), -1)
    return [_reason(values, score - after) for values, score, after in zip(rarest, scores, replaced, strict=True)]


def _reason(rarest: list[tuple[str, _Value]], falls: np.ndarray) -> tuple[str, str]:
    """The column whose replacement lowers the score most, and a description of its value."""
    best = int(np.argmax(falls))
    if falls[best] < MIN_SCORE_FALL:
        best = 0
        if rarest[0][1].rarity < MIN_FAR_DISTANCE:
            return "several together", "no single value is rare: their combination is"
    name, value = rarest[best]
    return short(name), value.words
