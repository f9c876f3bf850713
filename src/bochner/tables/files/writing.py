"""Predictions beside the table that they are for: what was read comes back equal when it is read again, or nothing is written."""

import contextlib
import csv
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from bochner.errors import listed
from bochner.files import replacing
from bochner.tables.errors import TableError
from bochner.tables.files.binary import ArrowFile
from bochner.tables.files.paths import ARROW_SUFFIXES, TEXT_SUFFIXES, suffix_of
from bochner.tables.files.reading import BadRows, Piece, Source
from bochner.tables.files.text import BYTE_ORDER_MARK, Dialect, detect_dialect, read_rows

if TYPE_CHECKING:
    import pyarrow.parquet as pq

OUTPUT_SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
STDOUT = Path("-")
QUOTED_CHARACTERS = (
    "\r",
    BYTE_ORDER_MARK,
)  # which Python's csv writer leaves without quotes, and which are then read otherwise
NOT_TEXT = "\0"  # a character that no text file holds

PieceWriter = Callable[[Piece, dict[str, np.ndarray]], None]


def check_output_kind(out: Path, source: Source) -> None:
    """Raises a TableError unless the rows of a table can be written to a file of that name and read again unchanged."""
    if out != STDOUT and out.suffix.lower() not in OUTPUT_SUFFIXES:
        raise TableError(f"The output {out} must end in one of {', '.join(OUTPUT_SUFFIXES)}.")
    for file in source.files:
        if suffix_of(file.path) in ARROW_SUFFIXES and out.suffix.lower() != ".parquet":
            if nested := ArrowFile(file.path).nested_columns():
                names, kinds = zip(*nested, strict=True)
                raise TableError(
                    f"The column {listed(names)} of {file.path} ({kinds[0]}) has no form in text; write to .parquet."
                )


@contextlib.contextmanager
def writer(out: Path, source: Source, decimal: str) -> Iterator[PieceWriter]:
    """A function that takes pieces of a table and their new columns; the file appears when all are written, or not at all.

    Args:
        out: Where the table is written; "-" for standard output.
        source: The table that is read.
        decimal: Decimal sign of the new numbers.

    Raises:
        TableError: What would be read again is not what was written.
    """
    dialect = source.dialect or Dialect()
    if out == STDOUT:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a table is UTF-8 there too, whatever letters the screen knows
            sys.stdout.reconfigure(encoding="utf-8", errors="strict", newline="")
        yield _TextWriter(sys.stdout, source, dialect, decimal)
        return
    with replacing(out) as part:
        if out.suffix.lower() == ".parquet":
            with contextlib.closing(_ParquetWriter(part, source)) as parquet:
                yield parquet
        else:
            marked = dialect.marked or dialect.encoding.startswith("utf-16")
            with part.open("w", encoding="utf-8-sig" if marked else "utf-8", newline="") as file:
                text = _TextWriter(file, source, dialect, decimal)
                yield text
            _check_written(part, text)


class _TextWriter:
    """Writes pieces of a table as text, and keeps a checksum of all cells."""

    def __init__(self, file: TextIO, source: Source, dialect: Dialect, decimal: str) -> None:
        self.source, self.dialect, self.decimal = source, dialect, decimal
        self.plain = csv.writer(file, delimiter=dialect.delimiter, lineterminator="\n")
        self.quoted = csv.writer(file, delimiter=dialect.delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
        self.checksum: int | None = None  # None before the first row

    def __call__(self, piece: Piece, added: dict[str, np.ndarray]) -> None:
        """Writes some rows; before the first of them the column names."""
        if self.checksum is None:
            self.checksum = 0
            self._write_row((*self.source.header, *added))
        columns = [piece.texts[name] for name in piece.texts.columns]
        columns += [_as_texts(values, self.decimal) for values in added.values()]
        for row in zip(*columns, strict=True):
            self._write_row(row)

    def _write_row(self, row: Sequence[str]) -> None:
        _check_cells(row)
        assert self.checksum is not None
        self.checksum = _add_to_checksum(self.checksum, row)
        quoted = any(character in cell for cell in row for character in QUOTED_CHARACTERS)
        (self.quoted if quoted else self.plain).writerow(row)


def _check_cells(row: Sequence[str]) -> None:
    """Raises a TableError for a cell that no text file can hold."""
    for cell in row:
        if NOT_TEXT in cell or not (cell.isascii() or _has_bytes(cell)):
            raise TableError(
                f"The cell {cell[:40]!r} holds a character that text files cannot hold; write to .parquet."
            )


def _has_bytes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _add_to_checksum(checksum: int, row: Sequence[str]) -> int:
    return zlib.crc32(repr([*row]).encode(), checksum)


def _as_texts(values: np.ndarray, decimal: str) -> list[str]:
    """New values as text; floats with all their digits and the decimal sign of the table."""
    texts = [str(value) for value in values.tolist()]
    return [text.replace(".", decimal) for text in texts] if values.dtype.kind == "f" else texts


def _check_written(part: Path, text: _TextWriter) -> None:
    """Raises a TableError where the file is read in another way than it was written."""
    checksum = 0
    try:
        dialect = detect_dialect(part)
        for _, cells in read_rows(part, dialect):
            checksum = _add_to_checksum(checksum, cells)
    except TableError:
        dialect = Dialect(skipped=1)
    if text.checksum is not None and (dialect.skipped or checksum != text.checksum):
        raise TableError(f"The predictions for {text.source.path} would not be read as written; write to .parquet.")


class _ParquetWriter:
    """Writes pieces of a table as Parquet, in the types in which they were read."""

    def __init__(self, part: Path, source: Source) -> None:
        self.part, self.source = part, source
        self.file: pq.ParquetWriter | None = None

    def __call__(self, piece: Piece, added: dict[str, np.ndarray]) -> None:
        """Writes some rows."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = piece.native
        try:
            if table is None:
                names = [
                    own if own.strip() else name
                    for own, name in zip(self.source.header, self.source.names, strict=True)
                ]
                columns = [pa.array(piece.texts[name], pa.string()) for name in piece.texts.columns]
                table = pa.table(columns, names)
            for name, values in added.items():
                table = table.append_column(name, pa.array(values))
            if self.file is None:
                self.file = pq.ParquetWriter(self.part, table.schema)
            self.file.write_table(table.cast(self.file.schema))  # files of a folder may differ in their types
        # Text may hold what UTF-8 does not, and timestamps in seconds may be too large for Parquet.
        except (pa.ArrowException, UnicodeEncodeError) as error:
            raise TableError(f"The rows of {self.source.path} cannot be written to Parquet ({error}).") from error

    def close(self) -> None:
        """Ends the file."""
        if self.file is not None:
            self.file.close()


def write_bad_rows(path: Path, bad: BadRows) -> None:
    """A text file of the rows that were left out: where they are, why, and what was read."""
    text = io.StringIO(newline="")
    lines = csv.writer(text)
    width = max((len(row.cells) for row in bad), default=0)
    lines.writerow(["place", "problem", *(f"cell {number}" for number in range(1, width + 1))])
    lines.writerows([row.place, row.problem, *row.cells, *[""] * (width - len(row.cells))] for row in bad)
    if bad.unlisted:
        lines.writerow(["", f"and {bad.unlisted:,} more rows that are not listed", *[""] * width])
    with replacing(path) as part:
        part.write_text(text.getvalue(), encoding="utf-8", newline="")
