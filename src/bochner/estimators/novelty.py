r"""How far a row is from the training data, as a number between 0 and 1 that means the same for every model.

Two cues are computed:

- the *variance left*: the share of the prior variance that the training rows leave at the row, the mean over all members of the
  mixture. It is large for rows that lie far from all others in columns on which the target depends.
- the *leverage* $x^\top(X^\top\Omega X + \epsilon I)^{-1}x$ of the row among the training rows: the variance that a linear model
  leaves. It is large for rows that break a linear relation between columns, even where the target hardly depends on them.

Each cue is compared with the same cue at training rows that were left out. Let p be twice the share of these whose cue is at least
as large, for the cue with the smaller share; twice, because there are two cues. The score is $1 - p$. A score of 0.95 means that
one training row in twenty looks as strange; a score of 1 that none does.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MIN_ROWS_PER_INPUT = 2  # rows for each input from which on the leverage of left-out rows is that of new ones
TIE = 1e-4  # relative difference of two cues below which they are the same: few different rows have many equal cues
UNREACHABLE = 1e30  # a leverage that no row has
RIDGE = 1e-6  # ε over the total weight of the rows; it matters only where columns are linearly dependent
MAX_REFERENCE_ROWS = 2000  # about the largest number of left-out rows that the leverage is compared with


@dataclass
class Novelty:
    """The score for rows unlike the training data, and what it compares a row with.

    Attributes:
        factor: Lower Cholesky factor of X'ΩX + εI, inputs and a constant, (d + 1, d + 1).
        left: Variance left at rows that members had not seen, sorted.
        leverage: Leverages of training rows that were left out, sorted.
    """

    factor: Tensor
    left: Tensor
    leverage: Tensor

    @classmethod
    def learn(cls, x: Tensor, weight: Tensor, left: Tensor) -> "Novelty":
        """Learns from training inputs, their weights, and the variance left at rows that judged."""
        design = _with_constant(x)
        matrix = design.mT @ (design * weight[:, None])
        matrix.diagonal().add_(RIDGE * float(weight.sum()))
        factor = torch.linalg.cholesky(matrix)
        novelty = cls(factor, left.sort().values, left[:0])
        some = slice(None, None, max(1, len(x) // MAX_REFERENCE_ROWS))
        novelty.leverage = novelty.left_out_leverage(x[some], weight[some]).sort().values
        if len(x) < MIN_ROWS_PER_INPUT * design.shape[1]:
            # Centred rows, if there are few, lie in each other's span as no new row does: the cue is out of reach for all.
            novelty.leverage = torch.full_like(novelty.leverage, UNREACHABLE)
        return novelty

    def _leverage(self, x: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(self.factor, _with_constant(x).mT, upper=False)
        return half.square().sum(0)

    def left_out_leverage(self, x: Tensor, weight: Tensor) -> Tensor:
        """Leverage of training rows as if each had been left out: h / (1 − ωh)."""
        leverage = self._leverage(x)
        return leverage / (1 - weight * leverage).clamp(min=1e-9)

    def combine(self, left: Tensor, leverage: Tensor) -> Tensor:
        """The score from both cues."""
        share = torch.minimum(_share_beyond(self.left, left), _share_beyond(self.leverage, leverage))
        return 1 - (2 * share).clamp(max=1.0)

    def __call__(self, x: Tensor, left: Tensor) -> Tensor:
        """The score of new rows, (n,), from their inputs and the variance left there."""
        return self.combine(left, self._leverage(x))


def _with_constant(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def _share_beyond(reference: Tensor, value: Tensor) -> Tensor:
    """Share of reference rows whose cue is at least as large; beyond the largest one the share falls as one over the cue."""
    count = len(reference)
    beyond = count - torch.searchsorted(reference, (1 - TIE) * value, side="left")
    outside = reference[-1] / value.clamp(min=1e-300)
    return torch.where(beyond > 0, (beyond + 1.0) / (count + 1), outside.clamp(max=1.0) / (count + 1))


def learn_novelty(
    x: Tensor, weight: Tensor, left: np.ndarray, judged: Tensor, false_alarm: float
) -> tuple[Novelty, float]:
    """Learns the score, and its threshold: the value that a share of ``false_alarm`` of the rows that judged exceeds.

    Args:
        x: Training inputs.
        weight: How many rows each one stands for.
        left: Variance left at the rows that judged, by members that had not seen them.
        judged: Which rows these are.
        false_alarm: Share of ordinary rows that may be flagged.
    """
    values = torch.from_numpy(left).to(x)
    novelty = Novelty.learn(x, weight, values)
    scores = novelty.combine(values, novelty.left_out_leverage(x[judged], weight[judged]))
    return novelty, float(torch.quantile(scores, 1 - false_alarm))
