"""Tables that mislead: what a column is taken for, and what is said about it."""

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score
from typer.testing import CliRunner

from bochner import TableClassifier, TableRegressor
from bochner.cli import app
from bochner.estimators import Settings, StationaryRegressor
from bochner.estimators.spread import Spread
from bochner.storage import save
from bochner.tables.cells import as_number
from bochner.tables.columns import read_column
from bochner.tables.dates import read_times
from bochner.tables.errors import TableError
from bochner.tables.files.reading import open_table
from bochner.tables.fitting import Names, read_training
from bochner.tables.table import Changes, Signs, Table
from bochner.tables.targets import Target
from messy import cars, german

QUICK = {
    "kernel": "matern32",
    "hidden_layer_sizes": (),
    "random_state": 0,
    "settings": Settings(folds=2, tuning_rows=40, tuning_steps=3, wide_anchors=40),
}
ROWS = 60
RNG = np.random.default_rng(0)
REAL = [f"{v:.2f}" for v in RNG.normal(5, 2, ROWS)]
GERMAN = [f"{german(v)}" for v in RNG.uniform(1e3, 1e6, ROWS)]
GROUPED = np.resize(["2.596", "980", "1.250", "17"], ROWS)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Fits without a spread for every row, which takes half of their time."""
    monkeypatch.setattr("bochner.estimators.regression.learn_spread", lambda *_: Spread())


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def frame(**columns):
    return pd.DataFrame({name: np.array(cells, dtype=object) for name, cells in columns.items()})


def notes(**columns):
    return dict(line.split(": ", 1) for line in Table.learn(frame(**columns, real=REAL)).summary())


# ------------------------------------------------------------------ the decimal sign


@pytest.mark.parametrize(
    ("beside", "first", "said"),
    [
        (GERMAN, 2596.0, "number"),
        (REAL, 2.596, "number"),
        (["x", "y"] * (ROWS // 2), 2596.0, "number (point taken between thousands, which the cells leave open)"),
    ],
)
def test_one_decimal_sign_for_the_whole_file(beside, first, said):
    table = frame(units=GROUPED, beside=beside)
    learnt = Table.learn(table)
    assert learnt.columns[0].note == said
    assert learnt.transform(table)["units"][:2].tolist() == [first, 980.0]
    # The same where the other column is the target, in Python and in a file.
    signs = Signs.learn(table[["units"]], target=table["beside"])
    assert Table.learn(table[["units"]], signs=signs).transform(table)["units"][0] == first


def test_an_open_decimal_sign_is_said():
    cells = [f"{v}.{100 + v}" for v in range(1, 61)]
    table = Table.learn(frame(a=cells, b=["x", "y"] * 30))
    assert table.columns[0].note == "number (point taken as decimal sign, which the cells leave open)"
    assert table.transform(frame(a=cells, b=["x", "y"] * 30))["a"][0] == 1.101


def test_lists_of_choices_are_categories_and_decide_nothing():
    choices = np.resize(["1,2", "3,4", "1,4"], ROWS)
    table = Table.learn(frame(choice=choices, other=choices, units=[f"{v}.5" for v in range(ROWS)]))
    assert [column.kind for column in table.columns] == ["category", "category", "number"]
    assert Table.learn(frame(size=choices, price=GERMAN)).columns[0].kind == "number"


@pytest.mark.parametrize("kind", ["str", object, "category"])
def test_texts_that_are_missing_are_understood_whatever_the_type_of_their_column(kind):
    x = pd.DataFrame({"colour": np.resize(["red", "blue", None], ROWS), "size": REAL}).astype({"colour": kind})
    model = TableRegressor(**QUICK).fit(x, pd.to_numeric(x["size"]))
    assert model.summary_[0] == f"colour: 2 categories; {ROWS // 3} missing"
    assert np.isfinite(model.predict(x)).all()


def test_targets_are_read_with_the_decimal_sign_of_a_new_file(tmp_path):
    table = cars(60).assign(fee=[f"{v + 0.25}" for v in cars(60)["age"]])
    x, y = table.drop(columns="price"), table["price"]
    model = TableRegressor(**QUICK).fit(x, y.map(str))
    expected = model.score(x, y)
    commas = y.map(lambda v: str(v).replace(".", ","))
    rewritten = "y differs from training:\n  price: written in another way than in training"
    with pytest.warns(UserWarning, match=rewritten):
        assert model.score(x, commas) == pytest.approx(expected)
    with pytest.warns(UserWarning, match=rewritten):
        np.testing.assert_allclose(model.log_prob(x, commas), model.log_prob(x, y))
    save(tmp_path / "m", model)
    table.to_csv(tmp_path / "t.csv", sep=";", decimal=",", index=False)
    result = run("evaluate", tmp_path / "m", tmp_path / "t.csv")
    assert "price: written in another way than in training" in result.stdout, result.output
    assert f"{expected:.4g}" in result.stdout


# ------------------------------------------------------------------ new tables


def test_a_row_is_not_judged_by_its_neighbours():
    table = frame(a=["ask", *map(str, range(100, 199))], b=[f"{v}.5" for v in range(100)])
    learnt = Table.learn(table)
    for rows in ([0], [0, 1], list(range(100))):
        assert np.isnan(learnt.transform(table.iloc[rows])["a"].iloc[0])
    pieces = Changes()
    learnt.transform(table.iloc[1:], pieces)
    learnt.transform(table.iloc[:1], pieces)
    assert pieces.lines() == ["a: 1 cells cannot be read as in training, such as 'ask'; they count as missing"]
    with pytest.raises(TableError, match="Column 'a' held numbers in training, and now 'ask'"):
        learnt.transform(table.iloc[[0] * 20])


def test_changed_units_are_said_and_refused_in_targets():
    numbers = [f"{v} km" for v in range(ROWS)]
    changes = Changes()
    Table.learn(frame(way=numbers, b=REAL)).transform(frame(way=["12000 m"] * 3, b=REAL[:3]), changes)
    assert changes.lines() == ["way: now in 'm', in training in 'km'; the numbers are taken as they are"]
    target = Target.learn("fee", pd.Series([f"${v}" for v in range(ROWS)]))
    with pytest.raises(TableError, match=r"The target 'fee' is in '€', and had '\$' in training; convert it"):
        target.values(pd.Series(["€5"]))
    mixed = notes(rate=np.resize(["12%", "13%", "0.12", "14.5%"], ROWS))
    assert mixed["rate"] == "number in %; 15 cells without '%', which are taken as they are"


def test_a_unit_that_is_gone_is_said():
    learnt = Table.learn(frame(way=[f"{v} km" for v in range(ROWS)], b=REAL))
    gone = "way: 3 cells without 'km', which all had in training; the numbers are taken as they are"
    for way in (["12000"] * 3, [12000.0] * 3):
        whole, pieces = Changes(), Changes()
        rows = pd.DataFrame({"way": way, "b": REAL[:3]})
        learnt.transform(rows, whole)
        for piece in (rows[:1], rows[1:]):
            part = Changes()
            learnt.transform(piece, part)
            pieces.add_all(part)
        assert whole.lines() == pieces.lines() == [gone]
    # Where it was missing now and then in training, it may be missing later; and other spellings are the same unit.
    for cells in ([*(f"{v} km" for v in range(ROWS - 1)), "7"], [f"{v} KM" for v in range(ROWS)]):
        changes, new = Changes(), ["12000"] * 3 if "7" in cells else ["5 km"] * 3
        Table.learn(frame(way=cells, b=REAL)).transform(frame(way=new, b=REAL[:3]), changes)
        assert changes.lines() == []


def test_whole_numbers_are_read_by_the_style_of_the_texts():
    days = [f"202401{v:02}" for v in range(1, 31)] * 2
    learnt = Table.learn(frame(on=days, b=REAL))
    new = pd.DataFrame({"on": np.array(days, dtype=np.int64), "b": REAL})
    pd.testing.assert_frame_equal(learnt.transform(new), learnt.transform(frame(on=days, b=REAL)))
    assert Table.learn(new).columns[0].kind == "number"


# ------------------------------------------------------------------ columns


DAYS = pd.date_range("2024-01-05", periods=ROWS, freq="D")
PHONES = [f"{4930000000 + 7 * v}" for v in range(ROWS)]


@pytest.mark.parametrize(
    ("name", "cells", "note"),
    [
        ("on", ["soon", "2024-02", *DAYS[2:].strftime("%d.%m.%Y")], "; 2 cells that are none, such as 'soon'"),
        ("at", ["noon", *(f"{v % 24:02}:{v:02}" for v in range(1, ROWS))], "time → hours; 1 cells that are none"),
        ("zip", [10115 + v % 4 for v in range(ROWS)], "4 categories"),
        ("zip", [10115 + 3 * v for v in range(ROWS)], "dropped, every value differs"),
        ("phone", PHONES, "dropped, every value differs"),
        ("whatever", range(7, 7 + ROWS), "dropped, numbers the rows (7 to 66)"),
        ("year", range(1960, 1960 + ROWS), "number"),
        ("price_index", [100 + v * v for v in range(ROWS)], "number"),
        ("customer_key", [100 + v * v for v in range(ROWS)], "dropped, every value differs"),
        ("key_rate", [100 + v * v for v in range(ROWS)], "number"),
        ("index", [100 + v * v for v in range(ROWS)], "dropped, every value differs"),
        ("count", ["07", *(str(v * v) for v in range(1, ROWS))], "number"),
        ("code", [f"{v:03}" for v in np.resize(range(12), ROWS)], "12 categories"),
        ("mobile_wt", [80 + v % 50 for v in range(ROWS)], "number"),
        ("avg_phone_minutes", [v / 8 for v in range(ROWS)], "number"),
        ("rooms", np.resize(["2 BHK", "4 Bedroom", "1 RK"], ROWS), "3 categories"),
        ("way", np.resize(["5 m", "6 M", "7 m"], ROWS), "dropped, several units (M, m)"),
        ("way", np.resize(["5 m", "6 km"], ROWS), "dropped, several units (km, m)"),
        ("fee", np.resize(["5 €/m²", "6 EUR/m²"], ROWS), "number in EUR/m²; 'EUR/m²', '€/m²' are one unit"),
        ("fee", np.resize(["Rs. 5", "₹6", "7 INR"], ROWS), "number in INR; 'INR', 'Rs.', '₹' are one unit"),
        ("time", np.resize(["10 h", "11 hrs", "1 hour"], ROWS), "number in h; 'h', 'hour', 'hrs' are one unit"),
        ("at", np.resize(["10 AM", "3 PM", "4 PM"], ROWS), "time → hours"),
        ("age", np.resize(["<18", ">18", "18"], ROWS), "3 categories"),
        ("lead", ["<5", ">50", "<5", *map(str, range(3, ROWS))], "number; 3 cells such as <5 are taken as 5"),
        ("worth", [f"{v}k" for v in range(ROWS)], "number"),
        ("born", [f"07.11.{v:02}" for v in range(40, 100)], "; years of two digits: 69-99 are 19.., 00-68 are 20.."),
    ],
)
def test_a_column_is_taken_for_what_it_is(name, cells, note):
    found = notes(**{name: [str(cell) for cell in cells]})[name]
    assert found == note or (note.startswith("; ") and note in found) or found.startswith(f"{note},"), found


def test_names_of_columns_that_collide_are_refused():
    table = frame(**{"d": DAYS.strftime("%Y-%m-%d"), "d (days)": REAL})
    with pytest.raises(TableError, match=r"columns 'd' and 'd \(days\)' would both become 'd \(days\)'; rename one"):
        Table.learn(table)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234e5", None),
        ("1,234", 1234.0),
        ("1.5e5", 150_000.0),
        ("12k", 12_000.0),
        ("$1.5M", 1_500_000.0),
        ("12km", 12.0),
        ("3.5 kWh", 3.5),
        ("12.-", 12.0),
        ("12,- €", 12.0),
        ("2,500 EUR/m²", 2500.0),
        ("'17'", 17.0),
        ("ca. 30", 30.0),
        ("<5", 5.0),
        (">5", 5.0),
        ("£1.2m", 1.2e6),
        ("$3bn", 3e9),
        ("$ 2 B", 2e9),
        ("1.2 mn €", 1.2e6),
        ("1.5 million", 1.5e6),
        ("3 Mrd. EUR", 3e9),
        ("1.2m", 1.2),
        ("5 kr", 5.0),
        ("<=50K", None),
        ("5+", None),
    ],
)
def test_cells_are_numbers_or_not(text, value):
    found = as_number(text, ".")
    assert (found and found[0]) == value


def test_fractions_of_a_second_count():
    np.testing.assert_allclose(read_times(["00:00:01.5", "12:00:00.25"], "%H:%M:%S.%f"), [1.5 / 3600, 12 + 0.25 / 3600])


def test_millions_are_those_of_the_column_in_every_row():
    """A row is not judged by its neighbours: 1.2m stands alone in the new table."""
    learnt = Table.learn(frame(worth=[f"{v}k" for v in range(ROWS)], way=[f"{v}m" for v in range(ROWS)], b=REAL))
    clean = learnt.transform(frame(worth=["1.2m", "3b"], way=["1.2m", "3m"], b=REAL[:2]))
    assert clean["worth"].tolist() == [1.2e6, 3e9]
    assert clean["way"].tolist() == [1.2, 3.0]
    target = Target.learn("worth", pd.Series([f"{v}k" for v in range(ROWS)]))
    assert Target.from_json(target.to_json()).values(pd.Series(["2m"]))[0].tolist() == [2e6]


@pytest.mark.parametrize("columns", [{"level": range(1, 11)}, {"level": range(1, 11), "position": list("abcdefghij")}])
def test_numbers_of_the_rows_are_better_than_nothing(columns):
    learnt = Table.learn(pd.DataFrame(columns))
    assert learnt.columns[0].note == "number; it numbers the rows, but there is nothing else to predict from"
    assert learnt.outputs == ["level"]


def test_remarks_on_a_target_are_said():
    numbers = [str(v) for v in range(ROWS)]
    assert Target.learn("y", pd.Series([*numbers, "-999", "-999", ""])).note == (
        "number; 2 cells are -999, far from all others: is it a word for missing? They count as numbers"
    )
    fees = Target.learn("y", pd.Series([*(f"${v}" for v in numbers), "5", "n/a", "ask; or call"]))
    assert fees.note == "number in $; 1 cells without '$', which are taken as they are"
    spans = Target.learn("y", pd.Series([f"{v} day{'s' * (v != 1)}" for v in range(ROWS)]))
    assert (spans.task, spans.note) == ("regression", "number in days; 'day', 'days' are one unit")
    assert Target.learn("rank", pd.Series(range(1, ROWS))).task == "regression"


def test_columns_of_lists_are_left_out(tmp_path):
    table = cars().assign(tags=[[v % 3, 1] for v in range(80)], about=[{"a": v % 2} for v in range(80)])
    table.to_parquet(tmp_path / "t.parquet")
    notes = read_training(tmp_path / "t.parquet", "price").columns.summary()
    assert notes[-2:] == ["tags: dropped, holds lists or records", "about: dropped, holds lists or records"]


def test_a_name_that_is_not_found_casts_doubt_on_the_encoding(tmp_path):
    text = cars().rename(columns={"price": "цена", "km": "пробег"}).to_csv(index=False)
    (tmp_path / "t.csv").write_bytes(text.encode("cp1251"))
    doubt = "The file is not UTF-8 and is read as Latin-1: if its letters look wrong, save it as UTF-8."
    with pytest.raises(TableError, match=f"target parameter must be one of .* {doubt}"):
        read_training(tmp_path / "t.csv", "цена")
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    with pytest.raises(TableError, match="drop parameter must be one of") as error:
        read_training(tmp_path / "t.csv", "цена", Names(drop=["kilometres"]))
    assert doubt not in str(error.value)


def test_targets_say_what_stands_in_the_way():
    cells = pd.Series(["ask us", "sold!", *(str(v * v) for v in range(5, 40)), *["call 7"] * 8])
    with pytest.raises(TableError, match="10 cells are not numbers, such as 'ask us'; correct them"):
        Target.learn("price", cells)
    target = Target.learn("price", cells, "regression")
    assert target.values(cells)[1].sum() == 10
    with pytest.raises(TableError, match="holds text in 10 of 12 cells, such as 'ask us'"):
        Target.learn("price", cells[[0, 1, 2, 3, *range(37, 45)]], "regression")
    truths = Target.learn("left", pd.Series(["Yes", "yes", "no"] * 5))
    assert truths.note == "2 classes, 'Yes', 'no'; 'Yes', 'yes' are one class"
    assert Target.from_json(truths.to_json()).values(pd.Series(["YES", "no"]))[0].tolist() == ["Yes", "no"]


def test_types_of_pandas_are_understood():
    table = pd.DataFrame(
        {
            "choice": pd.Categorical([1, 2, None] * 20),
            "wait": pd.to_timedelta(np.arange(60) ** 2, unit="h"),
            "list": [np.array([1, 2])] * 60,
            "say": [f"\x1b{v % 3}\x00" for v in range(60)],
        }
    )
    learnt = Table.learn(table)
    assert learnt.summary()[:3] == [
        "choice: 2 categories; 20 missing",
        "wait: duration → hours",
        "list: dropped, always '[1 2]'",
    ]
    assert learnt.transform(table)["wait"][3] == 9.0
    assert all(line.isprintable() for line in learnt.summary())


def test_outputs_that_are_the_same_in_every_row_are_dropped():
    texts = [f"{chr(97 + v % 26)}{chr(97 + v // 26)}x q w e" for v in range(ROWS)]
    assert notes(text=texts)["text"] == "dropped, texts that share no words"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text + "Total,,,,,\n", "line 82: it holds totals of the rows above"),
        (lambda text: text + f",,SUMME,,,{cars()['price'].sum():.2f}\n", "line 82: it holds totals of the rows above"),
        (lambda text: text + "Gesamtergebnis,,,,,\n", "line 82: it holds totals of the rows above"),
        (lambda text: text + f",,Subtotal:,,,{cars()['price'].mean():.2f}\n", "line 82: it holds totals of the rows"),
        (lambda text: text.replace("km,", "km ago,", 1), "must be one of the 12 columns (km ago, age,"),
        (lambda text: "# made by hand, 2024\n" + text, "1 line before the column names left out"),
        (lambda text: text + ",,,,,\n", "1 rows without any cell left out"),
        (lambda text: text + text.splitlines()[1] + "\n", "1 rows repeat another one"),
    ],
)
def test_files_are_read_with_their_oddities(tmp_path, change, said):
    table, target = cars(), "price"
    if "columns" in said:
        table, target = table.assign(**{f"x{v}": v for v in range(6)}), "prize"
    (tmp_path / "t.csv").write_text(change(table.to_csv(index=False)), encoding="utf-8")
    try:
        found = read_training(tmp_path / "t.csv", target).notes
    except TableError as error:
        found = error.problems
    assert said in "\n".join(found), found


def test_names_that_are_all_numbers_are_said(tmp_path):
    (tmp_path / "t.csv").write_text("1,2.5,3\n" * 5, encoding="utf-8")
    assert "the column names are all numbers" in open_table(tmp_path / "t.csv").notes[0]


# ------------------------------------------------------------------ labels


@pytest.mark.parametrize("labels", [["old ", "new"], [1, 2], [1.0, 2.0], [True, False], ["1.0", "2.0"], ["01", "02"]])
@pytest.mark.parametrize("kind", [object, None])
def test_labels_come_back_as_they_were_given(labels, kind):
    x = cars(60)
    y = np.array(labels, dtype=kind)[(x["km"] > 100_000).astype(int)]
    model = TableClassifier(**QUICK).fit(x, y)
    predicted = model.predict(x)
    assert accuracy_score(list(y), list(predicted)) == model.score(x, y) > 0.8
    assert {type(label) for label in predicted.tolist()} == {type(label) for label in labels}
    assert model.score(x, np.array(["unseen"] * 60)) == 0
    with pytest.raises(TableError, match="is missing in every row"):
        model.score(x, [None] * 60)


def test_raw_errors_have_become_words():
    x, y = cars(60).drop(columns="price"), cars(60)["price"]
    with pytest.raises(NotFittedError):
        TableRegressor().predict(x)
    with pytest.raises(NotFittedError):
        TableClassifier().predict_proba(x)
    with pytest.raises(NotFittedError):
        TableClassifier().labels(y)
    with pytest.raises(ValueError, match=r"y must have one column, got an array of shape \(60, 2\) instead"):
        TableRegressor(**QUICK).fit(x, np.ones((60, 2)))
    model = TableRegressor(**QUICK).fit(x.to_dict("list"), y.to_numpy()[:, None])
    assert np.isfinite(model.predict(x.head(2).to_dict("list"))).all()


# ------------------------------------------------------------------ what a new user found


def test_values_that_training_lacked_are_counted_also_beside_rare_ones():
    rng = np.random.default_rng(0)
    kind = np.concatenate([rng.choice(["a", "b", "c"], 180), [f"rare{i}" for i in range(20)]])
    train = pd.DataFrame({"kind": kind, "plain": rng.choice(["x", "y"], 200), "z": rng.normal(size=200)})
    table = Table.learn(train)
    assert next(c for c in table.columns if c.name == "kind").rare == pytest.approx(0.1)

    def lines(**columns):
        changes = Changes()
        table.transform(train.assign(**columns), changes)
        return changes.lines()

    assert lines() == []
    assert lines(plain=["x"] * 199 + ["q"]) == ["plain: 1 of 200 cells hold values not seen in training, such as 'q'"]
    some = np.where(np.arange(200) < 80, "new", kind)
    assert lines(kind=some) == [
        "kind: 100 of 200 cells hold rare values or some not seen in training, such as 'new', where 20 were to be expected"
    ]
    assert lines(kind=np.roll(kind, 5)) == []


def test_forms_and_faults_of_columns_are_said():
    rows = np.arange(ROWS)
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(9 * rows, unit="D")
    zones = [f"{day:%Y-%m-%dT%H:%M:%S}{zone}" for day, zone in zip(days, ["Z", "+09:00"] * ROWS, strict=False)]
    summer = [f"{day:%Y-%m-%dT%H:%M:%S}{zone}" for day, zone in zip(days, ["+01:00", "+02:00"] * ROWS, strict=False)]
    said = notes(
        zones=zones,
        summer=summer,
        comma=[f"{1 + i / 100:.3f}".replace(".", ",") if i in (3, 9) else f"{1 + i / 100:.3f}" for i in rows],
        sentinel=np.where(rows % 9 == 0, "9999", (rows % 7).astype(str)),
        forever=[f"{day:%Y-%m-%d}" if i % 8 else "9999-12-31" for i, day in enumerate(days)],
        weeks=[f"2024-W{1 + i % 50:02d}" for i in rows],
        weekday=[f"{day:%a %d %b %Y}" for day in days],
        chinese=[f"{day:%Y}年{day:%m}月{day:%d}日" for day in days],
        income=[f"{i + 1} thousand" if i % 2 else f"0.{i + 1:03d} million" for i in rows],
    )
    assert said["zones"].endswith("; several time zones ('+09:00', 'Z'), each of which is taken as local time")
    assert "time zones" not in said["summer"]
    assert "are 1030, far above all others: is ',' a decimal sign there?" in said["comma"].replace(",", ",")
    assert "cells are 9999, far from all others: is it a word for missing?" in said["sentinel"]
    assert "cells such as 9999-12-31 are far after all others: do they mean no date?" in said["forever"]
    assert "dates in a form that is not known ('2024-W01', " in said["weeks"]
    assert said["weekday"].startswith("date → days since first")
    assert said["chinese"].startswith("date → days since first")
    assert said["income"] == "number"
    column = read_column(
        Table.learn(frame(income=["1 thousand", "0.5 million"] * (ROWS // 2), real=REAL)).columns[0],
        np.array(["2 thousand", "3 Tsd.", "0.5 million"], dtype=object),
    )
    assert column.values["income"].tolist() == [2000.0, 3000.0, 500_000.0]


def test_a_quote_that_swallows_rows_is_found(tmp_path):
    lines = ["x,note,y"] + [f"{i},ok,{i}" for i in range(40)]
    lines[11], lines[31] = '10,"ok,10', '30,ok",30'
    (tmp_path / "q.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(
        TableError, match="line 32: a quote that was opened 20 lines above seems to be closed here only"
    ):
        read_training(tmp_path / "q.csv", "y")
    told = [f'{i},"a story\nof two lines, told",{i}' for i in range(40)]
    (tmp_path / "t.csv").write_text("x,note,y\n" + "\n".join(told) + "\n")
    assert len(read_training(tmp_path / "t.csv", "y").y) == 40


def test_a_line_of_names_among_classes_is_no_class(tmp_path):
    lines = ["x,label"] + [f"{i},{'hi' if i % 3 else 'lo'}" for i in range(40)]
    lines[20] = "x,label"
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(TableError, match="line 21: it repeats the names of the columns"):
        read_training(tmp_path / "t.csv", "label")


def test_a_target_of_one_word_and_empty_cells_is_told_what_to_do(tmp_path):
    (tmp_path / "t.csv").write_text("z,late\n" + "".join(f"{i},{'x' if i % 2 else ''}\n" for i in range(40)))
    with pytest.raises(
        TableError, match="has one value, 'x', and 20 cells without any; if these mean no, write a word"
    ):
        read_training(tmp_path / "t.csv", "late")


@pytest.mark.parametrize("rows", [40, 100])
def test_few_rows_of_many_columns_do_not_make_every_new_row_strange(rows):
    shares = []
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=(rows + 200, 200))
        model = StationaryRegressor(kernel="rbf", hidden_layer_sizes=(), random_state=0).fit(x[:rows], x[:rows, 0])
        shares.append(np.mean(model.ood_score(x[rows:]) > model.ood_threshold_))
        assert np.mean(model.ood_score(10 * x[rows:] + 20) > model.ood_threshold_) == 1
    assert np.mean(shares) < 0.15
