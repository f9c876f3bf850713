"""A regression mixture, from rows to members.

1. The map of the target: the one under which rows are most probable that an isotropic head was not shown.
2. Heads on the columns: an isotropic one of the target as it is, an isotropic one of the mapped target, and one with a lengthscale
   for each column for every kernel.
3. From ``network_rows`` rows on, heads on trained networks.
4. Weights, by rows that members have not learnt from; then the spread of every row, by the same rows.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from bochner.estimators.extractors import Extractors
from bochner.estimators.heads import GaussianHead, Sums
from bochner.estimators.kernel_features import KernelFeatures
from bochner.estimators.members import (
    Inputs,
    Member,
    Task,
    anchored,
    kept_members,
    train_for,
    variance_left,
)
from bochner.estimators.mixture import NormalMixture, stacking_weights
from bochner.estimators.plan import Plan, make_plan
from bochner.estimators.spread import Spread, learn_spread
from bochner.estimators.targets import TargetMap, candidates
from bochner.estimators.tuning import Hyperparameters, Rows, left_out, tune
from bochner.predictive import normal_log_density
from bochner.spectra import Spectrum

NOISES = tuple(2.0 ** (k / 2) for k in range(-14, 3))  # tried for heads on networks, in standard deviations of the target
AMPLITUDES = (0.5, 1.0, 2.0, 4.0, 8.0)  # the same, prior standard deviations of f
LENGTHSCALES = (1.0, 2.0, 4.0, 8.0)  # the same, in lengthscales that the networks were trained with


@dataclass
class RegressionMixture:
    """What a fitted regressor predicts with, for one target.

    Attributes:
        members: Heads and what they count for.
        extractors: The trained networks, if any.
        spread: The factor on the standard deviation of every row.
        judged_left: Variance left at the rows that judged, by members that had not seen them; for the threshold.
    """

    members: list[Member]
    extractors: Extractors | None
    spread: Spread
    judged_left: np.ndarray = field(repr=False)

    def _mapped_mean(self, mixture: NormalMixture) -> Tensor:
        """Mean on the scale of the last member's map, the chosen one: what the spread may depend on."""
        return mapped_mean(mixture)

    def predict(self, inputs: Inputs) -> NormalMixture:
        """The predictive distribution at a piece of rows."""
        means, stds = [], []
        for member in self.members:
            mean, variance = member.head.predict(inputs.of(member.network))
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
        return mixture.scaled(torch.full_like(mixture.mean[0], float(np.exp(self.spread.constant))))

    def left(self, inputs: Inputs) -> Tensor:
        """Share of the prior variance that the training rows leave at each row."""
        return variance_left(self.members, inputs)

    def update(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Takes in more rows: every head's posterior is then that of all rows so far."""
        inputs = Inputs(x, self.extractors)
        for member in self.members:
            rows = Rows(inputs.of(member.network), member.map.forward(y)[:, None], weight)
            member.head = member.head.update(rows)


def mapped_mean(mixture: NormalMixture) -> Tensor:
    """Mean of the members that share the last member's map, on its scale."""
    same = torch.tensor([m == mixture.maps[-1] for m in mixture.maps], device=mixture.mean.device)
    weight = mixture.weight * same
    return (weight / weight.sum()) @ mixture.mean


@dataclass
class _Candidate:
    """A member in the making: its prediction of the rows that judge, and its final head or heads."""

    map: TargetMap
    mean: Tensor
    std: Tensor
    left: Tensor
    heads: list[tuple[int | None, GaussianHead]]


def fit_regression(x: Tensor, y: Tensor, weight: Tensor, task: Task) -> RegressionMixture:
    """Fits a mixture to rows x, (n, d), targets y, (n,), and weights."""
    settings = task.settings
    plan = _on_device(make_plan(len(x), None, settings, torch.Generator().manual_seed(task.seed)), x.device)
    task.say(f"tuning on {len(plan.tuning)} rows, judging on {len(plan.judging)}")
    chosen, starts = choose_map(x, y, weight, plan, task)
    plain = starts[0][0]
    candidates = [_wide(x, y, weight, plan, task, plain, task.spectra[0], starts[0][1], isotropic=True)]
    if chosen != plain:
        start = next(point for own, point in starts if own == chosen)
        candidates.append(_wide(x, y, weight, plan, task, chosen, task.spectra[0], start, isotropic=True))
    if task.groups > 1:
        start = next(point for own, point in starts if own == chosen)
        for spectrum in task.spectra:
            candidates.append(_wide(x, y, weight, plan, task, chosen, spectrum, start, isotropic=False))
    extractors = None
    if task.trains_networks(len(x)):
        rows = Rows(x, chosen.forward(y)[:, None], weight)
        extractors = train_for(task, rows, rows.y, plan, 1)
        if extractors is not None:
            candidates.append(_deep(rows, chosen, extractors, plan, task))
    return _combine(x, y, weight, plan, candidates, extractors, settings)


def _on_device(plan: Plan, device: torch.device) -> Plan:
    folds = tuple(fold.to(device) for fold in plan.folds)
    return replace(plan, order=plan.order.to(device), folds=folds, tuning=plan.tuning.to(device))


def choose_map(
    x: Tensor, y: Tensor, weight: Tensor, plan: Plan, task: Task
) -> tuple[TargetMap, list[tuple[TargetMap, Hyperparameters]]]:
    """The map under which rows that are left out one by one are most probable, and isotropic hyperparameters under each."""
    at, settings = plan.tuning, task.settings
    found, scores = [], []
    for own in candidates(y.cpu().numpy(), weight.cpu().numpy()):
        rows = Rows(x[at], own.forward(y[at])[:, None], weight[at])
        start = Hyperparameters.start(task.groups)
        options = {"spread": settings.column_spread, "steps": settings.tuning_steps, "isotropic": True}
        point = tune(rows, task.spectra[0], task.group, start, **options)
        mean, variance = left_out(rows, task.spectra[0], task.group, point)
        density = normal_log_density(rows.y[:, 0], mean[:, 0], variance.sqrt()) + own.log_slope(y[at])
        found.append((own, point))
        scores.append(float((weight[at] * density).sum()))
    return found[int(np.argmax(scores))][0], found


# ------------------------------------------------------------------ heads on the columns


def _wide(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    plan: Plan,
    task: Task,
    own: TargetMap,
    spectrum: Spectrum,
    start: Hyperparameters,
    *,
    isotropic: bool,
) -> _Candidate:
    """A head on the columns, judged by heads that have not seen a part, tuned without it where lengthscales are many."""
    rows, settings = Rows(x, own.forward(y)[:, None], weight), task.settings

    def tuned(at: Tensor) -> Hyperparameters:
        if isotropic and spectrum is task.spectra[0]:
            return start  # three numbers: rows that judge cannot have shaped them by much
        options = {"spread": settings.column_spread, "steps": settings.tuning_steps, "isotropic": isotropic}
        return tune(rows[at], spectrum, task.group, start, **options)

    def features(point: Hyperparameters) -> KernelFeatures:
        return anchored(spectrum, point.lengthscale(task.group), x, plan.order, settings.wide_anchors)

    final = tuned(plan.tuning)
    whole = features(final)
    total = Sums.of(whole, rows)
    shared = plan.apart or (isotropic and spectrum is task.spectra[0])
    parts = []
    for number, fold in enumerate(plan.folds):
        if shared:
            point, phi, sums = final, whole, _less(total, Sums.of(whole, rows[fold]))
        else:
            point = tuned(plan.tuning_without(number, settings))
            phi = features(point)
            sums = Sums.of(phi, rows[plan.others(number)])
        parts.append((phi, sums, point))
    scales = None
    if len(rows) > settings.tuning_rows:  # more rows than tuned: these choose noise and amplitude again
        scales = best_scales([(phi, sums, x[fold], rows[fold]) for (phi, sums, _), fold in zip(parts, plan.folds, strict=True)])
    judged = []
    for (phi, sums, point), fold in zip(parts, plan.folds, strict=True):
        noise, amplitude = scales or (point.noise, point.amplitude)
        judged.append(_judge(GaussianHead(phi, sums, amplitude, noise), x[fold]))
    noise, amplitude = scales or (final.noise, final.amplitude)
    mean, std, left = (torch.cat(part) for part in zip(*judged, strict=True))
    return _Candidate(own, mean, std, left, [(None, GaussianHead(whole, total, amplitude, noise))])


def _less(total: Sums, part: Sums) -> Sums:
    """Sums over the rows outside a part."""
    return Sums(
        total.gram - part.gram, total.projection - part.projection, total.square - part.square, total.total - part.total
    )


def _judge(head: GaussianHead, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and variance left at rows that a head has not seen."""
    mean, variance = head.predict(x)
    return mean, (variance + head.noise**2).sqrt(), variance / head.amplitude**2


def best_scales(parts: list[tuple[KernelFeatures, Sums, Tensor, Rows]]) -> tuple[float, float]:
    """Noise and amplitude under which rows that heads have not seen are most probable.

    Args:
        parts: For each part of the rows: features and sums of a head that has not seen it, the inputs of the part, its rows.
    """
    device = parts[0][2].device
    variance = torch.tensor(NOISES, dtype=torch.float64, device=device).square()[:, None, None]
    prior = torch.tensor(AMPLITUDES, dtype=torch.float64, device=device).square()[None, :, None]
    scores = torch.zeros(len(NOISES), len(AMPLITUDES), dtype=torch.float64, device=device)
    for features, sums, x, rows in parts:
        values, vectors = torch.linalg.eigh(sums.gram)
        phi = features(x)
        turned, projection = phi @ vectors, (vectors.mT @ sums.projection)[:, 0]
        covariance = 1 / (values.clamp(min=0) / variance + 1 / prior)  # noises × amplitudes × features
        mean = torch.einsum("nk,sak,k->san", turned, covariance / variance, projection)
        rest = (1 - phi.square().sum(1)).clamp(min=0)
        spread = torch.einsum("nk,sak->san", turned.square(), covariance) + prior * rest + variance
        density = normal_log_density(rows.y[:, 0], mean, spread.sqrt())
        scores += (density * rows.weight).sum(-1)
    best = divmod(int(scores.argmax()), len(AMPLITUDES))
    return NOISES[best[0]], AMPLITUDES[best[1]]


# ------------------------------------------------------------------ heads on networks


def _deep(rows: Rows, own: TargetMap, extractors: Extractors, plan: Plan, task: Task) -> _Candidate:
    """Heads on networks, each judged by the part that neither it nor its network has seen."""
    task.say("fitting heads to what the networks make of the columns")
    settings, best = task.settings, None
    deep = [
        torch.cat([extractors(number, piece) for piece in rows.x.split(settings.judging_rows)])
        for number in range(len(plan.folds))
    ]
    for scale in LENGTHSCALES:
        fits, parts = [], []
        for number, fold in enumerate(plan.folds):
            lengthscale = torch.full_like(deep[number][0], scale)
            phi = anchored(task.spectra[0], lengthscale, deep[number], plan.order, settings.deep_anchors)
            total = Sums.of(phi, Rows(deep[number], rows.y, rows.weight))
            part = Rows(deep[number][fold], rows.y[fold], rows.weight[fold])
            without = _less(total, Sums.of(phi, part))
            fits.append((phi, total, without))
            parts.append((phi, without, part.x, part))
        noise, amplitude = best_scales(parts)
        judged = [_judge(GaussianHead(phi, without, amplitude, noise), part.x) for phi, without, _, part in parts]
        mean, std, left = (torch.cat(part) for part in zip(*judged, strict=True))
        at = plan.judging
        score = float((rows.weight[at] * normal_log_density(rows.y[at, 0], mean, std)).sum())
        if best is None or score > best[0]:
            heads = [(number, GaussianHead(phi, total, amplitude, noise)) for number, (phi, total, _) in enumerate(fits)]
            best = (score, _Candidate(own, mean, std, left, heads))
    assert best is not None
    return best[1]


# ------------------------------------------------------------------ the mixture


def _combine(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    plan: Plan,
    candidates: list[_Candidate],
    extractors: Extractors | None,
    settings: object,
) -> RegressionMixture:
    """Weights and spread by the rows that judged."""
    at = plan.judging
    even = torch.full((len(candidates),), 1 / len(candidates), dtype=torch.float64, device=x.device)
    means, stds = torch.stack([c.mean for c in candidates]), torch.stack([c.std for c in candidates])
    judged = NormalMixture(even, means, stds, tuple(c.map for c in candidates))
    weights = stacking_weights(judged.member_log_prob(y[at]), weight[at])
    judged = replace(judged, weight=weights)
    # The rows come part by part; the spread leaves out rows in turn, so they are mixed again.
    mix = torch.randperm(len(at), generator=torch.Generator().manual_seed(0)).to(at.device)
    scores = judged.scores(y[at])
    spread = learn_spread(x[at][mix], mapped_mean(judged)[mix], scores[mix], weight[at][mix], settings.folds)  # pyright: ignore
    left = weights @ torch.stack([c.left for c in candidates]).clamp(max=1.0)
    members = [
        Member(float(share) / len(c.heads), head, network, c.map)
        for share, c in zip(weights, candidates, strict=True)
        for network, head in c.heads
    ]
    kept = kept_members(members, settings.member_floor)  # pyright: ignore
    used = extractors if any(member.network is not None for member in kept) else None
    return RegressionMixture(kept, used, spread, left.cpu().numpy())
