"""Estimators for tables as they are: TableRegressor and TableClassifier."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from bochner.estimators import Settings, StationaryClassifier, StationaryRegressor
from bochner.tables.errors import TableError
from bochner.tables.table import Table, Target


class _TableEstimator(BaseEstimator):
    """Parameters of both, and what they do with a table before and after the estimator that they hold."""

    table_: Table
    target_: Target
    estimator_: Any
    _kind: Any
    _task: str

    def __init__(
        self,
        *,
        drop: Sequence[str] = (),
        budget: float | None = None,
        kernel: Any = ("matern32", "rbf"),
        hidden_layer_sizes: tuple[int, ...] = (200, 200, 25),
        false_alarm: float = 0.05,
        device: str = "auto",
        random_state: Any = None,
        verbose: bool = False,
        settings: Settings | None = None,
    ) -> None:
        self.drop = drop
        self.budget = budget
        self.kernel = kernel
        self.hidden_layer_sizes = hidden_layer_sizes
        self.false_alarm = false_alarm
        self.device = device
        self.random_state = random_state
        self.verbose = verbose
        self.settings = settings

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        return tags

    def check_parameters(self) -> None:
        """Raises a ValueError that names the first parameter that cannot be used."""
        if isinstance(self.drop, str):
            raise ValueError(f"The drop parameter must be a list of names, got {self.drop!r} instead.")
        self._make().check_parameters()

    def _make(self) -> Any:
        """The estimator that learns from numbers and categories."""
        parameters = {name: value for name, value in self.get_params(deep=False).items() if name != "drop"}
        return self._kind(**parameters)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fits to a table as it is and a target.

        Args:
            X: A DataFrame: numbers, dates, currencies, categories, texts, ids.
            y: The target, one for each row: numbers or texts such as '$12,588'; or labels.
            sample_weight: How many rows each row stands for; (n,).

        Raises:
            TableError: The table or the target cannot be used; all problems are named.
        """
        began = time.perf_counter()
        self.check_parameters()
        frame, problems = as_frame(X), []
        if unknown := [name for name in self.drop if name not in map(str, frame.columns)]:
            problems.append(f"The drop parameter must name columns of X, got {unknown[0]!r} instead.")
        series = y if isinstance(y, pd.Series) else pd.Series(np.asarray(y).ravel() if y is not None else [])
        if len(series) != len(frame):
            raise ValueError(f"X and y must have the same number of rows, got {len(frame)} and {len(series)} instead.")
        target, table, values = None, None, np.zeros(0)
        try:
            target = Target.learn(str(series.name or "y"), series, self._task)
            values, bad = target.values(series)
            if bad.any():
                first = int(bad.argmax())
                problems.append(
                    f"The target '{target.name}' is missing or cannot be read in {int(bad.sum())} rows, the first is row "
                    f"{first + 1} ('{series.iloc[first]}'); leave them out."
                )
        except TableError as error:
            problems += error.problems
        try:
            table = Table.learn(frame, self.drop)
        except TableError as error:
            problems += error.problems
        if problems or table is None or target is None:
            raise TableError(*problems)
        plain = self._task == "classification" and pd.api.types.is_numeric_dtype(series.dtype)
        labels = series.to_numpy() if plain else values
        clean, estimator = table.transform(frame), self._make()
        if self.budget is not None:  # understanding the table has taken its part
            estimator.budget = max(1e-3, self.budget - (time.perf_counter() - began))
        estimator.fit(clean, labels, sample_weight)
        estimator.budget = self.budget
        self.table_, self.target_, self.estimator_ = table, target, estimator
        self.n_features_in_ = frame.shape[1]
        return self

    @property
    def summary_(self) -> list[str]:
        """What was done with each column, a line each, the target last."""
        check_is_fitted(self)
        return [*self.table_.summary(), f"{self.target_.name}: the target, {self.target_.note}"]

    @property
    def ood_threshold_(self) -> float:
        """Score beyond which a row is unlike the training data."""
        return self.estimator_.ood_threshold_

    def clean(self, X: Any) -> pd.DataFrame:
        """The numbers and categories that the model sees of a table."""
        check_is_fitted(self)
        frame = as_frame(X)
        return self.table_.adapted(frame)[0].transform(frame)

    def ood_score(self, X: Any) -> np.ndarray:
        """How strange each row is: from 0, like most of the training data, to 1, like nothing seen."""
        return self.estimator_.ood_score(self.clean(X))


def as_frame(X: Any) -> pd.DataFrame:
    """A DataFrame whose columns have different names; an array's columns are called 0, 1 and so on."""
    frame = X if isinstance(X, pd.DataFrame) else pd.DataFrame(np.asarray(X))
    names = [str(name) for name in frame.columns]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TableError(f"X has more than one column named {twice!r}; rename or leave out the others.")
    return frame


class TableRegressor(RegressorMixin, _TableEstimator):
    """Regression from a table as it is: dates, currencies, ids, texts and missing values; for scikit-learn.

    ``summary_`` says what each column was taken for. What is then fitted is a ``StationaryRegressor``.

    Args:
        drop: Names of columns to leave out.
        budget: Seconds that ``fit`` may take; None for as many as it needs.
        kernel: The prior's kernel, or several.
        hidden_layer_sizes: Widths of the hidden layers of trained networks, which join from a few hundred rows on; () for none.
        false_alarm: Share of rows like the training data whose ``ood_score`` may exceed ``ood_threshold_``.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        random_state: Seed of every draw.
        verbose: Whether to say what takes time.
        settings: Every other constant, ``bochner.estimators.Settings``.

    Attributes:
        table_: What was learnt about the columns.
        target_: What was learnt about the target.
        estimator_: The fitted ``StationaryRegressor``.
    """

    _kind, _task = StationaryRegressor, "regression"

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the prediction at each row; with ``return_std`` its standard deviation too, noise included."""
        return self.estimator_.predict(self.clean(X), return_std=return_std)

    def predict_quantiles(self, X: Any, quantiles: Iterable[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles of the prediction at each row, (n, quantiles)."""
        return self.estimator_.predict_quantiles(self.clean(X), quantiles)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """Ends, (n, 2), of the central interval that holds the target with probability ``coverage``."""
        return self.estimator_.predict_interval(self.clean(X), coverage)

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """Log density of each target, (n,)."""
        return self.estimator_.log_prob(self.clean(X), self.target_.values(pd.Series(y))[0])

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y at all rows together, (n, n_samples)."""
        return self.estimator_.sample_y(self.clean(X), n_samples, random_state)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R² of the predictions."""
        return float(super().score(X, self.target_.values(pd.Series(y))[0], sample_weight))


class TableClassifier(ClassifierMixin, _TableEstimator):
    """Classification from a table as it is: dates, currencies, ids, texts and missing values; for scikit-learn.

    ``summary_`` says what each column was taken for. What is then fitted is a ``StationaryClassifier``. Labels that are texts
    lose the blanks around them, and '1.0' is '1'.

    Args:
        drop: Names of columns to leave out.
        budget: Seconds that ``fit`` may take; None for as many as it needs.
        kernel: The prior's kernel, or several.
        hidden_layer_sizes: Widths of the hidden layers of trained networks, which join from a few hundred rows on; () for none.
        false_alarm: Share of rows like the training data whose ``ood_score`` may exceed ``ood_threshold_``.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        random_state: Seed of every draw.
        verbose: Whether to say what takes time.
        settings: Every other constant, ``bochner.estimators.Settings``.

    Attributes:
        table_: What was learnt about the columns.
        target_: What was learnt about the target.
        estimator_: The fitted ``StationaryClassifier``.
        classes_: The labels, in the order of the columns of ``predict_proba``.
    """

    _kind, _task = StationaryClassifier, "classification"

    @property
    def classes_(self) -> np.ndarray:
        """The labels, in the order of the columns of ``predict_proba``."""
        return self.estimator_.classes_

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class at each row, (n, c)."""
        return self.estimator_.predict_proba(self.clean(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        return self.classes_[self.predict_proba(X).argmax(1)]

    def labels(self, y: Any) -> np.ndarray:
        """Labels in the form in which they were learnt."""
        plain = self.classes_.dtype.kind not in "UO"
        return np.asarray(y) if plain else self.target_.values(pd.Series(y))[0]

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """Log probability of each label, (n,)."""
        return self.estimator_.log_prob(self.clean(X), self.labels(y))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of the predictions."""
        return float(super().score(X, self.labels(y), sample_weight))
