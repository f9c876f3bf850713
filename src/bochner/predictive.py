r"""What every posterior answers: the predictive distribution at some inputs.

Shapes may carry leading batch dimensions (a stack of networks): (..., n, c) for n inputs and c outputs or classes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from statistics import NormalDist
from typing import Any, TypeVar

import torch
from torch import Tensor

from bochner.arguments import described, finite_tensor, is_dense

Answer = TypeVar("Answer", bound="Predictive")


class Predictive(ABC):
    """A predictive distribution; the two kinds are ``GaussianPredictive`` and ``CategoricalPredictive``."""

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Log predictive density or probability of each target, (..., n)."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """Entropy of the prediction, aleatoric and epistemic together, (..., n)."""

    @property
    @abstractmethod
    def marginal_variance(self) -> Tensor:
        """Variance over the posterior, summed over outputs or class probabilities, (..., n)."""

    @property
    @abstractmethod
    def mutual_information(self) -> Tensor:
        """Information between the target and the parameters: the epistemic part of the entropy, (..., n)."""

    @property
    @abstractmethod
    def ood_score(self) -> Tensor:
        """From 0 to 1, higher for inputs that look less like the training data, (..., n)."""


@dataclass(frozen=True)
class GaussianPredictive(Predictive):
    r"""Regression: $y = f + \varepsilon$ with $f$ from the posterior and $\varepsilon \sim \mathrm{N}(0, s^2)$.

    Names without a prefix are of y, noise included: ``std`` is the root of ``variance``. What is of f alone says so.

    Attributes:
        mean: Mean of f and of y, (..., n, c).
        f_variance: Variance of f, (..., n, c), without noise.
        noise: Noise standard deviation s, a scalar or of shape (...); or one for each output, (..., c).
        samples: Draws of f, (S, ..., n, c), where the posterior is a mixture over them; None where f is Gaussian.
        sample_noise: Noise of every draw, (S,), where the noise is drawn too; ``noise`` is then their root mean square.
        novelty: Score of each input from 0 to 1, (..., n), where the posterior computes one; ``ood_score`` then is this.
    """

    mean: Tensor
    f_variance: Tensor
    noise: Tensor
    samples: Tensor | None = None
    sample_noise: Tensor | None = None
    novelty: Tensor | None = None

    @classmethod
    def from_samples(cls, samples: Tensor, noise: Tensor) -> "GaussianPredictive":
        """The equal mixture of N(f_s, s²) over draws f_s, (S, ..., n, c), with one noise or, for a single network, S of them."""
        mean, variance = samples.mean(0), samples.var(0, correction=0)
        if noise.ndim == samples.ndim - 2:
            return cls(mean, variance, noise.square().mean(0).sqrt(), samples, noise)
        return cls(mean, variance, noise, samples)

    @property
    def _noise(self) -> Tensor:
        per_output = self.noise.ndim == self.mean.ndim - 1
        return self.noise[..., None, :] if per_output else self.noise[..., None, None]

    @property
    def variance(self) -> Tensor:
        """Variance of y, noise included, (..., n, c)."""
        return self.f_variance + self._noise.square()

    @property
    def std(self) -> Tensor:
        """Standard deviation of y, noise included, (..., n, c)."""
        return self.variance.sqrt()

    def log_prob(self, y: Tensor) -> Tensor:
        r"""Log density of y, summed over its components.

        Gaussian with variance of f plus noise; for a mixture, $\log \frac1S \sum_s \prod_j \mathrm{N}(y_j \mid f_{sj}, s^2)$.
        """
        if not is_dense(y) or y.shape[-2:] != self.mean.shape[-2:]:
            raise ValueError(
                f"The targets y must have the shape of the mean, {tuple(self.mean.shape)}, got {described(y)} instead."
            )
        y = finite_tensor("y", y).to(self.mean)
        if self.samples is None:
            return normal_log_density(y, self.mean, self.std).sum(-1)
        noise = self._noise if self.sample_noise is None else self.sample_noise[..., None, None]
        densities = normal_log_density(y, self.samples, noise).sum(-1)
        return densities.logsumexp(0) - math.log(len(self.samples))

    @property
    def entropy(self) -> Tensor:
        """Entropy of a Gaussian of the same variance: an upper bound for a mixture."""
        return (0.5 * math.log(2 * math.pi * math.e) + self.std.log()).sum(-1)

    @property
    def marginal_variance(self) -> Tensor:
        """Variance of f, summed over outputs."""
        return self.f_variance.sum(-1)

    @property
    def mutual_information(self) -> Tensor:
        """½ log(1 + Var f / s²), summed over outputs: exact where f is Gaussian."""
        return 0.5 * torch.log1p(self.f_variance / self._noise.square()).sum(-1)

    @property
    def ood_score(self) -> Tensor:
        """The share of the variance of y that is uncertainty of f, over all outputs; ``novelty`` where the posterior has one.

        It is 0 where f is known and 1 where the uncertainty of f is far above the noise.
        """
        return self.marginal_variance / self.variance.sum(-1) if self.novelty is None else self.novelty

    def interval(self, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Central interval for y under a Gaussian of the same mean and variance, each (..., n, c)."""
        return central_interval(self.mean, self.std, coverage)


def joined(parts: Sequence[Answer]) -> Answer:
    """One predictive distribution of the rows of several."""
    first = parts[0]
    assert isinstance(first, GaussianPredictive | CategoricalPredictive)
    if isinstance(first, GaussianPredictive):
        rows = {"mean": -2, "f_variance": -2} | ({} if first.samples is None else {"samples": -2})
    else:
        rows = {"log_probabilities": -2, "probability_variance": -2, "expected_entropy": -1}
    if first.novelty is not None:
        rows["novelty"] = -1
    values = {name: torch.cat([getattr(part, name) for part in parts], dim) for name, dim in rows.items()}
    return replace(first, **values)  # pyright: ignore[reportArgumentType]


def is_coverage(value: Any) -> bool:
    """Whether a number can be the probability of an interval: its upper end is a quantile below 1, also when rounded."""
    return isinstance(value, Real) and 0 < float(value) and 0.5 + float(value) / 2 < 1


def central_interval(mean: Any, std: Any, coverage: float) -> tuple[Any, Any]:
    """Ends of the interval about the mean that holds a Gaussian with probability ``coverage``; arrays or tensors."""
    if not is_coverage(coverage):
        raise ValueError(f"The coverage parameter must lie between 0 and 1, got {coverage!r} instead.")
    half = NormalDist().inv_cdf(0.5 + float(coverage) / 2) * std
    return mean - half, mean + half


def normal_log_density(y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    r"""$\log \mathrm{N}(y \mid \mu, \sigma^2)$, entry by entry."""
    return -0.5 * ((y - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)


def within_error_of_best(logs: Tensor, weight: Tensor | None = None) -> Tensor:
    """Which of several choices are about as good as the best one, (k,) booleans: their mean loss is within its standard error.

    Args:
        logs: Log probability of every row under every choice, (k, n).
        weight: How many rows each one stands for, (n,); 1 by default.
    """
    weight = torch.ones_like(logs[0]) if weight is None else weight
    lost = logs[int((logs @ weight).argmax())] - logs
    mean = lost @ weight / weight.sum()
    error = ((lost - mean[:, None]).square() @ weight).sqrt() / weight.sum()
    return mean <= error


@dataclass(frozen=True)
class CategoricalPredictive(Predictive):
    """Classification: moments of the class probabilities over the posterior.

    Attributes:
        log_probabilities: Logarithm of the mean probabilities, (..., n, c); finite where the probabilities underflow.
        probability_variance: Their variance over the posterior, (..., n, c).
        expected_entropy: Mean over the posterior of the entropy: the aleatoric part, (..., n).
        novelty: Score of each input from 0 to 1, (..., n), where the posterior computes one; ``ood_score`` then is this.
    """

    log_probabilities: Tensor
    probability_variance: Tensor
    expected_entropy: Tensor
    novelty: Tensor | None = None

    @classmethod
    def from_logits(cls, logits: Iterable[Tensor]) -> "CategoricalPredictive":
        """Averages over posterior draws of the outputs, each (..., n, c), one at a time: no stack of them is kept."""
        count = 0
        log_sum, square, entropy = torch.tensor(-math.inf), torch.zeros(()), torch.zeros(())
        for draw in logits:
            # In float64: the variance of a confident class is far below float32's rounding of its square.
            log_p = torch.log_softmax(draw.double(), -1)
            p = log_p.exp()
            log_sum, square, entropy = (
                torch.logaddexp(log_sum.to(log_p), log_p),
                square + p.square(),
                entropy - (p * log_p).sum(-1),
            )
            count += 1
        if count == 0:
            raise ValueError("The logits parameter must hold at least one draw, got none.")
        log_mean = log_sum - math.log(count)
        return cls(log_mean, (square / count - (2 * log_mean).exp()).clamp(min=0), entropy / count)

    @property
    def probabilities(self) -> Tensor:
        """Mean probabilities, (..., n, c)."""
        return self.log_probabilities.exp()

    def log_prob(self, y: Tensor) -> Tensor:
        """Log probability of each class label, (..., n) integers."""
        shape, classes = self.log_probabilities.shape[:-1], self.log_probabilities.shape[-1]
        fits = is_dense(y) and 0 < y.ndim <= len(shape) and y.shape[-1] == shape[-1]
        fits = fits and all(length in (1, size) for length, size in zip(y.shape[::-1], shape[::-1], strict=False))
        if not fits or y.is_floating_point():
            raise ValueError(f"The targets y must be integer class labels, one per row, got {described(y)} instead.")
        y = finite_tensor("y", y).to(self.log_probabilities.device, torch.int64)
        if int(y.min()) < 0 or int(y.max()) >= classes:
            raise ValueError(
                f"The targets y must hold labels from 0 to {classes - 1}, got {int(y.min())} to {int(y.max())} instead."
            )
        index = y.expand(shape).unsqueeze(-1)
        return self.log_probabilities.gather(-1, index).squeeze(-1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class, (..., n)."""
        return self.probabilities.max(-1).values

    @property
    def entropy(self) -> Tensor:
        """Entropy of the mean probabilities."""
        return -torch.special.xlogy(self.probabilities, self.probabilities).sum(-1)

    @property
    def marginal_variance(self) -> Tensor:
        """Variance of the probabilities over the posterior, summed over classes."""
        return self.probability_variance.sum(-1)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy of the mean minus mean entropy."""
        return (self.entropy - self.expected_entropy).clamp(min=0)

    @property
    def ood_score(self) -> Tensor:
        """The entropy over that of equal probabilities; ``novelty`` where the posterior has one.

        It is 0 where one class is certain and 1 where all classes are equally probable.
        """
        if self.novelty is not None:
            return self.novelty
        return (self.entropy / math.log(max(2, self.log_probabilities.shape[-1]))).clamp(max=1.0)
