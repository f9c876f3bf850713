"""The score that tells rows that are unlike the known rows; its mathematics is in :mod:`bochner.attach.head`.

A *cue* is a number that is larger at stranger rows. *Known rows* are those that new rows are compared with.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

TAIL_SHARE = 0.1  # share of the known rows, those with the largest cues, that an exponential tail is fitted to


@dataclass
class Tail:
    """The distribution of a cue at known rows: by counting, with an exponential tail.

    Attributes:
        known: The cue at known rows, sorted.
        start: Where the tail begins: the ninetieth percentile.
        length: Mean of the tail beyond its start.
    """

    known: Tensor
    start: float = field(init=False)
    length: float = field(init=False)

    def __post_init__(self) -> None:
        if self.known.ndim != 1 or len(self.known) == 0:
            raise ValueError("sizes of the known rows")
        above = self.known[int((1 - TAIL_SHARE) * (len(self.known) - 1)) :]
        self.start = float(above[0])
        self.length = max(float((above - above[0]).mean()), 1e-9 * max(1.0, abs(self.start)))

    def log_share(self, value: Tensor) -> Tensor:
        """Log of the share of known rows whose cue is at least as large, (n,)."""
        count = len(self.known)
        beyond = count - torch.searchsorted(self.known, value.contiguous(), side="left")
        counted = ((beyond + 1.0) / (count + 1)).log()
        tail = math.log(TAIL_SHARE) - (value - self.start) / self.length
        return torch.where(value > self.start, tail, counted.clamp(min=math.log(TAIL_SHARE)))


@dataclass
class Novelty:
    """The score of a row, from all its cues.

    Attributes:
        tails: The distribution of each cue.
        statistic: The distribution of Fisher's statistic of all cues.
    """

    tails: list[Tail]
    statistic: Tail

    @classmethod
    def of(cls, cues: list[Tensor]) -> "Novelty":
        """The score that compares with these cues of known rows."""
        tails = [Tail(cue.sort().values) for cue in cues]
        novelty = cls(tails, tails[0])
        novelty.statistic = Tail(novelty.fisher(cues).sort().values)
        return novelty

    def fisher(self, cues: list[Tensor]) -> Tensor:
        """Fisher's statistic of the cues, −Σ log p, (n,)."""
        logs = [tail.log_share(cue) for tail, cue in zip(self.tails, cues, strict=True)]
        return -torch.stack(logs).sum(0)

    def threshold(self, false_alarm: float) -> float:
        """The score that a new row like the known ones exceeds with at most this probability (conformal prediction).

        It is the score of the known row of rank ⌈(n + 1)(1 − α)⌉; 1 where there are fewer rows than that.
        """
        known = self.statistic.known
        rank = math.ceil((len(known) + 1) * (1 - false_alarm))
        return 1.0 if rank > len(known) else float(-torch.expm1(self.statistic.log_share(known[rank - 1 : rank])))

    def __call__(self, cues: list[Tensor]) -> Tensor:
        """The score of rows, (n,)."""
        return -torch.expm1(self.statistic.log_share(self.fisher(cues)))


def cues_of(left: Tensor, outputs: Tensor, classes: bool) -> list[Tensor]:
    """The cues of rows: the variance left, on a scale without an upper end; for classes also how small all outputs are."""
    left = -torch.log1p(-left.clamp(max=1 - 1e-12))
    return [left, -torch.logsumexp(outputs.double(), 1)] if classes else [left]
