"""Where the batches of a stack come from: rows of two tensors, or a loader."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bochner.training.loaders import Batches
from bochner.training.randomness import counter_permutation


class Minibatches:
    """Rows of two tensors, cut into minibatches: every member has rows of its own, in an order of its own in every epoch.

    Args:
        x: Inputs, (N, ...).
        y: Targets, (N, ...).
        rows: Which rows each member sees, (E, n).
        size: Rows of a minibatch.
        seeds: Seeds of the shuffles, (E,).
    """

    shared = False

    def __init__(self, x: Tensor, y: Tensor, rows: Tensor, size: int, seeds: Tensor) -> None:
        self.x, self.y = x, y
        first, self.group = _alike(seeds, rows)
        self.rows, self.seeds = rows[first], seeds[first]
        self.sizes = [min(size, rows.shape[1] - start) for start in range(0, rows.shape[1], size)]
        self.order = self.rows.clone()
        self.position = torch.zeros((), dtype=torch.int64, device=x.device)

    def epoch(self, number: int) -> Iterator[int]:
        """Shuffles; then gives the size of each minibatch in turn."""
        self.order.copy_(self.rows.gather(1, counter_permutation(self.seeds, number, self.rows.shape[1])))
        self.position.zero_()
        return iter(self.sizes)

    def take(self, rows: int) -> tuple[Tensor, Tensor]:
        """The next rows of every member, (E, rows, ...): operations that a graph can hold."""
        index = self.order.index_select(1, self.position + torch.arange(rows, device=self.x.device))
        if len(index) == len(self.group):
            return self.x[index], self.y[index]
        return self.x[index][self.group], self.y[index][self.group]

    def advance(self, rows: int) -> None:
        """Moves on by that many rows."""
        self.position += rows


def _alike(seeds: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Members of the same seed and rows see the same batches: the first member of each such group, and each member's group."""
    everyone = torch.arange(len(seeds), device=seeds.device)
    first, group = distinct(seeds)
    same = len(first) < len(seeds) and all(torch.equal(own, rows[first[g]]) for own, g in zip(rows, group, strict=True))
    return (first, group) if same else (everyone, everyone)


def distinct(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """The first member with each seed, in the order of the members, and for each member the number of its seed."""
    numbers: dict[int, int] = {}
    group = [numbers.setdefault(seed, len(numbers)) for seed in seeds.tolist()]
    first = [group.index(number) for number in range(len(numbers))]
    return torch.tensor(first, device=seeds.device), torch.tensor(group, device=seeds.device)


class LoadedBatches:
    """The batches of a loader, the same for every member. Several processes may each give a share of every batch.

    Args:
        batches: The loader's pairs.
        members: Number E of members.
    """

    def __init__(self, batches: Batches, members: int) -> None:
        self.batches, self.members, self.shared = batches, members, batches.shared
        self.held = next(iter(batches))
        self.sizes = [len(self.held[0])]

    def epoch(self, _: int) -> Iterator[int]:
        """Gives the size of each batch in turn, and holds the batch."""
        for pair in self.batches:
            self.held = pair
            yield len(pair[0])

    def take(self, _: int) -> tuple[Tensor, Tensor]:
        """The batch that is held, (E, rows, ...)."""
        x, y = (t.expand(self.members, *t.shape) for t in self.held)
        return x, y

    def advance(self, rows: int) -> None:
        """Nothing: the next batch comes from the loader."""
