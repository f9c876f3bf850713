"""Tables that mislead: what a column is taken for, and what is said about it."""

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score
from typer.testing import CliRunner

from bochner import TableClassifier, TableRegressor
from bochner.cli import app
from bochner.estimators import Settings
from bochner.estimators.spread import Spread
from bochner.storage import save
from bochner.tables.cells import as_number
from bochner.tables.errors import TableError
from bochner.tables.table import Changes, Signs, Table, Target
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


def test_targets_are_read_with_the_decimal_sign_of_a_new_file(tmp_path):
    table = cars(60).assign(fee=[f"{v + 0.25}" for v in cars(60)["age"]])
    x, y = table.drop(columns="price"), table["price"]
    model = TableRegressor(**QUICK).fit(x, y.map(str))
    expected = model.score(x, y)
    commas = y.map(lambda v: str(v).replace(".", ","))
    assert model.score(x, commas) == pytest.approx(expected)
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
    ],
)
def test_a_column_is_taken_for_what_it_is(name, cells, note):
    found = notes(**{name: [str(cell) for cell in cells]})[name]
    assert found == note or (note.startswith("; ") and note in found) or found.startswith(f"{note},"), found


def test_names_of_columns_that_collide_are_refused():
    table = frame(**{"d": DAYS.strftime("%Y-%m-%d"), "d (days)": REAL})
    with pytest.raises(TableError, match=r"columns 'd' and 'd \(days\)' would both become 'd \(days\)'; rename one"):
        Table.learn(table)


@pytest.mark.parametrize(("text", "value"), [("1,234e5", None), ("1,234", 1234.0), ("1.5e5", 150_000.0)])
def test_cells_are_numbers_or_not(text, value):
    found = as_number(text, ".")
    assert (found and found[0]) == value


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
    with pytest.raises(ValueError, match=r"y must have one column, got an array of shape \(60, 2\) instead"):
        TableRegressor(**QUICK).fit(x, np.ones((60, 2)))
    model = TableRegressor(**QUICK).fit(x.to_dict("list"), y.to_numpy()[:, None])
    assert np.isfinite(model.predict(x.head(2).to_dict("list"))).all()
