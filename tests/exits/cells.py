"""Running a cell of the matrix, and holding what came of it against what was expected."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from tests.support.waiting import wait_until

from .matrix import TIMES, Cell, expected
from .queues import Lying
from .running import Run, running

__all__ = ["AT_ONCE", "Outcome", "Servers", "run_cell"]

#: How many cells to run at once.
AT_ONCE = 4 * (os.cpu_count() or 1)

#: Seconds between two signals that are not one: more than the two that count as one, less than the hard deadline.
_LATER = 2.4
_AT_ONCE = 0.05

#: Seconds after which a process that has not ended is one that does not end.
_NEVER = 30.0


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the brokers are."""

    redis: str
    rabbitmq: str

    def url(self, kind: str) -> str:
        return self.redis if kind == "redis" else self.rabbitmq


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell.

    Attributes:
      wrong(list[str]): What was not as expected, with the log; nothing if all was.
      took(int): Milliseconds from the first signal until the last worker process left, as it said itself; 0 where none
        could say anything.
    """

    wrong: list[str]
    took: int


def run_cell(cell: Cell, servers: Servers) -> Outcome:
    """Run a cell, and hold what came of it against what was expected."""
    with running(
        cell.broker,
        servers.url(cell.broker),
        servers.redis,
        processes=cell.processes,
        measured=expected(cell).finished,
    ) as run:
        try:
            wrong = _run(cell, run)
        except AssertionError as error:
            wrong = [str(error)]
        if wrong:
            wrong.append(f"the ledger:\n{run.ledger.path.read_text()}\nthe log:\n{run.workers.log}")
        return Outcome(wrong, max(run.took[: cell.processes], default=0))


def _run(cell: Cell, run: Run) -> list[str]:
    due = expected(cell)
    jobs = 4 * cell.processes + 2
    for number in range(jobs):
        run.send(cell.job, f"job-{number}", max_retries=(0, 3)[number % 2])
    for number in range(2):
        run.send("short", f"delayed-{number}", delay=600_000, max_retries=0)
    run.wait_begun()
    if cell.reloads:
        run.ledger.let_all_be_fast()
    there = _tell(cell, run)
    if cell.ignored:
        run.signal("TERM", "master")
    codes = []
    if cell.reloads:
        _wait_reloaded(cell, run, there)
        codes = run.left[: cell.processes]
        wait_until(
            lambda: len(run.ledger.keys("finished")) == jobs,
            _NEVER,
            lambda: f"the end of all jobs after the reload; the log:\n{run.workers.log}",
        )
        run.signal("TERM", "master")
    code = run.workers.wait(_NEVER)
    wrong = []
    if code != (0 if cell.reloads else due.code):
        wrong.append(f"the exit code was {code}, not {due.code}")
    if not cell.reloads:
        codes = run.left
    if due.reached and (len(codes) != cell.processes or due.code not in codes or set(codes) - {0, due.code}):
        wrong.append(f"the worker processes left with {codes}, not with {due.code}")
    return wrong + _accounts(cell, run, run.settled(jobs + 2), jobs)


def _accounts(cell: Cell, run: Run, lying: Lying, jobs: int) -> list[str]:
    """Hold what was finished and what lies in the broker against each other."""
    due = expected(cell)
    wrong = []
    began, finished = run.ledger.keys("began"), run.ledger.keys("finished")
    keys = [*(f"job-{number}" for number in range(jobs)), "delayed-0", "delayed-1"]
    for key in keys:
        if finished[key] + lying.all[key] != 1:
            wrong.append(f"{key} was finished {finished[key]} times and lies in the broker {lying.all[key]} times")
    if due.finished and +(began - finished):
        wrong.append(f"these were begun and not finished: {dict(began - finished)}")
    if not due.finished and not cell.reloads and finished:
        wrong.append(f"these were finished: {dict(finished)}")
    for message in (*lying.waiting, *lying.delayed, *lying.held):
        if message.options.get("retries"):
            wrong.append(f"{message.args[0]} has burnt {message.options['retries']} retries")
    if sorted(message.args[0] for message in lying.delayed) != ["delayed-0", "delayed-1"] and due.reached:
        wrong.append(f"of the delayed messages these are back: {[message.args[0] for message in lying.delayed]}")
    if lying.dead or run.letter_count():
        wrong.append(f"{len(lying.dead)} messages died, and {run.letter_count()} letters were written")
    if lying.held and due.reached:
        wrong.append(f"left in ack sets: {[message.args[0] for message in lying.held]}")
    return wrong


def _tell(cell: Cell, run: Run) -> list[int]:
    """Send the signals; give the worker processes that were there at the last one."""
    often, later = TIMES[cell.times]
    there: list[int] = []
    for number in range(often):
        if number:
            time.sleep(_LATER if later else _AT_ONCE)
            if later and not set(there) & set(run.workers.alive):
                # Between its end and the handlers of its next life the master would simply die of the signal; and
                # where there is no next life, nobody is left to be told.
                if not cell.reloads:
                    break
                _wait_reloaded(cell, run, there)
        there = run.workers.pids
        run.signal(cell.signal, cell.target)
    return there


def _wait_reloaded(cell: Cell, run: Run, gone: list[int]) -> None:
    """Wait until these worker processes have been replaced."""

    def reloaded() -> bool:
        alive = set(run.workers.alive)
        now = run.workers.pids
        return not alive & set(gone) and len(now) >= len(gone) + cell.processes and set(now[-cell.processes :]) <= alive

    wait_until(reloaded, _NEVER, lambda: f"others in place of the processes {gone}; the log:\n{run.workers.log}")
