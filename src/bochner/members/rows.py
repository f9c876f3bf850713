"""Rows that heads and hyperparameters learn from."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TrainingRows:
    """Rows to learn from or to judge with, in standardised units.

    Attributes:
        x: Inputs, (n, d).
        y: Targets, (n, c) floats.
        weight: How many rows each one stands for, (n,).
    """

    x: Tensor
    y: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Tensor) -> "TrainingRows":
        return TrainingRows(self.x[index], self.y[index], self.weight[index])
