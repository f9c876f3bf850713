"""A fit to rows that come in batches: a sample of them is fitted, and then the heads learn from all rows."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from pandas.util import hash_pandas_object

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
    is_among,
    row_keys,
)
from bochner.streaming.sample import Sample

Batch = tuple[Any, Any, Any]  # rows, targets, weights or None
BATCH_ROWS = 20_000  # rows of an Arrow dataset that are read at a time
PROGRESS_ROWS = 1_000_000  # rows between two lines of progress
HASH_ROWS: Any = hash_pandas_object  # pandas declares no type of it
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
        names: list[str] | None = None
        labels: Any = None
        for number, batch in enumerate(self._arrow_batches() if self.is_dataset else self.batches):
            if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
                raise ValueError(
                    "The batches parameter must give tuples (X, y) or (X, y, sample_weight), got "
                    f"{type(batch).__name__} as number {number} instead."
                )
            parts: list[Any] = [np.asarray(p) if isinstance(p, list | tuple) else p for p in (*batch, None)[:3]]
            X, y, weight = parts
            check_same_rows(len(X), len(y))
            columns = list(map(str, getattr(X, "columns", range(np.shape(X)[1] if np.ndim(X) == 2 else 0))))
            names = columns if names is None else names
            if set(columns) != set(names):
                raise ValueError(
                    f"The batches parameter must give the same columns in every batch, {_difference(names, columns, number)}."
                )
            if labels is None:
                labels = getattr(X, "columns", None)
            yield (X if labels is None else X[labels]), y, weight

    def _arrow_batches(self) -> Iterator[tuple[Any, Any]]:
        options = {"batch_readahead": 1, "fragment_readahead": 1} if hasattr(self.batches, "scanner") else {}
        size = {"batch_size": BATCH_ROWS} if options else {"max_chunksize": BATCH_ROWS}
        from pyarrow import ArrowException

        try:
            for batch in self.batches.to_batches(**size, **options):
                frame = batch.to_pandas()
                yield frame.drop(columns=self.target), frame[self.target]
        except (ArrowException, OSError) as error:
            raise ValueError(
                f"The batches parameter cannot be read to its end ({' '.join(str(error).split())})."
            ) from error


def _difference(names: list[str], columns: list[str], number: int) -> str:
    """What is said of a batch whose columns are not those of the first one."""
    lacking = [name for name in names if name not in columns]
    what = f"lacks {lacking[0]!r}" if lacking else f"has {next(c for c in columns if c not in names)!r} in addition"
    return f"but number {number} {what}"


def fit_batches(
    estimator: Any,
    batches: Batches,
    max_rows: int,
    seed: int,
    learn_from_all: Callable[[Any, TrainingData, Batch], "AllRowsLearner"],
) -> None:
    """Fits to a sample of the rows, and lets the heads learn from all of them if there are more and no budget forbids it.

    The estimator changes only if all succeeds.

    Args:
        estimator: What is fitted.
        batches: The rows.
        max_rows: Number of rows of the sample.
        seed: Seed of the sample.
        learn_from_all: Makes what learns from all rows, of the estimator fitted to a sample, what it was fitted to, and the sample.
    """
    sample, generator, read = Sample(max_rows), np.random.default_rng(seed), 0
    for X, y, weight in batches:
        if len(X):
            read += _fingerprint(X, y)
            sample.add((X, y, _row_weights(weight, len(X))), 0, generator)
    if not sample.rows:
        raise ValueError("The batches parameter must give at least one row, got none.")
    fitted, rows = copy.copy(estimator), cast("Batch", sample.in_order())
    training = fitted._learn(*rows)
    if sample.rows > max_rows and estimator.budget is None:
        learner, learnt = learn_from_all(fitted, training, rows), False
        while not learnt:
            moments, again = learner.begin_pass(), 0
            for X, y, weight in batches:
                if len(X):
                    again += _fingerprint(X, y)
                    learner.take(moments, X, y, weight)
            if moments.rows != sample.rows:
                raise ValueError(
                    "The batches parameter must give the same rows each time that it is gone through, "
                    f"got {sample.rows:,} rows and then {moments.rows:,}."
                )
            if (again - read) % 2**64:
                raise ValueError(
                    "The batches parameter must give the same rows each time that it is gone through, got others."
                )
            learnt = learner.finish_pass(moments)
    vars(estimator).clear()
    vars(estimator).update(vars(fitted))


def _fingerprint(X: Any, y: Any) -> int:
    """A sum over rows, modulo 2⁶⁴, of numbers that tell different rows apart, in whatever order and batches they come."""
    targets = pd.DataFrame(np.asarray(y).reshape(len(X), -1))
    rows = np.asarray(HASH_ROWS(targets, index=False))
    with contextlib.suppress(TypeError):  # cells that hold lists
        inputs = X if isinstance(X, pd.DataFrame) else pd.DataFrame(np.asarray(X))
        rows = rows * (2 * np.asarray(HASH_ROWS(inputs, index=False)) + 1)
    return int(rows.sum(dtype=np.uint64))


def _row_weights(weight: Any, rows: int) -> np.ndarray:
    """How many rows each row of a batch stands for; a batch may be all zeros."""
    if weight is not None and not np.any(weight):
        return np.zeros(rows)
    return check_row_weights(weight, rows)


class AllRowsLearner:
    """Lets the heads of an estimator that was fitted to a sample learn from all rows.

    Args:
        estimator: The estimator.
        training: What it was fitted to.
        sample: Rows and targets of the whole sample, as the estimator takes them.
        held: Numbers of the rows of the sample that no head may learn from.
        clean: Makes of rows and targets what the estimator takes.
        begin: Called at the beginning of each pass.
    """

    def __init__(
        self,
        estimator: Any,
        training: TrainingData,
        sample: tuple[Any, Any],
        held: np.ndarray | None = None,
        clean: Callable[[Any, Any], tuple[Any, Any]] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.estimator, self.training, self.clean, self.begin = estimator, training, clean, begin
        judged = estimator.mixtures_[0].judged
        self.x, self.y = training.x[judged], training.y[judged.cpu().numpy()]
        keys = row_keys(estimator._inputs(sample[0]).cpu().numpy(), estimator._target_numbers(sample[1]))
        different, counts = np.unique(keys, return_counts=True)
        common, held_keys = different[counts > 1], keys[[] if held is None else held]
        estimator.mixtures_ = [self._without_judging(mixture, common) for mixture in estimator.mixtures_]
        self.searches = [_ModeSearch(m) if isinstance(m, ClassMixture) else None for m in estimator.mixtures_]
        self.collector = MomentCollector(estimator, row_keys(self.x.cpu().numpy(), self.y), held_keys, common)

    def _without_judging(self, mixture: Any, common: np.ndarray) -> Any:
        """A mixture for classes whose heads have not learnt from the rows that judge; for regression the sums leave them out.

        Of common rows most occurrences do not judge, so that the heads have learnt from them.
        """
        if isinstance(mixture, RegressionMixture):
            return mixture
        settings = self.estimator._task(self.training).settings
        order = torch.randperm(len(self.training.x), generator=torch.Generator().manual_seed(0)).to(mixture.judged)
        is_common = is_among(row_keys(self.training.x.cpu().numpy(), self.training.y), common)
        learns = ~torch.isin(order, mixture.judged) | torch.from_numpy(is_common).to(order.device)[order]
        at = order[learns][: settings.head_rows]
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

    def begin_pass(self) -> Moments:
        """Sums over no rows yet, for one more pass over all of them."""
        self.begin()
        return self.collector.empty()

    def take(self, moments: Moments, X: Any, y: Any, weight: Any) -> None:
        """Adds the sums over some rows."""
        if self.clean is not None:
            X, y = self.clean(X, y)
        numbers = self.estimator._target_numbers(y)
        before = moments.rows // PROGRESS_ROWS
        self.collector.take(moments, X, numbers, _row_weights(weight, len(numbers)))
        if moments.rows // PROGRESS_ROWS > before:
            self.estimator._say(f"the heads have learnt from {moments.rows:,} rows")

    def finish_pass(self, moments: Moments) -> bool:
        """Makes heads of the sums over all rows, and says whether that is all: heads for classes may need the sums once more.

        The rows that judge choose noise, amplitude and weights again. Then they are added.
        """
        if not (moments.judging > 0).any():
            raise ValueError(
                "None of the rows that judge came again: the rows must be the same each time they are read."
            )
        estimator = self.estimator
        for number, search in enumerate(self.searches):
            sums = cast("list[ClassSums]", moments.sums[number])
            if search is not None and not search.is_at_mode(
                estimator.mixtures_[number], sums, moments.rows, estimator._say
            ):
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
            if (search := self.searches[number]) is None:
                learnt = _regression(
                    mixture, cast("list[RegressionSums]", sums), cast("list[RegressionSums]", extra), data
                )
            else:
                learnt = _classes(
                    mixture, cast("list[ClassSums]", sums), cast("list[ClassSums]", extra), data, search.near
                )
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
    for member, teaching, judging_too in zip(mixture.members, *statistics, strict=True):
        rows, phi = data.mapped_rows(member.map), member.head.features
        if member.network is None:
            candidates.append(_judged([JudgedPart(phi, teaching, rows)], [teaching + judging_too], [member]))
            continue
        assert mixture.extractors is not None
        deep = TrainingRows(mixture.extractors.all_rows(member.network, rows.x), rows.y, rows.weight)
        networks.append(
            (JudgedPart(phi, teaching, deep[data.plan.folds[member.network]]), teaching + judging_too, member)
        )
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


def _classes(
    mixture: ClassMixture, sums: list[ClassSums], judging: list[ClassSums], data: FitData, near: bool
) -> ClassMixture:
    """A class mixture from sums over all rows but those that judge, and from the sums over these.

    One Newton step is made from near the modes. From elsewhere a step may lead away, and the weights stay.
    """
    labels, plan = data.y.long(), data.plan
    targets = as_targets(labels, mixture.members[0].head.classes)
    inputs = Inputs(data.x, mixture.extractors)
    single: list[tuple[list[Any], list[Any]]] = []
    networks: tuple[list[Any], list[Any]] = ([], [])
    for member, teaching, judging_too in zip(mixture.members, sums, judging, strict=True):
        deep = inputs.of(member.network)
        folds = plan.folds if member.network is None else [plan.folds[member.network]]
        all_rows = ClassSums(*(a + b for a, b in zip(teaching, judging_too, strict=True)))
        taught_head, final_head = _stepped(member.head, teaching, near), _stepped(member.head, all_rows, near)
        parts, heads = networks if member.network is not None else ([], [])
        parts += [taught_head.predict(deep[fold]) for fold in folds]
        heads.append((member.network, final_head))
        if member.network is None:
            single.append((parts, heads))
    judged = TrainingRows(data.x, targets, data.weight)
    all_candidates = [*single, *([networks] if networks[1] else [])]
    candidates = [ClassCandidate.judged(parts, judged, heads) for parts, heads in all_candidates]
    return combine_classes(labels, data.weight, plan, candidates, mixture.extractors, data.task)


class _ModeSearch:
    """Newton's search for the modes of a class mixture's heads: a step of every head for each pass over all rows.

    A step that lowers the log posterior is halved. After the last pass that is allowed the best weights count; where the last step
    was a bad one, they need one more pass for their sums.

    Attributes:
        near: Whether the modes are near.
    """

    def __init__(self, mixture: ClassMixture) -> None:
        self.passes, self.near = 0, True
        self.value = [-math.inf] * len(mixture.members)
        self.weights = [member.head.weights for member in mixture.members]  # the best so far
        self.next_weights = list(self.weights)

    def is_at_mode(self, mixture: ClassMixture, sums: list[ClassSums], rows: int, say: Callable[[str], None]) -> bool:
        """Takes the sums at the mixture's weights; whether the next steps would hardly change a probability, or are not allowed."""
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
        if largest >= MIN_GAIN and self.passes == MAX_PASSES:
            say(
                f"after {MAX_PASSES} passes over all rows heads for classes are not at their modes yet; the best so far count"
            )
            self.next_weights, self.near = list(self.weights), False
        return largest < MIN_GAIN or self.passes > MAX_PASSES or (self.passes == MAX_PASSES and largest < math.inf)

    def next_mixture(self, mixture: ClassMixture) -> ClassMixture:
        """The mixture at the next weights."""
        members = [
            replace(member, head=replace(member.head, weights=weights))
            for member, weights in zip(mixture.members, self.next_weights, strict=True)
        ]
        return replace(mixture, members=members)


def _stepped(head: SoftmaxHead, sums: ClassSums, moves: bool = True) -> SoftmaxHead:
    """A head with the rows of the sums, after one Newton step on them and its prior; or with its weights as they are."""
    precision = from_lower_half(sums.curvature)
    precision.diagonal().add_(head.amplitude**-2)
    slope = sums.slope - head.weights / head.amplitude**2
    return head.newton_step(from_lower_half(sums.gram), precision, slope if moves else torch.zeros_like(slope))
