"""Features of rows that are gone through many times."""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from torch import Tensor

MAX_KEPT_FEATURES = 2**26  # largest count of float64 features that are kept in memory: half a GiB


Piece = TypeVar("Piece")  # what features are computed of: inputs, or inputs with labels
Computed = TypeVar("Computed", Tensor, tuple[Tensor, Tensor])  # features, or features with labels


class FeatureRows(Generic[Piece, Computed]):
    """Features of the training rows, in pieces: kept in memory up to half a GiB, computed again in every pass beyond.

    Args:
        compute: Features of a piece of rows, with what belongs to them.
        pieces: All rows, in pieces.
    """

    def __init__(self, compute: Callable[[Piece], Computed], pieces: Iterable[Piece]) -> None:
        self.compute, self.pieces = compute, pieces
        self.kept: list[Computed] | None = None
        kept: list[Computed] = []
        size = 0
        for computed in self:
            kept.append(computed)
            size += (computed if isinstance(computed, Tensor) else computed[0]).numel()
            if size > MAX_KEPT_FEATURES:
                return
        self.kept = kept

    def __iter__(self) -> Iterator[Computed]:
        return iter(self.kept) if self.kept is not None else map(self.compute, self.pieces)
