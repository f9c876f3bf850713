"""Checks of arguments: every error names the argument that cannot be used."""

import contextlib
import math
import re
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.exceptions import NotFittedError
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight
from torch import Tensor

from bochner.estimators.columns import is_category

MAX_WIDTH_PRODUCT = 2**28  # largest number of weights between two hidden layers: 1 GiB in float32
MAX_DRAWS = 2**28  # largest number of values that one call of sample_y returns: 2 GiB

MAX_WEIGHT = 1e12  # largest sample weight, and one over the smallest: beyond it, sums of rows lose all digits


@contextlib.contextmanager
def named_errors(argument: str) -> Iterator[None]:
    """Makes every error inside a ValueError or TypeError that names the argument.

    What scikit-learn, pandas, NumPy and torch raise about a bad argument is of many types, and often does not say which one it was.
    """
    try:
        yield
    except NotFittedError:
        raise
    except Exception as error:
        if isinstance(error, ValueError | TypeError) and re.search(rf"\b{argument}\b", str(error)):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"The {argument} parameter cannot be used: {error}") from error


def as_numpy(value: Any) -> Any:
    """A tensor as an array, without its graph; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.layout != torch.strided:
        raise TypeError(f"a dense tensor is needed, got a sparse one of layout {value.layout}")
    dense = value.detach().cpu().resolve_conj().resolve_neg()
    return (dense.double() if dense.dtype == torch.bfloat16 else dense).numpy()  # NumPy has no bfloat16


def check_number(argument: str, value: object, low: float, high: float, expected: str) -> float:
    """A real number between two limits, which are left out."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool | np.bool_) else math.nan
    except OverflowError:  # of an enormous integer
        number = math.inf
    if not low < number < high:
        raise ValueError(f"The {argument} parameter must {expected}, got {value!r} instead.")
    return number


def check_widths(sizes: object) -> None:
    """Raises a ValueError unless these are widths of hidden layers that fit into memory."""
    if not isinstance(sizes, tuple | list) or not all(
        isinstance(width, Integral) and not isinstance(width, bool) and int(width) > 0 for width in sizes
    ):
        raise ValueError(
            f"The hidden_layer_sizes parameter must be a tuple of positive widths, such as (100, 25), got {sizes!r} instead."
        )
    if any(int(a) * int(b) > MAX_WIDTH_PRODUCT for a, b in zip([1000, *sizes], sizes, strict=False)):
        raise ValueError(
            f"The hidden_layer_sizes parameter must have widths that fit into memory, such as (100, 25), got {sizes!r} instead."
        )


def check_seed(random_state: Any) -> int:
    """A seed from what scikit-learn takes as random_state; a generator moves on by one draw."""
    with named_errors("random_state"):
        return int(check_random_state(random_state).randint(2**31 - 1))


def has_categories(X: Any) -> bool:
    """Whether a table is a DataFrame in which a column holds categories or texts."""
    return isinstance(X, pd.DataFrame) and len(X) > 0 and any(map(is_category, X.dtypes.unique()))


def check_column_names(table: pd.DataFrame) -> None:
    """Raises a ValueError unless the columns of a DataFrame have different names."""
    repeated = table.columns[table.columns.duplicated()]
    if len(repeated):
        raise ValueError(f"X has more than one column named {repeated[0]!r}; rename or leave out the others.")


def check_row_weights(sample_weight: Any, rows: int) -> np.ndarray:
    """How many rows each row stands for, (n,); ones by default. 0 leaves a row out, and at least one must be positive."""
    with named_errors("sample_weight"):
        weight = as_numpy(sample_weight)
        weight = _check_sample_weight(weight, np.zeros((rows, 1)), dtype=np.float64, ensure_non_negative=True)
        positive = weight[weight > 0]
        if positive.min() < 1 / MAX_WEIGHT or positive.max() > MAX_WEIGHT:
            raise ValueError(
                f"The sample_weight parameter must hold 0 or numbers from {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}, got numbers from "
                f"{positive.min():g} to {positive.max():g} instead; multiply them by a common factor."
            )
    return weight


def check_same_rows(rows: int, targets: int) -> None:
    """Raises a ValueError unless X and y have the same number of rows."""
    if rows != targets:
        raise ValueError(f"X and y must have the same number of rows, got {rows} and {targets} instead.")
