"""Estimators for scikit-learn: a table in, predictions out that say how sure they are and which rows look like nothing seen.

The files in the order of a fit: ``base`` checks what comes in, ``columns`` makes inputs of columns, ``targets`` maps the target,
``regression`` and ``classification`` make members (``bochner.members``) and combine them with ``mixture`` and ``spread``,
``novelty`` says how far a row is from the data, ``regressor`` and ``classifier`` are the two classes, ``evaluation`` measures them.
"""

from bochner.estimators.classifier import StationaryClassifier
from bochner.estimators.regressor import StationaryRegressor
from bochner.members.settings import Settings

__all__ = ["Settings", "StationaryClassifier", "StationaryRegressor"]
