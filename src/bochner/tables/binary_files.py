"""Tables in Parquet and Excel files; every cell becomes text, from which the same value can be read again."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from bochner.tables.cells import as_text
from bochner.tables.errors import TableError

if TYPE_CHECKING:
    import pyarrow as pa

PANDAS_INDEX_PREFIX = "__index_level_"  # how pandas names a nameless index in a Parquet file
MAX_ERROR_CHARACTERS = 200  # of a library's message in ours
TEXT_TYPES = (  # beginnings of the names of Arrow types whose values are told by their text
    *("null", "bool", "int", "uint", "float", "double", "halffloat", "decimal"),
    *("string", "large_string", "date", "time", "dictionary<values=string"),
)


# ------------------------------------------------------------------ Parquet


def find_nested_columns(path: Path) -> list[tuple[str, str]]:
    """Columns of a Parquet file whose values have no form in text, such as lists, and their types."""
    return [(field.name, str(field.type)) for field in _open_parquet(path).schema_arrow if not has_text(field.type)]


def has_text(kind: object) -> bool:
    """Whether values of an Arrow type are told by their text: numbers, texts, truths, dates and times."""
    return str(kind).startswith(TEXT_TYPES)


def read_parquet_names(path: Path) -> list[str]:
    """Column names of a Parquet file, without a nameless index of pandas."""
    schema = _open_parquet(path).schema_arrow
    return [name for name in schema.names if not _is_index(name, schema)]


def read_parquet_batches(path: Path, names: list[str], rows: int) -> Iterator[tuple[pd.DataFrame, "pa.Table"]]:
    """A Parquet file from its beginning: some rows as text and as Arrow holds them.

    Args:
        path: The file.
        names: Names of the columns of text, an index left out.
        rows: Rows at a time.

    Raises:
        TableError: The file is damaged, or holds values that Python does not have.
    """
    import pyarrow as pa

    try:
        for batch in _open_parquet(path).iter_batches(batch_size=rows):
            table = pa.Table.from_batches([batch])
            kept = [
                column
                for name, column in zip(table.column_names, table.columns, strict=True)
                if not _is_index(name, table.schema)
            ]
            texts = {name: list(map(as_text, column.to_pylist())) for name, column in zip(names, kept, strict=True)}
            yield pd.DataFrame(texts, dtype=object), table
    # Dates beyond the year 9999 overflow, and a time zone may be unknown here, which is a KeyError.
    except (pa.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        if isinstance(error, TableError):
            raise
        raise TableError(f"{path} cannot be read to its end ({_as_one_line(error)}).") from error


def _is_index(name: str, schema: "pa.Schema") -> bool:
    """Whether a column is a nameless index of pandas."""
    about = schema.pandas_metadata if name.startswith(PANDAS_INDEX_PREFIX) else None
    return about is not None and name in about.get("index_columns", [])


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise TableError(
            f"Reading {path} needs pyarrow: install bochner with the extra 'parquet', or use CSV."
        ) from error
    try:
        return pq.ParquetFile(path)
    except Exception as error:
        raise TableError(f"{path} is not a Parquet file that can be read ({_as_one_line(error)}).") from error


# ------------------------------------------------------------------ Excel


def read_excel(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """The first sheet as text, and what was left out of it.

    The first row holds the names. The index counts the rows of the sheet from 0.
    """
    try:
        import openpyxl  # noqa: F401  # pyright: ignore[reportMissingModuleSource]
    except ImportError as error:
        raise TableError(
            f"Reading {path} needs openpyxl: install bochner with the extra 'xlsx', or save it as CSV."
        ) from error
    try:
        with pd.ExcelFile(io.BytesIO(path.read_bytes())) as book:
            sheets = book.sheet_names
            texts = pd.read_excel(book, header=None, dtype=object, keep_default_na=False).map(as_text)
    except Exception as error:
        raise TableError(f"{path} is not an Excel file that can be read ({_as_one_line(error)}).") from error
    texts = texts.loc[:, (texts != "").any(axis=0)]
    filled_cells = (texts != "").sum(axis=1)
    if not filled_cells.any():
        raise TableError(f"{path} is empty; it needs a line of column names and at least one row.")
    # A title stands alone in its row.
    first = int((filled_cells > 1).to_numpy().argmax()) if texts.shape[1] > 1 else int(filled_cells.to_numpy().argmax())
    last = int(np.nonzero(filled_cells.to_numpy())[0][-1])
    titles = int((filled_cells.iloc[:first] > 0).sum())
    empty = int((filled_cells.iloc[first : last + 1] == 0).sum())
    notes = [f"read as: the first sheet of {len(sheets)}, '{sheets[0]}'"] if len(sheets) > 1 else []
    notes += [f"{titles} row{'s' * (titles > 1)} before the column names left out"] if titles else []
    notes += [f"{empty} rows without any cell left out"] if empty else []
    return texts.iloc[first : last + 1][filled_cells.iloc[first : last + 1] > 0], notes


def _as_one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:MAX_ERROR_CHARACTERS]
