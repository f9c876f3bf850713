r"""Annealed elliptical slice sampling for small networks: no gradient is used, and chains cannot get stuck in one mode each.

The prior is standard normal (``normal_form``). Populations of particles start at the prior and go to the posterior through $L^t$,
with the likelihood L and t from 0 to 1 (sequential Monte Carlo). Each time t grows so much that half of the particles' effective
number is left; they are drawn again by their weights, each population on its own, and move by elliptical slices (Murray, Adams
and MacKay, 2010): each unit in turn, then the lengthscale with all weights, then the output layer or the noise. Populations that
agree in the end have found the same modes in the same shares.
"""
# Parts of torch declare no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import fields

import torch
from rich.progress import Progress
from torch import Tensor, nn

from bochner.arguments import whole_number
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.normal_form import (
    TWO_PI,
    Ellipse,
    Evaluated,
    Index,
    Particles,
    SampledClassifier,
    SampledNetwork,
    SampledRegression,
    named_parameters,
)
from bochner.posteriors.samples import Sampled, Sampling
from bochner.training.checks import check_data

MAX_TRIES = 12  # points tried on an ellipse before a particle stays where it is, as it does in 1 to 6 of 100 moves
BISECTION_STEPS = 30  # of an interval in which the next t is looked for
MIN_EFFECTIVE_SHARE = 0.5  # share of the particles' effective number that a step in t leaves


def slice_sample(model: Model, x: Tensor, y: Tensor, sampling: Sampling | None = None, *, sweeps: int = 5) -> Sampled:
    """Posterior samples of weights, biases, lengthscale, noise and output weights of a network.

    Args:
        model: A network without an extractor, for classes or, in float64, for regression of one target; its amplitude stays. All
            is computed in its type: for classes float32 does, and takes half the time.
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
    scale = model.layer.log_lengthscale
    if not simple or (regression and y.shape[1] != 1) or scale.ndim or not scale.requires_grad:
        raise ValueError(
            "The model parameter must be a network without an extractor, with one output for each unit and one lengthscale that is "
            "learnt, for classes or for regression of one target."
        )
    sampling, sweeps = sampling or Sampling(), whole_number("sweeps", sweeps)
    if regression and model.layer.weight.dtype != torch.float64:
        raise ValueError(
            f"The model parameter must be in float64 for regression, got {model.layer.weight.dtype} instead."
        )
    target = (SampledRegression if regression else SampledClassifier)(model, x.to(model.layer.weight), y)
    sampler = _Sampler(target, sampling)
    with Progress(disable=not sampling.progress, transient=True) as bar:
        sampler.run(sweeps, bar)
    parameters = named_parameters(target, sampler.particles, sampler.generator)
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
        self.temperature = target.x.new_zeros(())
        self.records = device.type == "cuda" and target.recordable
        self.graph = self._captured() if self.records else None

    def _normal(self, *shape: int) -> Tensor:
        like = self.target.x
        return torch.randn(shape, generator=self.generator, dtype=like.dtype, device=like.device)

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
        start = torch.rand(chains, 1, generator=self.generator, dtype=weight.dtype, device=weight.device)
        places = (start + torch.arange(samples, device=weight.device)) / samples
        chosen = torch.searchsorted(weight.cumsum(1).contiguous(), places).clamp(max=samples - 1)
        first = samples * torch.arange(chains, device=weight.device)
        self.particles.choose((chosen + first[:, None]).flatten())

    def sweep(self) -> None:
        """Moves every unit in turn, the lengthscale with all weights, and the output layer or the noise."""
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
        count = len(outputs) if self.records else max(1, self.target.part_bytes // outputs[0].nbytes)
        for start in range(0, len(outputs), count):
            self._sweep_part(self.particles.part(slice(start, start + count)))

    def _sweep_part(self, particles: Particles) -> None:
        target, state = self.target, (particles.outputs, particles.level)
        for unit in range(particles.v.shape[1]):
            rest = target.without(particles.outputs, particles.v, particles.shared, unit)

            def propose(proposal: Tensor, at: Index, rest: Tensor = rest, unit: int = unit) -> Evaluated:
                return target.with_unit(rest[at], proposal, particles.shared[at], unit)

            numbers = particles.v[:, unit]
            self._slice(state, Ellipse(numbers, self._normal(*numbers.shape), propose), self.temperature)
        self._stretch(particles)
        target.move_head(particles, self._normal, lambda ellipse: self._slice(state, ellipse, self.temperature))

    def _stretch(self, particles: Particles) -> None:
        """Moves the lengthscale and all weights with it, which leaves the function as it is.

        Else a lengthscale could change only as little as weights that stay where they are allow. Given the slopes w/ℓ, the prior
        of the D weights, p(ℓ w/ℓ) ℓ^D, is a likelihood of ℓ. The numbers that make the weights are then drawn anew.
        """
        target, numbers = self.target, particles.shared[:, : self.target.lengthscale_numbers]
        slope = target.weights(particles.v)[0] / target.lengthscale(numbers)[:, None, None]

        def propose(proposal: Tensor, at: Index) -> Evaluated:
            lengthscale = target.lengthscale(proposal)
            prior = target.layer.spectrum.weight_log_prob(lengthscale[:, None, None] * slope[at])
            return proposal[:, :0], prior.flatten(1).sum(1) + slope[0].numel() * lengthscale.log()

        state = propose(numbers, slice(None))
        self._slice(state, Ellipse(numbers, self._normal(*numbers.shape), propose), 1.0)
        target.draw_weights(particles.v, slope * target.lengthscale(numbers)[:, None, None], self._normal)

    def _slice(self, state: Evaluated, ellipse: Ellipse, temperature: Tensor | float) -> None:
        """Moves numbers in place along an ellipse, as far as a slice under the likelihood at a temperature allows.

        Only particles that have not moved yet are tried again; within a graph, whose shapes are fixed, all are.

        Args:
            state: Outputs and log likelihoods of the particles that the numbers belong to; they change too.
            ellipse: The numbers and where they may go.
            temperature: Power of the likelihood.
        """
        numbers, draw, count = ellipse.numbers, ellipse.draw, len(ellipse.numbers)
        start = numbers.clone()
        uniform = torch.rand(MAX_TRIES + 1, count, generator=self.generator, dtype=numbers.dtype, device=numbers.device)
        threshold = temperature * state[1] + uniform[0].log()
        angle = TWO_PI * uniform[1]
        low, high = angle - TWO_PI, angle
        moving = torch.ones_like(threshold, dtype=torch.bool)
        at: Index = slice(None)
        for number in range(MAX_TRIES):
            proposal = start[at] * angle[at].cos()[:, None] + draw[at] * angle[at].sin()[:, None]
            outputs, level = ellipse.propose(proposal, at)
            accepted = moving[at] & (temperature * level > threshold[at])
            changed = ((numbers, proposal), (state[0], outputs), (state[1], level))
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
