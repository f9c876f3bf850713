"""A fit within a given time: rough ones first, which measure what a better one costs, until the next would not be ready in time."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

FIRST_EFFORT = 0.01  # share of the full work of the first fit, which says what work costs here
SPENT = 0.7  # share of the time left that the next fit may cost, as far as the last one tells
WORTHWHILE = 1.5  # factor by which its effort must exceed the last one's to be made
MOST_GROWTH = 8.0  # of the effort from one fit to the next: one that is not ready in time is time lost
POWER = 0.5  # of the effort with which time is assumed to grow, until two fits tell
POWERS = (0.3, 1.0)  # within which they may tell

Result = TypeVar("Result")


class OutOfTime(Exception):  # it is no error
    """The time is over; what has been reached so far is used."""


@dataclass(frozen=True)
class Clock:
    """When a fit must be ready.

    Attributes:
        deadline: On the clock of ``time.perf_counter``.
    """

    deadline: float = math.inf

    def check(self) -> None:
        """Raises OutOfTime when the time is over."""
        if time.perf_counter() > self.deadline:
            raise OutOfTime


def spend(seconds: float, attempt: Callable[[float, Clock], Result], say: Callable[[str], None]) -> Result:
    """The result of the greatest effort that is ready in time.

    The first attempt is always finished: it takes about a second.

    Args:
        seconds: The time there is.
        attempt: Makes a result with an effort of up to 1, and stops when its clock says so.
        say: Tells the user.
    """
    deadline = time.perf_counter() + seconds
    effort, power, clock, best = FIRST_EFFORT, POWER, Clock(), None
    before = None
    while True:
        start = time.perf_counter()
        try:
            best = attempt(effort, clock)
        except OutOfTime:
            assert best is not None, "the first attempt has no deadline"
            say("the time is over; the fit before this one is used")
            return best
        took, left = time.perf_counter() - start, deadline - time.perf_counter()
        say(f"a fit with {100 * effort:.0f} % of the full effort took {took:.1f} s; {max(left, 0):.1f} s are left")
        if before is not None:
            power = math.log(took / before[1]) / math.log(effort / before[0])
            power = min(max(power, POWERS[0]), POWERS[1])
        before = effort, took
        growth = min(MOST_GROWTH, max(0.0, SPENT * left / took) ** (1 / power))
        if effort == 1 or (growth < WORTHWHILE and growth * effort < 1):
            return best
        effort, clock = min(1.0, growth * effort), Clock(deadline)
