"""What is wrong with a table, said all at once; and the checks of a file's name, which need no library."""

from collections.abc import Sequence
from pathlib import Path

TEXT_SUFFIXES = (".csv", ".tsv", ".txt")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".xlsx")
PROBLEMS_SHOWN = 20  # in one message; the rest is counted


class TableError(ValueError):
    """A table that cannot be used: every problem with its remedy, one a line."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def check_file(path: Path) -> None:
    """Raises a TableError unless the path is a readable file of a known kind."""
    kinds = ", ".join(SUFFIXES)
    if path.is_dir():
        raise TableError(f"{path} is a folder; give a file that ends in one of {kinds}.")
    if not path.exists():
        raise TableError(f"{path} does not exist; check the name and the folder.")
    if not path.is_file():
        raise TableError(f"{path} is not a regular file; write it to one first.")
    if path.suffix.lower() not in SUFFIXES:
        raise TableError(f"{path} must end in one of {kinds}; convert or rename it.")
    if path.stat().st_size == 0:
        raise TableError(f"{path} is empty; it needs a line of column names and at least one row.")


def listed(names: Sequence[object], most: int = 5) -> str:
    """Names in quotes, the first few."""
    shown = [f"'{name}'" for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def shortened(problems: Sequence[str]) -> list[str]:
    """The first problems, and how many more there are."""
    more = len(problems) - PROBLEMS_SHOWN
    return [*problems[:PROBLEMS_SHOWN], *([f"... and {more} more."] if more > 0 else [])]
