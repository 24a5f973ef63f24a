"""What happens in a simulation: arrivals, trouble, and how long a perfect policy would take.

Durations in milliseconds, rates per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STEP", "TROUBLES", "Phase", "Scenario", "herd", "trouble"]

#: The step in which a perfect policy is followed, and what happens is counted; in milliseconds.
STEP = 100
#: Jobs that arrive for so long arrive for ever.
_ENDLESS = 10**9
#: The step in which phases are told apart.
_FINE = 10


@dataclass(frozen=True, slots=True)
class Phase:
    """A time in which the downstream is not itself.

    Parameters:
      begins(int): When.
      ends(int): Until when.
      capacity(float): Its capacity, as a share of the ordinary one; 0 is an outage.
      latency(float): How many times longer an answer takes.
    """

    begins: int
    ends: int
    capacity: float = 0.0
    latency: float = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens.

    Parameters:
      name(str): What it is called.
      capacity(float): Requests per second that the downstream serves.
      arrivals(float): Jobs per second.
      lasts(int): How long jobs arrive.
      phases(tuple[Phase, ...]): What befalls the downstream; one after the other.
      rejection_cost(float): The work of turning a request away, as a share of that of serving it.
      permanent(float): The share of jobs that can never succeed.
      processes(int): Worker processes.
      threads(int): Worker threads of each.
      latency(int): How long a request takes besides waiting.
      shards(int): Among how many downstreams the capacity is divided.
      bad_shards(int): How many of them the phases befall.
      herd(int): Jobs that arrive at the very beginning, all at once.
      own_queue(bool): The queue is all for this downstream, so that it can be held; else messages are put off.
      delivery_step(int): The delay queue delivers what is due in batches, so far apart.
      seed(int): Of the random numbers.
    """

    name: str = "outage"
    capacity: float = 100.0
    arrivals: float = 75.0
    lasts: int = 130_000
    phases: tuple[Phase, ...] = (Phase(20_000, 45_000),)
    rejection_cost: float = 0.0
    permanent: float = 0.02
    processes: int = 10
    threads: int = 100
    latency: int = 20
    shards: int = 1
    bad_shards: int = 1
    herd: int = 0
    own_queue: bool = True
    delivery_step: int = 300
    seed: int = 1

    @property
    def recovery(self) -> int:
        """When the last trouble is over."""
        return max((phase.ends for phase in self.phases), default=0)

    @property
    def normal(self) -> float:
        """A backlog that is none: what arrives in half a second."""
        return max(1.0, self.arrivals * 0.5)

    @property
    def jobs(self) -> int:
        """How many jobs arrive, about."""
        return round(self.herd + self.arrivals * self.lasts / 1000)

    def ideal(self, arrivals: Callable[[float], float] | None = None) -> tuple[float, float]:
        """How long after the recovery the backlog is gone, and how long until all is done, under a perfect policy.

        The shards that trouble befalls and the others are followed apart, since neither can do the other's work.

        Parameters:
          arrivals(Callable): How many jobs arrive in the `STEP` milliseconds from a time on; those of the herd come at
            0.  None is exactly the planned number.

        Returns:
          tuple[float, float]: Milliseconds; the first is infinite if the backlog does not go before all is done.
        """
        planned = self.arrivals * STEP / 1000
        bad = self.bad_shards / self.shards
        ill = well = 0.0
        steady, time = math.inf, 0
        while True:
            if arrivals is not None:
                came = arrivals(time)
            else:
                came = (planned if time < self.lasts else 0.0) + (self.herd if time == 0 else 0)
            ill_can = sum(self.share_at(time + at) for at in range(0, STEP, _FINE)) * _FINE / STEP
            can = self.capacity * STEP / 1000
            ill = max(0.0, ill + bad * (came - can * ill_can))
            well = max(0.0, well + (1 - bad) * (came - can))
            time += STEP
            if time >= self.recovery and ill + well <= self.normal and steady == math.inf:
                steady = time - self.recovery
            if steady < math.inf and self.lasts >= _ENDLESS:
                return max(float(STEP), steady), math.inf
            if time >= max(self.lasts, self.recovery) and ill + well <= can / 2:
                return max(float(STEP), steady), max(float(STEP), time - self.recovery)

    def share_at(self, time: float) -> float:
        """The share of their capacity that the shards in trouble have at a time."""
        for phase in self.phases:
            if phase.begins <= time < phase.ends:
                return phase.capacity
        return 1.0

    def capacity_at(self, time: float) -> float:
        """What the downstream can do at a time, in requests per second."""
        bad = self.bad_shards / self.shards
        return self.capacity * (1 - bad + bad * self.share_at(time))


def trouble(base: Scenario, name: str) -> Scenario:
    """A scenario with another kind of trouble than an outage, of the same begin and about the same length.

    Parameters:
      base(Scenario): Where the rest comes from.
      name(str): One of `TROUBLES`.

    Returns:
      Scenario: The scenario.
    """
    begins, ends = base.phases[0].begins, base.recovery
    phases, shards = base.phases, base.shards
    if name == "brown-out":
        phases = (Phase(begins, ends, capacity=1.0, latency=10.0),)
    elif name == "flapping":
        phases = tuple(Phase(at, at + 2_000) for at in range(begins, ends + 4_000, 4_000))
    elif name == "half capacity":
        # It comes back at half for as long as it was away.
        phases = (Phase(begins, ends), Phase(ends, 2 * ends - begins, capacity=0.5))
    elif name == "one bad shard of four":
        shards = 4
    elif name != "outage":
        raise ValueError(f"unknown trouble {name!r}: one of {', '.join(TROUBLES)}")
    made = replace(base, name=name, phases=phases, shards=shards)
    return replace(made, lasts=max(made.lasts, round(made.recovery + 1.3 * _working_off(made))))


def _working_off(scenario: Scenario) -> float:
    """How long a perfect policy takes for the backlog while jobs go on arriving."""
    return replace(scenario, lasts=_ENDLESS).ideal()[0]


#: The kinds of trouble.
TROUBLES = ("outage", "brown-out", "flapping", "half capacity", "one bad shard of four")


def herd(base: Scenario, jobs: int) -> Scenario:
    """So many jobs at once, all of which fail the first time, at a downstream that is well at once."""
    return replace(
        base, name="herd", herd=jobs, arrivals=0.0, lasts=0, permanent=0.0, phases=(Phase(0, base.latency + 1),)
    )
