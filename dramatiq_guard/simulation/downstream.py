"""The downstream: so many requests per second, and a cost for each request that it turns away.

It works through a queue of bounded length.  A request that finds the queue full is turned away at once, but has cost a
share of a served one's work (*rejection_cost*): above zero, overload lowers what gets done, and a collapse outlives its
cause.  What is owed for rejections is bounded by a second of work, as the kernel bounds the connections that wait.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scenario import Phase

__all__ = ["Downstream"]

#: The length of the queue in milliseconds of work, and in requests at least.
_QUEUE, _SHORTEST_QUEUE = 100.0, 10.0


class Downstream:
    """One downstream, or one shard of it.

    Parameters:
      capacity(float): Requests per second.
      rejection_cost(float): The work of turning a request away, as a share of that of serving it.
      latency(float): Milliseconds that a request takes besides its wait in the queue.
      phases(Sequence[Phase]): What befalls it.
    """

    def __init__(self, capacity: float, rejection_cost: float, latency: float, phases: Sequence[Phase]) -> None:
        self._per_ms = capacity / 1000
        self._cost = rejection_cost
        self._latency = latency
        self._longest = max(_SHORTEST_QUEUE, self._per_ms * _QUEUE)
        changes = {0.0: (1.0, 1.0)}
        for phase in phases:
            changes[float(phase.begins)] = (phase.capacity, phase.latency)
            changes.setdefault(float(phase.ends), (1.0, 1.0))
        self._times = sorted(changes)
        self._conditions = [changes[time] for time in self._times]
        self._owed = 0.0
        self._at = 0.0

    def answer(self, now: float) -> tuple[bool, float]:
        """Take a request.

        Parameters:
          now(float): The time in milliseconds; never before that of the last request.

        Returns:
          tuple[bool, float]: Whether it is served, and how many milliseconds the answer takes.
        """
        capacity, slowness = self._conditions[bisect_right(self._times, now) - 1]
        self._work(now)
        if capacity == 0:
            return False, self._latency
        if self._owed + 1 > self._longest + 1e-9:
            self._owed = min(self._owed + self._cost, self._longest + 1000 * self._per_ms)
            return False, self._latency
        self._owed += 1
        return True, self._latency * slowness + self._owed / (self._per_ms * capacity)

    def _work(self, now: float) -> None:
        """Work off what is owed."""
        at = self._at
        while at < now:
            index = bisect_right(self._times, at) - 1
            until = min(now, self._times[index + 1]) if index + 1 < len(self._times) else now
            self._owed = max(0.0, self._owed - (until - at) * self._per_ms * self._conditions[index][0])
            at = until
        self._at = now
