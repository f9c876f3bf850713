"""Data sets: reading, folds, checks of files, and fetching with OpenML played by a function."""

import functools
import gzip
import os
import random
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import sklearn.datasets
from sklearn.utils import Bunch
from typer.testing import CliRunner

from bochner.cli import app
from bochner.datasets import NAMES, check, data_folder, fetch, folds, load
from bochner.datasets.builtin import BUILT_IN
from bochner.datasets.checks import content_sum
from bochner.datasets.tables import TABLES, Sheet, read_adult, read_boston, read_connect4, read_diabetes

SHARED = Path(__file__).parents[2] / "shared" / "data" / "tables"
SMALL = [name for name in TABLES if name != "covtype"]


def unpack_covtype(packed: Path, target: Path) -> None:
    """The shared copy holds area and soil as one column each; our file has them one-hot."""
    columns = np.load(packed)["columns"]
    area, soil = columns[10][:, None] == np.arange(1, 5), columns[11][:, None] == np.arange(1, 41)
    x = np.concatenate([columns[:10].T, area, soil], axis=1).astype(np.int16)
    np.savez(target, x=x, y=columns[12].astype(np.int8))


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A folder with all real files."""
    if given := os.environ.get("BOCHNER_DATA"):
        return Path(given)
    if not SHARED.is_dir():
        pytest.skip(f"needs the real files: set BOCHNER_DATA, or have {SHARED}")
    folder = tmp_path_factory.mktemp("data")
    for name in SMALL:
        shutil.copyfile(SHARED / TABLES[name].file, folder / TABLES[name].file)
    unpack_covtype(SHARED / "covtype.npz", folder / "covtype.npz")
    return folder


@pytest.fixture(scope="session")
def loaded(real):
    """Loads a real set, each one once."""
    return functools.cache(lambda name: load(name, real))


@pytest.fixture
def copy(real, tmp_path):
    """Copies one real file into a folder of the test's own, and gives its path."""

    def copied(name):
        return Path(shutil.copyfile(real / TABLES[name].file, tmp_path / TABLES[name].file))

    return copied


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x01
    path.write_bytes(data)


# Reading


def test_boston_drops_rad_and_the_index(tmp_path):
    path = tmp_path / "boston.csv"
    names = "crim zn indus chas nox rm age dis rad tax ptratio black lstat medv".split()
    path.write_text(",".join(['""', *names]) + "\n" + ",".join(['"1"', *map(str, range(14))]) + "\n")
    x, y, features = read_boston(path)
    np.testing.assert_array_equal(x, [[0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]])
    np.testing.assert_array_equal(y, [13])
    assert features == tuple(name for name in names if name not in ("rad", "medv"))


def test_adult_keeps_complete_rows_and_numbers_and_makes_names_one_hot(tmp_path):
    path = tmp_path / "adult.csv.gz"
    header = (
        "age,workclass,fnlwgt,education,education-num,marital-status,occupation,relationship,race,sex,"
        "capital-gain,capital-loss,hours-per-week,native-country,income,split"
    )
    lines = [
        "39,State-gov,7,A,13,N,C,F,W,Male,2174,0,40,US,<=50K,train",
        "50,?,8,A,13,N,C,F,W,Male,0,0,13,US,<=50K,train",
        "28,Private,9,A,13,N,C,F,W,Female,0,5,41,US,>50K,test",
    ]
    path.write_bytes(gzip.compress("\n".join([header, *lines, ""]).encode()))
    x, y, features = read_adult(path)
    expected = [
        [39, 7, 13, 2174, 0, 40, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1],
        [28, 9, 13, 0, 5, 41, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1],
    ]
    np.testing.assert_array_equal(x, expected)
    np.testing.assert_array_equal(y, [0, 1])
    assert features[6:8] == ("workclass=Private", "workclass=State-gov")
    assert not any("split" in feature or "income" in feature for feature in features)


def test_connect4_codes_cells_and_classes(tmp_path):
    path = tmp_path / "connect-4.csv.gz"
    cells = [f"{column}{row}" for column in "abcdefg" for row in range(1, 7)]
    text = ",".join([*cells, "class"]) + "\n" + ",".join([*"box", *"b" * 39, "win"]) + "\n"
    path.write_bytes(gzip.compress(text.encode()))
    x, y, features = read_connect4(path)
    np.testing.assert_array_equal(x[0], [0, 1, 2] + [0] * 39)
    assert (y[0], y.dtype, features[:7]) == (2, np.int64, ("a1", "a2", "a3", "a4", "a5", "a6", "b1"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("6,148,72,35,0,33.6,0.627,50,1\n1,85,66\n", "line 2 has 3 fields, not 9"),
        ("6,148,72,35,0,33.6,0.627,50,1", "middle of a line"),
        ("6,148,72,35,0,33.6,0.627,50,7\n", "column 'class' must hold 0, 1, but holds '7'"),
        ("6,148,72,35,0,33.6,0.627,old,1\n", "could not convert string to float"),
    ],
)
def test_a_damaged_table_is_described(tmp_path, text, match):
    path = tmp_path / "diabetes.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        read_diabetes(path)


def test_a_missing_column_is_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="it has no column 'c'"):
        Sheet(path).numbers(["a", "c"])


@pytest.mark.parametrize("name", NAMES)
def test_every_set_loads_as_described(name, request):
    data = load(name) if name in BUILT_IN else request.getfixturevalue("loaded")(name)
    known = {**TABLES, **BUILT_IN}[name]
    assert data.name == name
    assert data.x.shape == (known.rows, known.inputs)
    assert data.y.shape == (known.rows,)
    assert data.classes == known.classes
    assert data.x.dtype == np.float64
    assert data.y.dtype == (np.float64 if data.classes is None else np.int64)
    assert len(set(data.features)) == known.inputs
    assert np.isfinite(data.x).all()
    if data.classes is not None:
        np.testing.assert_array_equal(np.unique(data.y), np.arange(data.classes))


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("diabetes", [500, 268]),
        ("adult", [34014, 11208]),
        ("connect-4", [6449, 16635, 44473]),
        ("covtype", [211840, 283301, 35754, 2747, 9493, 17367, 20510]),
    ],
)
def test_class_counts_are_the_published_ones(name, counts, loaded):
    np.testing.assert_array_equal(np.bincount(loaded(name).y), counts)


def test_known_values(loaded):
    boston = loaded("boston")
    assert boston.x[0].tolist() == [0.00632, 18, 2.31, 0, 0.538, 6.575, 65.2, 4.09, 296, 15.3, 396.9, 4.98]
    assert boston.y[:2].tolist() == [24, 21.6]
    adult = loaded("adult")
    assert adult.features[:6] == ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
    assert adult.x[0, :6].tolist() == [39, 77516, 13, 2174, 0, 40]
    np.testing.assert_array_equal(adult.x[:, 6:].sum(axis=1), 8)  # one of each of the eight columns of names


def test_toy_is_a_step_with_a_gap():
    data = load("toy-1d")
    x = data.x[:, 0]
    assert (np.abs(x).min(), np.abs(x).max()) == (0.25, 1.25)
    np.testing.assert_allclose(data.y, -np.sign(x), atol=0.2)  # four standard deviations of the noise
    assert (data.y != -np.sign(x)).all()
    np.testing.assert_array_equal(data.y, load("toy-1d").y)


# Finding


def test_the_folder_is_the_argument_then_the_variable_then_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BOCHNER_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder(tmp_path) == tmp_path
    assert data_folder() == tmp_path / "variable"
    monkeypatch.delenv("BOCHNER_DATA")
    assert data_folder() == tmp_path / "cache" / "bochner"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == Path.home() / ".cache" / "bochner"


def test_a_missing_file_says_where_and_what_to_do(tmp_path):
    match = rf"boston.csv .*'boston' is not in {tmp_path}.*`bochner data fetch boston`.*BOCHNER_DATA"
    with pytest.raises(FileNotFoundError, match=match):
        load("boston", tmp_path)


@pytest.mark.parametrize("function", [load, check, fetch])
def test_an_unknown_name_gets_the_nearest(function, tmp_path):
    with pytest.raises(ValueError, match=r"got 'conect4' instead\. Did you mean 'connect-4'\?"):
        function("conect4", tmp_path)


# Folds


@pytest.mark.parametrize("num_rows", [506, 1030, 20])
def test_folds_are_the_papers(num_rows):
    """The same order as the paper's code: seed the global generator, shuffle an array of row numbers."""
    state = random.getstate()
    random.seed(1)
    order = np.arange(num_rows)
    random.shuffle(order)
    random.setstate(state)
    size = num_rows // 10
    parts = folds(num_rows)
    assert len(parts) == 10
    for s, (train, test) in enumerate(parts):
        np.testing.assert_array_equal(test, order[s * size : (s + 1) * size])
        np.testing.assert_array_equal(train, np.delete(order, np.arange(s * size, (s + 1) * size)))
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(num_rows))
    assert random.getstate() == state


@pytest.mark.parametrize("count", [1, 21])
def test_folds_refuse_a_count_that_leaves_a_part_empty(count):
    with pytest.raises(ValueError, match=rf"from 2 to the number of rows, got count={count} and num_rows=20"):
        folds(20, count)


# Damage


@pytest.mark.parametrize("name", SMALL)
def test_any_flipped_byte_is_caught(name, copy, tmp_path):
    path = copy(name)
    assert check(name, tmp_path).status == "ok"
    size = path.stat().st_size
    for position in (0, 5, size // 3, size // 2, size - 1):
        flip(path, position)
        found = check(name, tmp_path)
        assert found.status == "bad"
        assert str(path) in found.message
        assert f"bochner data fetch {name}" in found.message
        flip(path, position)
    assert check(name, tmp_path).status == "ok"


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_refused_with_a_remedy(name, keep, copy, tmp_path):
    path = copy(name)
    os.truncate(path, int(keep * path.stat().st_size))
    with pytest.raises(
        ValueError, match=rf"{path} cannot be read as the data set '{name}'.*`bochner data check {name}`"
    ):
        load(name, tmp_path)
    assert check(name, tmp_path).status == "bad"


def test_a_file_cut_between_lines_is_refused(copy, tmp_path):
    path = copy("banana")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="it holds 399 rows of 2 inputs and 399 targets, not 400 of 2"):
        load("banana", tmp_path)


def test_nan_and_absent_classes_are_refused(copy, tmp_path):
    path = copy("banana")
    text = path.read_text()
    path.write_text(text.replace("0.65890573", "nan"))
    with pytest.raises(ValueError, match="NaN or infinite"):
        load("banana", tmp_path)
    path.write_text(text.replace(",1\n", ",0\n"))
    with pytest.raises(ValueError, match="does not hold the 2 classes"):
        load("banana", tmp_path)


def test_covtype_is_known_by_its_content(real, tmp_path):
    """Its bytes depend on the compressor, so only the arrays count; one changed entry is caught."""
    assert check("covtype", real).status == "ok"
    with np.load(real / "covtype.npz") as file:
        x, y = file["x"], file["y"]
    x[300_000, 7] += 1
    np.savez(tmp_path / "covtype.npz", x=x, y=y)
    found = check("covtype", tmp_path)
    assert (found.status, "known SHA-256" in found.message) == ("bad", True)


def test_content_sum_sees_values_shapes_and_types_but_not_the_sign_of_zero():
    x, y = np.array([[0.0, 1.0]]), np.array([1])
    assert content_sum(x, y) == content_sum(np.asfortranarray([[-0.0, 1.0]]), y)
    others = [(x.T, y), (np.nextafter(x, 2), y), (x, y.astype(np.float64)), (x, y + 1)]
    assert len({content_sum(*pair) for pair in [(x, y), *others]}) == 5


# Fetching


def play_openml(monkeypatch, answer):
    """Lets fetch_openml give an answer, or raise it, and notes what it was asked for."""
    asked = []

    def fetch_openml(**options):
        asked.append(options["data_id"])
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch_openml)
    return asked


def diabetes_bunch(x, y):
    names = ["preg", "plas", "pres", "skin", "insu", "mass", "pedi", "age"]
    target = np.array(["tested_negative", "tested_positive"], dtype=object)[y]
    return Bunch(data=x, target=target, feature_names=names, categories={})


def test_fetch_writes_a_file_that_loads_as_the_same_arrays(real, tmp_path, monkeypatch):
    data = load("diabetes", real)
    asked = play_openml(monkeypatch, diabetes_bunch(data.x, data.y))
    folder = tmp_path / "new" / "folder"
    assert fetch("diabetes", folder).status == "ok"
    np.testing.assert_array_equal(load("diabetes", folder).x, data.x)
    assert sorted(path.name for path in folder.iterdir()) == ["diabetes.csv", "diabetes.csv.sha256"]
    assert fetch("diabetes", folder).status == "ok"
    assert asked == [37]  # the second time there was nothing to do


def test_other_rows_are_reported_and_later_damage_is_told_apart(tmp_path, monkeypatch):
    x = np.arange(768 * 8.0).reshape(768, 8) / 7
    play_openml(monkeypatch, diabetes_bunch(x, np.arange(768) % 2))
    found = fetch("diabetes", tmp_path)
    assert (found.status, "not the paper's" in found.message) == ("differs", True)
    np.testing.assert_array_equal(load("diabetes", tmp_path).x, x)
    flip(tmp_path / "diabetes.csv", 1000)
    assert check("diabetes", tmp_path).status == "bad"


def test_fetch_decodes_names_and_missing_values(real, tmp_path, monkeypatch):
    """The real table as scikit-learn would hand it over: names as codes, NaN where one is missing."""
    sheet = Sheet(real / "adult.csv.gz")
    names, categories, columns = sheet.header[:14], {}, []
    for name in names:
        cells = sheet.column(name)
        if name in (
            "workclass",
            "education",
            "marital-status",
            "occupation",
            "relationship",
            "race",
            "sex",
            "native-country",
        ):
            categories[name] = sorted(set(cells) - {"?"})
            code = {value: float(i) for i, value in enumerate(categories[name])} | {"?": np.nan}
            columns.append([code[cell] for cell in cells])
        else:
            columns.append([float(cell) for cell in cells])
    target = np.array(sheet.column("income"), dtype=object)
    answer = Bunch(data=np.array(columns).T, target=target, feature_names=names, categories=categories)
    play_openml(monkeypatch, answer)
    assert fetch("adult", tmp_path).status == "ok"


@pytest.mark.parametrize("name", ["boston", "concrete", "airfoil", "elevators", "connect-4"])
def test_fetch_writes_every_format(name, tmp_path, monkeypatch):
    table = replace(TABLES[name], rows=min(TABLES[name].rows, 600))
    monkeypatch.setitem(TABLES, name, table)
    width = {"boston": 13, "concrete": 8}.get(name, table.inputs)
    names, categories = [f"v{i}" for i in range(width)], {}
    if name == "connect-4":
        categories = {key: ["0", "1", "2"] for key in names}
        x = np.indices((table.rows, width)).sum(axis=0) % 3.0
        target = np.array(["0", "1", "2"], dtype=object)[np.arange(table.rows) % 3]
    else:
        x = np.arange(table.rows * width, dtype=np.float64).reshape(table.rows, width)
        target = np.arange(table.rows) / 8
    play_openml(monkeypatch, Bunch(data=x, target=target, feature_names=names, categories=categories))
    assert fetch(name, tmp_path).status == "differs"
    data = load(name, tmp_path)
    if name == "elevators":
        np.testing.assert_allclose(data.x, x - x.mean(axis=0), rtol=1e-12)
    elif name == "boston":
        np.testing.assert_array_equal(data.x, np.delete(x, 8, axis=1))
    elif name == "concrete":
        np.testing.assert_array_equal(data.x, x[:, [0, 3, 5, 6, 7]])
    else:
        np.testing.assert_array_equal(data.x, x)
    np.testing.assert_allclose(np.diff(data.y)[:2], np.diff(target.astype(np.float64))[:2])


def test_fetch_writes_covtype_arrays(loaded, tmp_path, monkeypatch):
    data = loaded("covtype")
    names = [f"v{i}" for i in range(54)]
    target = np.array([str(i) for i in range(1, 8)], dtype=object)[data.y]
    categories = {name: ["0", "1"] for name in names[10:]}
    play_openml(monkeypatch, Bunch(data=data.x, target=target, feature_names=names, categories=categories))
    assert fetch("covtype", tmp_path).status == "ok"


def test_no_connection_is_said_in_a_sentence(tmp_path, monkeypatch):
    play_openml(monkeypatch, URLError("Name or service not known"))
    match = rf"'boston' could not be fetched from OpenML .*not known.*put boston.csv into {tmp_path} by hand"
    with pytest.raises(ConnectionError, match=match):
        fetch("boston", tmp_path)
    assert not list(tmp_path.iterdir())


def test_scikit_learn_takes_the_options_it_is_given(tmp_path, monkeypatch):
    """The real function up to the network, which is not there: a wrong option would be refused before."""

    def no_network(*_args, **_options):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(ConnectionError, match=r"OpenML \(<urlopen error .*no network in tests"):
        fetch("boston", tmp_path)


def test_a_set_that_openml_lacks_is_to_be_put_by_hand(tmp_path):
    with pytest.raises(
        ValueError, match=rf"'banana' is not fetched from OpenML; put banana.csv into {tmp_path} by hand"
    ):
        fetch("banana", tmp_path)


def test_a_wrong_answer_is_refused_and_the_old_file_stays(tmp_path, monkeypatch):
    old = tmp_path / "diabetes.csv"
    old.write_text("old\n")
    play_openml(monkeypatch, diabetes_bunch(np.zeros((3, 8)), np.array([0, 1, 0])))
    with pytest.raises(ValueError, match="What OpenML sent is not the data set 'diabetes': it holds 3 rows"):
        fetch("diabetes", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old\n"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    play_openml(monkeypatch, diabetes_bunch(np.zeros((768, 8)), np.arange(768) % 2))
    with pytest.raises(OSError, match=r"file/sub cannot be written to \(Not a directory\)"):
        fetch("diabetes", tmp_path / "file" / "sub")


# Command line


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """Runs `bochner data ...` on a folder of the test's own."""
    monkeypatch.setenv("BOCHNER_DATA", str(tmp_path))
    return lambda *words: CliRunner().invoke(app, ["data", *words])


def test_list_shows_every_set(cli, tmp_path):
    (tmp_path / "banana.csv").touch()
    result = cli("list")
    assert result.exit_code == 0
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert all(name in lines for name in NAMES)
    assert lines["adult"][:6] == ["adult", "classification", "45222", "104", "2", "missing"]
    assert lines["toy-1d"] == ["toy-1d", "regression", "20", "1", "built", "in"]
    assert lines["banana"][-1] == "banana.csv"
    assert f"Files are looked for in {tmp_path};" in result.stdout


def test_check_fails_for_bad_files_and_for_named_missing_ones(cli, copy):
    path = copy("banana")
    assert cli("check").exit_code == 0
    assert cli("check", "banana", "iris").exit_code == 0
    missing = cli("check", "banana", "boston")
    assert (missing.exit_code, "boston.csv is not in" in missing.stdout) == (1, True)
    flip(path, 100)
    bad = cli("check")
    assert (bad.exit_code, "bad" in bad.stdout) == (1, True)


def test_fetch_prints_one_line_each(cli, monkeypatch):
    play_openml(monkeypatch, URLError("no route"))
    result = cli("fetch", "iris", "boston", "banana")
    assert result.exit_code == 1
    lines = [line.split()[:2] for line in result.stdout.splitlines()]
    assert lines == [["iris", "built"], ["boston", "failed"], ["banana", "failed"]]


@pytest.mark.parametrize("command", ["check", "fetch"])
def test_a_misspelt_name_is_a_usage_error(cli, command):
    result = cli(command, "bostn")
    assert (result.exit_code, "'boston'" in result.output) == (2, True)
