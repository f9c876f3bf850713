"""Likelihoods of targets under a network's output: Gaussian noise, or classes through a softmax."""

import math

import torch
from torch import Tensor, nn

from bochner.arguments import described, is_dense, positive_number
from bochner.priors.arrays import Array, ArrayModule
from bochner.priors.spectra import log_gamma_log_prob


def gaussian_log_likelihood(f: Array, y: Array, log_noise: Array, xp: ArrayModule = torch) -> Array:
    """Log N(y | f, s²), summed over components: (..., n, c) to (..., n)."""
    z = (y - f) * xp.exp(-log_noise)
    return xp.sum(-0.5 * z * z - log_noise - 0.5 * math.log(2 * math.pi), -1)


def noise_log_prior(log_noise: Array, *, jacobian: bool, xp: ArrayModule = torch) -> Array:
    """Log density of the noise under Gamma(0.5, rate 1); with ``jacobian``, as a density of its logarithm."""
    return log_gamma_log_prob(log_noise, 0.5, 1.0, xp) + (log_noise if jacobian else 0.0)


def categorical_log_likelihood(f: Array, class_output: Array, xp: ArrayModule = torch) -> Array:
    """Log softmax probability of the class whose output is ``class_output``: (..., n, c) and (..., n) to (..., n)."""
    return class_output - xp.logsumexp(f, -1)


class Gaussian(nn.Module):
    """Regression, y = f(x) + noise: the standard deviation s of the noise is trainable, with a Gamma(0.5, rate 1) prior.

    Args:
        noise: Initial standard deviation.
    """

    def __init__(self, noise: float = 1.0) -> None:
        super().__init__()
        log_noise = math.log(positive_number("noise", noise))
        self.log_noise = nn.Parameter(torch.tensor(log_noise, dtype=torch.float64))

    @property
    def noise(self) -> Tensor:
        """Standard deviation of the noise."""
        return self.log_noise.exp()

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Log likelihood of each target, summed over its components: (n, c) and (n, c) to (n,)."""
        if not is_dense(y) or f.shape != y.shape or y.device != f.device or y.dtype == torch.bool:
            raise ValueError(
                f"The targets y must have the shape of the outputs, {tuple(f.shape)}, got {described(y)} instead."
            )
        return gaussian_log_likelihood(f, y, self.log_noise)

    def log_prior(self, *, jacobian: bool = False) -> Tensor:
        """Log prior density of the noise; with ``jacobian``, as a density of its logarithm."""
        return noise_log_prior(self.log_noise, jacobian=jacobian)


class Categorical(nn.Module):
    """Classification: classes 0 … c−1 with probabilities softmax(f(x)). Two classes are Bernoulli."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Log likelihood of each class label: (n, c) and integer (n,) to (n,)."""
        if not is_dense(y) or y.is_floating_point() or y.shape != f.shape[:-1] or y.device != f.device:
            raise ValueError(
                f"The targets y must be integer class labels of shape {tuple(f.shape[:-1])}, got {described(y)} instead."
            )
        try:
            class_output = f.gather(-1, y.long()[..., None])[..., 0]
        except (IndexError, RuntimeError) as error:
            raise ValueError(f"The targets y must hold labels from 0 to {f.shape[-1] - 1}: {error}") from error
        return categorical_log_likelihood(f, class_output)

    def log_prior(self, *, jacobian: bool = False) -> Tensor:  # noqa: ARG002
        """Zero: this likelihood has no parameters."""
        return torch.zeros(())


Likelihood = Gaussian | Categorical
