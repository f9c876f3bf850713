"""Error messages that several packages share, without torch: commands that do not compute need not load it."""

import difflib
from collections.abc import Iterable


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
