r"""How long to wait before the next attempt: a pure function of (retries, u), *u* being a number from [0, 1).

The random number is an argument, and nothing is remembered between calls, so any delay of the past can be computed
again and messages never influence each other.  This module must not know verdicts, limits or Dramatiq's messages.

The wait is planned (exponential, or the schedule's entry), the jitter makes a window of it, Retry-After raises the
window, and *u* picks the place in it::

    plan      = min(min_backoff · 2^retries, max_backoff)        or the schedule's entry, at most max_backoff
    (a, b)      [p(1+a), p(1+b)]   with p = min(plan, max_backoff / (1+b))
    "equal"     [plan/2, plan]
    "full"      [0, plan]
    "none"      [plan, plan]
    floor f     [max(lo, f), max(hi, f(1+s))]   s = b; 0.20 for "equal" and "full"; 0 for "none"

"full" and "equal" are those of the AWS Architecture Blog (M. Brooker, *Exponential Backoff And Jitter*, 2015).
Keep in sync with docs/backoff.md.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .duration import LONGEST_DELAY, milliseconds

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["Backoff", "Delay", "Jitter", "Row", "Schedule", "timetable"]

#: A pair of fractions added to the wait, or one of the named modes.
Jitter = tuple[float, float] | Literal["full", "equal", "none"]

#: The waits in milliseconds, the last of which repeats, or ``(retries, exception, message) -> milliseconds``.
Schedule = tuple[int, ...] | Callable[[int, BaseException, Any], int]

#: How far "full" and "equal" spread above a Retry-After, as a fraction of it.
_SPREAD_ABOVE_FLOOR = 0.20

#: 1 ms · 2^30 is above `LONGEST_DELAY`: no larger power is ever needed, so none is ever computed.
_LARGEST_EXPONENT = 30


@dataclass(frozen=True, slots=True)
class Delay:
    """One wait, and how it came about.

    Parameters:
      milliseconds(int): The wait.
      strategy(str): ``exponential``, ``schedule``, ``exponential (schedule raised KeyError)``, …
      capped(bool): It would have been longer without `max_backoff` (or the 7 days that Dramatiq allows).
      floored(bool): It might have been shorter without the floor (a Retry-After).
    """

    milliseconds: int
    strategy: str
    capped: bool
    floored: bool


@dataclass(frozen=True, slots=True, init=False)
class Backoff:
    """The waits between the attempts at one message.

    The jitter ``(0.10, 0.20)`` adds 10 to 20 % to the wait and never leads above *max_backoff*.  So that the waits
    are spread at the cap as well, it is the plan that is kept down, to max_backoff / 1.20: at the cap the waits lie
    between 92 and 100 % of *max_backoff*.

    Example:
      >>> Backoff(min_backoff=1_000, max_backoff=60_000).bounds(3)
      (8800, 9600)

    Parameters:
      min_backoff(int | timedelta): Milliseconds before the first retry; doubled for each further one.  0 is a value.
      max_backoff(int | timedelta): Milliseconds that no wait exceeds, a Retry-After apart.  More than 7 days count
        as 7 days, as in Dramatiq.
      jitter(Jitter): Two fractions between 0 and 1, ``"full"``, ``"equal"`` or ``"none"``.
      schedule(Schedule): Explicit waits instead of the exponential ones, or a function that computes them.  One that
        raises, or returns no duration, is replaced by the exponential wait, and the `Delay` says so.

    Raises:
      TypeError: An argument is of the wrong type.
      ValueError: A negative duration, min_backoff above max_backoff, an unknown jitter mode, an empty schedule.
    """

    min_backoff: int
    max_backoff: int
    jitter: Jitter
    schedule: Schedule | None

    def __init__(
        self,
        min_backoff: int | timedelta = 15_000,
        max_backoff: int | timedelta = LONGEST_DELAY,
        jitter: Jitter = (0.10, 0.20),
        schedule: Sequence[int | timedelta] | Callable[[int, BaseException, Any], int] | None = None,
    ) -> None:
        low = milliseconds(min_backoff, "min_backoff")
        high = min(milliseconds(max_backoff, "max_backoff"), LONGEST_DELAY)
        if low > high:
            raise ValueError(
                f"min_backoff ({low} ms) must not be above max_backoff ({high} ms, at most 7 days): "
                "lower the first or raise the second"
            )
        object.__setattr__(self, "min_backoff", low)
        object.__setattr__(self, "max_backoff", high)
        object.__setattr__(self, "jitter", _jitter(jitter))
        object.__setattr__(self, "schedule", _schedule(schedule))

    def replacing(
        self,
        *,
        min_backoff: int | timedelta | None = None,
        max_backoff: int | timedelta | None = None,
        jitter: Jitter | None = None,
        schedule: Sequence[int | timedelta] | Callable[[int, BaseException, Any], int] | None = None,
    ) -> Backoff:
        """The same backoff with some parts replaced, as by an actor's or a message's options.

        Of *min_backoff* and *max_backoff* the one that is given wins: an actor with nothing but
        ``max_backoff=5_000`` brings the inherited 15 seconds down to 5, as it does in Dramatiq.

        Parameters:
          min_backoff, max_backoff, jitter, schedule: As in `Backoff`; what is None stays as it is.

        Returns:
          Backoff: The new backoff.

        Raises:
          TypeError, ValueError: As in `Backoff`.
        """
        low = self.min_backoff if min_backoff is None else min_backoff
        high = self.max_backoff if max_backoff is None else max_backoff
        if min_backoff is None:
            low = min(self.min_backoff, milliseconds(high, "max_backoff"))
        elif max_backoff is None:
            high = max(self.max_backoff, milliseconds(low, "min_backoff"))
        return Backoff(
            low,
            high,
            self.jitter if jitter is None else jitter,
            self.schedule if schedule is None else schedule,
        )

    def delay(
        self,
        retries: int,
        u: float,
        *,
        exception: BaseException | None = None,
        message: Any = None,
        floor: int | None = None,
    ) -> Delay:
        """The wait before the next attempt.

        Parameters:
          retries(int): How often the message was retried before; 0 after its first failure.
          u(float): The place in the window, from 0 to 1; usually a random number.
          exception(BaseException): What the attempt failed with, for a schedule that is a function.
          message: The message, for a schedule that is a function.
          floor(int): Milliseconds that the wait must not be shorter than (a Retry-After), even above *max_backoff*;
            at most 7 days.

        Returns:
          Delay: The wait.  Equal arguments give equal waits.
        """
        low, high, strategy, capped, floored = self._window(retries, exception, message, floor)
        # In this order a NaN counts as 0.
        place = min(max(0.0, u), 1.0)
        return Delay(low + int(place * (high - low)), strategy, capped, floored)

    def bounds(
        self,
        retries: int,
        *,
        exception: BaseException | None = None,
        message: Any = None,
        floor: int | None = None,
    ) -> tuple[int, int]:
        """The shortest and the longest wait that `delay` can give, in milliseconds.

        Parameters:
          retries, exception, message, floor: As in `delay`.

        Returns:
          tuple[int, int]: Both are within reach.
        """
        low, high, *_ = self._window(retries, exception, message, floor)
        return low, high

    def _window(
        self, retries: int, exception: BaseException | None, message: Any, floor: int | None
    ) -> tuple[int, int, str, bool, bool]:
        wish, strategy = self._plan(max(0, retries), exception, message)
        limit = float(self.max_backoff)
        if isinstance(self.jitter, tuple):
            below, above = self.jitter
            spread = above
            limit /= 1 + above
        else:
            below = {"full": -1.0, "equal": -0.5, "none": 0.0}[self.jitter]
            above = 0.0
            spread = 0.0 if self.jitter == "none" else _SPREAD_ABOVE_FLOOR
        plan = min(wish, limit)
        low, high = round(plan * (1 + below)), round(plan * (1 + above))
        capped, floored = wish > limit, False
        if floor is not None:
            bottom = min(max(0, floor), LONGEST_DELAY)
            capped = capped or floor > LONGEST_DELAY
            floored = bottom > low
            low = max(low, bottom)
            high = max(high, min(round(bottom * (1 + spread)), LONGEST_DELAY))
        return low, high, strategy, capped, floored

    def _plan(self, retries: int, exception: BaseException | None, message: Any) -> tuple[int, str]:
        """What to wait before cap and jitter, and where that comes from."""
        exponential = self.min_backoff << min(retries, _LARGEST_EXPONENT)
        if self.schedule is None:
            return exponential, "exponential"
        if isinstance(self.schedule, tuple):
            return self.schedule[min(retries, len(self.schedule) - 1)], "schedule"
        if exception is None:
            exception = Exception("no error: a timetable is being made")
        try:
            answer: object = self.schedule(retries, exception, message)
        except Exception as error:  # noqa: BLE001 - a user's function must not cost the message its retry
            return exponential, f"exponential (schedule raised {type(error).__name__})"
        try:
            return milliseconds(answer, "schedule"), "schedule"
        except TypeError:
            return exponential, f"exponential (schedule returned {type(answer).__name__})"
        except ValueError:
            return exponential, "exponential (schedule returned a number out of range)"


@dataclass(frozen=True, slots=True)
class Row:
    """One retry in a timetable; durations in milliseconds, attempts counted as taking no time.

    Parameters:
      retry(int): Its number; 1 is the second attempt.
      low, high(int): The bounds of the wait before it.
      total_low, total_high(int): The bounds of its distance from the first failure.
      strategy(str): As in `Delay`.
    """

    retry: int
    low: int
    high: int
    total_low: int
    total_high: int
    strategy: str


def timetable(backoff: Backoff, max_retries: int) -> tuple[Row, ...]:
    """When the retries of a message that always fails take place.

    Parameters:
      backoff(Backoff): The waits.  A schedule that is a function is called without a real exception or message.
      max_retries(int): The number of rows.

    Returns:
      tuple[Row, ...]: One row per retry.
    """
    rows: list[Row] = []
    total_low = total_high = 0
    for retries in range(max_retries):
        shortest, longest = backoff.delay(retries, 0.0), backoff.delay(retries, 1.0)
        total_low, total_high = total_low + shortest.milliseconds, total_high + longest.milliseconds
        rows.append(
            Row(retries + 1, shortest.milliseconds, longest.milliseconds, total_low, total_high, shortest.strategy)
        )
    return tuple(rows)


def _jitter(value: object) -> Jitter:
    if value == "full" or value == "equal" or value == "none":
        return value
    if isinstance(value, tuple | list) and len(value) == 2 and all(_is_number(part) for part in value):
        low, high = value
        if not 0 <= low <= high <= 1:
            raise ValueError(f"jitter=(a, b) needs 0 ≤ a ≤ b ≤ 1 (0.10 is 10 %), got {reprlib.repr(value)}")
        return float(low), float(high)
    choices = "'full', 'equal', 'none' or two fractions such as (0.10, 0.20)"
    wrong = ValueError if isinstance(value, str) else TypeError
    raise wrong(f"unknown jitter {reprlib.repr(value)}: write {choices}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _schedule(value: object) -> Schedule | None:
    if value is None or callable(value):
        return value
    if not isinstance(value, tuple | list):
        raise TypeError(
            "schedule must be a list of milliseconds such as [60_000, 300_000], or a function "
            f"(retries, exception, message) -> milliseconds, not {reprlib.repr(value)}"
        )
    if not value:
        raise ValueError("schedule is empty: give it at least one wait, or leave it out for exponential backoff")
    return tuple(milliseconds(entry, f"schedule[{index}]") for index, entry in enumerate(value))
