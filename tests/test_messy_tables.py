"""Tables as people have them: fitted without an option, or refused with every problem named at once."""

import json
import re
import warnings
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from typer.testing import CliRunner

from bochner import TableClassifier, TableRegressor
from bochner.cli import app
from bochner.estimators import Settings, StationaryClassifier, StationaryRegressor
from bochner.estimators.spread import Spread
from bochner.storage import load, save
from bochner.tables import dates
from bochner.tables.errors import TableError
from bochner.tables.files.reading import open_table, read_table
from bochner.tables.fitting import fit_table, read_training, split_rows
from bochner.tables.table import Table, without_empty
from bochner.tables.targets import Target
from messy import FITTED, GERMAN_MONTHS, REFUSED, SUFFIXES, cars

QUICK = {
    "kernel": "matern32",
    "hidden_layer_sizes": (),
    "random_state": 0,
    "settings": Settings(folds=2, tuning_rows=40, tuning_steps=3, wide_anchors=40),
}
FAST = ["--kernel", "matern32", "--hidden", ""]


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Fits without a spread for every row, which takes half of their time."""
    monkeypatch.setattr("bochner.estimators.regression.learn_spread", lambda *_: Spread())


@pytest.fixture
def made(tmp_path):
    def make(kind, content):
        path = tmp_path / f"t.{SUFFIXES.get(kind, 'csv')}"
        path.write_bytes(content)
        return path

    return make


@pytest.fixture(scope="module")
def plain():
    """The plain table as numbers."""
    return Table.learn(cars().drop(columns="price")).transform(cars())


@pytest.mark.parametrize("kind", FITTED)
def test_a_messy_table_is_fitted_without_an_option(kind, made, plain):
    write, said = FITTED[kind]
    path = made(kind, write(cars()))
    table = read_training(path, "price")
    model = TableRegressor(**QUICK).fit(table.frame, pd.Series(table.y, name="price"))
    model.target_ = table.target
    summary = "\n".join([*table.notes, *model.summary_])
    assert said in summary, summary
    # Whatever the form, the numbers are those of the plain table.
    with pytest.warns(UserWarning, match="cannot be read as in training") if "none" in said else nullcontext():
        found = model.clean(table.frame)
    for column in ("km", "age", "listed (days)", "listed (weekday)", "garage"):
        if f"{column.split()[0]}:" in said and "missing" not in said and "none" not in said:
            np.testing.assert_allclose(found[column][:80], plain[column], atol=0.2)
    if "price" not in said:
        np.testing.assert_allclose(table.y[:80], cars()["price"], atol=0.51)
    assert np.isfinite(model.estimator_.predict(found)).all()


@pytest.mark.parametrize("kind", REFUSED)
def test_a_table_that_cannot_be_used_is_refused_with_every_problem(kind, made):
    write, lines = REFUSED[kind]
    path = made(kind, write(cars()))
    result = run("fit", path, "--target", "price", "--out", path.with_name("m"), *FAST)
    assert result.exit_code == 1
    for line in lines:
        assert line in result.stderr, result.stderr
    assert not path.with_name("m").exists()


def test_bad_rows_are_left_out_and_listed(made, tmp_path):
    path = made("csv", REFUSED["ragged lines and missing targets"][0](cars()))
    result = run("fit", path, "--target", "price", "--out", tmp_path / "m", "--skip-bad-rows", *FAST, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["left_out"] == 4
    lines = (tmp_path / "t-bad-rows.csv").read_text().splitlines()
    assert lines[0] == "place,problem," + ",".join(f"cell {number}" for number in range(1, 8))
    assert [line.split(",")[0] for line in lines[1:]] == ["line 6", "line 10", "line 2", "line 52"]
    for command in (["predict", tmp_path / "m", path, "--out", tmp_path / "o.csv"], ["evaluate", tmp_path / "m", path]):
        (tmp_path / "o.csv").unlink(missing_ok=True)
        assert "line 10: 2 cells" in run(*command).stderr
        assert not (tmp_path / "o.csv").exists()
        result = run(*command, "--skip-bad-rows")
        assert result.exit_code == 0, result.stderr
        assert "rows cannot be used and are left out" in result.stdout


def test_an_old_list_of_bad_rows_is_called_old_by_a_run_without_any(tmp_path):
    cars().to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "t-bad-rows.csv").write_text("place,problem\nline 6,of an earlier run\n")
    result = run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "m", "--skip-bad-rows", *FAST)
    assert result.exit_code == 0, result.stderr
    assert f"no row was left out; {tmp_path / 't-bad-rows.csv'} is of an earlier run" in result.stderr
    assert "bad-rows" not in result.stdout


def test_what_was_learnt_is_applied_to_new_files_and_changes_are_said(tmp_path):
    frame = cars().assign(fee=[f"{v + 0.25}" for v in cars()["age"]])
    model = TableRegressor(**QUICK).fit(frame.drop(columns="price"), frame["price"])
    save(tmp_path / "m", model)
    new = frame.drop(columns="price").assign(
        fee=frame["fee"].str.replace(".", ","), listed=frame["listed"].dt.strftime("%d.%m.%Y"), colour="red"
    )
    new[["km", "age"]] = new[["km", "age"]].astype(object)
    new.loc[3, "km"] = "many"
    new.loc[4, "age"] = None
    new.to_csv(tmp_path / "n.csv", sep=";", index=False)
    result = run("predict", tmp_path / "m", tmp_path / "n.csv", "--out", tmp_path / "o.csv")
    assert result.exit_code == 0, result.stderr
    for line in (
        "columns that the model does not use: 'colour'",
        "fee: written in another way than in training",
        "km: 1 cells cannot be read as in training, such as 'many'; they count as missing",
        "age: 1 cells are missing, none was in training",
    ):
        assert line in result.stdout
    found = pd.read_csv(tmp_path / "o.csv", sep=";", decimal=",")
    expected = model.predict(frame.drop(columns="price"))
    keep = [i for i in range(80) if i not in (3, 4)]
    np.testing.assert_allclose(found["price_mean"][keep], expected[keep], rtol=1e-9)


def test_equal_rows_stay_on_one_side_of_the_split(tmp_path):
    frame = cars(60)
    frame = pd.concat([frame, frame.head(30)]).assign(id=range(90))
    frame.to_csv(tmp_path / "t.csv", index=False)
    table = read_training(tmp_path / "t.csv", "price")
    for seed in range(5):
        train, held = split_rows(table, 0.3, seed)
        assert len(train) + len(held) == 90
        assert not set(table.groups[train]) & set(table.groups[held])


def test_a_million_cells_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("bochner.tables.files.reading.CHUNK_ROWS", 7)
    cars().to_csv(tmp_path / "t.csv", index=False)
    source = open_table(tmp_path / "t.csv")
    assert [len(piece.texts) for piece in source.pieces()] == [7] * 11 + [3]
    pd.testing.assert_frame_equal(
        pd.concat([piece.texts for piece in source.pieces()], ignore_index=True), read_table(source).texts
    )


# ------------------------------------------------------------------ in Python


def test_the_estimators_take_a_frame_as_it_is(tmp_path):
    frame = cars(120).assign(ad=[f"AD{i}" for i in range(120)], fee=[f"${v:,.2f}" for v in cars(120)["km"]])
    x, y = frame.drop(columns="price"), frame["price"].map("€ {:,.2f}".format)
    model = TableRegressor(**QUICK, drop=["age"])
    scores = cross_val_score(model, x, y, cv=3)
    assert min(scores) > 0.1
    model.fit(x, y)
    assert model.summary_[1] == "age: dropped, as asked"
    assert model.summary_[-1] == "price: the target, number in €"
    assert clone(model).get_params()["drop"] == ["age"]
    back = load(save(tmp_path / "m", model)).estimator
    np.testing.assert_array_equal(back.predict(x), model.predict(x))
    assert back.predict_interval(x).shape == (120, 2)
    assert back.predict_quantiles(x, [0.5]).shape == (120, 1)
    assert back.sample_y(x.head(3), 2).shape == (3, 2)
    with pytest.warns(UserWarning, match="price: 120 cells without '€', which all had in training"):
        expected = model.log_prob(x, frame["price"])
    np.testing.assert_allclose(back.log_prob(x, y), expected, rtol=1e-6)
    assert (back.ood_score(x) > back.ood_threshold_).mean() < 0.3


@pytest.mark.parametrize("labels", [["old", "new"], [0, 1], [True, False], [" old", "old"]])
def test_classes_keep_their_type_and_their_first_spelling(labels):
    frame = cars(120)
    y = np.where(frame["km"] > 100_000, labels[0], "new" if labels[1] == "old" else labels[1])
    model = TableClassifier(**QUICK).fit(frame, y)
    assert model.score(frame, y) > 0.8
    assert {str(label) for label in model.classes_} == {str(label) for label in y.tolist()}
    assert model.predict(frame).dtype.kind == (y.dtype.kind)
    assert model.log_prob(frame, y).mean() > np.log(0.5)


def test_a_refused_fit_changes_nothing():
    frame = cars(40)
    x, y = frame.drop(columns="price"), frame["price"]
    model = TableRegressor(**QUICK).fit(x, y)
    before = model.predict(x)
    bad = x[["brand"]].assign(brand="one")
    with pytest.raises(
        TableError, match=r"missing or cannot be read in 1 rows.*row 3 \('nan'\).*\n.*no column to predict"
    ):
        model.fit(bad, y.where(y.index != 2))
    np.testing.assert_array_equal(model.predict(x), before)
    with pytest.raises(TableError, match="more than one column named 'km'"):
        model.fit(pd.concat([x, x[["km"]]], axis=1), y)
    with pytest.raises(ValueError, match="drop parameter must name columns of X, got 'kmm'"):
        TableRegressor(**QUICK, drop=["kmm"]).fit(x, y)
    with pytest.raises(ValueError, match="must be a list of names, got 'km' instead"):
        TableRegressor(**QUICK, drop="km").fit(x, y)
    with pytest.raises(ValueError, match="drop parameter must be a list of names, got None instead"):
        TableRegressor(**QUICK, drop=None).fit(x, y)
    rows = np.random.default_rng(0).normal(size=(40, 3))
    fitted = TableRegressor(**QUICK, drop=[1]).fit(rows, rows[:, 0])  # an array's columns are called 0, 1 and so on
    assert fitted.summary_[1] == "1: dropped, as asked"
    with pytest.raises(ValueError, match="got 40 and 39 instead"):
        TableRegressor(**QUICK).fit(x, y[1:])
    with pytest.raises(TableError, match=r"lacks the column 'km' .* It has 'Km'"):
        model.predict(x.rename(columns={"km": "Km"}))


def test_raw_cells_cost_nothing_beside_clean_ones():
    """The model from a messy table predicts as well as the one from its clean form."""
    raw = cars(160).assign(
        km=lambda f: [f"{v:,} km" for v in f["km"]],
        listed=lambda f: f["listed"].dt.strftime("%d/%m/%Y"),
        ad=[f"AD{i}" for i in range(160)],
    )
    clean = cars(160)
    days = (clean["listed"] - clean["listed"][:120].min()).dt.days
    clean = clean.assign(listed=days, month=clean["listed"].dt.month, weekday=clean["listed"].dt.day_of_week)
    scores = {}
    for name, frame in (("raw", raw), ("clean", clean)):
        x, y = frame.drop(columns="price"), clean["price"]
        scores[name] = -TableRegressor(**QUICK).fit(x[:120], y[:120]).log_prob(x[120:], y[120:]).mean()
    assert scores["raw"] <= scores["clean"] + 0.02


@pytest.mark.parametrize("kind", [TableRegressor, TableClassifier])
def test_a_target_that_is_not_given_is_named(kind):
    with pytest.raises(ValueError, match=f"This {kind.__name__} requires y to be passed, but the target y is None"):
        kind().fit(cars(), None)


def test_parameters_are_those_of_the_estimators_with_drop_and_keep():
    """With the same defaults, so that a table is fitted as its numbers would be."""
    for kind, inner in ((TableRegressor, StationaryRegressor), (TableClassifier, StationaryClassifier)):
        assert kind().get_params() == {**inner().get_params(), "drop": (), "keep": ()}
        changes = {"drop": ["a"], "keep": ["b"], "budget": 3.0, "false_alarm": 0.1}
        assert clone(kind(**changes)).get_params() == {**inner().get_params(), **changes}
        with pytest.raises(TypeError, match="unexpected keyword argument 'bugdet'"):
            kind(bugdet=3.0)


def test_a_column_without_values_among_the_rows_to_learn_from_is_dropped(tmp_path):
    """Whether it has one there depends on the seed."""
    frame, path = cars(), tmp_path / "t.csv"
    frame.to_csv(path, index=False)
    _, held = split_rows(read_training(path, "price"), 0.2, 0)
    frame.assign(pool=np.where(frame.index == held[0], "40", "")).to_csv(path, index=False)
    table = read_training(path, "price")
    fitted = fit_table(table, share=0.2, drop=(), **QUICK)
    assert fitted.estimator.summary_[-2] == "pool: dropped, no values among the rows to learn from"
    assert table.columns == fitted.estimator.table_
    assert list(fitted.clean.columns) == table.columns.outputs
    only = pd.DataFrame({"a": [1.0, np.nan]})
    with pytest.raises(TableError, match=r"no column to predict from\.\n  a: dropped, no values among the rows"):
        without_empty(Table.learn(only), only[1:])


@pytest.fixture(scope="module")
def named():
    """A table of columns that look like ids, and a target."""
    frame = cars()
    return frame.drop(columns="price").assign(
        row=range(80),
        phone_cost=[4930 + 7 * v for v in range(80)],
        car=[f"{'red' if v % 3 else 'blue old'} {v}" for v in range(80)],
        code=[f"{v:03}" for v in range(80)],
        ad=[f"AD{v}" for v in range(80)],
        one=1,
    ), frame["price"]


def test_columns_are_kept_as_asked(named, tmp_path):
    x, y = named
    names = ["row", "phone_cost", "car", "code", "ad", "one"]
    dropped = TableRegressor(**QUICK).fit(x, y)
    assert all(line.split(": ")[1].startswith("dropped") for line in dropped.summary_[5:-1])
    model = load(save(tmp_path / "m", TableRegressor(**QUICK, keep=names).fit(x, y))).estimator
    assert list(model.keep) == names
    assert model.summary_[5:-1] == [
        "row: number",
        "phone_cost: number",
        "car: free text → number of words, and whether it has 'red', 'blue', 'old'",
        "code: number",
        "ad: dropped, texts that share no words; it cannot be kept",
        "one: dropped, always 1; it cannot be kept",
    ]


def test_names_to_keep_are_checked_as_names_to_drop(named, tmp_path):
    x, y = named
    for wrong in ("km", None):
        with pytest.raises(ValueError, match=f"keep parameter must be a list of names, got {wrong!r} instead"):
            TableRegressor(**QUICK, keep=wrong).fit(x, y)
    with pytest.raises(ValueError, match="keep parameter must name columns of X, got 'kmm'"):
        TableRegressor(**QUICK, keep=["kmm"]).fit(x, y)
    both = "keep parameter must not name what drop names, got 'km' in both"
    with pytest.raises(ValueError, match=both):
        TableRegressor(**QUICK, keep=["km"], drop=["age", "km"]).fit(x, y)
    x.assign(price=y).to_csv(tmp_path / "t.csv", index=False)
    for words, said in (
        (["--keep", "kmm"], "The keep parameter must be one of"),
        (["--keep", "age,km", "--drop", "km"], both),
        (["--keep", "age\nkmm"], "got 'kmm' instead"),
        (["--keep", "price"], "The target 'price' cannot be kept: it is what is predicted"),
    ):
        result = run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "m", *words)
        assert said in result.stderr, result.stderr
    result = run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "m", "--keep", "row, code", *FAST)
    assert "row: number\n" in result.stdout
    assert "code: number\n" in result.stdout


def test_what_differs_from_training_is_one_warning_at_the_line_of_the_user():
    x, y = cars().drop(columns="price").assign(fee=[f"{v} %" for v in cars()["age"]]), cars()["price"]
    model = TableRegressor(**QUICK).fit(x, y.map("${:,.2f}".format))
    new = x.assign(fee=np.arange(80) / 100, age=x["age"].where(x.index != 4))
    for call in (model.predict, model.clean, model.predict_interval, model.ood_score):
        with pytest.warns(UserWarning, match="X differs from training") as caught:
            call(new)
        assert str(caught[0].message).splitlines()[1:] == [
            "  age: 1 cells are missing, none was in training; such rows count as strange",
            "  fee: 80 cells without '%', which all had in training; the numbers are taken as they are",
        ]
        assert (len(caught), caught[0].filename) == (1, __file__)
    with pytest.warns(UserWarning, match=r"y differs from training:\n  price: 80 cells without '\$'") as caught:
        model.score(x, y)
    assert caught[0].filename == __file__
    labels = np.where(y > 15_000, "dear", "cheap")
    classifier = TableClassifier(**QUICK).fit(x, labels)
    with pytest.warns(UserWarning, match="fee: 80 cells without '%'") as caught:
        classifier.score(new, labels)
    assert (len(caught), caught[0].filename) == (1, __file__)


def test_the_command_line_says_once_what_differs(tmp_path):
    frame = cars().assign(fee=[f"{v} %" for v in cars()["age"]], price=cars()["price"].map("${:.2f}".format))
    save(tmp_path / "m", TableRegressor(**QUICK).fit(frame.drop(columns="price"), frame["price"]))
    frame.assign(fee=0.45, price=cars()["price"]).to_csv(tmp_path / "n.csv", index=False)
    fee = "fee: 80 cells without '%', which all had in training"
    for words in (["predict", "--out", tmp_path / "o.csv"], ["evaluate"]):
        result = run(words[0], tmp_path / "m", tmp_path / "n.csv", *words[1:])
        assert result.output.count(fee) == 1, result.output
    assert result.output.count("price: 80 cells without '$'") == 1


def test_rows_of_unknown_classes_are_bad_rows_of_an_evaluation(tmp_path):
    frame = cars().assign(dear=np.where(cars()["price"] > 15_000, "yes", "no")).drop(columns="price")
    save(tmp_path / "m", TableClassifier(**QUICK).fit(frame.drop(columns="dear"), frame["dear"]))
    frame.loc[3, "dear"] = "perhaps"
    frame.to_csv(tmp_path / "t.csv", index=False)
    words = ["evaluate", tmp_path / "m", tmp_path / "t.csv"]
    said = "line 5: the target is the class 'perhaps', which the model does not know"
    refused = run(*words)
    assert refused.exit_code == 1
    assert said in refused.stderr
    assert "leave them out with --skip-bad-rows" in refused.stderr
    result = run(*words, "--skip-bad-rows")
    assert result.exit_code == 0, result.stderr
    assert "1 rows cannot be used and are left out" in result.stdout
    assert "line 5,the target is the class 'perhaps'" in (tmp_path / "t-bad-rows.csv").read_text().replace('"', "")


@pytest.mark.parametrize(
    "texts",
    [
        ["12. März 2024", "1. Dezember 2023", "30. Okt. 2024"],
        ["12 mars 2024", "1 décembre 2023", "30 oct. 2024"],
        ["12 de marzo de 2024", "1 de diciembre de 2023", "30 de octubre de 2024"],
        ["12 março 2024", "1 dezembro 2023", "30 out 2024"],
        ["12 maart 2024", "1 dec. 2023", "30 oktober 2024"],
        ["12th March 2024", "1st Dec. 2023", "30th October 2024"],
        ["March 12th, 2024", "December 1st, 2023", "October 30th, 2024"],
    ],
)
def test_months_may_have_names_of_several_languages(texts):
    style, unclear = dates.date_style(np.array(texts, dtype=object), 1.0)
    assert not unclear
    assert dates.read_dates(texts, style).strftime("%Y-%m-%d").tolist() == ["2024-03-12", "2023-12-01", "2024-10-30"]


def learnt(**columns):
    """What a table of 40 rows with these columns is taken for, a line for each."""
    frame = pd.DataFrame({name: np.resize(np.array(cells_, dtype=object), 40) for name, cells_ in columns.items()})
    return dict(line.split(": ", 1) for line in Table.learn(frame.assign(x=np.arange(40.0) ** 1.5)).summary())


def test_words_for_missing_of_people_do_not_change_what_a_column_is():
    found = learnt(
        rating=["1", "2", "3", "4", "5", "prefer not to say"],
        crash=["ja", "nein", "unbekannt", "k.A."],
        seats=["4", "5", "not specified", "2"],
    )
    assert found["rating"].startswith("number; 6 missing")
    assert found["crash"].startswith("ja → 1, nein → 0; 20 missing")
    assert found["seats"].startswith("number; 10 missing")


def test_dates_with_names_and_with_numbers_are_one_column_and_others_are_named():
    days = pd.Timestamp("2014-01-13") + pd.to_timedelta(np.arange(40) * 50, unit="D")
    german = [f"{d.day}. {GERMAN_MONTHS[d.month - 1]} {d.year}" if d.day % 2 else f"{d:%d.%m.%Y}" for d in days]
    assert learnt(first=german)["first"].startswith("date → days since first")
    mixed = [f"{d:%Y/%m/%d}" if d.day % 2 else f"{d:%d-%m-%Y}" for d in days]
    assert "dropped, dates written in several ways ('04-03-2014', '2019/05/17')" in learnt(first=mixed)["first"]


def test_units_per_hundred_and_counts_with_gaps():
    rng = np.random.default_rng(0)
    use = [f"{value:.1f} l/100km".replace(".", ",") for value in rng.uniform(4, 12, 40)]
    number = np.delete(np.arange(1, 42), 17)
    found = learnt(use=use, respondent=[str(n) for n in number])
    assert found["use"].startswith("number in l/100km with decimal commas")
    assert found["respondent"] == "dropped, numbers the rows (1 to 41)"
    thousands = [*[f"{n}.985" for n in range(101, 137)], "k.A.", "about a week", "7", "12"]
    line = learnt(thousands=thousands)["thousands"]  # words that are no numbers say nothing about the sign
    assert line.startswith("number (point taken between thousands, which the cells leave open)")


def test_a_grand_total_in_a_row_of_hardly_anything_else_is_no_row_whatever_it_holds(tmp_path):
    frame = cars()
    last = dict.fromkeys(frame.columns, "") | {"brand": "Grand Total", "price": "9999999"}
    pd.concat([frame.astype(object), pd.DataFrame([last])]).to_csv(tmp_path / "t.csv", index=False)
    table = read_training(tmp_path / "t.csv", "price", skip_bad=True)
    assert [row.problem for row in table.bad] == ["it holds totals of the rows above"]
    frame.loc[3, "price"] = 9_999_999
    frame.to_csv(tmp_path / "u.csv", index=False)
    assert re.search(
        r"1e\+07 is much larger than any other, [0-9.]+: is it one\?",
        read_training(tmp_path / "u.csv", "price").target.note,
    )


@pytest.mark.parametrize("zones", [["+02", "+01"], ["+0200", "-0930"], [" Z", "+2"], ["+02:0", ""]])
def test_times_of_several_zones_are_local_ones(zones):
    texts = [f"2024-03-{day:02d} {day % 24:02d}:30:00{zones[day % 2]}" for day in range(1, 29)]
    known = dates.read_dates(texts, "ISO8601")
    assert (known.day == np.arange(1, 29)).all()
    assert (known.hour == np.arange(1, 29) % 24).all()
    assert learnt(when=texts)["when"].startswith("date")


def test_a_huge_target_beside_huge_ones_is_weighed_without_overflow():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        note = Target.learn("y", pd.Series(["1e308", "1e307", "9e306", "1e305"]), "regression").note
        assert "much larger" not in note
        zeros = Target.learn("y", pd.Series(["0", "0", "3", "0"]), "regression").note
    assert "3 is much larger than any other, 0: is it one?" in zeros


def test_new_rows_that_leave_the_decimal_sign_open_are_noted():
    frame = cars().assign(km=lambda f: [f"{value / 7:.2f} km".replace(".", ",") for value in f["km"]])
    model = TableRegressor(hidden_layer_sizes=(), random_state=0).fit(frame.drop(columns="price"), frame["price"])
    new = (
        frame.drop(columns="price")
        .head(6)
        .assign(km=["36,942 km", "189,539 km", "201,385 km", "45,100 km", "7,254 km", "8 km"])
    )
    with pytest.warns(UserWarning, match="km: comma taken as decimal sign as in training, which the cells leave open"):
        model.predict(new)
