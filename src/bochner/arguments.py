"""Checks of arguments that many functions share: counts, numbers, seeds, generators and tensors.

Each returns the value, or raises a ValueError with the argument's name, what was expected and what came.
"""

import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor

MAX_COUNT = 2**31 - 1  # of rows, units or steps: larger ones are mistakes
MAX_NUMBER = 1e18  # of scales and rates, and one over the smallest: squares of them still fit into float32


def shown(value: object) -> str:
    """A value as a line of an error message, shortened."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def described(value: object) -> str:
    """Type and shape of a tensor, or the type of anything else, for an error message."""
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """An integer of at least ``least``."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):  # a tensor of several integers raises a ValueError
        number = least - 1
    if not least <= number <= MAX_COUNT:
        limit = f"at least {least}" if number < least else f"at most {MAX_COUNT}"
        raise ValueError(f"The {name} parameter must be an integer of {limit}, got {shown(value)} instead.")
    return number


def _as_float(value: Any) -> float:
    """The value of a real number or of a tensor with no dimensions; NaN for everything else."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    is_scalar = isinstance(value, Tensor) and value.ndim == 0 and value.dtype.is_floating_point and not value.is_meta
    try:
        return float(value) if is_number or is_scalar else float("nan")
    except OverflowError:
        return float("inf")


def positive_number(name: str, value: Any, *, bounded: bool = True) -> float:
    """A positive, finite number; ``bounded``: neither so large nor so small that its square is lost in float32."""
    number = _as_float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"The {name} parameter must be positive and finite, got {shown(value)} instead.")
    if bounded and not 1 / MAX_NUMBER <= number <= MAX_NUMBER:
        raise ValueError(f"The {name} parameter must lie between 1e-18 and 1e18, got {shown(value)} instead.")
    return number


def probability(name: str, value: Any, *, zero: bool = False) -> float:
    """A number between 0 and 1: neither of them, or 0 with ``zero``."""
    number = _as_float(value)
    if not (0 <= number < 1 if zero else 0 < number < 1):
        limits = "in [0, 1)" if zero else "between 0 and 1"
        raise ValueError(f"The {name} parameter must lie {limits}, got {shown(value)} instead.")
    return number


def as_sequence(value: Any, num: int = 1) -> list[Any]:
    """The values of a sequence; or one value, ``num`` times."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * num


def seed_number(name: str, value: Any) -> int:
    """An integer of 64 bits, for a random generator."""
    try:
        number = operator.index(value)
    except (TypeError, ValueError):
        number = 2**63
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"The {name} parameter must be an integer of at most 64 bits, got {shown(value)} instead.")
    return number


def generator_device(generator: torch.Generator | None) -> torch.device:
    """The device of a generator, after checking that it is one; the CPU for None."""
    if generator is None:
        return torch.device("cpu")
    if not isinstance(generator, torch.Generator):
        raise ValueError(f"The generator parameter must be a torch.Generator or None, got {shown(generator)} instead.")
    return generator.device


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether a value is an ordinary tensor of real numbers."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_complex()


def dense_tensor(name: str, value: Any) -> Tensor:
    """An ordinary tensor of real numbers."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"The {name} parameter must be a tensor, got {type(value).__name__} instead; torch.as_tensor makes one."
        )
    if not is_dense(value):
        kind = value.dtype if value.is_complex() else value.layout
        raise ValueError(f"The {name} parameter must be a dense tensor of real numbers, got {kind} instead.")
    return value


def finite_tensor(name: str, value: Any) -> Tensor:
    """An ordinary tensor of finite numbers that are not huge, with at least one row."""
    value = dense_tensor(name, value)
    if value.ndim == 0 or len(value) == 0:
        raise ValueError(f"The {name} parameter must have at least 1 row, got shape {tuple(value.shape)} instead.")
    if value.is_meta:
        raise ValueError(f"The {name} parameter must hold numbers, got a tensor on torch's meta device instead.")
    if value.is_floating_point() and value.numel() and not (size := float(value.detach().abs().max())) <= MAX_NUMBER:
        if count := int((~torch.isfinite(value)).sum()):
            raise ValueError(
                f"The {name} parameter must be finite, got {count} NaN or infinite entries; drop or impute those rows first."
            )
        raise ValueError(f"The {name} parameter must hold numbers up to 1e18, got {size:g}; standardise it first.")
    return value
