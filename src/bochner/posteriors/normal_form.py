r"""Small networks as functions of standard normal numbers, for samplers that need such a prior.

Every number of the prior is written as a function of standard normal numbers: a Student-t weight vector is a normal one over the
root of a mean of $2\nu$ squares, a uniform phase is the angle of two, and a Gamma variable is a sum of squares. What is left is a
standard normal prior times a likelihood.

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
from torch import Tensor, nn

from bochner.models import Model
from bochner.priors.activations import unlink
from bochner.priors.spectra import RBF, Matern

LENGTHSCALE_PRIOR = (2.0, 0.5)  # shape and rate of its Gamma prior, as in ``layers``
NOISE_PRIOR = (0.5, 1.0)  # shape and rate of its Gamma prior, as in ``likelihoods``
TWO_PI = 2 * math.pi

Index = Tensor | slice  # some of the particles
Evaluated = tuple[Tensor, Tensor]  # outputs of particles at all rows, and their log likelihoods
Normal = Callable[..., Tensor]  # standard normal numbers of a shape

SMALLEST_SQUARE = 1e-18  # of a number that a weight is divided by, or that has a direction
HEAD_MOVES = 4  # of output weights and biases for one evaluation of all units, which costs as much as several moves


def from_squares(normal: Tensor, prior: tuple[float, float]) -> Tensor:
    """A Gamma variable of the shape k/2 from the k standard normal numbers in the last dimension."""
    return (normal.square().sum(-1) / (2 * prior[1])).clamp(min=1e-12)


class SampledNetwork(ABC):
    """A network as a function of standard normal numbers, for many particles at once.

    Args:
        model: The network.
        x: Training inputs, (n, d), in the type that all is computed in.
        y: Training targets.

    Attributes:
        unit_numbers: Numbers of a unit.
        shared_numbers: Numbers that all units share; the first ``lengthscale_numbers`` are those of the lengthscale.
        recordable: Whether a CUDA graph can record it; factorisations it cannot.
        part_bytes: Bytes of outputs of the particles that move together on a processor; with fewer, operations would do too little.
    """

    recordable = False
    part_bytes = 2**23

    def __init__(self, model: Model, x: Tensor, y: Tensor) -> None:
        self.model, self.layer, self.x, self.y = model, model.layer, x, y
        # What weights and bias are multiplied by.
        self.columns = torch.cat([x, x.new_ones(len(x), 1)], 1).T.contiguous()
        self.dim = self.layer.in_features
        self.squares = self._numbers_of_scales()
        self.bias_numbers = (
            {"uniform": 2, "normal": 1}[self.layer.activation.bias] if self.layer.bias is not None else 0
        )
        self.unit_numbers = self.dim + self.squares + self.bias_numbers
        self.shared_numbers = self.lengthscale_numbers = int(2 * LENGTHSCALE_PRIOR[0])
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
            # In float32 one draw in millions is exactly zero.
            weight = weight * squares.mean(-1).clamp(min=SMALLEST_SQUARE).rsqrt()
        if not self.bias_numbers:
            return weight, None
        angle = rest[..., self.squares : self.squares + self.bias_numbers]
        return weight, torch.atan2(angle[..., 0], angle[..., 1]) if self.bias_numbers == 2 else angle[..., 0]

    def draw_weights(self, v: Tensor, weight: Tensor, normal: Normal) -> None:
        """Puts into v, in place, a draw of the numbers that make given weights.

        Given w = n/s with k squares in s² and n of length b, s² is a chi-squared variable with k + b squares over k + |w|².
        """
        if self.squares:
            spectrum = self.layer.spectrum
            assert isinstance(spectrum, Matern)
            degrees, blocks = int(2 * spectrum.nu), weight.unflatten(-1, (-1, 1 if spectrum.product else self.dim))
            squares = normal(*blocks.shape[:-1], degrees + blocks.shape[-1]).square().sum(-1, keepdim=True)
            scale = (squares / (degrees + blocks.square().sum(-1, keepdim=True))).sqrt()
            direction = nn.functional.normalize(
                normal(*blocks.shape[:-1], degrees) + math.sqrt(SMALLEST_SQUARE), dim=-1
            )
            v[..., self.dim : self.dim + self.squares] = (math.sqrt(degrees) * scale * direction).flatten(-2)
            weight = (scale * blocks).flatten(-2)
        v[..., : self.dim] = weight

    def lengthscale(self, shared: Tensor) -> Tensor:
        """Lengthscale of each particle."""
        return from_squares(shared[:, : self.lengthscale_numbers], LENGTHSCALE_PRIOR)

    def hidden(self, v: Tensor, shared: Tensor) -> Tensor:
        """Outputs (particles, units, n) of units at all rows from their numbers (particles, units, numbers)."""
        weight, bias = self.weights(v)
        activation = self.layer.activation
        slope = weight * (activation.unit / self.lengthscale(shared)[:, None, None])
        shift = activation.shift + (0 * slope[..., 0] if bias is None else activation.unit * bias)
        return activation.wave(torch.cat([slope, shift[..., None]], -1) @ self.columns)

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
    def move_head(self, particles: "Particles", normal: Normal, move: Callable[["Ellipse"], None]) -> None:
        """Moves what does not belong to a unit's shape: output weights and biases of classes, the noise of a regression."""

    @abstractmethod
    def head(self, particles: "Particles", generator: torch.Generator) -> dict[str, Tensor]:
        """Parameters of output layer and noise under the model's names, without the output weights' amplitude."""


class SampledClassifier(SampledNetwork):
    """A classifier: a unit's output weights are among its numbers, and the state holds the logits; of two, their difference."""

    recordable = True
    part_bytes = 2**20  # what a unit's move needs stays in the processor's cache

    def __init__(self, model: Model, x: Tensor, y: Tensor) -> None:
        super().__init__(model, x, y)
        self.logits = len(model.output.weight)  # 1 where the other logit is zero
        self.sign = 2 * self.y.to(self.x.dtype) - 1 if self.logits < 3 else None
        self.unit_numbers += self.logits
        self.shared_numbers += self.logits * model.output.has_bias

    def _with_log_likelihood(self, f: Tensor) -> Evaluated:
        if self.sign is not None:
            value = nn.functional.logsigmoid(self.sign * f[:, 0])
        else:
            value = torch.log_softmax(f, 1).gather(1, self.y.expand(len(f), 1, -1))[:, 0]
        return f, value.sum(-1).nan_to_num(nan=torch.finfo(value.dtype).min)

    def _of_logits(self, numbers: Tensor) -> Tensor:
        """What belongs to the logits, the last of the numbers, as the state holds them."""
        own = numbers[..., -self.logits :]
        return own.diff(dim=-1) if self.logits == 2 else own

    def evaluate(self, v: Tensor, shared: Tensor) -> Evaluated:
        """Logits at all rows and log likelihoods."""
        return self._with_log_likelihood(self._f(self.hidden(v, shared), v, shared))

    def _f(self, h: Tensor, v: Tensor, shared: Tensor) -> Tensor:
        """Logits from outputs of units and the numbers of output weights and biases, the last of units and of what is shared."""
        f = (self.weight_std * self._of_logits(v)).mT @ h
        return f + self.bias_std * self._of_logits(shared)[..., None] if self.bias_std else f

    def without(self, outputs: Tensor, v: Tensor, shared: Tensor, unit: int) -> Tensor:
        """The logits without the unit's share."""
        return self._with_share(outputs, v[:, unit], shared, -self.weight_std)

    def _with_share(self, f: Tensor, unit_numbers: Tensor, shared: Tensor, factor: float) -> Tensor:
        """Logits (particles, logits, n), and a unit's share in them times a factor."""
        weight = self._of_logits(unit_numbers)[..., None]
        return torch.addcmul(f, weight, self.hidden(unit_numbers[:, None], shared), value=factor)

    def with_unit(self, rest: Tensor, unit_numbers: Tensor, shared: Tensor, unit: int) -> Evaluated:  # noqa: ARG002
        """Logits and log likelihoods where one unit has the numbers ``unit_numbers``."""
        return self._with_log_likelihood(self._with_share(rest, unit_numbers, shared, self.weight_std))

    def move_head(self, particles: "Particles", normal: Normal, move: Callable[["Ellipse"], None]) -> None:
        """Moves all output weights and biases at a time. Logits are linear in them, and so go along the same ellipse."""
        h = self.hidden(particles.v, particles.shared)
        weights, biases = particles.v[..., -self.logits :], particles.shared[:, self.lengthscale_numbers :]
        sizes = [weights[0].numel(), biases.shape[1], particles.outputs[0].numel()]

        def joined(weights: Tensor, biases: Tensor) -> Tensor:
            return torch.cat([weights.flatten(1), biases, self._f(h, weights, biases).flatten(1)], 1)

        def propose(numbers: Tensor, at: Index) -> Evaluated:  # noqa: ARG001
            return self._with_log_likelihood(numbers.split(sizes, 1)[2].unflatten(1, particles.outputs.shape[1:]))

        numbers = joined(weights, biases)
        for value, fresh in zip((particles.outputs, particles.level), propose(numbers, slice(None)), strict=True):
            value.copy_(fresh)  # without the rounding of many small changes
        for _ in range(HEAD_MOVES):
            move(Ellipse(numbers, joined(normal(*weights.shape), normal(*biases.shape)), propose))
        moved_weights, moved_biases, _ = numbers.split(sizes, 1)
        weights.copy_(moved_weights.view_as(weights))
        biases.copy_(moved_biases)

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
            self.constant = x.new_ones(1, 1, len(x))

    def noise(self, shared: Tensor) -> Tensor:
        """Noise of each particle."""
        return from_squares(shared[:, -int(2 * NOISE_PRIOR[0]) :], NOISE_PRIOR)

    def features(self, h: Tensor) -> Tensor:
        """The units' outputs, and a column of ones where there is an output bias."""
        return h if self.constant is None else torch.cat([h, self.constant.expand(len(h), -1, -1)], 1)

    def posterior(self, h: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Cholesky factor of the output weights' precision, (c, K, K), and their mean, (c, K), given the features."""
        precision = h @ h.mT / noise.square()[:, None, None] + torch.diag(self.prior_precision)
        factor, failed = torch.linalg.cholesky_ex(precision)  # where noise all but vanishes: NaN, and so never accepted
        factor = torch.where(failed[:, None, None] > 0, math.nan, factor)
        mean = torch.cholesky_solve((h @ self.y / noise.square()[:, None])[..., None], factor)[..., 0]
        return factor, mean

    def log_likelihood(self, h: Tensor, noise: Tensor) -> Tensor:
        """Log density of the targets, (particles,), the output weights integrated out.

        The misfit is a sum of squares at the weights' mean, the least over all weights: rounding makes a particle less probable,
        never more. A difference of squares would invent probability where units coincide and the noise is next to nothing.
        """
        h = self.features(h)
        factor, mean = self.posterior(h, noise)
        residual = (self.y - (mean[:, None] @ h)[:, 0]) / noise[:, None]
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
        h = torch.cat([rest[:, :unit], new, rest[:, unit + 1 :]], 1)
        return h, self.log_likelihood(h, self.noise(shared))

    def move_head(self, particles: "Particles", normal: Normal, move: Callable[["Ellipse"], None]) -> None:
        """Moves the noise; the output weights are integrated out."""
        numbers = particles.shared[:, self.lengthscale_numbers :]

        def propose(numbers: Tensor, at: Index) -> Evaluated:
            h = particles.outputs[at]
            return h, self.log_likelihood(h, self.noise(numbers))

        move(Ellipse(numbers, normal(*numbers.shape), propose))

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
class Ellipse:
    """Numbers with a standard normal prior and a draw from it: particles move along the ellipse through both.

    Attributes:
        numbers: Where they are, (particles, numbers); changed in place.
        draw: The draw.
        propose: Outputs and log likelihoods of some particles at other numbers.
    """

    numbers: Tensor
    draw: Tensor
    propose: Callable[[Tensor, Index], Evaluated]


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


def named_parameters(target: SampledNetwork, particles: Particles, generator: torch.Generator) -> dict[str, Tensor]:
    """The network's parameters under its names, of every particle."""
    weight, bias = target.weights(particles.v)
    named = {"layer.weight": weight, "layer.log_lengthscale": target.lengthscale(particles.shared).log()}
    if bias is not None:
        named["layer.bias"] = unlink(bias) if target.bias_numbers == 2 else bias
    named |= target.head(particles, generator)
    named["output.weight"] = named["output.weight"] / float(target.model.amplitude)
    return named
