"""Rules that values from files must follow. A rule is declared once, as data, and knows nothing of models.

A rule for JSON is a function of a value and of its place. A rule for a tensor gives its type, shape and range. Both raise a
WrongValue. Ranges are finite, so NaN and infinity never pass.
"""

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Rule = Callable[[Any, str], None]  # (value, its place in the file)

MAX_FILE_NUMBER = 1e150  # its square is finite
MAX_LIST_LENGTH = 1_000_000
MAX_LABEL_LENGTH = 10_000  # characters of a category or class; every row of a prediction holds one
SURROGATES = re.compile("[\ud800-\udfff]")  # halves of characters, which UTF-8 cannot write


class WrongValue(ValueError):
    """A value that no valid file holds."""


def require(condition: bool, message: str) -> None:
    """Raises a WrongValue with this message unless the condition holds."""
    if not condition:
        raise WrongValue(message)


def _expect(condition: bool, place: str, expected: str, value: Any) -> None:
    if not condition:  # reprlib: values may be very long
        raise WrongValue(f"{place} must be {expected}, got {reprlib.repr(value)} instead")


# ------------------------------------------------------------------ JSON


def number(low: float = -MAX_FILE_NUMBER, high: float = MAX_FILE_NUMBER) -> Rule:
    """A number from low to high."""

    def check(value: Any, place: str) -> None:
        valid = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        _expect(valid, place, f"a number from {low:g} to {high:g}", value)

    return check


def whole(low: int, high: int) -> Rule:
    """A whole number from low to high."""

    def check(value: Any, place: str) -> None:
        valid = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        _expect(valid, place, f"a whole number from {low} to {high}", value)

    return check


def truth(value: Any, place: str) -> None:
    """True or false."""
    _expect(isinstance(value, bool), place, "true or false", value)


def text(value: Any, place: str) -> None:
    """A text that can be written as UTF-8."""
    _expect(isinstance(value, str) and not SURROGATES.search(value), place, "a text", value)


def label(value: Any, place: str) -> None:
    """A short text that a NumPy array holds unchanged: NumPy drops NUL characters at the end, and pads all texts to one length."""
    text(value, place)
    short = "\0" not in value and len(value) <= MAX_LABEL_LENGTH
    _expect(short, place, f"at most {MAX_LABEL_LENGTH} characters, none of them NUL", value)


def one_of(*choices: Any) -> Rule:
    """One of the choices, of the same type."""
    expected = " or ".join(map(reprlib.repr, choices)) if len(choices) < 5 else f"one of {reprlib.repr(list(choices))}"

    def check(value: Any, place: str) -> None:
        valid = any(type(value) is type(choice) and value == choice for choice in choices)
        _expect(valid, place, expected, value)

    return check


def optional(rule: Rule) -> Rule:
    """Null, or what another rule asks for."""

    def check(value: Any, place: str) -> None:
        if value is not None:
            rule(value, place)

    return check


def list_of(rule: Rule, shortest: int = 0, longest: int = MAX_LIST_LENGTH) -> Rule:
    """A list whose entries follow a rule."""

    def check(value: Any, place: str) -> None:
        valid = isinstance(value, list) and shortest <= len(value) <= longest
        _expect(valid, place, f"a list of {shortest} to {longest} entries", value)
        for number, entry in enumerate(value):
            rule(entry, f"{place}[{number}]")

    return check


def record(fields: Mapping[str, Rule]) -> Rule:
    """An object with exactly these fields."""

    def check(value: Any, place: str) -> None:
        _expect(isinstance(value, dict), place, "an object", value)
        missing, strange = sorted(set(fields) - set(value)), sorted(set(value) - set(fields))
        require(not missing, f"{place} lacks {reprlib.repr(missing)}")
        require(not strange, f"{place} has {reprlib.repr(strange)}, which is not known")
        for name, rule in fields.items():
            rule(value[name], f"{place}.{name}" if place else name)

    return check


def tagged(tag: str, kinds: Mapping[str, Mapping[str, Rule]]) -> Rule:
    """An object whose field ``tag`` says which further fields it has."""
    rules = {kind: record({tag: text, **fields}) for kind, fields in kinds.items()}

    def check(value: Any, place: str) -> None:
        _expect(isinstance(value, dict) and isinstance(value.get(tag), str), place, f"an object with {tag!r}", value)
        one_of(*rules)(value[tag], f"{place}.{tag}")
        rules[value[tag]](value, place)

    return check


# ------------------------------------------------------------------ tensors


@dataclass(frozen=True)
class Entry:
    """A tensor as the header of a file declares it.

    Attributes:
        dtype: Its type.
        shape: Its sizes.
        length: Its bytes in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    length: int = 0


@dataclass(frozen=True)
class TensorRule:
    """What a tensor must be.

    Attributes:
        shape: Its sizes; they follow from the JSON and from the sizes of other tensors.
        low: Smallest entry allowed.
        high: Largest entry allowed.
        increasing: Whether entries must not decrease.
        dtype: Its type.
    """

    shape: tuple[int, ...]
    low: float = -MAX_FILE_NUMBER
    high: float = MAX_FILE_NUMBER
    increasing: bool = False
    dtype: torch.dtype = torch.float64

    def check_entry(self, name: str, entry: Entry) -> None:
        """Raises a WrongValue unless the declared type and shape are right."""
        expected, got = f"{self.dtype} of shape {self.shape}", f"{entry.dtype} of shape {entry.shape}"
        require((entry.dtype, entry.shape) == (self.dtype, self.shape), f"{name} must be {expected}, got {got} instead")

    def check_values(self, name: str, value: Tensor) -> None:
        """Raises a WrongValue unless all entries are in the range, and in order where that is asked for."""
        inside = bool(((value >= self.low) & (value <= self.high)).all())
        require(inside, f"{name} must hold numbers from {self.low:g} to {self.high:g}")
        require(not self.increasing or bool((value[1:] >= value[:-1]).all()), f"{name} must be sorted")


def check_entries(rules: Mapping[str, TensorRule], entries: Mapping[str, Entry]) -> None:
    """Raises a WrongValue unless exactly the tensors with a rule are there, with the right types and shapes."""
    missing, strange = sorted(set(rules) - set(entries)), sorted(set(entries) - set(rules))
    require(not missing, f"the tensors lack {reprlib.repr(missing)}")
    require(not strange, f"the tensors {reprlib.repr(strange)} are not known")
    for name, rule in rules.items():
        rule.check_entry(name, entries[name])


def rows_of(entries: Mapping[str, Entry], name: str, limit: int) -> int:
    """Number of rows of a declared tensor, from 1 to ``limit``."""
    require(name in entries, f"the tensors lack {name!r}")
    shape = entries[name].shape
    rows = shape[0] if shape else 0
    require(1 <= rows <= limit, f"{name} must have 1 to {limit} rows, got shape {shape} instead")
    return rows
