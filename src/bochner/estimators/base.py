"""What both estimators share: parameters, checks of what comes in, and the score for rows unlike the training data."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from bochner.errors import unknown_name
from bochner.estimators.columns import Columns, as_codes, is_category
from bochner.estimators.novelty import Novelty, learn_novelty
from bochner.members.budget import Clock, fit_within_budget
from bochner.members.features import FEATURE_CHUNK_ROWS
from bochner.members.member import Inputs
from bochner.members.settings import Settings, Task
from bochner.priors import spectra
from bochner.training.threads import one_thread

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Training:
    """Checked training data. Equal rows are one row that counts several times, and rows are sorted: their order does not matter.

    Attributes:
        columns: What was learnt about the columns.
        x: Inputs, (n, inputs), on the device.
        y: Targets, (n, ...), as an array.
        weight: How many rows each one stands for, (n,), on the device.
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

    def part(self, rows: np.ndarray) -> "Training":
        """Some of the rows."""
        at = torch.from_numpy(rows).to(self.x.device)
        return replace(self, x=self.x[at], y=self.y[rows], weight=self.weight[at])


def some_rows(rows: int, count: int, labels: np.ndarray | None, seed: Any) -> np.ndarray:
    """Some of the rows at random, two of every class among them."""
    order = check_random_state(seed).permutation(rows)
    chosen = [order[:count]]
    if labels is not None:
        chosen += [order[labels[order] == label][:2] for label in np.unique(labels)]
    return np.unique(np.concatenate(chosen))


class Stationary(BaseEstimator):
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
        kernels = self.kernel if isinstance(self.kernel, tuple | list) else (self.kernel,)
        if not kernels:
            raise ValueError("The kernel parameter must name at least one kernel, got an empty sequence instead.")
        for kernel in kernels:
            if not spectra.resolve_spectrum(kernel).isotropic:
                raise ValueError(f"The kernel parameter must be isotropic (not a product), got {kernel} instead.")
        sizes = self.hidden_layer_sizes
        if not isinstance(sizes, tuple | list) or not all(isinstance(h, Integral) and h > 0 for h in sizes):
            raise ValueError(
                f"The hidden_layer_sizes parameter must be a tuple of positive widths, such as (100, 25), got {sizes!r} instead."
            )
        if not isinstance(self.false_alarm, Real) or not 0 < self.false_alarm < 1:
            raise ValueError(f"The false_alarm parameter must lie between 0 and 1, got {self.false_alarm!r} instead.")
        if self.device not in DEVICES:
            raise ValueError(unknown_name("device", self.device, DEVICES))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("The device parameter asks for a GPU ('cuda'), but torch sees none; use device='cpu'.")
        if self.settings is not None and not isinstance(self.settings, Settings):
            raise ValueError(f"The settings parameter must be a Settings, got {type(self.settings).__name__} instead.")

        if self.budget is not None and not (isinstance(self.budget, Real) and 0 < self.budget < math.inf):
            raise ValueError(f"The budget parameter must be a positive number of seconds, got {self.budget!r} instead.")

    def _device(self) -> str:
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device

    def _task(self, training: Training, effort: float = 1.0, clock: Clock | None = None) -> Task:
        kernels = self.kernel if isinstance(self.kernel, tuple | list) else (self.kernel,)
        return Task(
            group=torch.from_numpy(training.columns.group).to(training.x.device),
            plain=training.columns.plain,
            spectra=tuple(spectra.resolve_spectrum(kernel) for kernel in kernels),
            hidden=tuple(int(size) for size in self.hidden_layer_sizes),
            settings=(self.settings or Settings()).lighter(effort, len(training.x)),
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
            say=self._say,
            progress=bool(self.verbose) and sys.stdout.isatty(),
            clock=clock or Clock(),
        )

    def _fit_mixtures(
        self, training: Training, fit: Callable[[Training, Task], list[Any]], labels: np.ndarray | None = None
    ) -> tuple[Training, list[Any]]:
        """The mixtures, within the budget if there is one, and the rows that they were fitted to."""
        seed = (
            self.random_state if self.budget is None else int(check_random_state(self.random_state).randint(2**31 - 1))
        )

        def attempt(effort: float, clock: Clock) -> tuple[Training, list[Any]]:
            count = (self.settings or Settings()).rows_for(effort, len(training.x))
            part = (
                training.part(some_rows(len(training.x), count, labels, seed)) if count < len(training.x) else training
            )
            task = self._task(part, effort, clock)
            with one_thread(len(part.x) <= task.settings.large_rows):
                return part, fit(part, task)

        if self.budget is None:
            return attempt(1.0, Clock())
        return fit_within_budget(self.budget - (time.perf_counter() - training.began), attempt, self._say)

    def _say(self, text: str) -> None:
        if self.verbose:
            print(f"bochner: {text}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------------ what comes in

    def _training(self, X: Any, y: np.ndarray, sample_weight: Any) -> Training:
        """Rows that can be learnt from, from a checked target; nothing is stored yet."""
        began = time.perf_counter()
        names, categorical = None, _has_categories(X)
        if categorical:
            check_names(X)
            table: Any = X.reset_index(drop=True)
        else:
            options: Any = {"dtype": np.float64, "ensure_all_finite": "allow-nan", "ensure_min_samples": 2}
            table = check_array(X, estimator=self, **options)
        if len(table) != len(y):
            raise ValueError(f"X and y must have the same number of rows, got {len(table)} and {len(y)} instead.")
        if len(table) < 2:
            raise ValueError(f"At least 2 rows are needed, got n_samples = {len(table)}.")
        if isinstance(X, pd.DataFrame) and all(isinstance(name, str) for name in X.columns):
            names = np.array(X.columns, dtype=object)
        weight = _check_sample_weight(sample_weight, np.zeros((len(y), 1)), dtype=np.float64, ensure_non_negative=True)
        counts = weight > 0
        if counts.sum() < 2:
            raise ValueError(
                f"The sample_weight parameter must be positive for at least 2 rows, got {int(counts.sum())}."
            )
        features = table.shape[1]
        first, weight = merge_equal_rows(as_codes(table[counts]), y[counts], weight[counts])
        table, y = _take(table, np.nonzero(counts)[0][first]), y[counts][first]
        settings = self.settings or Settings()
        columns = Columns.learn(table, weight, settings.unseen_rows)
        device = self._device()
        x = torch.from_numpy(columns.transform(table)).to(device)
        return Training(columns, x, y, torch.from_numpy(weight).to(device), names, features, began)

    def _remember(self, training: Training, mixtures: list[Any]) -> None:
        """What every fitted estimator has; called when a fit has succeeded."""
        for name in [name for name in vars(self) if name.endswith("_") and not name.startswith("_")]:
            delattr(self, name)
        self.columns_, self.n_features_in_, self.mixtures_ = training.columns, training.features, mixtures
        if training.names is not None:
            self.feature_names_in_ = training.names
        # All mixtures have the same plan, so the same rows judged them.
        left, judged = np.mean([mixture.judged_left for mixture in mixtures], axis=0), mixtures[0].judged
        found = learn_novelty(training.x, training.weight, left, judged, self.false_alarm)
        self.novelty_, self.ood_threshold_ = found

    def _inputs(self, X: Any) -> Tensor:
        """New rows as inputs, after a look at their columns."""
        check_is_fitted(self)
        if any(column.categories is not None for column in self.columns_.columns):
            table = self._named_columns(X)
        elif _has_categories(X):
            strange = [str(name) for name in X.columns if is_category(X[name])]
            raise ValueError(f"Column '{strange[0]}' of X held numbers in training, and now holds text.")
        else:
            table = validate_data(self, X, dtype=np.float64, reset=False, ensure_all_finite="allow-nan")
        return torch.from_numpy(self.columns_.transform(table)).to(self._device())

    def _named_columns(self, X: Any) -> Any:
        """A DataFrame with the columns of training, in their order."""
        if not isinstance(X, pd.DataFrame):
            raise ValueError(
                f"X must be a DataFrame, as in training, for it has categories; got {type(X).__name__} instead."
            )
        if not hasattr(self, "feature_names_in_"):  # names that are not texts: columns count by their place
            if X.shape[1] != self.n_features_in_:
                raise ValueError(
                    f"X has {X.shape[1]} features, but {self.n_features_in_} features were there in training."
                )
            return X.reset_index(drop=True)
        missing = [name for name in self.feature_names_in_ if name not in X.columns]
        if missing:
            raise ValueError(f"X lacks the column {missing[0]!r} that was there in training.")
        if len(X) == 0:
            raise ValueError("X has no rows: found array with 0 sample(s).")
        return X[list(self.feature_names_in_)].reset_index(drop=True)

    # ------------------------------------------------------------------ rows unlike the training data

    def ood_score(self, X: Any) -> np.ndarray:
        """How strange each row is: from 0, like most of the training data, to 1, like nothing seen.

        A score of 0.95 says that one ordinary row in twenty looks as strange (``bochner.estimators.novelty``). Of rows like the
        training data a share of ``false_alarm`` has a score above ``ood_threshold_``.
        """
        scores = []
        for x in self._inputs(X).split(FEATURE_CHUNK_ROWS):
            left = torch.stack([mixture.left(Inputs(x, mixture.extractors)) for mixture in self.mixtures_]).mean(0)
            scores.append(self.novelty_(x, left))
        return torch.cat(scores).cpu().numpy()


def _has_categories(X: Any) -> bool:
    return isinstance(X, pd.DataFrame) and len(X) > 0 and any(is_category(X.iloc[:, i]) for i in range(X.shape[1]))


def check_names(table: Any) -> None:
    """Raises a ValueError unless the columns of a DataFrame have different names."""
    twice = table.columns[table.columns.duplicated()]
    if len(twice):
        raise ValueError(f"X has more than one column named {twice[0]!r}; rename or leave out the others.")


def _take(table: Any, rows: np.ndarray) -> Any:
    return table[rows] if isinstance(table, np.ndarray) else table.iloc[rows].reset_index(drop=True)


def merge_equal_rows(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that agree in everything as one row: the number of the first of each, and the sum of their weights.

    They come in an order that depends on their values alone. A fit then depends neither on the order of rows nor on whether a row
    is repeated or weighs more, and no row judges a member that has learnt from its double.
    """
    both = np.ascontiguousarray(np.column_stack([x, y.reshape(len(y), -1)]).astype(np.float64) + 0.0)  # −0 becomes 0
    both[np.isnan(both)] = np.nan  # one pattern of bits
    keys = both.view(np.dtype((np.void, both.dtype.itemsize * both.shape[1])))[:, 0]
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    # Sorted by the first columns and then the target, so that the order does not depend on units.
    order = np.lexsort([both[first, -1], *(both[first, column] for column in reversed(range(min(3, x.shape[1]))))])
    return first[order], np.bincount(number.ravel(), weight)[order]
