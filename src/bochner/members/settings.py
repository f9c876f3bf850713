"""What a fit is told: the constants, each with its reason, and the task. An ablation is ``replace(Settings(), folds=3)``."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from bochner.members.budget import Clock
from bochner.priors.spectra import Spectrum


@dataclass(frozen=True)
class Settings:
    """The constants of a fit.

    They were chosen on the 27 tables of ``suite`` and on inner splits of the paper's sets (docs/default.md), never on the paper's
    test folds.

    Attributes:
        folds: Parts of the rows. Each is predicted by members that have not learnt from it, and so judges them; a network is
            trained without each part. Five is customary.
        folds_large: The same for tables of more than ``large_rows`` rows, where more networks pay.
        large_rows: From here on lengthscales are tuned once, on rows that do not judge, and networks train on all cores.
        judging_rows: Most rows that judge. Weights and spreads of a few members do not get better with more.
        tuning_rows: Most rows that lengthscales are tuned on: a step costs their number cubed, 5 ms for 300 on one core.
        tuning_steps: Most steps of L-BFGS; it converges in 20 to 40.
        wide_anchors: Most anchors of a head on the columns. Up to here the head is the exact Gaussian process of its prior.
        deep_numbers: Numbers in the Gram matrices of all heads on networks together: what bounds the size of a saved model.
        class_anchors: Most anchors of a head on a network for classes, whose modes are sought by many passes over the features.
        column_spread: Prior standard deviation of a column's log lengthscale about their common value; a factor of e.
        network_rows: From how many rows on networks are trained. With fewer they did not pay for their seconds on any table.
        network_width: Units of the periodic layer that a network is trained with.
        least_steps: Fewest steps of training.
        most_steps: Most steps of a round of training: what bounds the time.
        most_rounds: Most rounds, for tables of more than ``many_rows`` rows, as long as rows not learnt from get more probable.
        many_rows: From here on a round shows a network each row fewer than twenty times.
        head_rows: Most rows that a head for classes learns from: its few hundred weights do not need more.
        network_rate: Learning rate of Adam, which falls to zero along half a cosine.
        intervals: Most intervals of a column that networks see beside its value.
        all_intervals: Most intervals of all columns.
        member_floor: A member that counts for less is left out: it costs time and room.
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
    network_rate: float = 3e-3
    intervals: int = 16
    all_intervals: int = 1024
    member_floor: float = 0.02
    unseen_rows: float = 0.5

    def folds_for(self, rows: int) -> int:
        """Parts of so many rows."""
        return min(rows, self.folds_large if rows > self.large_rows else self.folds)

    def steps_for(self, rows: int) -> int:
        """Steps of a round of training on so many rows: below 1,000 they grow as the square of the rows."""
        return int(min(self.most_steps, max(self.least_steps, rows**2 / 800)))

    def rounds_for(self, rows: int) -> int:
        """Most rounds of training."""
        return self.most_rounds if rows > self.many_rows else 1

    def lighter(self, effort: float, rows: int) -> "Settings":
        """Settings for so many rows that make about a share ``effort`` of the full work."""
        if effort >= 1:
            return self
        size = effort ** (1 / 3)  # matrices cost the cube of their size
        steps = max(20, int(effort * self.steps_for(rows)))
        return replace(
            self,
            folds_large=self.folds,
            judging_rows=max(200, int(size * self.judging_rows)),
            tuning_rows=max(100, int(size * self.tuning_rows)),
            wide_anchors=max(100, int(size * self.wide_anchors)),
            class_anchors=max(100, int(size * self.class_anchors)),
            deep_numbers=max(50_000, int(size**2 * self.deep_numbers)),
            head_rows=max(1000, int(effort * self.head_rows)),
            least_steps=steps,
            most_steps=steps,
            most_rounds=1,
        )

    def rows_for(self, effort: float, rows: int) -> int:
        """How many of the rows a fit with that effort learns from."""
        return min(rows, max(1000, int(effort * rows)))

    def deep_anchors(self, networks: int) -> int:
        """Most anchors of a regression head on each of so many networks."""
        return int(math.sqrt(self.deep_numbers / networks))


@dataclass(frozen=True)
class Task:
    """What a fit starts from, beside the rows.

    Attributes:
        group: Number of the column that each input belongs to.
        plain: How many inputs there are before those that say 'never seen'.
        spectra: The kernels.
        hidden: Widths of the networks' hidden layers; none for no networks.
        settings: The constants.
        seed: Seed of every draw.
        say: Tells the user.
        progress: Whether to show the epochs of training.
        clock: When it must be ready.
    """

    group: Tensor
    plain: int
    spectra: tuple[Spectrum, ...]
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
        """Whether networks are trained on so many rows."""
        return bool(self.hidden) and rows >= self.settings.network_rows
