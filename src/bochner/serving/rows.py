"""Rows of a request in, predictions out.

The cells of a request are read as ``bochner predict`` reads those of a file with the same rows. There is one difference: a cell
that cannot be read makes its row a bad one here, and counts as missing there.
"""

import copy
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn

import numpy as np
import torch

from bochner.errors import listed, printable, shown
from bochner.serving.quick import quick
from bochner.tables.columns import Column, read_column
from bochner.tables.fitting import predict_rows
from bochner.tables.table import Changes
from bochner.training.threads import one_thread

EXPECTED = {  # what a cell must be, by the kind of its column
    "number": "a number",
    "truth": "yes or no (true or false)",
    "date": "a date",
    "time": "a time of day",
    "category": "a text or a number",
    "text": "a text or a number",
}
NO_VALUE = object()  # stands for a key that a row lacks


class RequestError(ValueError):
    """A request that cannot be answered.

    Attributes:
        status: The HTTP status that says so.
    """

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(printable(message))
        self.status = status


@dataclass
class RowError:
    """A row of a request that cannot be used.

    Attributes:
        row: Its number in the request; the first is 0.
        column: The column where the problem is; None where it is the row itself.
        problem: What was expected, and what came.
    """

    row: int
    column: str | None
    problem: str

    def to_json(self) -> dict[str, Any]:
        """Plain data for the answer."""
        return {"row": self.row, "column": self.column, "error": printable(self.problem)}


@dataclass
class Answered:
    """The answer to a request.

    Attributes:
        predictions: One for each row, in order; None for a bad row.
        errors: The bad rows, in order.
        notes: What differs from the training table, for the user.
    """

    predictions: list[dict[str, Any] | None]
    errors: list[RowError]
    notes: list[str] = field(default_factory=list)

    @property
    def flagged(self) -> int:
        """Number of rows that are unlike the training data."""
        return sum(bool(row["ood"]) for row in self.predictions if row is not None)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the answer."""
        errors = [row.to_json() for row in self.errors]
        return {"predictions": self.predictions, "errors": errors, "notes": self.notes}


# ------------------------------------------------------------------ the body of a request


def parse_rows(body: bytes, most: int) -> list[Any]:
    """The rows of a request, not checked one by one yet: an array of objects, or one object, as JSON.

    Args:
        body: The body of the request.
        most: Largest number of rows.

    Raises:
        RequestError: It is not such JSON.
    """
    try:
        content = json.loads(body, object_pairs_hook=_with_different_keys, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise RequestError("The body is nested too deeply; give an array of rows, each an object.", 400) from error
    except RequestError:
        raise
    except ValueError as error:  # also bytes that are not UTF-8, and numbers of thousands of digits
        raise RequestError(f"The body is not JSON ({_reason(error)}).", 400) from error
    if isinstance(content, dict):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"The body must be a row or an array of rows, got {_kind(content)} instead.")
    if not content:
        raise RequestError("The body must hold at least one row, got an empty array instead.")
    if len(content) > most:
        raise RequestError(f"The body holds {len(content)} rows, more than {most}; send them in several requests.", 413)
    return content


def _with_different_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ."""
    row = dict(pairs)
    if len(row) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise RequestError(f"An object of the body has the key '{shown(twice)}' more than once.", 400)
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"The body holds {name}, which is not JSON; a missing value is null.", 400)


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return str(error).partition(";")[0]


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return f"the text '{shown(value)}'" if isinstance(value, str) else f"the number {shown(value)}"


# ------------------------------------------------------------------ predictions


class Predictor:
    """Answers requests with a fitted model, whose heads are products where that says the same; may be called from several threads.

    Args:
        estimator: A fitted TableRegressor or TableClassifier; it does not change.
    """

    def __init__(self, estimator: Any) -> None:
        self.estimator, self.table = copy.copy(estimator), estimator.table_
        with one_thread(), torch.inference_mode():
            self.estimator.estimator_ = quick(estimator.estimator_)
        self.used: list[Column] = self.table.used
        self.known = {estimator.target_.name, *(column.name for column in self.table.columns)}
        self.classes: list[str] | None = None
        if hasattr(estimator.estimator_, "classes_"):
            self.classes = [str(name) for name in estimator.estimator_.classes_]

    def answer(self, rows: list[Any], coverage: float = 0.9) -> Answered:
        """Predictions for rows, and what is wrong with the rows that cannot be used.

        Args:
            rows: Rows as ``parse_rows`` gives them.
            coverage: Probability of the intervals.
        """
        # On one thread the answer does not depend on the machine, nor on what is computed beside.
        with one_thread(), torch.inference_mode():
            return self._answer(rows, coverage)

    def _answer(self, rows: list[Any], coverage: float) -> Answered:
        errors = {number: bad for number, row in enumerate(rows) if (bad := self._check_row(number, row)) is not None}
        good = [number for number in range(len(rows)) if number not in errors]
        answered = Answered([None] * len(rows), [], self._unknown([rows[number] for number in good]))
        if good:
            cells = {column.name: _as_cells(column, [rows[number] for number in good]) for column in self.used}
            clean, unreadable, notes = self._read(cells)
            answered.notes += notes
            for at, bad in unreadable.items():
                errors[good[at]] = RowError(good[at], bad.name, _expected(bad, rows[good[at]][bad.name]))
            kept = [at for at in range(len(good)) if at not in unreadable]
            if kept:
                if unreadable:
                    clean = {name: values[kept] for name, values in clean.items()}
                for at, prediction in zip(kept, self._predict(clean, coverage), strict=True):
                    answered.predictions[good[at]] = prediction
        answered.errors = [errors[number] for number in sorted(errors)]
        return answered

    def _check_row(self, number: int, row: Any) -> RowError | None:
        """What is wrong with a row before its texts are read; None where nothing is."""
        if not isinstance(row, dict):
            return RowError(
                number, None, f"A row must be an object with a value for each column, got {_kind(row)} instead."
            )
        for column in self.used:
            value = row.get(column.name, NO_VALUE)
            if value is NO_VALUE:
                problem = f"The row lacks the column '{shown(column.name)}'; give {EXPECTED[column.kind]}, or null."
                return RowError(number, column.name, problem)
            if isinstance(value, dict | list) or (isinstance(value, float | int) and not _is_finite(value)):
                return RowError(number, column.name, _expected(column, value))
        return None

    def _unknown(self, rows: list[dict[str, Any]]) -> list[str]:
        """A note of the keys that the model does not know."""
        names = list(dict.fromkeys(name for row in rows if not row.keys() <= self.known for name in row))
        extra = [name for name in names if name not in self.known]
        return [printable(f"columns that the model does not use: {listed(extra)}")] if extra else []

    def _read(self, cells: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[int, Column], list[str]]:
        """Rows as numbers and categories, the first column that cannot be read of each row that has one, and notes."""
        table, notes = self.table.adapted(cells)
        clean: dict[str, np.ndarray] = {}
        unreadable: dict[int, Column] = {}
        changes = Changes()
        for column in table.used:
            read = read_column(column, cells[column.name])
            clean |= read.values
            for at in np.nonzero(read.unreadable)[0].tolist():
                unreadable.setdefault(at, column)
            read.unreadable[:] = False  # they are errors here, and need no note
            changes.add(column, cells[column.name], read)
        return clean, unreadable, [*notes, *changes.lines()]

    def _predict(self, clean: dict[str, np.ndarray], coverage: float) -> list[dict[str, Any]]:
        """The predictions of rows, as plain data."""
        added = [values.tolist() for values in predict_rows(self.estimator, clean, coverage).values()]
        if self.classes is None:
            names = ("mean", "std", "low", "high", "ood_score", "ood")
            return [dict(zip(names, row, strict=True)) for row in zip(*added, strict=True)]
        predicted, *probabilities, scores, flags = added
        return [
            {"predicted": label, "probabilities": dict(zip(self.classes, p, strict=True)), "ood_score": s, "ood": flag}
            for label, p, s, flag in zip(predicted, zip(*probabilities, strict=True), scores, flags, strict=True)
        ]


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # of an integer beyond the largest float
        return False


def _expected(column: Column, value: Any) -> str:
    """The message for a cell that cannot be read."""
    decimal = ", with a decimal comma as in training" if column.decimal == "," and isinstance(value, str) else ""
    style = f" written as {column.style}" if column.kind in ("date", "time") and column.style else ""
    expected = f"{EXPECTED[column.kind]}{style}{decimal}"
    return f"The column '{shown(column.name)}' must hold {expected}, or null, got {_kind(value)} instead."


def _as_cells(column: Column, rows: list[dict[str, Any]]) -> np.ndarray:
    """The cells of a column: numbers where all of them are numbers or null in a column of numbers, else texts as in a file."""
    values = [row[column.name] for row in rows]
    if column.kind == "number" and all(type(value) in (float, int) or value is None for value in values):
        return np.array([math.nan if value is None else float(value) for value in values])
    texts = np.empty(len(values), dtype=object)
    texts[:] = [_as_text(value) for value in values]
    return texts


def _as_text(value: Any) -> str:
    """A JSON value as a file holds it; a number without a decimal sign, for a file may have the point or the comma."""
    if value is None:
        return ""
    if isinstance(value, float):
        if value.is_integer():
            return str(int(value))
        _, digits, exponent = Decimal(repr(value)).as_tuple()
        return f"{'-' if value < 0 else ''}{''.join(map(str, digits))}e{exponent}"
    return str(value)
