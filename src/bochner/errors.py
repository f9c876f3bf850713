"""Messages that several packages share, and how names and cells stand in them; torch is not loaded for them."""

import difflib
import re
from collections.abc import Iterable, Sequence

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MAX_SHOWN_CHARACTERS = 80  # of a name or a cell in a message
PROBLEMS_SHOWN = 20  # problems in one message; the others are counted


def unknown_name(argument: str, value: object, names: Iterable[str]) -> str:
    """The message for a value that is not one of the names, with the most similar name."""
    names = list(names)
    if callable(value):
        return f"The {argument} parameter must be an object or one of {', '.join(names)}, got {value}; did you forget to call it?"
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"The {argument} parameter must be one of {', '.join(names)}, got {value!r} instead.{hint}"


def one_of(name: str, value: object, names: Iterable[str]) -> str:
    """One of several names."""
    names = list(names)
    if not isinstance(value, str) or value not in names:
        raise ValueError(unknown_name(name, value, names))
    return value


def printable(text: str) -> str:
    """A line of text with its control characters, and halves of letters that no encoding holds, written out."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shown(text: object) -> str:
    """A name or a cell for a message, where long ones are cut."""
    whole = str(text)
    return whole if len(whole) <= MAX_SHOWN_CHARACTERS else whole[:MAX_SHOWN_CHARACTERS] + "…"


def listed(names: Sequence[object], most: int = 5) -> str:
    """Names or cells in quotes, the first few."""
    quoted = [f"'{shown(name)}'" for name in names[:most]]
    return ", ".join(quoted) + (f" and {len(names) - most} more" if len(names) > most else "")


def shortened(problems: Sequence[str], unlisted: int = 0) -> list[str]:
    """The first problems, and how many more there are, with those that are not listed."""
    more = len(problems) - PROBLEMS_SHOWN + unlisted
    return [*problems[:PROBLEMS_SHOWN], *([f"... and {more:,} more."] if more > 0 else [])]
