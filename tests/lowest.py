"""Installs the oldest libraries that pyproject.toml allows into .venv-lowest, and runs the quick tests there.

torch stays the one that constraints.txt pins: there is no CPU build of an older one here.

Run: python tests/lowest.py
"""

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-lowest"
EXTRAS = ("parquet", "xlsx")
TESTS = (
    "activations",
    "spectra",
    "kernels",
    "frequencies",
    "layers",
    "predictive",
    "closed_form",
    "columns",
    "tuning",
)
TESTS += ("heads", "mixtures", "targets", "storage", "table_files")


def lower_bounds() -> list[str]:
    """Requirements such as numpy==1.26, from those of the package and of two extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for extra in EXTRAS for name in project["optional-dependencies"][extra]]
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+)", name) for name in [*project["dependencies"], *extras]]
    assert all(found), "a requirement has no lower bound"
    return [f"{match[1]}=={match[2]}.*" for match in found if match and match[1] != "torch"]


def main() -> int:
    venv.create(FOLDER, with_pip=True, clear=True)
    python = str(FOLDER / "bin" / "python")
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    subprocess.run([*install, torch], check=True)
    subprocess.run([*install, *lower_bounds(), "pytest", "pytest-timeout", "hypothesis", "setuptools>=77"], check=True)
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
    tests = [f"tests/test_{name}.py" for name in TESTS]
    # Old libraries may warn of what new ones have changed: a warning is no error here.
    return subprocess.run([python, "-m", "pytest", "-W", "default", *tests], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
