"""Dropout whose masks come from the seed of each network: networks that train as one stack then have masks of their own."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from bochner.arguments import probability, whole_number

SEEDABLE_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # layers that a SeededDropout can stand in for


class SeededDropout(nn.Module):
    """Dropout whose mask is given from outside: ``fit_map`` draws it from each network's own seed.

    Without a mask, and in evaluation, it passes its input on unchanged.

    Args:
        p: Probability of setting an entry to zero.
        shape: Sizes of the mask of a row: those of the features it acts on, or 1 where entries go together.
    """

    mask: torch.Tensor

    def __init__(self, p: float, *shape: int) -> None:
        super().__init__()
        shape = tuple(whole_number("shape", size) for size in shape)
        self.p, self.shape, self.width = probability("p", p, zero=True), shape, math.prod(shape)
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies by the mask, (..., width)."""
        if not self.training or self.mask.ndim == 0:
            return x * self.mask if self.training else x
        return x * self.mask.unflatten(-1, self.shape)


@contextlib.contextmanager
def seeded_dropout(extractors: Sequence[nn.Module], example: torch.Tensor) -> Iterator[None]:
    """Puts a ``SeededDropout`` in the place of every ``nn.Dropout`` for a while: each network then has masks of its own.

    Args:
        extractors: Networks of one structure.
        example: Some inputs, whose passage through the first network tells the sizes.
    """
    names = [n for n, m in extractors[0].named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    shapes = _output_shapes(extractors[0], names, example) if names else {}
    names = [name for name in names if name in shapes]  # torch's transformer skips its dropout in evaluation
    before: list[dict[str, Any]] = [{name: e.get_submodule(name) for name in names} for e in extractors]
    try:
        for extractor, layers in zip(extractors, before, strict=True):
            for name, layer in layers.items():
                mask = shapes[name] if type(layer) is nn.Dropout else (shapes[name][0], *[1] * (len(shapes[name]) - 1))
                extractor.set_submodule(name, SeededDropout(layer.p, *mask).train(layer.training))
        yield
    finally:
        for extractor, layers in zip(extractors, before, strict=True):
            for name, layer in layers.items():
                extractor.set_submodule(name, layer.train(extractor.training))


def _output_shapes(network: nn.Module, names: list[str], example: torch.Tensor) -> dict[str, torch.Size]:
    """Shape of one row of output of each named module, in evaluation; modules that are not used are left out."""
    shapes: dict[str, torch.Size] = {}
    not_seedable = [n for n in names if type(network.get_submodule(n)) not in SEEDABLE_LAYERS]
    if not_seedable or "" in names:
        raise ValueError(
            f"The networks may hold nn.Dropout and nn.Dropout1d to 3d, got {not_seedable or network} instead."
        )

    def recorder(name: str) -> Callable[[nn.Module, object, torch.Tensor], None]:
        return lambda _, __, output: shapes.__setitem__(name, output.shape[1:])

    handles = [network.get_submodule(name).register_forward_hook(recorder(name)) for name in names]
    training = network.training
    try:
        with torch.no_grad():
            network.eval()(example)
    finally:
        network.train(training)
        for handle in handles:
            handle.remove()
    return shapes
