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
from bochner.reports import tables

ROOT = Path(__file__).parents[1]
PAGES = [
    page.name
    for page in sorted((ROOT / "docs").glob("*.md"))
    if "```python" in page.read_text() and page.name != "adding_a_posterior.md"
]
FIGURES = {name: [f"{name}.svg"] for name in ("banana", "regression_1d", "trained_network")}
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
    assert EXAMPLES == ["banana", "regression_1d", "streaming", "swap_head", "table_csv", "trained_network"]
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
    estimators = ["StationaryRegressor.ood_score", "StationaryClassifier.predict_proba"]
    for name in [*bochner.__all__, *estimators, "metrics.nlpd", "datasets.load"]:
        assert f'id="bochner.{name}"' in page, name


def test_numbers_of_heads_on_networks_are_those_of_their_rows():
    page, front = ((ROOT / name).read_text() for name in ("docs/trained_network.md", "README.md"))
    rows = read_rows(ROOT / "results/attach/rows.jsonl")
    worst = {}
    for name in {row["set"] for row in rows}:
        for score in {row["score"] for row in rows}:
            own = [row for row in rows if (row["set"], row["score"]) == (name, score)]
            means = [np.mean([row["auroc"][k] for row in own]) for k in own[0]["auroc"]]
            worst[name, score] = min(means)
            assert f"| {score} | {' | '.join(f'{v:.3f}' for v in [*means, min(means)])} |" in page, (name, score)
        head = [row for row in rows if row["set"] == name and row["score"] == "StationaryHead"]
        assert f"{np.mean([row['accuracy'] for row in head]):.4f}" in page, name
    for score in ("StationaryHead", "maximum probability", "energy"):
        assert f"{worst['digits', score]:.3f}" in front, score


def test_lines_are_not_too_long():
    for page in PAGES:
        for number, line in enumerate((ROOT / "docs" / page).read_text().splitlines(), start=1):
            assert len(line) <= 145, f"{page}, line {number}"


def test_numbers_of_the_default_are_those_of_its_rows():
    page, front = (
        (ROOT / name).read_text().replace("**", "").replace("−", "-") for name in ("docs/default.md", "README.md")
    )
    folds, suite, cost = (
        read_rows(ROOT / "results" / name) for name in ("default/folds.jsonl", "suite/rows.jsonl", "default/cost.jsonl")
    )
    for name in {row["set"] for row in folds}:
        own = [row for row in folds if row["set"] == name]
        third = "rmse" if "rmse" in own[0] else "accuracy"
        cells = [f"{np.mean([r[c] for r in own]):.3f} ± {np.std([r[c] for r in own]):.3f}" for c in ("nlpd", third)]
        assert f"| {name} | {len(own)} | {' | '.join(cells)} |" in page, name
        if name in ("boston", "concrete", "airfoil", "elevators"):
            assert re.search(rf"{name} (has )?{np.mean([r['nlpd'] for r in own]):.3f}", front), name
    means = {}
    for name in {row["table"] for row in suite}:
        means[name] = np.mean([row["nlpd"] for row in suite if row["table"] == name])
        assert f"| {name[2:]} | {means[name]:.3f} |" in page, name
    for kind, count in (("c_", 10), ("r_", 17)):
        own = [value for name, value in means.items() if name.startswith(kind)]
        assert len(own) == count
        assert f"| mean | {np.mean(own):.3f} |" in page
        assert f"| mean | {np.mean(own):.3f} |" in front
    for row in cost:
        line = f"| {row['kind']} | {row['rows']:,} | {row['seconds']:.1f} | {row['peak_bytes'] / 2**30:.2f} "
        assert line in page


def test_numbers_of_the_results_page_are_those_of_its_rows():
    page = " ".join((ROOT / "docs/results.md").read_text().replace("**", "").replace("−", "-").split())
    rows = read_rows(ROOT / "results/uci/uci-regression.jsonl")
    cells = {k: v for k, v in tables.summarise(rows).items() if k.protocol == "paper"}
    counts = {
        m: [sum(getattr(c[m], kind) for c in cells.values()) for kind in ("near", "within")] for m in ("nlpd", "rmse")
    }
    near, within = counts["nlpd"]
    assert len(cells) == 64
    assert near == within  # 'as many'
    assert (
        f"NLPD {near} of 64 cells within two standard errors of the paper's mean and as many within one of its" in page
    )
    assert f"RMSE {counts['rmse'][0]} and {counts['rmse'][1]}." in page
    differences, seconds = {}, {}
    for name in ("boston", "concrete", "airfoil", "elevators"):
        differences[name] = np.mean([c["nlpd"].difference for k, c in cells.items() if k.set == name])
        first = [r for r in rows if (r["set"], r["protocol"], r["fold"]) == (name, "paper", 0)]
        seconds[name] = sum(r["seconds"] for r in first)
        assert f"{name} {seconds[name]:.0f} s" in page, name
    assert f"took {sum(seconds.values()):.0f} s on one H200" in page
    for name, words in (
        ("boston", "{:+.3f} on boston"),
        ("concrete", "{:+.3f} on concrete"),
        ("elevators", "{:+.3f} on elevators"),
    ):
        assert words.format(differences[name]) in page, name
    assert f"{differences['airfoil']:+.3f} on airfoil" in page
    lower = re.search(r"has the lower NLPD in (\d+) of 64 cells", tables.comparison(rows))
    assert lower is not None
    assert f"lower NLPD in {lower[1]} of 64 cells" in page
    pictures = {
        tuple(r[k] for k in ("head", "posterior", "score", "protocol", "outside", "model")): r["auc"]
        for r in read_rows(ROOT / "results/images/cifar-ood.jsonl")
        if r["outside"] != "histogram"
    }
    for kind in (
        ("swag", "marginal_variance", "paper"),
        ("swag", "entropy", "paper"),
        ("closed_form", "entropy", "bochner"),
    ):
        places = [(o, m) for o in ("cifar100", "svhn-1083") for m in ("relu", "rbf-sin")]
        line = " | ".join(
            " / ".join(f"{pictures[(h, *kind, *place)]:.3f}" for h in ("text", "code")) for place in places
        )
        assert f"| {line} |" in page, kind
    widths = [r["r_hat"] for r in read_rows(ROOT / "results/toys/banana-width.jsonl") if r["method"] == "nuts"]
    assert f"{sum(r <= 1.02 for r in widths)} of {len(widths)} converged" in page
    toys = [r["r_hat"] for r in read_rows(ROOT / "results/toys/toy-1d.jsonl") if r["method"] == "nuts"]
    assert f"{sum(r <= 1.02 for r in toys)} of {len(toys)} networks converged" in page


def test_numbers_of_classes_on_the_results_page_are_those_of_their_rows():
    page = " ".join((ROOT / "docs/results.md").read_text().replace("**", "").split())
    rows = read_rows(ROOT / "results/uci/uci-classification.jsonl")
    cells = tables.summarise(rows)
    for posterior in ("kfac", "swag"):
        own = [c for k, c in cells.items() if (k.posterior, k.protocol) == (posterior, "paper")]
        known = [c for c in own if c["nlpd"].difference is not None]
        share = f"{sum(c['nlpd'].within for c in known)} of {len(known)}"
        assert f"| {len(own)} of 64 | {share} |" in page, posterior
        assert share in page
    for name in ("diabetes", "adult"):
        first = [r for r in rows if (r["set"], r["posterior"], r["protocol"], r["fold"]) == (name, "kfac", "paper", 0)]
        assert f"{name} {sum(r['seconds'] for r in first):.0f} s" in page, name


def test_numbers_of_rotated_mnist_are_those_of_its_rows():
    page = " ".join((ROOT / "docs/results.md").read_text().replace("**", "").split())
    rows = [r for r in read_rows(ROOT / "results/images/rotated-mnist.jsonl") if r["seed"] == 0]

    def of(model, posterior):
        own = [r for r in rows if (r["protocol"], r["model"], r["posterior"]) == ("bochner", model, posterior)]
        upright = next(r for r in own if r["angle"] == 0)
        return upright["confidence"], upright["accuracy"], np.mean([r["nlpd"] for r in own])

    for model, name in (
        ("relu", "ReLU"),
        ("rbf-sin", "RBF sin"),
        ("rbf-sincos", "RBF sin–cos"),
        ("local-rbf", "local RBF"),
    ):
        confidence, accuracy, over_angles = of(model, "kfac")
        assert f"{confidence:.3f} and {accuracy:.3f} ({name})" in page, name
        at_most = of(model, "map")[2]
        digits = 2 if f"{over_angles:.2f}" != f"{at_most:.2f}" else 3
        assert f"{name} {over_angles:.{digits}f} and {at_most:.{digits}f}" in page, name
