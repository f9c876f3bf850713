"""Members: heads, what they stand on and what they count for; for regression and classes alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bochner.members.extractors import Extractors
from bochner.members.features import KernelFeatures
from bochner.priors.spectra import Spectrum


@dataclass
class Member:
    """A head, what it stands on and what it counts for.

    Attributes:
        weight: Its share of the prediction.
        head: A GaussianHead or a SoftmaxHead.
        network: Number of the network whose features it stands on; None for the columns themselves.
        map: For regression, the map of the target that it predicts.
    """

    weight: float
    head: Any
    network: int | None = None
    map: Any = None


class Inputs:
    """The inputs of a piece of rows, and what each network makes of them, computed when first asked for."""

    def __init__(self, x: Tensor, extractors: Extractors | None) -> None:
        self.x, self.extractors = x, extractors
        self.deep: dict[int, Tensor] = {}

    def of(self, network: int | None) -> Tensor:
        """What a member stands on."""
        if network is None:
            return self.x
        if network not in self.deep:
            assert self.extractors is not None
            self.deep[network] = self.extractors(network, self.x)
        return self.deep[network]


def variance_left(members: Sequence[Member], inputs: Inputs) -> Tensor:
    """Share of the prior variance that the training rows leave at each row, weighed over members: from 0 to 1."""
    total = torch.zeros(len(inputs.x), dtype=torch.float64, device=inputs.x.device)
    for member in members:
        total += member.weight * member.head.variance_left(inputs.of(member.network)).clamp(max=1.0)
    return total.clamp(max=1.0)


def anchored(spectrum: Spectrum, lengthscale: Tensor, x: Tensor, order: Tensor, most: int) -> KernelFeatures:
    """Features with anchors at the first rows of a random order."""
    return KernelFeatures.at(spectrum, lengthscale, x[order[:most]])


class Scored(Protocol):
    """Anything with a score."""

    @property
    def score(self) -> float:
        """Higher is better."""
        ...


Choice = TypeVar("Choice", bound=Scored)


def climb(size: int, start: int, evaluate: Callable[[int], Choice]) -> Choice:
    """The best of a row of choices, from ``start`` in the direction in which the score rises, until it does not."""
    found: dict[int, Choice] = {}

    def at(index: int) -> Choice:
        if index not in found:
            found[index] = evaluate(index)
        return found[index]

    here = start
    while True:
        near = [index for index in (here, here - 1, here + 1) if 0 <= index < size]
        best = max(near, key=lambda index: at(index).score)
        if best == here:
            return found[here]
        here = best


def worth_keeping(weights: Tensor, floor: float) -> list[int]:
    """Which candidates stay: the first, which promises least and so is the safest, and those that count for something."""
    return [number for number, share in enumerate(weights.tolist()) if number == 0 or share >= floor]


def describe(members: Sequence[Member]) -> str:
    """How many members stand on the columns and how many on networks, and what they count for."""
    kinds = {"the columns": [m.weight for m in members if m.network is None]}
    kinds["networks"] = [m.weight for m in members if m.network is not None]
    return ", ".join(f"{len(weights)} on {kind} ({sum(weights):.2f})" for kind, weights in kinds.items() if weights)
