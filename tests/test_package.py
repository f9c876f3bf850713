"""What a user meets first: the import and the public names."""

import subprocess
import sys

import bochner


def test_import_is_light():
    code = "import sys, bochner; print([m for m in ('jax', 'numpyro', 'gpytorch', 'botorch', 'matplotlib') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_public_names_are_these():
    assert bochner.__all__ == [
        "Activation",
        "activations",
        "RBF",
        "Matern",
        "Exponential",
        "InducedKernel",
        "induced_kernel",
        "StationaryLayer",
        "WidthError",
        "width_error",
        "Model",
        "Gaussian",
        "Categorical",
        "swap_head",
        "Recipe",
        "fit_map",
        "tune_marginal",
        "ClosedForm",
        "ClosedFormClassifier",
        "Laplace",
        "Swag",
        "Predictive",
        "StationaryHead",
        "StationaryRegressor",
        "StationaryClassifier",
    ]
    assert all(hasattr(bochner, name) for name in bochner.__all__)
