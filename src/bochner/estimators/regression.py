"""The fit of a regression mixture, from rows to members.

1. The map of the target is the one with the highest leave-one-out log density under an isotropic head.
2. Heads on the columns are made: an isotropic head for the target itself, an isotropic head for the mapped target, and for every
   kernel a head with a lengthscale for each column.
3. From ``network_rows`` rows on, heads on trained networks are made.
4. The weights of the members, and then the spread of each row, are chosen by rows that the members have not learnt from.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from bochner.estimators.base import TrainingData
from bochner.estimators.mixture import NormalMixture, stacking_weights
from bochner.estimators.spread import Spread, learn_spread
from bochner.estimators.targets import TargetMap, as_tensor, mapped_target, possible_maps
from bochner.members.extractors import Extractors, train_extractors
from bochner.members.features import KernelFeatures
from bochner.members.heads import GaussianHead, sums_of
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
from bochner.members.tuning import Hyperparameters, leave_one_out_predictions, of_mean_weight_one, tune
from bochner.posteriors.closed_form import Statistics
from bochner.predictive import normal_log_density
from bochner.priors.spectra import Spectrum

# Choices for heads on networks, and for heads on the columns of tables with more rows than hyperparameters are tuned on.
NOISES = tuple(2.0 ** (k / 2) for k in range(-14, 3))  # noise, in standard deviations of the target
AMPLITUDES = (0.5, 1.0, 2.0, 4.0, 8.0)  # prior standard deviations of f
# For heads on networks, in lengthscales of the layer that a network was trained with.
NETWORK_LENGTHSCALES = (2.0, 4.0, 8.0)
NETWORK_LENGTHSCALE_START = 4.0  # the most frequent choice: the search begins here
MAX_TRIAL_ROWS = 6000  # largest number of rows that heads learn from while lengthscales are chosen


@dataclass
class RegressionMixture:
    """A fitted mixture for one target: what a regressor predicts with.

    Attributes:
        members: Heads with their weights.
        extractors: The trained networks, if any.
        spread: The factor on the standard deviation of every row.
        judged_left: Variance left at the rows that judged, by members that had not seen them.
        judged: Indices of these rows.
    """

    members: list[Member]
    extractors: Extractors | None
    spread: Spread
    judged_left: np.ndarray = field(repr=False)
    judged: Tensor = field(repr=False)

    def predict(self, inputs: Inputs) -> NormalMixture:
        """The predictive distribution at a piece of rows."""
        means, stds = [], []
        for member in self.members:
            mean, variance = inputs.predicted_by(member)
            means.append(mean)
            stds.append((variance + member.head.noise**2).sqrt())
        mixture = NormalMixture(
            torch.tensor([m.weight for m in self.members], dtype=torch.float64, device=inputs.x.device),
            torch.stack(means),
            torch.stack(stds),
            tuple(m.map for m in self.members),
        )
        return mixture.scaled(self.spread(inputs.x, mapped_mean(mixture)))

    def prior(self, device: torch.device) -> NormalMixture:
        """The distribution of the target far from all rows, as one row."""
        stds = [np.hypot(m.head.amplitude, m.head.noise) for m in self.members]
        mixture = NormalMixture(
            torch.tensor([m.weight for m in self.members], dtype=torch.float64, device=device),
            torch.zeros(len(stds), 1, dtype=torch.float64, device=device),
            torch.tensor(stds, dtype=torch.float64, device=device)[:, None],
            tuple(m.map for m in self.members),
        )
        return mixture.scaled(self.spread.far(mixture.mean[0]))

    def left(self, inputs: Inputs) -> Tensor:
        """Share of the prior variance that the training rows leave at each row."""
        return weighted_variance_left(self.members, inputs)

    def updated(self, x: Tensor, y: Tensor, weight: Tensor, forgetting_factor: float) -> "RegressionMixture":
        """The mixture after more rows: its heads have the posterior of all rows, of which each earlier one counts this factor."""
        inputs = Inputs(x, self.extractors)
        members = []
        for member in self.members:
            rows = TrainingRows(inputs.of(member.network), mapped_target(member.map, y), weight)
            members.append(replace(member, head=member.head.updated(rows, forgetting_factor)))
        return replace(self, members=members)


def mapped_mean(mixture: NormalMixture) -> Tensor:
    """Weighted mean of the members that share the last member's map, on the scale of that map."""
    same = torch.tensor([m == mixture.maps[-1] for m in mixture.maps], device=mixture.mean.device)
    weight = mixture.weight * same
    return (weight / weight.sum()) @ mixture.mean


@dataclass
class Candidate:
    """A possible member: its prediction of the rows that judge, and its final head or heads."""

    map: TargetMap
    mean: Tensor
    std: Tensor
    left: Tensor
    heads: list[tuple[int | None, GaussianHead]]


@dataclass(frozen=True)
class FitData:
    """Inputs of every step of a fit: rows, targets, weights, the plan and the task."""

    x: Tensor
    y: Tensor
    weight: Tensor
    plan: Plan
    task: Task

    def mapped_rows(self, target_map: TargetMap) -> TrainingRows:
        """All rows with their targets on a mapped scale."""
        return TrainingRows(self.x, target_map.forward(self.y)[:, None], self.weight)


def fit_targets(training: TrainingData, task: Task) -> list[RegressionMixture]:
    """A mixture for each target of the training data."""
    x, weight = training.x, training.weight
    targets = training.y.reshape(len(training.y), -1).T
    return [fit_regression(x, as_tensor(target, x), weight, task) for target in targets]


def fit_regression(x: Tensor, y: Tensor, weight: Tensor, task: Task) -> RegressionMixture:
    """Fits a mixture to rows x, (n, d), targets y, (n,), and weights."""
    plan = make_plan(len(x), None, task.settings, torch.Generator().manual_seed(task.seed)).to(x.device)
    data = FitData(x, y, weight, plan, task)
    task.say(f"tuning on {len(plan.tuning)} rows, judging on {len(plan.judging)}")
    chosen, starts = choose_map(data)
    spectrum = task.spectra[0]
    # An isotropic head has three hyperparameters. Rows that judge hardly change them, so they are tuned once on all rows.
    candidates = [
        _wide(data, target_map, spectrum, point, None)
        for target_map, point in starts.items()
        if target_map in (next(iter(starts)), chosen)
    ]
    if task.groups > 1:
        task.say(f"tuning {task.groups} lengthscales for each of {len(task.spectra)} kernels")
        candidates += _by_column(data, chosen, starts[chosen])
    extractors = None
    if task.trains_networks(len(x)):
        extractors = train_extractors(task, data.mapped_rows(chosen), data.mapped_rows(chosen).y, plan, 1)
        if extractors is not None:
            candidates.append(_deep(data, chosen, extractors))
    return combine(data, candidates, extractors)


def choose_map(data: FitData) -> tuple[TargetMap, dict[TargetMap, Hyperparameters]]:
    """The map with the highest leave-one-out log density of the target, and the isotropic hyperparameters for each map."""
    task, at = data.task, data.plan.tuning
    points, scores = {}, {}
    for target_map in possible_maps(data.y.cpu().numpy(), data.weight.cpu().numpy()):
        rows = of_mean_weight_one(data.mapped_rows(target_map)[at])
        point = _tuned(rows, task.spectra[0], task, Hyperparameters.start(task.groups), columns_move=False)
        mean, variance = leave_one_out_predictions(rows, task.spectra[0], task.group, point)
        density = normal_log_density(rows.y[:, 0], mean[:, 0], variance.sqrt()) + target_map.log_slope(data.y[at])
        points[target_map], scores[target_map] = point, float((rows.weight * density).sum())
    return max(scores, key=lambda target_map: scores[target_map]), points


def _tuned(
    rows: TrainingRows, spectrum: Spectrum, task: Task, start: Hyperparameters, *, columns_move: bool
) -> Hyperparameters:
    """Tunes hyperparameters, unless the time is over."""
    task.clock.check()
    return tune(rows, spectrum, task.group, start, task.settings, columns_move=columns_move)


# ------------------------------------------------------------------ heads on the columns


def _by_column(data: FitData, target_map: TargetMap, start: Hyperparameters) -> list[Candidate]:
    """For every kernel a head with a lengthscale for each column; the ratios of lengthscales suit the first kernel."""
    plan, task, rows = data.plan, data.task, data.mapped_rows(target_map)
    subsets = [plan.tuning]
    if not plan.separate:  # there are many lengthscales, so they are tuned again without each part that judges
        subsets += [plan.tuning_without(number, task.settings) for number in range(len(plan.folds))]
    points = [_tuned(rows[at], task.spectra[0], task, start, columns_move=True) for at in subsets]
    heads = [_wide(data, target_map, task.spectra[0], points[0], points[1:])]
    for spectrum in task.spectra[1:]:
        other = _tuned(rows[plan.tuning], spectrum, task, points[0], columns_move=False)
        longer = other.common - points[0].common
        by_fold = [replace(other, common=point.common + longer, columns=point.columns) for point in points[1:]]
        heads.append(_wide(data, target_map, spectrum, other, by_fold))
    return heads


def _wide(
    data: FitData,
    target_map: TargetMap,
    spectrum: Spectrum,
    final: Hyperparameters,
    by_fold: list[Hyperparameters] | None,
) -> Candidate:
    """A head on the columns. Each part of the rows judges a head that has not learnt from that part.

    Args:
        data: The rows.
        target_map: The map of the target.
        spectrum: The kernel's spectral density.
        final: Hyperparameters of the final head, which learns from all rows.
        by_fold: Hyperparameters tuned without each part; None or empty where all heads have the final ones.
    """
    rows, plan, task = data.mapped_rows(target_map), data.plan, data.task

    def features(point: Hyperparameters) -> KernelFeatures:
        return features_at_first_rows(
            spectrum, point.lengthscale(task.group), data.x, plan.order, task.settings.wide_anchors
        )

    whole = features(final)
    total = sums_of(whole, rows)
    parts, points = [], by_fold or [final] * len(plan.folds)
    for number, fold in enumerate(plan.folds):
        task.clock.check()
        if by_fold:
            phi = features(points[number])
            sums = sums_of(phi, rows[plan.others(number)])
        else:
            phi, sums = whole, total - sums_of(whole, rows[fold])
        parts.append(JudgedPart(phi, sums, rows[fold]))
    scales = None
    if len(rows) > task.settings.tuning_rows:  # rows that did not tune choose noise and amplitude again
        scales = best_scales(parts)
    judged = [
        part.judge(*(scales or (point.noise, point.amplitude))) for part, point in zip(parts, points, strict=True)
    ]
    noise, amplitude = scales or (final.noise, final.amplitude)
    mean, std, left = (torch.cat(part) for part in zip(*judged, strict=True))
    return Candidate(target_map, mean, std, left, [(None, GaussianHead(whole, total, amplitude, noise))])


@dataclass(frozen=True)
class JudgedPart:
    """A part of the rows that judges, with features and sums of a head that has not learnt from it."""

    features: KernelFeatures
    sums: Statistics
    rows: TrainingRows

    def judge(self, noise: float, amplitude: float) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, standard deviation and variance left at its rows."""
        mean, variance = GaussianHead(self.features, self.sums, amplitude, noise).predict(self.rows.x)
        return mean, (variance + noise**2).sqrt(), variance / amplitude**2


def best_scales(parts: list[JudgedPart]) -> tuple[float, float]:
    """Noise and amplitude, from NOISES and AMPLITUDES, with the highest held-out log density."""
    device = parts[0].rows.x.device
    variance = torch.tensor(NOISES, dtype=torch.float64, device=device).square()[:, None, None]
    prior = torch.tensor(AMPLITUDES, dtype=torch.float64, device=device).square()[None, :, None]
    scores = torch.zeros(len(NOISES), len(AMPLITUDES), dtype=torch.float64, device=device)
    for part in parts:
        values, vectors = torch.linalg.eigh(part.sums.gram)
        phi = part.features(part.rows.x)
        turned, projection = phi @ vectors, (vectors.mT @ part.sums.projection)[:, 0]
        covariance = 1 / (values.clamp(min=0) / variance + 1 / prior)  # noises × amplitudes × features
        mean = torch.einsum("nk,sak,k->san", turned, covariance / variance, projection)
        unexplained = (1 - phi.square().sum(1)).clamp(min=0)
        spread = torch.einsum("nk,sak->san", turned.square(), covariance) + prior * unexplained + variance
        density = normal_log_density(part.rows.y[:, 0], mean, spread.sqrt())
        scores += (density * part.rows.weight).sum(-1)
    best = divmod(int(scores.argmax()), len(AMPLITUDES))
    return NOISES[best[0]], AMPLITUDES[best[1]]


# ------------------------------------------------------------------ heads on networks


def _deep(data: FitData, target_map: TargetMap, extractors: Extractors) -> Candidate:
    """Heads on networks. Each part of the rows judges a head that, like its network, has not learnt from that part."""
    data.task.say("fitting heads on the outputs of the networks")
    deep = [extractors.all_rows(number, data.x) for number in range(len(data.plan.folds))]
    some = data.plan.order[:MAX_TRIAL_ROWS]  # the rows that judge come first, so they are among them
    best = climb_to_best(
        len(NETWORK_LENGTHSCALES),
        NETWORK_LENGTHSCALES.index(NETWORK_LENGTHSCALE_START),
        lambda k: _deep_at(data, target_map, extractors, deep, NETWORK_LENGTHSCALES[k], some),
    )
    if len(some) < len(data.x):
        best = _deep_at(data, target_map, extractors, deep, best.scale, data.plan.order)
    return best.candidate


@dataclass(frozen=True)
class _Tried:
    """A candidate with its lengthscale, and the log density of the rows that judge as its score."""

    score: float
    scale: float
    candidate: Candidate


def _deep_at(
    data: FitData, target_map: TargetMap, extractors: Extractors, deep: list[Tensor], scale: float, learn: Tensor
) -> _Tried:
    """Heads on networks with a given lengthscale, fitted to the rows with the numbers ``learn``."""
    rows, plan, task = data.mapped_rows(target_map), data.plan, data.task
    parts, totals, anchors = [], [], task.settings.deep_anchors(len(plan.folds))
    for number, fold in enumerate(plan.folds):
        task.clock.check()
        lengthscale = extractors.lengthscale(scale, deep[number])
        phi = features_at_first_rows(task.spectra[0], lengthscale, deep[number], plan.order, anchors)
        total = sums_of(phi, TrainingRows(deep[number][learn], rows.y[learn], rows.weight[learn]))
        judging = TrainingRows(deep[number][fold], rows.y[fold], rows.weight[fold])
        totals.append(total)
        parts.append(JudgedPart(phi, total - sums_of(phi, judging), judging))
    noise, amplitude = best_scales(parts)
    mean, std, left = (torch.cat(part) for part in zip(*(p.judge(noise, amplitude) for p in parts), strict=True))
    at = plan.judging
    score = float((rows.weight[at] * normal_log_density(rows.y[at, 0], mean, std)).sum())
    heads: list[tuple[int | None, GaussianHead]] = [
        (number, GaussianHead(part.features, total, amplitude, noise))
        for number, (part, total) in enumerate(zip(parts, totals, strict=True))
    ]
    return _Tried(score, scale, Candidate(target_map, mean, std, left, heads))


# ------------------------------------------------------------------ the mixture


def combine(data: FitData, candidates: list[Candidate], extractors: Extractors | None) -> RegressionMixture:
    """The mixture of candidates, with weights and a spread chosen by the rows that judged."""
    at, settings = data.plan.judging, data.task.settings
    x, y, weight = data.x[at], data.y[at], data.weight[at]
    even = torch.full((len(candidates),), 1 / len(candidates), dtype=torch.float64, device=x.device)
    means, stds = torch.stack([c.mean for c in candidates]), torch.stack([c.std for c in candidates])
    judged = NormalMixture(even, means, stds, tuple(c.map for c in candidates))
    weights = stacking_weights(judged.member_log_prob(y), weight)
    kept, weights = candidates_to_keep(weights, settings.member_floor)
    candidates = [candidates[number] for number in kept]
    judged = NormalMixture(weights, means[kept], stds[kept], tuple(c.map for c in candidates))
    # The rows are sorted by part. ``learn_spread`` leaves out parts in turn, so they are shuffled.
    mix = torch.randperm(len(at), generator=torch.Generator().manual_seed(data.task.seed)).to(at.device)
    scores, centre = judged.scores(y), mapped_mean(judged)
    spread = learn_spread(x[mix], centre[mix], scores[mix], weight[mix], len(data.plan.folds))
    members, left = make_members(candidates, weights)
    return RegressionMixture(members, used_extractors(members, extractors), spread, left, at)
