"""Collects rows for a report on predictions from a table that is read in pieces: the first, the strangest, and counts."""

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd

from bochner.reports.model.rows import Rows, is_regression
from bochner.reports.model.strange import STRANGE_ROWS

FIRST_ROWS = 300  # rows from the beginning of the table that are kept


class Collected:
    """The rows of a prediction that a page shows, however long the table is.

    Attributes:
        rows: Number of all rows.
        flagged: Number of flagged rows.
        classes: Number of rows by predicted class.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows = self.flagged = 0
        self.classes: Counter[str] = Counter()
        self._kept: tuple[Rows, np.ndarray, np.ndarray] | None = None
        self._position = np.zeros(0, dtype=int)  # in the table, of the rows that are kept

    def take(self, texts: pd.DataFrame, places: Any, clean: pd.DataFrame, added: dict[str, np.ndarray]) -> None:
        """Takes a piece of the table: its cells, its lines, the inputs of the model, and the columns that a prediction added."""
        columns = list(added.values())
        scores = np.asarray(columns[-2])
        # mean, std, low, high; or the class and then probabilities
        kept = [columns[0], *columns[2:4]] if is_regression(self.model) else columns[1:-2]
        predictions = np.column_stack(kept).astype(float)
        if not is_regression(self.model):
            self.classes.update(map(str, columns[0]))
        position = self.rows + np.arange(len(clean))
        self.rows, self.flagged = self.rows + len(clean), self.flagged + int(columns[-1].sum())
        rows = Rows(texts, clean, places)
        if self._kept is not None:
            before, old, strange = self._kept
            frames = [pd.concat(pair) for pair in ((before.frame, texts), (before.clean, clean))]
            rows = Rows(frames[0], frames[1], [*before.places, *places])
            predictions, scores = np.concatenate([old, predictions]), np.concatenate([strange, scores])
            position = np.concatenate([self._position, position])
        keep = position < FIRST_ROWS
        keep[np.argsort(-scores, kind="stable")[:STRANGE_ROWS]] = True
        at = np.nonzero(keep)[0]
        self._kept, self._position = (rows.take(at), predictions[at], scores[at]), position[at]

    def kept(self) -> tuple[Rows, np.ndarray, np.ndarray, np.ndarray]:
        """Rows, predictions, scores, and the positions of those from the beginning of the table."""
        if self._kept is None:
            raise ValueError("There are no rows to report on.")
        return *self._kept, np.nonzero(self._position < FIRST_ROWS)[0]
