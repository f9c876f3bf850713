"""Constants and inputs of a fit: ``Settings``, each constant with its reason, and ``Task``.

An ablation is ``replace(Settings(), folds=3)``. 'Rows that judge' are rows that a member has not learnt from: their log density
under the member decides its weight.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from bochner.members.budget import Clock

if TYPE_CHECKING:
    from bochner.priors.spectra import Spectrum

REAL_SETTINGS = ("column_spread", "network_rate", "member_floor", "unseen_rows")  # the others are integers
MAX_SETTING = 1e300  # limit of real settings, and one over the smallest
COUNTS_FROM_ZERO = ("large_rows", "many_rows", "network_rows", "intervals", "all_intervals")  # the others start at 1


@dataclass(frozen=True)
class Settings:
    """The constants of a fit.

    They were chosen on the 27 tables of ``suite`` and on inner splits of the paper's sets (docs/default.md), never on the paper's
    test folds.

    Attributes:
        folds: Number of parts (cross-validation folds) of the rows. Members that have not learnt from a part are judged by it. One
            network is trained without each part. Five is customary.
        folds_large: The same for tables of more than ``large_rows`` rows, where more networks are worth their time.
        large_rows: Above this many rows there are ``folds_large`` parts, and a fit uses all cores.
        judging_rows: Largest number of rows that judge. More of them do not improve the weights and spreads of a few members.
        tuning_rows: Largest number of rows that lengthscales are tuned on. A step costs their number cubed: 5 ms for 300 on a core.
        tuning_steps: Largest number of steps of L-BFGS, which converges in 20 to 40.
        wide_anchors: Largest number of anchors of a head on the columns. With up to this many rows the head is exact.
        deep_numbers: Largest number of entries in the Gram matrices of all heads on networks: it bounds the size of a model file.
        class_anchors: Largest number of anchors of a class head on a network. Its mode takes many passes over the features.
        column_spread: Prior standard deviation of a column's log lengthscale around the common one; 1 is a factor of e.
        network_rows: Smallest number of rows for which networks are trained. With fewer they improved no table.
        network_width: Units of the periodic layer that a network is trained with.
        least_steps: Smallest number of training steps in a round.
        most_steps: Largest number of training steps in a round: it bounds the time.
        most_rounds: Largest number of rounds for tables of more than ``many_rows`` rows. Training stops when a round does not help.
        many_rows: Above this many rows a round shows each row to a network fewer than twenty times, so there may be more rounds.
        head_rows: Largest number of rows that a class head learns from: its few hundred weights do not need more.
        sample_rows: Largest number of rows of a table that are held in memory; beyond it the table is read in pieces, twice.
        network_rate: First learning rate of Adam; it falls to zero along half a cosine.
        intervals: Largest number of intervals of a column that networks see beside its value.
        all_intervals: Largest number of intervals of all columns together.
        member_floor: Smallest weight of a member. A lighter one is dropped, for it costs time and space.
        unseen_rows: A category that was never seen is as far from the others as one seen in this many rows would be.
    """

    folds: int = 5
    folds_large: int = 8
    large_rows: int = 2000
    judging_rows: int = 2000
    tuning_rows: int = 300
    tuning_steps: int = 40
    wide_anchors: int = 900
    deep_numbers: int = 3_300_000
    class_anchors: int = 400
    column_spread: float = 1.0
    network_rows: int = 200
    network_width: int = 200
    least_steps: int = 150
    most_steps: int = 1500
    most_rounds: int = 5
    many_rows: int = 20_000
    head_rows: int = 20_000
    sample_rows: int = 200_000
    network_rate: float = 3e-3
    intervals: int = 16
    all_intervals: int = 1024
    member_floor: float = 0.02
    unseen_rows: float = 0.5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in REAL_SETTINGS:
                kind, limit, expected = int | float | np.number, MAX_SETTING, "a positive number"
                minimum = 0 if name == "member_floor" else 1 / MAX_SETTING
            else:
                minimum = 2 if name in ("folds", "folds_large") else 0 if name in COUNTS_FROM_ZERO else 1
                kind, limit, expected = Integral, math.inf, f"an integer of at least {minimum}"
            if not isinstance(value, kind) or isinstance(value, bool) or not minimum <= value < limit:
                raise ValueError(f"The {name} of Settings must be {expected}, got {value!r} instead.")

    def folds_for(self, rows: int) -> int:
        """Number of parts for this many rows."""
        return min(rows, self.folds_large if rows > self.large_rows else self.folds)

    def steps_for(self, rows: int) -> int:
        """Training steps of a round on this many rows: up to about 1,000 rows they grow as the rows squared."""
        return int(min(self.most_steps, max(self.least_steps, rows**2 / 800)))

    def rounds_for(self, rows: int) -> int:
        """Largest number of rounds of training on this many rows."""
        return self.most_rounds if rows > self.many_rows else 1

    def lighter(self, effort: float, rows: int) -> "Settings":
        """Settings that take about a share ``effort`` of the full work on this many rows."""
        if effort >= 1:
            return self
        size = effort ** (1 / 3)  # matrices cost the cube of their size
        steps = max(20, int(effort * self.steps_for(rows)))
        return replace(
            self,
            folds_large=self.folds,
            judging_rows=max(200, int(size * self.judging_rows)),
            wide_anchors=max(100, int(size * self.wide_anchors)),
            class_anchors=max(100, int(size * self.class_anchors)),
            deep_numbers=max(50_000, int(size**2 * self.deep_numbers)),
            head_rows=max(1000, int(effort * self.head_rows)),
            least_steps=steps,
            most_steps=steps,
            most_rounds=1,
        )

    def rows_for(self, effort: float, rows: int) -> int:
        """Number of rows that a fit with this effort learns from."""
        return min(rows, max(1000, int(effort * rows)))

    def deep_anchors(self, networks: int) -> int:
        """Largest number of anchors of each regression head where there are this many networks."""
        return int(math.sqrt(self.deep_numbers / networks))


@dataclass(frozen=True)
class Task:
    """Inputs of a fit beside the rows.

    Attributes:
        group: Index of the column that each input belongs to, (inputs,).
        plain: Number of inputs before those that say 'never seen'.
        spectra: Spectral densities of the kernels.
        hidden: Widths of the networks' hidden layers; empty for no networks.
        settings: The constants.
        seed: Seed of every draw.
        say: Shows a line to the user.
        progress: Whether to show the epochs of training.
        clock: The deadline.
    """

    group: Tensor
    plain: int
    spectra: "tuple[Spectrum, ...]"
    hidden: tuple[int, ...]
    settings: Settings
    seed: int
    say: Callable[[str], None]
    progress: bool
    clock: Clock = field(default_factory=Clock)

    @property
    def groups(self) -> int:
        """Number of columns."""
        return int(self.group.max()) + 1

    def trains_networks(self, rows: int) -> bool:
        """Whether networks are trained on this many rows."""
        return bool(self.hidden) and rows >= self.settings.network_rows
