"""A uniform random sample of the rows of a table that is read in pieces."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from bochner.tables.cells import read_numbers
from bochner.tables.columns import as_cells, is_text

MAX_KEPT_LABELS = 1000  # different targets up to which they may be classes, of each of which two rows are kept
LABEL_ROWS = 2  # rows that are kept of every class, and of the lowest targets


class Sample:
    """Rows with the smallest of random keys, one for each row: a uniform sample, however the table is divided into portions.

    Of every class two rows are kept, and so are the two lowest targets: a class that the sample lacked could not be learnt, and a
    target that is never below zero may be learnt on a logarithmic scale.

    Args:
        most: Number of rows to keep.

    Attributes:
        rows: Number of rows that were drawn from.
        parts: The rows that are kept, as arrays, DataFrames or Series of the same length. The second one holds the targets.
    """

    def __init__(self, most: int) -> None:
        self.most, self.rows = most, 0
        self.parts: tuple[Any, ...] = ()
        self._keys = np.zeros(0)
        self._order = np.zeros((0, 2), dtype=np.int64)  # portion and row within it

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
        self._join(tuple(parts), generator.random(count), order)

    def merge(self, other: "Sample") -> None:
        """Draws from the rows of another portion too."""
        self.rows += other.rows
        if other.parts:
            self._join(other.parts, other._keys, other._order)

    def _join(self, parts: tuple[Any, ...], keys: np.ndarray, order: np.ndarray) -> None:
        if len(self._keys) >= self.most:  # most of the new rows have too large a key
            near = self._kept(keys, parts[1], int((keys < self._keys[self.most - 1]).sum()))
            parts, keys, order = tuple(take(part, near) for part in parts), keys[near], order[near]
        if self.parts:
            parts = tuple(join(pair) for pair in zip(self.parts, parts, strict=True))
            keys, order = np.concatenate([self._keys, keys]), np.concatenate([self._order, order])
        kept = self._kept(keys, parts[1], self.most)
        self.parts = tuple(take(part, kept) for part in parts)
        self._keys, self._order = keys[kept], order[kept]

    @staticmethod
    def _kept(keys: np.ndarray, targets: Any, most: int) -> np.ndarray:
        """Indices of the rows to keep, in the order of their keys."""
        by_key = np.argsort(keys, kind="stable")
        if len(keys) <= most:
            return by_key
        kept = [by_key[:most]]
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
        at = np.lexsort(self._order.T[::-1])
        return tuple(take(part, at) for part in self.parts)


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
