"""Rows, theory experiments and the command line."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bochner.cli import app
from bochner.experiments.rows import provenance, read_rows, row_problem, write_rows
from bochner.experiments.theory import (
    EXPERIMENTS,
    PAPER_GRAM_ERROR,
    Config,
    covariances,
    extrapolation,
    gram_error,
    gram_matrices,
    mixture_error,
)
from bochner.reports.figures import save_figure
from bochner.reports.theory import FIGURES

SMALL = Config(monte_carlo=200, gram_points=7, gram_networks=20, error_points=6, error_widths=(5, 50), error_draws=2)


def test_rows_survive_a_round_trip_and_a_torn_last_line(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    assert read_rows(path) == []
    write_rows(path, [{"a": 1}, {"a": 2.5}])
    with path.open("a") as file:
        file.write('{"a": 3')
    assert read_rows(path) == [{"a": 1}, {"a": 2.5}]
    assert [p.name for p in path.parent.iterdir()] == ["rows.jsonl"]


ROWS = {
    name: json.loads((Path(__file__).parents[1] / "results" / folder / f"{name}.jsonl").read_text().splitlines()[0])
    for folder, name in (
        ("uci", "uci-regression"),
        ("images", "cifar-ood"),
        ("images", "rotated-digits"),
        ("theory", "gram"),
    )
}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("1", "it is no JSON object"),
        ("null", "it is no JSON object"),
        ("[" * 100_000, "no JSON that can be read"),
        ("9" * 5_000, "no JSON that can be read"),
        ("{", "Expecting property name enclosed in double quotes"),
        ('{"a": 1}', "it has no '"),
    ],
)
@pytest.mark.parametrize("name", ROWS)
def test_a_foreign_line_in_a_file_of_rows_is_refused_by_its_number(line, problem, name, tmp_path):
    path = tmp_path / f"{name}.jsonl"
    path.write_text(f"{json.dumps(ROWS[name])}\n\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(f"Line 3 of {path} is not a row ({problem}")):
        read_rows(path)


@pytest.mark.parametrize("name", ROWS)
def test_every_column_that_is_read_is_there_and_of_its_type(name, tmp_path):
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(ValueError, match=r"Line 1 .* \(no JSON that can be read\)"):
        read_rows(path)
    refused = set()
    for column, value in [(column, value) for column in ROWS[name] for value in (..., {}, True, 10**400)]:
        row = {key: kept for key, kept in (ROWS[name] | {column: value}).items() if kept is not ...}
        path.write_text(json.dumps(row) + "\n")
        found = row_problem(row, name)
        if found is None:
            assert read_rows(path) == [row]
            continue
        kinds = "(text|an integer|a number|a list|a number or null)"
        assert re.fullmatch(f"it has no '{column}'" if value is ... else f"its '{column}' must be {kinds}", found)
        with pytest.raises(ValueError, match=f"Line 1 of .*{found}"):
            read_rows(path)
        refused.add(column)
    assert {"protocol", "model", "seed", "status"} <= refused or {"points", "infinite"} <= refused
    path.write_text(json.dumps(ROWS[name]) + "\n")
    assert read_rows(path) == [ROWS[name]]


def test_rows_that_do_not_fit_together_are_one_line(tmp_path):
    row = {"kernel": "rbf", "scaling": "unit", "full": [1.0], "first": [1.0], "difference": [0.0]}
    (tmp_path / "theory").mkdir()
    path = tmp_path / "theory" / "mixture.jsonl"
    path.write_text(json.dumps(row | {"r": [0.0], "kernel": "[/red]:on:"}) + "\n")
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert re.match(r"The rows in .* cannot be shown \(KeyError: '\[/red\]:on:'\); remove the lines", result.stderr)


def test_provenance_says_what_it_takes():
    assert {"commit", "bochner", "torch", "python", "device", "hardware"} <= provenance().keys()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_makes_rows_and_a_figure_from_them_alone(name, tmp_path):
    rows = EXPERIMENTS[name](SMALL)
    path = tmp_path / f"{name}.jsonl"
    write_rows(path, rows)
    for copy in ("a.svg", "b.svg"):
        save_figure(FIGURES[name](read_rows(path)), tmp_path / copy)
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_iid_gram_error_is_the_papers_within_its_scatter():
    """The paper shows one draw for each K. Ours is a mean over draws; both fall as 1/√K."""
    rows = gram_error(Config(error_widths=(50, 1000), error_draws=10))
    for row in rows:
        if row["paper"] is not None:
            assert row["paper"] / 2.5 < row["error"] < row["paper"] * 2.5
    iid = [r for r in rows if r["paper"] is not None]
    assert {r["kernel"] for r in iid} == set(PAPER_GRAM_ERROR)


def test_covariances_and_gram_matrices_agree_with_theory():
    assert max(row["worst"] for row in covariances(Config())) < 5 / 5000**0.5
    differences = {row["prior"]: row["mean_difference"] for row in gram_matrices(Config())}
    for prior in ("ArcCos-1 ~ ReLU", "NN ~ Sigmoid", "RBF-NN (local)", "RBF", "Matérn-3/2", "Exponential"):
        assert differences[prior] < 0.02


def test_only_the_stationary_network_returns_to_its_prior():
    rows = {row["activation"]: row for row in extrapolation(Config())}
    assert rows["paired"]["far_std"] > 0.95 * rows["paired"]["far_prior_std"]
    assert abs(rows["paired"]["far_mean"]) < 0.3
    assert abs(rows["relu"]["far_mean"]) > 1
    assert rows["local_rbf"]["far_std"] < max(rows["local_rbf"]["std"])


def test_mixture_error_is_largest_at_zero_under_the_papers_scaling():
    for row in mixture_error(SMALL):
        if row["scaling"] == "paper":
            assert row["difference"][0] == pytest.approx(3.141592653589793**4 / 96 - 1, abs=1e-9)
            assert row["worst"] == pytest.approx(row["difference"][0])
        else:
            assert row["difference"][0] == pytest.approx(0, abs=1e-12)


def test_run_writes_rows_with_provenance_and_is_reproducible(tmp_path):
    for folder in ("one", "two"):
        result = CliRunner().invoke(app, ["run", "covariances", "--out", str(tmp_path / folder), "--seed", "3"])
        assert result.exit_code == 0, result.output
        assert "covariances.svg" in result.output
    one, two = (
        [json.loads(line) for line in (tmp_path / folder / "covariances.jsonl").read_text().splitlines()]
        for folder in ("one", "two")
    )
    assert all(row["seed"] == 3 and row["experiment"] == "covariances" and row["torch"] for row in one)
    assert all(row.pop("file_seconds") > 0 for row in one + two)
    assert one == two
    assert (tmp_path / "one" / "covariances.svg").read_bytes() == (tmp_path / "two" / "covariances.svg").read_bytes()


def test_bad_command_lines_are_refused_before_any_work(tmp_path):
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    result = runner.invoke(app, ["run", "gramm", "--out", str(tmp_path / "x")])
    assert result.exit_code == 1
    assert "Did you mean 'gram'?" in result.output
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "cannot be written to" in result.output
    assert runner.invoke(app, ["run", "gram", "--seed", "-1"]).exit_code == 2
    assert runner.invoke(app, ["run", "gram", "--seed", "99999999999999999999"]).exit_code == 2
    assert "bochner 0." in runner.invoke(app, ["--version"]).output


def test_a_second_run_does_nothing_and_another_seed_does(tmp_path):
    outputs = [
        CliRunner().invoke(app, ["run", "activations", "--out", str(tmp_path), "--seed", s]).output
        for s in ("1", "1", "2")
    ]
    assert ["already" in output for output in outputs] == [False, True, False]
    assert "replaces 6 rows of another unit" in outputs[2]


def test_links_between_the_pages_lead_somewhere():
    root = Path(__file__).parents[1]
    for page in [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_a_missing_set_is_named_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("BOCHNER_DATA", str(tmp_path))
    result = CliRunner().invoke(app, ["run", "banana", "--out", str(tmp_path / "rows")])
    said = " ".join(result.output.split())
    assert result.exit_code == 1
    assert "The file banana.csv of the data set 'banana' is not in" in said
    assert said.endswith("the folder that holds it.")
    assert not (tmp_path / "rows").exists()
