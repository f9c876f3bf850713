"""Rows to learn from, batch by batch: from two tensors, or from a loader, whose rows several processes may share.

A loader is a ``DataLoader`` or any other iterable of batches that can be gone through more than once. Under
``torch.distributed`` every process gives its own share of the rows, and what is summed over them is summed over processes too, so
that all get the same result. Tensors are the whole data in every process.

Posteriors go through ``Batches``. A stack of networks takes ``Minibatches`` or ``LoadedBatches``: a batch for every network.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from bochner.arguments import finite_tensor, is_dense, shown, whole_number
from bochner.models import Model
from bochner.predictive import Predictive, joined
from bochner.training.checks import check_data, check_model, check_takes
from bochner.training.randomness import counter_permutation

TensorOrLoader = Tensor | Iterable[object]  # inputs as a tensor; or batches that can be gone through more than once
LABELS = ("labels", "label", "targets", "target", "y")  # what labels are called in a batch that is a dictionary

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional, and by name


def split_batch(batch: Any) -> tuple[Inputs, Any]:
    """Inputs of a batch, positional and by name, and its targets or None."""
    if isinstance(batch, Tensor):
        return ((batch,), {}), None
    if isinstance(batch, Mapping):
        key = next((name for name in LABELS if name in batch), None)
        return ((), {k: v for k, v in batch.items() if k != key}), None if key is None else batch[key]
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[0], tuple | list | Mapping):
        # As PyTorch gathers rows ((x₁, x₂), y) or ({"a": x₁}, y).
        return ((), dict(batch[0])) if isinstance(batch[0], Mapping) else (tuple(batch[0]), {}), batch[1]
    if isinstance(batch, tuple | list) and len(batch) > 0 and isinstance(batch[0], Tensor):
        inputs = batch if len(batch) == 1 else batch[:-1]
        return (tuple(inputs), {}), None if len(batch) == 1 else batch[-1]
    raise ValueError(
        "A batch must be a tensor, a tuple of tensors, a dictionary, or a pair of inputs and targets, got "
        f"{type(batch).__name__} instead."
    )


def targets_of(batch: Any) -> Tensor:
    """The targets of a batch, as a tensor."""
    targets = split_batch(batch)[1]
    if targets is None:
        what = f"a dictionary of {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else "inputs alone"
        what += "" if isinstance(batch, Mapping) else "; a pair of tensors is one batch in a list, [(x, y)]"
        raise ValueError(f"A batch must hold targets: (x, y), or a dictionary with one of {LABELS}; got {what}.")
    try:
        return torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"A batch must hold targets that are numbers, got {shown(targets)}.") from error


def first_batch(loader: Any) -> Any:
    """A loader's first batch, after checking that the loader can be gone through more than once."""
    if not isinstance(loader, Iterable) or isinstance(loader, str | Mapping) or iter(loader) is loader:
        raise ValueError(
            "The loader parameter must be something that can be gone through more than once, such as a DataLoader or a list; "
            f"got a {type(loader).__name__}."
        )
    if (batch := next(iter(loader), None)) is None:
        raise ValueError("The loader parameter must give at least one batch, got none.")
    return batch


def as_model_takes(value: Tensor, like: Tensor) -> Tensor:
    """A tensor on the device of ``like``, without gradient; floating-point numbers in the type of ``like``."""
    return value.detach().to(like.device, like.dtype if value.is_floating_point() else value.dtype)


def one_input(batch: Any, number: int, like: Tensor) -> Tensor:
    """The inputs of a batch for a Model, which takes one tensor."""
    positional, named = split_batch(batch)[0]
    inputs = [*positional, *named.values()]
    if len(inputs) != 1 or not is_dense(inputs[0]):
        raise ValueError(
            f"Batch {number} must hold one tensor of inputs, for a Model takes one; got {len(inputs)} values beside its targets."
        )
    return as_model_takes(inputs[0], like)


class Batches:
    """Pairs (x, y) of a tensor pair or a loader, on a model's device and in its floating-point type; may be gone through often.

    Args:
        model: The model that will read them.
        x: Inputs, (N, ...); or a loader of (x, y), or of dictionaries with the targets under 'labels' or the like.
        y: Targets, (N, ...); None with a loader.
        size: Rows of a batch that is cut from tensors.
    """

    def __init__(self, model: Model, x: Any, y: Tensor | None, *, size: int) -> None:
        self.model, self.x, self.y, self.size = model, x, y, whole_number("chunk or batch_size", size)
        self.is_loader = y is None
        self.shapes: set[torch.Size] = set()  # of rows that the network is known to take
        check_model(model)
        if y is not None:
            check_data(model, x, y)
            self.x, self.y = x.detach(), y.detach()
        elif isinstance(x, Tensor):
            raise ValueError("The y parameter must be given beside a tensor x; or give a loader of (x, y) as x.")
        else:
            try:
                targets_of(first_batch(x))
            except ValueError as error:
                raise ValueError(f"The x parameter, without y, must be a loader of pairs. {error}") from error

    @property
    def shared(self) -> bool:
        """Whether each process has a different share of the rows."""
        return self.is_loader and workers() > 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.y is not None:
            yield from zip(self.x.split(self.size), self.y.split(self.size), strict=True)
            return
        labels: list[int] = []
        for number, batch in enumerate(self.x):
            x, y = self._pair(batch, number)
            if not y.is_floating_point():
                labels = (
                    [min(*labels, int(y.min())), max(*labels, int(y.max()))] if labels else [int(y.min()), int(y.max())]
                )
            yield x, y
        if labels and labels[0] == labels[1] and not self.shared:
            raise ValueError(
                f"The loader must give at least two classes, got only class {labels[0]}: there is nothing to learn."
            )

    def _pair(self, batch: Any, number: int) -> tuple[Tensor, Tensor]:
        like = self.model.layer.weight
        x, y = one_input(batch, number, like), as_model_takes(targets_of(batch), like)
        try:
            check_data(self.model, x, y, whole=False)
            if x.shape[1:] not in self.shapes:
                check_takes(self.model, x)
                self.shapes.add(x.shape[1:])
        except ValueError as error:
            raise ValueError(f"Batch {number} of the loader: {error}") from error
        return x, y

    def count(self) -> int:
        """Number of rows, of all processes together; those of a loader are counted by going through it."""
        if self.y is not None:
            return len(self.x)
        sizes = [len(x) for x, _ in self]
        if self.shared:
            all_sizes: list[Any] = [None] * workers()
            torch.distributed.all_gather_object(all_sizes, sizes)
            if len({len(counts) for counts in all_sizes}) > 1:
                raise ValueError(
                    "The loaders must give as many batches in every process, or processes would wait for each other; got "
                    f"{', '.join(str(len(counts)) for counts in all_sizes)}. DistributedSampler sees to that."
                )
            sizes = [size for counts in all_sizes for size in counts]
        return sum(sizes)

    def of_all_processes(self) -> list[tuple[Tensor, Tensor]]:
        """The pairs of all processes, for a few hundred rows that every process needs."""
        pairs_here = list(self)
        if not self.shared:
            return pairs_here
        all_pairs: list[Any] = [None] * workers()
        torch.distributed.all_gather_object(all_pairs, [(x.cpu(), y.cpu()) for x, y in pairs_here])
        device = self.model.layer.weight.device
        return [(x.to(device), y.to(device)) for pairs in all_pairs for x, y in pairs]

    def over_processes(self, total: Tensor) -> Tensor:
        """The sum over all processes of what each has summed over its rows."""
        if self.shared:
            torch.distributed.all_reduce(total)
        return total


def workers() -> int:
    """Number of processes that work together under ``torch.distributed``."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


Answer = TypeVar("Answer", bound=Predictive)


def over_batches(predict: Callable[..., Answer]) -> Callable[..., Answer]:
    """Lets a posterior's ``predict`` take a loader in place of a tensor: it predicts batch by batch and ignores labels."""

    @functools.wraps(predict)
    def wrapper(self: Any, x: Any, *args: Any, **options: Any) -> Answer:
        if isinstance(x, Tensor):
            return predict(self, as_model_takes(finite_tensor("x", x), self.model.layer.weight), *args, **options)
        if not isinstance(x, Iterable) or isinstance(x, tuple | str | Mapping) or hasattr(x, "__array__"):
            raise ValueError(f"The x parameter must be a tensor or a loader, got {type(x).__name__} instead.")
        like, parts = self.model.layer.weight, []
        for number, batch in enumerate(x):
            try:
                inputs = finite_tensor("x", one_input(batch, number, like))
                parts.append(predict(self, inputs, *args, **options))
            except ValueError as error:
                raise ValueError(f"Batch {number} of the loader x: {error}") from error
        if not parts:
            raise ValueError("The x parameter must give at least one batch, got none.")
        return joined(parts)

    return wrapper


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
