"""Estimators for tables as they are: TableRegressor and TableClassifier, which understand columns and pass numbers on."""

import inspect
import time
import warnings
from collections.abc import Iterable, Sequence
from numbers import Number
from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from bochner.estimators.base import TrainingData
from bochner.estimators.checks import as_numpy, check_row_weights, check_same_rows, check_seed, named_errors
from bochner.estimators.classifier import StationaryClassifier
from bochner.estimators.regressor import StationaryRegressor
from bochner.members.settings import Settings
from bochner.tables.errors import TableError, in_both
from bochner.tables.table import Changes, Signs, Table, without_empty
from bochner.tables.targets import Target


class _TableEstimator(BaseEstimator):
    """What both estimators for tables do with a table before and after the estimator that they hold."""

    table_: Table
    target_: Target
    estimator_: Any
    _kind: Any
    _task: str

    def __init__(
        self,
        *,
        drop: Sequence[str] = (),
        keep: Sequence[str] = (),
        kernel: Any = ("matern32", "rbf"),
        hidden_layer_sizes: tuple[int, ...] = (200, 200, 25),
        false_alarm: float = 0.05,
        device: str = "auto",
        random_state: Any = None,
        verbose: bool = False,
        settings: Settings | None = None,
        budget: float | None = None,
    ) -> None:
        self.drop = drop
        self.keep = keep
        self.kernel = kernel
        self.hidden_layer_sizes = hidden_layer_sizes
        self.false_alarm = false_alarm
        self.device = device
        self.random_state = random_state
        self.verbose = verbose
        self.settings = settings
        self.budget = budget

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        return tags

    def check_parameters(self) -> None:
        """Raises a ValueError that names the first parameter that cannot be used."""
        for name, value in (("drop", self.drop), ("keep", self.keep)):
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise ValueError(f"The {name} parameter must be a list of names, got {value!r} instead.")
        self._make().check_parameters()

    def _make(self) -> Any:
        """A new estimator for the numbers and categories of the table."""
        parameters = {
            name: value for name, value in self.get_params(deep=False).items() if name not in ("drop", "keep")
        }
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
        self._learn(X, y, sample_weight)
        return self

    def fit_batches(self, batches: Any, target: str | None = None) -> Self:
        """Fits to rows that come in batches and need not fit into memory, as the ``fit_batches`` of ``StationaryRegressor`` does.

        Args:
            batches: An iterable of (X, y) or (X, y, sample_weight) that begins anew each time that it is gone through, such as a
                list; or a dataset of pyarrow.
            target: Name of the target's column in a dataset.
        """
        from bochner.streaming.learning import AllRowsLearner, Batches, fit_batches

        self.check_parameters()

        changes = Changes()

        def learner(fitted: Any, training: TrainingData, sample: Any) -> AllRowsLearner:
            def clean(X: Any, y: Any) -> tuple[Any, Any]:
                return fitted.table_.transform(as_frame(X), changes), fitted._read_target(X, y)

            return AllRowsLearner(fitted.estimator_, training, clean(*sample[:2]), clean=clean, begin=changes.clear)

        most, seed = (self.settings or Settings()).sample_rows, check_seed(self.random_state)
        fit_batches(self, Batches(batches, target), most, seed, learner)
        _warn_user("The table", changes.lines(), than="the sample that columns are learnt from")
        return self

    def _read_target(self, X: Any, y: Any) -> np.ndarray:
        """A target as the estimator for numbers and categories takes it."""
        raise NotImplementedError

    def _learn(self, X: Any, y: Any, sample_weight: Any) -> TrainingData:
        """Understands a table, fits to it, and returns the rows as the estimator has taken them."""
        began = time.perf_counter()
        self.check_parameters()
        if y is None:
            raise ValueError(f"This {type(self).__name__} requires y to be passed, but the target y is None.")
        frame = as_frame(X)
        drop, keep = list(map(str, self.drop)), list(map(str, self.keep))
        problems = _find_wrong_names(frame, drop, keep)
        series = as_series(y, "y")
        if len(series) != len(frame):
            raise ValueError(f"X and y must have the same number of rows, got {len(frame)} and {len(series)} instead.")
        target, table, values = None, None, np.zeros(0)
        signs = Signs.learn(frame, drop, series)
        try:
            target = Target.learn(str(series.name or "y"), series, self._task, signs.decimal)
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
            table = Table.learn(frame, drop, signs, keep)
        except TableError as error:
            problems += error.problems
        if problems or table is None or target is None:
            raise TableError(*problems)
        labels = values if self._task == "regression" else first_spellings(series, values)
        return self.learn_understood(table, target, table.transform(frame), labels, sample_weight, began)

    def learn_understood(
        self,
        table: Table,
        target: Target,
        clean: pd.DataFrame,
        y: np.ndarray,
        sample_weight: Any = None,
        began: float | None = None,
    ) -> TrainingData:
        """Fits to a table whose columns and target are understood already.

        Args:
            table: What the columns are; those without a value in the rows are dropped.
            target: What the target is.
            clean: The rows as numbers and categories, from ``table.transform``.
            y: The target as numbers or labels.
            sample_weight: How many rows each row stands for; (n,).
            began: When the time of the budget began, on ``time.perf_counter``.

        Returns:
            The rows as the estimator has taken them.
        """
        began, estimator = began or time.perf_counter(), self._make()
        table = without_empty(table, clean)
        clean = clean.loc[:, table.outputs]
        if self.budget is not None:  # understanding the table has taken its part
            estimator.budget = max(1e-3, self.budget - (time.perf_counter() - began))
        training = estimator._learn(clean, y, sample_weight)
        estimator.budget = self.budget
        self.table_, self.target_, self.estimator_ = table, target, estimator
        self.n_features_in_ = len(table.columns)
        return training

    @property
    def summary_(self) -> list[str]:
        """A line for each column that says what was done with it; the target comes last."""
        check_is_fitted(self)
        return [*self.table_.summary(), f"{self.target_.name}: the target, {self.target_.note}"]

    @property
    def _inner(self) -> Any:
        """The fitted estimator; a NotFittedError where there is none."""
        check_is_fitted(self, "estimator_")
        return self.estimator_

    @property
    def ood_threshold_(self) -> float:
        """Score above which a row counts as unlike the training data."""
        return self.estimator_.ood_threshold_

    def clean(self, X: Any) -> pd.DataFrame:
        """A table as the numbers and categories that the model sees."""
        check_is_fitted(self)
        frame, changes = as_frame(X), Changes()
        table, lines = self.table_.adapted(frame)
        clean = table.transform(frame, changes)
        _warn_user("X", [*lines, *changes.lines()])
        return clean

    def ood_score(self, X: Any) -> np.ndarray:
        """A score for each row: from 0, like most of the training data, to 1, unlike all of it."""
        return self._inner.ood_score(self.clean(X))


def _find_wrong_names(frame: pd.DataFrame, drop: list[str], keep: list[str]) -> list[str]:
    """What is wrong with the names of columns to leave out and to keep."""
    names, problems = [str(name) for name in frame.columns], in_both(drop, keep)
    for option, wanted in (("drop", drop), ("keep", keep)):
        if unknown := [name for name in wanted if name not in names]:
            problems.append(f"The {option} parameter must name columns of X, got {unknown[0]!r} instead.")
    return problems


def _warn_user(argument: str, lines: Sequence[str], than: str = "training") -> None:
    """Warns of what differs from training, if anything does, at the line outside of this package that led here."""
    if not lines:
        return
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("bochner."):
        level, frame = level + 1, frame.f_back
    warnings.warn("\n  ".join([f"{argument} differs from {than}:", *lines]), stacklevel=level)


def first_spellings(values: pd.Series, labels: np.ndarray) -> np.ndarray:
    """Labels as the user wrote them: each one in its first spelling, where all are texts or all are numbers.

    Args:
        values: The target as it came.
        labels: The names of its classes, which merge spellings.
    """
    if pd.api.types.is_numeric_dtype(values.dtype):
        return values.to_numpy()
    first: dict[str, Any] = {}
    for label, value in zip(labels.tolist(), values.tolist(), strict=True):
        first.setdefault(label, value)
    kinds = {type(value) for value in first.values()}
    numbers = all(issubclass(kind, Number) and kind is not bool for kind in kinds)
    return np.array([first[label] for label in labels.tolist()]) if len(kinds) == 1 or numbers else labels


def as_series(y: Any, name: str) -> pd.Series:
    """A target as a Series; a ValueError where it has several columns."""
    if isinstance(y, pd.Series):
        return y if y.name is not None else y.rename(name)
    with named_errors("y"):
        values = np.asarray([] if y is None else as_numpy(y))
        if values.ndim > 1 and values.shape[1:] != (1,):
            raise ValueError(f"y must have one column, got an array of shape {values.shape} instead.")
        return pd.Series(values.ravel(), name=name)


def as_frame(X: Any) -> pd.DataFrame:
    """A DataFrame whose columns have different names; an array's columns are called 0, 1 and so on."""
    with named_errors("X"):
        frame = (
            X if isinstance(X, pd.DataFrame) else pd.DataFrame(X if isinstance(X, dict) else np.asarray(as_numpy(X)))
        )
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
        keep: Names of columns that hold no ids, codes or numbers of the rows, though they look like it.
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
        return self._inner.predict(self.clean(X), return_std=return_std)

    def predict_quantiles(self, X: Any, quantiles: Iterable[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles of the prediction at each row, (n, quantiles)."""
        return self._inner.predict_quantiles(self.clean(X), quantiles)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """Ends, (n, 2), of the central interval that holds the target with probability ``coverage``."""
        return self._inner.predict_interval(self.clean(X), coverage)

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """Log density of each target, (n,)."""
        return self._inner.log_prob(self.clean(X), self.numbers(X, y))

    def numbers(self, X: Any, y: Any) -> np.ndarray:
        """Targets as numbers, written as in training or with another decimal sign."""
        check_is_fitted(self, "estimator_")
        series, frame = as_series(y, self.target_.name), as_frame(X)
        check_same_rows(len(frame), len(series))
        frame = frame.reset_index(drop=True).assign(**{self.target_.name: series.to_numpy()})
        target, lines = self.table_.adapted_target(frame, self.target_)
        _warn_user("y", lines)
        return target.values(series)[0]

    _read_target = numbers

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y at all rows together, (n, n_samples)."""
        return self._inner.sample_y(self.clean(X), n_samples, random_state)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R² of the predictions."""
        return self._inner.score(self.clean(X), self.numbers(X, y), sample_weight)


class TableClassifier(ClassifierMixin, _TableEstimator):
    """Classification from a table as it is: dates, currencies, ids, texts and missing values; for scikit-learn.

    ``summary_`` says what each column was taken for. What is then fitted is a ``StationaryClassifier``. Labels that are texts
    lose the blanks around them, and '1.0' is '1'.

    Args:
        drop: Names of columns to leave out.
        keep: Names of columns that hold no ids, codes or numbers of the rows, though they look like it.
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
        return self._inner.predict_proba(self.clean(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        chosen = self.predict_proba(X).argmax(1)
        return self.classes_[chosen]

    def labels(self, y: Any) -> np.ndarray:
        """Labels in the spelling in which they were learnt; unknown labels stay as they are.

        Raises:
            TableError: All of them are missing.
        """
        check_is_fitted(self, "estimator_")
        series = as_series(y, self.target_.name)
        texts, missing = self.target_.values(series)
        if missing.all():
            raise TableError(f"The target '{self.target_.name}' is missing in every row.")
        names, _ = self.target_.values(pd.Series([str(label) for label in self.classes_.tolist()], dtype=object))
        known = dict(zip(names.tolist(), self.classes_.tolist(), strict=True))
        spelled = [known.get(text, text) for text in texts.tolist()]
        return np.array(spelled, dtype=self.classes_.dtype if set(texts) <= set(known) else object)

    def _read_target(self, X: Any, y: Any) -> np.ndarray:  # noqa: ARG002
        return self.labels(y)

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """Log probability of each label, (n,)."""
        return self._inner.log_prob(self.clean(X), self.labels(y))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of the predictions; a label that training did not have counts as wrong."""
        predicted, labels = self.predict(X).tolist(), self.labels(y).tolist()
        check_same_rows(len(predicted), len(labels))
        weight = check_row_weights(sample_weight, len(labels))
        return float(np.average([bool(a == b) for a, b in zip(predicted, labels, strict=True)], weights=weight))
