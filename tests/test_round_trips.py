"""What was read comes back equal when it is read again, by this package and by pandas, or nothing is written."""

import datetime as dt
import io
import os
import subprocess
import sys
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bochner import TableRegressor
from bochner.cli import app
from bochner.estimators import Settings
from bochner.storage import save
from bochner.tables.errors import TableError
from bochner.tables.files.reading import open_table, read_table
from bochner.tables.files.text import DELIMITERS
from bochner.tables.files.writing import check_output_kind, writer
from messy import cars

CHECKS = [HealthCheck.function_scoped_fixture]
PROPERTY = settings(max_examples=80, deadline=None, suppress_health_check=CHECKS)
FEW = settings(max_examples=15, deadline=None, suppress_health_check=CHECKS)  # for Excel, whose writer is slow
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
CELL = st.one_of(
    st.text(CHARACTERS, max_size=8),
    st.sampled_from(
        ["", " ", "\r", "\n", "\r\n", "a\rb", " a ", '"', '""', "'", ",", ";", "|", "\t", "\ufeff", "\x0b", "\x85"]
    ),
    st.sampled_from(["NA", "1,5", "9007199254740993", "0.1", "sep=;", "#", "=1+1", "\u2028"]),
)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 12))


@st.composite
def tables(draw, cell=CELL):
    """Names that differ, and rows of cells."""
    width, rows = draw(SHAPES)
    names = draw(st.lists(cell, min_size=width, max_size=width, unique_by=lambda name: name.strip() or object()))
    return names, draw(st.lists(st.tuples(*[cell] * width), min_size=rows, max_size=rows))


def as_file(names, rows, delimiter, end):
    """A text file with quotes around every cell."""
    lines = (delimiter.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in [names, *rows])
    return end.join(lines) + end


def write(out, source, pieces, decimal="."):
    """Writes pieces of a table with two new columns; False where that is refused, and then there is no file."""
    out.unlink(missing_ok=True)
    try:
        check_output_kind(out, source)
        with writer(out, source, decimal) as take:
            for piece in pieces:
                number = len(piece.texts)
                take(piece, {"new mean": np.arange(number) / 7, "new ood": np.arange(number) % 2 == 0})
    except TableError:
        assert not out.exists()
        return False
    return True


def check_equal(source, pieces, out):
    """Compares a written file with the pieces that it was made of."""
    texts = pd.concat([piece.texts for piece in pieces]).to_numpy().tolist()
    again = open_table(out)
    found = read_table(again).texts
    assert again.names == [*source.names, "new mean", "new ood"]
    assert found[source.names].to_numpy().tolist() == texts
    assert not again.bad
    return again, texts


@PROPERTY
@given(tables(), st.sampled_from(list(DELIMITERS)), st.sampled_from(["\n", "\r\n", "\r"]), st.sampled_from(".,"))
def test_text_comes_back_equal(tmp_path, table, delimiter, end, decimal):
    path, out = tmp_path / "t.csv", tmp_path / "o.csv"
    path.write_text(as_file(*table, delimiter, end), encoding="utf-8", newline="")
    try:
        source = open_table(path)
        pieces = list(source.pieces(5))
    except TableError:
        return
    if source.dialect.delimiter == delimiter or len(table[0]) == 1:
        read = [row for piece in pieces for row in piece.texts.to_numpy().tolist()]
        assert len(read) + len(source.bad) + source.dialect.skipped == len(table[1])
        if not source.dialect.skipped and not source.dialect.trailing:
            assert read == [list(row) for row in table[1]]
    if not pieces:
        return
    if write(out, source, pieces, decimal):
        again, texts = check_equal(source, pieces, out)
        options = {
            "sep": again.dialect.delimiter,
            "dtype": str,
            "keep_default_na": False,
            "header": None,
            "skiprows": 0,
        }
        found = pd.read_csv(out, **options, encoding="utf-8-sig").to_numpy()[1:]
        assert found[:, :-2].tolist() == texts
        numbers = pd.Series(found[:, -2]).str.replace(decimal, ".").astype(float)
        expected = np.concatenate([np.arange(len(piece.texts)) / 7 for piece in pieces])
        assert numbers.tolist() == expected.tolist()
    parquet = tmp_path / "o.parquet"
    if write(parquet, source, pieces):
        check_equal(source, pieces, parquet)
        assert pd.read_parquet(parquet).to_numpy()[:, :-2].tolist() == [
            row for piece in pieces for row in piece.texts.to_numpy().tolist()
        ]


VALUES = {
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "uint8": (pa.uint8(), st.integers(0, 255)),
    "double": (pa.float64(), st.floats(allow_nan=False)),
    "float": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "text": (pa.string(), st.text(st.characters(exclude_categories=["Cs"]), max_size=6)),
    "large text": (pa.large_string(), CELL),
    "coded text": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b", ""])),
    "truth": (pa.bool_(), st.booleans()),
    "day": (pa.date32(), st.dates()),
    "moment": (pa.timestamp("us"), st.datetimes()),
    "moment in Berlin": (
        pa.timestamp("us", "Europe/Berlin"),
        st.datetimes(dt.datetime(1950, 1, 1), dt.datetime(2100, 1, 1), timezones=st.just(dt.UTC)),
    ),
    "nanosecond": (pa.timestamp("ns"), st.integers(-(2**62), 2**62)),
    "second": (pa.timestamp("s"), st.one_of(st.integers(-(2**35), 2**35), st.integers(2**40, 2**62))),
    "time": (pa.time64("us"), st.times()),
    "amount": (pa.decimal128(20, 4), st.decimals(-(10**9), 10**9, places=4).map(Decimal)),
    "bytes": (pa.binary(), st.binary(max_size=4)),
    "list": (pa.list_(pa.int64()), st.lists(st.integers(-9, 9), max_size=3)),
    "duration": (pa.duration("us"), st.integers(-(2**53), 2**53)),
    "nothing": (pa.null(), st.none()),
}
NO_TEXT = {"bytes", "list", "duration"}


@PROPERTY
@given(st.data())
def test_parquet_comes_back_equal(tmp_path, data):
    kinds = data.draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4, unique=True))
    rows = data.draw(st.integers(1, 12))
    cells = {name: st.lists(st.one_of(st.none(), VALUES[name][1]), min_size=rows, max_size=rows) for name in kinds}
    table = pa.table({name: pa.array(data.draw(cells[name]), VALUES[name][0]) for name in kinds})
    path = tmp_path / "t.parquet"
    try:
        pq.write_table(table, path)
    except pa.ArrowInvalid:  # seconds that Parquet, which counts in milliseconds, cannot hold
        return
    source = open_table(path)
    if (
        "second" in kinds
        and max(map(abs, filter(None, table["second"].cast(pa.int64()).to_pylist())), default=0) > 2**35
    ):
        with pytest.raises(TableError, match=r"t\.parquet cannot be read to its end"):  # beyond the year 9999
            list(source.pieces(5))
        return
    pieces = list(source.pieces(5))
    for suffix in ("csv", "parquet"):
        out = tmp_path / f"o.{suffix}"
        if write(out, source, pieces):
            check_equal(source, pieces, out)
        else:
            nul = any("\0" in cell for piece in pieces for row in piece.texts.to_numpy() for cell in row)
            assert suffix == "csv"
            assert NO_TEXT & set(kinds) or nul or len(kinds) == 1
        if suffix == "parquet":
            assert pq.read_table(out).select(source.names).equals(pq.read_table(path))
        elif out.exists() and "int64" in kinds:
            found = pd.read_csv(out, dtype=str, keep_default_na=False)["int64"]
            assert found.tolist() == ["" if value is None else str(value) for value in table["int64"].to_pylist()]


@FEW
@given(tables(st.one_of(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=6), st.just("a\nb"))))
def test_excel_comes_back_equal_through_text(tmp_path, table):
    names, rows = table
    file = io.BytesIO()
    pd.DataFrame(rows).to_excel(file, index=False, header=names)
    (tmp_path / "t.xlsx").write_bytes(file.getvalue())
    try:
        source = open_table(tmp_path / "t.xlsx")
    except TableError:
        return
    pieces = list(source.pieces(5))
    if pieces and write(tmp_path / "o.csv", source, pieces):
        check_equal(source, pieces, tmp_path / "o.csv")


def test_what_text_cannot_hold_is_refused(tmp_path):
    path, out = tmp_path / "t.parquet", tmp_path / "o.csv"
    pq.write_table(pa.table({"a": ["nul\0", "b"]}), path)
    source = open_table(path)
    with (
        pytest.raises(TableError, match=r"The cell 'nul.x00' holds a character that text files cannot hold"),
        writer(out, source, ".") as take,
    ):
        take(next(source.pieces()), {"new": np.zeros(2)})
    path.with_suffix(".csv").write_text("a,b\n1,2\n", encoding="utf-8")
    source = open_table(path.with_suffix(".csv"))
    (piece,) = source.pieces()
    piece.texts["b"] = ["x" * 200_000]
    with (
        pytest.raises(TableError, match=r"predictions for .*t\.csv would not be read as written; write to .parquet"),
        writer(out, source, ".") as take,
    ):
        take(piece, {"new": np.zeros(1)})
    piece.texts["b"] = pd.Series(["\ud800"], dtype=object)
    with (
        pytest.raises(TableError, match=r"rows of .* cannot be written to Parquet"),
        writer(out.with_suffix(".parquet"), source, ".") as take,
    ):
        take(piece, {"new": np.zeros(1)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.parquet"]


def test_a_table_on_standard_output_keeps_its_letters_whatever_that_knows(model, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("km,note\n1000,zürich\n2000,łódź\n", encoding="utf-8")
    end = subprocess.run(
        [sys.executable, "-m", "bochner.cli", "predict", str(model), str(path), "--out", "-"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert [line.split(",")[1] for line in end.stdout.decode().splitlines()] == ["note", "zürich", "łódź"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_no_row_that_can_be_used_is_an_error_and_no_file(model, suffix, tmp_path):
    path, out = tmp_path / "t.csv", tmp_path / f"o{suffix}"
    path.write_text("km,note\n1000\n2000\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["predict", str(model), str(path), "--out", str(out), "--skip-bad-rows"])
    assert result.exit_code == 1
    assert "2 rows that cannot be used; no other row is there; correct them:\nline 2: 1 cells" in result.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_a_nameless_index_of_pandas_is_no_column_and_is_kept(tmp_path):
    frame = pd.DataFrame({"a": [1, None], "__index_level_1__": ["x", "y"]}, index=[7, 3])
    frame.to_parquet(tmp_path / "t.parquet")
    source = open_table(tmp_path / "t.parquet")
    assert source.names == ["a", "__index_level_1__"]
    assert write(tmp_path / "o.parquet", source, source.pieces())
    assert pd.read_parquet(tmp_path / "o.parquet").index.tolist() == [7, 3]


# ------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of one column, in a file."""
    path = tmp_path_factory.mktemp("model") / "m.bochner"
    cheap = Settings(folds=2, tuning_rows=40, tuning_steps=3, wide_anchors=40)
    estimator = TableRegressor(kernel="matern32", hidden_layer_sizes=(), random_state=0, settings=cheap)
    save(path, estimator.fit(cars(40)[["km"]], cars(40)["price"]))
    return path


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("km\n1000\n\n  \n2000\n\n", 4),  # an empty line and a line of blanks between rows are cells
        ("km,note\n1000,a\n\n2000,b\n", 2),
        ('km,note\n1000,"a\rb"\n2000,"c\r\n"\n', 2),
        ("km;note;\n1000; a ;\n2000;;\n", 2),
        ("\ufeff\ufeffkm,note\n1000,x\n2000,y\n", 2),
    ],
)
def test_predictions_have_as_many_rows_as_the_table(model, text, rows, tmp_path):
    path, out = tmp_path / "t.csv", tmp_path / "o.csv"
    path.write_text(text, encoding="utf-8", newline="")
    result = CliRunner().invoke(app, ["predict", str(model), str(path), "--out", str(out)])
    assert f"{rows} rows, " in result.stdout, result.output
    found = read_table(open_table(out)).texts
    assert len(found) == rows
    source = open_table(path)
    assert found[source.names].to_numpy().tolist() == read_table(source).texts.to_numpy().tolist()
