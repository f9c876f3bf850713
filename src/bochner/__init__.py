"""Neural networks that know what they do not know."""

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

__version__ = "0.1.0"

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
]
