"""Members: stationary heads on the columns of a table or on what a network makes of them, with their hyperparameters.

``settings`` holds every constant and the task, ``plan`` says which rows judge, ``features`` is a stationary prior as features,
``tuning`` finds hyperparameters, ``heads`` are the posteriors, ``extractors`` train networks, a ``member`` is what estimators mix.
``budget`` keeps to a given time, ``threads`` to one thread.
"""
