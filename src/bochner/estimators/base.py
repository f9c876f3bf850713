"""What both estimators share: parameters, training rows, new rows, and the score for rows unlike the training data."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from bochner.errors import unknown_name
from bochner.estimators.checks import (
    as_numpy,
    check_column_names,
    check_number,
    check_row_weights,
    check_same_rows,
    check_seed,
    check_widths,
    has_categories,
    named_errors,
)
from bochner.estimators.columns import Columns, as_codes, is_category
from bochner.estimators.novelty import Novelty, learn_novelty
from bochner.estimators.targets import as_tensor
from bochner.members.budget import Clock, fit_within_budget
from bochner.members.features import FEATURE_CHUNK_ROWS
from bochner.members.member import Inputs
from bochner.members.settings import Settings, Task
from bochner.priors import spectra
from bochner.training.threads import one_thread

MAX_FACTOR = math.nextafter(1, 2)  # a forgetting factor lies below: it is at most 1
MAX_PARTS = 5  # parts into which a common row is divided: as many as there are parts of the rows that judge
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class TrainingData:
    """Checked training data. Equal rows are merged into one row of more weight, and rows are sorted: their order does not matter.

    Attributes:
        columns: Means, scales and categories of the columns.
        x: Inputs, (n, inputs), on the device.
        y: Targets, (n, ...), as an array.
        weight: How many rows each row stands for, (n,), on the device.
        names: Names of the columns, where they have names.
        features: Number of columns.
        began: When the fit began, on the clock of ``time.perf_counter``.
    """

    columns: Columns
    x: Tensor
    y: np.ndarray
    weight: Tensor
    names: np.ndarray | None
    features: int
    began: float

    def part(self, rows: np.ndarray) -> "TrainingData":
        """The training data of some of the rows."""
        at = torch.from_numpy(rows).to(self.x.device)
        return replace(self, x=self.x[at], y=self.y[rows], weight=self.weight[at])


def draw_rows(rows: int, count: int, labels: np.ndarray | None, seed: Any) -> np.ndarray:
    """Indices of ``count`` rows drawn at random, and of two rows of every class."""
    order = check_random_state(seed).permutation(rows)
    chosen = [order[:count]]
    if labels is not None:
        chosen += [order[labels[order] == label][:2] for label in np.unique(labels)]
    return np.unique(np.concatenate(chosen))


class StationaryEstimator(BaseEstimator):
    """Parameters and checks of StationaryRegressor and StationaryClassifier."""

    columns_: Columns
    mixtures_: list[Any]
    novelty_: Novelty
    ood_threshold_: float

    def __init__(
        self,
        *,
        kernel: Any = ("matern32", "rbf"),
        hidden_layer_sizes: tuple[int, ...] = (200, 200, 25),
        false_alarm: float = 0.05,
        device: str = "auto",
        random_state: Any = None,
        verbose: bool = False,
        settings: Settings | None = None,
        budget: float | None = None,
    ) -> None:
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
        tags.input_tags.allow_nan = True
        return tags

    # ------------------------------------------------------------------ parameters

    def check_parameters(self) -> None:
        """Raises a ValueError that names the first parameter that cannot be used."""
        _spectra(self.kernel)
        check_widths(self.hidden_layer_sizes)
        check_number("false_alarm", self.false_alarm, 0, 1, "lie between 0 and 1")
        if not isinstance(self.device, str) or self.device not in DEVICES:
            raise ValueError(unknown_name("device", self.device, DEVICES))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("The device parameter asks for a GPU ('cuda'), but torch sees none; use device='cpu'.")
        with named_errors("random_state"):
            check_random_state(self.random_state)
        with named_errors("verbose"):
            bool(self.verbose)
        if self.settings is not None and not isinstance(self.settings, Settings):
            raise ValueError(f"The settings parameter must be a Settings, got {type(self.settings).__name__} instead.")
        if self.budget is not None:
            check_number("budget", self.budget, 0, math.inf, "be a positive number of seconds")

    def _device(self) -> str:
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device

    def _task(self, training: TrainingData, effort: float = 1.0, clock: Clock | None = None) -> Task:
        return Task(
            group=torch.from_numpy(training.columns.group).to(training.x.device),
            plain=training.columns.plain,
            spectra=_spectra(self.kernel),
            hidden=tuple(int(size) for size in self.hidden_layer_sizes),
            settings=(self.settings or Settings()).lighter(effort, len(training.x)),
            seed=check_seed(self.random_state),
            say=self._say,
            progress=bool(self.verbose) and sys.stdout.isatty(),
            clock=clock or Clock(),
        )

    def _fit_mixtures(
        self, training: TrainingData, fit: Callable[[TrainingData, Task], list[Any]], labels: np.ndarray | None = None
    ) -> tuple[TrainingData, list[Any]]:
        """Fits the mixtures, within the budget if there is one; returns the rows that they were fitted to, and the mixtures."""
        seed = self.random_state if self.budget is None else check_seed(self.random_state)

        def attempt(effort: float, clock: Clock) -> tuple[TrainingData, list[Any]]:
            count = (self.settings or Settings()).rows_for(effort, len(training.x))
            part = training
            if count < len(training.x):
                part = training.part(draw_rows(len(training.x), count, labels, seed))
            task = self._task(part, effort, clock)
            with one_thread(len(part.x) <= task.settings.large_rows):
                return part, fit(part, task)

        if self.budget is None:
            return attempt(1.0, Clock())
        return fit_within_budget(self.budget - (time.perf_counter() - training.began), attempt, self._say)

    def _say(self, text: str) -> None:
        if self.verbose:
            print(f"bochner: {text}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------------ rows

    def fit_batches(self, batches: Any, target: str | None = None) -> Self:
        """Fits to rows that come in batches and need not fit into memory.

        The batches are gone through twice. Columns, hyperparameters and networks are learnt from a uniform sample of
        ``Settings.sample_rows`` rows, and the heads from all rows. With fewer rows it is the same as ``fit``. With a budget all is
        learnt from the sample.

        Args:
            batches: An iterable of (X, y) or (X, y, sample_weight) that begins anew each time that it is gone through, such as a
                list; or a dataset of pyarrow.
            target: Name of the target's column in a dataset.
        """
        from bochner.streaming.learning import AllRowsLearner, Batches, fit_batches

        self.check_parameters()
        most, seed = (self.settings or Settings()).sample_rows, check_seed(self.random_state)
        fit_batches(
            self,
            Batches(batches, target),
            most,
            seed,
            lambda fitted, training, sample: AllRowsLearner(fitted, training, sample[:2]),
        )
        return self

    def _update(self, X: Any, y: np.ndarray, sample_weight: Any, forgetting_factor: float) -> Self:
        """Takes in more rows with targets as numbers; earlier rows count ``forgetting_factor``."""
        forgetting_factor = check_number(
            "forgetting_factor", forgetting_factor, 0, MAX_FACTOR, "lie above 0 and be at most 1"
        )
        x = self._inputs(X).cpu().numpy()
        check_same_rows(len(x), len(y))
        weight = check_row_weights(sample_weight, len(y))
        if (weight == 0).any():
            raise ValueError("The sample_weight parameter must hold a positive number for each row, got 0 for some.")
        first, weight = merge_equal_rows(x, y, weight)
        like = torch.from_numpy(x[first]).to(self._device())
        weights, targets = torch.from_numpy(weight).to(like), y[first].reshape(len(first), -1).T
        self.mixtures_ = [
            mixture.updated(like, as_tensor(target, like), weights, forgetting_factor)
            for mixture, target in zip(self.mixtures_, targets, strict=True)
        ]
        self._describe()
        return self

    def _learn(self, X: Any, y: Any, sample_weight: Any) -> TrainingData:
        """Fits, and returns the rows that the mixtures were fitted to."""
        raise NotImplementedError

    def _remember(self, training: TrainingData, mixtures: list[Any], **attributes: Any) -> None:
        """Stores what a fit has learnt, once it has succeeded; nothing stays of an earlier fit."""
        novelty = _novelty_of(training, mixtures, self.false_alarm)
        for name in [name for name in vars(self) if name.endswith("_") and not name.startswith("_")]:
            delattr(self, name)
        self.columns_, self.n_features_in_, self.mixtures_ = training.columns, training.features, mixtures
        if training.names is not None:
            self.feature_names_in_ = training.names
        self.novelty_, self.ood_threshold_ = novelty
        vars(self).update(attributes)
        self._describe()

    def _take_mixtures(self, training: TrainingData, mixtures: list[Any]) -> None:
        """Takes mixtures that have learnt from more rows than those that the columns were learnt from."""
        self.novelty_, self.ood_threshold_ = _novelty_of(training, mixtures, self.false_alarm)
        self.mixtures_ = mixtures
        self._describe()

    def _describe(self) -> None:
        """Sets the fitted attributes that follow from the mixtures; classes have none."""

    def _inputs(self, X: Any) -> Tensor:
        """New rows as inputs of the members, after a check of their columns."""
        check_is_fitted(self)
        with named_errors("X"):
            if any(column.categories is not None for column in self.columns_.columns):
                table = _columns_of_training(self, X)
            elif has_categories(X):
                strange = [str(X.columns[i]) for i in range(X.shape[1]) if is_category(X.dtypes.iloc[i])]
                raise ValueError(f"Column '{strange[0]}' of X held numbers in training, and now holds text.")
            else:
                X = as_numpy(X)
                table = validate_data(self, X, dtype=np.float64, reset=False, ensure_all_finite="allow-nan")
            inputs = self.columns_.transform(table)
        return torch.from_numpy(inputs).to(self._device())

    # ------------------------------------------------------------------ rows unlike the training data

    def ood_score(self, X: Any) -> np.ndarray:
        """Score of each row between 0, like most of the training data, and 1, unlike all of it.

        A score of 0.95 means that one training row in twenty looks as strange (``bochner.estimators.novelty``). Of rows like the
        training data a share of ``false_alarm`` has a score above ``ood_threshold_``.
        """
        scores = []
        for x in self._inputs(X).split(FEATURE_CHUNK_ROWS):
            left = torch.stack([mixture.left(Inputs(x, mixture.extractors)) for mixture in self.mixtures_]).mean(0)
            scores.append(self.novelty_(x, left))
        return torch.cat(scores).cpu().numpy()


def as_kernels(kernel: Any) -> tuple[Any, ...]:
    """The kernels of the kernel parameter, which is one or a sequence."""
    return tuple(kernel) if isinstance(kernel, tuple | list) else (kernel,)


def _spectra(kernel: Any) -> tuple[spectra.Spectrum, ...]:
    """Spectral densities of the kernels that the kernel parameter names."""
    kernels = as_kernels(kernel)
    if not kernels:
        raise ValueError("The kernel parameter must name at least one kernel, got an empty sequence instead.")
    densities = tuple(spectra.resolve_spectrum(name) for name in kernels)
    for name, spectrum in zip(kernels, densities, strict=True):
        if not spectrum.isotropic:
            raise ValueError(f"The kernel parameter must be isotropic (not a product), got {name} instead.")
    return densities


def _novelty_of(training: TrainingData, mixtures: list[Any], false_alarm: float) -> tuple[Novelty, float]:
    """The score for strange rows and its threshold. All mixtures have the same plan, so the same rows judged them."""
    left = np.mean([mixture.judged_left for mixture in mixtures], axis=0)
    return learn_novelty(training.x, training.weight, left, mixtures[0].judged, false_alarm)


def checked_training(estimator: StationaryEstimator, X: Any, y: np.ndarray, sample_weight: Any) -> TrainingData:
    """Training data from a table and a checked target; nothing is stored in the estimator."""
    began = time.perf_counter()
    with named_errors("X"):
        table = _checked_table(estimator, X)
    check_same_rows(len(table), len(y))
    if len(table) < 2:
        raise ValueError(f"At least 2 rows of X are needed, got n_samples = {len(table)}.")
    names = None
    if isinstance(X, pd.DataFrame) and all(isinstance(name, str) for name in X.columns):
        names = np.array(X.columns, dtype=object)
    weight = check_row_weights(sample_weight, len(y))
    positive = weight > 0
    if positive.sum() < 2:
        raise ValueError(
            f"The sample_weight parameter must be positive for at least 2 rows, got {int(positive.sum())}."
        )
    with named_errors("X"):
        codes, unit = as_codes(table[positive]), float(weight[positive].min())
        first, weight = merge_equal_rows(codes, y[positive], weight[positive])
        first, weight = divide_common_rows(codes, first, weight, unit)
        table, y = _take(table, np.nonzero(positive)[0][first]), y[positive][first]
        columns = Columns.learn(table, weight, (estimator.settings or Settings()).unseen_rows)
        inputs = columns.transform(table)
    x, counts = (torch.from_numpy(values).to(estimator._device()) for values in (inputs, weight))
    return TrainingData(columns, x, y, counts, names, table.shape[1], began)


def _checked_table(estimator: StationaryEstimator, X: Any) -> Any:
    """A table to learn from: a float array, or a DataFrame with categories."""
    if has_categories(X):
        check_column_names(X)
        return X.reset_index(drop=True)
    options: Any = {"dtype": np.float64, "ensure_all_finite": "allow-nan", "ensure_min_samples": 2}
    return check_array(as_numpy(X), estimator=estimator, input_name="X", **options)


def _columns_of_training(estimator: StationaryEstimator, X: Any) -> pd.DataFrame:
    """New rows as a DataFrame with the columns of training, in their order."""
    if not isinstance(X, pd.DataFrame):
        raise ValueError(
            f"X must be a DataFrame, as in training, for it has categories; got {type(X).__name__} instead."
        )
    if len(X) == 0:
        raise ValueError("X has no rows: found array with 0 sample(s).")
    names, features = getattr(estimator, "feature_names_in_", None), estimator.n_features_in_
    if names is None:  # names that are not texts: columns count by their place
        if X.shape[1] != features:
            raise ValueError(f"X has {X.shape[1]} features, but {features} features were there in training.")
        table = X.reset_index(drop=True)
    else:
        missing = [name for name in names if name not in X.columns]
        if missing:
            raise ValueError(f"X lacks the column {missing[0]!r} that was there in training.")
        table = X.loc[:, list(names)].reset_index(drop=True)
    check_column_names(table)
    return table


def _take(table: Any, rows: np.ndarray) -> Any:
    """Some rows of an array or a DataFrame."""
    return table[rows] if isinstance(table, np.ndarray) else table.iloc[rows].reset_index(drop=True)


def merge_equal_rows(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges rows that agree in all inputs and targets: the number of the first row of each kind, and the sum of their weights.

    The kinds come in an order that depends on their values alone. So a fit depends neither on the order of rows nor on whether a
    row is repeated or has more weight, and no row judges a member that has learnt from its copy.
    """
    entries = np.column_stack([x, y.reshape(len(y), -1)]).astype(np.float64) + 0.0  # −0 becomes 0
    first, number = _kinds(entries)
    # Sorted by the first columns and then the target, so that the order does not depend on units.
    order = np.lexsort(
        [entries[first, -1], *(entries[first, column] for column in reversed(range(min(3, x.shape[1]))))]
    )
    return first[order], np.bincount(number, weight)[order]


def _kinds(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of the first row of each kind of equal rows, and the kind of each row."""
    rows = np.ascontiguousarray(rows, dtype=np.float64)
    rows[np.isnan(rows)] = np.nan  # the same bits for every NaN
    keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1])))[:, 0]
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    return first, number.ravel()


def are_common(x: np.ndarray, numbers: np.ndarray, rows: float | None = None) -> np.ndarray:
    """Which rows may be equal to others without being copies: the table has few different inputs, such as yes and no.

    The same inputs come with other targets, too, or there are more rows than combinations of values.

    Args:
        x: Inputs as numbers, (n, d).
        numbers: A number for each row, the same for equal inputs and targets.
        rows: Number of rows of the table, equal ones included; by default n.
    """
    _, kind = _kinds(x.astype(np.float64) + 0.0)
    first = np.unique(numbers, return_index=True)[1]
    targets = np.bincount(kind[first], minlength=kind.max() + 1)
    combinations = sum(math.log(len(np.unique(column))) for column in x.T)
    return (targets[kind] > 1) | (combinations <= math.log(rows or len(x)))


def divide_common_rows(
    x: np.ndarray, first: np.ndarray, weight: np.ndarray, unit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Merged rows, of which those that are common by nature are divided into parts of equal weight.

    If all of their copies had to judge together, the rest would say too little about them, and every prediction would be far too
    unsure.

    Args:
        x: Inputs of all rows as numbers.
        first: Numbers of the merged rows, from ``merge_equal_rows``.
        weight: Their weights.
        unit: Weight of a single row.
    """
    parts = np.where(
        are_common(x[first], np.arange(len(first)), weight.sum() / unit),
        np.clip(np.floor(weight / unit + 1e-9), 1, MAX_PARTS),
        1,
    ).astype(int)
    return np.repeat(first, parts), np.repeat(weight / parts, parts)
