"""Posteriors: objects with ``predict(x) -> Predictive``. Each has a module of its own."""
