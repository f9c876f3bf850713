"""Members of a mixture, and steps of a fit that regression and classes share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from bochner.members.features import KernelFeatures
from bochner.priors.spectra import Spectrum

if TYPE_CHECKING:
    from bochner.members.extractors import Extractors


@dataclass
class Member:
    """A head, its inputs and its weight in the mixture.

    Attributes:
        weight: Its share of the prediction.
        head: A GaussianHead or a SoftmaxHead.
        network: Number of the network whose outputs are its inputs; None where its inputs are the columns.
        map: For regression, the TargetMap on whose scale it predicts; None for classes.
    """

    weight: float
    head: Any
    network: int | None = None
    map: Any = None


class Inputs:
    """A piece of rows for any member: the columns, the outputs of each network and what each head says of them.

    All but the columns is computed when it is first needed, and once.
    """

    def __init__(self, x: Tensor, extractors: "Extractors | None") -> None:
        self.x, self.extractors = x, extractors
        self.deep: dict[int, Tensor] = {}
        self.predictions: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of the head

    def of(self, network: int | None) -> Tensor:
        """Inputs of a member on this network, or on the columns."""
        if network is None:
            return self.x
        if network not in self.deep:
            assert self.extractors is not None
            self.deep[network] = self.extractors(network, self.x)
        return self.deep[network]

    def predicted_by(self, member: Member) -> tuple[Tensor, Tensor]:
        """What the member's head predicts: mean and variance, or latent functions and the variance left."""
        if id(member.head) not in self.predictions:
            self.predictions[id(member.head)] = member.head.predict(self.of(member.network))
        return self.predictions[id(member.head)]


def weighted_variance_left(members: Sequence[Member], inputs: Inputs) -> Tensor:
    """Share of the prior variance that the training rows leave at each row, from 0 to 1: the members' weighted mean."""
    total = torch.zeros(len(inputs.x), dtype=torch.float64, device=inputs.x.device)
    for member in members:
        left = member.head.left_of(*inputs.predicted_by(member))
        total += member.weight * left.clamp(max=1.0)
    return total.clamp(max=1.0)


def features_at_first_rows(
    spectrum: Spectrum, lengthscale: Tensor, x: Tensor, order: Tensor, count: int
) -> KernelFeatures:
    """Features with anchors at the first ``count`` rows of a random order."""
    return KernelFeatures.at(spectrum, lengthscale, x[order[:count]])


class Scored(Protocol):
    """Anything that has a score."""

    @property
    def score(self) -> float:
        """Higher is better."""
        ...


Choice = TypeVar("Choice", bound=Scored)


def climb_to_best(size: int, start: int, evaluate: Callable[[int], Choice]) -> Choice:
    """Hill climbing over choices 0 to size − 1: steps to the better neighbour until neither has a higher score.

    Args:
        size: Number of choices.
        start: Choice to begin with.
        evaluate: Makes a choice; called at most once for each.
    """
    evaluated: dict[int, Choice] = {}

    def at(index: int) -> Choice:
        if index not in evaluated:
            evaluated[index] = evaluate(index)
        return evaluated[index]

    current = start
    while True:
        neighbours = [index for index in (current, current - 1, current + 1) if 0 <= index < size]
        best = max(neighbours, key=lambda index: at(index).score)
        if best == current:
            return evaluated[current]
        current = best


def candidates_to_keep(weights: Tensor, floor: float) -> tuple[list[int], Tensor]:
    """Indices of the candidates whose weight is at least ``floor``, and their weights; the first and simplest one always stays."""
    kept = [index for index, share in enumerate(weights.tolist()) if index == 0 or share >= floor]
    return kept, weights[kept] / weights[kept].sum()


def make_members(candidates: Sequence[Any], weights: Tensor) -> tuple[list[Member], np.ndarray]:
    """The members that the heads of candidates become, and the candidates' mean variance left at the rows that judge."""
    left = weights @ torch.stack([candidate.left for candidate in candidates]).clamp(max=1.0)
    members = [
        Member(float(share) / len(candidate.heads), head, network, candidate.map)
        for share, candidate in zip(weights, candidates, strict=True)
        for network, head in candidate.heads
    ]
    return members, left.cpu().numpy()


def used_extractors(members: Sequence[Member], extractors: "Extractors | None") -> "Extractors | None":
    """The trained networks, if a member stands on one."""
    return extractors if any(member.network is not None for member in members) else None


def describe_members(members: Sequence[Member]) -> str:
    """Text such as '3 on the columns (0.60), 5 on networks (0.40)': number and total weight of each kind of member."""
    kinds = {"the columns": [m.weight for m in members if m.network is None]}
    kinds["networks"] = [m.weight for m in members if m.network is not None]
    return ", ".join(f"{len(weights)} on {kind} ({sum(weights):.2f})" for kind, weights in kinds.items() if weights)
