"""Messages that several rooms share."""

import difflib
from collections.abc import Iterable


def unknown(argument: str, value: object, known: Iterable[str]) -> str:
    """The message for a name that is not among the known ones, with the nearest of them."""
    known = list(known)
    if callable(value):
        return f"The {argument} parameter must be an object or one of {', '.join(known)}, got {value}; did you forget to call it?"
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"The {argument} parameter must be one of {', '.join(known)}, got {value!r} instead.{hint}"
