"""Tables in files: text in any common dialect, Parquet and xlsx. Every cell is read as text.

The dialect of a text file (encoding, delimiter, lines before the column names) is detected from its beginning. ``csv.Sniffer`` is
not used: it guesses from single characters, and takes letters for delimiters. Nor is ``pandas.read_csv``: it drops lines of blanks,
and stops at the first line with too many cells where we want a list of all of them.
"""

import codecs
import contextlib
import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bochner.tables.errors import TEXT_SUFFIXES, TableError, check_file, listed, shortened

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
SAMPLE_BYTES = 2**18  # from which the dialect is detected
SAMPLE_ROWS = 200
ENOUGH_ROWS = 0.8  # share of rows with the usual number of cells under which a delimiter is believed
CHUNK_ROWS = 20_000  # rows in memory at a time
PANDAS_INDEX = "__index_level_"  # how pandas names an index in a Parquet file
MARK = "\ufeff"  # the byte-order mark, as a character
TEXT_TYPES = (
    "null",
    "bool",
    "int",
    "uint",
    "float",
    "double",
    "halffloat",
    "decimal",
    "string",
    "large_string",
    "date",
    "dictionary<values=string",
)


@dataclass(frozen=True)
class Dialect:
    """How a text file is written.

    Attributes:
        encoding: As Python calls it.
        delimiter: What stands between cells.
        marked: Whether the file begins with a byte-order mark.
        skipped: Lines before the column names.
    """

    encoding: str = "utf-8"
    delimiter: str = ","
    marked: bool = False
    skipped: int = 0


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        place: Where it is, such as "line 12".
        problem: Why.
        cells: What was read.
    """

    place: str
    problem: str
    cells: tuple[str, ...] = ()


@dataclass
class Piece:
    """Some rows of a table.

    Attributes:
        texts: Every cell as text.
        native: What Parquet holds, an Arrow table; None for other files.
        places: Where each row is in the file: numbers of lines, or of rows.
    """

    texts: pd.DataFrame
    places: list[int]
    native: Any = None


@dataclass
class Source:
    """A table in a file, after a look at its beginning.

    Attributes:
        path: The file.
        names: Names of its columns, without blanks around them.
        header: The names as they are written.
        dialect: How a text file is written; None for other files.
        notes: What was made of it, for the user.
        bad: Rows that cannot be used, as far as it has been read.
    """

    path: Path
    names: list[str]
    header: list[str]
    dialect: Dialect | None = None
    notes: list[str] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """What the places of rows count."""
        return "row" if self.dialect is None else "line"

    def pieces(self, rows: int | None = None) -> Iterator[Piece]:
        """The table from its beginning, some rows at a time; bad rows are put aside."""
        self.bad.clear()
        rows = rows or CHUNK_ROWS
        if self.dialect is not None:
            yield from _text_pieces(self, self.dialect, rows)
        elif self.path.suffix.lower() == ".parquet":
            yield from _parquet_pieces(self.path, self.names, rows)
        else:
            texts = _excel(self.path).iloc[1:].set_axis(self.names, axis=1)
            for start in range(0, len(texts), rows):
                part = texts.iloc[start : start + rows]
                yield Piece(part.reset_index(drop=True), [int(at) + 1 for at in part.index])

    def check_bad(self, remedy: str = "correct them, or leave them out with --skip-bad-rows") -> None:
        """Raises a TableError that names every bad row."""
        if self.bad:
            lines = [f"{row.place}: {row.problem}" for row in self.bad]
            count = f"{len(self.bad)} row{'s' * (len(self.bad) > 1)}"
            raise TableError(f"{self.path} has {count} that cannot be used; {remedy}:", *shortened(lines))


def open_table(path: Path) -> Source:
    """A table after a look at its beginning: names of columns and, for text, its dialect."""
    check_file(path)
    suffix = path.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        source = _open_text(path)
    elif suffix == ".parquet":
        header = [name for name in _parquet(path).schema_arrow.names if not name.startswith(PANDAS_INDEX)]
        source = Source(path, [name.strip() for name in header], header)
    else:
        header = [str(name) for name in _excel(path).iloc[0]]
        source = Source(path, [name.strip() for name in header], header)
    source.names = [name or f"unnamed {number}" for number, name in enumerate(source.names, start=1)]
    if all(re.fullmatch(r"[-+]?\d+([.,]\d+)?", name) for name in source.names):
        source.notes.append(
            "the column names are all numbers; if the first line is a row, put a line of names above it"
        )
    twice = [name for name, count in Counter(source.names).items() if count > 1]
    if twice:
        raise TableError(f"{path} has more than one column named {listed(twice)}; rename or remove the others.")
    return source


def read_table(source: Source) -> Piece:
    """A whole table; what is bad is in ``source.bad``."""
    pieces = list(source.pieces())
    if not pieces:
        if source.bad:
            source.check_bad()
        raise TableError(f"{source.path} has column names but no rows.")
    texts = pd.concat([piece.texts for piece in pieces], ignore_index=True)
    return Piece(texts, [place for piece in pieces for place in piece.places])


# ------------------------------------------------------------------ text


def _decoder(sample: bytes) -> tuple[str, bool]:
    """Encoding, and whether there is a byte-order mark, from the first bytes."""
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ):
        if sample.startswith(mark):
            return encoding, True
    zeros = [sample[start::2].count(0) for start in (0, 1)]
    if max(zeros) > len(sample) / 4 and min(zeros) == 0:
        return ("utf-16-be" if zeros[0] else "utf-16-le"), False
    return "utf-8", False


def _encoding(path: Path) -> tuple[str, bool]:
    """Encoding of a whole file: UTF-8 or UTF-16 if all of it is, else Windows' or ISO's Latin-1."""
    with path.open("rb") as file:
        encoding, marked = _decoder(file.read(SAMPLE_BYTES))
    for name in (encoding, "cp1252", "latin-1"):
        try:
            with path.open(encoding=name, newline="") as file:
                while block := file.read(2**20):
                    if "\0" in block:
                        raise TableError(f"{path} is not a text file (it holds null characters).")
            return name, marked and name == encoding
        except UnicodeDecodeError:
            continue
    raise AssertionError("every byte is a letter of Latin-1")


def _lines(path: Path, dialect: Dialect) -> Iterator[str]:
    """The lines of a file without its marks."""
    with path.open(encoding=dialect.encoding, newline="") as file:
        yield file.readline().lstrip(MARK)
        yield from file


def _rows(path: Path, dialect: Dialect) -> Iterator[tuple[int, list[str] | str]]:
    """Rows with the number of their last line: cells, or what is wrong. Empty lines are left out."""
    reader, last = csv.reader(_lines(path, dialect), delimiter=dialect.delimiter, strict=True), 0
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "expected after" not in str(error):  # an open quote has swallowed the rest of the file
                long = f" (or a cell has more than {csv.field_size_limit():,} characters)" * ("limit" in str(error))
                message = f"{path}, line {last + 1}: a quote is opened and never closed{long}; correct it."
                raise TableError(message) from error
            cells = "text after a closing quote"
        last = reader.line_num
        if cells:
            yield last, cells


def detect(path: Path) -> Dialect:
    """The dialect under which most of the first rows have the same number of cells, and the most cells."""
    encoding, marked = _encoding(path)
    plain = Dialect(encoding, marked=marked)
    first = next(_lines(path, plain), "").strip().lower()
    if first.startswith("sep=") and len(first) == 5 and first[4] in DELIMITERS:  # Excel's way of saying it
        return replace(plain, delimiter=first[4], skipped=1)
    best, score = plain, (False, 0, 0.0, 0)
    for delimiter in DELIMITERS:
        dialect = replace(plain, delimiter=delimiter)
        rows = _first_rows(path, dialect)
        counts = Counter(map(len, rows))
        if not counts:
            continue
        usual, times = max(counts.items(), key=lambda item: (item[1], item[0]))
        # A title stands alone in its line: the names are in the first line with the usual number of cells.
        titles = next(number for number, row in enumerate(rows) if len(row) == usual)
        if any(len(row) > 1 and not row[0].startswith("#") for row in rows[:titles]):
            titles = 0
        share = times / (len(rows) - titles) if usual > 1 else 0.0
        now = (share >= ENOUGH_ROWS, -titles, share, usual)
        if now > score:
            best, score = replace(dialect, skipped=titles), now
    return best


def _first_rows(path: Path, dialect: Dialect) -> list[list[str]]:
    """The first rows under a dialect, which may be a wrong one."""
    rows = []
    with contextlib.suppress(TableError):  # a quote that is not closed under this dialect
        for _, cells in itertools.islice(_rows(path, dialect), SAMPLE_ROWS):
            rows += [cells] if isinstance(cells, list) else []
    return rows


def _open_text(path: Path) -> Source:
    dialect = detect(path)
    rows = _rows(path, dialect)
    for _ in range(dialect.skipped):
        next(rows, None)
    _, header = next(rows, (1, []))
    if isinstance(header, str):
        raise TableError(f"{path}, line 1: {header}; correct it.")
    if len(header) > 1 and not header[-1].strip():
        _, following = next(rows, (2, header))
        if all(not cells[-1].strip() for cells in (header, following) if len(cells) == len(header)):
            header = header[:-1]  # every line ends with a delimiter
    source = Source(path, [name.strip() for name in header], header, dialect)
    unusual = {"utf-8": "", "cp1252": "Latin-1 (Windows-1252)", "latin-1": "Latin-1"}
    parts = [unusual.get(dialect.encoding, "UTF-16")]
    parts += [f"cells separated by {DELIMITERS[dialect.delimiter]}" if dialect.delimiter != "," else ""]
    parts += [
        f"{dialect.skipped} line{'s' * (dialect.skipped > 1)} before the column names left out"
        if dialect.skipped
        else ""
    ]
    if any(parts):
        source.notes.append(f"read as: {', '.join(part for part in parts if part)}")
    return source


def _text_pieces(source: Source, dialect: Dialect, size: int) -> Iterator[Piece]:
    width = len(source.names)
    rows: list[list[str]] = []
    places: list[int] = []
    for number, (line, cells) in enumerate(_rows(source.path, dialect)):
        if number <= dialect.skipped:
            continue
        if isinstance(cells, list) and len(cells) == width + 1 and not cells[-1].strip():
            cells = cells[:-1]  # a delimiter at the end of the line
        if isinstance(cells, str) or len(cells) != width:
            problem = cells if isinstance(cells, str) else f"{len(cells)} cells where the first line names {width}"
            source.bad.append(BadRow(f"line {line}", problem, () if isinstance(cells, str) else tuple(cells)))
            continue
        rows.append(cells)
        places.append(line)
        if len(rows) == size:
            yield Piece(_frame(rows, source.names), places)
            rows, places = [], []
    if rows:
        yield Piece(_frame(rows, source.names), places)


def _frame(rows: list[list[str]], names: list[str]) -> pd.DataFrame:
    columns = zip(*rows, strict=True)
    return pd.DataFrame({name: list(cells) for name, cells in zip(names, columns, strict=True)}, dtype=object)


# ------------------------------------------------------------------ Parquet and xlsx


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise TableError(
            f"Reading {path} needs pyarrow: install bochner with the extra 'parquet', or use CSV."
        ) from error
    try:
        return pq.ParquetFile(path)
    except Exception as error:
        raise TableError(f"{path} is not a Parquet file that can be read ({_one_line(error)}).") from error


def _parquet_pieces(path: Path, names: list[str], rows: int) -> Iterator[Piece]:
    import pyarrow as pa

    start = 0
    try:
        for batch in _parquet(path).iter_batches(batch_size=rows):
            table = pa.Table.from_batches([batch])
            table = table.select([name for name in table.column_names if not name.startswith(PANDAS_INDEX)])
            columns = {
                name: [as_text(value) for value in values.to_pylist()]
                for name, values in zip(names, table.columns, strict=True)
            }
            yield Piece(pd.DataFrame(columns, dtype=object), list(range(start + 1, start + 1 + len(batch))), table)
            start += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"{path} cannot be read to its end ({_one_line(error)}).") from error


def as_text(value: Any) -> str:
    """A cell as text, from which the same value can be read again; empty where it is missing."""
    if isinstance(value, str):
        return value
    missing = pd.isna(value)
    if isinstance(missing, bool | np.bool_) and missing:  # of a cell that is an array, it is an array
        return ""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def has_text(kind: Any) -> bool:
    """Whether values of an Arrow type are told by their text: numbers, texts, truths, dates and times."""
    return str(kind).startswith((*TEXT_TYPES, "timestamp", "time"))


def _excel(path: Path) -> pd.DataFrame:
    """The first sheet as text, its first row being the names."""
    try:
        import openpyxl  # noqa: F401  # pyright: ignore[reportMissingModuleSource]
    except ImportError as error:
        raise TableError(
            f"Reading {path} needs openpyxl: install bochner with the extra 'xlsx', or save it as CSV."
        ) from error
    try:
        frame = pd.read_excel(io.BytesIO(path.read_bytes()), header=None, dtype=object, keep_default_na=False)
    except Exception as error:
        raise TableError(f"{path} is not an Excel file that can be read ({_one_line(error)}).") from error
    texts = frame.map(as_text)
    texts = texts.loc[:, (texts != "").any(axis=0)]
    filled = (texts != "").sum(axis=1)
    texts, filled = texts[filled > 0], filled[filled > 0]
    if texts.empty:
        raise TableError(f"{path} is empty; it needs a line of column names and at least one row.")
    first = int((filled > 1).to_numpy().argmax()) if texts.shape[1] > 1 else 0  # a title stands alone in its row
    return texts.iloc[first:]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
