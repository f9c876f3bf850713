"""What the pages show and what the examples do. README and adding_a_posterior.md are run in test_experiments.py, as are links."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import bochner
from bochner.experiments.rows import read_rows

ROOT = Path(__file__).parents[1]
PAGES = [
    page.name
    for page in sorted((ROOT / "docs").glob("*.md"))
    if "```python" in page.read_text() and page.name != "adding_a_posterior.md"
]
FIGURES = {"banana": ["banana.svg"], "regression_1d": ["regression_1d.svg"]}
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def run(*command: str, folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """A Python process of its own, on one thread, in a folder of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=folder, timeout=seconds, env=environment
    )


@pytest.fixture
def one_thread():
    """Small matrices: more threads only wait for each other, for a long time where others are at work too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = [part.split("```")[0] for part in (ROOT / "docs" / page).read_text().split("```python")[1:]]
    exec("\n".join(blocks), {})
    assert "nan" not in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "a page must not leave files behind"


def test_every_new_page_with_code_is_run():
    assert {"tutorial.md", "own_network.md", "choosing.md", "theory.md"} <= set(PAGES)


def test_the_examples_run(tmp_path):
    """Two at a time: each is a process on one thread."""
    assert EXAMPLES == ["banana", "regression_1d", "streaming", "swap_head", "table_csv"]
    for name in EXAMPLES:
        (tmp_path / name).mkdir()
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(
            lambda name: run("-W", "error", str(ROOT / "examples" / f"{name}.py"), folder=tmp_path / name, seconds=300),
            EXAMPLES,
        )
        ends = dict(zip(EXAMPLES, ends, strict=True))
    for name, end in ends.items():
        assert end.returncode == 0, f"{name}: {end.stderr}"
        assert end.stdout.strip(), name
        assert [path.name for path in (tmp_path / name).iterdir()] == FIGURES.get(name, []), name
    flags = [line.rsplit(",", 1)[1] for line in ends["table_csv"].stdout.splitlines() if line.count(",") > 4]
    assert flags[-1] == "True", "the palace is unlike the flats"
    # Mean probability of the chosen class, far from the arcs: ReLU is surer than the stationary network.
    far = {words[0]: float(words[2]) for words in map(str.split, ends["banana"].stdout.splitlines()) if "far" in words}
    assert far["paired"] < 0.7 < far["relu"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site and what building it said."""
    folder = tmp_path_factory.mktemp("site")
    end = run("-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "html"), folder=ROOT, seconds=120)
    assert end.returncode == 0, end.stderr
    return folder / "html", end.stderr


def test_the_site_builds_without_warnings(site):
    """Links out of docs/ are allowed for result files only; another test checks that those are there."""
    folder, said = site
    assert "WARNING" not in said
    missing = re.findall(r"contains a link '([^']+)', but the target", said)
    assert all(target.startswith("../results/") for target in missing), missing
    assert (folder / "index.html").exists()


def test_the_site_needs_nothing_from_elsewhere(site):
    for page in site[0].glob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"(https?:[^\"]+)\"", page.read_text())
        assert loaded == [], page.name


def test_the_reference_has_every_public_name(site):
    page = (site[0] / "api.html").read_text()
    estimators = ["estimators.StationaryRegressor.ood_score", "estimators.StationaryClassifier.predict_proba"]
    for name in [*bochner.__all__, *estimators, "metrics.nlpd", "datasets.load"]:
        assert f'id="bochner.{name}"' in page, name


def test_lines_are_not_too_long():
    for page in PAGES:
        for number, line in enumerate((ROOT / "docs" / page).read_text().splitlines(), start=1):
            assert len(line) <= 145, f"{page}, line {number}"


LABELS = {
    "no-intervals": "no intervals",
    "one-length": "only the longest training",
    "one-network": "`networks=1`",
    "rbf": '`kernel="rbf"`',
    "wide": "`hidden=()`",
    "wide-tuned-at-500": "`hidden=()`, tuned with 500 units",
    "wide-matern32": "`hidden=()`, Matérn-3/2 alone",
}


def test_numbers_of_the_default_are_those_of_its_rows():
    page, front = ((ROOT / name).read_text() for name in ("docs/default.md", "README.md"))
    folder = ROOT / "results" / "default"

    def rows(file, **wanted):
        return [row for row in read_rows(folder / file) if all(row[name] == value for name, value in wanted.items())]

    def mean(own, name):
        return f"{np.mean([row[name] for row in own]):.3f}".replace("-", "−")

    def cells(own, *names):
        return " | ".join(f"{mean(own, name)} ± {np.std([row[name] for row in own]):.3f}" for name in names)

    plain = page.replace("**", "")
    for name in ("boston", "concrete", "airfoil", "elevators"):
        own = rows("folds.jsonl", set=name, model="bochner")
        line = f"{cells(own, 'nlpd', 'rmse')} | {mean(own, 'coverage_90')} | {mean(own, 'far_mean')} ({mean(own, 'far_low')})"
        assert f"| {name} | default | {line} |" in plain
        for model, kernel in {"gp-matern32": "Matérn-3/2", "gp-matern52": "Matérn-5/2", "gp-rbf": "RBF"}.items():
            if own := rows("folds.jsonl", set=name, model=model):
                line = f"| | exact GP, {kernel} | {cells(own, 'nlpd', 'rmse')} | {mean(own, 'coverage_90')} | |"
                assert line in plain, (name, model)
    for name in ("diabetes", "adult", "connect-4"):
        own = rows("folds.jsonl", set=name, model="bochner")
        far = f"{mean(own, 'far_mean')} ({mean(own, 'far_high')})"
        assert f"| {name} | {cells(own, 'nlpd', 'accuracy', 'ece')} | {far} |" in plain
    sets = ("boston", "concrete", "airfoil", "elevators", "diabetes")
    first = {name: rows("folds.jsonl", set=name, model="bochner", seed=0) for name in sets}
    assert f"| default | {' | '.join(mean(first[name], 'nlpd') for name in sets)} |" in plain
    for model, label in LABELS.items():
        found = []
        for name in sets:
            own = rows("folds.jsonl", set=name, model=model, seed=0)
            less = np.array([row["nlpd"] - peer["nlpd"] for row, peer in zip(own, first[name], strict=False)])
            found.append(f"{less.mean():+.3f} ± {less.std(ddof=1) / 10**0.5:.3f}" if len(own) == 10 else "")
        line = f"| {label} | {' | '.join(found)} |".replace("-", "−").replace("  ", " ").replace("  ", " ")
        assert line.replace("Matérn−3", "Matérn-3") in plain, model
    for name in ("diabetes-progression", "friedman1", "friedman2", "friedman3"):
        for model in {row["model"] for row in rows("unseen.jsonl")}:
            own = rows("unseen.jsonl", set=name, model=model)
            label = "default" if model == "bochner" else model
            assert f"| {name} | {label} | {cells(own, 'nlpd', 'rmse')} | {mean(own, 'coverage_90')} |" in plain
    for row in read_rows(folder / "cost.jsonl"):
        assert f"| {row['rows']:,} | {row['seconds']:.0f} | {row['bytes'] / 2**30:.2f} | {row['networks']} |" in page
    (row,) = read_rows(folder / "boston.jsonl")
    for name in ("bochner_tuning", "gpytorch_own_matern", "gpytorch_tuning"):
        assert f"{row[name]:.2f} s" in page
    for words in ("default", "exact GP"):
        found = []
        for name in ("boston", "concrete", "airfoil", "elevators"):
            models = ["bochner"] if words == "default" else ["gp-matern32", "gp-matern52", "gp-rbf"]
            means = [
                np.mean([r["nlpd"] for r in own]) for m in models if (own := rows("folds.jsonl", set=name, model=m))
            ]
            found.append(f"{min(means):.3f}".replace("-", "−"))
        assert f"| {words} | {' | '.join(found)} |" in front
