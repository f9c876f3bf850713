"""A fit within a given time.

Rough fits come first. Their times tell what a better fit would cost. The last one that is ready in time is used.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

FIRST_EFFORT = 0.01  # share of the full work that the first fit makes
MAX_TIME_SHARE = 0.85  # share of the time left that the next fit may be expected to take
MIN_EFFORT_GROWTH = 1.3  # factor on the effort below which another fit is not worth its time
# Largest factor on the effort from one fit to the next; a fit that is not ready in time is lost.
MAX_EFFORT_GROWTH = 8.0
INITIAL_TIME_EXPONENT = 0.5  # time is assumed to grow as effort to this power, until two fits have been timed
TIME_EXPONENT_RANGE = (
    0.3,
    5 / 3,
)  # limits of the exponent that two fits give: rows grow as effort, matrices as its power of 2/3

Result = TypeVar("Result")


class OutOfTime(Exception):  # not called an error: the caller uses the fit before
    """Raised inside a fit when its time is over."""


@dataclass(frozen=True)
class Clock:
    """The deadline of a fit.

    Attributes:
        deadline: Time at which the fit must be ready, on the clock of ``time.perf_counter``.
    """

    deadline: float = math.inf

    def check(self) -> None:
        """Raises OutOfTime when the time is over."""
        if time.perf_counter() > self.deadline:
            raise OutOfTime


def fit_within_budget(seconds: float, attempt: Callable[[float, Clock], Result], say: Callable[[str], None]) -> Result:
    """Fits with more and more effort, and returns the last result that is ready in time.

    The first attempt is always finished: it takes about a second.

    Args:
        seconds: Time that all attempts together may take.
        attempt: Makes a result with an effort of up to 1; raises OutOfTime when its clock is past the deadline.
        say: Shows a line to the user.
    """
    deadline = time.perf_counter() + seconds
    effort, clock, best = FIRST_EFFORT, Clock(), None
    timed: list[tuple[float, float]] = []  # effort and time of each attempt
    while True:
        start = time.perf_counter()
        try:
            best = attempt(effort, clock)
        except OutOfTime:
            assert best is not None, "the first attempt has no deadline"
            say("the time is over; the fit before this one is used")
            return best
        elapsed, left = time.perf_counter() - start, deadline - time.perf_counter()
        say(f"a fit with {100 * effort:.0f} % of the full effort took {elapsed:.1f} s; {max(left, 0):.1f} s are left")
        timed.append((effort, elapsed))
        growth = min(MAX_EFFORT_GROWTH, affordable_effort(timed, MAX_TIME_SHARE * left) / effort)
        if effort == 1 or (growth < MIN_EFFORT_GROWTH and growth * effort < 1):
            return best
        effort, clock = min(1.0, growth * effort), Clock(deadline)


def affordable_effort(timed: list[tuple[float, float]], seconds: float) -> float:
    """The largest effort of a fit that is expected to take so many seconds at most.

    Time grows as a power of the effort where one kind of work prevails, and along a line where some work is the same in all fits.
    The longer of both times is expected.

    Args:
        timed: Effort and time of the fits so far.
        seconds: The time.
    """
    effort, elapsed = timed[-1]
    exponent, along_line = INITIAL_TIME_EXPONENT, math.inf
    if len(timed) > 1:
        less, sooner = timed[-2]
        exponent = min(
            max(math.log(elapsed / sooner) / math.log(effort / less), TIME_EXPONENT_RANGE[0]), TIME_EXPONENT_RANGE[1]
        )
        if elapsed > sooner:
            along_line = effort + (seconds - elapsed) * (effort - less) / (elapsed - sooner)
    return min(along_line, effort * (max(0.0, seconds) / elapsed) ** (1 / exponent))
