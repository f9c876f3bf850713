"""The stacked engine: networks of one shape train as a single computation, each as it would alone.

On CUDA a whole step, from drawing the batch to the update, is captured once as a graph and replayed. The values of the priors are
computed once an epoch.
"""

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from bochner.arguments import shown
from bochner.models import Model
from bochner.training import fused
from bochner.training.batches import LoadedBatches, Minibatches, distinct
from bochner.training.optimizers import Entry, sgd, stack_optimizer
from bochner.training.parts import Parameters, StackedNetworks
from bochner.training.randomness import DROPOUT_STREAMS, counter_mask


def _mean_over_processes(rows: int, losses: Tensor, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Losses and gradients averaged over processes, weighed by their numbers of rows, in one exchange."""
    values = [losses, *gradients]
    flat = torch.cat([*(rows * v.reshape(-1) for v in values), losses.new_full((1,), rows)])
    torch.distributed.all_reduce(flat)
    parts = (flat[:-1] / flat[-1]).split([v.numel() for v in values])
    mean, *means = (part.view_as(v) for part, v in zip(parts, values, strict=True))
    return mean, means


class Stack:
    """The optimiser of stacked networks and the loop over epochs.

    Args:
        models: The networks.
        recipe: How to train.
        rates: The learning rate of each, (E,).
        seeds: The seed of each, (E,).
        num_data: Number of rows that the priors are weighed against.
    """

    def __init__(self, models: list[Model], recipe: Any, rates: Tensor, seeds: Tensor, num_data: int) -> None:
        self.recipe, self.rates, self.num_data = recipe, rates, num_data
        self.networks = StackedNetworks(models, num_data)
        first, self.seed_group = distinct(seeds)
        self.seeds = seeds[first]

    def train(
        self,
        source: Minibatches | LoadedBatches,
        after_epoch: Callable[[Parameters], None] | None,
        epochs: Iterable[int],
    ) -> tuple[Tensor, Tensor]:
        """Trains for some epochs; returns losses (epochs, E) and which networks diverged."""
        self.source = source
        graphs = self._prepare()
        diverged, history = torch.zeros_like(self.failing), []
        kept = [value.clone() for value in self.networks.changing_tensors()]
        for epoch in epochs:
            torch._foreach_copy_(kept, self.networks.changing_tensors())
            steps = self._epoch(epoch, graphs)
            # No loss has checked the last update yet: without this test its parameters could become those that are restored.
            prior = self.networks.prior()
            diverged |= self.failing | ~torch.isfinite(prior) | (prior > self._limit())
            if bool(diverged.any()):
                self.networks.restore(diverged, kept)
            history.append(torch.where(diverged, math.nan, self.total / steps + prior))
            if after_epoch is not None:
                after_epoch(self.networks.named())
            if bool(diverged.all()):
                break
        history += [torch.full_like(self.total, math.nan)] * (self.recipe.epochs - len(history))
        return torch.stack(history).cpu(), diverged.cpu()

    def _prepare(self) -> dict[int, Callable[[], None]]:
        """Makes counters and optimiser; returns, on CUDA, a graph of a step for each size of a batch."""
        source, like, num = self.source, self.networks.models[0].layer.weight, len(self.networks.models)
        self.counter = torch.zeros((), dtype=torch.int64, device=like.device)
        self.first = torch.full((num,), math.nan, dtype=like.dtype, device=like.device)
        self.total = torch.zeros(num, dtype=torch.float64, device=like.device)
        self.failing = torch.zeros(num, dtype=torch.bool, device=like.device)
        if self.networks.has_batch_norm and source.sizes[-1] == 1 and len(source.sizes) > 1:
            source.sizes.pop()  # BatchNorm has no statistics of a single row: the last one is skipped
        if source.shared:
            for value in self.networks.changing_tensors():
                torch.distributed.broadcast(value, 0)
        self._lay_out(sorted(set(source.sizes)) if self.rates.is_cuda else source.sizes[:1])
        self._make_optimizer()
        graphed = self.optimizer.capturable and isinstance(source, Minibatches)
        return {rows: self._capture(rows) for rows in set(source.sizes)} if graphed else {}

    def _epoch(self, number: int, graphs: dict[int, Callable[[], None]]) -> int:
        """Runs over the batches; returns how many there were."""
        factor = self.recipe.schedule(number / self.recipe.epochs)
        if not isinstance(factor, Real) or not math.isfinite(factor):
            raise ValueError(f"The schedule of the recipe must give finite numbers, got {shown(factor)} instead.")
        self.optimizer.set_factor(float(factor))
        for value in (self.total, self.failing):
            value.zero_()
        steps, loaded = 0, isinstance(self.source, LoadedBatches) and not self.source.shared
        for rows in self.source.epoch(number):
            if rows == 1 and loaded and self.networks.has_batch_norm:
                continue  # BatchNorm has no statistics of a single row
            graphs[rows]() if graphs else self._step(rows)
            steps += 1
        return steps

    def _limit(self) -> Tensor:
        """The loss of each member that counts as divergence."""
        return self.recipe.explosion * self.first.abs().clamp(min=1.0)

    def _lay_out(self, sizes: Iterable[int]) -> None:
        """Stores every parameter in the memory order of its gradient: fused optimisers go over both as flat arrays.

        The gradient of a stacked matrix product is transposed in memory. A dry run for each batch size shows the order of every
        gradient, and lets libraries load what they cannot load within a graph; the buffers that it changes are restored.
        """
        networks, weight = self.networks, self.networks.models[0].layer.weight
        asked = self.recipe.precision == "bfloat16" and self.recipe.optimizer is sgd and weight.dtype == torch.float32
        wants_copies = asked and networks.is_plain and fused.multiplies_bfloat16(weight.device)
        kept = {n: b.clone() for n, b in networks.extractor.buffers.items()}
        if wants_copies:
            networks.make_copies()
        *_, gradients = (iter(self._gradients(rows)[1]) for rows in sizes)
        for part, name, value in networks.named_parameters():
            moved = torch.empty_like(next(gradients), dtype=value.dtype).copy_(value.detach())
            part.parameters[name] = moved.requires_grad_()
        if wants_copies:
            networks.make_copies()
        for name, value in kept.items():
            networks.extractor.buffers[name].copy_(value)

    def _make_optimizer(self) -> None:
        entries = []
        for part, name, value in self.networks.named_parameters():
            rates = self.rates[part.members].tolist()
            if self.recipe.scale_lr is not None and (value[0].numel() == 1 or name.endswith("log_lengthscale")):
                rates = [self.recipe.scale_lr] * len(rates)
            decay = self.networks.decay.get(part.prefix + name, 0.0) / self.num_data
            entries.append(Entry(value.detach(), rates, decay, self.networks.copies.get(part.prefix + name)))
        self.optimizer = stack_optimizer(self.recipe.optimizer, entries)

    def _gradients(self, rows: int) -> tuple[Tensor, list[Tensor]]:
        """Losses (E,) of the next ``rows`` rows of every member, and the gradients of all parameters, priors included."""
        losses, leaves = self.networks.losses(*self.source.take(rows), self._masks(rows)), self.networks.leaves()
        computed = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for g, p in zip(computed, leaves, strict=True)]
        losses = losses.detach()
        if self.source.shared:
            losses, gradients = _mean_over_processes(rows, losses, gradients)
        self.networks.add_head_priors(gradients)
        return losses, gradients

    def _masks(self, rows: int) -> dict[str, fused.Dropout]:
        """Fresh dropout masks of every layer, from the seeds and the counter of steps."""
        masks = {}
        for i, (name, module) in enumerate(self.networks.dropouts):
            stream, num = DROPOUT_STREAMS + self.counter * 1000 + i, rows * module.width
            kept = counter_mask(self.seeds, stream, num, module.p).to(self.first.dtype)
            shape = (len(self.seeds), rows, module.width)
            masks[name] = fused.Dropout((kept / (1 - module.p)).reshape(shape), self.seed_group, 1 / (1 - module.p))
        return masks

    def _step(self, rows: int) -> None:
        losses, gradients = self._gradients(rows)
        self.first.copy_(torch.where(torch.isnan(self.first), losses, self.first))
        self.failing |= ~torch.isfinite(losses) | (losses > self._limit())
        self.total += losses
        self.optimizer.step(gradients)
        self.source.advance(rows)
        self.counter += 1

    def _capture(self, rows: int) -> Callable[[], None]:
        """The step as a graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(rows)
        return graph.replay
