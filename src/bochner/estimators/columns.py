"""Columns of an array or a DataFrame as standardised inputs of a model.

- A number is standardised. A missing number becomes the mean. If numbers were missing in training, another input marks them.
- A boolean is a number. A category (pandas' categorical type, or text) becomes one input for each of its values, scaled so that the
  whole column counts as much as a number. A missing category is one more category.
- A value of a kind that was never seen in training (a new category, or a missing value in a complete column) lies far from all
  training rows: as far as a value that was seen in ``unseen_rows`` of the rows would lie.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

MAX_CATEGORIES = 1000  # largest number of different values of a category; columns with more hold names or free text
MAX_INPUT = 1e6  # largest size of an input, in standard deviations; values beyond are cut
MAX_VALUE = 1e100  # largest size of a number in a table; squares of larger ones may overflow
MISSING = "missing"  # name of the category of missing values


@dataclass(frozen=True)
class Column:
    """What was learnt about one column of the training table.

    Attributes:
        name: Its name, or its number.
        mean: Mean of a number.
        scale: Its standard deviation, or 1 where it is constant.
        missing: Share of rows in which a number was missing.
        categories: Values of a category, in order; None for a number.
        shares: Share of rows of each category.
    """

    name: str
    mean: float = 0.0
    scale: float = 1.0
    missing: float = 0.0
    categories: tuple[Any, ...] | None = None
    shares: tuple[float, ...] = ()

    @property
    def inputs(self) -> int:
        """Number of inputs that the column becomes, without the one that says 'never seen'."""
        return len(self.categories) if self.categories is not None else 1 + (self.missing > 0)


def _spread(share: float) -> float:
    """Standard deviation of a 0/1 column."""
    return math.sqrt(share * (1 - share)) or 1.0


def _number_column(name: str, values: np.ndarray, weight: np.ndarray) -> Column:
    """Learns mean, scale and share of missing values of a number."""
    present = ~np.isnan(values)
    if not present.any():
        raise ValueError(f"Column {name} of X has no values; leave it out.")
    if float(np.abs(values[present]).max()) > MAX_VALUE:
        raise ValueError(f"Column {name} of X holds values beyond {MAX_VALUE:g} in size; rescale or clip it first.")
    mean = float(np.average(values[present], weights=weight[present]))
    scale = math.sqrt(float(np.average((values[present] - mean) ** 2, weights=weight[present])))
    if scale <= 1e-12 * abs(mean) or scale == 0:
        # The spread of a constant column consists of rounding errors only.
        mean, scale = float(values[present][0]), max(1.0, abs(mean))
    return Column(name, mean, scale, float(weight[~present].sum() / weight.sum()))


def _category_column(name: str, values: np.ndarray, weight: np.ndarray) -> Column:
    """Learns values of a category, and the share of rows that each one has."""
    levels, number = np.unique(values.astype(str), return_inverse=True)
    if len(levels) > min(MAX_CATEGORIES, max(10, len(values) // 2)):
        raise ValueError(
            f"Column {name} of X holds {len(levels)} different texts in {len(values)} rows: names, identifiers or free text; "
            "leave it out, or group its values."
        )
    shares = np.bincount(number, weight) / weight.sum()
    return Column(name, categories=tuple(str(level) for level in levels), shares=tuple(shares.tolist()))


@dataclass(frozen=True)
class Columns:
    """What was learnt about all columns; turns rows into inputs.

    Attributes:
        columns: The columns, in order.
        unseen: Value of the inputs that say 'never seen', in standard deviations.
    """

    columns: tuple[Column, ...]
    unseen: float

    @classmethod
    def learn(cls, table: Any, weight: np.ndarray, unseen_rows: float) -> "Columns":
        """Learns from the training table: a float array, or a DataFrame with categories."""
        columns = []
        for name, values, is_number in _values(table):
            learn = _number_column if is_number else _category_column
            columns.append(learn(name, values, weight))
        share = min(0.5, unseen_rows / float(weight.sum()))
        return cls(tuple(columns), 1 / _spread(share))

    @property
    def group(self) -> np.ndarray:
        """Index of the column that each input belongs to; first all inputs of columns, then those that say 'never seen'."""
        plain = [number for number, column in enumerate(self.columns) for _ in range(column.inputs)]
        return np.array([*plain, *self._categorical()], dtype=np.int64)

    @property
    def plain(self) -> int:
        """Number of inputs before those that say 'never seen'."""
        return sum(column.inputs for column in self.columns)

    def _categorical(self) -> list[int]:
        """Indices of the columns that hold categories."""
        return [number for number, column in enumerate(self.columns) if column.categories is not None]

    def transform(self, table: Any) -> np.ndarray:
        """Rows as standardised inputs, (n, inputs), from an array, a DataFrame, or arrays by name in the order of training."""
        plain: list[np.ndarray] = []
        unseen: list[np.ndarray] = []
        categorical = [column.categories is not None for column in self.columns]
        for column, (_, values, is_number) in zip(self.columns, _values(table, categorical), strict=True):
            if column.categories is not None:
                inputs, strange = self._category(column, values.astype(str))
                plain.append(inputs)
                unseen.append(self.unseen * strange)
            elif is_number:
                plain.append(self._number(column, values))
            else:
                raise ValueError(f"Column {column.name} of X held numbers in training, and now holds text.")
        rows = np.column_stack([*plain, *unseen])
        return np.clip(rows, -MAX_INPUT, MAX_INPUT)

    def _number(self, column: Column, values: np.ndarray) -> np.ndarray:
        """Inputs of a number, (n,) or (n, 2)."""
        absent = np.isnan(values)
        with np.errstate(over="ignore"):
            scaled = (values - column.mean) / column.scale
        if column.missing:
            flag = (absent - column.missing) / _spread(column.missing)
            return np.column_stack([np.where(absent, 0.0, scaled), flag])
        return np.where(absent, self.unseen, scaled)

    def _category(self, column: Column, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs of a category, (n, values), and which rows hold a value that was never seen."""
        levels = np.array(column.categories)
        at = np.searchsorted(levels, values).clip(max=len(levels) - 1)
        learnt = levels[at] == values
        shares = np.array(column.shares)
        onehot = np.zeros((len(values), len(levels)))
        onehot[np.nonzero(learnt)[0], at[learnt]] = 1.0
        onehot[~learnt] = shares  # the mean of the training rows; the input that says 'never seen' makes the distance
        spreads = np.array([_spread(share) for share in column.shares])
        return (onehot - shares) / (spreads * math.sqrt(len(levels))), ~learnt


def _values(table: Any, categorical: list[bool] | None = None) -> list[tuple[str, np.ndarray, bool]]:
    """Of each column its name, its values and whether they are numbers; a missing category becomes the category MISSING.

    Args:
        table: An array, a DataFrame, or arrays by name: texts and None are categories, floats are numbers.
        categorical: Which columns are categories; by default those of a categorical type or text.
    """
    if isinstance(table, np.ndarray):
        return [(str(number), values, True) for number, values in enumerate(table.T)]
    if isinstance(table, dict):
        return [
            (f"'{name}'", np.array([MISSING if value is None else value for value in values], dtype=object), False)
            if values.dtype == object
            else (f"'{name}'", values, True)
            for name, values in table.items()
        ]
    columns = []
    for number, name in enumerate(table.columns):
        series = table[name]
        if is_category(series.dtype) or (categorical is not None and categorical[number]):
            texts = [MISSING if pd.isna(value) else _text(value) for value in series.astype(object)]
            columns.append((f"'{name}'", np.array(texts, dtype=object), False))
        else:
            columns.append((f"'{name}'", series.to_numpy(dtype=np.float64, na_value=np.nan), True))
    return columns


def _text(value: Any) -> str:
    """A category's value as text; whole numbers have the same text as int and as float."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def as_codes(table: Any) -> np.ndarray:
    """A table as a float array in which only equal rows are equal: categories are numbered."""
    if isinstance(table, np.ndarray):
        return table
    columns = [
        values if is_number else np.unique(values.astype(str), return_inverse=True)[1]
        for _, values, is_number in _values(table)
    ]
    return np.column_stack(columns).astype(np.float64)


def is_category(kind: Any) -> bool:
    """Whether the dtype of a pandas column is that of categories or text."""
    return isinstance(kind, pd.CategoricalDtype) or (
        pd.api.types.is_object_dtype(kind) or pd.api.types.is_string_dtype(kind)
    )
