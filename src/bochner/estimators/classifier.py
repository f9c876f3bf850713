"""The scikit-learn classifier."""

from dataclasses import replace
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from bochner.estimators.base import StationaryEstimator, TrainingData, checked_training
from bochner.estimators.checks import as_numpy, check_row_weights, check_same_rows, named_errors
from bochner.estimators.classification import ClassMixture, fit_classes
from bochner.members.features import FEATURE_CHUNK_ROWS
from bochner.members.member import Inputs
from bochner.members.settings import Task


class StationaryClassifier(ClassifierMixin, StationaryEstimator):
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
        self._learn(X, y, sample_weight)
        return self

    def _learn(self, X: Any, y: Any, sample_weight: Any) -> TrainingData:
        """Fits, and returns the rows that the mixture was fitted to."""
        self.check_parameters()
        labels = self._labels(y, warn=True)
        with named_errors("y"):
            check_classification_targets(labels)
        all_labels = np.unique(labels)
        training = checked_training(self, X, np.searchsorted(all_labels, labels), sample_weight)
        present, numbers = np.unique(training.y, return_inverse=True)  # a weight of 0 may leave a class out
        classes = all_labels[present]
        if len(classes) < 2:
            raise ValueError(
                f"The y parameter must hold at least two classes, got one class only: {str(classes[0])!r}."
            )
        training = replace(training, y=numbers.ravel())

        def fit(part: TrainingData, task: Task) -> list[ClassMixture]:
            target = torch.from_numpy(part.y).long().to(part.x.device)
            return [fit_classes(part.x, target, part.weight, len(classes), task)]

        training, mixtures = self._fit_mixtures(training, fit, training.y)
        self._remember(training, mixtures, classes_=classes)
        return training

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None, *, forgetting_factor: float = 1.0
    ) -> Self:
        """Takes in more rows. The first call is ``fit``; later ones keep its columns, hyperparameters, networks and weights.

        Every head takes Laplace steps: earlier rows are a normal distribution of its weights, whose precision is not exact. The
        threshold stays.

        Args:
            X: The rows.
            y: Their labels. The first call needs a row of every class.
            classes: All labels, or None for those of the first call.
            sample_weight: How many rows each row stands for; (n,), positive.
            forgetting_factor: What every earlier row counts from now on, beside 1 for a new one; below 1 for data that drift.
        """
        if classes is not None:
            learnt = self.classes_ if hasattr(self, "classes_") else np.unique(self._labels(y))
            if lacking := [label for label in as_numpy(classes) if label not in learnt]:
                raise ValueError(f"The first y must hold a row of every class, and lacks {str(lacking[0])!r}.")
        if not hasattr(self, "mixtures_"):
            return self.fit(X, y, sample_weight)
        return self._update(X, self._target_numbers(y), sample_weight, forgetting_factor)

    def _target_numbers(self, y: Any) -> np.ndarray:
        """Labels as numbers of classes, (n,)."""
        labels = self._labels(y)
        with named_errors("y"):
            at = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
            if not (learnt := self.classes_[at] == labels).all():
                raise ValueError(f"The y parameter holds a class that was not learnt: {str(labels[~learnt][0])!r}.")
        return at

    def _labels(self, y: Any, warn: bool = False) -> np.ndarray:
        """Checked labels, (n,)."""
        if y is None:
            raise ValueError("This StationaryClassifier requires y to be passed, but the target y is None.")
        with named_errors("y"):
            labels = column_or_1d(as_numpy(y), warn=warn)
            if pd.isna(labels).any() or (labels.dtype.kind == "f" and not np.isfinite(labels).all()):
                raise ValueError("Input y contains NaN or infinity; leave those rows out.")
        return labels

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class at each row, (n, c): the weighted mean of what the members say."""
        inputs = self._inputs(X)
        (mixture,) = self.mixtures_
        parts = [mixture.probabilities(Inputs(x, mixture.extractors)) for x in inputs.split(FEATURE_CHUNK_ROWS)]
        return torch.cat(parts).cpu().numpy()

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """Log probability of each label, (n,)."""
        probability = self.predict_proba(X)
        labels = self._labels(y)
        check_same_rows(len(probability), len(labels))
        of_label = probability[np.arange(len(labels)), self._target_numbers(labels)]
        return np.log(np.maximum(of_label, np.finfo(float).tiny))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        chosen = self.predict_proba(X).argmax(1)
        return self.classes_[chosen]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of the predicted classes. A label that was not learnt counts as wrong."""
        labels, predicted = self._labels(y), self.predict(X)
        check_same_rows(len(predicted), len(labels))
        weight = check_row_weights(sample_weight, len(labels))
        with named_errors("y"):
            right = predicted == labels
        return float(np.average(right, weights=weight))
