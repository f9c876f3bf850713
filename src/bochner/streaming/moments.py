"""What the heads of a fitted estimator learn from rows: sums, which are added over pieces, portions and machines."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bochner.estimators.classification import ClassMixture
from bochner.estimators.targets import as_tensor, mapped_target
from bochner.members.features import FEATURE_CHUNK_ROWS
from bochner.members.heads import as_targets, fit_and_slopes
from bochner.members.member import Inputs

STRIP_COLUMNS = 128  # columns of a Gram matrix that are computed at a time: only those on and below the diagonal are
GPU_CHUNK_ROWS = 131_072  # rows whose features a GPU computes at a time: products of fewer rows leave it idle
# The two odd factors of splitmix64, which spread bits over the whole number.
FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
COLUMN_STEP = np.uint64(0x9E3779B97F4A7C15)  # difference of what two columns are shifted by
COMMON_SHARE = 0.2  # share of the occurrences of a common row that are held out, and share that judge


def row_keys(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A whole number of 64 bits for each row, the same for equal rows and different for others, but for chance of 2⁻⁶⁴."""
    values = np.column_stack([x, y.reshape(len(y), -1)]).astype(np.float64) + 0.0  # −0 becomes 0
    keys = np.zeros(len(values), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for number, column in enumerate(values.T):
            bits = np.ascontiguousarray(column).view(np.uint64) + COLUMN_STEP * np.uint64(number + 1)
            bits = (bits ^ (bits >> np.uint64(30))) * FIRST_FACTOR
            bits = (bits ^ (bits >> np.uint64(27))) * SECOND_FACTOR
            keys += bits ^ (bits >> np.uint64(31))
    return keys


class RegressionSums(NamedTuple):
    """Sums that a regression head learns from; tensors are added to in place.

    Attributes:
        gram: Lower half of Φ'ΩΦ.
        projection: Φ'Ωy.
        square: y'Ωy.
        weight: Total weight of the rows.
    """

    gram: Tensor
    projection: Tensor
    square: Tensor
    weight: Tensor


class ClassSums(NamedTuple):
    """Sums that a Newton step of a class head needs, at the head's weights; tensors are added to in place.

    Attributes:
        gram: Lower half of Φ'ΩΦ.
        curvature: Lower half of Φ'ΩHΦ, with H at least the curvature of each row's log likelihood.
        slope: Gradient of the log likelihood.
        log_likelihood: The log likelihood.
    """

    gram: Tensor
    curvature: Tensor
    slope: Tensor
    log_likelihood: Tensor


Sums = RegressionSums | ClassSums


@dataclass
class Moments:
    """Sums over rows of one portion of a table, or of several, for the heads of an estimator.

    Attributes:
        portion: Number of the portion, or of the first one.
        rows: Number of rows.
        held: Number of rows that are held out.
        sums: The sums of every member of every mixture.
        judging: Total weight of the rows that are equal to each row that judges, (n,).
    """

    portion: int
    rows: int
    held: int
    sums: list[list[Sums]]
    judging: np.ndarray

    def add(self, other: "Moments") -> None:
        """Adds the sums over other rows."""
        self.rows += other.rows
        self.held += other.held
        self.judging += other.judging
        for mixture, others in zip(self.sums, other.sums, strict=True):
            for member, more in zip(mixture, others, strict=True):
                for total, part in zip(member, more, strict=True):
                    total += part


class MomentCollector:
    """Takes the sums of an estimator's heads over rows, without those that judge the heads or are held out.

    A row that is equal to one that judges may be a copy of it, and then judges with it; the same goes for rows held out. But in a
    table of few different rows, equality tells nothing, and nothing would be left to learn from. So of *common* rows, of which the
    sample has more than one, a random fifth judges and another one is held out.

    Args:
        estimator: A fitted StationaryRegressor or StationaryClassifier.
        judging: Keys of the rows that judge.
        held: Keys of the rows that are held out.
        common: Keys of rows of which the sample has more than one.
    """

    def __init__(self, estimator: Any, judging: np.ndarray, held: np.ndarray, common: np.ndarray) -> None:
        self.estimator = estimator
        self.held, self.common = np.unique(held), np.unique(common)
        self.order = np.argsort(judging, kind="stable")
        self.judging = judging[self.order]

    def empty(self, portion: int = 0) -> Moments:
        """Sums over no rows, to which those of a portion will be added."""
        device = torch.device(self.estimator._device())
        sums = [
            [_no_sums(mixture, member, device) for member in mixture.members] for mixture in self.estimator.mixtures_
        ]
        return Moments(portion, 0, 0, sums, np.zeros(len(self.judging)))

    def take(self, moments: Moments, X: Any, y: np.ndarray, weight: np.ndarray) -> None:
        """Adds the sums over the next rows of a portion.

        Args:
            moments: What is added to.
            X: Rows as the estimator takes them.
            y: Targets, floats or numbers of classes, (n,) or (n, k).
            weight: How many rows each one stands for, (n,).
        """
        x = self.estimator._inputs(X)
        keys = row_keys(x.cpu().numpy(), y)
        held, judges = is_among(keys, self.held), is_among(keys, self.judging)
        common = is_among(keys, self.common)
        if common.any():
            chance = _row_chances(moments.portion, moments.rows, len(keys))
            held &= ~common | (chance < COMMON_SHARE)
            judges &= ~common | (chance >= 1 - COMMON_SHARE)
        moments.rows += len(y)
        moments.held += int(held.sum())
        at = np.searchsorted(self.judging, keys[judges])
        np.add.at(moments.judging, self.order[at], weight[judges])
        learns = np.nonzero(~judges & ~held & (weight > 0))[0]
        at_device = torch.from_numpy(learns).to(x.device)
        weights = torch.from_numpy(weight[learns]).to(x)
        add_sums(self.estimator.mixtures_, moments.sums, x[at_device], y[learns], weights)


def is_among(keys: np.ndarray, sorted_keys: np.ndarray) -> np.ndarray:
    """Which keys are among others, which are sorted."""
    if not len(sorted_keys):
        return np.zeros(len(keys), dtype=bool)
    at = np.searchsorted(sorted_keys, keys).clip(max=len(sorted_keys) - 1)
    return sorted_keys[at] == keys


def _row_chances(portion: int, first: int, count: int) -> np.ndarray:
    """A random number between 0 and 1 for each of the rows of a portion from a given one on, the same in every pass."""
    numbers = np.arange(first, first + count, dtype=float)
    return row_keys(numbers[:, None], np.full(count, float(portion))) / 2.0**64


def add_sums(mixtures: list[Any], sums: list[list[Sums]], x: Tensor, y: np.ndarray, weight: Tensor) -> None:
    """Adds to the sums of every member of every mixture.

    Args:
        mixtures: Fitted mixtures, one for each target.
        sums: The sums of every member of every mixture.
        x: Inputs, (n, d).
        y: Targets, (n,) or (n, k); for classes their numbers.
        weight: How many rows each one stands for, (n,).
    """
    if not len(y):  # of these rows all judge or are held out
        return
    columns = y.reshape(len(y), -1).T
    for number, (mixture, members) in enumerate(zip(mixtures, sums, strict=True)):
        targets = [_targets_of(mixture, member, columns[number], x) for member in mixture.members]
        for rows in _pieces(len(x), x.is_cuda):
            inputs = Inputs(x[rows], mixture.extractors)
            for member, target, total in zip(mixture.members, targets, members, strict=True):
                phi = member.head.features(inputs.of(member.network))
                if isinstance(total, RegressionSums):
                    _add_regression(total, phi, target[rows], weight[rows])
                else:
                    _add_classes(total, phi, target[rows], weight[rows], member.head.weights)


def _pieces(rows: int, on_gpu: bool) -> Iterator[slice]:
    size = GPU_CHUNK_ROWS if on_gpu else FEATURE_CHUNK_ROWS
    return (slice(start, start + size) for start in range(0, rows, size))


def _targets_of(mixture: Any, member: Any, y: np.ndarray, like: Tensor) -> Tensor:
    """Targets of a member: on its mapped scale, or 0 and 1 for each class."""
    if isinstance(mixture, ClassMixture):
        return as_targets(torch.from_numpy(y.astype(np.int64)).to(like.device), member.head.classes)
    return mapped_target(member.map, as_tensor(y, like))


def _no_sums(mixture: Any, member: Any, device: torch.device) -> Sums:
    """Sums over no rows."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    size = len(member.head.features.anchors)
    if isinstance(mixture, ClassMixture):
        return ClassSums(zeros(size, size), zeros(size, size), zeros(*member.head.weights.shape), zeros())
    return RegressionSums(zeros(size, size), zeros(size, 1), zeros(), zeros())


def _add_regression(total: RegressionSums, phi: Tensor, target: Tensor, weight: Tensor) -> None:
    weighted = phi * weight[:, None]
    _add_lower(total.gram, phi, weighted)
    total.projection.addmm_(weighted.mT, target)
    total.square.add_((weight[:, None] * target.square()).sum())
    total.weight.add_(weight.sum())


def _add_classes(total: ClassSums, phi: Tensor, target: Tensor, weight: Tensor, weights: Tensor) -> None:
    fit, curvature, residual = fit_and_slopes(phi @ weights, target)
    _add_lower(total.gram, phi, phi * weight[:, None])
    _add_lower(total.curvature, phi, phi * (weight * curvature)[:, None])
    total.slope.addmm_(phi.mT, weight[:, None] * residual)
    total.log_likelihood.add_((weight * fit).sum())


def _add_lower(gram: Tensor, phi: Tensor, weighted: Tensor) -> None:
    """Adds to the lower half of a Gram matrix."""
    for start in range(0, len(gram), STRIP_COLUMNS):
        gram[start:, start : start + STRIP_COLUMNS].addmm_(
            phi[:, start:].mT, weighted[:, start : start + STRIP_COLUMNS]
        )


def from_lower_half(gram: Tensor) -> Tensor:
    """A symmetric matrix from its lower half."""
    return gram.tril() + gram.tril(-1).mT
