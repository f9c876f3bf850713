"""The score of rows that are unlike those that were seen: see :mod:`bochner.attach.head`."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

TAIL = 0.1  # share of known rows whose distances make the exponential tail


@dataclass
class Tail:
    """Shares of known rows at which a cue is at least as large.

    Attributes:
        known: The cue at known rows, sorted.
    """

    known: Tensor
    start: float = field(init=False)
    length: float = field(init=False)

    def __post_init__(self) -> None:
        if self.known.ndim != 1 or len(self.known) == 0:
            raise ValueError("sizes of the known rows")
        above = self.known[int((1 - TAIL) * (len(self.known) - 1)) :]
        self.start = float(above[0])
        self.length = max(float((above - above[0]).mean()), 1e-9 * max(1.0, abs(self.start)))

    def log_share(self, value: Tensor) -> Tensor:
        """Log of the share, (n,): by counting, and by an exponential tail beyond the ninetieth percentile."""
        count = len(self.known)
        beyond = count - torch.searchsorted(self.known, value.contiguous(), side="left")
        counted = ((beyond + 1.0) / (count + 1)).log()
        tail = math.log(TAIL) - (value - self.start) / self.length
        return torch.where(value > self.start, tail, counted.clamp(min=math.log(TAIL)))


@dataclass
class Novelty:
    """The score: a tail for every cue, and one for Fisher's statistic of them all."""

    tails: list[Tail]
    statistic: Tail

    @classmethod
    def of(cls, cues: list[Tensor]) -> "Novelty":
        """From the cues at known rows."""
        tails = [Tail(cue.sort().values) for cue in cues]
        found = cls(tails, tails[0])
        found.statistic = Tail(found.fisher(cues).sort().values)
        return found

    def fisher(self, cues: list[Tensor]) -> Tensor:
        """−Σ log p over the cues."""
        logs = [tail.log_share(cue) for tail, cue in zip(self.tails, cues, strict=True)]
        return -torch.stack(logs).sum(0)

    def threshold(self, false_alarm: float) -> float:
        """The score that a new row like the known ones exceeds with at most this probability (conformal prediction).

        It is that of the known row of rank ⌈(n + 1)(1 − α)⌉; 1 where there are fewer rows than that.
        """
        known = self.statistic.known
        rank = math.ceil((len(known) + 1) * (1 - false_alarm))
        return 1.0 if rank > len(known) else float(-torch.expm1(self.statistic.log_share(known[rank - 1 : rank])))

    def __call__(self, cues: list[Tensor]) -> Tensor:
        """The score of rows, (n,)."""
        return -torch.expm1(self.statistic.log_share(self.fisher(cues)))


def cues_of(left: Tensor, outputs: Tensor, classes: bool) -> list[Tensor]:
    """What makes rows strange: variance left, on a scale without an upper end; for classes, outputs that all are small."""
    left = -torch.log1p(-left.clamp(max=1 - 1e-12))
    return [left, -torch.logsumexp(outputs.double(), 1)] if classes else [left]
