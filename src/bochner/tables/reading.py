"""Tables in files as they are read: every cell as text, some rows at a time, and rows that cannot be used put aside."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Optional

import pandas as pd

from bochner.tables import binary_files
from bochner.tables.errors import TEXT_SUFFIXES, TableError, check_file, listed, shortened
from bochner.tables.text_files import Dialect, detect_dialect, read_header, read_rows

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 20_000  # rows in memory at a time
NUMBER_AS_NAME = re.compile(r"[-+]?\d+([.,]\d+)?")


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        place: Where it is, such as "line 12".
        problem: Why it cannot be used.
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
        places: Number of the line or row at which each row stands in the file.
        native: The rows as Parquet holds them; None for other files.
    """

    texts: pd.DataFrame
    places: list[int]
    native: Optional["pa.Table"] = None


@dataclass
class Source:
    """A table in a file, of which the beginning has been read.

    Attributes:
        path: The file.
        header: The column names as they are written.
        names: The column names without blanks around them; a column without a name has got one.
        dialect: How a text file is written; None for other files.
        notes: What was made of the file, for the user.
        bad: Rows that cannot be used, of those that have been read.
    """

    path: Path
    header: list[str]
    names: list[str] = field(init=False)
    dialect: Dialect | None = None
    notes: list[str] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        stripped = [name.strip() for name in self.header]
        self.names = [name or f"unnamed {number}" for number, name in enumerate(stripped, start=1)]

    @property
    def unit(self) -> str:
        """What the places of rows count: "line" or "row"."""
        return "row" if self.dialect is None else "line"

    def pieces(self, rows: int | None = None) -> Iterator[Piece]:
        """The table from its beginning, some rows at a time; bad rows are put aside."""
        self.bad.clear()
        rows = rows or CHUNK_ROWS
        if self.dialect is not None:
            yield from _read_text_pieces(self, self.dialect, rows)
        elif self.path.suffix.lower() == ".parquet":
            start = 1
            for texts, native in binary_files.read_parquet_batches(self.path, self.names, rows):
                yield Piece(texts, list(range(start, start + len(texts))), native)
                start += len(texts)
        else:
            texts = binary_files.read_excel(self.path)[0].iloc[1:].set_axis(self.names, axis=1)
            for start in range(0, len(texts), rows):
                part = texts.iloc[start : start + rows]
                yield Piece(part.reset_index(drop=True), [int(row) + 1 for row in part.index])

    def check_bad(self, remedy: str = "correct them, or leave them out with --skip-bad-rows") -> None:
        """Raises a TableError that names every bad row."""
        if self.bad:
            lines = [f"{row.place}: {row.problem}" for row in self.bad]
            count = f"{len(self.bad)} row{'s' * (len(self.bad) > 1)}"
            raise TableError(f"{self.path} has {count} that cannot be used; {remedy}:", *shortened(lines))

    def raise_empty(self) -> NoReturn:
        """Raises a TableError for a table without a row that can be used."""
        self.check_bad("no other row is there; correct them")
        raise TableError(f"{self.path} has column names but no rows.")


def open_table(path: Path) -> Source:
    """A table of which the beginning has been read: the column names and, for text, the dialect.

    Raises:
        TableError: The file is not a table.
    """
    check_file(path)
    suffix = path.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        header, dialect = read_header(path, detect_dialect(path))
        source = Source(path, header, dialect, dialect.describe())
    elif suffix == ".parquet":
        source = Source(path, binary_files.read_parquet_names(path))
    else:
        texts, notes = binary_files.read_excel(path)
        source = Source(path, list(texts.iloc[0]), notes=notes)
    if not source.names:
        raise TableError(f"{path} has no columns; it needs a line of column names and at least one row.")
    if all(NUMBER_AS_NAME.fullmatch(name) for name in source.names):
        source.notes.append(
            "the column names are all numbers; if the first line is a row, put a line of names above it"
        )
    twice = [name for name, count in Counter(source.names).items() if count > 1]
    if twice:
        raise TableError(f"{path} has more than one column named {listed(twice)}; rename or remove the others.")
    return source


def read_table(source: Source) -> Piece:
    """A whole table; rows that cannot be used are in ``source.bad``."""
    pieces = list(source.pieces())
    if not any(piece.places for piece in pieces):
        source.raise_empty()
    texts = pd.concat([piece.texts for piece in pieces], ignore_index=True)
    return Piece(texts, [place for piece in pieces for place in piece.places])


def _read_text_pieces(source: Source, dialect: Dialect, size: int) -> Iterator[Piece]:
    """The rows of a text file below the names, some at a time."""
    rows: list[list[str]] = []
    places: list[int] = []
    for line, cells in _read_table_rows(source, dialect):
        if problem := _find_problem(cells, len(source.names)):
            source.bad.append(BadRow(f"line {line}", problem, () if isinstance(cells, str) else tuple(cells)))
            continue
        assert isinstance(cells, list)
        rows.append(cells)
        places.append(line)
        if len(rows) == size:
            yield Piece(_as_frame(rows, source.names), places)
            rows, places = [], []
    if rows:
        yield Piece(_as_frame(rows, source.names), places)


def _read_table_rows(source: Source, dialect: Dialect) -> Iterator[tuple[int, list[str] | str]]:
    """The rows below the names. In a table of one column an empty line between rows is an empty cell."""
    width, empty_lines = len(source.names), []
    before = dialect.skipped + 1  # titles and names, which are still to come
    for line, cells in read_rows(source.path, dialect):
        if not cells:
            empty_lines.append(line)
            continue
        if before:
            before -= 1
        else:
            if width == 1:
                yield from ((number, [""]) for number in empty_lines)
            cut = dialect.trailing and len(cells) == width + 1 and not cells[-1].strip()
            yield line, cells[:-1] if cut else cells
        empty_lines = []


def _find_problem(cells: list[str] | str, width: int) -> str:
    """Why a row cannot be used; empty where it can."""
    if isinstance(cells, str):
        return cells
    return "" if len(cells) == width else f"{len(cells)} cells where the first line names {width}"


def _as_frame(rows: list[list[str]], names: list[str]) -> pd.DataFrame:
    columns = zip(*rows, strict=True)
    return pd.DataFrame({name: list(cells) for name, cells in zip(names, columns, strict=True)}, dtype=object)
