"""What the pages show and what the examples do. Links are checked in test_experiments.py."""

import contextlib
import importlib.util
import io
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bochner
from bochner.experiments.rows import read_rows
from bochner.experiments.toys import converged
from bochner.reports import tables
from bochner.reports.blocks import as_markdown
from browser import needs_axe, needs_browser

ROOT = Path(__file__).parents[1]
PAGES = [
    str(page.relative_to(ROOT / "docs"))
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if "```python" in page.read_text()
]
README_BLOCKS = [part.split("```")[0] for part in (ROOT / "README.md").read_text().split("```python")[1:]]
FIGURES = {name: [f"{name}.svg"] for name in ("banana", "regression_1d", "trained_network")}
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def run(*command: str, folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """A Python process of its own, on one thread, in a folder of its own."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "PYTHONIOENCODING": "utf-8",
        "DOCS_RUN": "0",
        "NO_MKDOCS_2_WARNING": "1",  # a notice of the theme's authors about its future
    }
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


def hook(name: str):
    """A module of hooks/, which MkDocs loads by its path as well."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page):
    """Through the hook that the build uses, which refuses pages that leave files behind."""
    text = (ROOT / "docs" / page).read_text()
    shown = hook("outputs").run_page(text, page)
    printed = re.findall(r"^```\{\.text \.output title=\"prints\"\}\n(.*?)^```", shown, re.DOTALL | re.MULTILINE)
    assert "nan" not in "".join(printed)
    assert bool(printed) == ("print(" in text)


def test_every_new_page_with_code_is_run():
    pages = {"tutorial.md", "own_network.md", "choosing.md", "theory.md", "promises.md", "from/gpytorch.md", "index.md"}
    assert pages <= set(PAGES)


def test_what_a_block_prints_is_shown_below_it_and_a_failure_stops_the_build():
    outputs = hook("outputs")
    page = "```python\na = 2\n```\n\ntext\n\n```python\nprint(a + 1)\n```\n"
    assert outputs.run_page(page) == page + '\n```{.text .output title="prints"}\n3\n```\n'
    with pytest.raises(ZeroDivisionError):
        outputs.run_page("```python\n1 / 0\n```\n")
    with pytest.raises(RuntimeError, match=r"leaves files behind: \['a'\]"):
        outputs.run_page("```python\nopen('a', 'w').close()\n```\n")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("block", README_BLOCKS, ids=range(len(README_BLOCKS)))
def test_every_block_of_the_readme_runs_alone(block, capsys):
    exec(block, {})
    assert "nan" not in capsys.readouterr().out


def test_the_readme_is_short_and_has_its_parts():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(README_BLOCKS) >= 3
    assert text.count("![") == 1
    for part in (
        "pip install",
        "bochner fit",
        "bochner predict",
        "TableRegressor",
        "TableClassifier",
        "StationaryHead",
    ):
        assert part in text, part


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each example prints, run in this process in a folder of its own."""
    texts = {}
    for name in EXAMPLES:
        folder, output = tmp_path_factory.mktemp(name), io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(output):
            runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        assert [path.name for path in folder.iterdir()] == FIGURES.get(name, []), name
        texts[name] = output.getvalue()
    return texts


@pytest.mark.usefixtures("one_thread")
def test_the_examples_run(printed):
    assert EXAMPLES == ["banana", "regression_1d", "streaming", "swap_head", "table_csv", "trained_network"]
    assert all(text.strip() for text in printed.values())
    flags = [line.rsplit(",", 1)[1] for line in printed["table_csv"].splitlines() if line.count(",") > 4]
    assert flags[-1] == "True", "the palace is unlike the flats"
    # Mean probability of the chosen class, far from the arcs: ReLU is surer than the stationary network.
    far = {words[0]: float(words[2]) for words in map(str.split, printed["banana"].splitlines()) if "far" in words}
    assert far["paired"] < 0.7 < far["relu"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site and what building it said."""
    for name in ("material", "latex2mathml"):
        pytest.importorskip(name, reason="the site needs the extra docs; `make setup` installs it")
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
    for page in site[0].rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=[\"']?(https?:[^\"' >]+)", page.read_text())
        assert loaded == [], page.name
    for style in site[0].rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?https?:", style.read_text()), style.name


def test_formulas_are_mathml(site):
    """No raw LaTeX is left, neither of pages nor of docstrings."""
    for page in site[0].rglob("*.html"):
        assert "arithmatex" not in page.read_text(), page.name
    for name in ("theory.html", "default.html", "api/prior.html"):
        assert '<math xmlns="http://www.w3.org/1998/Math/MathML"' in (site[0] / name).read_text(), name


@needs_browser
def test_the_site_can_be_searched_from_a_folder(site, browser):
    """Without a server a browser starts no worker; assets/worker.js stands in. The console stays clean."""
    browser.open(site[0] / "index.html", query="?q=lengthscale")
    assert browser.wait("/\\d+ matching documents/.test(document.body.textContent)")
    assert browser.errors == []


LOOK = """(theme => {
  document.body.setAttribute("data-md-color-scheme", theme);
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const light = (...colours) => {  // relative luminance of colours painted one over the other
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = getComputedStyle(document.body).backgroundColor;
  const contrast = part => {
    const style = getComputedStyle(part), own = part.matches("button, select, input") ? style.backgroundColor : "#0000";
    const pair = [light("#fff", ground, own, style.color), light("#fff", ground, own)].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
  };
  const kinds = ["p", "li", "td", "label", "select", "button[name]"].map(kind => ".md-content " + kind);
  const parts = [...document.querySelectorAll(kinds.join())];
  const faint = parts.filter(part => contrast(part) < 4.5).map(part => part.outerHTML.slice(0, 80));
  return {parts: parts.length, wide: document.documentElement.scrollWidth - innerWidth, faint};
})(%r)"""


@needs_browser
@pytest.mark.parametrize("page", ["explorer.html", "index.html", "default.html"])
def test_pages_fit_narrow_and_wide_screens_in_light_and_dark(page, site, browser):
    """At 390 and at 1280 pixels: nothing sticks out, text has a contrast of 4.5, the console is clean."""
    for width, theme in itertools.product((390, 1280), ("default", "slate")):
        browser.open(site[0] / page, width)
        browser.run(LOOK % theme)
        browser.run("new Promise(done => setTimeout(done, 400))")  # colours change slowly
        look = browser.run(LOOK % theme)
        assert look["parts"] > 5, look
        assert look["wide"] <= 0, look
        assert look["faint"] == [], look
        assert browser.errors == [], browser.errors


@needs_axe
@pytest.mark.parametrize("page", ["explorer.html", "index.html", "tutorial.html", "results.html", "api/network.html"])
def test_pages_are_accessible(page, site, browser):
    for width, theme in itertools.product((390, 1280), ("default", "slate")):
        browser.open(site[0] / page, width)
        browser.run(f"document.body.setAttribute('data-md-color-scheme', '{theme}')")
        browser.run("new Promise(done => setTimeout(done, 400))")  # colours change slowly
        assert browser.serious_findings() == []


def test_the_gallery_shows_every_example(site):
    page = (site[0] / "gallery.html").read_text()
    for name in EXAMPLES:
        assert f"examples/{name}.py" in page, name


def test_the_reference_has_every_public_name(site):
    page = "".join(page.read_text() for page in (site[0] / "api").glob("*.html"))
    estimators = ["StationaryRegressor.ood_score", "StationaryClassifier.predict_proba"]
    names = ["priors.activations" if name == "activations" else name for name in bochner.__all__]
    for name in [*names, *estimators, "metrics.nlpd", "datasets.load"]:
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


def test_numbers_of_large_tables_and_of_the_service_are_those_of_their_rows():
    page = (ROOT / "docs/large_tables.md").read_text()
    costs = read_rows(ROOT / "results/benchmarks/out-of-core.jsonl")
    assert {row["rows"] for row in costs} == {10**5, 10**6, 10**7}
    for row in costs:
        line = f"| {row['rows']:,} | {row['seconds']:,.0f} s | {row['rows_a_second']:,} | {row['floor_rows_a_second']:,} | "
        assert line + f"{row['peak_gib']:.2f} GiB | {row['nlpd']:.3f} |" in page
    for row in read_rows(ROOT / "results/benchmarks/more-rows.jsonl"):
        line = f"| {row['set']} | {row['rows']:,} | {row['ours_nlpd']:.3f} | {row['boosting_nlpd']:.3f} | "
        assert line + f"{row['ours_seconds']:.0f} s | {row['boosting_seconds']:.0f} s |" in page
    (row,) = read_rows(ROOT / "results/benchmarks/serve.jsonl")
    direct = {"one_row_one_client": "one_row", "one_row": "one_row", "large": "large"}
    for name, alone in direct.items():
        part = row[name]
        line = f"| {part['p50_ms']:.0f} ms | {part['p99_ms']:.0f} ms | {part['rows_per_s']:,.0f} | "
        assert f"{line}{row[alone]['direct_one_pass_ms']:.0f} ms |" in (ROOT / "docs/serving.md").read_text(), name


def test_lines_are_not_too_long():
    for page in set(PAGES) - {"explorer.md"}:  # its form has long lines
        for number, line in enumerate((ROOT / "docs" / page).read_text().splitlines(), start=1):
            assert len(line) <= 145 or line.startswith("|"), f"{page}, line {number}"  # a row of a table is one line


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
    for line in front.splitlines():
        if line.startswith(("| mean", "|  | ours")):
            assert line in page or line.replace("|  |", "| table |") in page, line
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
    front = " ".join((ROOT / "README.md").read_text().split())
    assert f"{near} of {len(cells)} cells are within two standard errors of its mean" in front
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
    lower = re.search(r"has the lower NLPD in (\d+) of 64 cells", as_markdown(tables.comparison(rows)))
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
    for name, words in {"banana": "", "banana-width": "", "toy-1d": " networks"}.items():
        sampled = [r for r in read_rows(ROOT / f"results/toys/{name}.jsonl") if r["method"] == "slices"]
        assert f"{sum(map(converged, sampled))} of {len(sampled)}{words} converged" in page, name


def test_numbers_of_sampled_networks_are_those_of_their_rows():
    page = " ".join((ROOT / "docs/results.md").read_text().replace("**", "").split())

    def span(values, digits):
        low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
        return low if low == high else f"{low}–{high}"

    openings = {
        "banana": ("ReLU is {} sure of its class on average", "local networks {}"),
        "banana-paper": ("ReLU {}, local", "local ones {}"),
    }
    for name, (of_relu, of_local) in openings.items():
        rows = [r for r in read_rows(ROOT / f"results/toys/{name}.jsonl") if r["method"] == "slices"]
        far = {r["model"]: r["far_confidence"] for r in rows}
        periodic = [r for r in rows if "-" in r["model"]]
        assert (len(rows), len(periodic)) == (15, 12)
        assert of_relu.format(f"{far['relu']:.2f}") in page
        assert of_local.format(span([far["local_rbf"], far["local_matern32"]], 2)) in page
        confidence, variance = ([r[f"far_{key}"] for r in periodic] for key in ("confidence", "variance"))
        assert f"periodic ones {span(confidence, 2)} with a variance of {span(variance, 2)}" in page
    theory = " ".join((ROOT / "docs/theory.md").read_text().split())
    rows = [r for r in read_rows(ROOT / "results/toys/banana.jsonl") if r["method"] == "slices"]
    relu = next(r["far_confidence"] for r in rows if r["model"] == "relu")
    periodic = span([r["far_confidence"] for r in rows if "-" in r["model"]], 2)
    assert f"ReLU is {relu:.2f} sure of its class on average, the periodic networks {periodic} (" in theory
    rows = [r for r in read_rows(ROOT / "results/toys/toy-1d.jsonl") if r["method"] == "slices"]
    said = (
        f"at most {max(r['r_hat'] for r in rows):.3f}, with at least {min(r['ess'] for r in rows):,.0f} effective draws"
    )
    assert said in page


def test_numbers_of_the_model_on_a_processor_are_those_of_its_rows():
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    here = read_rows(ROOT / "results/uci-cpu/uci-regression.jsonl")
    everything = read_rows(ROOT / "results/uci/uci-regression.jsonl")
    there = [r for r in everything if all(r[k] == here[0][k] for k in ("set", "model", "protocol", "posterior"))]
    nlpd, rmse = ([np.mean([r[key] for r in rows]) for rows in (here, there)] for key in ("nlpd", "rmse"))
    seconds = here[0]["seconds"]
    assert len(here) == len(there) == 10
    assert f"took {seconds:.0f} s with products in {here[0]['precision']}" in page
    assert f"about 6,140 s on such a machine, {6140 / seconds:.0f} times as long" in page
    assert f"mean NLPD {nlpd[0]:.2f} and {nlpd[1]:.2f}, RMSE {rmse[0]:.3f} and {rmse[1]:.3f}" in page


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


def test_numbers_beside_laplace_torch_are_those_of_their_rows():
    page = (ROOT / "docs/trained_network.md").read_text().split("## Beside laplace-torch")[1]
    for row in read_rows(ROOT / "results/attach/laplace-torch.jsonl"):
        cells = [f"{row['fit_s']:.1f}", f"{row['predict_s']:.2f}", f"{row['more_memory_mib']:.0f}", f"{row['nll']:.4f}"]
        line = next(line for line in page.splitlines() if line.startswith(f"| {row['method']} | "))
        assert line.endswith(f"| {' | '.join(cells)} | {min(row['auroc'].values()):.3f} |"), row["method"]
