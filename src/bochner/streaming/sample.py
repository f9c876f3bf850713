"""A uniform random sample of the rows of a table that is read in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from bochner.tables.cells import read_numbers
from bochner.tables.columns import as_cells, is_text

MAX_KEPT_LABELS = 1000  # different targets up to which they may be classes, of each of which two rows are kept
LABEL_ROWS = 2  # rows that are kept of every class, and of the lowest targets
WAITING_SHARE = 0.25  # share of the sample's size that may wait to be taken in: sorting in every small batch takes long


class Sample:
    """Rows with the smallest of random keys, one for each row: a uniform sample, however the table is divided into portions.

    Of every class two rows are kept, and so are the two lowest targets: a class that the sample lacked could not be learnt, and a
    target that is never below zero may be learnt on a logarithmic scale.

    Args:
        max_rows: Number of rows to keep.
        largest_key: A key above which no row can be in the sample of the whole table; it saves room and changes nothing.

    Attributes:
        rows: Number of rows that were drawn from.
    """

    def __init__(self, max_rows: int, largest_key: float = 1.0) -> None:
        self.max_rows, self.rows, self.largest_key = max_rows, 0, largest_key
        self._kept_rows: _Rows | None = None
        self._waiting: list[_Rows] = []

    def add(self, parts: Sequence[Any], portion: int, generator: np.random.Generator) -> None:
        """Draws from the next rows of a portion.

        Args:
            parts: Inputs, targets and whatever else belongs to the rows.
            portion: Number of the portion.
            generator: Random numbers of the portion.
        """
        count = len(parts[0])
        order = np.column_stack([np.full(count, portion), self.rows + np.arange(count)])
        self.rows += count
        self._take_in(_Rows(tuple(parts), generator.random(count), order))

    def merge(self, other: "Sample") -> None:
        """Draws from the rows of another portion too."""
        self.rows += other.rows
        other._settle()
        if other._kept_rows is not None:
            self._take_in(other._kept_rows)

    def _take_in(self, rows: "_Rows") -> None:
        """Lets rows wait whose keys are small enough, and settles when many wait."""
        near = self._kept(rows.keys, rows.parts[1], min(self.max_rows, int((rows.keys <= self.largest_key).sum())))
        if len(near):
            self._waiting.append(rows.some(near))
        if sum(len(each.keys) for each in self._waiting) >= max(1, WAITING_SHARE * self.max_rows):
            self._settle()

    def _settle(self) -> None:
        """Takes in the rows that wait."""
        if not self._waiting:
            return
        rows = _Rows.joined([*([self._kept_rows] if self._kept_rows is not None else []), *self._waiting])
        kept = rows.some(self._kept(rows.keys, rows.parts[1], self.max_rows))
        self._kept_rows, self._waiting = kept, []
        if len(kept.keys) >= self.max_rows:
            self.largest_key = min(self.largest_key, float(kept.keys[self.max_rows - 1]))

    @staticmethod
    def _kept(keys: np.ndarray, targets: Any, count: int) -> np.ndarray:
        """Indices of the rows to keep, in the order of their keys."""
        by_key = np.argsort(keys, kind="stable")
        if len(keys) <= count:
            return by_key
        kept = [by_key[:count]]
        values = np.asarray(targets)
        if values.ndim == 1:
            labels = pd.Series(values[by_key])
            codes, uniques = pd.factorize(labels)
            if len(uniques) <= MAX_KEPT_LABELS:
                kept.append(by_key[labels.groupby(codes).cumcount().to_numpy() < LABEL_ROWS])
            kept += [np.argsort(numbers, kind="stable")[:LABEL_ROWS] for numbers in _as_numbers(values)]
        chosen = np.zeros(len(keys), dtype=bool)
        chosen[np.concatenate(kept)] = True
        return by_key[chosen[by_key]]

    def in_order(self) -> tuple[Any, ...]:
        """The rows in the order of the table."""
        self._settle()
        assert self._kept_rows is not None
        return self._kept_rows.some(np.lexsort(self._kept_rows.order.T[::-1])).parts


@dataclass(frozen=True)
class _Rows:
    """Rows with their keys.

    Attributes:
        parts: Arrays, DataFrames or Series of the same length. The second one holds the targets.
        keys: A random key for each row.
        order: Number of the portion and of the row within it, (n, 2).
    """

    parts: tuple[Any, ...]
    keys: np.ndarray
    order: np.ndarray

    def some(self, at: np.ndarray) -> "_Rows":
        """The rows with the given numbers."""
        return _Rows(tuple(take(part, at) for part in self.parts), self.keys[at], self.order[at])

    @classmethod
    def joined(cls, several: Sequence["_Rows"]) -> "_Rows":
        """The rows of several as one."""
        parts = tuple(map(join, zip(*(rows.parts for rows in several), strict=True)))
        keys, order = (np.concatenate([getattr(rows, name) for rows in several]) for name in ("keys", "order"))
        return cls(parts, keys, order)


def _as_numbers(values: np.ndarray) -> list[np.ndarray]:
    """Targets as numbers, with either decimal sign where they are text; infinite where they are none."""
    if values.dtype.kind in "biuf":
        return [np.where(np.isfinite(values.astype(float)), values.astype(float), np.inf)]
    texts = as_cells(pd.Series(values))
    if not is_text(texts):
        return []
    return [np.nan_to_num(read_numbers(texts, sign), nan=np.inf) for sign in ".,"]


def take(part: Any, at: np.ndarray) -> Any:
    """Some rows of an array, a DataFrame or a Series."""
    return part.iloc[at].reset_index(drop=True) if hasattr(part, "iloc") else part[at]


def join(parts: Sequence[Any]) -> Any:
    """Rows of several arrays, DataFrames or Series."""
    return pd.concat(parts, ignore_index=True) if hasattr(parts[0], "iloc") else np.concatenate(parts)
