"""The one source of time and randomness, so that tests can put their own.

Everything that needs to know the time, to wait, or to roll dice asks here; nothing else of the library imports `time`
or `random`.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from threading import Event

__all__ = ["Clock", "SystemClock", "booted_at", "monotonic", "now", "uniform", "unique", "use", "wait"]


class Clock(Protocol):
    """Where time and randomness come from."""

    def now(self) -> int:
        """The UNIX time in milliseconds."""
        ...

    def monotonic(self) -> int:
        """Milliseconds on a clock that never goes back; only differences mean anything."""
        ...

    def uniform(self) -> float:
        """A random number in [0, 1)."""
        ...

    def wait(self, event: Event, milliseconds: int) -> bool:
        """Wait until the event is set, for so many milliseconds at most; say whether it is set."""
        ...


class SystemClock:
    """The real thing.  The generator is Python's own, which the dramatiq command seeds anew in every worker."""

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def uniform(self) -> float:
        return random.random()  # noqa: S311 - jitter is no secret

    def wait(self, event: Event, milliseconds: int) -> bool:
        return event.wait(max(0, milliseconds) / 1000)


_clock: Clock = SystemClock()


def now() -> int:
    """The UNIX time in milliseconds."""
    return _clock.now()


def monotonic() -> int:
    """Milliseconds on a clock that never goes back."""
    return _clock.monotonic()


def uniform() -> float:
    """A random number in [0, 1)."""
    return _clock.uniform()


def wait(event: Event, milliseconds: int) -> bool:
    """Wait for an event, for so many milliseconds at most; say whether it is set."""
    return _clock.wait(event, milliseconds)


#: Nobody's `random.seed` reaches it, and each process has its own.
_ids: Final = random.Random()  # noqa: S311 - an id is no secret
os.register_at_fork(after_in_child=_ids.seed)


def unique() -> str:
    """An id that no other has, in 32 hexadecimal digits.

    Asking the system for it each time, as uuid4 does, lets other threads have the interpreter, which is dearer by far.
    """
    return f"{_ids.getrandbits(128):032x}"


def booted_at() -> int:
    """When this machine was booted, in UNIX milliseconds; always by its own clock."""
    return (time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) // 1_000_000


@contextmanager
def use(clock: Clock) -> Iterator[None]:
    """Put another clock in place, for tests.

    Parameters:
      clock(Clock): The clock that everything uses inside the ``with`` block.
    """
    global _clock  # noqa: PLW0603 - the one place where the process's clock is kept
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
