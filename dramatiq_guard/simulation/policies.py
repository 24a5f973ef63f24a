"""What workers do about failures: the policies that are compared, by name.

Each has a backoff for its retries, and may have a breaker.  Dramatiq's own backoff is Dramatiq's own function; every
other is `policy.backoff`.  The variants of the breaker exist for comparison only, and are made here of the real one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dramatiq.common import compute_backoff

from ..policy.backoff import Backoff
from ..policy.breaker import Lease, Limits, Mode, Report, State, step

if TYPE_CHECKING:
    from collections.abc import Callable

    from .scenario import Scenario

__all__ = ["POLICIES", "Oracle", "Policy", "Shared", "Sharing", "Unpaced"]

_WEEK = 604_800_000


class Sharing(enum.Enum):
    """Who shares a breaker."""

    NONE = "none"
    ALL = "all"
    PROCESS = "process"
    UNPACED = "unpaced"
    ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class Policy:
    """What workers do.

    Parameters:
      name(str): What it is called on the command line and in files.
      title(str): For people.
      backoff(Backoff | None): The waits before retries; None is Dramatiq's own function.
      stock(tuple[int, int]): Its `min_backoff` and `max_backoff`, where it is Dramatiq's own.
      sharing(Sharing): The breaker.
    """

    name: str
    title: str
    backoff: Backoff | None = None
    stock: tuple[int, int] = (15_000, _WEEK)
    sharing: Sharing = Sharing.NONE

    def delay(self, retries: int, u: float) -> int:
        """Milliseconds before a retry."""
        if self.backoff is None:
            return compute_backoff(retries, factor=self.stock[0], max_backoff=self.stock[1])[1]
        return self.backoff.delay(retries, u).milliseconds


def _patient(jitter: tuple[float, float] | str = (0.10, 0.20)) -> Backoff:
    return Backoff(1_000, 10_000, jitter=jitter)  # type: ignore[arg-type]


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("guard", "dramatiq-guard: shared breaker, paced", _patient(), sharing=Sharing.ALL),
        Policy("stock", "Dramatiq, 15 s … 7 d"),
        Policy("tuned", "Dramatiq, 1 s … 10 s", stock=(1_000, 10_000)),
        Policy("none", "1 s … 10 s, no jitter", _patient("none")),
        Policy("added", "1 s … 10 s, 10–20 % added", _patient()),
        Policy("equal", "1 s … 10 s, equal jitter", _patient("equal")),
        Policy("full", "1 s … 10 s, full jitter", _patient("full")),
        Policy("unpaced", "shared breaker without pacing", _patient(), sharing=Sharing.UNPACED),
        Policy("apart", "paced, one breaker per process", _patient(), sharing=Sharing.PROCESS),
        Policy("oracle", "oracle: knows outage and capacity", _patient(), sharing=Sharing.ORACLE),
    )
}


class Shared:
    """The record of one breaker, and who may change it: what a store is to real processes.

    Parameters:
      limits(Limits): How it judges.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.state = State()
        self.reports = 0
        #: Called at each change of mode, with the time and the mode.
        self.watch: Callable[[int, Mode], None] = lambda _now, _mode: None

    def exchange(self, report: Report, now: int) -> Lease:
        """Take a report, and answer it."""
        mode = self.state.mode
        self.state, lease = step(self.limits, self.state, report, now)
        self.reports += 1
        if self.state.mode is not mode:
            self.watch(now, self.state.mode)
        return lease


class Unpaced(Shared):
    """The breaker that everybody knows: after a probe that succeeds, everything is let through."""

    def exchange(self, report: Report, now: int) -> Lease:
        lease = super().exchange(report, now)
        if self.state.mode is Mode.RECOVERING:
            self.state = replace(self.state, mode=Mode.CLOSED, learned=replace(self.state.learned, bad=0))
            return Lease(Mode.CLOSED, self.state.since, look=lease.look)
        if lease.mode is Mode.OPEN:
            return replace(lease, latest=max(lease.soonest + 1, 10_000))
        return lease


class Oracle(Shared):
    """The limit of what can be had: lets through what the downstream can do, at every moment.

    Parameters:
      limits(Limits): How often processes ask.
      scenario(Scenario): What it knows beforehand.
    """

    def __init__(self, limits: Limits, scenario: Scenario) -> None:
        super().__init__(limits)
        self._scenario = scenario
        self._recovers = State(mode=Mode.RECOVERING, since=1, hungry_at=0)
        self.state = self._recovers

    def exchange(self, report: Report, now: int) -> Lease:
        self.reports += 1
        capacity = self._scenario.capacity_at(now)
        known = replace(
            self.state,
            rate=max(capacity, 0.001),
            mode=Mode.RECOVERING,
            since=1,
            ceiling=1e9,
            cut_at=now,
            hungry_at=-1_000,
            recent=replace(self.state.recent, bad=0),
            trial=replace(self.state.trial, bad=0),
            opened_at=self._scenario.phases[0].begins,
        )
        limits = replace(self.limits, patience=10**9)
        told = replace(report, bad=0, since=1)
        self.state, lease = step(limits, known, told, now)
        if not capacity:
            apart = lease.apart * 0.001 / self._scenario.capacity
            until = next(phase.ends for phase in self._scenario.phases if phase.begins <= now < phase.ends)
            return replace(lease, tokens=0, apart=apart, soonest=max(lease.soonest, until - now), latest=10**7)
        return replace(lease, latest=10**7)
