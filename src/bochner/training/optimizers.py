"""Optimisers of stacks of parameters, in which every network may have another learning rate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bochner.training import fused
from bochner.training.checks import equal_runs

MOMENTUM = 0.9  # of SGD, as in the paper


def adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Adam, in one pass over the parameters. The Gaussian priors arrive as weight decay, which Adam adds to the gradient."""
    return torch.optim.Adam(groups, fused=True, capturable=groups[0]["params"][0].is_cuda)


class FusedAdam:
    """Adam on the CPU in one pass over the parameters, with the few parts of torch's optimiser that the engine uses.

    Torch's own class loads its compiler when the first one is made, which takes longer than training a few small networks.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups, self.defaults = groups, {"fused": True}
        self.state = [
            [(torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())) for p in group["params"]] for group in groups
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter against its gradient, to which weight decay is added."""
        for group, state in zip(self.param_groups, self.state, strict=True):
            parameters, steps = group["params"], [moments[2] for moments in state]
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                parameters,
                [p.grad for p in parameters],
                [moments[0] for moments in state],
                [moments[1] for moments in state],
                [],
                steps,
                lr=group["lr"],
                beta1=0.9,
                beta2=0.999,
                weight_decay=group["weight_decay"],
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )


def light_adam(groups: list[dict[str, Any]]) -> Any:
    """``adam`` without torch's compiler where that is not needed: on the CPU."""
    return adam(groups) if groups[0]["params"][0].is_cuda else FusedAdam(groups)


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """SGD with momentum 0.9, in one pass over the parameters."""
    return torch.optim.SGD(groups, momentum=MOMENTUM, fused=True)


@dataclass
class Entry:
    """A stack of parameters that an optimiser moves.

    Attributes:
        value: The parameters, (E, ...), stored in the order in which their gradients come.
        rates: The learning rate of each member at the start.
        decay: Weight decay.
        copy: The same numbers in the type that products are in, where that is another.
    """

    value: Tensor
    rates: list[float]
    decay: float
    copy: Tensor | None = None


class StackOptimizer(Protocol):
    """Moves a stack of parameters, at rates that a schedule changes."""

    capturable: bool

    def set_factor(self, factor: float) -> None:
        """Multiplies the first learning rates by a factor."""
        ...

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Moves every entry against its gradient, to which weight decay is added."""
        ...


def stack_optimizer(make: Callable[..., Any], entries: list[Entry]) -> StackOptimizer:
    """The optimiser of a recipe for the entries of a stack."""
    if make is sgd and entries[0].value.is_cuda and fused.available():
        return StackedSGD(entries)
    return GroupedOptimizer(make, entries)


class StackedSGD:
    """SGD with momentum in one pass over each entry, whatever the members' rates are."""

    capturable = True

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.velocities = [torch.zeros_like(entry.value) for entry in entries]
        self.first = [torch.tensor(entry.rates, device=entry.value.device) for entry in entries]
        self.rates = [rates.clone() for rates in self.first]

    def set_factor(self, factor: float) -> None:
        """Multiplies the first learning rates by a factor."""
        for now, first in zip(self.rates, self.first, strict=True):
            torch.mul(first, factor, out=now)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Moves every entry against its gradient, to which weight decay is added."""
        for entry, gradient, velocity, rates in zip(self.entries, gradients, self.velocities, self.rates, strict=True):
            if gradient.stride() != entry.value.stride():
                gradient = torch.empty_like(entry.value, dtype=gradient.dtype).copy_(gradient)
            state = (entry.value, velocity, entry.copy)
            fused.momentum_sgd(state, gradient, rates, momentum=MOMENTUM, decay=entry.decay)


class GroupedOptimizer:
    """A torch optimiser, which knows one rate for a group: it gets a view of the stack for each run of equal rates."""

    def __init__(self, make: Callable[..., Any], entries: list[Entry]) -> None:
        self.views: list[tuple[Tensor, int, slice]] = []
        self.groups: dict[tuple[float, float], dict[str, Any]] = {}
        self.copied = [(entry.copy.detach(), entry.value.detach()) for entry in entries if entry.copy is not None]
        for number, entry in enumerate(entries):
            for members in equal_runs(entry.rates):
                view = _in_storage_order(entry.value.detach()[members])
                self.views.append((view, number, members))
                first: dict[str, Any] = {"params": [], "weight_decay": entry.decay}
                self.groups.setdefault((entry.rates[members.start], entry.decay), first)["params"].append(view)
        is_cuda = entries[0].value.is_cuda
        for (rate, _), group in self.groups.items():
            # A graph reads the rate from memory; without one, a number is cheaper.
            group["lr"] = torch.tensor(rate, device=entries[0].value.device) if is_cuda else rate
        self.optimizer = make(list(self.groups.values()))
        if self.optimizer.defaults.get("decoupled_weight_decay") or isinstance(self.optimizer, torch.optim.AdamW):
            raise ValueError(
                "The optimizer of the recipe must add weight decay to the gradient, for that is the Gaussian priors; "
                f"{type(self.optimizer).__name__} does not. Use Adam."
            )
        # Both start from a state of zeros, which can be made before a graph is captured.
        simple = isinstance(self.optimizer, torch.optim.SGD | torch.optim.Adam)
        self.capturable = is_cuda and simple and bool(self.optimizer.defaults.get("fused"))
        if self.capturable:
            self._prepare_state()

    def _prepare_state(self) -> None:
        """Makes the optimiser allocate its state, all zero, without moving anything."""
        kept = [view.clone() for view, *_ in self.views]
        for view, *_ in self.views:
            view.grad = torch.zeros_like(view)
        self.optimizer.step()
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        for (view, *_), before in zip(self.views, kept, strict=True):
            view.copy_(before)

    def set_factor(self, factor: float) -> None:
        """Multiplies the first learning rates by a factor."""
        for (rate, _), group in zip(self.groups, self.optimizer.param_groups, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(factor * rate)
            else:
                group["lr"] = factor * rate

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Moves every entry against its gradient, to which weight decay is added."""
        for view, number, members in self.views:
            view.grad = _in_storage_order(gradients[number][members]).to(view.dtype)
        self.optimizer.step()
        for copy, value in self.copied:
            copy.copy_(value)


def _in_storage_order(value: Tensor) -> Tensor:
    """The same memory with its dimensions in storage order: an optimiser need not copy it to go over it as a flat array."""
    return value.permute(sorted(range(value.ndim), key=value.stride, reverse=True))
