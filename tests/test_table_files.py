"""Files in and out: what is read comes back equal, numbers survive any form, and outputs touch nothing else."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bochner.cli import app
from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.files import check_outputs, replacing, write_bytes
from bochner.members.budget import Clock, OutOfTime, affordable_effort, fit_within_budget
from bochner.members.settings import Settings
from bochner.tables.cells import as_number
from bochner.tables.errors import TableError
from bochner.tables.files.reading import Piece, open_table, read_table
from bochner.tables.files.writing import check_output_kind
from bochner.tables.fitting import Names, read_training
from bochner.tables.table import Table

PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CELL = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\r\n\t"), max_size=12)


def test_what_has_no_form_in_text_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    pd.DataFrame({"a": [[1], [2]], "b": pd.to_timedelta([1, 2], unit="s")}).to_parquet(path)
    with pytest.raises(TableError, match=r"column 'a', 'b' of .* has no form in text; write to .parquet"):
        check_output_kind(tmp_path / "o.csv", open_table(path))
    check_output_kind(tmp_path / "o.parquet", open_table(path))


@PROPERTY
@given(
    st.integers(-(10**9), 10**9),
    st.integers(0, 99),
    st.sampled_from([(".", ","), (",", "."), (".", " "), (",", "\u202f"), (".", "'"), (".", "")]),
    st.sampled_from(["{}", "${}", "{} €", "EUR {}", "{}%", "{} km", " {} "]),
)
def test_a_number_is_read_from_any_form(whole, cents, signs, form):
    decimal, separator = signs
    text = f"{abs(whole):,}".replace(",", separator) + f"{decimal}{cents:02}"
    text = form.format(("-" if whole < 0 else "") + text)
    value, _ = as_number(text, decimal)
    assert value == pytest.approx((-1 if whole < 0 else 1) * (abs(whole) + cents / 100), rel=1e-12)


@PROPERTY
@given(
    st.lists(
        st.one_of(CELL, st.sampled_from(["", "NA", "5", "5.0", "$5", "yes", "2026-01-01", "a b c d"])),
        min_size=3,
        max_size=30,
    )
)
def test_any_column_of_text_is_understood_and_kept_as_data(cells):
    frame = pd.DataFrame({"a": np.array(cells, dtype=object), "b": np.arange(len(cells)) / 2, "c": "x"})
    table = Table.learn(frame)
    assert Table.from_json(table.to_json()) == table
    clean = table.transform(frame)
    assert len(clean) == len(frame)
    assert list(clean.columns) == table.outputs
    pd.testing.assert_frame_equal(table.adapted(frame)[0].transform(frame), clean)


# ------------------------------------------------------------------ outputs


def test_outputs_are_compared_as_they_will_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "in.csv").write_text("x")
    (tmp_path / "link").symlink_to("m")
    os.link("in.csv", "hard")
    for one, other in (("m", "m"), ("m", "./m"), ("m", "sub/../m"), ("m", "link"), ("link", "m")):
        with pytest.raises(ValueError, match="are one file; choose another name"):
            check_outputs([Path(one), Path(other)])
    for path in ("in.csv", "sub/../in.csv", "hard"):
        with pytest.raises(ValueError, match="is an input of this command"):
            check_outputs([Path(path)], [Path("in.csv")])
    check_outputs([Path("m"), Path("n"), Path("sub/m")], [Path("in.csv")])
    os.mkfifo("pipe")
    for path in ("pipe", "/dev/null"):
        with pytest.raises(ValueError, match="is not a regular file"):
            check_outputs([Path(path)])
        with pytest.raises(ValueError, match="is not a regular file"):
            write_bytes(Path(path), b"x")
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)


def test_files_are_written_through_links_and_keep_their_mode(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to("real")
    write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o600
    write_bytes(tmp_path / ("n" * 250), b"long names too")
    with pytest.raises(NotADirectoryError), replacing(tmp_path / "real") as part:
        (part / "no folder").write_bytes(b"half")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "n" * 250, "real"]
    assert (tmp_path / "real").read_bytes() == b"new"


def test_many_threads_may_write_one_file(tmp_path):
    path, contents = tmp_path / "m", [bytes([number]) * 200_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(write_bytes, path, content) for content in contents * 10]
        seen = [path.read_bytes() for _ in range(100) if path.exists()]
        for end in writes:
            end.result()
    assert all(content in contents for content in [*seen, path.read_bytes()])
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("stdout", ["ascii", "closed", "full"])
def test_a_poor_output_is_no_traceback(stdout, tmp_path):
    """Letters it does not know, a reader who is gone, a full disk."""
    command = [sys.executable, "-m", "bochner.cli", "data", "list"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "BOCHNER_DATA": str(tmp_path / "d:on:d[/red]é")}
    if stdout == "closed":
        end = subprocess.run(
            ["bash", "-c", f"{' '.join(command)} | true"], capture_output=True, text=True, env=environment
        )
    elif stdout == "full":
        with Path("/dev/full").open("w") as full:
            end = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
        assert end.returncode == 1
        assert "No space left on device" in end.stderr
    else:
        end = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        assert "d:on:d[/red]?" in end.stdout
    assert "Traceback" not in end.stderr
    assert "Exception" not in end.stderr


def test_names_with_commas_are_dropped(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"a": rng.normal(size=20), "b,c": range(20), "d": rng.normal(size=20), "y": rng.normal(size=20)}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    for words in (["--drop", "b,c", "--drop", "d"], ["--drop", 'd,"b,c"']):
        options = ["--target", "y", "--out", tmp_path / "m", "--kernel", "rbf", *words]
        result = CliRunner().invoke(app, ["fit", str(tmp_path / "t.csv"), *map(str, options)])
        assert "b,c: dropped, as asked\n  d: dropped, as asked" in result.stdout, result.output


# ------------------------------------------------------------------ time


class Hands:
    """A clock that stands still unless it is moved."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def hands(monkeypatch):
    found = Hands()
    monkeypatch.setattr("bochner.members.budget.time.perf_counter", found)
    return found


@pytest.mark.parametrize("power", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("full", [0.5, 5.0, 50.0, 5000.0])
def test_a_budget_is_kept_whatever_the_work_costs(full, power, hands):
    """Work is done in steps of a tenth of a second, after each of which the clock is looked at."""

    def attempt(effort, clock):
        for _ in range(round(10 * (0.3 + full * effort**power))):
            hands.now += 0.1
            clock.check()
        return effort

    effort = fit_within_budget(10.0, attempt, lambda _: None)
    first = 0.3 + full * 0.01**power
    assert hands.now <= max(10.1, first + 0.1)
    assert effort == 1.0 or full > 5 or hands.now > 3
    assert effort >= 0.01


@pytest.mark.parametrize("power", [0.6, 1.0, 1.6])
def test_no_fit_is_begun_that_cannot_be_ready_in_time(power, hands):
    """Costs of fits to 2,000 rows: some work is the same in all, and the rest grows with the effort."""

    def attempt(effort, clock):
        hands.now += 0.35 + 13 * effort**power
        clock.check()
        return effort

    said = []
    assert fit_within_budget(9.0, attempt, said.append) >= 0.08
    assert "the time is over; the fit before this one is used" not in said
    assert hands.now <= 9.0


def test_the_affordable_effort_is_the_least_of_a_line_and_a_power():
    assert affordable_effort([(0.01, 0.5)], 2.0) == pytest.approx(0.16)  # time grows as the root of the effort
    line = [(0.01, 0.5), (0.08, 1.5)]
    assert affordable_effort(line, 3.5) == pytest.approx(0.22)
    steep = [(0.1, 1.0), (0.2, 3.0)]  # power log 3 / log 2 = 1.58
    assert affordable_effort(steep, 9.0) == pytest.approx(0.4)
    assert affordable_effort(line, 0.0) < 0.08


def test_the_time_over_is_an_exception_that_says_so(hands):
    Clock().check()
    hands.now = 2.0
    with pytest.raises(OutOfTime):
        Clock(1.0).check()


def test_less_effort_is_smaller_settings_and_all_of_it_the_same():
    whole = Settings()
    assert whole.lighter(1.0, 5000) is whole
    sizes = [(s.wide_anchors, s.judging_rows, s.most_steps) for s in (whole.lighter(e, 5000) for e in (0.01, 0.1, 0.5))]
    assert sizes == sorted(sizes)
    assert max(sizes) < (whole.wide_anchors, whole.judging_rows, whole.most_steps)
    assert (whole.rows_for(0.01, 10**6), whole.rows_for(0.01, 500)) == (10_000, 500)


def test_pieces_carry_their_places(tmp_path):
    (tmp_path / "t.csv").write_text('a,b\n1,2\n\n"3\n3",4\n', encoding="utf-8")
    piece = read_table(open_table(tmp_path / "t.csv"))
    assert isinstance(piece, Piece)
    assert piece.places == [2, 5]


@pytest.mark.parametrize("kind", [StationaryRegressor, StationaryClassifier])
def test_the_least_budget_gives_a_rough_model_of_every_class(kind):
    """The first attempt learns from a part of the rows, in which no class is missing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1100, 2))
    y = x[:, 0] if kind is StationaryRegressor else np.where(x[:, 0] > 0, 1, 0)
    y = np.concatenate([y[:-2], [7, 7]])
    model = kind(hidden_layer_sizes=(), kernel="rbf", random_state=0, budget=0.01).fit(x, y)
    assert model.log_prob(x[:-2], y[:-2]).mean() > -0.5
    if kind is StationaryClassifier:
        assert model.classes_.tolist() == [0, 1, 7]
    with pytest.raises(ValueError, match="budget parameter must be a positive number of seconds, got -1 instead"):
        kind(budget=-1).fit(x, y)


# ------------------------------------------------------------------ what is left out is said


@pytest.mark.parametrize(
    ("text", "rows", "bad", "note"),
    [
        ("a,b\n1,2\n3,4,\n", 1, ["3 cells where the first line names 2"], []),
        ("a,b\n1,2,\n3,4,\n5,6\n", 3, [], ["read as: the delimiter at the end of lines left out"]),
        ("a,b,\n1,2,\n3,4\n", 2, [], ["read as: the delimiter at the end of lines left out"]),
        (
            "a,b,\n1,2,\n3,4,5\n",
            1,
            ["3 cells where the first line names 2"],
            ["read as: the delimiter at the end of lines left out"],
        ),
        ("a\n1\n\n \n2\n\n\n", 4, [], []),
        ("All of it\na,b\n1,2\n\n3,4\n", 2, [], ["read as: 1 line before the column names left out"]),
    ],
)
def test_no_cell_and_no_row_is_cut_in_silence(text, rows, bad, note, tmp_path):
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    source = open_table(tmp_path / "t.csv")
    assert len(read_table(source).texts) == rows
    assert [row.problem for row in source.bad] == bad
    assert source.notes == note


def test_what_is_left_out_of_excel_files_is_said(tmp_path):
    path = tmp_path / "t.xlsx"
    with pd.ExcelWriter(path) as book:
        pd.DataFrame([["All of it", None], ["a", "b"], [1, 2], [None, None], [3, 4]]).to_excel(
            book, sheet_name="cars", header=False, index=False
        )
        pd.DataFrame({"c": [1]}).to_excel(book, sheet_name="more")
    source = open_table(path)
    assert source.notes == [
        "read as: the first sheet of 2, 'cars'",
        "1 row before the column names left out",
        "1 rows without any cell left out",
    ]
    piece = read_table(source)
    assert (piece.texts.to_numpy().tolist(), piece.places) == ([["1", "2"], ["3", "4"]], [3, 5])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"\xef\xbb\xbfa,b\n1,\xe9\n",
            r"t\.csv begins with the byte-order mark of UTF-8, but not all of it is; save it again",
        ),
        (b"\xff\xfea\0,\0b\0\n\0x", r"t\.csv begins with the byte-order mark of UTF-16-LE, but not all of it is"),
        (b"\n\n", r"t\.csv has no columns; it needs a line of column names"),
        (b'a,b\n1,"2\n', r"t\.csv, line 2: a quote is opened and never closed; correct it"),
        (b"y,x\n" + b"1,2\n" * 12, r"t\.csv cannot be fitted:\nThe target 'y' has the same value in every row"),
        (b"y\n" + b"1" * 5000 + b"\n2\n", r"The drop parameter must be one of y, got 'z{80}…' instead"),
    ],
)
def test_every_refusal_names_the_file_or_the_option(content, message, tmp_path):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(TableError, match=message):
        read_training(tmp_path / "t.csv", "y", Names(drop=["z" * 5000] if "drop" in message else []))


def test_parquet_that_cannot_be_read_is_one_line_with_its_name(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"day": pa.array([2**31 - 1], pa.date32())}), path)
    with pytest.raises(TableError, match=r"^.*t\.parquet cannot be read to its end \(.*\)\.$"):
        read_table(open_table(path))
    pq.write_table(pa.table({"at": pa.array([1], pa.timestamp("us", "Mars/Base"))}), path)
    with pytest.raises(TableError, match=r"^.*t\.parquet cannot be read to its end \(.*(zone|Mars).*\)\.$"):
        read_table(open_table(path))


def test_cells_of_many_digits_are_understood_at_once():
    """The patterns of dates are tried on short cells only: they would take hours here."""
    frame = pd.DataFrame(
        {"a": ["1" * 100_000 + str(v) for v in range(3)], "b": ["1 " * 50_000, "x", "y"]}, dtype=object
    )
    assert Table.learn(frame).summary()[0] == "a: dropped, every value differs"
