"""Neural networks that know what they do not know."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bochner.attach import StationaryHead
    from bochner.estimators import StationaryClassifier, StationaryRegressor
    from bochner.layers import StationaryLayer, WidthError, width_error
    from bochner.likelihoods import Categorical, Gaussian
    from bochner.models import Model, swap_head
    from bochner.posteriors.closed_form import ClosedForm, tune_marginal
    from bochner.posteriors.closed_form_classifier import ClosedFormClassifier
    from bochner.posteriors.laplace import Laplace
    from bochner.posteriors.swag import Snapshots, Swag
    from bochner.predictive import Predictive
    from bochner.priors import activations
    from bochner.priors.activations import Activation
    from bochner.priors.kernels import InducedKernel, induced_kernel
    from bochner.priors.spectra import RBF, Exponential, Matern
    from bochner.storage import load, save
    from bochner.tables.estimators import TableClassifier, TableRegressor
    from bochner.training import Recipe, fit_map

__version__ = "0.1.0"

_MODULES = {  # where the public names are: torch takes seconds to load, so each is imported when it is asked for
    "bochner.priors.activations": ("Activation",),
    "bochner.priors.spectra": ("RBF", "Matern", "Exponential"),
    "bochner.priors.kernels": ("InducedKernel", "induced_kernel"),
    "bochner.layers": ("StationaryLayer", "WidthError", "width_error"),
    "bochner.models": ("Model", "swap_head"),
    "bochner.likelihoods": ("Gaussian", "Categorical"),
    "bochner.training": ("Recipe", "fit_map"),
    "bochner.posteriors.closed_form": ("ClosedForm", "tune_marginal"),
    "bochner.posteriors.closed_form_classifier": ("ClosedFormClassifier",),
    "bochner.posteriors.laplace": ("Laplace",),
    "bochner.posteriors.swag": ("Snapshots", "Swag"),
    "bochner.predictive": ("Predictive",),
    "bochner.attach": ("StationaryHead",),
    "bochner.estimators": ("StationaryRegressor", "StationaryClassifier"),
    "bochner.tables.estimators": ("TableRegressor", "TableClassifier"),
    "bochner.storage": ("save", "load"),
}
_ELSEWHERE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    if name == "activations":
        return import_module("bochner.priors.activations")
    raise AttributeError(f"module 'bochner' has no attribute {name!r}")


def _one_thread_after_fork() -> None:
    """Sets torch to one thread in a process that was forked.

    OpenMP's other threads do not live on there, and torch would wait for them for ever. One thread needs none of them.
    """
    if set_num_threads := getattr(sys.modules.get("torch"), "set_num_threads", None):
        set_num_threads(1)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_one_thread_after_fork)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


__all__ = [
    # the prior: an activation and a spectrum
    "Activation",
    "activations",
    "RBF",
    "Matern",
    "Exponential",
    "InducedKernel",
    "induced_kernel",
    # the layer
    "StationaryLayer",
    "WidthError",
    "width_error",
    # the network
    "Model",
    "Gaussian",
    "Categorical",
    "swap_head",
    # training and posteriors; NUTS and GPs, which need their own libraries, are in bochner.posteriors.nuts and .gp
    "Recipe",
    "fit_map",
    "tune_marginal",
    "ClosedForm",
    "ClosedFormClassifier",
    "Laplace",
    "Snapshots",
    "Swag",
    "Predictive",
    # a network that is trained already, and tables
    "StationaryHead",
    "TableRegressor",
    "TableClassifier",
    "StationaryRegressor",
    "StationaryClassifier",
    # models in files
    "save",
    "load",
]
