"""A trained network that gives its features beside its outputs, and the rows of a loader with these features and outputs."""

import copy
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from bochner.arguments import described
from bochner.training.batches import Inputs, first_batch, split_batch, targets_of, workers
from bochner.training.randomness import GOLDEN_FACTOR

MAX_KEY_NUMBERS = 4096  # numbers of a row that its key is computed from; the key decides whether it is in the sample
BATCH_ROWS = 1024  # rows of a tensor in one batch


class Tapped:
    """A network whose features, the inputs of a linear layer, are given beside its outputs.

    Its modules are copies in evaluation mode; parameters and buffers are the network's own. ``made_for`` is their digest at first.

    Args:
        network: The network.
        name: Dotted name of the linear layer.
    """

    def __init__(self, network: nn.Module, name: str) -> None:
        network = unwrapped(network)
        layers = dict(network.named_modules())
        if not isinstance(layers.get(name), nn.Linear):
            linears = ", ".join(repr(n) for n, module in layers.items() if isinstance(module, nn.Linear)) or "none"
            raise ValueError(
                f"The head parameter must name an nn.Linear of the network ({linears}), got {name!r} instead."
            )
        self.name = name
        dictionaries = [values for m in network.modules() for values in (m._parameters, m._buffers, m.__dict__)]
        shared: dict[int, Any] = {id(v): v for values in dictionaries for v in values.values() if isinstance(v, Tensor)}
        try:
            self.network = copy.deepcopy(network, shared).eval()
        except Exception as error:
            raise ValueError(
                f"The network's modules could not be copied ({type(error).__name__}: {error}). Take away what it holds beside "
                "modules and parameters, such as tensors of earlier passes, locks or a trainer."
            ) from error
        self.layer: Any = self.network.get_submodule(name)
        self._seen = threading.local()  # so that threads do not see each other's features
        self.layer.register_forward_hook(self._remember)
        self.device, self.dtype = self.layer.weight.device, self.layer.weight.dtype
        self.made_for = self.digest
        self.input_dtype = next(p.dtype for p in self.network.parameters() if p.is_floating_point())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_seen"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _seen=threading.local())

    def _remember(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._seen.features, self._seen.output = inputs[0], output.clone()  # later layers may change it in place

    @classmethod
    def of(cls, network: nn.Module, name: str | None, loader: Iterable[Any]) -> "Tapped":
        """The network tapped at the named layer, or at the linear layer whose output it returns."""
        if name is not None:
            return cls(network, name)
        if isinstance(unwrapped(network), torch.jit.ScriptModule):
            raise ValueError(
                "The network parameter must be a module of Python; a scripted or traced one hides its layers."
            )
        linears = [n for n, module in unwrapped(network).named_modules() if isinstance(module, nn.Linear)]
        batch = split_batch(next(iter(loader)))[0]
        for candidate in reversed(linears):
            tapped = cls(network, candidate)
            if tapped.is_last(batch):
                return tapped
        raise ValueError(
            f"The network must return the output of an nn.Linear; none of its {len(linears)} does. Take away what comes after "
            "the last linear layer (a softmax, say), or, where the network's outputs are logits all the same, name the layer whose "
            "inputs are to be features in head=."
        )

    @torch.no_grad()
    def is_last(self, batch: Inputs) -> bool:
        """Whether the layer's output is what the network returns, or what it takes the log_softmax of."""
        outputs, layer_output = self._run(batch), getattr(self._seen, "output", None)
        if layer_output is None or layer_output.numel() != outputs.numel():
            return False
        same = torch.allclose(layer_output.flatten(), outputs.flatten(), rtol=0, atol=0, equal_nan=True)
        return same or _are_log_probabilities(outputs, layer_output)

    def _run(self, batch: Inputs) -> Tensor:
        if (self.layer.weight.device, self.layer.weight.dtype) != (self.device, self.dtype):
            raise ValueError(
                f"The network was moved from {self.device}, {self.dtype} to {self.layer.weight.device}, {self.layer.weight.dtype} "
                "since its head was made; move it back, or make the head again."
            )
        self._seen.features = self._seen.output = None
        args, named = batch
        try:
            returned = self.network(*map(self._moved, args), **{k: self._moved(v) for k, v in named.items()})
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error):
                raise  # too little memory: no fault of the rows
            kinds = ", ".join(described(value) for value in (*args, *named.values()))
            raise ValueError(f"The network cannot take these inputs, {kinds}: {error}") from error
        outputs = getattr(returned, "logits", returned)
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"The network must return a tensor, or an object with logits; got {type(returned).__name__}."
            )
        return outputs

    def __call__(self, batch: Inputs) -> tuple[Tensor, Tensor]:
        """Features, (n, d), and outputs of a batch."""
        outputs, features = self._run(batch), self._seen.features
        if _are_log_probabilities(outputs, self._seen.output):
            outputs = self._seen.output  # the same answer, and logits tell how large they are
        if features is not None and features.ndim == 2 and outputs.numel() == len(features):
            outputs = outputs.reshape(len(features), -1)  # a network that squeezes loses the rows of a batch of one
        self._seen.features = self._seen.output = None  # no batch is kept in memory
        if features is None:
            raise ValueError(f"The layer {self.name!r} was not used when the network was run; name another in head=.")
        if features.ndim != 2 or len(features) != len(outputs):
            raise ValueError(
                f"The layer {self.name!r} must see one row of features for each row of outputs, got shapes "
                f"{tuple(features.shape)} and {tuple(outputs.shape)}."
            )
        return features, outputs

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, self.input_dtype) if value.is_floating_point() else value.to(self.device)

    @property
    def digest(self) -> str:
        """A digest of all parameters and buffers, which tells networks apart."""
        digest = hashlib.sha256()
        for name, value in self.network.state_dict().items():
            digest.update(name.encode())
            if isinstance(value, Tensor):
                digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def unwrapped(network: nn.Module) -> nn.Module:
    """The network itself, where it is compiled or wrapped for several devices."""
    network = getattr(network, "_orig_mod", network)  # of torch.compile
    wrapped = isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel)
    return network.module if wrapped else network


def _are_log_probabilities(outputs: Tensor, layer_output: Tensor | None) -> bool:
    """Whether outputs are the log_softmax of a layer's outputs."""
    if layer_output is None or layer_output.shape != outputs.shape or outputs.ndim != 2 or outputs.shape[1] < 2:
        return False
    expected = torch.log_softmax(layer_output.double(), 1)
    close = torch.allclose(outputs.double(), expected, rtol=1e-2, atol=1e-3) if len(outputs) else False
    return close and not torch.equal(outputs, layer_output)


def inputs_of(x: Any) -> Iterator[Inputs]:
    """The inputs of a tensor, a tuple or dictionary of tensors, or a loader, batch by batch."""
    if isinstance(x, Tensor):
        yield from (((part,), {}) for part in x.split(BATCH_ROWS) if len(part) > 0)
    elif isinstance(x, Mapping):
        yield split_batch(x)[0]
    elif isinstance(x, tuple):  # of a network with several inputs
        yield x, {}
    elif isinstance(x, Iterable) and not isinstance(x, np.ndarray):
        yield from (split_batch(batch)[0] for batch in x)
    else:
        raise ValueError(f"The x parameter must be a tensor, a dictionary or a loader, got {type(x).__name__} instead.")


def first_targets(loader: Iterable[Any]) -> Tensor:
    """The targets of a loader's first batch; a ValueError where the loader can be gone through only once."""
    return targets_of(first_batch(loader))


def as_outputs(outputs: Tensor, classes: bool) -> Tensor:
    """Outputs as (n, c). A single logit for two classes becomes two logits, one the negative of the other."""
    outputs = outputs.flatten(1) if outputs.ndim > 1 else outputs[:, None]
    return torch.cat([-outputs / 2, outputs / 2], 1) if classes and outputs.shape[1] == 1 else outputs


@dataclass
class HeadRows:
    """Rows of a loader after the network.

    Attributes:
        features: Inputs of the last layer, (n, d).
        outputs: Outputs of the network, (n, c).
        targets: Targets, (n, c), or labels, (n,).
        keys: A pseudo-random number for each row and its target, (n,): rows with the smallest ones are the sample.
        input_keys: A number for each row that is the same for equal inputs, whatever their targets, (n,).
        counts: How many equal rows with equal targets each one stands for, (n,).
        seen: Number of rows that these were drawn from.
    """

    features: Tensor
    outputs: Tensor
    targets: Tensor
    keys: Tensor
    input_keys: Tensor
    counts: Tensor
    seen: int

    def __len__(self) -> int:
        return len(self.keys)

    def _each(self, change: Callable[..., Tensor], *others: "HeadRows") -> "HeadRows":
        """Rows whose tensors are what a function makes of these rows' tensors, and of those of others."""
        names = ("features", "outputs", "targets", "keys", "input_keys", "counts")
        return replace(self, **{name: change(*(getattr(rows, name) for rows in (self, *others))) for name in names})

    def __getitem__(self, rows: slice | Tensor) -> "HeadRows":
        return self._each(lambda tensor: tensor[rows])

    def to(self, device: torch.device) -> "HeadRows":
        """The same rows on a device."""
        return self._each(lambda tensor: tensor.to(device))

    def joined(self, other: "HeadRows") -> "HeadRows":
        """These rows and then those of the other."""
        both = self._each(lambda a, b: torch.cat([a, b]), other)
        return replace(both, seen=self.seen + other.seen)

    def smallest(self, count: int) -> "HeadRows":
        """The rows with the smallest keys, in their order; equal ones become one that counts as many."""
        rows = self[self.keys.argsort(stable=True)]
        first = torch.ones_like(rows.keys, dtype=torch.bool)
        first[1:] = rows.keys[1:] != rows.keys[:-1]
        counts = torch.zeros_like(rows.counts[first]).index_add_(0, first.cumsum(0) - 1, rows.counts)
        return replace(rows[first], counts=counts)[:count]

    def expanded(self, most: int) -> "HeadRows":
        """Each row as often as it counts; where these are more than ``most``, so many of them, evenly spaced."""
        total = int(self.counts.sum())
        places = torch.arange(min(total, most), device=self.counts.device)
        places = (places + 0.5) * (total / max(1, len(places)))
        at = torch.searchsorted(self.counts.cumsum(0), places.long(), right=True)
        return replace(self[at], counts=torch.ones_like(at))

    def parted(self, most_anchors: int) -> tuple["HeadRows", "HeadRows"]:
        """Anchors, with different inputs, and known rows, which are no copies of anchors that come once.

        Inputs that come more than once are anchors first. Half of the others are, and the other half is known, for no row can be
        compared with itself. A row that comes more than once has others like it.
        """
        _, group, counts = torch.unique(self.input_keys, return_inverse=True, return_counts=True)
        total = torch.zeros_like(counts).index_add_(0, group, self.counts)
        position = torch.arange(len(self), device=group.device)
        first = torch.full_like(counts, len(self)).scatter_reduce_(0, group, position, "amin")
        repeated = (total > 1)[group]
        different = position == first[group]
        single = position[different & ~repeated]
        single = single[: len(single) // 2]
        anchors = torch.cat([position[different & repeated], single])[:most_anchors]
        known = torch.ones(len(self), dtype=torch.bool, device=group.device)
        known[anchors] = False
        return self[anchors], self[known | repeated]


@dataclass(frozen=True)
class Reader:
    """Goes through a loader, with a network.

    Attributes:
        tapped: The network.
        classes: Whether targets are classes.
    """

    tapped: Tapped
    classes: bool

    @torch.no_grad()
    def rows(self, loader: Iterable[Any], title: str, progress: bool) -> Iterator[HeadRows]:
        """The batches of a loader, one at a time."""
        length = _length(loader)
        shown = track(loader, title, total=length, console=Console(stderr=True), transient=True, disable=not progress)
        for number, batch in enumerate(shown):
            inputs, targets = split_batch(batch)[0], targets_of(batch).to(self.tapped.device)
            features, raw = self.tapped(inputs)
            self._check_logits(raw, number)
            outputs = as_outputs(raw, self.classes)
            if len(targets) != len(outputs):
                raise ValueError(f"Batch {number} has {len(targets)} targets for {len(outputs)} rows.")
            if not bool(torch.isfinite(features).all()) or not bool(torch.isfinite(outputs).all()):
                raise ValueError(f"Batch {number} gives features or outputs that are not finite; are its inputs?")
            targets, rows = self._checked(targets, outputs, number), len(outputs)
            input_keys = _keys([*inputs[0], *inputs[1].values()], features)
            keys = _keys([input_keys, targets], features)
            yield HeadRows(features, outputs, targets, keys, input_keys, torch.ones_like(keys), rows)

    def _check_logits(self, outputs: Tensor, number: int) -> None:
        """Refuses probabilities: rows that sum to one, or single outputs that all lie between 0 and 1."""
        if self.classes and _are_probabilities(outputs):
            raise ValueError(
                f"The network returns probabilities in batch {number}, where logits are needed: take the softmax or sigmoid at "
                "its end away."
            )

    def _checked(self, targets: Tensor, outputs: Tensor, number: int) -> Tensor:
        if not self.classes:
            targets = targets.reshape(len(targets), -1)
            if targets.shape != outputs.shape:
                raise ValueError(
                    f"Batch {number} has targets of shape {tuple(targets.shape)} for outputs of shape {tuple(outputs.shape)}."
                )
            if not bool(torch.isfinite(targets).all()):
                raise ValueError(f"Batch {number} has targets that are not finite.")
            return targets.double()
        if targets.is_floating_point() and not torch.equal(targets, targets.round()):
            raise ValueError(
                f"Batch {number} has labels that are not whole numbers; for numbers say task='regression'."
            )
        targets = targets.reshape(-1).long() if targets.numel() == len(targets) else targets
        if targets.ndim != 1 or (
            len(targets) > 0 and not 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[1]
        ):
            raise ValueError(
                f"Batch {number} must have one label from 0 to {outputs.shape[1] - 1} for each row, for the network has "
                f"{outputs.shape[1]} classes; got values from {targets.min().item()} to {targets.max().item()}. For whole numbers "
                "that are no classes say task='regression'."
            )
        return targets


def _are_probabilities(outputs: Tensor) -> bool:
    """Whether all rows are positive and sum to one, or hold one number from 0 to 1: then they come from a softmax or sigmoid."""
    outputs = outputs.reshape(len(outputs), -1)
    if outputs.shape[1] == 1:  # twenty logits that all lie there would be a strange network
        return len(outputs) >= 20 and bool(((outputs >= 0) & (outputs <= 1)).all())
    sums = outputs.double().sum(1)
    return len(outputs) > 1 and bool((outputs >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all())


def _length(loader: Any) -> int | None:
    """Number of batches, where it is known: a loader of an iterable data set has a length that cannot be asked for."""
    try:
        return len(loader)
    except TypeError:
        return None


def _keys(values: list[Any], features: Tensor) -> Tensor:
    """A pseudo-random number for every row that depends on its values alone: whatever the order of rows, or who reads them.

    Inputs whose first dimension is not that of the rows are left out. Where there are no others, the features are taken.
    """
    tensors = [v for v in values if isinstance(v, Tensor) and v.ndim > 0 and len(v) == len(features)] or [features]
    generator = torch.Generator().manual_seed(0)
    key = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for x in tensors:
        flat = x.reshape(len(x), -1)
        count = min(flat.shape[1], MAX_KEY_NUMBERS)
        places = torch.linspace(0, flat.shape[1] - 1, count, dtype=torch.float64).round().long()
        some = flat[:, places.to(flat.device)]
        bits = some.double().view(torch.int64) if some.is_floating_point() else some.long()
        factors = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=generator) * 2 + 1
        key = key + ((bits ^ (bits >> 29)) * factors.to(bits.device)).sum(1).to(key.device)
    for shift in (31, 27, 33):  # mixes high and low bits
        key = (key ^ (key >> shift)) * GOLDEN_FACTOR
    return key


def sample_rows(batches: Iterator[HeadRows], most: int) -> HeadRows:
    """The different rows with the smallest keys, of all processes: a random sample, the same in whatever order rows come.

    A row that is kept to the end has been kept since it first came, so that its copies are all counted.
    """
    kept: HeadRows | None = None
    for batch in batches:
        kept = (batch if kept is None else kept.joined(batch)).smallest(most)
    if kept is None:
        raise ValueError("The loader parameter must give at least one batch, got none.")
    for part in _from_others(kept):
        kept = kept.joined(part).smallest(most)
    return kept


def _from_others(sample: HeadRows) -> list[HeadRows]:
    """The samples of the other processes."""
    if workers() == 1:
        return []
    everyone: list[Any] = [None] * workers()
    torch.distributed.all_gather_object(everyone, sample.to(torch.device("cpu")))
    del everyone[torch.distributed.get_rank()]
    return [part.to(sample.keys.device) for part in everyone]


def sum_over_processes(total: Tensor, parts: Iterable[Tensor]) -> Tensor:
    """The sum of matrices over batches and processes."""
    for part in parts:
        total += part
    if workers() > 1:
        torch.distributed.all_reduce(total)
    return total
