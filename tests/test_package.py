"""What a user meets first: the import and the public names."""

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import bochner

ROOT = Path(__file__).parents[1]


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
        "Snapshots",
        "Swag",
        "Predictive",
        "StationaryHead",
        "TableRegressor",
        "TableClassifier",
        "StationaryRegressor",
        "StationaryClassifier",
        "save",
        "load",
    ]
    assert all(hasattr(bochner, name) for name in bochner.__all__)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources without anything else of the repository."""
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("building needs setuptools 77 or newer; `make setup` installs it")
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    (folder / "dist").mkdir()
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert end.returncode == 0, end.stderr
    (path,) = (folder / "dist").iterdir()
    return zipfile.ZipFile(path)


def test_the_wheel_has_every_file_of_the_package(wheel):
    """Code and what it reads: pages, styles, scripts, tables."""
    source = ROOT / "src"
    files = (p for p in (source / "bochner").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    wanted = {str(p.relative_to(source)) for p in files}
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == wanted
    assert "bochner/reports/page.html" in inside


def test_the_wheel_says_what_it_is(wheel):
    (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    (scripts,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert f"\nVersion: {bochner.__version__}\n" in metadata
    assert "\nLicense-Expression: MIT\n" in metadata
    assert "\nKeywords: " in metadata
    assert "\nClassifier: Programming Language :: Python :: 3.11\n" in metadata
    assert "bochner = bochner.cli:start" in scripts


def test_the_version_is_written_once():
    """The citation file cannot read it, and must agree."""
    assert "\nversion =" not in (ROOT / "pyproject.toml").read_text().split("[tool.")[0]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == bochner.__version__


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(wheel, tmp_path):
    """Installed without the repository: the libraries come from here by a path file, the package from the wheel."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("installing needs pip")
    folder, work = tmp_path / "env", tmp_path / "work"
    venv.create(folder, with_pip=False, symlinks=True)
    python, environment = folder / "bin" / "python", {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    work.mkdir()

    def run(*words):
        end = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=work, env=environment)
        assert end.returncode == 0, end.stderr
        return end.stdout

    # Before the path file is there: pip must not see the bochner of this environment.
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel.filename)
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "libraries.pth").write_text("\n".join(libraries))
    assert (
        run(python, "-c", "import bochner; print(bochner.__file__)") == f"{site_packages / 'bochner' / '__init__.py'}\n"
    )
    bochner_command = folder / "bin" / "bochner"
    assert "predict" in run(bochner_command, "--help")
    (work / "t.csv").write_text("a,b,y\n" + "".join(f"{i},{i % 7},{2 * i + i % 7 + 0.5}\n" for i in range(40)))
    fit = (
        "fit",
        "t.csv",
        "--target",
        "y",
        "--out",
        "m.bochner",
        "--report",
        "r.html",
        "--hidden",
        "",
        "--kernel",
        "rbf",
    )
    assert "written: m.bochner  r.html" in run(bochner_command, *fit)
    assert "40 rows" in run(bochner_command, "predict", "m.bochner", "t.csv")
    assert sorted(path.name for path in work.iterdir()) == ["m.bochner", "r.html", "t-predictions.csv", "t.csv"]
