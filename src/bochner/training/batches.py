"""Sources of batches for a stack of networks: rows of two tensors, or a loader."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bochner.training.loaders import Batches
from bochner.training.randomness import counter_permutation


class Minibatches:
    """Minibatches of the rows of two tensors: each network sees the rows that are its part, shuffled in every epoch.

    Args:
        x: Inputs, (N, ...).
        y: Targets, (N, ...).
        rows: Which rows each network sees, (E, n).
        size: Rows of a minibatch.
        seeds: Seeds of the shuffles, (E,).
    """

    shared = False

    def __init__(self, x: Tensor, y: Tensor, rows: Tensor, size: int, seeds: Tensor) -> None:
        self.x, self.y = x, y
        first, self.group = _equal_members(seeds, rows)
        self.rows, self.seeds = rows[first], seeds[first]
        self.sizes = [min(size, rows.shape[1] - start) for start in range(0, rows.shape[1], size)]
        self.order = self.rows.clone()
        self.position = torch.zeros((), dtype=torch.int64, device=x.device)

    def epoch(self, number: int) -> Iterator[int]:
        """Shuffles the rows; returns the sizes of the minibatches, in order."""
        self.order.copy_(self.rows.gather(1, counter_permutation(self.seeds, number, self.rows.shape[1])))
        self.position.zero_()
        return iter(self.sizes)

    def take(self, rows: int) -> tuple[Tensor, Tensor]:
        """The next rows of every network, (E, rows, ...), by operations that a CUDA graph can record."""
        index = self.order.index_select(1, self.position + torch.arange(rows, device=self.x.device))
        if len(index) == len(self.group):
            return self.x[index], self.y[index]
        return self.x[index][self.group], self.y[index][self.group]

    def advance(self, rows: int) -> None:
        """Moves the position forward by a number of rows."""
        self.position += rows


def _equal_members(seeds: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The first network of each group with equal seed and rows, and each network's group: a group shares its batches."""
    members = torch.arange(len(seeds), device=seeds.device)
    first, group = distinct(seeds)
    same = len(first) < len(seeds) and all(
        torch.equal(member_rows, rows[first[g]]) for member_rows, g in zip(rows, group, strict=True)
    )
    return (first, group) if same else (members, members)


def distinct(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """The first network with each seed, in order, and for each network the number of its seed among them."""
    numbers: dict[int, int] = {}
    group = [numbers.setdefault(seed, len(numbers)) for seed in seeds.tolist()]
    first = [group.index(number) for number in range(len(numbers))]
    return torch.tensor(first, device=seeds.device), torch.tensor(group, device=seeds.device)


class LoadedBatches:
    """The batches of a loader, the same for every network. Several processes may each give a share of every batch.

    Args:
        batches: The pairs (x, y) of the loader.
        members: Number E of networks.
    """

    def __init__(self, batches: Batches, members: int) -> None:
        self.batches, self.members, self.shared = batches, members, batches.shared
        self.held = next(iter(batches))
        self.sizes = [len(self.held[0])]

    def epoch(self, _: int) -> Iterator[int]:
        """Yields the size of each batch, while ``take`` returns that batch."""
        for pair in self.batches:
            self.held = pair
            yield len(pair[0])

    def take(self, _: int) -> tuple[Tensor, Tensor]:
        """The present batch, once for every network, (E, rows, ...)."""
        x, y = (t.expand(self.members, *t.shape) for t in self.held)
        return x, y

    def advance(self, rows: int) -> None:
        """Does nothing: the loader moves on by itself."""
