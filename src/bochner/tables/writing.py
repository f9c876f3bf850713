"""Predictions beside the table that they are for: what was read comes back equal when it is read again."""

import contextlib
import csv
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bochner.files import replacing
from bochner.tables.errors import TEXT_SUFFIXES, TableError, listed
from bochner.tables.reading import BadRow, Dialect, Piece, Source, detect, has_text

OUTPUT_SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
STDOUT = Path("-")

Take = Callable[[Piece, dict[str, np.ndarray]], None]


def check_output_kind(out: Path, source: Source) -> None:
    """Raises a TableError unless the rows of a table can be written to a file of that name and read again unchanged."""
    if out != STDOUT and out.suffix.lower() not in OUTPUT_SUFFIXES:
        raise TableError(f"The output {out} must end in one of {', '.join(OUTPUT_SUFFIXES)}.")
    if source.path.suffix.lower() == ".parquet" and out.suffix.lower() != ".parquet":
        import pyarrow.parquet as pq

        schema = pq.read_schema(source.path)
        nested = [name for name in schema.names if not has_text(schema.field(name).type)]
        if nested:
            kind = schema.field(nested[0]).type
            raise TableError(
                f"The column {listed(nested)} of {source.path} ({kind}) has no form in text; write to .parquet."
            )


@contextlib.contextmanager
def writer(out: Path, source: Source, decimal: str) -> Iterator[Take]:
    """Takes pieces of a table and their new columns; the file appears when all are written, and not at all otherwise.

    Args:
        out: Where to; "-" for standard output.
        source: The table that is read.
        decimal: Decimal sign of the new numbers.
    """
    dialect = source.dialect or Dialect()
    if out == STDOUT:
        yield _text_writer(sys.stdout, source, dialect, decimal)
        return
    with replacing(out) as part, contextlib.ExitStack() as stack:
        if out.suffix.lower() == ".parquet":
            take, close = _parquet_writer(part, source)
            stack.callback(close)
            yield take
        else:
            wide = dialect.marked or dialect.encoding.startswith("utf-16")
            with part.open("w", encoding="utf-8-sig" if wide else "utf-8", newline="") as file:
                yield _text_writer(file, source, dialect, decimal)
            _check_written(part, dialect)


def _text_writer(file: Any, source: Source, dialect: Dialect, decimal: str) -> Take:
    plain = csv.writer(file, delimiter=dialect.delimiter, lineterminator="\n")
    quoted = csv.writer(file, delimiter=dialect.delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
    begun = False

    def take(piece: Piece, added: dict[str, np.ndarray]) -> None:
        nonlocal begun
        rows = zip(*(piece.texts[name] for name in piece.texts.columns), *_as_texts(added, decimal), strict=True)
        if not begun:
            rows, begun = iter([(*source.header, *added), *rows]), True
        for row in rows:
            # Where lines end with \n alone, Python's writer leaves a carriage return in a cell bare.
            (quoted if any("\r" in cell for cell in row) else plain).writerow(row)

    return take


def _as_texts(added: dict[str, np.ndarray], decimal: str) -> list[list[str]]:
    texts = [[str(value) for value in values.tolist()] for values in added.values()]
    numbers = [values.dtype.kind == "f" for values in added.values()]
    return [
        [text.replace(".", decimal) for text in own] if number else own
        for own, number in zip(texts, numbers, strict=True)
    ]


def _check_written(part: Path, dialect: Dialect) -> None:
    """Raises a TableError where the file would be read in another way than it was written."""
    if detect(part).delimiter != dialect.delimiter:
        raise TableError("The output would not be read as it was written; write to .parquet.")


def _parquet_writer(part: Path, source: Source) -> tuple[Take, Callable[[], None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writers: list[Any] = []

    def take(piece: Piece, added: dict[str, np.ndarray]) -> None:
        table = piece.native
        if table is None:
            texts = piece.texts.set_axis(source.header, axis=1)
            table = pa.Table.from_pandas(texts.astype(str), preserve_index=False)
        for name, values in added.items():
            table = table.append_column(name, pa.array(values))
        if not writers:
            writers.append(pq.ParquetWriter(part, table.schema))
        writers[0].write_table(table)

    def close() -> None:
        for own in writers:
            own.close()

    return take, close


def write_bad_rows(path: Path, bad: list[BadRow]) -> None:
    """A text file of the rows that were left out: where they are, why, and what was read."""
    text = io.StringIO(newline="")
    lines = csv.writer(text)
    width = max((len(row.cells) for row in bad), default=0)
    lines.writerow(["place", "problem", *(f"cell {number}" for number in range(1, width + 1))])
    lines.writerows([row.place, row.problem, *row.cells, *[""] * (width - len(row.cells))] for row in bad)
    with replacing(path) as part:
        part.write_text(text.getvalue(), encoding="utf-8", newline="")
