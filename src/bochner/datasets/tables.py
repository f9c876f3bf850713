"""The data sets in files: the known properties of each, and the functions that read them."""

import csv
import gzip
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray, tuple[str, ...]]


def data_folder(folder: Path | None = None) -> Path:
    """The folder of the data files: ``folder``, else that in BOCHNER_DATA, else the cache folder of the user."""
    if folder is not None:
        return Path(folder)
    if variable := os.environ.get("BOCHNER_DATA"):
        return Path(variable).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "bochner"


def is_there(path: Path) -> bool:
    """Whether a file exists; False where its folder may not be read."""
    try:
        return path.is_file()
    except OSError:
        return False


@dataclass(frozen=True)
class Table:
    """A data set in a file, and its known properties.

    Attributes:
        file: Name of the file.
        rows: Number of rows that are loaded.
        inputs: Number of inputs that are loaded.
        classes: Number of classes, None for regression.
        read: Reads the file into inputs, targets and the inputs' names.
        content: SHA-256 of the loaded arrays, see `checks.content_sum`.
        sha256: SHA-256 of the file; None where the same arrays may be packed into different bytes.
    """

    file: str
    rows: int
    inputs: int
    classes: int | None
    read: Callable[[Path], Arrays]
    content: str
    sha256: str | None


class Sheet:
    """The cells of a CSV file, plain or gzipped, by column name.

    Args:
        path: The file.
        header: Names of the columns; by default the file's first line.
    """

    def __init__(self, path: Path, header: Sequence[str] | None = None) -> None:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
        if not text.endswith("\n"):
            raise ValueError("it ends in the middle of a line, so it was cut short")
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
        self.header = list(header) if header else lines.pop(0)
        for number, line in enumerate(lines, start=1 if header else 2):
            if len(line) != len(self.header):
                raise ValueError(f"line {number} has {len(line)} fields, not {len(self.header)}")
        self.lines = lines

    def column(self, name: str) -> list[str]:
        """The cells of one column."""
        if name not in self.header:
            raise ValueError(f"it has no column '{name}'")
        index = self.header.index(name)
        return [line[index] for line in self.lines]

    def numbers(self, names: Sequence[str]) -> np.ndarray:
        """Some columns as numbers, of shape (rows, columns)."""
        return np.stack([np.array(self.column(name), dtype=np.float64) for name in names], axis=1)

    def codes(self, name: str, values: Sequence[str]) -> np.ndarray:
        """One column as positions in a list of the values it may have."""
        code = {value: position for position, value in enumerate(values)}
        cells = self.column(name)
        if extra := sorted(set(cells) - set(values)):
            raise ValueError(f"column '{name}' must hold {', '.join(values)}, but holds {extra[0]!r}")
        return np.array([code[cell] for cell in cells], dtype=np.int64)


BOSTON = ("crim", "zn", "indus", "chas", "nox", "rm", "age", "dis", "tax", "ptratio", "black", "lstat")
CONCRETE = ("cement", "water", "coarse_agg", "fine_agg", "age")
AIRFOIL = ("Frequency", "AngleAttack", "ChordLength", "FreeStreamVelocity", "SuctionSide")
DIABETES = ("pregnancies", "glucose", "pressure", "skin", "insulin", "bmi", "pedigree", "age")
ADULT_NUMERIC = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
ADULT_NAMES = (
    *("workclass", "education", "marital-status", "occupation"),
    *("relationship", "race", "sex", "native-country"),
)
CELLS = tuple(f"{column}{row}" for column in "abcdefg" for row in range(1, 7))


def read_boston(path: Path) -> Arrays:
    """Boston housing without `rad`, which the paper leaves out."""
    sheet = Sheet(path)
    return sheet.numbers(BOSTON), sheet.numbers(["medv"])[:, 0], BOSTON


def read_concrete(path: Path) -> Arrays:
    """Concrete strength with the five inputs that the paper uses."""
    sheet = Sheet(path)
    return sheet.numbers(CONCRETE), sheet.numbers(["compressive_strength"])[:, 0], CONCRETE


def read_airfoil(path: Path) -> Arrays:
    """Airfoil self-noise."""
    sheet = Sheet(path)
    return sheet.numbers(AIRFOIL), sheet.numbers(["Sound"])[:, 0], AIRFOIL


def read_elevators(path: Path) -> Arrays:
    """Elevators: a MATLAB file with one array `data`, the target in its last column; the file's columns are centred."""
    from scipy.io import loadmat

    data = np.asarray(loadmat(path)["data"], dtype=np.float64)
    names = tuple(f"x{i}" for i in range(1, data.shape[1]))
    return np.ascontiguousarray(data[:, :-1]), data[:, -1].copy(), names


def read_diabetes(path: Path) -> Arrays:
    """Pima diabetes: no header, the class in the last column."""
    sheet = Sheet(path, header=[*DIABETES, "class"])
    return sheet.numbers(DIABETES), sheet.codes("class", ["0", "1"]), DIABETES


def read_adult(path: Path) -> Arrays:
    """Census income: complete rows only, names one-hot.

    The complete rows hold 98 distinct names in eight columns; with the six numeric columns that makes 104 inputs.
    The numeric columns come first, then each column of names with its names in alphabetical order.
    """
    sheet = Sheet(path)
    sheet.lines = [line for line in sheet.lines if "?" not in line]
    blocks, features = [sheet.numbers(ADULT_NUMERIC)], list(ADULT_NUMERIC)
    for name in ADULT_NAMES:
        values, codes = np.unique(sheet.column(name), return_inverse=True)
        blocks.append(np.eye(len(values))[codes])
        features += [f"{name}={value}" for value in values]
    return np.concatenate(blocks, axis=1), sheet.codes("income", ["<=50K", ">50K"]), tuple(features)


def read_connect4(path: Path) -> Arrays:
    """Connect-4 positions: blank, o and x as 0, 1 and 2; the classes are draw, loss and win of the first player."""
    sheet = Sheet(path)
    x = np.stack([sheet.codes(cell, ["b", "o", "x"]) for cell in CELLS], axis=1)
    return x.astype(np.float64), sheet.codes("class", ["draw", "loss", "win"]), CELLS


def read_covtype(path: Path) -> Arrays:
    """Forest cover: arrays `x` and `y`, classes 1 to 7 in the file and 0 to 6 here."""
    # Opened here, because NumPy leaves a file that is no archive open.
    with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
        x, y = file["x"], file["y"]
    return x.astype(np.float64), y.astype(np.int64) - 1, tuple(f"x{i}" for i in range(1, x.shape[1] + 1))


def read_banana(path: Path) -> Arrays:
    """The paper's toy classification task."""
    sheet = Sheet(path)
    return sheet.numbers(["x1", "x2"]), sheet.codes("class", ["0", "1"]), ("x1", "x2")


TABLES = {
    "boston": Table(
        *("boston.csv", 506, 12, None, read_boston),
        content="fd8caf7de96091d2050c92ed5b93b7be47d44c7125dba4473b166bc5f1f48f58",
        sha256="a73bba75b82b2ffea542da3752edb63ea583620842d09810f0780fa2e8da9011",
    ),
    "concrete": Table(
        *("concrete.csv", 1030, 5, None, read_concrete),
        content="2859b4eaaa5c8c80075cdbbc31f5b7c5a3ca7dcb2b660723aba2410e8677aa16",
        sha256="6700afd44bab16ad3386549d4b5317f78ae97305f78efe71d33dce12916e5077",
    ),
    "airfoil": Table(
        *("airfoil.csv", 1503, 5, None, read_airfoil),
        content="526af5350cb99bd67b2659873df2205a2ec27073b285be15e2ef546f36b7aaa0",
        sha256="382463f35698b1377ea679d82f5cee5cf49ec32437512eb44807d01544830340",
    ),
    "elevators": Table(
        *("elevators.mat", 16599, 18, None, read_elevators),
        content="367f4990922a1ec4b3e4735798b1168425c5ee8e800afa32fb1e12ec9082f0ba",
        sha256="57b7491a42deeabcc94e50fcf3d732d9b2f3311017f2a26a893247dd117ffc5a",
    ),
    "diabetes": Table(
        *("diabetes.csv", 768, 8, 2, read_diabetes),
        content="ed9281109a922479c047002a00e646846e2492bb2a98d86a07a756e92821553f",
        sha256="8a8fd1cbb005e607a84df83970fb9c71cb94c0640908b97fc230d91838b25239",
    ),
    "adult": Table(
        *("adult.csv.gz", 45222, 104, 2, read_adult),
        content="e17f33f7f97a014493fe8d10513fc995bfabdf8174ab3bc826a063228877a49f",
        sha256="ae0655a69eefdf7e0186431236d13982bc29cb8c1ab2dcc1bd68dae2ecec0d92",
    ),
    "connect-4": Table(
        *("connect-4.csv.gz", 67557, 42, 3, read_connect4),
        content="d6ea7d4c04e794ae8d1aea6661ae45907f2cdcdb2dcd60f7a192fdf2fc23579d",
        sha256="268079b6daf5b311cc0db2bab275ea4bbabc408870001d0d8261987b4bb33193",
    ),
    "covtype": Table(
        *("covtype.npz", 581012, 54, 7, read_covtype),
        content="d9295bceb7897bae22a36bb0da641ae98ab937ee6211aba140cc7eda72dec1c5",
        sha256=None,
    ),
    "banana": Table(
        *("banana.csv", 400, 2, 2, read_banana),
        content="aa4a2010e8ce416dfaaa72811a11c513df046f13f0e76746f567c54747e52e21",
        sha256="c35403d4a81f255cbbaa682c29c0612613ca7079b1a1b87a9f2eae2773830f1f",
    ),
}
