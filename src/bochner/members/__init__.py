"""Members: the single models that an estimator mixes. A member is a stationary head, on the columns or on a trained network.

- ``settings``: the constants of a fit, and its inputs (``Task``).
- ``plan``: which rows tune hyperparameters and which rows judge members.
- ``features``: a stationary prior as a finite set of features.
- ``tuning``: hyperparameters of regression heads.
- ``heads``: posteriors of heads, for regression and for classes.
- ``extractors``: training of the networks.
- ``member``: a head with its weight in the mixture.
- ``budget``: fits within a given time.
"""
