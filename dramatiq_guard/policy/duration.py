"""Durations as users write them, in the one unit that the library keeps: integer milliseconds.

It is the lowest module of the library and must not know what a duration is for.
"""

from __future__ import annotations

import math
import reprlib
from datetime import timedelta

__all__ = ["LONGEST_DELAY", "milliseconds"]

#: The longest delay Dramatiq accepts for a retry: 7 days, in milliseconds.
LONGEST_DELAY = 604_800_000


def milliseconds(value: object, name: str) -> int:
    """Read a duration.

    Parameters:
      value(int | float | timedelta): A number of milliseconds, or a timedelta.  Fractions of one are dropped.
      name(str): What the user calls it, for the error.

    Returns:
      int: Milliseconds, 0 or more.

    Raises:
      TypeError: It is neither a number nor a timedelta.
      ValueError: It is negative, infinite or not a number.
    """
    if isinstance(value, timedelta):
        number: int | float = value // timedelta(milliseconds=1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    else:
        raise TypeError(f"{name} must be milliseconds (int) or a timedelta, not {reprlib.repr(value)}")
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number of milliseconds, got {number}")
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {reprlib.repr(number)} ms")
    return int(number)
