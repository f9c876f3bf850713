"""Estimators for scikit-learn: tables in, predictions out, with their uncertainty and a score for rows unlike the training data.

The files in the order of a fit:

- ``regressor`` and ``classifier``: the two public classes; ``base``: what they share.
- ``checks``: checks of arguments.
- ``columns``: columns as standardised inputs; ``targets``: maps of the target.
- ``regression`` and ``classification``: from rows to members (``bochner.members``) and their mixture.
- ``mixture``: weights of members, and what they predict together; ``spread``: a factor on the standard deviation of each row.
- ``novelty``: the score for rows unlike the training data.
- ``evaluation``: metrics of a fitted estimator.
"""

from bochner.estimators.classifier import StationaryClassifier
from bochner.estimators.regressor import StationaryRegressor
from bochner.members.settings import Settings

__all__ = ["Settings", "StationaryClassifier", "StationaryRegressor"]
