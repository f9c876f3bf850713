"""The error of tables, which lists all problems at once; how names and cells are shown in messages; and checks of file names."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

TEXT_SUFFIXES = (".csv", ".tsv", ".txt")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".xlsx")
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
NAMES_SHOWN = 10  # names of columns in one message
MAX_SHOWN_CHARACTERS = 80  # of a name or a cell in a message
PROBLEMS_SHOWN = 20  # problems in one message; the others are counted


def printable(text: str) -> str:
    """A line of text with its control characters written out."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class TableError(ValueError):
    """A table that cannot be used. Each line is a problem with its remedy."""

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(printable, problems))
        super().__init__("\n".join(self.problems))


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


def shown(text: object) -> str:
    """A name or a cell for a message, where long ones are cut."""
    whole = str(text)
    return whole if len(whole) <= MAX_SHOWN_CHARACTERS else whole[:MAX_SHOWN_CHARACTERS] + "…"


def listed(names: Sequence[object], most: int = 5) -> str:
    """Names or cells in quotes, the first few."""
    quoted = [f"'{shown(name)}'" for name in names[:most]]
    return ", ".join(quoted) + (f" and {len(names) - most} more" if len(names) > most else "")


def shortened(problems: Sequence[str]) -> list[str]:
    """The first problems, and how many more there are."""
    more = len(problems) - PROBLEMS_SHOWN
    return [*problems[:PROBLEMS_SHOWN], *([f"... and {more} more."] if more > 0 else [])]


def no_column(option: str, name: str, names: Sequence[str]) -> str:
    """The message for a name that no column has, with the nearest names."""
    near = difflib.get_close_matches(shown(name), list(map(shown, names)), n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(other) for other in near)}?" if near else ""
    known = ", ".join(map(shown, names[:NAMES_SHOWN]))
    if len(names) > NAMES_SHOWN:
        known = f"the {len(names)} columns ({known}, ...)"
    return f"The {option} parameter must be one of {known}, got {shown(name)!r} instead.{hint}"
