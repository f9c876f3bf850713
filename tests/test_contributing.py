"""CONTRIBUTING.md: its map is the tree, and its recipes work."""

import math
import re
import tomllib
from pathlib import Path

import pytest
import torch

from bochner.experiments.catalogue import Request
from bochner.experiments.rows import read_rows
from bochner.layers import StationaryLayer
from bochner.likelihoods import Gaussian
from bochner.models import Model

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.fixture(scope="module")
def recipes():
    """What the python blocks of the page define, run one after the other."""
    names = {"__name__": "recipes"}
    blocks = [part.split("```")[0] for part in TEXT.split("```python")[1:]]
    for block in blocks:
        assert len(block.strip().splitlines()) < 30
        exec(block, names)
    return names


def test_the_map_names_every_module_and_folder():
    section = TEXT.split("## The map")[1].split("### Where")[0]
    named = set(re.findall(r"`([\w/]+?)(?:\.py|/)?`", section.split("|---|---|")[1]))
    source = ROOT / "src" / "bochner"
    there = {path.stem for path in source.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__"} <= named
    folders = re.findall(r"^\| ((?:`[\w.]+/?`(?:, )?)+) \|", section, re.MULTILINE)
    rows = {name.removesuffix("/").removesuffix(".py") for row in folders for name in re.findall(r"`([\w./]+)`", row)}
    assert rows == there - {"__init__"}


def test_the_map_is_in_the_order_of_imports():
    """A module imports from its own folder and from those above it in the map."""
    section = TEXT.split("|---|---|")[1].split("### Where")[0]
    lines = [
        re.findall(r"`(\w+)(?:\.py|/)?`", row.split("|")[1]) for row in section.splitlines() if row.startswith("| `")
    ]
    place = {name: number for number, names in enumerate(lines) for name in names}
    wrong = []
    for path in sorted((ROOT / "src" / "bochner").rglob("*.py")):
        here = path.relative_to(ROOT / "src" / "bochner").with_suffix("").parts[0]
        if here == "__init__":
            continue
        # Imports at the top of a module, which begin a line; those inside functions wait for what an option asks for.
        for other in re.findall(r"^from bochner\.(\w+)", path.read_text(), re.MULTILINE):
            if place[other] > place[here]:
                wrong.append(f"{path.name} of {here} imports {other}")
    assert not wrong


@pytest.mark.parametrize("folder", ["priors", "posteriors"])
def test_the_rooms_of_the_mathematics_are_checked_strictly(folder):
    """`make check` runs pyright, strict there; a file may leave out reports of what a library does not declare, no others."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert f"src/bochner/{folder}" in settings["strict"]
    about_libraries = {"reportMissingTypeStubs"} | {
        f"reportUnknown{what}Type" for what in ("Member", "Variable", "Argument", "Lambda")
    }
    for path in (ROOT / "src" / "bochner" / folder).rglob("*.py"):
        text = path.read_text()
        off = set(re.findall(r"(report\w+)=false", text))
        assert path.name == "gp.py" or off <= about_libraries, path  # what GPyTorch declares is wrong in many places
        assert not re.search(r"import .*\bAny\b|typing\.Any", text.split('"""', 2)[2]), path


def test_every_make_target_of_the_page_exists():
    targets = set(re.findall(r"^make ([\w-]+)", TEXT, re.MULTILINE))
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(targets) > 5
    assert targets <= known


def test_the_spectrum_of_the_page_is_a_prior(recipes, generator):
    """Its weights integrate to one, and units drawn from it have its kernel, by Bochner's theorem."""
    spectrum = recipes["Rational"]()
    w = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    density = spectrum.weight_log_prob(w[:, None]).exp()
    assert torch.trapezoid(density, w).item() == pytest.approx(1, abs=1e-6)
    units = 100_000
    layer = StationaryLayer(2, units, kernel=spectrum, activation="sin", generator=generator, dtype=torch.float64)
    x = torch.tensor([[0.0, 0.0], [0.5, -0.2], [2.0, 1.0]], dtype=torch.float64)
    with torch.no_grad():
        h = layer(x)
    gap = x[:, None] - x[None]
    atol = 5 * math.sqrt(1.5 / units)  # five standard errors of a mean of so many terms
    torch.testing.assert_close(h @ h.T / units, (1 / (1 + gap.square())).prod(-1), rtol=0, atol=atol)


def test_the_activation_of_the_page_induces_the_kernel(recipes, generator):
    units = 100_000
    activation = recipes["cosine"]()
    layer = StationaryLayer(1, units, kernel="rbf", activation=activation, generator=generator, dtype=torch.float64)
    x = torch.tensor([[0.0], [0.7], [2.0]], dtype=torch.float64)
    with torch.no_grad():
        h = layer(x)
    atol = 5 * math.sqrt(1.5 / units)
    torch.testing.assert_close(h @ h.T / units, torch.exp(-0.5 * (x - x.T).square()), rtol=0, atol=atol)
    torch.testing.assert_close(layer.induced_kernel()(x), torch.exp(-0.5 * (x - x.T).square()))


def test_the_posterior_of_the_page_predicts(recipes, generator):
    model = Model(StationaryLayer(1, 8, generator=generator), 1, Gaussian(0.3), generator=generator)
    x = torch.zeros(4, 1)
    prediction = recipes["PointMass"](model, x, torch.zeros(4, 1)).predict(x)
    torch.testing.assert_close(prediction.mean, model(x))
    torch.testing.assert_close(prediction.std, torch.full((4, 1), 0.3))


def test_the_experiment_of_the_page_makes_its_rows_once(recipes, tmp_path):
    lines = []
    path = tmp_path / "width.jsonl"
    for _ in range(2):
        recipes["run"]("width", Request(report=lines.append), path)
    rows = read_rows(path)
    assert len(rows) == 1
    assert 0 < rows[0]["error"] < 0.5
    assert "already" in lines[1]
