"""Tables in Parquet, Feather, Arrow and Excel files, in the types that they hold or as text that can be read back."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from bochner.tables.cells import as_text
from bochner.tables.errors import TableError
from bochner.tables.files.paths import suffix_of

if TYPE_CHECKING:
    import pyarrow as pa

PANDAS_INDEX_PREFIX = "__index_level_"  # how pandas names a nameless index in a Parquet file
MAX_EXACT_FLOAT = 2**53  # whole numbers up to it are floats without loss
MAX_ERROR_CHARACTERS = 200  # of a library's message in ours
TEXT_TYPES = (  # beginnings of the names of Arrow types whose values are told by their text
    *("null", "bool", "int", "uint", "float", "double", "halffloat", "decimal"),
    *("string", "large_string", "date", "time", "dictionary<values=string"),
)


# ------------------------------------------------------------------ Parquet, Feather and Arrow


class ArrowFile:
    """A file of typed columns: Parquet, or Arrow's own format, which Feather is too. It is read in blocks of rows.

    Args:
        path: The file.

    Raises:
        TableError: It is damaged, or is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise TableError(
                f"Reading {path} needs pyarrow: install bochner with the extra 'parquet', or use CSV."
            ) from error
        self._is_parquet = suffix_of(path) == ".parquet"
        try:
            self._file: Any = pq.ParquetFile(path) if self._is_parquet else pa.ipc.open_file(pa.memory_map(str(path)))
        except Exception as error:
            kind = "a Parquet file" if self._is_parquet else "a Feather or Arrow file"
            raise TableError(f"{path} is not {kind} that can be read ({_as_one_line(error)}).") from error
        self.schema: pa.Schema = self._file.schema_arrow if self._is_parquet else self._file.schema

    @property
    def names(self) -> list[str]:
        """Column names, without a nameless index of pandas."""
        return [name for name in self.schema.names if not _is_index(name, self.schema)]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self._file.num_row_groups if self._is_parquet else self._file.num_record_batches

    @property
    def block_rows(self) -> list[int]:
        """Number of rows of each block."""
        if self._is_parquet:
            return [self._file.metadata.row_group(block).num_rows for block in range(self.blocks)]
        with self._errors():
            return [self._file.get_batch(block).num_rows for block in range(self.blocks)]

    def nested_columns(self) -> list[tuple[str, str]]:
        """Columns whose values have no form in text, such as lists, and their types."""
        return [(field.name, str(field.type)) for field in self.schema if not has_text(field.type)]

    def read(self, blocks: Sequence[int], rows: int) -> Iterator["pa.Table"]:
        """The rows of some blocks, a number of rows at a time.

        Raises:
            TableError: The file is damaged.
        """
        import pyarrow as pa

        with self._errors():
            if self._is_parquet:
                for batch in self._file.iter_batches(batch_size=rows, row_groups=list(blocks)):
                    yield pa.Table.from_batches([batch])
                return
            for block in blocks:
                batch = self._file.get_batch(block)
                for start in range(0, batch.num_rows, rows):
                    yield pa.Table.from_batches([batch.slice(start, rows)])

    def as_columns(self, table: "pa.Table") -> pd.DataFrame:
        """Rows as pandas holds them: numbers, dates, and for all else Python's objects. No digit of a whole number is lost.

        Raises:
            TableError: Python does not have one of the values.
        """
        import pyarrow as pa

        columns = {}
        with self._errors():
            for name in self.names:
                column = table[name]
                plain = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
                exact = not (pa.types.is_integer(plain.type) and plain.null_count) or _fits_float(plain)
                if pa.types.is_timestamp(plain.type) or pa.types.is_date(plain.type):
                    _ends(plain)  # raises an error beyond the years 1 to 9999
                columns[name] = plain.to_pandas(integer_object_nulls=not exact)
                if pa.types.is_string(plain.type) or pa.types.is_large_string(plain.type):
                    columns[name] = columns[name].astype(object)
        return pd.DataFrame(columns, index=pd.RangeIndex(table.num_rows))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Makes every error of a file that is being read a TableError."""
        import pyarrow as pa

        try:
            yield
        # Dates beyond the year 9999 overflow, and a time zone may be unknown here, which is a KeyError.
        except (pa.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
            if isinstance(error, TableError):
                raise
            raise TableError(f"{self.path} cannot be read to its end ({_as_one_line(error)}).") from error


def joined(tables: "Sequence[pa.Table]") -> "pa.Table | None":
    """Several tables as one, whose types may differ; None where there is none."""
    if not tables:
        return None
    import pyarrow as pa

    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise TableError(
            f"A column has types that do not fit together ({_as_one_line(error)}); give it one type in all files."
        ) from error


def has_text(kind: object) -> bool:
    """Whether values of an Arrow type are told by their text: numbers, texts, truths, dates and times."""
    return str(kind).startswith(TEXT_TYPES)


def as_text_columns(table: "pa.Table", names: Sequence[str]) -> pd.DataFrame:
    """Rows as text, from which the same values can be read again."""
    kept = [name for name in table.column_names if not _is_index(name, table.schema)]
    texts = {
        name: list(map(as_text, table[kept_name].to_pylist())) for name, kept_name in zip(names, kept, strict=True)
    }
    return pd.DataFrame(texts, dtype=object, index=pd.RangeIndex(table.num_rows))


def _fits_float(column: Any) -> bool:
    """Whether all whole numbers of a column are floats too."""
    least, most = _ends(column)
    return least is None or -MAX_EXACT_FLOAT <= least <= most <= MAX_EXACT_FLOAT


def _ends(column: Any) -> tuple[Any, Any]:
    """The smallest and the largest value of a column of Arrow."""
    import pyarrow.compute

    ends = pyarrow.compute.call_function("min_max", [column]).as_py()
    return ends["min"], ends["max"]


def _is_index(name: str, schema: "pa.Schema") -> bool:
    """Whether a column is a nameless index of pandas."""
    about = schema.pandas_metadata if name.startswith(PANDAS_INDEX_PREFIX) else None
    return about is not None and name in about.get("index_columns", [])


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
