"""Predictions as a service: ``bochner serve``.

- ``rows``: rows of a request in, predictions out; knows nothing of HTTP.
- ``description``: what the service says of the model: its columns, examples, the OpenAPI document.
- ``app``: the FastAPI application: paths, limits, errors, metrics.
- ``server``: the socket, and an orderly end after a signal.
"""
