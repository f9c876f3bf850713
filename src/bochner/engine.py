"""The stacked engine: networks of one shape train as a single computation, each as it would alone.

Extractors and likelihoods of all members run as one batch; model layers run in runs of members that share their activation, and
their priors in runs that share the spectrum. Gaussian priors have linear gradients, so they go to the optimiser as weight decay,
which fused optimisers apply in the pass that they make anyway; those of model layers have theirs in closed form; the likelihood is
differentiated. The values of the priors are computed once an epoch.

On CUDA a whole step, from drawing the batch to the update, is captured once as a graph and replayed.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from bochner import fused
from bochner.layers import amplitude_log_prior
from bochner.loaders import Batches, workers
from bochner.models import Model
from bochner.networks import SeededDropout
from bochner.randomness import counter_mask, counter_permutation
from bochner.spectra import normal_log_prob
from bochner.validation import activation_runs, equal_runs

Parameters = dict[str, Tensor]


class _Head(nn.Module):
    """Model layer and output layer: the extractor's features to f."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.layer, self.output = model.layer, model.output

    def forward(self, z: Tensor) -> Tensor:
        layer, bias = self.layer, self.layer.intercept() if z.is_cuda and z.ndim == 2 else None
        if bias is None:
            return self.output(layer(z))
        u = F.linear(z * (layer.activation.unit / layer.lengthscale), layer.weight)
        return self.output(fused.bias_wave(u, bias, layer.activation.wave))


class _HeadPrior(nn.Module):
    """The log prior of a model layer and of the amplitude: what weight decay does not stand for."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.layer, self.output = model.layer, model.output

    def forward(self) -> Tensor:
        return self.layer.log_prior() + amplitude_log_prior(self.output.log_amplitude, jacobian=False)

    def slopes(self, parameters: Parameters) -> Parameters:
        """Gradients in the parameters given by name, in closed form; without those that are zero everywhere."""
        own = {n.removeprefix("layer."): p for n, p in parameters.items() if n.startswith("layer.")}
        slopes = {f"layer.{n}": slope for n, slope in self.layer.log_prior_slopes(own).items()}
        if "output.log_amplitude" in parameters:
            slopes["output.log_amplitude"] = 1 - parameters["output.log_amplitude"].exp()
        return slopes


class _Likelihood(nn.Module):
    """Minus the mean log likelihood of a batch; minus the log prior of the noise over N."""

    def __init__(self, model: Model, num_data: int) -> None:
        super().__init__()
        self.likelihood, self.num_data = model.likelihood, num_data

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return -self.likelihood(f, y).mean() - self.likelihood.log_prior() / self.num_data


@dataclass
class Part:
    """A module that some members share, with their parameters stacked along a first dimension.

    Attributes:
        members: Which members of the stack.
        module: The first member's module; its own numbers are not used.
        prefix: What its parameters' names begin with in the model.
        parameters: Trainable parameters, (E, ...).
        fixed: Frozen parameters, (E, ...).
        buffers: Buffers, (E, ...).
    """

    members: slice
    module: nn.Module
    prefix: str
    parameters: Parameters
    fixed: Parameters
    buffers: Parameters

    @classmethod
    def of(cls, modules: list[nn.Module], members: slice, prefix: str) -> "Part":
        """Stacks the modules' numbers."""
        everything, buffers = stack_module_state(modules)
        frozen = {n for n, p in modules[0].named_parameters() if not p.requires_grad}
        parameters = {n: p.detach().requires_grad_() for n, p in everything.items() if n not in frozen}
        return cls(members, modules[0], prefix, parameters, {n: everything[n].detach() for n in frozen}, buffers)

    def __call__(self, *inputs: Tensor, **extra: Tensor) -> Tensor:
        """Runs all members at once on inputs (E, ...), with ``extra`` in place of buffers of those names."""
        return stacked(self.module, self.parameters | self.fixed | self.buffers | extra, *inputs)


def stacked(module: nn.Module, numbers: Parameters, *inputs: Tensor) -> Tensor:
    """A module with stacked numbers (E, ...) on stacked inputs (E, ...); one network alone may hold what cannot be stacked."""

    def single(numbers: Parameters, *inputs: Tensor) -> Tensor:
        return functional_call(module, numbers, inputs)

    if len(next(iter((*numbers.values(), *inputs)))) == 1:
        return single({n: v[0] for n, v in numbers.items()}, *(x[0] for x in inputs))[None]
    return vmap(single, randomness="error")(numbers, *inputs)


def _size(members: slice) -> int:
    return members.stop - members.start


def _flat(value: Tensor) -> Tensor:
    """The same memory with its dimensions in storage order: an optimiser need not copy it to go over it as a flat array."""
    return value.permute(sorted(range(value.ndim), key=value.stride, reverse=True))


def _mean_over_processes(rows: int, losses: Tensor, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Averages of what every process has found at its own rows, weighed by their number; in one exchange."""
    values = [losses, *gradients]
    flat = torch.cat([*(rows * v.reshape(-1) for v in values), losses.new_full((1,), rows)])
    torch.distributed.all_reduce(flat)
    parts = (flat[:-1] / flat[-1]).split([v.numel() for v in values])
    mean, *means = (part.view_as(v) for part, v in zip(parts, values, strict=True))
    return mean, means


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
        self.x, self.y, self.rows, self.seeds = x, y, rows, seeds
        self.sizes = [min(size, rows.shape[1] - start) for start in range(0, rows.shape[1], size)]
        self.order = rows.clone()
        self.position = torch.zeros((), dtype=torch.int64, device=x.device)

    def epoch(self, number: int) -> Iterator[int]:
        """Shuffles; then gives the size of each minibatch in turn."""
        self.order.copy_(self.rows.gather(1, counter_permutation(self.seeds, number, self.rows.shape[1])))
        self.position.zero_()
        return iter(self.sizes)

    def take(self, rows: int) -> tuple[Tensor, Tensor]:
        """The next rows of every member, (E, rows, ...): operations that a graph can hold."""
        index = self.order.index_select(1, self.position + torch.arange(rows, device=self.x.device))
        return self.x[index], self.y[index]

    def advance(self, rows: int) -> None:
        """Moves on by that many rows."""
        self.position += rows


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


class Stack:
    """The members' numbers, their optimiser and the loop over epochs."""

    def __init__(self, models: list[Model], recipe: Any, rates: Tensor, seeds: Tensor, num_data: int) -> None:
        self.models, self.recipe, self.rates, self.seeds = models, recipe, rates, seeds
        self.num_data = num_data
        activations, everyone = activation_runs(models), slice(0, len(models))
        for model in models:
            model.train()
        self.extractor = Part.of([m.extractor for m in models], everyone, "extractor.")
        self.heads = [Part.of([_Head(m) for m in models[s]], s, "") for s in activations]
        self.likelihood = Part.of([_Likelihood(m, num_data) for m in models], everyone, "")
        self.parts = [self.extractor, *self.heads, self.likelihood]
        self.dropouts = [(n, m) for n, m in self.extractor.module.named_modules() if isinstance(m, SeededDropout)]
        self.decay = models[0].precisions()

    def _lay_out(self, sizes: Iterable[int]) -> None:
        """Stores every parameter in the memory order of its gradient: fused optimisers go over both as flat arrays.

        The gradient of a stacked matrix product comes out transposed. A dry run for each batch size finds out, and makes the
        libraries load what they cannot load within a graph; what it changes is put back.
        """
        kept = {n: b.clone() for n, b in self.extractor.buffers.items()}
        *_, gradients = (iter(self._gradients(rows)[1]) for rows in sizes)
        for part in self.parts:
            for name, value in part.parameters.items():
                moved = torch.empty_like(next(gradients)).copy_(value.detach())
                part.parameters[name] = moved.requires_grad_()
        for name, value in kept.items():
            self.extractor.buffers[name].copy_(value)

    def _make_optimizer(self) -> None:
        """One view of the stack for each run of equal rates: an optimiser knows one rate for each group."""
        self.views: list[tuple[Tensor, int, slice]] = []
        self.groups: dict[tuple[float, float], dict[str, Any]] = {}
        named = [(part, name, value) for part in self.parts for name, value in part.parameters.items()]
        for number, (part, name, value) in enumerate(named):
            decay = self.decay.get(part.prefix + name, 0.0) / self.num_data
            rates = self.rates[part.members].tolist()
            if self.recipe.scale_lr is not None and (value[0].numel() == 1 or name.endswith("log_lengthscale")):
                rates = [self.recipe.scale_lr] * len(rates)
            for own in equal_runs(rates):
                view = _flat(value.detach()[own])
                self.views.append((view, number, own))
                group = self.groups.setdefault((rates[own.start], decay), {"params": [], "weight_decay": decay})
                group["params"].append(view)
        for (rate, _), group in self.groups.items():
            # A graph reads the rate from memory; without one, a number is cheaper.
            group["lr"] = torch.tensor(rate, device=self.rates.device) if self.rates.is_cuda else rate
        self.optimizer = self.recipe.optimizer(list(self.groups.values()))
        if self.optimizer.defaults.get("decoupled_weight_decay") or isinstance(self.optimizer, torch.optim.AdamW):
            raise ValueError(
                "The optimizer of the recipe must add weight decay to the gradient, for that is the Gaussian priors; "
                f"{type(self.optimizer).__name__} does not. Use Adam."
            )
        # Both start from a state of zeros, which can be made before a graph is captured.
        simple = isinstance(self.optimizer, torch.optim.SGD | torch.optim.Adam)
        fused = bool(self.optimizer.defaults.get("fused"))
        self.graphed = self.rates.is_cuda and simple and fused and isinstance(self.source, Minibatches)
        if self.graphed:
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

    def _set_rates(self, factor: float) -> None:
        for (rate, _), group in zip(self.groups, self.optimizer.param_groups, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(factor * rate)
            else:
                group["lr"] = factor * rate

    def _masks(self, rows: int) -> Parameters:
        """Fresh dropout masks, (E, rows, width), from the seeds and the counter of steps."""
        masks = {}
        for i, (name, module) in enumerate(self.dropouts):
            kept = counter_mask(self.seeds, self.counter * 1000 + i + 1, rows * module.width, module.p)
            scaled = kept.to(self.models[0].layer.weight.dtype) / (1 - module.p)
            masks[f"{name}.mask"] = scaled.reshape(len(self.seeds), rows, module.width)
        return masks

    def _gradients(self, rows: int) -> tuple[Tensor, list[Tensor]]:
        """Losses (E,) of the next ``rows`` rows of every member, and the gradients of all parameters, priors included."""
        x, y = self.source.take(rows)
        z = self._extract(x, self._masks(rows)).split([_size(h.members) for h in self.heads])
        f = torch.cat([head(own) for head, own in zip(self.heads, z, strict=True)])
        losses = self.likelihood(f, y)
        leaves = [p for part in self.parts for p in part.parameters.values()]
        found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for g, p in zip(found, leaves, strict=True)]
        losses = losses.detach()
        if self.source.shared:
            losses, gradients = _mean_over_processes(rows, losses, gradients)
        self._add_head_priors({id(p): g for p, g in zip(leaves, gradients, strict=True)})
        return losses, gradients

    def _extract(self, x: Tensor, masks: Parameters) -> Tensor:
        """Features (E, n, ...) of the members' rows; on a GPU with biases and ReLUs in one pass, where the layers allow."""
        part = self.extractor
        if x.is_cuda and fused.is_plain(part.module):
            return fused.sequence(part.module, part.parameters | part.fixed | part.buffers | masks, x)  # pyright: ignore[reportArgumentType]
        return part(x, **masks)

    @torch.no_grad()
    def _add_head_priors(self, gradients: dict[int, Tensor]) -> None:
        """Adds what the priors of the heads contribute, to gradients by the identity of their parameter."""
        for head in self.heads:
            for prior, run in self._head_priors(head):
                for name, slope in prior.slopes({n: p.detach()[run] for n, p in head.parameters.items()}).items():
                    gradients[id(head.parameters[name])][run].sub_(slope, alpha=1 / self.num_data)

    def _head_priors(self, head: Part) -> Iterator[tuple[_HeadPrior, slice]]:
        """Runs of a part's members with the same spectrum, each with its first member's prior."""
        for run in equal_runs([m.layer.spectrum for m in self.models[head.members]]):
            yield _HeadPrior(self.models[head.members.start + run.start]), run

    def _step(self, rows: int) -> None:
        losses, gradients = self._gradients(rows)
        self.first.copy_(torch.where(torch.isnan(self.first), losses, self.first))
        self.bad |= ~torch.isfinite(losses) | (losses > self.explosion * self.first.abs().clamp(min=1.0))
        self.total += losses
        for view, number, members in self.views:
            view.grad = _flat(gradients[number][members])
        self.optimizer.step()
        self.source.advance(rows)
        self.counter += 1

    def _capture(self, rows: int) -> Callable[[], None]:
        """The step as a graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(rows)
        return graph.replay

    def train(
        self,
        source: Minibatches | LoadedBatches,
        explosion: float,
        after_epoch: Callable[[Parameters], None] | None,
        epochs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Runs over the epochs given; returns losses (epochs, E) and which members diverged."""
        self.source, self.explosion, num = source, explosion, len(self.models)
        like = self.models[0].layer.weight
        norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.extractor.module.modules())
        self.counter = torch.zeros((), dtype=torch.int64, device=like.device)
        self.first = torch.full((num,), math.nan, dtype=like.dtype, device=like.device)
        self.total = torch.zeros(num, dtype=torch.float64, device=like.device)
        self.bad = torch.zeros(num, dtype=torch.bool, device=like.device)
        if norms and source.sizes[-1] == 1 and len(source.sizes) > 1:
            source.sizes.pop()  # BatchNorm has no statistics of a single row: the last one sits this epoch out
        if source.shared:
            for value in self._numbers():
                torch.distributed.broadcast(value, 0)
        self._lay_out(sorted(set(source.sizes)) if self.rates.is_cuda else source.sizes[:1])
        self._make_optimizer()
        graphs = {rows: self._capture(rows) for rows in set(source.sizes)} if self.graphed else {}
        diverged, history = torch.zeros_like(self.bad), []
        good = [value.clone() for value in self._numbers()]
        for epoch in epochs:
            torch._foreach_copy_(good, self._numbers())
            self._set_rates(self.recipe.schedule(epoch / self.recipe.epochs))
            for value in (self.total, self.bad):
                value.zero_()
            steps = 0
            for rows in source.epoch(epoch):
                if norms and rows == 1 and isinstance(source, LoadedBatches) and not source.shared:
                    continue  # as above: BatchNorm has no statistics of a single row
                graphs[rows]() if graphs else self._step(rows)
                steps += 1
            # The last step's update has met no loss yet: its parameters must not become those to fall back on.
            prior = self._prior()
            limit = self.explosion * self.first.abs().clamp(min=1.0)
            diverged |= self.bad | ~torch.isfinite(prior) | (prior > limit)
            if bool(diverged.any()):
                self._restore(diverged, good)
            history.append(torch.where(diverged, math.nan, self.total / steps + prior))
            if after_epoch is not None:
                after_epoch(self._named())
            if bool(diverged.all()):
                break
        history += [torch.full_like(self.total, math.nan)] * (self.recipe.epochs - len(history))
        return torch.stack(history).cpu(), diverged.cpu()

    def _numbers(self) -> list[Tensor]:
        return [v.detach() for part in self.parts for v in (part.parameters | part.buffers).values()]

    @torch.no_grad()
    def _restore(self, diverged: Tensor, good: list[Tensor]) -> None:
        """Gives diverged members the numbers they had when the epoch began."""
        members = [part.members for part in self.parts for _ in part.parameters | part.buffers]
        for value, before, own in zip(self._numbers(), good, members, strict=True):
            value.copy_(torch.where(diverged[own].reshape(-1, *[1] * (value.ndim - 1)), before, value))

    @torch.no_grad()
    def _prior(self) -> Tensor:
        """Minus the log priors over N, (E,), but for that of the noise, which is part of the losses."""
        total = torch.zeros_like(self.total)
        for head in self.heads:
            numbers = head.parameters | head.fixed
            for prior, run in self._head_priors(head):
                total[head.members][run] -= stacked(prior, {n: p[run] for n, p in numbers.items()})
        for part in self.parts:
            for name, value in (part.parameters | part.fixed).items():
                precision = self.decay.get(part.prefix + name)
                if precision:
                    # One pass: Σ log N(θ | 0, 1/τ) from the constant and the sum of squares.
                    every = tuple(range(1, value.ndim))
                    norm = torch.linalg.vector_norm(value, dim=every) if every else value
                    square = norm.double().square()
                    total[part.members] -= value[0].numel() * normal_log_prob(0.0, precision) - 0.5 * precision * square
        return total / self.num_data

    def _named(self) -> Parameters:
        """Trained parameters under the model's names, (E, ...), for stacks of one kind of head."""
        return {part.prefix + n: p.detach() for part in self.parts for n, p in part.parameters.items()}

    @torch.no_grad()
    def write_back(self) -> None:
        """Puts the stacked numbers into the networks, which leave in evaluation mode."""
        if self.source.shared:  # BatchNorm has seen other rows in every process
            for value in (b for b in self.extractor.buffers.values() if b.is_floating_point()):
                torch.distributed.all_reduce(value)
                value /= workers()
        for part in self.parts:
            for name, value in (part.parameters | part.buffers).items():
                for model, own in zip(self.models[part.members], value, strict=True):
                    target = model.get_submodule((part.prefix + name).rpartition(".")[0])
                    getattr(target, name.rpartition(".")[2]).copy_(own)
        for model in self.models:
            model.eval()
