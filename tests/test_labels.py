"""One rule for labels: which spellings are one class, what is a number, and what is said of it."""

import datetime as dt
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bochner.tables.cells import plain_form
from bochner.tables.errors import TableError
from bochner.tables.estimators import first_spellings
from bochner.tables.targets import Target

PROPERTY = settings(max_examples=150, deadline=None)
BLANKS = st.sampled_from(["{}", " {}", "{} ", "\t{}  "])


def spell_number(value):
    """A strategy of spellings of a decimal number."""
    text = format(value, "f")
    spellings = [text, f"+{text}" if value >= 0 else text, f"{value:e}", f"{value:E}"]
    spellings += [text + "0" if "." in text else text + ".0", text + "." if "." not in text else text]
    return st.tuples(st.sampled_from(spellings), BLANKS).map(lambda pair: pair[1].format(pair[0]))


def spell_text(text):
    """A strategy of spellings of a text: blanks around it and within."""
    return BLANKS.map(lambda form: form.format(text.replace(" ", "  ")))


NUMBERS = st.decimals(-(10**18), 10**18, places=3).map(lambda value: Decimal(f"{value.normalize():f}"))
TEXTS = st.text(st.characters(codec="ascii", categories=["Lu", "Ll"]), min_size=1, max_size=5).map(
    lambda t: f"k{t} x{t}"
)


@st.composite
def spelled_classes(draw, labels, spell):
    """Different labels, and rows of their spellings with the label of each."""
    classes = draw(st.lists(labels, min_size=2, max_size=5, unique=True))
    rows = draw(st.lists(st.sampled_from(classes), min_size=12, max_size=30)) + classes * 2
    return classes, rows, [draw(spell(label)) for label in rows]


@PROPERTY
@given(st.one_of(spelled_classes(NUMBERS, spell_number), spelled_classes(TEXTS, spell_text)), st.booleans())
def test_spellings_of_one_label_are_one_class(case, as_file):
    classes, rows, texts = case
    series = pd.Series(texts, dtype=object, name="y")
    target = Target.learn("y", series, "classification")
    names, bad = target.values(series)
    assert not bad.any()
    assert len(set(names)) == len(classes)
    assert {(str(row), name) for row, name in zip(rows, names, strict=True)} == {
        (str(label), plain_form(str(label))) for label in classes
    }
    merged = {
        name for name in set(names) if {text for text, own in zip(texts, names, strict=True) if own == name} != {name}
    }
    assert bool(merged) == ("one class" in target.note or "is read as" in target.note)
    assert Target.from_json(target.to_json()) == target
    # One by one, as in a new table of one row, and as they were first written.
    assert [target.values(pd.Series([text], dtype=object))[0][0] for text in texts[:3]] == names[:3].tolist()
    if not as_file:
        first = first_spellings(series, names)
        assert len(set(first)) == len(classes)
        assert set(first) <= set(texts)


@PROPERTY
@given(
    st.lists(st.integers(2**53, 2**63 - 1), min_size=2, max_size=4, unique=True),
    st.sampled_from([object, "int64", str]),
)
def test_long_numbers_are_different_classes(values, kind):
    series = pd.Series([str(v) if kind is str else v for v in values] * 3, dtype=object if kind is str else kind)
    target = Target.learn("y", series, "classification")
    assert target.values(series)[0].tolist() == [str(value) for value in values] * 3


@pytest.mark.parametrize(
    ("labels", "task", "note"),
    [
        (
            ["0", "1", "0.0", "1.0"],
            "classification",
            "2 classes, '0', '1'; '0', '0.0' are one class; '1', '1.0' are one class",
        ),
        (["pos", " pos", "neg"], "classification", "2 classes, 'neg', 'pos'; ' pos', 'pos' are one class"),
        (
            ["0,0", "1", "1,0", "0"],
            "classification",
            "2 classes, '0', '1'; '0', '0,0' are one class; '1', '1,0' are one class",
        ),
        (["1.0", "2.0"], "classification", "2 classes, '1', '2'; '1.0' is read as '1'; '2.0' is read as '2'"),
        (["a", "A", "b"], "classification", "3 classes, 'A', 'a', 'b'; upper and lower case are different classes"),
        (["\u00e9", "e\u0301", "x"], "classification", "2 classes, 'x', '\u00e9'; 'e\u0301', '\u00e9' are one class"),
        (["y", "YES", "no"], "classification", "2 classes, 'no', 'y'; 'YES', 'y' are one class"),
        (["yes", "no"], "classification", "2 classes, 'no', 'yes'"),
        (["01", "1"], "classification", "2 classes, '01', '1'"),
        (["001", "1", "2"], "classification", "3 classes, '001', '1', '2'"),
        (["007", *map(str, range(1, 30))], "regression", "number; zeros in front, as in '007', do not count"),
        (["a", "a\u200b", "b"], "classification", "2 classes, 'a', 'b'; 'a', 'a\u200b' are one class"),
        (["0", "1", "2.0", "0.0"], "regression", "number"),
        ([*"abcdefg", *(f" {c}" for c in "abcdefg")], "classification", "and 2 more such classes"),
        ([True, False], "classification", "2 classes, 'False', 'True'"),
        ([0, 1.0, "1"], "classification", "2 classes, '0', '1'; '1', '1.0' are one class"),
        ([0.0, 1.0, np.nan], "classification", "2 classes, '0', '1'"),
    ],
)
def test_what_was_taken_for_what_is_said(labels, task, note):
    values = pd.Series(labels * 4)
    target = Target.learn("y", values)
    assert target.task == task
    assert target.note == note or ("more such" in note and target.note.endswith(note))
    names, bad = target.values(values)
    assert bad.sum() == 4 * sum(label != label for label in labels)
    assert task == "regression" or len(set(names[~bad])) == int(note.split()[0] if note[0].isdigit() else 7)


@pytest.mark.parametrize(
    "days", [pd.date_range("2026-01-01", periods=9), [dt.date(2026, 1, 1 + day) for day in range(9)]]
)
@pytest.mark.parametrize("task", ["auto", "classification", "regression"])
def test_dates_are_no_labels(days, task):
    with pytest.raises(
        TableError, match=r"target 'on' holds dates \('2026-01-01.*; turn them into numbers .* or into names"
    ):
        Target.learn("on", pd.Series(days), task)


def test_labels_of_numbers_keep_their_type():
    names = np.array(["0", "1", "1"])
    assert first_spellings(pd.Series([0, 1.5, 1], dtype=object), names).tolist() == [0.0, 1.5, 1.5]
    assert first_spellings(pd.Series(["0", 1, "1"], dtype=object), names).tolist() == ["0", "1", "1"]
    assert first_spellings(pd.Series([True, 1, 1], dtype=object), names).tolist() == ["0", "1", "1"]
