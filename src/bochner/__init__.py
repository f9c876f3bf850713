"""Neural networks that know what they do not know."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bochner import activations
from bochner.activations import Activation
from bochner.kernels import InducedKernel, induced_kernel
from bochner.layers import StationaryLayer, WidthError, width_error
from bochner.likelihoods import Categorical, Gaussian
from bochner.models import Model, swap_head
from bochner.posteriors.closed_form import ClosedForm, tune_marginal
from bochner.posteriors.closed_form_classifier import ClosedFormClassifier
from bochner.posteriors.laplace import Laplace
from bochner.posteriors.swag import Swag
from bochner.predictive import Predictive
from bochner.spectra import RBF, Exponential, Matern
from bochner.training import Recipe, fit_map

if TYPE_CHECKING:
    from bochner.attach import StationaryHead
    from bochner.estimators import StationaryClassifier, StationaryRegressor

__version__ = "0.1.0"

_ELSEWHERE = {  # what needs scikit-learn is imported when it is asked for
    "StationaryHead": "bochner.attach",
    "StationaryRegressor": "bochner.estimators",
    "StationaryClassifier": "bochner.estimators",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module 'bochner' has no attribute {name!r}")


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
    "Swag",
    "Predictive",
    # a network that is trained already, and tables
    "StationaryHead",
    "StationaryRegressor",
    "StationaryClassifier",
]
