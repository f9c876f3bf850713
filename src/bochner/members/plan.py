"""The plan of a fit: which rows tune hyperparameters, and which rows judge members that have not learnt from them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bochner.members.settings import Settings


@dataclass(frozen=True)
class Plan:
    """Indices of the rows for each step of a fit. A 'part' is a cross-validation fold.

    Attributes:
        order: All rows in random order; classes are spread evenly over it.
        folds: Rows that judge, in parts. Part j is predicted by members that have not learnt from it.
        tuning: Rows that hyperparameters are tuned on.
        separate: Whether none of the tuning rows judges. Otherwise regression tunes again without each part. Classification does
            not, see :mod:`bochner.estimators.classification`.
    """

    order: Tensor
    folds: tuple[Tensor, ...]
    tuning: Tensor
    separate: bool

    @property
    def judging(self) -> Tensor:
        """All rows that judge."""
        return torch.cat(self.folds)

    def to(self, device: torch.device) -> "Plan":
        """The same plan with its row numbers on a device."""
        folds = tuple(fold.to(device) for fold in self.folds)
        return Plan(self.order.to(device), folds, self.tuning.to(device), self.separate)

    def others(self, fold: int, limit: int | None = None) -> Tensor:
        """Rows outside a part, in random order; with ``limit`` only so many, and first those that judge nothing."""
        outside = self.order[~torch.isin(self.order, self.folds[fold])]
        return outside if limit is None else outside.flip(0)[:limit]

    def tuning_without(self, fold: int, settings: Settings) -> Tensor:
        """Rows to tune on where part ``fold`` judges: none of them is in that part."""
        return self.tuning if self.separate else self.others(fold)[: settings.tuning_rows]


def make_plan(rows: int, labels: Tensor | None, settings: Settings, generator: torch.Generator) -> Plan:
    """Draws a plan for a number of rows. With labels, every part gets its share of every class, where rows suffice."""
    order = torch.randperm(rows, generator=generator)
    if labels is not None:
        order = order[_spread_classes(labels.cpu()[order])]
    judging = min(rows, settings.judging_rows)
    separate = rows >= judging + settings.tuning_rows
    folds = settings.folds_for(rows)
    parts = order[:judging].tensor_split(folds)
    tuning = order[judging:][: settings.tuning_rows] if separate else order[: settings.tuning_rows]
    return Plan(order, parts, tuning, separate)


def _spread_classes(labels: Tensor) -> Tensor:
    """An order in which the rows of every class lie at even distances."""
    place = torch.empty(len(labels), dtype=torch.float64)
    for label in labels.unique():
        class_rows = torch.nonzero(labels == label)[:, 0]
        place[class_rows] = (torch.arange(len(class_rows), dtype=torch.float64) + 0.5) / len(class_rows)
    return place.argsort(stable=True)
