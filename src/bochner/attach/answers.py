"""The answer of a head: a predictive distribution from a network's outputs and the variance left at each row.

The *variance left* is the share of the prior variance that the training rows leave at a row: 0 at a row seen many times, 1 far
away. *Known rows* set the constants of the answer and of the score: held-out rows where there are some, else training rows.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from bochner.attach.batches import HeadRows
from bochner.predictive import (
    CategoricalPredictive,
    GaussianPredictive,
    Predictive,
    normal_log_density,
    within_error_of_best,
)

TRUST_POWERS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)  # exponents γ of the trust that are tried
LOG_TEMPERATURE_STD = 0.5  # prior standard deviation of log t: most networks have a t within a factor of two of 1
CLASS_ORDER_SIZE = 1e-6  # largest logit of a row far from all data: it keeps the order of the classes, and little else
DEFAULT_TRUST_POWER = 0.5  # exponent γ where there are no held-out rows


@dataclass
class Answer:
    """The map from a network's outputs and the variance left v to a predictive distribution.

    The *trust* in the outputs is (1 − v)^γ. Known rows choose γ, but they say nothing of rows with a variance left above the
    ``edge``. Above it the trust falls at least in proportion to 1 − v, whatever γ is. For regression the mean stays that of the
    network up to the edge, unless held-out rows are clearly more probable where it falls with the trust, as for a network that has
    learnt noise.

    Attributes:
        power: The exponent γ.
        edge: The 99 % quantile of the variance left at known rows.
        shrinks: For regression, whether the mean falls with the trust up to the edge too.
        temperature: For classes, the number t that outputs are divided by; None for numbers.
        noise: Standard deviation of the noise, (c,), for regression.
        centre: Mean of the targets, (c,), for regression.
        spread: Standard deviation of the targets, (c,).
        score: Mean log probability of the known rows; it chooses the kernel.
    """

    power: float
    edge: float
    temperature: float | None = None
    noise: Tensor | None = None
    centre: Tensor | None = None
    spread: Tensor | None = None
    shrinks: bool = False
    score: float = field(default=math.nan, repr=False)

    @classmethod
    def fitted(cls, known: HeadRows, left: Tensor, targets: Tensor, classes: bool, seen: bool) -> "Answer":
        """The answer under which known rows are most probable.

        Rows that the network has learnt from would make it too sure, and would choose a power near zero. So with such rows the
        power is the default, and the temperature is the one that keeps the mean size of the outputs.

        Args:
            known: The known rows.
            left: Variance left at them, (n,).
            targets: Targets of the training rows.
            classes: Whether targets are classes.
            seen: Whether the network has learnt from the known rows.
        """
        if seen and classes:
            answer = cls(DEFAULT_TRUST_POWER, edge_of(left))
            return replace(answer, temperature=float(answer.trust(left).mean()))
        if seen:
            return _fit_power(DEFAULT_TRUST_POWER, known, left, targets, classes)[0]
        chosen, log_probability = _largest_power(known, left, targets, classes)
        if not classes:
            other, under_other = _largest_power(known, left, targets, classes, shrinks=True)
            gain = under_other - log_probability
            if float(gain.mean()) > float(gain.std()) / math.sqrt(len(gain)):
                chosen, log_probability = other, under_other
        chosen.score = float(log_probability.mean())
        return chosen

    def checked(self, outputs: Tensor) -> Tensor:
        """The outputs, (n, c), after checking that there is a noise for each of them."""
        if self.noise is not None and outputs.shape[1] != len(self.noise):
            raise ValueError(
                f"The head was made for a network with {len(self.noise)} outputs, but the network gives {outputs.shape[1]}."
            )
        return outputs

    def trust(self, left: Tensor) -> Tensor:
        """The factor on the outputs of each row, (n,), from 0 to 1."""
        return (1 - left.clamp(max=self.edge)) ** self.power * self._beyond(left)

    def _beyond(self, left: Tensor) -> Tensor:
        """The part of the trust that falls beyond the edge alone, (n,)."""
        return ((1 - left) / (1 - self.edge)).clamp(max=1.0) ** max(1.0, self.power)

    def __call__(self, outputs: Tensor, left: Tensor) -> Predictive:
        """The predictive distribution of rows."""
        trust = self.trust(left)[:, None]
        if self.temperature is not None:
            network_logs = torch.log_softmax(outputs / self.temperature, 1)
            # However far a row is, the most probable class stays that of the network.
            order = outputs / outputs.abs().amax(1, keepdim=True).clamp(min=1e-300)
            logs = torch.log_softmax(trust * outputs / self.temperature + CLASS_ORDER_SIZE * order, 1)
            entropy = -(network_logs.exp() * network_logs).sum(1)
            return CategoricalPredictive(logs, (logs.exp() - network_logs.exp()).square(), entropy)
        assert self.noise is not None and self.centre is not None and self.spread is not None  # noqa: PT018
        kept = trust if self.shrinks else self._beyond(left)[:, None]
        mean = self.centre + kept * (outputs - self.centre)
        return GaussianPredictive(mean, self.spread.square() * (1 - trust.square()), self.noise)


def edge_of(left: Tensor) -> float:
    """The 99 % quantile of the variance left, at most slightly below 1."""
    return min(float(left.quantile(0.99)), 1 - 1e-6)


def _largest_power(
    known: HeadRows, left: Tensor, targets: Tensor, classes: bool, *, shrinks: bool = False
) -> tuple[Answer, Tensor]:
    """The answer with the largest power within a standard error of the best, and the log probability of each known row."""
    tried = [_fit_power(power, known, left, targets, classes, shrinks=shrinks) for power in TRUST_POWERS]
    return tried[int(within_error_of_best(torch.stack([each for _, each in tried])).nonzero().max())]


def _fit_power(
    power: float, known: HeadRows, left: Tensor, targets: Tensor, classes: bool, *, shrinks: bool = False
) -> tuple[Answer, Tensor]:
    """The best answer with a given power, and the log probability of each known row under it."""
    answer = _fit_temperature(power, known, left) if classes else _fit_noise(power, known, left, targets, shrinks)
    return answer, answer(known.outputs.double(), left).log_prob(known.targets)


def _fit_temperature(power: float, known: HeadRows, left: Tensor) -> Answer:
    """The answer for classes whose temperature makes known rows most probable."""
    outputs, edge = known.outputs.double(), edge_of(left)

    def loss(log_temperature: float) -> float:
        # Without the prior, a few rows that all are right would ask for a temperature of zero.
        prior = 0.5 * (log_temperature / LOG_TEMPERATURE_STD) ** 2 / len(left)
        answer = Answer(power, edge, math.exp(log_temperature))
        return prior - float(answer(outputs, left).log_prob(known.targets).mean())

    return Answer(power, edge, math.exp(_minimum(loss, -4.0, 4.0)))


def _fit_noise(power: float, known: HeadRows, left: Tensor, targets: Tensor, shrinks: bool) -> Answer:
    """The answer for numbers whose noise makes known rows most probable."""
    outputs, edge = known.outputs.double(), edge_of(left)
    centre, spread = targets.mean(0), targets.std(0)
    answer = Answer(power, edge, None, spread, centre, spread, shrinks)
    prediction = answer(outputs, left)
    assert isinstance(prediction, GaussianPredictive)
    noise = []
    for column in range(outputs.shape[1]):
        mean, variance, truth = (t[:, column] for t in (prediction.mean, prediction.f_variance, known.targets))
        error = float((truth - outputs[:, column]).square().mean().sqrt())
        if error > 2 * float(spread[column]) > 0:
            warnings.warn(
                f"Output {column} of the network is {error:.3g} from its targets, which differ by {float(spread[column]):.3g}: it "
                "is worse than their mean. Are the targets in the units that it was trained with?",
                stacklevel=8,
            )
        unit = max(float(spread[column]), error, 1e-300)
        noise.append(unit * _best_noise(mean, variance, truth, unit))
    return replace(answer, noise=torch.tensor(noise, dtype=torch.float64, device=outputs.device))


def _best_noise(mean: Tensor, variance: Tensor, truth: Tensor, unit: float) -> float:
    """Standard deviation of the noise, in a unit, that makes the targets of one output most probable."""

    def loss(log_noise: float) -> float:
        std = (variance + (unit * math.exp(log_noise)) ** 2).sqrt()
        return -float(normal_log_density(truth, mean, std).mean())

    return math.exp(_minimum(loss, -12.0, 2.0))


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one number is smallest between two ends."""
    return float(minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": 1e-3}).x)  # pyright: ignore
