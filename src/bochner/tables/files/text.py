"""Tables in text files: the encoding and the delimiter are detected, and rows are read as lists of cells.

``csv.Sniffer`` is not used: it guesses from single characters, and takes letters for delimiters. ``pandas.read_csv`` is not used
either: it drops lines of blanks, and it stops at the first row with too many cells where we want a list of all such rows.
"""

import codecs
import contextlib
import csv
import gzip
import io
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from bochner.tables.errors import TableError

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
ENCODING_NAMES = {"utf-8": "", "cp1252": "Latin-1 (Windows-1252)", "latin-1": "Latin-1"}  # any other is UTF-16
BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
BYTE_ORDER_MARK = "\ufeff"  # the mark after decoding
SAMPLE_BYTES = 2**18  # bytes from which the encoding is detected
SWALLOWED_ROWS = 3  # lines within a cell that look like rows from which on a stray quote is suspected
SAMPLE_ROWS = 200  # rows from which the delimiter is detected
MIN_REGULAR_SHARE = 0.8  # smallest share of rows with the usual number of cells for a delimiter to be accepted

Row = tuple[int, list[str] | str]  # number of the row's last line; its cells, or what is wrong with it


@dataclass(frozen=True)
class Dialect:
    """How a text file is written.

    Attributes:
        encoding: Its name in Python.
        delimiter: The character between cells.
        marked: Whether the file begins with a byte-order mark.
        skipped: Number of rows before the column names, such as a title.
        trailing: Whether lines end with a delimiter after the last cell.
    """

    encoding: str = "utf-8"
    delimiter: str = ","
    marked: bool = False
    skipped: int = 0
    trailing: bool = False

    def describe(self) -> list[str]:
        """What is unusual about the file, for the user."""
        lines = "line" if self.skipped == 1 else "lines"
        parts = [ENCODING_NAMES.get(self.encoding, "UTF-16")]
        parts += [f"cells separated by {DELIMITERS[self.delimiter]}"] * (self.delimiter != ",")
        parts += [f"{self.skipped} {lines} before the column names left out"] * (self.skipped > 0)
        parts += ["the delimiter at the end of lines left out"] * self.trailing
        return [f"read as: {', '.join(filter(None, parts))}"] if any(parts) else []


def detect_dialect(path: Path) -> Dialect:
    """The dialect under which most of the first rows have the same number of cells, and the most cells.

    Raises:
        TableError: The file is not text.
    """
    encoding, marked = _detect_encoding(path)
    plain = Dialect(encoding, marked=marked)
    first = next(_read_lines(path, plain), "").lower().rstrip("\r\n")
    if first[:4] == "sep=" and first[4:] in DELIMITERS:  # a line by which Excel is told the delimiter
        return replace(plain, delimiter=first[4], skipped=1)
    best, best_score = plain, (False, 0, 0.0, 0)
    for delimiter in DELIMITERS:
        dialect = replace(plain, delimiter=delimiter)
        rows = _read_first_rows(path, dialect)
        if not rows:
            continue
        usual, times = max(Counter(map(len, rows)).items(), key=lambda item: (item[1], item[0]))
        # A title stands alone in its line: the names are in the first line with the usual number of cells.
        titles = next(number for number, row in enumerate(rows) if len(row) == usual)
        if any(len(row) > 1 and not row[0].startswith("#") for row in rows[:titles]):
            titles = 0
        share = times / (len(rows) - titles) if usual > 1 else 0.0
        score = (share >= MIN_REGULAR_SHARE, -titles, share, usual)
        if score > best_score:
            best, best_score = replace(dialect, skipped=titles), score
    return best


def read_header(path: Path, dialect: Dialect) -> tuple[list[str], Dialect]:
    """The column names as they are written, and the dialect with ``trailing``.

    Raises:
        TableError: The line of names cannot be read.
    """
    rows = (row for row in read_rows(path, dialect) if row[1])
    for _ in range(dialect.skipped):
        next(rows, None)
    _, header = next(rows, (1, []))
    if isinstance(header, str):
        raise TableError(f"{path}, line 1: {header}; correct it.")
    _, following = next(rows, (2, header))
    width = len(header)
    nameless = width > 1 and not header[-1].strip()
    if nameless and (len(following) != width or not following[-1].strip()):
        return header[:-1], replace(dialect, trailing=True)
    longer = isinstance(following, list) and len(following) == width + 1 and not following[-1].strip()
    return header, replace(dialect, trailing=longer)


def read_rows(path: Path, dialect: Dialect) -> Iterator[Row]:
    """All rows of a text file, with those of names and titles; an empty line is a row without cells.

    Below the names of several columns a line of blanks is an empty one.

    Raises:
        TableError: A quote is never closed, so that it is not known where rows end.
    """
    before, width = dialect.skipped + 1, 1  # titles and names that are still to come; cells in the line of names
    for line, cells in _read_records(path, dialect):
        if before and cells:
            before, width = before - 1, len(cells)
        blank = not before and width > 1 and len(cells) == 1 and not cells[0].strip()
        if isinstance(cells, list) and not before and _swallows_rows(cells, dialect.delimiter, width):
            lines = sum(cell.count("\n") for cell in cells)
            cells = f"a quote that was opened {lines} lines above seems to be closed here only"
        yield line, [] if blank else cells


def _swallows_rows(cells: list[str], delimiter: str, width: int) -> bool:
    """Whether a cell of several lines holds whole rows: lines with as many delimiters as the line of names."""
    for cell in cells if width > 1 else []:
        inner = cell.split("\n")[1:-1] if "\n" in cell else []
        if len(inner) >= SWALLOWED_ROWS and all(line.count(delimiter) == width - 1 for line in inner):
            return True
    return False


def _read_records(path: Path, dialect: Dialect) -> Iterator[Row]:
    """All rows of a text file as the ``csv`` module reads them, or what is wrong with them."""
    reader, last = csv.reader(_read_lines(path, dialect), delimiter=dialect.delimiter, strict=True), 0
    while True:
        try:
            cells: list[str] | str = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "expected after" not in str(error):  # an open quote has swallowed the rest of the file
                long = f" (or a cell has more than {csv.field_size_limit():,} characters)" * ("limit" in str(error))
                message = f"{path}, line {last + 1}: a quote is opened and never closed{long}; correct it."
                raise TableError(message) from error
            several = f"; a quote makes lines {last + 1} to {reader.line_num} one row" * (reader.line_num > last + 1)
            cells = f"text after a closing quote{several}"
        last = reader.line_num
        yield last, cells


def _read_lines(path: Path, dialect: Dialect) -> Iterator[str]:
    """The lines of a file without byte-order marks, of which some programs write two."""
    with _open_text(path, dialect.encoding) as file:
        yield file.readline().lstrip(BYTE_ORDER_MARK)
        yield from file


def _read_first_rows(path: Path, dialect: Dialect) -> list[list[str]]:
    """The first rows with cells under a dialect, which may be a wrong one."""
    rows: list[list[str]] = []
    with contextlib.suppress(TableError):  # a quote that is not closed under this dialect
        for _, cells in itertools.islice(read_rows(path, dialect), SAMPLE_ROWS):
            rows += [cells] if isinstance(cells, list) and cells else []
    return rows


def _detect_encoding(path: Path) -> tuple[str, bool]:
    """Encoding of a whole file and whether it begins with a byte-order mark.

    A file without a mark is UTF-8 or UTF-16 if all of it is, else Windows' or ISO's Latin-1. A file with a mark is what that says.
    """
    with _opened(path) as file:
        sample = file.read(SAMPLE_BYTES)
    marked = next((encoding for mark, encoding in BYTE_ORDER_MARKS if sample.startswith(mark)), None)
    for name in (_guess_unicode(sample), "cp1252", "latin-1") if marked is None else (marked,):
        try:
            _check_characters(path, name)
        except UnicodeDecodeError:
            continue
        return name, marked is not None
    assert marked is not None  # every byte is a letter of Latin-1
    raise TableError(
        f"{path} begins with the byte-order mark of {marked.upper()}, but not all of it is; save it again as UTF-8."
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where its name ends in .gz; a TableError where they are damaged."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield file  # pyright: ignore[reportReturnType]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TableError(f"{path} cannot be unpacked to its end ({error}).") from error


@contextlib.contextmanager
def _open_text(path: Path, encoding: str) -> Iterator[io.TextIOWrapper]:
    """The characters of a file, with its line ends as they are."""
    with _opened(path) as file:
        yield io.TextIOWrapper(file, encoding=encoding, newline="")


def _guess_unicode(sample: bytes) -> str:
    """UTF-8, or UTF-16 where every other byte is zero."""
    zeros = [sample[start::2].count(0) for start in (0, 1)]
    if max(zeros) > len(sample) / 4 and min(zeros) == 0:
        return "utf-16-be" if zeros[0] else "utf-16-le"
    return "utf-8"


def _check_characters(path: Path, encoding: str) -> None:
    """Raises a UnicodeDecodeError for another encoding, and a TableError for characters that text does not hold."""
    with _open_text(path, encoding) as file:
        while block := file.read(2**20):
            if "\0" in block:
                raise TableError(f"{path} is not a text file (it holds null characters).")
