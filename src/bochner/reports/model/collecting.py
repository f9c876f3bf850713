"""What a report on predictions keeps of a table that is read in pieces: its first rows, its strangest, and counts."""

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd

from bochner.reports.model.rows import Rows, is_regression
from bochner.reports.model.strange import STRANGEST

FIRST = 300


class Collected:
    """Rows of a prediction, as many as a page shows, however long the table is.

    Attributes:
        rows: How many there were.
        flagged: How many were flagged.
        classes: How often each class was predicted.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows = self.flagged = 0
        self.classes: Counter[str] = Counter()
        self._kept: tuple[Rows, np.ndarray, np.ndarray] | None = None
        self._position = np.zeros(0, dtype=int)  # in the table, of the rows that are kept

    def take(self, texts: pd.DataFrame, places: Any, clean: pd.DataFrame, added: dict[str, np.ndarray]) -> None:
        """Looks at a piece: its cells, its lines, what the model sees of it, and the columns that a prediction added."""
        said = list(added.values())
        scores = np.asarray(said[-2])
        # mean, std, low, high; or the class and then probabilities
        found = np.column_stack([said[0], *said[2:4]] if is_regression(self.model) else said[1:-2]).astype(float)
        if not is_regression(self.model):
            self.classes.update(map(str, said[0]))
        position = self.rows + np.arange(len(clean))
        self.rows, self.flagged = self.rows + len(clean), self.flagged + int(said[-1].sum())
        rows = Rows(texts, clean, places)
        if self._kept is not None:
            before, old, strange = self._kept
            frames = [pd.concat(pair) for pair in ((before.frame, texts), (before.clean, clean))]
            rows = Rows(frames[0], frames[1], [*before.places, *places])
            found, scores = np.concatenate([old, found]), np.concatenate([strange, scores])
            position = np.concatenate([self._position, position])
        keep = position < FIRST
        keep[np.argsort(-scores, kind="stable")[:STRANGEST]] = True
        at = np.nonzero(keep)[0]
        self._kept, self._position = (rows.take(at), found[at], scores[at]), position[at]

    def kept(self) -> tuple[Rows, np.ndarray, np.ndarray, np.ndarray]:
        """Rows, answers, scores, and which of them are the first of the table."""
        if self._kept is None:
            raise ValueError("There are no rows to report on.")
        return *self._kept, np.nonzero(self._position < FIRST)[0]
