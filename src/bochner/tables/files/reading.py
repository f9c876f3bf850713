"""Tables in files as they are read: every cell as text, some rows at a time, and rows that cannot be used put aside."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Optional

import pandas as pd

from bochner.errors import listed, shortened
from bochner.tables.errors import TableError
from bochner.tables.files import binary
from bochner.tables.files.paths import ARROW_SUFFIXES, files_of, is_text_file, suffix_of
from bochner.tables.files.text import Dialect, detect_dialect, read_header, read_rows

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 20_000  # rows in memory at a time
MAX_LISTED_ROWS = 100_000  # rows that cannot be used of which place and cells are kept
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


class BadRows:
    """Rows that cannot be used, in their order. Beyond the first ``MAX_LISTED_ROWS`` they are only counted, to bound the memory."""

    def __init__(self, rows: "Iterable[BadRow] | BadRows" = ()) -> None:
        self._listed: list[BadRow] = []
        self._count = 0
        self.extend(rows)

    def __len__(self) -> int:
        """Number of rows, listed or not."""
        return self._count

    def __iter__(self) -> Iterator[BadRow]:
        """The rows that are listed."""
        return iter(self._listed)

    @property
    def unlisted(self) -> int:
        """Number of rows that are only counted."""
        return self._count - len(self._listed)

    def append(self, row: BadRow) -> None:
        """Adds a row."""
        self.extend([row])

    def extend(self, rows: "Iterable[BadRow] | BadRows") -> None:
        """Adds rows."""
        listed = list(rows)
        self._count += len(rows) if isinstance(rows, BadRows) else len(listed)
        self._listed += listed[: MAX_LISTED_ROWS - len(self._listed)]

    def clear(self) -> None:
        """Forgets all rows."""
        self._listed, self._count = [], 0


@dataclass
class Piece:
    """Some rows of a table.

    Attributes:
        frame: The rows in the types that the file has: every cell of a text file is text.
        places: The line or row at which each row stands in the file, after the file's name where the table has several files.
        native: The rows as Arrow holds them, with columns that pandas would call its index; None for other files.
    """

    frame: pd.DataFrame
    places: Sequence[int | str]
    native: Optional["pa.Table"] = None

    @cached_property
    def texts(self) -> pd.DataFrame:
        """Every cell as text."""
        return self.frame if self.native is None else binary.as_text_columns(self.native, list(self.frame.columns))


@dataclass(frozen=True)
class TableFile:
    """A file of a table, of which the beginning has been read.

    Attributes:
        path: The file.
        header: The column names as they are written.
        dialect: How a text file is written; None for other files.
    """

    path: Path
    header: list[str]
    dialect: Dialect | None = None

    @property
    def names(self) -> list[str]:
        """The column names without blanks around them; a column without a name has got one."""
        stripped = [name.strip() for name in self.header]
        return [name or f"unnamed {number}" for number, name in enumerate(stripped, start=1)]

    @cached_property
    def block_rows(self) -> list[int] | None:
        """Numbers of rows in the blocks that can be read apart from each other; None where there are none.

        They are counted once: a packed Feather file has to be unpacked for it.
        """
        return binary.ArrowFile(self.path).block_rows if suffix_of(self.path) in ARROW_SUFFIXES else None

    def pieces(self, rows: int, bad: list[BadRow], portion: "Portion | None" = None) -> Iterator[Piece]:
        """The rows of the file or of a portion of it, a number of rows at a time; bad rows are added to ``bad``."""
        if self.dialect is not None:
            yield from self._text_pieces(self.dialect, rows, bad)
        elif suffix_of(self.path) in ARROW_SUFFIXES:
            yield from self._arrow_pieces(rows, portion)
        else:
            texts = binary.read_excel(self.path)[0].iloc[1:].set_axis(self.names, axis=1)
            for start in range(0, len(texts), rows):
                part = texts.iloc[start : start + rows]
                yield Piece(part.reset_index(drop=True), [int(row) + 1 for row in part.index])

    def _arrow_pieces(self, rows: int, portion: "Portion | None") -> Iterator[Piece]:
        file, start = binary.ArrowFile(self.path), 1 if portion is None else portion.start + 1
        blocks = None if portion is None else portion.blocks
        for table in file.read(range(file.blocks) if blocks is None else blocks, rows):
            frame = file.as_columns(table).set_axis(self.names, axis=1)
            yield Piece(frame, list(range(start, start + len(frame))), table)
            start += len(frame)

    def _text_pieces(self, dialect: Dialect, size: int, bad: list[BadRow]) -> Iterator[Piece]:
        rows: list[list[str]] = []
        places: list[int] = []
        for line, cells in _read_table_rows(self.path, len(self.names), dialect):
            if problem := _find_problem(cells, len(self.names)):
                breaks = 0 if isinstance(cells, str) else sum(cell.count("\n") for cell in cells)
                place = f"lines {line - breaks} to {line}" if breaks else f"line {line}"
                bad.append(BadRow(place, problem, () if isinstance(cells, str) else tuple(cells)))
                continue
            assert isinstance(cells, list)
            rows.append(cells)
            places.append(line)
            if len(rows) == size:
                yield Piece(_as_frame(rows, self.names), places)
                rows, places = [], []
        if rows:
            yield Piece(_as_frame(rows, self.names), places)


@dataclass(frozen=True)
class Portion:
    """A portion of a table that can be read apart from the others.

    Attributes:
        file: Number of the file.
        blocks: Numbers of its blocks; None for the whole file.
        start: Number of rows of the file before them.
    """

    file: int
    blocks: tuple[int, ...] | None = None
    start: int = 0


@dataclass
class Source:
    """A table in one file or several, of which the beginnings have been read.

    Attributes:
        path: What the user gave: a file, a folder or a pattern.
        files: The files, in the order of their rows. All have the same columns, in any order.
        notes: What was made of the files, for the user.
        bad: Rows that cannot be used, of those that have been read.
    """

    path: Path
    files: list[TableFile]
    notes: list[str] = field(default_factory=list)
    bad: BadRows = field(default_factory=BadRows)

    @property
    def header(self) -> list[str]:
        """The column names as they are written in the first file."""
        return self.files[0].header

    @property
    def names(self) -> list[str]:
        """The column names, in the order of the first file."""
        return self.files[0].names

    @property
    def dialect(self) -> Dialect | None:
        """How the first file is written; None where it is not text."""
        return self.files[0].dialect

    @property
    def unit(self) -> str:
        """What the places of rows count: "line" or "row"."""
        return "row" if self.dialect is None else "line"

    def resolved(self) -> "Source":
        """The same table under paths that do not depend on the folder of the process: workers may be in another one."""
        return replace(self, files=[replace(file, path=file.path.resolve()) for file in self.files])

    def pieces(self, rows: int | None = None, portion: Portion | None = None) -> Iterator[Piece]:
        """The table or a portion of it from its beginning, some rows at a time; bad rows are put aside."""
        self.bad.clear()
        several = len(self.files) > 1
        for file in self.files if portion is None else [self.files[portion.file]]:
            bad: list[BadRow] = []
            for piece in file.pieces(rows or CHUNK_ROWS, bad, portion):
                if several:
                    piece = self._placed(piece, file)
                self._put_aside(bad, file if several else None)
                yield piece
            self._put_aside(bad, file if several else None)

    def _placed(self, piece: Piece, file: TableFile) -> Piece:
        """A piece of one of several files: its columns in the order of the first file, and its places with the file's name."""
        order = [file.names.index(name) for name in self.names]
        native = None
        if piece.native is not None:
            names = [name for name in piece.native.column_names if name in file.header]
            native = piece.native.select([names[number] for number in order])
        return Piece(piece.frame.loc[:, self.names], [f"{place} of {file.path.name}" for place in piece.places], native)

    def _put_aside(self, bad: list[BadRow], file: TableFile | None) -> None:
        """Moves bad rows to ``self.bad``, with the file's name where there is one."""
        of = "" if file is None else f" of {file.path.name}"
        self.bad.extend(replace(row, place=f"{row.place}{of}") for row in bad)
        bad.clear()

    def portions(self, rows: int) -> list[Portion]:
        """The table in portions of at least this many rows, in order; a file without blocks is one portion."""
        portions = []
        for number, file in enumerate(self.files):
            if (counts := file.block_rows) is None:
                portions.append(Portion(number))
                continue
            first = 0
            for block in range(len(counts)):
                if sum(counts[first : block + 1]) >= rows or block == len(counts) - 1:
                    portions.append(Portion(number, tuple(range(first, block + 1)), sum(counts[:first])))
                    first = block + 1
        return portions

    def check_bad(
        self, remedy: str = "correct them, or leave them out with --skip-bad-rows", sampled: bool = False
    ) -> None:
        """Raises a TableError that names every bad row, of the table or of a sample of it."""
        if self.bad:
            lines = [f"{row.place}: {row.problem}" for row in self.bad]
            count = f"{len(self.bad):,} row{'s' * (len(self.bad) > 1)}"
            raise TableError(
                f"{'A sample of ' * sampled}{self.path} has {count} that cannot be used; {remedy}:",
                *shortened(lines, self.bad.unlisted),
            )

    def raise_empty(self) -> NoReturn:
        """Raises a TableError for a table without a row that can be used."""
        self.check_bad("no other row is there; correct them")
        raise TableError(f"{self.path} has column names but no rows.")


def open_table(path: Path) -> Source:
    """A table of which the beginning has been read: the column names and, for text, the dialect.

    Raises:
        TableError: A file is not a table, or has other columns than the first one.
    """
    files, notes = [], []
    for file_path in files_of(path):
        file, remarks = _open_file(file_path)
        if files:
            _check_same_columns(files[0], file)
        notes += [remark for remark in remarks if remark not in notes]
        files.append(file)
    if len(files) > 1:
        notes.append(f"{len(files)} files, from {files[0].path.name} to {files[-1].path.name}")
    return Source(path, files, notes)


def _open_file(path: Path) -> tuple[TableFile, list[str]]:
    """A file of which the beginning has been read, and what was made of it."""
    if is_text_file(path):
        header, dialect = read_header(path, detect_dialect(path))
        file, notes = TableFile(path, header, dialect), dialect.describe()
    elif suffix_of(path) in ARROW_SUFFIXES:
        file, notes = TableFile(path, binary.ArrowFile(path).names), []
    else:
        texts, notes = binary.read_excel(path)
        file = TableFile(path, list(texts.iloc[0]))
    if not file.names:
        raise TableError(f"{path} has no columns; it needs a line of column names and at least one row.")
    if all(NUMBER_AS_NAME.fullmatch(name) for name in file.names):
        notes.append("the column names are all numbers; if the first line is a row, put a line of names above it")
    twice = [name for name, count in Counter(file.names).items() if count > 1]
    if twice:
        raise TableError(f"{path} has more than one column named {listed(twice)}; rename or remove the others.")
    return file, notes


def _check_same_columns(first: TableFile, file: TableFile) -> None:
    """Raises a TableError where a file has other columns than the first one."""
    for verb, names in (
        ("lacks", [name for name in first.names if name not in file.names]),
        ("has", [name for name in file.names if name not in first.names]),
    ):
        if names:
            other = f"that {first.path.name} has" if verb == "lacks" else f"that {first.path.name} does not have"
            raise TableError(f"{file.path} {verb} the column {listed(names)} {other}; all files need the same columns.")


def read_table(source: Source) -> Piece:
    """A whole table; rows that cannot be used are in ``source.bad``."""
    pieces = list(source.pieces())
    if not any(piece.places for piece in pieces):
        source.raise_empty()
    return joined(pieces)


def joined(pieces: Sequence[Piece]) -> Piece:
    """Several pieces as one."""
    frame = pd.concat([piece.frame for piece in pieces], ignore_index=True)
    native = binary.joined([piece.native for piece in pieces if piece.native is not None])
    return Piece(frame, [place for piece in pieces for place in piece.places], native)


def _read_table_rows(path: Path, width: int, dialect: Dialect) -> Iterator[tuple[int, list[str] | str]]:
    """The rows below the names. In a table of one column an empty line between rows is an empty cell."""
    empty_lines = []
    before = dialect.skipped + 1  # titles and names, which are still to come
    for line, cells in read_rows(path, dialect):
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
