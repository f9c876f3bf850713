r"""Elliptical slice sampling for networks whose activation jumps, or whose posterior has many modes: no gradient is used.

The prior of a unit is the unit cube pushed through the inverse CDF (``spectra.from_uniform``), so that $v = \Phi^{-1}(u)$ is
standard normal; lengthscale and noise are Gamma quantiles of such numbers too. Given all of these the output weights are Gaussian,
and they are integrated out:

$$ y \mid v \sim \mathrm{N}(0,\; s^2 I + \Phi P^{-1} \Phi^\top) $$

with the units' outputs $\Phi$ and the prior precisions P. What is left is a standard normal prior times a likelihood, which
elliptical slice sampling (Murray, Adams and MacKay, 2010) draws from, a unit at a time, for all chains at once. Output weights are
drawn from their conditional at the end. This is exact: no step size, no acceptance rate, nothing to tune.
"""
# SciPy and parts of torch declare no types:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Callable
from dataclasses import dataclass

import scipy.special
import torch
from rich.progress import track
from torch import Tensor, nn

from bochner.arguments import whole_number
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.samples import Sampled, Sampling
from bochner.training.checks import check_data

LENGTHSCALE_PRIOR = (2.0, 0.5)  # shape and rate of its Gamma prior, as in ``layers``
NOISE_PRIOR = (0.5, 1.0)  # shape and rate of its Gamma prior, as in ``likelihoods``
TWO_PI = 2 * math.pi


def _uniform(normal: Tensor) -> Tensor:
    """The normal CDF, strictly inside (0, 1)."""
    return torch.special.ndtr(normal).clamp(1e-16, 1 - 1e-16)


def _gamma(normal: Tensor, prior: tuple[float, float]) -> Tensor:
    """Quantiles of a Gamma distribution from standard normal numbers."""
    shape, rate = prior
    value = torch.from_numpy(scipy.special.gammaincinv(shape, _uniform(normal).numpy())) / rate
    return value.clamp(min=1e-12)


class Collapsed:
    """A network given standard normal numbers: its units, and the likelihood with the output weights integrated out.

    Args:
        model: The network.
        x: Training inputs, (n, d).
        y: Training targets, (n, 1).
    """

    def __init__(self, model: Model, x: Tensor, y: Tensor) -> None:
        self.model, self.layer, self.x, self.y = model, model.layer, x, y[:, 0]
        self.inputs = self.layer.spectrum.uniforms(self.layer.in_features)
        self.numbers = self.inputs + (self.layer.bias is not None)  # of a unit
        precisions = model.precisions()
        prior = torch.full((self.layer.out_features,), precisions["output.weight"] / float(model.amplitude) ** 2)
        self.prior = prior.double()
        self.constant = None  # the feature of an output bias
        if model.output.has_bias:
            self.prior = torch.cat([self.prior, self.prior.new_tensor([precisions["output.bias"]])])
            self.constant = torch.ones(1, len(x), 1, dtype=torch.float64)

    def units(self, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights (chains, units, d) and biases (chains, units) from numbers (chains, units, numbers)."""
        flat = _uniform(v[..., : self.inputs]).flatten(0, 1)
        weight = self.layer.spectrum.from_uniform(flat, self.layer.in_features).reshape(*v.shape[:2], -1)
        if self.layer.bias is None:
            return weight, None
        last = v[..., -1]
        return weight, last if self.layer.activation.bias == "normal" else math.pi * (2 * _uniform(last) - 1)

    def outputs(self, v: Tensor, lengthscale: Tensor) -> Tensor:
        """Outputs of units at all rows, (chains, n, units), from their numbers and the chains' lengthscales."""
        weight, bias = self.units(v)
        z = self.x @ weight.mT / lengthscale[:, None, None]
        return self.layer.activation(z if bias is None else z + bias[:, None])

    def posterior(self, h: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Cholesky factor of the output weights' precision, (c, K, K), and their mean, (c, K), given the units' outputs."""
        h = h if self.constant is None else torch.cat([h, self.constant.expand(len(h), -1, -1)], -1)
        precision = h.mT @ h / noise.square()[:, None, None] + torch.diag(self.prior)
        factor, failed = torch.linalg.cholesky_ex(precision)  # where noise all but vanishes: NaN, and so never accepted
        factor = torch.where(failed[:, None, None] > 0, math.nan, factor)
        mean = torch.cholesky_solve((h.mT @ self.y / noise.square()[:, None])[..., None], factor)[..., 0]
        return factor, mean

    def log_likelihood(self, h: Tensor, noise: Tensor) -> Tensor:
        """Log density of the targets, (chains,), the output weights integrated out."""
        factor, mean = self.posterior(h, noise)
        half = (factor.mT @ mean[..., None])[..., 0]
        fit = half.square().sum(-1) - self.y.square().sum() / noise.square()
        scale = self.prior.log().sum() - 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return 0.5 * (fit + scale) - len(self.y) * (noise.log() + 0.5 * math.log(TWO_PI))


@dataclass
class _Chains:
    """The state of all chains.

    Attributes:
        v: Numbers of the units, (chains, units, numbers).
        scales: Numbers of lengthscale and noise, (chains, 2).
        h: Outputs of the units at all rows, (chains, n, units).
        level: Log likelihood, (chains,).
    """

    v: Tensor
    scales: Tensor
    h: Tensor
    level: Tensor

    @property
    def lengthscale(self) -> Tensor:
        """Lengthscale of each chain."""
        return _gamma(self.scales[:, 0], LENGTHSCALE_PRIOR)

    @property
    def noise(self) -> Tensor:
        """Noise of each chain."""
        return _gamma(self.scales[:, 1], NOISE_PRIOR)


def slice_sample(model: Model, x: Tensor, y: Tensor, sampling: Sampling | None = None, *, thin: int = 1) -> Sampled:
    """Posterior samples of weights, biases, lengthscale, noise and output weights of a network for regression.

    Args:
        model: A network in float64 with a Gaussian likelihood and one output, without an extractor; its amplitude stays as it is.
        x: Training inputs, (N, d).
        y: Training targets, (N, 1).
        sampling: How long, and how many chains; depth and acceptance do not concern this sampler.
        thin: Sweeps over all units for each draw.

    Returns:
        The draws; none is divergent.
    """
    check_data(model, x, y)
    simple = isinstance(model.extractor, nn.Identity) and model.layer.activation.outputs == 1
    if not (isinstance(model.likelihood, Gaussian) and simple and y.shape[1] == 1):
        raise ValueError("The model parameter must be a network for regression of one target, without an extractor.")
    sampling, thin = sampling or Sampling(), whole_number("thin", thin)
    target, generator = Collapsed(model, x.double(), y), torch.Generator().manual_seed(sampling.seed)
    shape = (sampling.chains, len(model.layer.weight), target.numbers)
    v = torch.randn(shape, generator=generator, dtype=torch.float64)
    scales = torch.randn(sampling.chains, 2, generator=generator, dtype=torch.float64)
    chains = _Chains(v, scales, *_evaluate(target, v, scales))
    drawn: list[dict[str, Tensor]] = []
    sweeps = range(-sampling.warmup * thin, sampling.samples * thin)
    for sweep in track(sweeps, description="slices", disable=not sampling.progress):
        _sweep(target, chains, generator)
        if sweep >= 0 and sweep % thin == 0:
            drawn.append(_parameters(target, chains, generator))
    samples = {name: torch.stack([draw[name] for draw in drawn], 1) for name in drawn[0]}
    return Sampled(model, samples, divergences=0, leapfrog_steps=0)


def _evaluate(target: Collapsed, v: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of the units and log likelihood at given numbers."""
    h = target.outputs(v, _gamma(scales[:, 0], LENGTHSCALE_PRIOR))
    return h, target.log_likelihood(h, _gamma(scales[:, 1], NOISE_PRIOR))


def _sweep(target: Collapsed, chains: _Chains, generator: torch.Generator) -> None:
    """Moves every unit in turn, then lengthscale and noise."""
    lengthscale, noise = chains.lengthscale, chains.noise
    for unit in range(chains.v.shape[1]):

        def propose(own: Tensor, at: Tensor, unit: int = unit) -> tuple[Tensor, Tensor]:
            h = chains.h[at]  # a copy
            h[..., unit : unit + 1] = target.outputs(own[:, None], lengthscale[at])
            return h, target.log_likelihood(h, noise[at])

        chains.v[:, unit] = _slice(chains, chains.v[:, unit], propose, generator)
    chains.scales = _slice(chains, chains.scales, lambda own, at: _evaluate(target, chains.v[at], own), generator)


def _slice(
    chains: _Chains,
    here: Tensor,
    propose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    generator: torch.Generator,
) -> Tensor:
    """One step of every chain along an ellipse through its place, (chains, numbers), and a draw from the prior.

    Args:
        chains: The chains; their outputs and log likelihoods are updated.
        here: The numbers that move.
        propose: Outputs of the units and log likelihood of some chains, given by their places, at other numbers.
        generator: Source of randomness.
    """
    count = len(here)
    other = torch.randn(here.shape, generator=generator, dtype=torch.float64)
    start = torch.rand(2, count, generator=generator, dtype=torch.float64)
    floor, angle = chains.level + start[0].log(), TWO_PI * start[1]
    low, high, place, left = angle - TWO_PI, angle.clone(), here.clone(), torch.arange(count)
    while len(left):
        turn = angle[left, None]
        moved = here[left] * turn.cos() + other[left] * turn.sin()
        h, level = propose(moved, left)
        good = level > floor[left]
        accepted = left[good]
        place[accepted], chains.h[accepted], chains.level[accepted] = moved[good], h[good], level[good]
        left = left[~good]
        negative = angle[left] < 0
        low[left] = torch.where(negative, angle[left], low[left])
        high[left] = torch.where(negative, high[left], angle[left])
        share = torch.rand(len(left), generator=generator, dtype=torch.float64)
        angle[left] = low[left] + share * (high[left] - low[left])
    return place


def _parameters(target: Collapsed, chains: _Chains, generator: torch.Generator) -> dict[str, Tensor]:
    """The network's parameters in every chain, with output weights drawn from their conditional distribution."""
    factor, mean = target.posterior(chains.h, chains.noise)
    normal = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
    weights = mean + torch.linalg.solve_triangular(factor.mT, normal[..., None], upper=True)[..., 0]
    weight, bias = target.units(chains.v)
    amplitude, width = float(target.model.amplitude), target.layer.out_features
    named = {"layer.weight": weight, "likelihood.log_noise": chains.noise.log()}
    named["layer.log_lengthscale"] = chains.lengthscale.log()
    if bias is not None:
        uniform = target.layer.activation.bias == "uniform"
        named["layer.bias"] = torch.logit((bias / math.pi + 1) / 2) if uniform else bias.clone()
    named["output.weight"] = weights[:, None, :width] / amplitude
    if target.model.output.has_bias:
        named["output.bias"] = weights[:, width:]
    return named
