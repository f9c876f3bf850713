"""From a network's outputs and the variance left to a predictive distribution."""

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
    not_spoken_against,
)

POWERS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)  # γ that are tried
TEMPERATURE_SPREAD = 0.5  # prior standard deviation of log t: most networks are within a factor of two of it
TIE = 1e-6  # size of the outputs of a row of which nothing is known: no more than their order
USUAL_POWER = 0.5  # γ without held-out rows


@dataclass
class Answer:
    """From outputs of the network and the variance left to a predictive distribution.

    Where rows lie beyond nearly all known ones, these cannot say how far outputs are to be trusted. From there on trust falls at
    least in proportion to 1 − v, whatever γ is.

    Attributes:
        power: γ.
        edge: Variance left that all but one known row in a hundred have at most.
        temperature: t, for classes: what outputs are divided by.
        noise: Standard deviation of the noise, (c,), for regression.
        centre: Mean of the targets, (c,), for regression.
        spread: Their standard deviation, (c,).
        score: Mean log probability of the rows that chose.
    """

    power: float
    edge: float
    temperature: float | None = None
    noise: Tensor | None = None
    centre: Tensor | None = None
    spread: Tensor | None = None
    score: float = field(default=math.nan, repr=False)

    @classmethod
    def fitted(cls, known: HeadRows, left: Tensor, targets: Tensor, classes: bool, seen: bool) -> "Answer":
        """The answer that suits known rows; ``targets`` are those of training rows, among which known rows may be ``seen``.

        Rows that the network has learnt from would make it surer than it should be, and choose hardly any power. So the power is
        then the usual one, and the temperature that which leaves outputs as large as they were on average.
        """
        if seen and classes:
            usual = cls(USUAL_POWER, edge_of(left))
            return replace(usual, temperature=float(usual.trust(left).mean()))
        if seen:
            return _fit_power(USUAL_POWER, known, left, targets, classes)[0]
        tried = [_fit_power(power, known, left, targets, classes) for power in POWERS]
        logs = torch.stack([log for _, log in tried])
        largest = int(not_spoken_against(logs).nonzero().max())
        chosen = tried[largest][0]
        chosen.score = float(logs[largest].mean())
        return chosen

    def trust(self, left: Tensor) -> Tensor:
        """What outputs are multiplied by, (n,)."""
        within, beyond = left.clamp(max=self.edge), ((1 - left) / (1 - self.edge)).clamp(max=1.0)
        return (1 - within) ** self.power * beyond ** max(1.0, self.power)

    def __call__(self, outputs: Tensor, left: Tensor) -> Predictive:
        """The predictive distribution of rows."""
        trust = self.trust(left)[:, None]
        if self.temperature is not None:
            own = torch.log_softmax(outputs / self.temperature, 1)
            # However far a row is, the most probable class stays the network's own.
            order = outputs / outputs.abs().amax(1, keepdim=True).clamp(min=1e-300)
            logs = torch.log_softmax(trust * outputs / self.temperature + TIE * order, 1)
            entropy = -(own.exp() * own).sum(1)
            return CategoricalPredictive(logs, (logs.exp() - own.exp()).square(), entropy)
        assert self.noise is not None and self.centre is not None and self.spread is not None  # noqa: PT018
        mean = self.centre + trust * (outputs - self.centre)
        return GaussianPredictive(mean, self.spread.square() * (1 - trust.square()), self.noise)


def edge_of(left: Tensor) -> float:
    """Variance left that all but one row in a hundred have at most."""
    return min(float(left.quantile(0.99)), 1 - 1e-6)


def _fit_power(power: float, known: HeadRows, left: Tensor, targets: Tensor, classes: bool) -> tuple[Answer, Tensor]:
    """The answer with a given power whose temperature or noise suits known rows, and their log probabilities."""
    outputs, edge = known.outputs.double(), edge_of(left)
    if classes:

        def at(value: float) -> Answer:
            return Answer(power, edge, math.exp(value))

        def loss(value: float) -> float:
            # Few rows, all of them right, would ask for any temperature.
            prior = 0.5 * (value / TEMPERATURE_SPREAD) ** 2 / len(left)
            return prior - float(at(value)(outputs, left).log_prob(known.targets).mean())

        best = _minimum(loss, -4.0, 4.0)
        return at(best), at(best)(outputs, left).log_prob(known.targets)
    centre, spread = targets.mean(0), targets.std(0)
    prediction = Answer(power, edge, None, spread, centre, spread)(outputs, left)
    assert isinstance(prediction, GaussianPredictive)
    noise = []
    for column in range(outputs.shape[1]):
        mean, variance, truth = (t[:, column] for t in (prediction.mean, prediction.f_variance, known.targets))
        error = float((truth - outputs[:, column]).square().mean().sqrt())
        if error > 2 * float(spread[column]) > 0:
            warnings.warn(
                f"Output {column} of the network is {error:.3g} from its targets, which differ by {float(spread[column]):.3g}: it "
                "is worse than their mean. Are the targets in the units that it was trained with?",
                stacklevel=4,
            )
        unit = max(float(spread[column]), error, 1e-300)

        def noise_loss(
            value: float, mean: Tensor = mean, variance: Tensor = variance, truth: Tensor = truth, unit: float = unit
        ):
            return -float(normal_log_density(truth, mean, (variance + (unit * math.exp(value)) ** 2).sqrt()).mean())

        noise.append(unit * math.exp(_minimum(noise_loss, -12.0, 2.0)))
    found = Answer(power, edge, None, torch.tensor(noise, dtype=torch.float64, device=outputs.device), centre, spread)
    return found, found(outputs, left).log_prob(known.targets)


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    return float(minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": 1e-3}).x)  # pyright: ignore
