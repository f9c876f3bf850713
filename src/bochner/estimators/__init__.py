"""Estimators for scikit-learn: a table in, predictions out that say how sure they are and which rows look like nothing seen.

The files in the order of a fit: ``base`` checks what comes in, ``columns`` makes inputs of columns, ``plan`` says which rows judge,
``targets`` maps the target, ``tuning`` finds hyperparameters, ``kernel_features`` and ``heads`` are what a member is,
``extractors`` trains networks, ``regression`` and ``classification`` make members and combine them with ``mixture`` and ``spread``,
``regressor`` and ``classifier`` are the two classes. ``settings`` holds every constant.
"""

from bochner.estimators.classifier import StationaryClassifier
from bochner.estimators.regressor import StationaryRegressor
from bochner.estimators.settings import Settings

__all__ = ["Settings", "StationaryClassifier", "StationaryRegressor"]
