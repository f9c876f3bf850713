"""The fit of a mixture for classes, from rows to members.

1. For every kernel an isotropic head on the columns is made. Its lengthscale and amplitude have the highest leave-one-out log
   probability, in closed form, on a grid of factors of two; the search climbs from the middle of the grid.
2. From ``network_rows`` rows on, heads on trained networks are made. Their lengthscale and amplitude are chosen by rows that the
   networks have not learnt from.
3. The weights of the members are chosen by rows that the members have not learnt from.

With fewer rows than ``judging_rows`` and ``tuning_rows`` together (2,300), rows that choose a lengthscale and an amplitude also
judge the heads that have them. Their log probability is then too high, by 0.00 to 0.05 a row on six tables of 142 to 348 rows.
Regression tunes again without each part that judges; here that would make a fit several times as long.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from bochner.estimators.mixture import stacking_weights
from bochner.members.extractors import Extractors, train_extractors
from bochner.members.features import KernelFeatures, squared_distances
from bochner.members.heads import SoftmaxHead, as_probabilities, as_targets, find_mode, left_out_latent, moderated
from bochner.members.member import (
    Inputs,
    Member,
    candidates_to_keep,
    climb_to_best,
    features_at_first_rows,
    make_members,
    used_extractors,
    weighted_variance_left,
)
from bochner.members.plan import Plan, make_plan
from bochner.members.rows import TrainingRows
from bochner.members.settings import Task
from bochner.predictive import within_error_of_best
from bochner.priors.spectra import Spectrum
from bochner.training.threads import one_thread

AMPLITUDES = tuple(2.0**k for k in range(7))  # choices of the prior standard deviation of a latent function
# Choices of the lengthscale, in median distances of rows; longer ones return to the prior too late.
LENGTHSCALES = tuple(2.0**k for k in range(-3, 3))
NETWORK_AMPLITUDES = (1.0, 2.0, 4.0, 8.0)  # choices of the amplitude for heads on networks
# Choices for heads on networks, in lengthscales of the layer that a network was trained with.
NETWORK_LENGTHSCALES = (2.0, 4.0, 8.0)
NETWORK_LENGTHSCALE_START = 4.0  # the most frequent choice: the search begins here
DECIDING_NETWORKS = 2  # number of networks whose held-out rows choose lengthscale and amplitude for all networks
MAX_LOSS_OF_LARGER_AMPLITUDE = 0.02  # nats per row below the best amplitude so far; beyond, no larger one is tried
MAX_TRIAL_ROWS = 2000  # largest number of rows that a head learns from which is judged
# Choices of the share of the variance left that probabilities are averaged over.
AVERAGED_SHARES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
MIN_PROBABILITY = 1e-6  # smallest probability of a row that judges, so that a single row cannot exclude a member


@dataclass
class ClassMixture:
    """A fitted mixture for classes: what a classifier predicts with.

    Attributes:
        members: Heads with their weights.
        extractors: The trained networks, if any.
        judged_left: Variance left at the rows that judged, by members that had not seen them.
        judged: Indices of these rows.
    """

    members: list[Member]
    extractors: Extractors | None
    judged_left: np.ndarray = field(repr=False)
    judged: Tensor = field(repr=False)

    def probabilities(self, inputs: Inputs) -> Tensor:
        """Probability of each class at a piece of rows, (n, c): the weighted mean of the members' probabilities."""
        parts = [m.weight * m.head.probabilities_of(*inputs.predicted_by(m)) for m in self.members]
        return torch.stack(parts).sum(0)

    def left(self, inputs: Inputs) -> Tensor:
        """Share of the prior variance that the training rows leave at each row."""
        return weighted_variance_left(self.members, inputs)

    def updated(self, x: Tensor, labels: Tensor, weight: Tensor, forgetting_factor: float) -> "ClassMixture":
        """The mixture after more rows, beside which earlier ones count ``forgetting_factor``: every head takes Laplace steps."""
        inputs = Inputs(x, self.extractors)
        targets = as_targets(labels.long(), self.members[0].head.classes)
        rows = [TrainingRows(inputs.of(member.network), targets, weight) for member in self.members]
        heads = [member.head.updated(new, forgetting_factor) for member, new in zip(self.members, rows, strict=True)]
        return replace(self, members=[replace(m, head=head) for m, head in zip(self.members, heads, strict=True)])


@dataclass
class Candidate:
    """A possible member: its probabilities and variance left at the rows that judge, and its final head or heads."""

    probability: Tensor
    left: Tensor
    heads: list[tuple[int | None, SoftmaxHead]]
    map: None = None  # class heads predict on no mapped scale

    @classmethod
    def judged(
        cls, parts: list[tuple[Tensor, Tensor]], rows: TrainingRows, heads: list[tuple[int | None, SoftmaxHead]]
    ) -> "Candidate":
        """Makes a candidate from latent functions and variance left at the rows that judge, which choose the averaged share."""
        latent, left = (torch.cat(part) for part in zip(*parts, strict=True))
        share = choose_averaging(latent, heads[0][1].amplitude ** 2 * left, rows)
        variance = share * heads[0][1].amplitude ** 2 * left
        heads = [(network, replace(head, averaging=share)) for network, head in heads]
        return cls(as_probabilities(moderated(latent, variance)), left, heads)


def fit_classes(x: Tensor, labels: Tensor, weight: Tensor, classes: int, task: Task) -> ClassMixture:
    """Fits a mixture to rows x, (n, d), labels from 0 to classes − 1, and weights."""
    plan = make_plan(len(x), labels, task.settings, torch.Generator().manual_seed(task.seed)).to(x.device)
    rows = TrainingRows(x, as_targets(labels, classes), weight)
    task.say(f"tuning on {len(plan.tuning)} rows, judging on {len(plan.judging)}")
    candidates = [_wide(rows, plan, task, spectrum) for spectrum in task.spectra]
    extractors = None
    if task.trains_networks(len(x)):
        extractors = train_extractors(task, rows, labels, plan, classes)
        if extractors is not None:
            candidates.append(_deep(rows, extractors, plan, task))
    return combine(labels, weight, plan, candidates, extractors, task)


# ------------------------------------------------------------------ heads on the columns


@dataclass(frozen=True)
class _Choice:
    """A lengthscale and an amplitude, with the mean log probability of held-out rows as their score."""

    score: float
    scale: float
    amplitude: float


def _left_out_score(phi: Tensor, rows: TrainingRows, weights: Tensor, amplitude: float) -> float:
    """Mean leave-one-out log probability of the rows."""
    probability = as_probabilities(left_out_latent(phi, rows, weights, amplitude))
    return _mean_log(probability, rows.y, rows.weight)


def _mean_log(probability: Tensor, targets: Tensor, weight: Tensor) -> float:
    """Weighted mean of the log probability of the targets."""
    of_class = probability_of(probability, targets)
    return float((weight * of_class.clamp(min=MIN_PROBABILITY).log()).sum() / weight.sum())


def probability_of(probability: Tensor, targets: Tensor) -> Tensor:
    """Probability of the true class of each row, (n,)."""
    full = torch.cat([1 - targets, targets], 1) if targets.shape[1] == 1 else targets
    return (probability * full).sum(1)


def _best_amplitude(phi: Tensor, rows: TrainingRows, scale: float) -> _Choice:
    """The amplitude with the highest leave-one-out log probability for a lengthscale."""
    gram = phi.mT @ (phi * rows.weight[:, None])
    best, weights = None, None
    for amplitude in AMPLITUDES:
        weights = find_mode([phi], rows, gram, amplitude, weights)
        score = _left_out_score(phi, rows, weights, amplitude)
        if best is None or score > best.score:
            best = _Choice(score, scale, amplitude)
        elif score < best.score - MAX_LOSS_OF_LARGER_AMPLITUDE:
            break
    assert best is not None
    return best


def choose_scale(rows: TrainingRows, spectrum: Spectrum, unit: Tensor) -> _Choice:
    """The lengthscale and amplitude with the highest leave-one-out log probability."""

    def at(index: int) -> _Choice:
        phi = KernelFeatures.at(spectrum, unit * LENGTHSCALES[index], rows.x)(rows.x)
        return _best_amplitude(phi, rows, LENGTHSCALES[index])

    with one_thread():
        return climb_to_best(len(LENGTHSCALES), LENGTHSCALES.index(1.0), at)


def median_distance(x: Tensor) -> float:
    """Median distance of rows that differ; 1 where all rows are equal."""
    distance = squared_distances(x, x)
    positive = distance[distance > 1e-9]
    return math.sqrt(float(positive.median())) if len(positive) else 1.0


def _wide(rows: TrainingRows, plan: Plan, task: Task, spectrum: Spectrum) -> Candidate:
    """A head on the columns. Each part of the rows judges a head that has not learnt from that part."""
    at, settings = plan.tuning, task.settings
    unit = torch.full_like(rows.x[0], median_distance(rows.x[at]))
    task.clock.check()
    choice = choose_scale(rows[at], spectrum, unit)
    task.clock.check()
    phi = features_at_first_rows(spectrum, unit * choice.scale, rows.x, plan.order, settings.wide_anchors)
    amplitude = choice.amplitude
    # With many more rows than tuning used, held-out rows choose the amplitude again.
    if len(rows) > 2 * settings.tuning_rows:
        amplitudes = [a for a in AMPLITUDES if choice.amplitude / 2 <= a <= 4 * choice.amplitude]
        amplitude = _choose_amplitude([(phi, rows)], plan, amplitudes).amplitude
    final = SoftmaxHead.fit(phi, rows[plan.order[: settings.head_rows]], amplitude)
    judged = [
        # The problem is convex: it has one optimum, wherever the search begins.
        SoftmaxHead.fit(phi, rows[plan.others(number, MAX_TRIAL_ROWS)], amplitude, final.weights).predict(rows.x[fold])
        for number, fold in enumerate(plan.folds)
    ]
    return Candidate.judged(judged, rows[plan.judging], [(None, final)])


def choose_averaging(latent: Tensor, variance: Tensor, rows: TrainingRows) -> float:
    """The largest averaged share whose held-out log probability is within a standard error of the best.

    Args:
        latent: Latent functions at rows that were not learnt from.
        variance: The variance left there.
        rows: Their targets and weights.
    """
    logs = torch.stack(
        [
            probability_of(as_probabilities(moderated(latent, share * variance)), rows.y)
            .clamp(min=MIN_PROBABILITY)
            .log()
            for share in AVERAGED_SHARES
        ]
    )
    accepted = within_error_of_best(logs, rows.weight).tolist()
    return max(share for share, ok in zip(AVERAGED_SHARES, accepted, strict=True) if ok)


def _choose_amplitude(
    parts: list[tuple[KernelFeatures, TrainingRows]], plan: Plan, amplitudes: Sequence[float]
) -> _Choice:
    """The amplitude with the highest log probability of the first parts, under heads that have not learnt from them.

    Args:
        parts: Features and all rows, for each of the first parts.
        plan: Indices of the rows in each part.
        amplitudes: Choices in rising order; the search ends when the log probability falls.
    """
    paths = [
        SoftmaxHead.along(phi, rows[plan.others(number, MAX_TRIAL_ROWS)], amplitudes)
        for number, (phi, rows) in enumerate(parts)
    ]
    folds = [rows[plan.folds[number]] for number, (_, rows) in enumerate(parts)]
    best = None
    for amplitude, *heads in zip(amplitudes, *paths, strict=True):
        pairs = zip(heads, folds, strict=True)
        score = sum(_mean_log(head.probabilities(fold.x), fold.y, fold.weight) for head, fold in pairs)
        if best is not None and score <= best.score:
            break
        best = _Choice(score, 1.0, amplitude)
    assert best is not None
    return best


# ------------------------------------------------------------------ heads on networks


def _deep(rows: TrainingRows, extractors: Extractors, plan: Plan, task: Task) -> Candidate:
    """Heads on networks. Each part of the rows judges a head that, like its network, has not learnt from that part."""
    task.say("fitting heads on the outputs of the networks")
    deep = [TrainingRows(extractors.all_rows(j, rows.x), rows.y, rows.weight) for j in range(len(plan.folds))]

    def features(j: int, scale: float) -> KernelFeatures:
        lengthscale = extractors.lengthscale(scale, deep[j].x)
        return features_at_first_rows(task.spectra[0], lengthscale, deep[j].x, plan.order, task.settings.class_anchors)

    def try_lengthscale(index: int) -> _Choice:
        task.clock.check()
        few = [(features(j, NETWORK_LENGTHSCALES[index]), deep[j]) for j in range(min(DECIDING_NETWORKS, len(deep)))]
        return replace(_choose_amplitude(few, plan, NETWORK_AMPLITUDES), scale=NETWORK_LENGTHSCALES[index])

    best = climb_to_best(
        len(NETWORK_LENGTHSCALES), NETWORK_LENGTHSCALES.index(NETWORK_LENGTHSCALE_START), try_lengthscale
    )
    judged: list[tuple[Tensor, Tensor]] = []
    heads: list[tuple[int | None, SoftmaxHead]] = []
    for j, fold in enumerate(plan.folds):
        task.clock.check()
        phi = features(j, best.scale)
        final = SoftmaxHead.fit(phi, deep[j][plan.order[: task.settings.head_rows]], best.amplitude)
        without = SoftmaxHead.fit(phi, deep[j][plan.others(j, MAX_TRIAL_ROWS)], best.amplitude, final.weights)
        judged.append(without.predict(deep[j].x[fold]))
        heads.append((j, final))
    return Candidate.judged(judged, rows[plan.judging], heads)


# ------------------------------------------------------------------ the mixture


def combine(
    labels: Tensor, weight: Tensor, plan: Plan, candidates: list[Candidate], extractors: Extractors | None, task: Task
) -> ClassMixture:
    """The mixture of candidates, with weights chosen by the rows that judged."""
    at = plan.judging
    of_class = torch.stack([c.probability.gather(1, labels[at][:, None])[:, 0] for c in candidates])
    weights = stacking_weights(of_class.clamp(min=MIN_PROBABILITY).log(), weight[at])
    kept, weights = candidates_to_keep(weights, task.settings.member_floor)
    members, left = make_members([candidates[number] for number in kept], weights)
    return ClassMixture(members, used_extractors(members, extractors), left, at)
