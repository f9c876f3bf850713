"""The networks of a stack: their parameters along a first dimension, their outputs, losses, gradients and priors.

Extractors and likelihoods of all members run as one batch; model layers run in runs of members that share their activation, and
their priors in runs that share the spectrum. Gaussian priors have linear gradients, so they go to the optimiser as weight decay,
which fused optimisers apply in the pass that they make anyway; those of model layers have theirs in closed form; the likelihood is
differentiated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from bochner.layers import OutputLayer, amplitude_log_prior
from bochner.models import Model
from bochner.networks import SeededDropout
from bochner.priors.spectra import normal_log_prob
from bochner.training import fused
from bochner.training.checks import activation_runs, equal_runs

Parameters = dict[str, Tensor]


class _Head(nn.Module):
    """Model layer and output layer: the extractor's features to f."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.layer, self.output = model.layer, model.output

    def forward(self, z: Tensor) -> Tensor:
        return self.output(self.layer(z))


class _HeadConstants(nn.Module):
    """Constants of a head for its matrix products: factors of z, intercepts of the wave, and output weights."""

    def __init__(self, head: _Head) -> None:
        super().__init__()
        self.layer, self.output = head.layer, head.output

    def forward(self) -> tuple[Tensor, ...]:
        layer, intercept = self.layer, self.layer.intercept()
        assert intercept is not None
        factor = (layer.activation.unit / layer.lengthscale).expand(layer.in_features)
        return factor, intercept, self.output.amplitude * self.output.weight


class _HeadPrior(nn.Module):
    """The log prior of a model layer and of the amplitude, which weight decay cannot express."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.layer, self.output = model.layer, model.output

    def forward(self) -> Tensor:
        return self.layer.log_prior() + amplitude_log_prior(self.output.log_amplitude, jacobian=False)

    def slopes(self, parameters: Parameters) -> Parameters:
        """Gradients in named parameters, in closed form; those that are zero everywhere are left out."""
        of_layer = {n.removeprefix("layer."): p for n, p in parameters.items() if n.startswith("layer.")}
        slopes = {f"layer.{n}": slope for n, slope in self.layer.log_prior_slopes(of_layer).items()}
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
        module: The first member's module; its own parameters are not used.
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
        """Stacks the modules' parameters and buffers."""
        state, buffers = stack_module_state(modules)
        frozen = {n for n, p in modules[0].named_parameters() if not p.requires_grad}
        parameters = {n: p.detach().requires_grad_() for n, p in state.items() if n not in frozen}
        return cls(members, modules[0], prefix, parameters, {n: state[n].detach() for n in frozen}, buffers)

    def __call__(self, *inputs: Tensor, **extra: Tensor) -> Tensor:
        """Runs all members at once on inputs (E, ...), with ``extra`` in place of buffers of those names."""
        return stacked(self.module, self.parameters | self.fixed | self.buffers | extra, *inputs)


def stacked(module: nn.Module, tensors: Parameters, *inputs: Tensor) -> Tensor:
    """Outputs of a module for stacked parameters and buffers, (E, ...), at stacked inputs, (E, ...).

    A network alone runs without vmap: it may hold layers that vmap refuses.
    """

    def single(tensors: Parameters, *inputs: Tensor) -> Tensor:
        return functional_call(module, tensors, inputs)

    if len(next(iter((*tensors.values(), *inputs)))) == 1:
        return single({n: v[0] for n, v in tensors.items()}, *(x[0] for x in inputs))[None]
    return vmap(single, randomness="error")(tensors, *inputs)


def _head_priors(models: list[Model], head: Part) -> Iterator[tuple[_HeadPrior, slice]]:
    """Runs of a part's members with the same spectrum, each with its first member's prior."""
    for run in equal_runs([m.layer.spectrum for m in models[head.members]]):
        yield _HeadPrior(models[head.members.start + run.start]), run


class StackedNetworks:
    """The parameters of all networks of a stack, their outputs, losses and priors.

    Args:
        models: The networks, those of one activation side by side.
        num_data: Number of rows that the priors are weighed against.
    """

    def __init__(self, models: list[Model], num_data: int) -> None:
        self.models, self.num_data = models, num_data
        activations, every_member = activation_runs(models), slice(0, len(models))
        for model in models:
            model.train()
        self.extractor = Part.of([m.extractor for m in models], every_member, "extractor.")
        self.heads = [Part.of([_Head(m) for m in models[s]], s, "") for s in activations]
        self.likelihood = Part.of([_Likelihood(m, num_data) for m in models], every_member, "")
        self.parts = [self.extractor, *self.heads, self.likelihood]
        self.decay = models[0].precisions()
        self.is_plain = fused.is_plain(self.extractor.module)
        self.copies: Parameters = {}  # of the extractor's weights in bfloat16, by their full name
        modules = list(self.extractor.module.named_modules())
        self.dropouts = [(n, m) for n, m in modules if isinstance(m, SeededDropout)]
        self.has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for _, m in modules)

    @property
    def is_fast(self) -> bool:
        """Whether ``fused`` runs the networks: on a GPU, and with copies in bfloat16; elsewhere plain operators do."""
        return self.is_plain and (self.models[0].layer.weight.is_cuda or bool(self.copies))

    def named_parameters(self) -> list[tuple[Part, str, Tensor]]:
        """Every trained stack of parameters: its part, its name there, and its values (E, ...)."""
        return [(part, name, value) for part in self.parts for name, value in part.parameters.items()]

    def make_copies(self) -> None:
        """Makes copies of the extractor's weights in bfloat16, which products read from then on."""
        weights = {f"extractor.{n}": p for n, p in self.extractor.parameters.items() if n.endswith("weight")}
        self.copies = {n: p.detach().bfloat16().requires_grad_() for n, p in weights.items()}

    def losses(self, x: Tensor, y: Tensor, dropouts: dict[str, fused.Dropout]) -> Tensor:
        """Minus the mean log likelihood of each member's rows, and the noise's prior over N: (E,)."""
        z = self._extract(x, dropouts).split([h.members.stop - h.members.start for h in self.heads])
        f = torch.cat([self._run_head(head, inputs) for head, inputs in zip(self.heads, z, strict=True)])
        return self.likelihood(f, y)

    def leaves(self) -> list[Tensor]:
        """The tensors in which losses are differentiated, in the order of ``named_parameters``."""
        return [self.copies.get(part.prefix + name, value) for part, name, value in self.named_parameters()]

    def _extract(self, x: Tensor, dropouts: dict[str, fused.Dropout]) -> Tensor:
        """Features (E, n, ...) of the members' rows."""
        part = self.extractor
        if self.is_fast:
            parameters = part.parameters | part.fixed | {n.removeprefix(part.prefix): p for n, p in self.copies.items()}
            return fused.sequence(part.module, parameters, x, dropouts)  # pyright: ignore[reportArgumentType]
        return part(x, **{f"{name}.mask": each.mask[each.group] for name, each in dropouts.items()})

    def _run_head(self, head: Part, z: Tensor) -> Tensor:
        """Outputs (E, n, c) of members that share their activation."""
        module: Any = head.module
        wave, plain = module.layer.activation.wave, type(module.output) is OutputLayer
        if not (self.is_fast and plain and fused.kernel_wave(wave) and module.layer.intercept() is not None):
            return head(z)
        parameters = head.parameters | head.fixed
        constants = _HeadConstants(module)
        factor, intercept, weight = vmap(lambda values: functional_call(constants, values, ()))(parameters)
        u = torch.bmm(z * factor[:, None], parameters["layer.weight"].mT)
        h = fused.bias_wave(u, intercept, wave, dtype=torch.bfloat16 if self.copies and u.is_cuda else u.dtype)
        f = fused.wide_product(h, weight.to(h.dtype))
        return f + parameters["output.bias"][:, None] if "output.bias" in parameters else f

    @torch.no_grad()
    def add_head_priors(self, gradients: list[Tensor]) -> None:
        """Adds the gradients of the heads' priors to gradients in the order of ``leaves``."""
        gradient_of = {id(p): g for p, g in zip(self.leaves(), gradients, strict=True)}
        for head in self.heads:
            for prior, run in _head_priors(self.models, head):
                for name, slope in prior.slopes({n: p.detach()[run] for n, p in head.parameters.items()}).items():
                    gradient_of[id(head.parameters[name])][run].sub_(slope, alpha=1 / self.num_data)

    @torch.no_grad()
    def prior(self) -> Tensor:
        """Minus the log priors over N, (E,), but for that of the noise, which is part of the losses."""
        total = torch.zeros(len(self.models), dtype=torch.float64, device=self.models[0].layer.weight.device)
        for head in self.heads:
            parameters = head.parameters | head.fixed
            for prior, run in _head_priors(self.models, head):
                total[head.members][run] -= stacked(prior, {n: p[run] for n, p in parameters.items()})
        for part in self.parts:
            for name, value in (part.parameters | part.fixed).items():
                precision = self.decay.get(part.prefix + name)
                if precision:
                    # One pass: Σ log N(θ | 0, 1/τ) from the constant and the sum of squares.
                    axes = tuple(range(1, value.ndim))
                    norm = torch.linalg.vector_norm(value, dim=axes) if axes else value
                    square = norm.double().square()
                    total[part.members] -= value[0].numel() * normal_log_prob(0.0, precision) - 0.5 * precision * square
        return total / self.num_data

    def changing_tensors(self) -> list[Tensor]:
        """All tensors that training changes: trained parameters and buffers."""
        return [v.detach() for part in self.parts for v in (part.parameters | part.buffers).values()]

    @torch.no_grad()
    def restore(self, diverged: Tensor, kept: list[Tensor]) -> None:
        """Gives diverged networks the values back that they had when the epoch began."""
        members = [part.members for part in self.parts for _ in part.parameters | part.buffers]
        for value, before, part in zip(self.changing_tensors(), kept, members, strict=True):
            value.copy_(torch.where(diverged[part].reshape(-1, *[1] * (value.ndim - 1)), before, value))
        for name, copy in self.copies.items():
            copy.detach().copy_(self.extractor.parameters[name.removeprefix(self.extractor.prefix)])

    def named(self) -> Parameters:
        """Trained parameters under the model's names, (E, ...), for stacks of one kind of head."""
        return {part.prefix + n: p.detach() for part in self.parts for n, p in part.parameters.items()}

    @torch.no_grad()
    def write_back(self, processes: int) -> None:
        """Puts the trained values into the networks, which are in evaluation mode from then on.

        Args:
            processes: Number of processes that have trained the same networks, each on its share of the rows.
        """
        if processes > 1:  # BatchNorm has seen other rows in every process
            for value in (b for b in self.extractor.buffers.values() if b.is_floating_point()):
                torch.distributed.all_reduce(value)
                value /= processes
        for part in self.parts:
            for name, value in (part.parameters | part.buffers).items():
                for model, member_value in zip(self.models[part.members], value, strict=True):
                    target = model.get_submodule((part.prefix + name).rpartition(".")[0])
                    getattr(target, name.rpartition(".")[2]).copy_(member_value)
        for model in self.models:
            model.eval()
