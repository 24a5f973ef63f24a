"""From a seed to a schedule: what goes wrong in it follows from the seed alone."""

from __future__ import annotations

from .world import Faults, World

#: The mixes of faults, which seeds take in turns.
MIXES = (
    Faults(lost_request=0.0, lost_reply=0.10, outages=0),
    Faults(lost_request=0.05, lost_reply=0.05, outages=2),
    Faults(lost_request=0.02, lost_reply=0.02, outages=1, kill=0.02),
    Faults(lost_request=0.0, lost_reply=0.0, outages=0, kill=0.05),
    Faults(lost_request=0.20, lost_reply=0.20, outages=3),
)


def schedule(seed: int) -> World:
    """Run the schedule of a seed."""
    world = World(seed, MIXES[seed % len(MIXES)])
    world.run()
    return world


def check(world: World) -> list[str]:
    """What it did not keep."""
    return world.complaints()


def broken(first: int, count: int) -> list[tuple[int, list[str]]]:
    """The seeds from *first* on whose schedules break a promise, and which."""
    return [(seed, complaints) for seed in range(first, first + count) if (complaints := check(schedule(seed)))]
