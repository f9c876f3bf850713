"""fit, predict, evaluate and info: the ordinary way through, and more than forty ways to go wrong."""

import json
import math
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from bochner.cli import app, jobs
from bochner.cli import models as models_module
from bochner.estimators import StationaryRegressor
from bochner.members.member import Member, describe_members
from bochner.storage import load, save
from bochner.tables import fitting
from bochner.tables.files import reading

FAST = ["--kernel", "matern32"]


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def houses(num=60, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "area": rng.uniform(30, 200, num),
            "rooms": rng.integers(1, 7, num),
            "kind": rng.choice(["flat", "house", "loft"], num),
            "garden": rng.random(num) > 0.5,
            "age": np.where(rng.random(num) < 0.2, np.nan, rng.uniform(0, 100, num)),
        }
    )
    frame["price"] = 3000 * frame["area"] + 20000 * (frame["kind"] == "house") + rng.normal(0, 5000, num)
    return frame


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of a number and one of a class, with their training tables."""
    folder = tmp_path_factory.mktemp("models")
    frame = houses()
    frame.to_csv(folder / "number.csv", index=False)
    frame.assign(dear=np.where(frame["price"] > 3e5, "yes", "no")).drop(columns="price").to_csv(
        folder / "class.csv", index=False
    )
    for kind, target in (("number", "price"), ("class", "dear")):
        result = run("fit", folder / f"{kind}.csv", "--target", target, "--out", folder / f"{kind}.bochner", *FAST)
        assert result.exit_code == 0, result.stderr
    return folder


# ------------------------------------------------------------------ the ordinary way


def test_fit_says_how_well_it_does_and_writes_a_model(tmp_path):
    houses().to_csv(tmp_path / "t.csv", index=False)
    report = tmp_path / "r.html"
    result = run(
        "fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "m.bochner", "--report", report, *FAST
    )
    assert result.exit_code == 0, result.stderr
    assert "regression of 'price' from 5 columns" in result.stdout
    assert "  kind: 3 categories\n  garden: True → 1, False → 0\n  age: number; " in result.stdout
    assert "fitted to 48 of 60 rows; the others measure it (--test 0 fits to all)" in result.stdout
    assert "R²" in result.stdout
    assert all(line.startswith("bochner: ") for line in result.stderr.splitlines())  # progress, where it is piped too
    assert result.stderr.startswith("bochner: reading ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.bochner", "r.html", "t.csv"]
    assert "a random forest" in report.read_text()
    as_json = run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "m.bochner", "--json", *FAST)
    found = json.loads(as_json.stdout)
    assert found["task"] == "regression"
    assert found["held_out"]["rows"] == 12


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_predictions_are_those_of_the_estimator_whatever_the_order_of_columns(suffix, models, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK_ROWS", 7)  # several pieces
    new = houses(20, seed=1).drop(columns="price")[["rooms", "age", "kind", "area", "garden"]]
    path, out = tmp_path / f"new.{suffix}", tmp_path / f"out.{suffix}"
    new.to_csv(path, index=False) if suffix == "csv" else new.to_parquet(path)
    result = run("predict", models / "number.bochner", path, "--out", out, "--coverage", "0.5")
    assert result.exit_code == 0, result.stderr
    found = pd.read_csv(out) if suffix == "csv" else pd.read_parquet(out)
    saved = load(models / "number.bochner")
    x = new
    mean, std = saved.estimator.predict(x, return_std=True)
    np.testing.assert_allclose(found["price_mean"], mean, rtol=1e-9)
    np.testing.assert_allclose(found["price_std"], std, rtol=1e-9)
    np.testing.assert_allclose(found[["price_low", "price_high"]], saved.estimator.predict_interval(x, 0.5), rtol=1e-9)
    np.testing.assert_allclose(found["ood_score"], saved.estimator.ood_score(x), rtol=1e-9)
    assert list(found["ood"]) == list(saved.estimator.ood_score(x) > saved.estimator.ood_threshold_)
    assert list(found.columns[:5]) == list(new.columns)


def test_classes_get_probabilities_and_strange_rows_a_flag(models, tmp_path):
    new = houses(10, seed=2).drop(columns="price")
    new.loc[3, ["area", "rooms"]] = [9000.0, 80]
    new.loc[4, "kind"] = "castle"  # not seen in training: none of the known kinds
    new.to_csv(tmp_path / "new.csv", index=False)
    result = run("predict", models / "class.bochner", tmp_path / "new.csv", "--out", tmp_path / "out.csv", "--json")
    assert result.exit_code == 0, result.stderr
    found = pd.read_csv(tmp_path / "out.csv")
    np.testing.assert_allclose(found[["dear_p_no", "dear_p_yes"]].sum(axis=1), 1)
    assert set(found["dear_predicted"]) <= {"yes", "no"}
    assert bool(found["ood"][3])
    assert json.loads(result.stdout)["flagged"] == int(found["ood"].sum())


def test_evaluate_and_info(models, tmp_path):
    test = houses(40, seed=3)
    test.to_csv(tmp_path / "t.csv", index=False)
    found = json.loads(run("evaluate", models / "number.bochner", tmp_path / "t.csv", "--json").stdout)
    saved = load(models / "number.bochner")
    x, y = test.drop(columns="price"), test["price"].to_numpy()
    assert found["rmse"] == pytest.approx(float(np.sqrt(np.mean((y - saved.estimator.predict(x)) ** 2))))
    assert found["nlpd"] == pytest.approx(-np.mean(saved.estimator.log_prob(x, y)))
    ends = saved.estimator.predict_quantiles(x, [0.05, 0.95])
    assert found["coverage_90"] == np.mean([low <= own <= high for own, (low, high) in zip(y, ends, strict=True)])
    assert found["width_90"] == pytest.approx(np.mean([high - low for low, high in ends]))
    test.assign(dear=np.where(test["price"] > 3e5, "yes", "no")).drop(columns="price").to_csv(
        tmp_path / "c.csv", index=False
    )
    classes = run("evaluate", models / "class.bochner", tmp_path / "c.csv")
    assert "AUC" in classes.stdout
    about = json.loads(run("info", models / "class.bochner", "--json").stdout)
    assert (about["target"], about["classes"], about["estimator"]) == ("dear", "no, yes", "TableClassifier")
    assert "kind: 3 categories" in about["columns"]
    assert (about["kernel"], about["hidden_layer_sizes"], about["false_alarm"]) == ("matern32", [200, 200, 25], 0.05)
    assert about["members"] == "1 on the columns (1.00)"
    assert "noise" in run("info", models / "number.bochner").stdout


OUTPUTS = {
    "packed text": (["t.csv.gz"], "t.csv.gz", "t-predictions.csv"),
    "packed tabs": (["t.tsv.gz"], "t.tsv.gz", "t-predictions.tsv"),
    "Feather": (["t.feather"], "t.feather", "t-predictions.parquet"),
    "Excel": (["t.xlsx"], "t.xlsx", "t-predictions.csv"),
    "a name in capitals": (["T.CSV"], "T.CSV", "T-predictions.csv"),
    "two dots": (["a.b.csv"], "a.b.csv", "a.b-predictions.csv"),
    "a folder": (["in/rides/a.csv", "in/rides/b.csv"], "in/rides/", "in/rides-predictions.csv"),
    "a folder of Parquet": (["rides/a.parquet"], "rides", "rides-predictions.parquet"),
    "a pattern": (["in/part-1.csv", "in/part-2.csv"], "in/part-*.csv", "predictions.csv"),
    "a pattern of Parquet": (["part-1.parquet"], "part-?.parquet", "predictions.parquet"),
}


def write_as(frame, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if kind in ("csv", "tsv"):
        frame.to_csv(path, index=False, sep="\t" if kind == "tsv" else ",")
    else:
        getattr(frame, {"feather": "to_feather", "parquet": "to_parquet"}[kind])(path)


@pytest.mark.parametrize("case", OUTPUTS)
def test_predictions_go_beside_the_table_where_no_output_is_named(case, models, tmp_path, monkeypatch):
    inputs, table, out = OUTPUTS[case]
    monkeypatch.chdir(tmp_path)
    frame = houses(12, seed=1).drop(columns="price")
    if case == "Excel":
        pytest.importorskip("openpyxl")
        frame.to_excel(inputs[0], index=False)
    else:
        for path in inputs:
            write_as(frame, Path(path))
    for _ in range(2):  # the output of the first run is no input of the second one
        result = run("predict", models / "number.bochner", table, "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["out"] == out
        assert json.loads(result.stdout)["rows"] == 12 * len(inputs)
        assert sorted(str(path) for path in Path().rglob("*.*")) == sorted([*inputs, out])


def test_bad_rows_of_folders_and_patterns_are_listed_under_a_plain_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for table, name in (
        ("t.csv.gz", "t-bad-rows.csv"),
        ("part-*.csv", "bad-rows.csv"),
        (".", f"{tmp_path.name}-bad-rows.csv"),
    ):
        assert models_module._bad_rows_file(Path(table), True, Path("in/m.bochner")) == Path("in") / name
    assert models_module._bad_rows_file(Path("in/t.csv"), True) == Path("in/t-bad-rows.csv")
    assert models_module._bad_rows_file(Path("in/t.csv"), False) is None


def test_a_table_of_few_different_rows_is_measured_by_all_of_them(tmp_path):
    """Four combinations of yes and no: if equal rows stayed together, a whole combination would be unknown to the model."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.choice(["yes", "no"], (160, 2)), columns=["heads", "tails"])
    table["same"] = np.where(table["heads"] == table["tails"], "yes", "no")
    table.to_csv(tmp_path / "t.csv", index=False)
    result = run(
        "fit", tmp_path / "t.csv", "--target", "same", "--out", tmp_path / "m.bochner", "--hidden", "", "--json"
    )
    assert json.loads(result.stdout)["held_out"]["accuracy"] == 1
    assert not any("repeat" in line for line in json.loads(result.stdout)["summary"])


def test_members_are_counted_by_what_they_stand_on():
    members = [Member(0.3, None), Member(0.32, None), *(Member(0.19, None, number, None) for number in range(2))]
    assert describe_members(members) == "2 on the columns (0.62), 2 on networks (0.38)"
    assert describe_members(members[2:]) == "2 on networks (0.38)"


def test_info_shows_every_target_of_a_model_with_several(tmp_path):
    frame = houses()
    y = np.column_stack([frame["price"], frame["area"] ** 2])
    estimator = StationaryRegressor(kernel=("rbf", "matern52"), hidden_layer_sizes=(), random_state=0)
    save(tmp_path / "two.bochner", estimator.fit(frame[["area", "rooms"]], y))
    about = json.loads(run("info", tmp_path / "two.bochner", "--json").stdout)
    assert about["kernel"] == "rbf, matern52"
    assert about["members"].count("on the columns (1.00)") == 2
    np.testing.assert_allclose(about["noise"], estimator.noise_)


def test_cells_stay_as_they_are_and_codes_are_texts(tmp_path):
    frame = houses().assign(code=np.resize(["01", "02", "1A", "NA"], 60), number=np.arange(60))
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "m.bochner", *FAST).exit_code == 0
    new = frame[frame["code"].isin(["01", "02"])].drop(columns="price")  # looks like numbers now
    new["area"] = new["area"].astype(object)
    new.iloc[0, 0] = ""
    new.to_csv(tmp_path / "n.csv", index=False)
    new.assign(price=frame["price"]).to_csv(tmp_path / "e.csv", index=False)
    words = "area: 1 cells are missing, none was in training; such rows count as strange"
    assert words in run("evaluate", tmp_path / "m.bochner", tmp_path / "e.csv").stdout
    for suffix in ("csv", "parquet"):
        out = tmp_path / f"o.{suffix}"
        result = run("predict", tmp_path / "m.bochner", tmp_path / "n.csv", "--out", out)
        assert result.exit_code == 0, result.stderr
        assert words in result.stdout
        found = pd.read_csv(out, dtype=str, keep_default_na=False) if suffix == "csv" else pd.read_parquet(out)
        assert set(found["code"]) == {"01", "02"}
        assert found["number"].iloc[-1] == str(new["number"].iloc[-1])
    assert json.loads(run("evaluate", tmp_path / "m.bochner", tmp_path / "t.csv", "--json").stdout)["r2"] > 0.9


def test_a_parquet_file_with_an_index_and_holes_predicts_itself(tmp_path):
    frame = houses().astype({"rooms": "Int64"})
    frame.loc[5, "rooms"] = pd.NA
    frame.index = [f"row {i}" for i in range(60)]
    frame.to_parquet(tmp_path / "t.parquet")
    assert (
        run("fit", tmp_path / "t.parquet", "--target", "price", "--out", tmp_path / "m.bochner", *FAST).exit_code == 0
    )
    for suffix in ("csv", "parquet"):
        result = run("predict", tmp_path / "m.bochner", tmp_path / "t.parquet", "--out", tmp_path / f"o.{suffix}")
        assert result.exit_code == 0, result.stderr
    assert pd.read_parquet(tmp_path / "o.parquet")["rooms"].dtype.kind in "if"
    assert list(pd.read_csv(tmp_path / "o.csv", dtype=str)["rooms"][4:6].fillna("")) == [
        str(frame["rooms"].iloc[4]),
        "",
    ]


def test_a_class_may_be_called_none_and_a_single_row_has_no_r2(models, tmp_path):
    houses().assign(price=np.resize(["None", "some"], 60)).to_csv(tmp_path / "t.csv", index=False)
    assert run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "m.bochner", *FAST).exit_code == 0
    houses(1).to_csv(tmp_path / "one.csv", index=False)
    assert "r2" not in json.loads(run("evaluate", models / "number.bochner", tmp_path / "one.csv", "--json").stdout)


def test_all_rows_may_be_fitted_and_columns_left_out(tmp_path):
    houses().to_csv(tmp_path / "t.csv", index=False)
    options = ["--test", "0", "--drop", "kind, age", "--hidden", "4,2", "--task", "regression"]
    result = run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "m.bochner", *options, *FAST)
    assert result.exit_code == 0, result.stderr
    assert "from 3 columns\nfitted to 60 of 60 rows\n" in result.stdout
    # What was left out may be there or not.
    houses().drop(columns=["kind", "price"]).to_csv(tmp_path / "n.csv", index=False)
    assert run("predict", tmp_path / "m.bochner", tmp_path / "n.csv", "--out", tmp_path / "o.csv").exit_code == 0


# ------------------------------------------------------------------ going wrong


def text(value):
    return lambda path: path.write_bytes(value if isinstance(value, bytes) else value.encode())


def changed(**columns):
    def write(path):
        frame = houses()
        for name, value in columns.items():
            frame[name] = value(frame) if callable(value) else value
        frame.to_csv(path, index=False)

    return write


def with_cell(row, column, value):
    def write(path):
        frame = houses().astype(object)
        frame.loc[row, column] = value
        frame.to_csv(path, index=False)

    return write


def wide(path):
    pd.DataFrame(np.random.default_rng(0).normal(size=(12, 10_000))).add_prefix("c").assign(price=range(12)).to_csv(
        path, index=False
    )


def many_categories(path):
    rng = np.random.default_rng(0)
    columns = {f"c{i}": rng.permutation([f"v{j}" for j in range(50)] * 10) for i in range(45)}
    pd.DataFrame(columns).assign(price=range(500)).to_csv(path, index=False)


FIT = {
    "empty": (text(""), [], r"is empty; it needs a line of column names"),
    "only a line end": (text("\n"), [], r"has no columns; it needs a line of column names"),
    "header only": (text("a,price\n"), [], r"has column names but no rows"),
    "too many cells": (
        text("a,price\n" + "1,2\n" * 20 + "1,2,3\n"),
        [],
        r"\nline 22: 3 cells where the first line names 2",
    ),
    "too few cells": (
        text("a,b,price\n" + "1,2,3\n" * 20 + "1,2\n"),
        [],
        r"line 22: 2 cells where the first line names 3",
    ),
    "binary": (text(bytes(range(256)) * 9), [], r"is not a text file \(it holds null characters\)"),
    "null bytes": (text(b"a,price\n1\x00,2\n" * 20), [], r"is not a text file \(it holds null characters\)"),
    "an open quote": (
        text("a,price\n" + "1,2\n" * 20 + '"1,2\n' + "1,2\n" * 3),
        [],
        r"line 22: a quote is opened and never closed",
    ),
    "an endless cell": (text("a,price\n1," + "9" * 200_000), [], r"line 2: .* more than 131,072 characters"),
    "text after a quote": (text("a,price\n" + "1,2\n" * 20 + '"1"x,2\n'), [], r"line 22: text after a closing quote"),
    "twice the same name": (text("a,a,price\n" + "1,2,3\n" * 20), [], r"more than one column named 'a'; rename"),
    "one row": (text("a,price\n1,2\n"), [], r"has the same value in every row"),
    "two rows": (text("a,price\n1,2\n2,3\n"), [], r"At least 10 rows are needed, .* has 2 that can be used"),
    "target misspelt": (changed(), ["--target", "prize"], r"got 'prize' instead. Did you mean 'price'"),
    "target constant": (changed(price=5), [], r"target 'price' has the same value in every row \('5'\)"),
    "target missing": (
        with_cell(4, "price", np.nan),
        [],
        r"1 row that cannot be used; correct them, or leave them out with --skip-bad-rows:\nline 6: the target 'price' is missing",
    ),
    "target infinite": (with_cell(4, "price", np.inf), [], r"line 6: the target is 'inf'"),
    "target text": (
        changed(price=lambda f: f["kind"]),
        ["--task", "regression"],
        r"holds text in 60 of 60 cells, such as '.*'; regression needs",
    ),
    "target of dates": (changed(price=pd.date_range("2026-01-01", periods=60)), [], r"target 'price' holds dates"),
    "target in two currencies": (
        changed(price=np.resize(["$1", "€2", "$3"], 60)),
        [],
        r"in several units \(\$, €\); convert",
    ),
    "target too small": (changed(price=lambda f: 1e-200 * f["area"]), [], r"holds numbers below 1e-100 in size"),
    "target of many classes": (
        lambda path: houses(300).to_csv(path, index=False),
        ["--task", "classification"],
        r"has 300 different values in 300 rows, too many for classes; a regression\?",
    ),
    "target dropped": (changed(), ["--drop", "price"], r"The target 'price' cannot be dropped"),
    "only the target": (text("price\n" + "1\n2\n3\n" * 20), [], r"There is no column to predict from"),
    "only ids": (
        text("id,name,price\n" + "".join(f"{i},n{i},{i}\n" for i in range(20))),
        [],
        r"no column to predict from.\nid: dropped, every value differs\nname: dropped, every value differs",
    ),
    "huge number": (with_cell(3, "area", 1e200), ["--test", "0"], r"Column 'area' of X holds values beyond 1e\+100"),
    "huge target": (with_cell(3, "price", 1e200), ["--test", "0"], r"y parameter holds values beyond 1e\+100"),
    "a class for every row": (changed(price=lambda f: [f"n{i}" for i in range(len(f))]), [], r"too many for classes"),
    "column named like a prediction": (
        changed(ood_score=1),
        [],
        r"column 'ood_score', which is what predictions are called",
    ),
    "report without held-out rows": (
        changed(),
        ["--test", "0", "--report", "r.html"],
        r"report measures on held-out rows",
    ),
    "ten thousand columns": (wide, [], r"has 10001 columns, more than 2000; keep those that matter"),
    "many categories": (
        many_categories,
        [],
        r"becomes 2[0-9]{3} inputs, more than 2000; leave columns out with --drop",
    ),
    "drop misspelt": (changed(), ["--drop", "knd"], r"drop parameter must be one of .* Did you mean 'kind'"),
    "task misspelt": (changed(), ["--task", "regresion"], r"Did you mean 'regression'"),
    "kernel misspelt": (changed(), ["--kernel", "mattern32"], r"Did you mean 'matern32'"),
    "hidden of no width": (
        changed(),
        ["--hidden", "200,0"],
        r"hidden_layer_sizes parameter must be a tuple of positive widths, such as \(100, 25\), got \(200, 0\)",
    ),
    "hidden not widths": (changed(), ["--hidden", "big"], r"option --hidden must be widths such as 200,25, got 'big'"),
    "false alarm": (changed(), ["--false-alarm", "5"], r"false_alarm parameter must lie between 0 and 1, got 5.0"),
    "budget and quick": (changed(), ["--budget", "5", "--quick"], r"--budget and --quick exclude each other"),
    "no GPU": (changed(), ["--device", "cuda"], r"but torch sees none; use device='cpu'"),
    "output folder missing": (
        changed(),
        ["--out", "no/such/m.bochner"],
        r"folder no/such for the output does not exist",
    ),
    "output is a folder": (changed(), ["--out", "."], r"output \. is a folder; give a file name"),
    "output is the input": (changed(), ["--out", "t.csv"], r"output t.csv is an input of this command"),
    "output is stdout": (changed(), ["--out", "-"], r"outputs of fit must be files, got '-' instead"),
    "report is the model": (changed(), ["--out", "m", "--report", "./m"], r"outputs m and m are one file"),
    "report folder missing": (changed(), ["--report", "no/r.html"], r"folder no for the output does not exist"),
}


@pytest.mark.parametrize("case", FIT)
def test_a_bad_table_or_option_ends_fit_with_one_line(case, tmp_path, monkeypatch):
    write, options, message = FIT[case]
    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    monkeypatch.chdir(tmp_path)
    write(Path("t.csv"))
    before = Path("t.csv").read_bytes()
    result = run("fit", "t.csv", *(["--target", "price"] if "--target" not in options else []), *FAST, *options)
    check_refusal(result, message)
    assert Path("t.csv").read_bytes() == before
    assert os.listdir() == ["t.csv"]  # noqa: PTH208


def check_refusal(result, message):
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    said = "\n".join(line for line in result.stderr.splitlines() if not line.startswith("bochner: "))
    assert re.search(message, said), said
    assert all(len(line) < 500 for line in said.splitlines())
    assert len(said.splitlines()) < 24
    assert "Traceback" not in said


PREDICT = {
    "column missing": (
        houses().drop(columns=["area", "price"]),
        [],
        r"lacks the column 'area' that the model was fitted with",
    ),
    "column renamed": (houses().rename(columns={"area": "Area"}), [], r"It has 'Area', which the model does not know"),
    "columns of other kinds": (
        houses().assign(area="big", garden="maybe"),
        [],
        r"Column 'area' held numbers in training, and now 'big'.\nColumn 'garden' held yes and no in training, and now 'maybe'",
    ),
    "infinite": (houses().assign(area=np.inf), [], r"Column 'area' held numbers in training, and now 'inf'"),
    "prediction there already": (
        houses().assign(price_mean=1),
        [],
        r"column 'price_mean', which is what predictions are called",
    ),
    "coverage": (houses(), ["--coverage", "90"], r"option --coverage must lie between 0 and 1, got 90.0"),
    "kind of output": (houses(), ["--out", "o.xlsx"], r"output o.xlsx must end in one of .csv, .tsv, .txt, .parquet"),
    "output is the table": (houses(), ["--out", "n.csv"], r"output n.csv is an input of this command"),
}


@pytest.mark.parametrize("case", PREDICT)
def test_a_bad_table_or_option_ends_predict_with_one_line(case, models, tmp_path, monkeypatch):
    frame, options, message = PREDICT[case]
    monkeypatch.chdir(tmp_path)
    frame.to_csv("n.csv", index=False)
    check_refusal(run("predict", models / "number.bochner", "n.csv", *options), message)
    assert os.listdir() == ["n.csv"]  # noqa: PTH208


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["fit", "empty", "--target", "a"], r"empty is a folder without a file that ends in"),
        (["fit", "none.csv", "--target", "a"], r"none.csv does not exist; check the name"),
        (["fit", "table.doc", "--target", "a"], r"table.doc must end in one of .csv, .tsv, .txt, .csv.gz"),
        (["fit", "bad.xlsx", "--target", "a"], r"bad.xlsx is not an Excel file that can be read|needs openpyxl"),
        (["fit", "bad.parquet", "--target", "a"], r"bad.parquet is not a Parquet file that can be read"),
        (["predict", "none.bochner", "good.csv"], r"none.bochner does not exist"),
        (["predict", "good.csv", "good.csv"], r"good.csv is not a model of bochner"),
        (["info", "table.doc"], r"table.doc is not a model of bochner"),
        (["evaluate", "number.bochner", "unlabelled.csv"], r"lacks the target 'price'; use 'bochner predict'"),
        (["evaluate", "number.bochner", "holes.csv"], r"line 4: the target 'price' is missing"),
        (["evaluate", "number.bochner", "words.csv"], r"60 rows that cannot be used.*\nline 2: the target is 'much'"),
        (
            ["evaluate", "class.bochner", "strange.csv"],
            r"line 2: the target is the class 'perhaps', which the model does not know",
        ),
        (
            ["predict", "plain.bochner", "good.csv"],
            r"was not fitted from a table; use it from Python with bochner.storage.load",
        ),
    ],
)
def test_bad_files_end_every_command_with_one_line(command, message, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for name in ("number", "class"):
        Path(f"{name}.bochner").write_bytes((models / f"{name}.bochner").read_bytes())
    save("plain.bochner", load("number.bochner").estimator.estimator_)
    Path("table.doc").write_text("hello")
    Path("bad.xlsx").write_text("hello")
    Path("bad.parquet").write_text("hello")
    houses().to_csv("good.csv", index=False)
    houses().drop(columns="price").to_csv("unlabelled.csv", index=False)
    with_cell(2, "price", np.nan)(Path("holes.csv"))
    houses().assign(price="much").to_csv("words.csv", index=False)
    houses().drop(columns="price").assign(dear="perhaps").to_csv("strange.csv", index=False)
    before = sorted(os.listdir())  # noqa: PTH208
    check_refusal(run(*command), message)
    assert sorted(os.listdir()) == before  # noqa: PTH208


def test_a_full_disk_leaves_nothing_behind(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    houses(20).to_csv("n.csv", index=False)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    check_refusal(run("predict", models / "number.bochner", "n.csv"), "No space left on device")
    check_refusal(run("fit", "n.csv", "--target", "price", *FAST), "No space left on device")
    assert os.listdir() == ["n.csv"]  # noqa: PTH208


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_said_before_any_work(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    houses(20).to_csv("n.csv", index=False)
    tmp_path.chmod(0o555)
    check_refusal(run("predict", models / "number.bochner", "n.csv"), "cannot be written .Permission denied.")


def test_a_full_disk_for_the_report_says_what_is_kept(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    houses(20).to_csv("n.csv", index=False)
    replace = Path.replace

    def full_for_reports(self, target):
        if str(target).endswith(".html"):
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full_for_reports)
    options = ["--out", "o.csv", "--report", "r.html"]
    result = run("predict", models / "number.bochner", "n.csv", *options)
    check_refusal(result, r"^r.html: No space left on device. Kept: o.csv.$")
    result = run("evaluate", models / "number.bochner", "n.csv", "--report", "r.html")
    assert result.exit_code == 1
    assert "root mean squared error" in result.stdout
    assert "r.html: No space left on device." in result.stderr
    assert sorted(os.listdir()) == ["n.csv", "o.csv"]  # noqa: PTH208


def test_names_are_never_markup_nor_control_characters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOCHNER_DATA", "x[/red]:on:\x1b[31m")
    assert "x[/red]:on:\\x1b[31m" in run("data", "list").stdout
    assert "x[/red]:on:\\x1b[31m" in run("data", "check", "boston").stdout
    table, model = "t[b]:on:\x1b[31m.csv", "m[bold]:on:.bochner"
    columns = {"d:on:d": "area", "[/red]": "rooms", "e\x1b[31m": "age", "y[/x]": "price"}
    frame = pd.DataFrame({name: houses()[column] for name, column in columns.items()})
    frame.to_csv(table, index=False)
    done = run("fit", table, "--target", "y[/x]", "--out", model, "--report", "r[b].html", *FAST)
    assert done.exit_code == 0, done.stderr
    for text in ("d:on:d: number", "[/red]: number", "regression of 'y[/x]'", f"written: {model}  r[b].html"):
        assert text in done.stdout
    said = done.output
    for words in (["info", model], ["predict", model, table, "--out", "o.csv"], ["evaluate", model, table]):
        result = run(*words)
        assert result.exit_code == 0, result.stderr
        said += result.output
    half = ["info", "half\udcff.bochner"]  # a name of bytes that are no UTF-8
    assert "half\\udcff.bochner" in run(*half).stderr
    for words in (["fit", table, "--target", "[/x]"], ["info", "[/x]:on:"], ["run", "[/x]"], ["report", "[/x]:on:"]):
        result = run(*words)
        assert result.exit_code == 1
        assert "[/x]" in result.stderr
        assert "\x1b" not in result.stderr
    assert "\x1b" not in said
    assert "\N{ON WITH EXCLAMATION MARK WITH LEFT RIGHT ARROW ABOVE}" not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "t.csv", "--target", "y", "--hidden", str(2**70)], "--hidden must be up to 20 widths up to 10000"),
        (["fit", "t.csv", "--target", "y", "--hidden", "9" * 5000], "--hidden must be widths such as 200,25"),
        (["fit", "t.csv", "--target", "y", "--hidden", "1," * 21], "--hidden must be up to 20 widths"),
        (["fit", "t.csv", "--target", "y", "--out", "loop"], "output loop is a link that leads back to itself"),
        (["fit", "t.csv", "--target", "y", "--out", "/dev/stdout"], "output /dev/stdout is not a regular file"),
        (["run", "uci-regression", "--folds", str(2**70)], "folds parameter must be one of 0, 1, 2"),
        (["run", "uci-regression", "--folds", "²"], "folds parameter must be one of 0, 1, 2"),
    ],
)
def test_numbers_and_outputs_that_cannot_be_are_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("a,y\n1,2\n")
    Path("loop").symlink_to("loop")
    result = run(*words)
    assert result.exit_code == 1
    assert message in result.stderr
    assert run("run", "uci-regression", "--workers", str(2**70)).exit_code == 2


@pytest.mark.parametrize("kind", ["number", "class"])
def test_evaluate_and_predict_write_reports(kind, models, tmp_path):
    table, report = models / f"{kind}.csv", tmp_path / "r.html"
    result = run("evaluate", models / f"{kind}.bochner", table, "--report", report)
    assert result.exit_code == 0, result.stderr
    assert f"written: {report}" in result.stdout
    assert "bochner: the report shuffles 5 columns of 60 rows" in result.stderr
    assert all(text in report.read_text() for text in (f"On the 60 rows of {kind}.csv", "The worst errors", "What if"))
    out = ["--out", tmp_path / "o.csv", "--report", report]
    result = run("predict", models / f"{kind}.bochner", table, *out)
    assert result.exit_code == 0, result.stderr
    assert f"{tmp_path / 'o.csv'}  {report}" in result.stdout
    page = report.read_text()
    assert "for 60 rows" in page
    assert "The strangest rows" in page
    assert "The worst errors" not in page


@pytest.mark.parametrize("column", ["area", "kind"])
def test_a_column_that_is_empty_in_the_new_file_is_no_reason_to_stop(column, models, tmp_path):
    houses(40, seed=3).assign(**{column: ""}).to_csv(tmp_path / "t.csv", index=False)
    result = run("evaluate", models / "number.bochner", tmp_path / "t.csv", "--report", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    assert "On the 40 rows of t.csv" in (tmp_path / "r.html").read_text()


def _failing(*_, **__):
    raise IndexError("a report that fails")


def test_where_a_report_fails_metrics_and_model_are_there_nevertheless(models, tmp_path, monkeypatch):
    monkeypatch.setattr("bochner.reports.model.measured_report", _failing)
    report = ["--report", tmp_path / "r.html"]
    result = run("evaluate", models / "number.bochner", models / "number.csv", *report)
    assert isinstance(result.exception, IndexError)
    assert "root mean squared error" in result.stdout
    out = tmp_path / "m.bochner"
    result = run("fit", models / "number.csv", "--target", "price", "--out", out, "--hidden", "", *report, *FAST)
    assert isinstance(result.exception, IndexError)
    assert run("info", out).exit_code == 0
    assert not (tmp_path / "r.html").exists()


def test_the_report_of_a_sample_says_which_rows_are_learnt_from(tmp_path, monkeypatch):
    monkeypatch.setattr("bochner.estimators.Settings", lambda: SimpleNamespace(sample_rows=100))
    frame = houses(300)
    frame.assign(price=frame["price"].round(-5)).to_csv(tmp_path / "t.csv", index=False)
    words = ["fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "m", "--hidden", "", *FAST]
    words += ["--task", "regression", "--report", tmp_path / "r.html"]
    result = run(*words)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "r.html").read_text()
    learnt, held = map(int, re.search(r"(\d+) rows learned from, (\d+) held out", page).groups())
    text = rf"heads of this model learn from {learnt} rows, its columns and networks from a sample of (\d+)\."
    sample = int(re.search(text, page)[1])
    assert learnt + held == 300
    assert 100 <= sample + held < 110
    assert "All models learn" not in page
    # With a budget the heads learn from the sample only.
    assert run(*words, "--budget", "60").exit_code == 0
    assert f"{sample} rows learned from, {held} held out" in (tmp_path / "r.html").read_text()


def test_a_report_that_cannot_be_written_is_refused_before_the_work(models, tmp_path):
    model, table = models / "number.bochner", models / "number.csv"
    for command in ("evaluate", "predict"):
        check_refusal(run(command, model, table, "--report", "-"), "report must be a file, got '-'")
        check_refusal(run(command, model, table, "--report", "r.csv"), r"name must end with \.html, got r\.csv instead")
        check_refusal(run(command, model, table, "--report", tmp_path / "no" / "r.html"), "does not exist")
        check_refusal(run(command, model, table, "--report", table), "")
    assert table.read_text().startswith("area,")


def test_an_interrupt_leaves_nothing_behind(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    houses(20).to_csv("n.csv", index=False)
    monkeypatch.setattr(reading, "CHUNK_ROWS", 5)
    seen = []

    def interrupted(*arguments):
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    real = fitting.predict_rows
    monkeypatch.setattr(fitting, "predict_rows", interrupted)
    assert run("predict", models / "number.bochner", "n.csv").exit_code != 0
    assert os.listdir() == ["n.csv"]  # noqa: PTH208


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 TB")])
def test_too_little_memory_is_one_line(error, models, tmp_path, monkeypatch):
    houses(20).to_csv(tmp_path / "n.csv", index=False)
    monkeypatch.setattr(fitting, "predict_rows", lambda *_: (_ for _ in ()).throw(error))
    result = run("predict", models / "number.bochner", tmp_path / "n.csv", "--out", tmp_path / "o.csv")
    check_refusal(result, "not enough memory; use fewer rows")


def test_where_time_is_short_as_many_rows_are_measured_as_there_is_time_for(monkeypatch):
    now = [0.0]

    def one_second(*_):
        now[0] += 1.0

    monkeypatch.setattr(jobs, "forecast", one_second)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    parts: Any = SimpleNamespace(
        held=np.arange(2000), clean=pd.DataFrame(index=range(2000)), estimator=SimpleNamespace(estimator_=None)
    )
    assert len(jobs._in_time(parts, math.inf)) == 2000
    some = jobs._in_time(parts, 4.0)  # a second for 256 rows, and three seconds are left
    assert (len(some), some[0], some[-1]) == (768, 0, 1999)
    assert len(jobs._in_time(parts, 1.5)) == 256  # late, and measured nevertheless


@pytest.mark.parametrize("report", [False, True])
def test_a_budget_that_was_too_short_is_said(report, tmp_path, monkeypatch):
    monkeypatch.setattr("bochner.cli.models.start_time", lambda: time.perf_counter() - 100)
    houses(1400).to_csv(tmp_path / "t.csv", index=False)
    words = ("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "m", "--test", "0.4", "--hidden", "")
    result = run(*words, "--budget", "5", *FAST, *(["--report", tmp_path / "r.html"] if report else []))
    assert result.exit_code == 0, result.stderr
    parts = r"starting and reading 100\.\d s, fitting \d+\.\d s, measuring and writing \d+\.\d s"
    found = re.search(rf"5 s were too few, the model took (1\d\d\.\d) s: {parts}\n", result.stderr)
    assert found is not None, result.stderr
    assert "on held-out rows, 256 of 560 for the time:" in result.stdout


def test_the_note_on_a_budget_says_where_the_time_went(capsys):
    models_module._note_overrun(10, {"starting and reading": 2.0, "fitting": 9.0, "measuring and writing": 0.9})
    assert capsys.readouterr().err == ""  # within a fifth
    models_module._note_overrun(10, {"starting and reading": 2.0, "fitting": 3.0, "measuring and writing": 8.0})
    said = "10 s were too few, the model took 13.0 s: starting and reading 2.0 s, fitting 3.0 s, measuring and writing 8.0 s"
    assert said in capsys.readouterr().err


def test_the_demo_makes_its_point_in_one_picture_and_three_lines(tmp_path):
    result = run("demo", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line]
    assert len(lines) == 6  # what is done, the three lines, where the files are, what to do next
    numbers = [[float(n) for n in re.findall(r"\d\.\d\d", line)] for line in lines[1:4]]
    accuracies, sureness = numbers[0][:2], numbers[1]
    assert min(accuracies) > 0.95
    assert sureness[0] > 0.8  # the ReLU network at distance 10
    assert sureness[1] < 0.65
    flagged = [int(n) for n in re.findall(r"(\d+)%", lines[3])]
    assert flagged[0] == 100
    assert flagged[1] < 15
    assert lines[-1].endswith("bochner fit YOUR.csv --target COLUMN --report report.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo.svg", "report.html"]
    page = (tmp_path / "report.html").read_text()
    assert "I do not know" in page
    assert "<svg" in page


def test_report_puts_a_folder_of_results_on_one_page(tmp_path):
    rows = Path(__file__).parents[1] / "results" / "theory" / "mixture.jsonl"
    (tmp_path / "results" / "theory").mkdir(parents=True)
    (tmp_path / "results" / "theory" / "mixture.jsonl").write_bytes(rows.read_bytes())
    result = run("report", tmp_path / "results", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "<svg" in (tmp_path / "report.html").read_text()
    rows = tmp_path / "results" / "theory" / "mixture.jsonl"
    rows.unlink()
    assert run("report", tmp_path / "results").exit_code == 1
