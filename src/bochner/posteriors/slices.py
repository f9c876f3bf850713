r"""Annealed elliptical slice sampling for small networks: no gradient is used, and chains cannot get stuck in one mode each.

Every number of the prior is written as a function of standard normal numbers: a Student-t weight vector is a normal one over the
root of a mean of $2\nu$ squares, a uniform phase is the angle of two, and a Gamma variable is a sum of squares. What is left is a
standard normal prior times a likelihood $L$.

Populations of particles start at the prior and go to the posterior through $L^t$, with $t$ from 0 to 1 (sequential Monte Carlo).
Each time t grows so much that half of the particles' effective number is left; they are drawn again by their weights, each
population on its own, and move by elliptical slices (Murray, Adams and MacKay, 2010), a unit at a time. Populations that agree in
the end have found the same modes in the same shares.

For regression the output weights are Gaussian given the rest, and are integrated out:

$$ y \mid v \sim \mathrm{N}(0,\; s^2 I + \Phi P^{-1} \Phi^\top) $$

with the units' outputs $\Phi$ and the prior precisions P; they are drawn from their conditional at the end.
"""
# Parts of torch declare no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from rich.progress import Progress
from torch import Tensor, nn

from bochner.arguments import whole_number
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.samples import Sampled, Sampling
from bochner.priors.activations import unlink
from bochner.priors.spectra import RBF, Matern
from bochner.training.checks import check_data

LENGTHSCALE_PRIOR = (2.0, 0.5)  # shape and rate of its Gamma prior, as in ``layers``
NOISE_PRIOR = (0.5, 1.0)  # shape and rate of its Gamma prior, as in ``likelihoods``
TWO_PI = 2 * math.pi
MAX_TRIES = 12  # points tried on an ellipse before a particle stays where it is; nearly all need fewer than six
BISECTION_STEPS = 30  # of an interval in which the next t is looked for
MIN_EFFECTIVE_SHARE = 0.5  # share of the particles' effective number that a step in t leaves

Evaluated = tuple[Tensor, Tensor]  # outputs of particles at all rows, and their log likelihoods
Index = Tensor | slice  # some of the particles


def from_squares(normal: Tensor, prior: tuple[float, float]) -> Tensor:
    """A Gamma variable of the shape k/2 from the k standard normal numbers in the last dimension."""
    return (normal.square().sum(-1) / (2 * prior[1])).clamp(min=1e-12)


class SampledNetwork(ABC):
    """A network as a function of standard normal numbers, for many particles at once.

    Args:
        model: The network.
        x: Training inputs, (n, d).
        y: Training targets.

    Attributes:
        unit_numbers: Numbers of a unit.
        shared_numbers: Numbers that all units share.
        recordable: Whether a CUDA graph can record it; factorisations it cannot.
        part_numbers: Outputs of the particles that move together on a processor; of fewer, each operation would do too little.
    """

    recordable = False
    part_numbers = 2**20

    def __init__(self, model: Model, x: Tensor, y: Tensor) -> None:
        self.model, self.layer, self.x, self.y = model, model.layer, x, y
        self.dim = self.layer.in_features
        self.squares = self._numbers_of_scales()
        self.bias_numbers = (
            {"uniform": 2, "normal": 1}[self.layer.activation.bias] if self.layer.bias is not None else 0
        )
        self.unit_numbers = self.dim + self.squares + self.bias_numbers
        self.shared_numbers = int(2 * LENGTHSCALE_PRIOR[0])
        precisions = model.precisions()
        self.weight_std = float(model.amplitude) / math.sqrt(precisions["output.weight"])
        self.bias_std = 1 / math.sqrt(precisions["output.bias"]) if model.output.has_bias else 0.0

    def _numbers_of_scales(self) -> int:
        """Normal numbers that a unit's scales of Student-t weights are made from; none for normal weights."""
        spectrum = self.layer.spectrum
        if isinstance(spectrum, RBF):
            return 0
        if not isinstance(spectrum, Matern) or not float(2 * spectrum.nu).is_integer():
            raise ValueError(
                "The model parameter must have normal weights, or Student-t weights with a whole number of degrees of freedom 2ν, "
                f"got {spectrum} instead."
            )
        return int(2 * spectrum.nu) * (self.dim if spectrum.product else 1)

    def weights(self, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Input weights (..., d) and biases (...) from the numbers of units (..., numbers)."""
        weight, rest = v[..., : self.dim], v[..., self.dim :]
        if self.squares:
            spectrum = self.layer.spectrum
            assert isinstance(spectrum, Matern)
            squares = rest[..., : self.squares].square().unflatten(-1, (-1, int(2 * spectrum.nu)))
            weight = weight * squares.mean(-1).rsqrt()
        if not self.bias_numbers:
            return weight, None
        angle = rest[..., self.squares : self.squares + self.bias_numbers]
        return weight, torch.atan2(angle[..., 0], angle[..., 1]) if self.bias_numbers == 2 else angle[..., 0]

    def lengthscale(self, shared: Tensor) -> Tensor:
        """Lengthscale of each particle."""
        return from_squares(shared[:, : int(2 * LENGTHSCALE_PRIOR[0])], LENGTHSCALE_PRIOR)

    def hidden(self, v: Tensor, shared: Tensor) -> Tensor:
        """Outputs (particles, n, units) of units at all rows from their numbers (particles, units, numbers)."""
        weight, bias = self.weights(v)
        z = torch.einsum("nd,cud->cnu", self.x, weight / self.lengthscale(shared)[:, None, None])
        return self.layer.activation(z if bias is None else z + bias[:, None])

    @abstractmethod
    def evaluate(self, v: Tensor, shared: Tensor) -> Evaluated:
        """Outputs at all rows and log likelihoods."""

    @abstractmethod
    def without(self, outputs: Tensor, v: Tensor, shared: Tensor, unit: int) -> Tensor:
        """The part of the state that does not depend on one unit."""

    @abstractmethod
    def with_unit(self, rest: Tensor, unit_numbers: Tensor, shared: Tensor, unit: int) -> Evaluated:
        """Outputs and log likelihoods where one unit has the numbers ``unit_numbers``, (particles, numbers)."""

    @abstractmethod
    def head(self, particles: "Particles", generator: torch.Generator) -> dict[str, Tensor]:
        """Parameters of output layer and noise under the model's names, without the output weights' amplitude."""


class SampledClassifier(SampledNetwork):
    """A classifier: a unit's output weights are among its numbers, and the state holds the logits; of two, their difference."""

    recordable = True
    part_numbers = 2**17  # they stay in the processor's cache

    def __init__(self, model: Model, x: Tensor, y: Tensor) -> None:
        super().__init__(model, x, y)
        self.sign = 2 * self.y.to(self.x.dtype) - 1
        self.logits = len(model.output.weight)  # 1 where the other logit is zero
        self.unit_numbers += self.logits
        self.shared_numbers += self.logits * model.output.has_bias

    def _with_log_likelihood(self, f: Tensor) -> Evaluated:
        if f.shape[-1] == 1:
            value = nn.functional.logsigmoid(self.sign * f[..., 0])
        else:
            value = torch.log_softmax(f, -1).gather(-1, self.y.expand(len(f), -1)[..., None])[..., 0]
        return f, value.sum(-1)

    def _of_logits(self, numbers: Tensor) -> Tensor:
        """What belongs to the logits, the last of the numbers, as the state holds them."""
        own = numbers[..., -self.logits :]
        return own.diff(dim=-1) if self.logits == 2 else own

    def evaluate(self, v: Tensor, shared: Tensor) -> Evaluated:
        """Logits at all rows and log likelihoods."""
        f = self.hidden(v, shared) @ (self.weight_std * self._of_logits(v))
        return self._with_log_likelihood(f + self.bias_std * self._of_logits(shared)[:, None] if self.bias_std else f)

    def without(self, outputs: Tensor, v: Tensor, shared: Tensor, unit: int) -> Tensor:
        """The logits without the unit's share."""
        return outputs - self._share(v[:, unit], shared)

    def _share(self, unit_numbers: Tensor, shared: Tensor) -> Tensor:
        return self.hidden(unit_numbers[:, None], shared) * (self.weight_std * self._of_logits(unit_numbers)[:, None])

    def with_unit(self, rest: Tensor, unit_numbers: Tensor, shared: Tensor, unit: int) -> Evaluated:  # noqa: ARG002
        """Logits and log likelihoods where one unit has the numbers ``unit_numbers``."""
        return self._with_log_likelihood(rest + self._share(unit_numbers, shared))

    def head(self, particles: "Particles", generator: torch.Generator) -> dict[str, Tensor]:  # noqa: ARG002
        """Output weights, and biases where there are some."""
        parameters = {"output.weight": self.weight_std * particles.v[..., -self.logits :].mT}
        if self.bias_std:
            parameters["output.bias"] = self.bias_std * particles.shared[:, -self.logits :]
        return parameters


class SampledRegression(SampledNetwork):
    """A regression network with its output weights integrated out: the state holds the units' outputs."""

    def __init__(self, model: Model, x: Tensor, y: Tensor) -> None:
        super().__init__(model, x, y[:, 0])
        self.shared_numbers += int(2 * NOISE_PRIOR[0])
        self.prior_precision = x.new_full((self.layer.out_features,), self.weight_std**-2)
        self.constant = None  # the feature of an output bias
        if self.bias_std:
            self.prior_precision = torch.cat([self.prior_precision, x.new_tensor([self.bias_std**-2])])
            self.constant = x.new_ones(1, len(x), 1)

    def noise(self, shared: Tensor) -> Tensor:
        """Noise of each particle."""
        return from_squares(shared[:, -int(2 * NOISE_PRIOR[0]) :], NOISE_PRIOR)

    def features(self, h: Tensor) -> Tensor:
        """The units' outputs, and a column of ones where there is an output bias."""
        return h if self.constant is None else torch.cat([h, self.constant.expand(len(h), -1, -1)], -1)

    def posterior(self, h: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Cholesky factor of the output weights' precision, (c, K, K), and their mean, (c, K), given the features."""
        precision = h.mT @ h / noise.square()[:, None, None] + torch.diag(self.prior_precision)
        factor, failed = torch.linalg.cholesky_ex(precision)  # where noise all but vanishes: NaN, and so never accepted
        factor = torch.where(failed[:, None, None] > 0, math.nan, factor)
        mean = torch.cholesky_solve((h.mT @ self.y / noise.square()[:, None])[..., None], factor)[..., 0]
        return factor, mean

    def log_likelihood(self, h: Tensor, noise: Tensor) -> Tensor:
        """Log density of the targets, (particles,), the output weights integrated out.

        The misfit is a sum of squares at the weights' mean, the least over all weights: rounding makes a particle less probable,
        never more. A difference of squares would invent probability where units coincide and the noise is next to nothing.
        """
        h = self.features(h)
        factor, mean = self.posterior(h, noise)
        residual = (self.y - (h @ mean[..., None])[..., 0]) / noise[:, None]
        misfit = residual.square().sum(-1) + (self.prior_precision * mean.square()).sum(-1)
        scale = self.prior_precision.log().sum() - 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        value = 0.5 * (scale - misfit) - len(self.y) * (noise.log() + 0.5 * math.log(TWO_PI))
        return value.nan_to_num(nan=-math.inf)

    def evaluate(self, v: Tensor, shared: Tensor) -> Evaluated:
        """Outputs of all units and log likelihoods."""
        h = self.hidden(v, shared)
        return h, self.log_likelihood(h, self.noise(shared))

    def without(self, outputs: Tensor, v: Tensor, shared: Tensor, unit: int) -> Tensor:  # noqa: ARG002
        """All units' outputs: ``with_unit`` replaces its own."""
        return outputs

    def with_unit(self, rest: Tensor, unit_numbers: Tensor, shared: Tensor, unit: int) -> Evaluated:
        """Outputs of all units and log likelihoods where one unit has the numbers ``unit_numbers``."""
        new = self.hidden(unit_numbers[:, None], shared)
        h = torch.cat([rest[..., :unit], new, rest[..., unit + 1 :]], -1)
        return h, self.log_likelihood(h, self.noise(shared))

    def head(self, particles: "Particles", generator: torch.Generator) -> dict[str, Tensor]:
        """Noise, and output weights drawn from their conditional distribution."""
        noise = self.noise(particles.shared)
        factor, mean = self.posterior(self.features(particles.outputs), noise)
        normal = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        drawn = mean + torch.linalg.solve_triangular(factor.mT, normal[..., None], upper=True)[..., 0]
        width = self.layer.out_features
        parameters = {"output.weight": drawn[:, None, :width], "likelihood.log_noise": noise.log()}
        return parameters | {"output.bias": drawn[:, width:]} if self.bias_std else parameters


@dataclass
class Particles:
    """The state of all particles, population after population. Tensors are changed in place.

    Attributes:
        v: Numbers of the units, (particles, units, numbers).
        shared: Numbers that the units share, (particles, numbers).
        outputs: What the target keeps at all rows.
        level: Log likelihood, (particles,).
    """

    v: Tensor
    shared: Tensor
    outputs: Tensor
    level: Tensor

    def part(self, at: slice) -> "Particles":
        """Some of the particles, in the same memory."""
        return Particles(*(getattr(self, each.name)[at] for each in fields(self)))

    def choose(self, index: Tensor) -> None:
        """Replaces every particle by the one with the given number."""
        for name in fields(self):
            value = getattr(self, name.name)
            value.copy_(value[index])


def slice_sample(model: Model, x: Tensor, y: Tensor, sampling: Sampling | None = None, *, sweeps: int = 5) -> Sampled:
    """Posterior samples of weights, biases, lengthscale, noise and output weights of a network.

    Args:
        model: A network in float64 without an extractor, for classes or for regression of one target; its amplitude stays.
        x: Training inputs, (N, d).
        y: Training targets.
        sampling: ``chains`` populations of ``samples`` particles; ``warmup`` sweeps over all units once t is 1. Depth and
            acceptance do not concern this sampler.
        sweeps: Sweeps over all units for each value of t below 1.

    Returns:
        The particles, a population as a chain; none is divergent.
    """
    check_data(model, x, y)
    regression = isinstance(model.likelihood, Gaussian)
    simple = isinstance(model.extractor, nn.Identity) and model.layer.activation.outputs == 1
    if not simple or (regression and y.shape[1] != 1):
        raise ValueError(
            "The model parameter must be a network without an extractor and with one output for each unit, for classes or for "
            "regression of one target."
        )
    sampling, sweeps = sampling or Sampling(), whole_number("sweeps", sweeps)
    target = (SampledRegression if regression else SampledClassifier)(model, x.double(), y)
    sampler = _Sampler(target, sampling)
    with Progress(disable=not sampling.progress, transient=True) as bar:
        sampler.run(sweeps, bar)
    parameters = _parameters(target, sampler.particles, sampler.generator)
    shape = (sampling.chains, sampling.samples)
    samples = {name: value.unflatten(0, shape) for name, value in parameters.items()}
    return Sampled(model, samples, divergences=0, leapfrog_steps=0)


class _Sampler:
    """Particles on their way from the prior to the posterior.

    Args:
        target: The network.
        sampling: How many populations and particles, and how long they move at the end.
    """

    def __init__(self, target: SampledNetwork, sampling: Sampling) -> None:
        self.target, self.sampling, device = target, sampling, target.x.device
        self.generator = torch.Generator(device).manual_seed(sampling.seed)
        count, units = sampling.chains * sampling.samples, target.layer.out_features
        v, shared = self._normal(count, units, target.unit_numbers), self._normal(count, target.shared_numbers)
        self.particles = Particles(v, shared, *target.evaluate(v, shared))
        self.temperature = torch.zeros((), dtype=torch.float64, device=device)
        self.records = device.type == "cuda" and target.recordable
        self.graph = self._captured() if self.records else None

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64, device=self.target.x.device)

    def run(self, sweeps: int, bar: Progress) -> None:
        """Goes from the prior to the posterior, ``sweeps`` sweeps at each step, and on for as long as is asked for."""
        task = bar.add_task("annealing", total=1.0)
        while (t := float(self.temperature)) < 1:
            self.temperature.fill_(self._next_temperature(t))
            self._draw_again(float(self.temperature) - t)
            for _ in range(sweeps):
                self.sweep()
            bar.update(task, completed=float(self.temperature))
        for _ in bar.track(range(self.sampling.warmup), description="slices"):
            self.sweep()

    def _next_temperature(self, t: float) -> float:
        """The largest t up to 1 at which half of the effective number of particles is left, by bisection."""
        low, high = t, 1.0
        if self._effective_share(1 - t) >= MIN_EFFECTIVE_SHARE:
            return 1.0
        for _ in range(BISECTION_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._effective_share(middle - t) >= MIN_EFFECTIVE_SHARE else (low, middle)
        return high

    def _effective_share(self, step: float) -> float:
        """Effective share of the particles after a step in t, the mean over populations."""
        weight = torch.softmax(step * self.particles.level.view(self.sampling.chains, -1), 1)
        return float((1 / weight.square().sum(1)).mean()) / weight.shape[1]

    def _draw_again(self, step: float) -> None:
        """Draws each population anew by its weights, with systematic resampling."""
        chains, samples = self.sampling.chains, self.sampling.samples
        weight = torch.softmax(step * self.particles.level.view(chains, samples), 1)
        start = torch.rand(chains, 1, generator=self.generator, dtype=torch.float64, device=weight.device)
        places = (start + torch.arange(samples, device=weight.device)) / samples
        chosen = torch.searchsorted(weight.cumsum(1).contiguous(), places).clamp(max=samples - 1)
        first = samples * torch.arange(chains, device=weight.device)
        self.particles.choose((chosen + first[:, None]).flatten())

    def sweep(self) -> None:
        """Moves every unit in turn, then what all share."""
        if self.graph is None:
            self._sweep()
        else:
            self.graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """A sweep as a graph: its kernels are short, and starting them one by one takes longer than they do."""
        kept = [getattr(self.particles, each.name).clone() for each in fields(self.particles)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._sweep()  # libraries load what they cannot load while a graph is recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            self._sweep()
        for each, value in zip(fields(self.particles), kept, strict=True):
            getattr(self.particles, each.name).copy_(value)
        return graph

    def _sweep(self) -> None:
        outputs = self.particles.outputs
        count = len(outputs) if self.records else max(1, self.target.part_numbers // outputs[0].numel())
        for start in range(0, len(outputs), count):
            self._sweep_part(self.particles.part(slice(start, start + count)))

    def _sweep_part(self, particles: Particles) -> None:
        target = self.target
        for unit in range(particles.v.shape[1]):
            rest = target.without(particles.outputs, particles.v, particles.shared, unit)

            def propose(proposal: Tensor, at: Index, rest: Tensor = rest, unit: int = unit) -> Evaluated:
                return target.with_unit(rest[at], proposal, particles.shared[at], unit)

            self._slice(particles, particles.v[:, unit], propose)
        self._slice(particles, particles.shared, lambda proposal, at: target.evaluate(particles.v[at], proposal))

    def _slice(self, particles: Particles, numbers: Tensor, propose: Callable[[Tensor, Index], Evaluated]) -> None:
        """Moves numbers (particles, numbers) in place, along an ellipse through where they are and a draw from the prior.

        Only particles that have not moved yet are tried again; within a graph, whose shapes are fixed, all are.

        Args:
            particles: The particles that the numbers belong to.
            numbers: The numbers; outputs and log likelihoods of the particles are changed with them.
            propose: Outputs and log likelihoods of some particles at other numbers.
        """
        count = len(numbers)
        start, prior_draw = numbers.clone(), self._normal(*numbers.shape)
        uniform = torch.rand(MAX_TRIES + 1, count, generator=self.generator, dtype=torch.float64, device=numbers.device)
        threshold = self.temperature * particles.level + uniform[0].log()
        angle = TWO_PI * uniform[1]
        low, high = angle - TWO_PI, angle
        moving = torch.ones_like(threshold, dtype=torch.bool)
        at: Index = slice(None)
        for number in range(MAX_TRIES):
            proposal = (start * angle.cos()[:, None] + prior_draw * angle.sin()[:, None])[at]
            outputs, level = propose(proposal, at)
            accepted = moving[at] & (self.temperature * level > threshold[at])
            changed = ((numbers, proposal), (particles.outputs, outputs), (particles.level, level))
            if self.records:
                for old, new in changed:
                    old.copy_(torch.where(accepted.view(-1, *[1] * (old.ndim - 1)), new, old))
                moving = moving & ~accepted
            else:
                tried = moving.nonzero()[:, 0]
                for old, new in changed:
                    old[tried[accepted]] = new[accepted]
                moving[tried[accepted]] = False
                at = tried[~accepted]
                if not len(at):
                    break
            if number == MAX_TRIES - 1:
                break
            low, high = torch.where(angle < 0, angle, low), torch.where(angle < 0, high, angle)
            angle = low + uniform[number + 2] * (high - low)


def _parameters(target: SampledNetwork, particles: Particles, generator: torch.Generator) -> dict[str, Tensor]:
    """The network's parameters under its names, of every particle."""
    weight, bias = target.weights(particles.v)
    named = {"layer.weight": weight, "layer.log_lengthscale": target.lengthscale(particles.shared).log()}
    if bias is not None:
        named["layer.bias"] = unlink(bias) if target.bias_numbers == 2 else bias
    named |= target.head(particles, generator)
    named["output.weight"] = named["output.weight"] / float(target.model.amplitude)
    return named
