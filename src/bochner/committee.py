r"""Networks that predict together: how the output layer of a trained one is calibrated, and how much each one counts.

A committee is a mixture of networks, $p(y \mid x) = \sum_m w_m\, p_m(y \mid x)$. Its weights make rows most probable that the
networks have not learnt from. Far from the data every network goes its own way, and their disagreement is part of the variance:
with the amplitude at its best value given the noise, $a^2 = \lVert \bar w \rVert^2 + \operatorname{tr} A^{-1}$, the squared mean
and the variance of a network's output far away add up to $a^2$ on average, however many rows it has seen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bochner.models import Model
from bochner.posteriors.closed_form import Statistics, features
from bochner.predictive import GaussianPredictive, normal_log_density
from bochner.training import Recipe, fit_map

NOISES = tuple(2.0 ** (k / 4) for k in range(-28, 3))  # in standard deviations of the target
AMPLITUDES = tuple(2.0 ** (k / 8) for k in range(-32, 49))  # in the same
FACTORS = tuple(0.5 + 0.025 * k for k in range(21))
APART, SAMPLE = 10.0, 1000  # lengthscales, and how many rows tell
AGAINST = 10.0  # odds that the networks know nothing of a row, before they have spoken
REMAINS = 0.01  # of what the networks say of a row's classes where they do not agree: the order of classes stays

Parts = Sequence[tuple[float, GaussianPredictive]]  # weights and predictions of a mixture


@dataclass
class Member:
    """A network of a committee.

    Attributes:
        model: The network.
        posterior: Its posterior.
        weight: Its share of the prediction.
        group: Number of the group it belongs to: wide networks, or those trained for the same time. They count alike.
    """

    model: Model
    posterior: Any
    weight: float
    group: int = 0


def describe(members: Sequence[Member]) -> str:
    """How many networks there are of each kind, and what they count for."""
    kinds: dict[str, list[float]] = {}
    for member in members:
        kind = "wide" if isinstance(member.model.extractor, nn.Identity) else "with hidden layers"
        kinds.setdefault(kind, []).append(member.weight)
    return ", ".join(f"{len(own)} {kind} ({sum(own):.2f})" for kind, own in kinds.items())


def train_together(
    make: Callable[[int], Model],
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    recipe: Recipe,
    *,
    seeds: Sequence[int],
    say: Callable[[str], None],
    progress: bool,
) -> list[Model]:
    """Networks at their MAP estimates, trained in one stack; those that go astray are trained again at a third of the rate.

    Args:
        make: Makes a network of a number, in float32.
        x: Inputs of all rows.
        y: Their targets.
        rows: Which rows each network learns from, (networks, n).
        recipe: How to train.
        seeds: A seed for each network.
        say: Tells the user.
        progress: Whether to show the epochs.

    Returns:
        The networks in float64; none at all where one diverges at both rates.
    """
    if not isinstance(recipe.lr, float):
        raise ValueError(
            f"The recipe parameter must have one learning rate for all networks, got {recipe.lr!r} instead."
        )
    found: dict[int, Model] = {}
    for rate, last in ((recipe.lr, False), (recipe.lr / 3, True)):
        left = [number for number in range(len(seeds)) if number not in found]
        say(f"training {len(left)} networks for {recipe.epochs} epochs of {rows.shape[1]} rows")
        models = [make(number) for number in left]
        given: Any = {"seed": [seeds[number] % 2**31 for number in left], "rows": rows[left], "progress": progress}
        target = y.float() if y.is_floating_point() else y
        fit = fit_map(models, x.float(), target, replace(recipe, lr=rate), **given)
        for number, model, diverged in zip(left, models, fit.diverged.tolist(), strict=True):
            astray = scattered(model.double().eval(), x[rows[number, :SAMPLE]])
            if not diverged and (last or not astray):
                found[number] = model
                if astray:
                    say("1 of them is still astray, and kept")
        if len(found) == len(seeds):
            return [found[number] for number in range(len(seeds))]
        say(f"{len(seeds) - len(found)} of them went astray")
    return []


@torch.no_grad()
def scattered(model: Model, x: Tensor) -> bool:
    """Whether hidden layers have driven rows so many lengthscales apart that the network cannot relate any two of them.

    That is how a network with a periodic layer diverges: its output stays finite, and random.
    """
    if isinstance(model.extractor, nn.Identity):
        return False
    return float((model.extractor(x) / model.layer.lengthscale).std(0).mean()) > APART


@torch.no_grad()
def stacking_weights(log_densities: Tensor, prior: Tensor, *, steps: int = 500) -> Tensor:
    """Weights of the mixture under which rows are most probable, by EM, under a Dirichlet prior.

    Args:
        log_densities: Log density of each row under each part, (parts, rows).
        prior: How many rows each part is given beforehand, (parts,).
        steps: Iterations.
    """
    weights = prior / prior.sum()
    for _ in range(steps):
        shares = torch.softmax(log_densities + weights.log()[:, None], 0)
        weights = (shares.sum(1) + prior) / (log_densities.shape[1] + prior.sum())
    return weights


@torch.no_grad()
def noise_scores(
    model: Model, x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor, *, amplitude: float | None = None
) -> tuple[Tensor, Tensor]:
    """How well the closed form of a trained regression network predicts held-out rows under each of ``NOISES``.

    A trained network has seen its training rows: the evidence would put the noise too low. Given the noise, the amplitude is the
    one of the largest evidence, unless it is given.

    Returns:
        The mean log density of the held-out rows, and the amplitude, for each noise.
    """
    sums = Statistics.of(model, x, y)
    values, vectors = torch.linalg.eigh(sums.gram)
    projection, phi = vectors.mT @ sums.projection, features(model, held_x).double() @ vectors
    variance = torch.tensor(NOISES, dtype=torch.float64, device=phi.device).square()[:, None]  # a row for each noise
    choices = torch.tensor(AMPLITUDES if amplitude is None else (amplitude,), dtype=torch.float64, device=phi.device)
    prior = (len(values) / choices.square())[:, None, None]  # along a dimension of its own
    precision = values.clamp(min=0) / variance + prior
    explained = (projection.square().sum(1) / variance.square() / precision).sum(-1)
    evidence = explained - y.shape[1] * (precision / prior).log().sum(-1)  # twice, up to what amplitudes share
    best = evidence.argmax(0)
    precision = precision[best, torch.arange(len(NOISES))]
    mean = torch.einsum("nk,sk,kc->snc", phi, 1 / (variance * precision), projection)
    spread = (phi.square() @ (1 / precision).mT).mT + variance
    scores = normal_log_density(held_y, mean, spread.sqrt()[:, :, None]).mean((1, 2))
    return scores, choices[best]


def mixed(parts: Parts) -> GaussianPredictive:
    """Mean and variance of a mixture of Gaussians, from its weights and parts."""
    mean = torch.stack([weight * part.mean for weight, part in parts]).sum(0)
    spread = torch.stack([weight * (part.variance + (part.mean - mean).square()) for weight, part in parts]).sum(0)
    noise = torch.stack([weight * part.noise.square() for weight, part in parts]).sum(0).sqrt()
    return GaussianPredictive(mean, spread, noise)


def agreed(members: Sequence[Member], probabilities: Tensor) -> Tensor:
    r"""Class probabilities of a committee, (networks, n, c) to (n, c): the average, drawn to even ones where networks disagree.

    The networks of a group are a sample, and the disagreement within groups tells the variance $V$ of the committee's average
    $\bar p$. If they know nothing of a row, the distance $r = \lVert \bar p - 1/c \rVert$ is that of a normal vector around 0 with
    variance $V/(c - 1)$ in each of $c - 1$ directions; if they know something, any distance is as likely. Beforehand the odds are
    ``AGAINST`` to one for nothing. The answer is $s \bar p + (1 - s)/c$, with the probability $s$ that they know something.

    $V$ is taken as known, though a few networks tell it: where those of one small group agree by chance, they are believed.
    """
    mean, variance, uniform = probabilities.new_zeros(()), probabilities.new_zeros(()), 1 / probabilities.shape[-1]
    for group in {member.group for member in members}:
        own = [number for number, member in enumerate(members) if member.group == group]
        weight, said = sum(members[number].weight for number in own), probabilities[own]
        mean = mean + weight * said.mean(0)
        if len(own) > 1:
            variance = variance + weight**2 / len(own) * said.var(0).sum(1)
    ways = probabilities.shape[-1] - 1  # the distance over the spread is that of a chi distribution with so many
    distance, spread = (mean - uniform).norm(dim=1), (variance / ways).sqrt().clamp(min=1e-30)
    # Nearer than the mode of that distribution speaks for nothing as strongly as the mode does.
    ratio = (distance / spread).clamp(min=math.sqrt(ways - 1))
    chi = torch.xlogy(ratio.new_tensor(ways - 1), ratio) - ratio.square() / 2 - math.lgamma(ways / 2)
    nothing = chi + (1 - ways / 2) * math.log(2) - spread.log()  # log density of the distance
    something = -0.5 * math.log(1 - uniform)
    share = torch.sigmoid(something - nothing - math.log(AGAINST)).clamp(min=REMAINS)[:, None]
    return share * mean + (1 - share) * uniform


def noise_factor(mixtures: Sequence[Parts], targets: Sequence[Tensor]) -> float:
    """What to multiply the noises of all networks by, so that their mixtures are calibrated and not only they.

    With many rows the variance of a closed form goes as the square of its noise, and is scaled with it here. The answer is the
    largest factor up to 1 that the rows do not speak against, by two units of their log density.
    """

    def score(factor: float) -> float:
        total = 0.0
        for parts, y in zip(mixtures, targets, strict=True):
            scaled = [
                (weight, replace(part, variance=factor**2 * part.variance, noise=factor * part.noise))
                for weight, part in parts
            ]
            total += float(mixed(scaled).log_prob(y).sum())
        return total

    scores = [score(factor) for factor in FACTORS]
    return max(factor for factor, own in zip(FACTORS, scores, strict=True) if own >= max(scores) - 2)
