"""Running cells: every one has a process that dies in it, and a healthy one takes up what they left."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dramatiq import Message

from .cells import Cell, expected
from .world import Servers, World, world

__all__ = ["Outcome", "batches", "run_batch"]

#: How many cells share a healthy process, and how many die at once.
_TOGETHER = 12
_AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell.

    Parameters:
      calls(int): How often the gateway was called.
      charges(int): How often it charged.
      rows(int): How many rows were committed.
      runs(int): How often the actor was run.
      wrong(list[str]): What was not as expected, with all that is known; nothing if all was.
    """

    calls: int
    charges: int
    rows: int
    runs: int
    wrong: list[str]


def batches(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that run beside each other: of one store and broker, a few at a time."""

    def place(cell: Cell) -> tuple[str, str]:
        return cell.broker, cell.store

    groups = [list(group) for _, group in groupby(sorted(cells, key=place), place)]
    return [group[start : start + _TOGETHER] for group in groups for start in range(0, len(group), _TOGETHER)]


def run_batch(cells: Sequence[Cell], servers: Servers) -> dict[Cell, Outcome]:
    """Kill a process in every cell, have a healthy one take up what they left, and look what came of it."""
    with world(servers, cells[0].broker, cells[0].store, [str(cell) for cell in cells]) as here:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            messages = dict(zip(cells, pool.map(lambda cell: _killed(cell, here), cells), strict=True))
        here.open()
        with here.working(threads=4):
            here.wait_settled()
        return {cell: _outcome(cell, here, messages[cell]) for cell in cells}


def _sent(cell: Cell, here: World) -> Message[Any]:
    if cell.mode != "busy":
        return here.send(cell.mode, str(cell), queue=str(cell))
    message = here.send("key", str(cell), "interruptibly", queue=str(cell))
    here.again(message)
    return message


def _killed(cell: Cell, here: World) -> Message[Any]:
    stack = "stock" if cell.mode == "none" else "guard"
    return here.die(
        cell.point,
        lambda: _sent(cell, here),
        threads=1 + (cell.mode == "busy"),
        queues=[str(cell)],
        KILLS_STACK=stack,
    )


def _outcome(cell: Cell, here: World, message: Message[Any]) -> Outcome:
    job, due, wrong = str(cell), expected(cell), []
    made = here.gateway.charges().get(job, [])
    calls, rows = here.gateway.calls()[job], here.rows()[job] if here.servers.postgres else 0
    if calls not in due.calls:
        wrong.append(f"{calls} calls of the gateway, not {due.calls}")
    if len(made) not in due.charges:
        wrong.append(f"{len(made)} charges, not {due.charges}")
    if rows != due.rows:
        wrong.append(f"{rows} rows, not {due.rows}")
    letters = tuple(each.reason for each in here.letters() if each.args and each.args[0] == job)
    if letters != due.letters:
        wrong.append(f"dead letters {letters}, not {due.letters}")
    if not due.letters and (result := here.result(message)) not in made:
        wrong.append(f"the result is {result!r}, and the charges are {made}")
    if cell.mode != "none":
        record, state = here.record(message), "parked" if due.letters else "done"
        if record is None or record.state != state or record.crashes != due.crashes:
            wrong.append(f"the record is {record}, not {state} after {due.crashes} crashes")
    if wrong:
        wrong.append(here.story)
    return Outcome(calls, len(made), rows, here.runs(job), wrong)
