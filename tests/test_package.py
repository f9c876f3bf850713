"""What a user meets first: the import and the public names."""

import subprocess
import sys

import bochner


def test_import_is_light():
    code = "import sys, bochner; print([m for m in ('jax', 'numpyro', 'gpytorch', 'botorch', 'matplotlib') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_nothing_heavy_is_loaded_before_it_is_asked_for(tmp_path):
    """Torch takes seconds: neither the import, nor the help, nor a misspelt file name waits for it."""
    shown = "print([m for m in ('torch', 'pandas', 'sklearn', 'scipy') if m in sys.modules], file=sys.stderr)"
    for words in (None, "--help", "fit --help", f"fit {tmp_path}/no.csv --target a", f"predict m {tmp_path}/no.csv"):
        code = f"import sys, bochner; {shown}"
        if words is not None:
            code = f"import sys; sys.argv[1:] = {words.split()}\nfrom bochner.cli import start\ntry: start()\nfinally: {shown}"
        end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "\n[]" in "\n" + end.stderr, (words, end.stderr)


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
        "TableRegressor",
        "TableClassifier",
        "StationaryRegressor",
        "StationaryClassifier",
    ]
    assert all(hasattr(bochner, name) for name in bochner.__all__)
