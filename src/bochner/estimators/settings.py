"""Every constant of the estimators, each with its reason. An ablation is ``replace(Settings(), folds=3)``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The constants of a fit. They were chosen on the 27 tables of ``suite`` (benchmarks/suite.py), never on the paper's folds.

    Attributes:
        folds: Parts of the rows. Every part is predicted by members that have not learnt from it, and so judges them. Five is
            customary; each network is trained on four fifths of the rows.
        judging_rows: Most rows that judge. Weights and spreads of a few members do not get better with more than 2,000.
        tuning_rows: Most rows that lengthscales are tuned on: a step costs their number cubed, 5 ms for 300 on one core.
        tuning_steps: Most steps of L-BFGS; it converges in 20 to 40.
        wide_anchors: Most anchors of a head on the columns. Up to here the head is the exact Gaussian process of its prior.
        deep_anchors: Most anchors of a head on what a network made of the columns: about 25 numbers, which need fewer.
        column_spread: Prior standard deviation of a column's log lengthscale about their common value; a factor of e.
        network_rows: From how many rows on networks are trained. With fewer they did not pay for their seconds on any table.
        network_width: Units of the periodic layer that a network is trained with.
        network_epochs: Most passes of a network over its rows.
        network_steps: Most steps of training, however many the rows: what bounds the time.
        network_rate: Learning rate of Adam, which falls to zero along half a cosine.
        intervals: Most intervals of a column that networks see beside its value.
        all_intervals: Most intervals of all columns.
        member_floor: A member that counts for less is left out: it costs time and room.
        unseen_rows: A category that was never seen is as far from the others as one seen in this many rows would be.
    """

    folds: int = 5
    judging_rows: int = 2000
    tuning_rows: int = 300
    tuning_steps: int = 40
    wide_anchors: int = 1000
    deep_anchors: int = 400
    column_spread: float = 1.0
    network_rows: int = 200
    network_width: int = 500
    network_epochs: int = 60
    network_steps: int = 1500
    network_rate: float = 3e-3
    intervals: int = 16
    all_intervals: int = 1024
    member_floor: float = 0.02
    unseen_rows: float = 0.5
