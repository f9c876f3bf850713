"""The scikit-learn classifier."""

from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from bochner.estimators.base import Stationary, Training
from bochner.estimators.classification import ClassMixture, fit_classes
from bochner.members.features import FEATURE_CHUNK_ROWS
from bochner.members.member import Inputs
from bochner.members.settings import Task


class StationaryClassifier(ClassifierMixin, Stationary):
    """Classification that knows when it does not know: a mixture of heads with stationary priors, for scikit-learn.

    Takes arrays and DataFrames; numbers may be missing, columns may be categories or text. Nothing needs to be scaled. Far from the
    training rows all classes become equally probable.

    Args:
        kernel: The prior's kernel, or several: "matern32", "matern52", "rbf", "exponential" or an isotropic Spectrum.
        hidden_layer_sizes: Widths of the hidden layers of trained networks, which join from a few hundred rows on; () for none.
        false_alarm: Share of rows like the training data whose ``ood_score`` may exceed ``ood_threshold_``.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        random_state: Seed of every draw.
        verbose: Whether to say what takes time.
        settings: Every other constant, ``bochner.estimators.Settings``.
        budget: Seconds that ``fit`` may take; None for as many as it needs.

    Attributes:
        classes_: The labels, in the order of the columns of ``predict_proba``.
        mixtures_: What predicts: one mixture.
        columns_: What was learnt about the columns.
        ood_threshold_: Score beyond which a row is unlike the training data.
    """

    classes_: np.ndarray
    mixtures_: list[ClassMixture]

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fits to rows X, (n, d), and labels y, (n,).

        Args:
            X: The rows.
            y: Their labels.
            sample_weight: How many rows each row stands for; (n,). A weight of 0 leaves the row out.
        """
        self.check_parameters()
        if y is None:
            raise ValueError("This StationaryClassifier requires y to be passed, but the target y is None.")
        y = column_or_1d(y, warn=True)
        if y.dtype.kind == "f" and not np.isfinite(y).all():
            raise ValueError("Input y contains NaN or infinity; leave those rows out.")
        check_classification_targets(y)
        everything = np.unique(y)
        training = self._training(X, np.searchsorted(everything, y), sample_weight)
        there, labels = np.unique(training.y, return_inverse=True)  # a weight of 0 may leave a class out
        classes = everything[there]
        if len(classes) < 2:
            raise ValueError(
                f"The y parameter must hold at least two classes, got one class only: {str(classes[0])!r}."
            )
        training = replace(training, y=labels.ravel())

        def fit(part: Training, task: Task) -> list[ClassMixture]:
            target = torch.from_numpy(part.y).long().to(part.x.device)
            return [fit_classes(part.x, target, part.weight, len(classes), task)]

        self._remember(*self._fit_mixtures(training, fit, training.y))
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class at each row, (n, c): the weighted mean of what the members say."""
        inputs = self._inputs(X)
        (mixture,) = self.mixtures_
        parts = [mixture.probabilities(Inputs(x, mixture.extractors)) for x in inputs.split(FEATURE_CHUNK_ROWS)]
        return torch.cat(parts).cpu().numpy()

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """Log probability of each label, (n,)."""
        probability = self.predict_proba(X)
        y = column_or_1d(y)
        if len(y) != len(probability):
            raise ValueError(f"X and y must have the same number of rows, got {len(probability)} and {len(y)} instead.")
        at = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if not (known := self.classes_[at] == y).all():
            raise ValueError(f"The y parameter holds a class that was not learnt: {str(y[~known][0])!r}.")
        own = probability[np.arange(len(y)), at]
        return np.log(np.maximum(own, np.finfo(float).tiny))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        chosen = self.predict_proba(X).argmax(1)
        return self.classes_[chosen]
