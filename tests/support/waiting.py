"""Waiting for a condition instead of for a time.

A test never sleeps and hopes: it says what it waits for, for how long at most, and how to describe what it saw when
that did not come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until"]

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    timeout: float = 10.0,
    describe: str | Callable[[], object] = "the condition",
    *,
    interval: float = 0.02,
) -> T:
    """Poll `condition` until it gives something true.

    Parameters:
      condition(Callable[[], T]): What to wait for.
      timeout(float): The number of seconds to wait at most.
      describe(str | Callable[[], object]): What was waited for, or a function called at the deadline whose result
        says what was seen instead (a log, a count).
      interval(float): The number of seconds between two tries.

    Returns:
      T: The first true value.

    Raises:
      AssertionError: At the deadline; says what was waited for and the last value.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            seen = describe() if callable(describe) else describe
            raise AssertionError(f"waited {timeout:g} s in vain for: {seen} (last value: {value!r})")
        time.sleep(interval)
    return value
