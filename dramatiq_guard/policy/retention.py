"""How long the record of a finished key is kept: longer than any copy of its message can sleep.

Whichever copy arrives after the work is done ends there, so what counts is the longest *single* sleep of a copy, not
its whole life.  Sleeps that no setting tells of must be given: delays that senders or errors ask for.  What no number
covers is a copy that a worker keeps unacked until it restarts; only a limit on the age of messages does.

The waits are the library's, with its jitter: (0.10, 0.20) by default.  Dramatiq's own double the wait at most, which is
``Backoff(jitter=(0, 1))`` here.  This module must not know actors, brokers or stores.
"""

from __future__ import annotations

from .backoff import Backoff

__all__ = ["DAY", "LONGEST_DEFERRAL", "REDELIVERY", "longest_sleep", "retention_for", "worst_life"]

#: 24 hours, in milliseconds: what a record is kept for at least, since people repeat things on the same day.
DAY = 86_400_000

#: The longest wait of a deferral that did not ask for another: a minute, and the most jitter that is put on one.
LONGEST_DEFERRAL = 72_000

#: How long a broker may take to give a dead worker's message to another.  On Redis it is the heartbeat timeout and a
#: draw, which together took up to 28 minutes; RabbitMQ takes back what is not acked within 30.
REDELIVERY = 3_600_000

#: From here on the exponential wait does not grow: 1 ms · 2^30 is above the longest delay that there is.
_STEADY = 31


def longest_sleep(backoff: Backoff, max_retries: int | None, *, retry_for: int | None = None, asked: int = 0) -> int:
    """The longest time that one copy of a message lies before it is due.

    A schedule that is a function is not asked: it counts as `max_backoff`, by default 7 days.

    Parameters:
      backoff(Backoff): The waits between the attempts.
      max_retries(int | None): Retries after the first attempt; None is unlimited.
      retry_for(int | None): Milliseconds after the first failure in which a retry must start.
      asked(int): The longest delay in milliseconds that a sender (``delay=``), an error (``Retryable(delay=…)``,
        ``Defer(delay=…)``) or a server (Retry-After) asks for.

    Returns:
      int: Milliseconds.
    """
    wait = max((wait for _, wait in _waits(backoff, max_retries)), default=0)
    if retry_for is not None:
        wait = min(wait, retry_for)
    return max(wait, LONGEST_DEFERRAL, asked, _spread(backoff, asked))


def worst_life(
    backoff: Backoff,
    max_retries: int | None,
    *,
    retry_for: int | None = None,
    asked: int = 0,
    max_deferrals: int | None = 0,
) -> int | None:
    """The longest time between the first attempt at a message and its last, attempts counted as taking no time.

    Parameters:
      backoff, max_retries, retry_for: As in `longest_sleep`.
      asked(int): As there, but without a sender's delay, which is over before the first attempt.
      max_deferrals(int | None): How often it may be put off; None is unlimited.

    Returns:
      int | None: Milliseconds; None if nothing limits it.
    """
    asked = _spread(backoff, asked)
    limits = [] if retry_for is None else [retry_for]
    if max_retries is not None:
        limits.append(sum(count * max(wait, asked) for count, wait in _waits(backoff, max_retries)))
    if not limits or max_deferrals is None:
        return None
    return min(limits) + max_deferrals * max(LONGEST_DEFERRAL, asked)


def retention_for(longest: int, *, floor: int = DAY, redelivery: int = REDELIVERY) -> int:
    """How long to keep the record of a finished key where the user did not say it.

    It is a sum, since the worker that gets a copy after its longest sleep may die of something before it has asked for
    the key.

    Parameters:
      longest(int): The longest sleep of a copy in milliseconds, or how long dead letters are kept if their replays are
        to be covered.
      floor(int): The least.
      redelivery(int): How long the broker may take to notice that a worker died.

    Returns:
      int: Milliseconds.  What a user chose is too short only if it is below *longest* itself.
    """
    return max(floor, longest + redelivery)


def _spread(backoff: Backoff, asked: int) -> int:
    """A wait that an error asked for, with the jitter that is put on it."""
    return Backoff(0, jitter=backoff.jitter).bounds(0, floor=asked)[1]


def _waits(backoff: Backoff, max_retries: int | None) -> list[tuple[int, int]]:
    """How many waits there are and how long each is at most, those that are all alike in one."""
    if max_retries is not None and max_retries <= 0:
        return []
    if callable(backoff.schedule):
        return [(max_retries or 1, backoff.max_backoff)]
    steady = _STEADY if backoff.schedule is None else len(backoff.schedule)
    count = steady if max_retries is None else min(max_retries, steady)
    last = 0 if max_retries is None else max_retries - count
    waits = [(1, backoff.bounds(retries)[1]) for retries in range(count)]
    return waits if not last else [*waits, (last, backoff.bounds(steady)[1])]
