"""The matrix: each way of telling worker processes to stop, with each thing that a job may be at.

A `Cell` is one of them, `every_cell` is all of them, `pairwise` a small part in which each two values of two factors
still meet.  What must come of a cell is known beforehand: `expected` is a pure function.  Nothing is run here.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, fields
from typing import Final

__all__ = ["FACTORS", "Cell", "Expected", "every_cell", "expected", "pairwise"]

FACTORS: Final[dict[str, tuple[str | int, ...]]] = {
    "job": ("short", "long", "in C", "GIL held", "async short", "async long", "async blocking"),
    "times": ("once", "twice", "three times", "again later", "twice later"),
    "signal": ("TERM", "INT", "HUP"),
    "target": ("master", "worker", "group"),
    "broker": ("redis", "rabbitmq"),
    "processes": (1, 2),
}

#: How often a signal is sent, and whether the next one follows at once or when the first few seconds have passed.
TIMES: Final[dict[str, tuple[int, bool]]] = {
    "once": (1, False),
    "twice": (2, False),
    "three times": (3, False),
    "again later": (2, True),
    "twice later": (3, True),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of telling worker processes to stop."""

    job: str
    times: str
    signal: str
    target: str
    broker: str
    processes: int

    def __str__(self) -> str:
        return f"{self.job}, {self.signal} {self.times} to {self.target}, {self.broker}, {self.processes}"

    @property
    def ignored(self) -> bool:
        """Whether Dramatiq's worker processes ignore the signal: INT is the master's to pass on, as TERM."""
        return self.signal == "INT" and self.target == "worker"

    @property
    def reloads(self) -> bool:
        """Whether the master begins again when its workers have ended."""
        return self.signal == "HUP" and self.target != "worker"


@dataclass(frozen=True, slots=True)
class Expected:
    """What must come of a cell.

    Attributes:
      code(int): The exit code of a worker process in which the job was running, and so of the command.
      finished(bool): Whether a job that has begun finishes; otherwise its message goes back, retries unchanged.
      reached(bool): Whether the process can still hand anything back; otherwise its broker notices that it is gone.
    """

    code: int
    finished: bool
    reached: bool = True


_BY_JOB: Final[dict[str, Expected]] = {
    "short": Expected(0, finished=True),
    "long": Expected(0, finished=False),
    "in C": Expected(75, finished=False),
    "GIL held": Expected(1, finished=False, reached=False),
    "async short": Expected(0, finished=True),
    "async long": Expected(0, finished=False),
    "async blocking": Expected(75, finished=False),
}


def expected(cell: Cell) -> Expected:
    """What must come of a cell: however often, by which signal and at whom, only what the job is at makes a
    difference."""
    return _BY_JOB[cell.job]


def every_cell() -> list[Cell]:
    """All cells."""
    return [Cell(*values) for values in itertools.product(*_values())]  # type: ignore[arg-type]


def pairwise() -> list[Cell]:
    """A small part of the cells, always the same one: every value meets every value of every other factor, and every
    way of sending a signal is tried on every target."""
    candidates = every_cell()
    random.Random(0).shuffle(candidates)
    missing = set().union(*map(_meetings, candidates))
    chosen: list[Cell] = []
    while missing:
        best = max(candidates, key=lambda cell: len(missing & _meetings(cell)))
        missing -= _meetings(best)
        chosen.append(best)
    return chosen


def _values() -> list[tuple[str | int, ...]]:
    return [FACTORS[field.name] for field in fields(Cell)]


def _meetings(cell: Cell) -> set[tuple[object, ...]]:
    """Which values meet in a cell: each two of them, and the three that make a way of telling."""
    values = [(field.name, getattr(cell, field.name)) for field in fields(Cell)]
    return {*itertools.combinations(values, 2), ("told", cell.signal, cell.times, cell.target)}
