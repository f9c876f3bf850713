"""The error of tables, which lists all problems at once."""

import difflib
from collections.abc import Sequence

from bochner.errors import printable, shown

NAMES_SHOWN = 10  # names of columns in one message


class TableError(ValueError):
    """A table that cannot be used. Each line is a problem with its remedy."""

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(printable, problems))
        super().__init__("\n".join(self.problems))


def no_column(option: str, name: str, names: Sequence[str]) -> str:
    """The message for a name that no column has, with the nearest names."""
    near = difflib.get_close_matches(shown(name), list(map(shown, names)), n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(other) for other in near)}?" if near else ""
    known = ", ".join(map(shown, names[:NAMES_SHOWN]))
    if len(names) > NAMES_SHOWN:
        known = f"the {len(names)} columns ({known}, ...)"
    return f"The {option} parameter must be one of {known}, got {shown(name)!r} instead.{hint}"


def in_both(drop: Sequence[str], keep: Sequence[str]) -> list[str]:
    """The message for names of columns to leave out that are to be kept too, if there are any."""
    both = [name for name in keep if name in drop]
    return [f"The keep parameter must not name what drop names, got {shown(both[0])!r} in both."] if both else []
