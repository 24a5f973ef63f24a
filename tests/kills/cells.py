"""The matrix: where a worker is killed, with each way of guarding, on each store and broker.

What must come of a cell is known beforehand: `expected` is a pure function.  Nothing is run here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["POINTS", "SOME", "Cell", "Expected", "every_cell", "expected"]

#: The modes, and the points that a message of each passes, in their order.
POINTS: Final[dict[str, tuple[str, ...]]] = {
    "none": ("after-effect", "before-ack", "after-ack"),
    "lease": (
        *("before-claim", "after-claim", "after-effect", "before-complete", "after-complete", "before-ack"),
        "after-ack",
    ),
    "key": (
        *("before-claim", "after-claim", "after-effect", "before-complete", "after-complete", "before-ack"),
        "after-ack",
    ),
    "step": (
        *("before-claim", "after-claim", "before-step", "after-effect", "in-step", "after-step", "before-complete"),
        *("after-complete", "before-ack", "after-ack"),
    ),
    "atomic": (
        *("before-claim", "after-claim", "before-step", "after-effect", "in-step", "after-step", "before-atomic"),
        *("before-commit", "after-commit", "after-complete", "before-ack", "after-ack"),
    ),
    "inbox": (
        *("before-claim", "after-claim", "after-effect", "before-commit", "after-commit", "before-ack", "after-ack"),
    ),
    "park": ("before-claim", "after-claim", "after-effect", "before-complete", "after-complete", "before-ack"),
    "retried": ("before-release", "after-release", "decided", "before-retry", "after-retry"),
    "busy": ("before-defer", "after-defer"),
}

#: Where an effect has happened and nothing says so.
_UNRECORDED: Final = {
    "none": {"after-effect", "before-ack"},
    "lease": {"after-effect", "before-complete"},
    "key": {"after-effect", "before-complete"},
    "step": {"after-effect", "in-step"},
    "atomic": {"after-effect", "in-step"},
    "inbox": {"after-effect", "before-commit"},
    "retried": {"before-release", "after-release", "decided", "before-retry"},
}

#: Where nobody holds the key, or it is done.
_NOT_HELD: Final = {
    *("before-claim", "after-complete", "after-commit", "before-ack", "after-ack"),
    *("after-release", "decided", "before-retry", "after-retry"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One worker that is killed once.

    Parameters:
      mode(str): How the effect is guarded.
      point(str): Where the worker is killed.
      store(str): ``redis`` or ``postgresql``.
      broker(str): ``redis`` or ``rabbitmq``.
    """

    mode: str
    point: str
    store: str
    broker: str

    def __str__(self) -> str:
        return f"{self.mode}-{self.point}-{self.store}-{self.broker}"


@dataclass(frozen=True, slots=True)
class Expected:
    """What must come of a cell.

    Parameters:
      calls(tuple[int, ...]): How often the gateway was called; it is known but for what a broker may have heard last.
      charges(tuple[int, ...]): How often it charged.
      rows(int): How many rows were committed.
      crashes(int): How many takeovers the record knows of.
      letters(tuple[str, ...]): The reasons of its dead letters.
    """

    calls: tuple[int, ...]
    charges: tuple[int, ...]
    rows: int
    crashes: int
    letters: tuple[str, ...] = ()


def expected(cell: Cell) -> Expected:
    """What must come of a cell."""
    calls: tuple[int, ...] = (1 + (cell.mode == "retried") + (cell.point in _UNRECORDED.get(cell.mode, ())),)
    if cell.mode == "busy":
        calls = (1, 2)  # a duplicate may be put off before its twin has had the effect, or after it
    if cell == Cell("retried", "after-retry", cell.store, "rabbitmq"):
        calls = (2, 3)  # both the retry and what it is a retry of are there; the order decides whether both run
    if cell == Cell("none", "after-ack", cell.store, "rabbitmq"):
        calls = (1, 2)  # whether the ack was still sent is not known
    if cell.mode == "park" and cell.point not in _NOT_HELD:
        calls = (int(cell.point != "after-claim"),)
        return Expected(calls, calls, 0, 1, ("outcome_unknown",))
    held = cell.mode not in ("none", "inbox") and cell.point not in _NOT_HELD
    return Expected(
        calls,
        calls if cell.mode in ("none", "lease") else (1,),
        int(cell.mode in ("atomic", "inbox")),
        int(held),
    )


def every_cell() -> list[Cell]:
    """All of them."""
    return [
        Cell(mode, point, store, broker)
        for broker in ("redis", "rabbitmq")
        for store in ("redis", "postgresql")
        for mode, points in POINTS.items()
        for point in points
        if store == "postgresql" or mode not in ("atomic", "inbox")
        if store == "redis" or mode != "none"
    ]


#: A few of them: every way of guarding on every broker, at the points where the ways differ.
SOME: Final = [
    Cell("none", "after-effect", "redis", "redis"),
    Cell("none", "before-ack", "redis", "rabbitmq"),
    Cell("lease", "after-effect", "redis", "rabbitmq"),
    Cell("lease", "before-ack", "postgresql", "redis"),
    Cell("key", "before-complete", "redis", "redis"),
    Cell("key", "after-effect", "postgresql", "rabbitmq"),
    Cell("step", "in-step", "redis", "rabbitmq"),
    Cell("step", "after-step", "postgresql", "redis"),
    Cell("atomic", "before-commit", "postgresql", "redis"),
    Cell("atomic", "after-commit", "postgresql", "rabbitmq"),
    Cell("inbox", "before-commit", "postgresql", "redis"),
    Cell("inbox", "after-effect", "postgresql", "rabbitmq"),
    Cell("retried", "after-release", "redis", "redis"),
    Cell("busy", "after-defer", "redis", "rabbitmq"),
]
