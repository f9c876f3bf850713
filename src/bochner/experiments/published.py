"""Networks and training as in the paper's published code, to compare with its tables. Use them for nothing else.

The departures from the paper's text, and from what is right, are kept on purpose: the network trains 1/ℓ and the noise themselves,
draws phases uniformly before their link, has independent Student-t weights and a ReLU on the bottleneck.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bochner.layers import OutputLayer, StationaryLayer, layer_log_prior
from bochner.likelihoods import Categorical, Gaussian
from bochner.models import Model
from bochner.posteriors.learning_rate import DivergedError
from bochner.priors.activations import link

Parameters = dict[str, Tensor]
RATE_RANGE = (0.001, 3.0)  # learning rates of SWAG that the published code tries


def decay(epochs: int) -> Callable[[float], float]:
    """The schedule of the code: every epoch multiplies the present rate by 0.72 + 0.28 √(1 − t), down to 4.9e-5 of the first."""
    factors = [1.0]
    for epoch in range(epochs):
        factors.append(factors[-1] * (0.72 + 0.28 * math.sqrt(1 - epoch / epochs)))
    return lambda progress: factors[round(progress * epochs)]


def linear_search(score: Callable[[float], float], *, trials: int = 12) -> tuple[float, list[tuple[float, float]]]:
    """The published search for SWAG's learning rate: the lowest score on an even grid; scores that are not finite do not count.

    Returns:
        The best rate, and all pairs of rate and score.
    """
    tried = [(float(rate), float(score(float(rate)))) for rate in np.linspace(*RATE_RANGE, trials)]
    finite = [pair for pair in tried if math.isfinite(pair[1])]
    if not finite:
        raise DivergedError(f"No learning rate between {RATE_RANGE[0]} and {RATE_RANGE[1]} gave a finite score.")
    return min(finite, key=lambda pair: pair[1])[0], tried


class PublishedLayer(StationaryLayer):
    """A model layer that trains 1/ℓ under a Gamma(2, 0.5) prior on it, with phases drawn uniformly before their link."""

    def __init__(self, in_features: int, out_features: int, *, multiplier: float, **options: Any) -> None:
        super().__init__(in_features, out_features, lengthscale=1 / multiplier, **options)
        del self.log_lengthscale
        self.multiplier = nn.Parameter(self.weight.new_tensor(multiplier))
        if self.bias is not None and self.activation.bias == "uniform":
            with torch.no_grad():
                self.bias.uniform_(-math.pi, math.pi, generator=options.get("generator"))

    @property
    def lengthscale(self) -> Tensor:
        """The lengthscale, which divides the input."""
        return 1 / self.multiplier

    def log_prior(self, *, jacobian: bool = False) -> Tensor:
        """Log prior density of weights, biases and 1/ℓ. That of normal biases is taken where the link of phases would put them."""
        scale, bias = self.multiplier.log(), self.bias
        if bias is not None and self.activation.bias == "normal":
            bias = link(bias)
        parameters = {"weight": self.weight, "bias": bias, "log_lengthscale": scale}
        return layer_log_prior(self.spectrum, self.activation, parameters, jacobian=jacobian)

    def log_prior_slopes(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of ``log_prior``, as in ``StationaryLayer``."""
        slopes = super().log_prior_slopes(parameters)
        if "bias" in slopes:
            linked = link(parameters["bias"])
            # The derivative of π tanh(b/2) is (π² − (π tanh(b/2))²) / 2π.
            slopes["bias"] = -linked * (math.pi**2 - linked.square()) / (2 * math.pi)
        if "multiplier" in parameters:
            slopes["multiplier"] = 1 / parameters["multiplier"] - 0.5
        return slopes


class PublishedGaussian(Gaussian):
    """Gaussian noise whose standard deviation itself, not its logarithm, is trained."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.std = nn.Parameter(torch.ones(()))

    @property
    def log_noise(self) -> Tensor:
        """Logarithm of the standard deviation."""
        return self.std.log()


class PublishedModel(Model):
    """A network whose output bias has no prior. The code's penalty Σθ² on the extractor is ``extractor_precision`` 2."""

    def precisions(self) -> dict[str, float]:
        """Prior precisions of ``Model`` without the output bias."""
        return {name: p for name, p in super().precisions().items() if name != "output.bias"}


class OneLogit(OutputLayer):
    """An output layer for two classes: the logit of the second, beside a zero for the first."""

    def __init__(self, in_features: int) -> None:
        super().__init__(in_features, 1, bias=True)
        self.out_features = 2

    def forward(self, input: Tensor) -> Tensor:
        """Features (..., K) to logits (..., 2)."""
        f = super().forward(input)
        return torch.cat([torch.zeros_like(f), f], -1)


class SampledModel(Model):
    """A toy network of the published Julia code: one logit for two classes, an output bias, output weights and bias N(0, 1)."""

    def __init__(self, layer: StationaryLayer, likelihood: Gaussian | Categorical, generator: torch.Generator) -> None:
        regression = isinstance(likelihood, Gaussian)
        super().__init__(layer, 1 if regression else 2, likelihood, output_bias=True, generator=generator)
        if not regression:
            self.output = OneLogit(layer.out_features).to(layer.weight)
        with torch.no_grad():
            for value in (self.output.weight, self.output.bias):
                value.normal_(generator=generator)

    def precisions(self) -> dict[str, float]:
        """Prior precisions of ``Model``, with 1 for the output weights, whatever their number."""
        return {**super().precisions(), "output.weight": 1.0}


def noises(models: Sequence[Model]) -> Tensor:
    """Noise of each network, (E,)."""
    likelihoods: Any = [m.likelihood for m in models]
    return torch.stack([each.noise.detach() for each in likelihoods])
