"""A fit to rows that come in batches: a sample of them is fitted, and then the heads learn from all rows."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from bochner.estimators.base import TrainingData
from bochner.estimators.checks import check_row_weights, check_same_rows
from bochner.estimators.classification import Candidate as ClassCandidate
from bochner.estimators.classification import ClassMixture
from bochner.estimators.classification import combine as combine_classes
from bochner.estimators.regression import (
    Candidate,
    FitData,
    JudgedPart,
    RegressionMixture,
    best_scales,
    combine,
)
from bochner.members.heads import GaussianHead, SoftmaxHead, as_targets
from bochner.members.member import Inputs, Member
from bochner.members.plan import Plan
from bochner.members.rows import TrainingRows
from bochner.posteriors.closed_form import Statistics
from bochner.streaming.moments import (
    ClassSums,
    MomentCollector,
    Moments,
    RegressionSums,
    add_sums,
    from_lower_half,
    row_keys,
)
from bochner.streaming.sample import Sample

Batch = tuple[Any, Any, Any]  # rows, targets, weights or None
BATCH_ROWS = 20_000  # rows of an Arrow dataset that are read at a time
PROGRESS_ROWS = 1_000_000  # rows between two lines of progress
MAX_PASSES = 8  # passes over all rows in which heads for classes look for their modes
MIN_GAIN = 1e-3  # nats a row that another Newton step must promise to be worth a pass over all rows


class Batches:
    """Batches of rows that can be gone through more than once.

    Args:
        batches: An iterable of (X, y) or (X, y, sample_weight) that begins anew each time, or a dataset or table of Arrow.
        target: Name of the target's column in a dataset.
    """

    def __init__(self, batches: Any, target: str | None = None) -> None:
        self.is_dataset = hasattr(batches, "to_batches")
        if self.is_dataset != (target is not None):
            what = "name the target's column of a dataset" if self.is_dataset else "be None for batches of (X, y)"
            raise ValueError(f"The target parameter must {what}, got {target!r} instead.")
        if self.is_dataset and target not in batches.schema.names:
            raise ValueError(f"The target parameter must be one of {batches.schema.names}, got {target!r} instead.")
        if not self.is_dataset and (isinstance(batches, Iterator) or not isinstance(batches, Iterable)):
            raise ValueError(
                "The batches parameter must be an iterable of (X, y) that can be gone through twice, such as a list or an object "
                f"whose __iter__ begins anew, got {type(batches).__name__} instead."
            )
        self.batches: Any = batches
        self.target = target

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self._arrow_batches() if self.is_dataset else self.batches):
            if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
                raise ValueError(
                    "The batches parameter must give tuples (X, y) or (X, y, sample_weight), got "
                    f"{type(batch).__name__} as number {number} instead."
                )
            X, y, weight = (*batch, None)[:3]
            check_same_rows(len(X), len(y))
            yield X, y, weight

    def _arrow_batches(self) -> Iterator[tuple[Any, Any]]:
        options = {"batch_readahead": 1, "fragment_readahead": 1} if hasattr(self.batches, "scanner") else {}
        size = {"batch_size": BATCH_ROWS} if options else {"max_chunksize": BATCH_ROWS}
        for batch in self.batches.to_batches(**size, **options):
            frame = batch.to_pandas()
            yield frame.drop(columns=self.target), frame[self.target]


def fit_batches(
    batches: Batches,
    most: int,
    seed: int,
    *,
    fit: Callable[[Any, Any, Any], TrainingData],
    rest: Callable[[TrainingData], "AllRowsLearner"] | None,
) -> None:
    """Fits to a sample of the rows, and lets the heads learn from all of them if there are more.

    Args:
        batches: The rows.
        most: Number of rows of the sample.
        seed: Seed of the sample.
        fit: Fits to rows, targets and weights.
        rest: Makes, after that, what learns from all rows; None where the sample is enough.
    """
    sample, generator = Sample(most), np.random.default_rng(seed)
    for X, y, weight in batches:
        if len(X):
            sample.add((X, y, check_row_weights(weight, len(X))), 0, generator)
    if not sample.rows:
        raise ValueError("The batches parameter must give at least one row, got none.")
    training = fit(*sample.in_order())
    if sample.rows <= most or rest is None:
        return
    learner, learnt = rest(training), False
    while not learnt:
        moments = learner.collector.empty()
        for X, y, weight in batches:
            if len(X):
                learner.take(moments, X, y, weight)
        learnt = learner.finish_pass(moments)


class AllRowsLearner:
    """Lets the heads of an estimator that was fitted to a sample learn from all rows.

    Args:
        estimator: The estimator.
        training: What it was fitted to.
        held: Rows and targets that no head may learn from, as the estimator takes them; None where there are none.
        clean: Makes of rows and targets what the estimator takes.
    """

    def __init__(
        self,
        estimator: Any,
        training: TrainingData,
        held: tuple[Any, np.ndarray] | None = None,
        clean: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    ) -> None:
        self.estimator, self.training, self.clean = estimator, training, clean
        judged = estimator.mixtures_[0].judged
        self.x, self.y = training.x[judged], training.y[judged.cpu().numpy()]
        estimator.mixtures_ = [self._without_judging(mixture) for mixture in estimator.mixtures_]
        self.searches = [_ModeSearch(m) if isinstance(m, ClassMixture) else None for m in estimator.mixtures_]
        held_keys = np.zeros(0, dtype=np.uint64)
        if held is not None and len(held[1]):
            held_keys = row_keys(estimator._inputs(held[0]).cpu().numpy(), estimator._target_numbers(held[1]))
        self.collector = MomentCollector(estimator, row_keys(self.x.cpu().numpy(), self.y), held_keys)

    def _without_judging(self, mixture: Any) -> Any:
        """A mixture for classes whose heads have not learnt from the rows that judge; for regression the sums leave them out."""
        if isinstance(mixture, RegressionMixture):
            return mixture
        settings = self.estimator._task(self.training).settings
        order = torch.randperm(len(self.training.x), generator=torch.Generator().manual_seed(0)).to(mixture.judged)
        at = order[~torch.isin(order, mixture.judged)][: settings.head_rows]
        labels = torch.from_numpy(self.training.y).to(at)[at]
        targets = as_targets(labels, mixture.members[0].head.classes)
        inputs, weight = Inputs(self.training.x[at], mixture.extractors), self.training.weight[at]
        members = []
        for member in mixture.members:
            head = member.head
            rows = TrainingRows(inputs.of(member.network), targets, weight)
            fitted = SoftmaxHead.fit(head.features, rows, head.amplitude, head.weights)
            members.append(replace(member, head=fitted))
        return replace(mixture, members=members)

    def take(self, moments: Moments, X: Any, y: Any, weight: Any) -> None:
        """Adds the sums over some rows."""
        if self.clean is not None:
            X, y = self.clean(X, y)
        numbers = self.estimator._target_numbers(y)
        before = moments.rows // PROGRESS_ROWS
        self.collector.take(moments, X, numbers, check_row_weights(weight, len(numbers)))
        if moments.rows // PROGRESS_ROWS > before:
            self.estimator._say(f"the heads have learnt from {moments.rows:,} rows")

    def finish_pass(self, moments: Moments) -> bool:
        """Makes heads of the sums over all rows, and says whether that is all: heads for classes may need the sums once more.

        The rows that judge choose noise, amplitude and weights again. Then they are added.
        """
        if not (moments.judging > 0).any():
            raise ValueError("The batches parameter must give the same rows each time that it is gone through.")
        estimator = self.estimator
        for number, search in enumerate(self.searches):
            sums = cast("list[ClassSums]", moments.sums[number])
            if search is not None and not search.is_at_mode(estimator.mixtures_[number], sums, moments.rows):
                estimator.mixtures_[number] = search.next_mixture(estimator.mixtures_[number])
                return False
        weight = torch.from_numpy(moments.judging).to(self.x)
        judging = self.collector.empty()
        add_sums(estimator.mixtures_, judging.sums, self.x, self.y, weight)
        task = estimator._task(self.training)
        order = torch.arange(len(self.x), device=self.x.device)
        plan = Plan(order, order.tensor_split(task.settings.folds_for(len(self.training.x))), order[:0], True)
        targets = self.y.reshape(len(self.y), -1).T
        mixtures = []
        for number, mixture in enumerate(estimator.mixtures_):
            sums, extra = moments.sums[number], judging.sums[number]
            y = torch.from_numpy(targets[number]).to(self.x.device)
            data = FitData(self.x, y.to(self.x), weight, plan, task)
            learn: Any = _regression if isinstance(mixture, RegressionMixture) else _classes
            learnt = learn(mixture, sums, extra, data)
            mixtures.append(replace(learnt, judged=mixture.judged))
        estimator._take_mixtures(self.training, mixtures)
        return True


def _regression(
    mixture: RegressionMixture, sums: list[RegressionSums], judging: list[RegressionSums], data: FitData
) -> RegressionMixture:
    """A regression mixture from sums over all rows but those that judge, and from the sums over these.

    Args:
        mixture: The mixture that was fitted to a sample.
        sums: Sums of every member over all rows but those that judge.
        judging: Sums of every member over the rows that judge.
        data: The rows that judge.
    """
    statistics = [
        [Statistics(from_lower_half(s.gram), s.projection, s.square, float(s.weight)) for s in part]
        for part in (sums, judging)
    ]
    candidates, networks = [], []
    for member, apart, added in zip(mixture.members, *statistics, strict=True):
        rows, phi = data.mapped_rows(member.map), member.head.features
        if member.network is None:
            candidates.append(_judged([JudgedPart(phi, apart, rows)], [apart + added], [member]))
            continue
        assert mixture.extractors is not None
        deep = TrainingRows(mixture.extractors.all_rows(member.network, rows.x), rows.y, rows.weight)
        networks.append((JudgedPart(phi, apart, deep[data.plan.folds[member.network]]), apart + added, member))
    if networks:
        candidates.append(_judged(*map(list, zip(*networks, strict=True))))
    return combine(data, candidates, mixture.extractors)


def _judged(parts: list[JudgedPart], totals: list[Statistics], members: list[Member]) -> Candidate:
    """A candidate whose noise and amplitude the rows that judge have chosen, with heads that have learnt from all rows."""
    noise, amplitude = best_scales(parts)
    judged = [part.judge(noise, amplitude) for part in parts]
    mean, std, left = (torch.cat(part) for part in zip(*judged, strict=True))
    heads: list[tuple[int | None, GaussianHead]] = [
        (member.network, GaussianHead(part.features, total, amplitude, noise))
        for part, total, member in zip(parts, totals, members, strict=True)
    ]
    return Candidate(members[0].map, mean, std, left, heads)


def _classes(mixture: ClassMixture, sums: list[ClassSums], judging: list[ClassSums], data: FitData) -> ClassMixture:
    """A class mixture after one Newton step from sums over all rows but those that judge, and from the sums over these."""
    labels, plan = data.y.long(), data.plan
    targets = as_targets(labels, mixture.members[0].head.classes)
    inputs = Inputs(data.x, mixture.extractors)
    single: list[tuple[list[Any], list[Any]]] = []
    networks: tuple[list[Any], list[Any]] = ([], [])
    for member, apart, added in zip(mixture.members, sums, judging, strict=True):
        deep = inputs.of(member.network)
        folds = plan.folds if member.network is None else [plan.folds[member.network]]
        both = ClassSums(*(a + b for a, b in zip(apart, added, strict=True)))
        without, final = _stepped(member.head, apart), _stepped(member.head, both)
        parts, heads = networks if member.network is not None else ([], [])
        parts += [without.predict(deep[fold]) for fold in folds]
        heads.append((member.network, final))
        if member.network is None:
            single.append((parts, heads))
    judged = TrainingRows(data.x, targets, data.weight)
    all_candidates = [*single, *([networks] if networks[1] else [])]
    candidates = [ClassCandidate.judged(parts, judged, heads) for parts, heads in all_candidates]
    return combine_classes(labels, data.weight, plan, candidates, mixture.extractors, data.task)


class _ModeSearch:
    """Newton's search for the modes of a class mixture's heads: a step of every head for each pass over all rows.

    A step that lowers the log posterior is halved.
    """

    def __init__(self, mixture: ClassMixture) -> None:
        self.passes = 0
        self.value = [-math.inf] * len(mixture.members)
        self.weights = [member.head.weights for member in mixture.members]  # the best so far
        self.next_weights = list(self.weights)

    def is_at_mode(self, mixture: ClassMixture, sums: list[ClassSums], rows: int) -> bool:
        """Takes the sums at the mixture's weights; whether the next steps would hardly change a probability."""
        self.passes += 1
        largest = 0.0
        for number, (member, total) in enumerate(zip(mixture.members, sums, strict=True)):
            head, weights = member.head, member.head.weights
            value = float(total.log_likelihood) - 0.5 * float(weights.square().sum()) / head.amplitude**2
            if value < self.value[number]:
                self.next_weights[number] = (self.weights[number] + weights) / 2
                largest = math.inf
                continue
            stepped = _stepped(head, total).weights
            slope = total.slope - weights / head.amplitude**2
            largest = max(largest, 0.5 * float((slope * (stepped - weights)).sum()) / rows)
            self.value[number], self.weights[number], self.next_weights[number] = value, weights, stepped
        return largest < MIN_GAIN or self.passes == MAX_PASSES

    def next_mixture(self, mixture: ClassMixture) -> ClassMixture:
        """The mixture at the next weights."""
        members = [
            replace(member, head=replace(member.head, weights=weights))
            for member, weights in zip(mixture.members, self.next_weights, strict=True)
        ]
        return replace(mixture, members=members)


def _stepped(head: SoftmaxHead, sums: ClassSums) -> SoftmaxHead:
    """A head after one Newton step on the rows of the sums, to which its prior is added."""
    precision = from_lower_half(sums.curvature)
    precision.diagonal().add_(head.amplitude**-2)
    return head.newton_step(from_lower_half(sums.gram), precision, sums.slope - head.weights / head.amplitude**2)
