"""Worker processes at the jobs of `app`, and the ledger of what these did."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dramatiq_guard.stores.connect import connect
from tests.support.waiting import wait_until
from tests.support.workers import Workers

from .queues import Broker, Lying, RabbitMQ, Redis

__all__ = ["HARD", "HEARTBEAT", "SOFT", "Ledger", "Run", "running"]

#: Deadlines of a shutdown, and Redis's heartbeat timeout, in milliseconds.
SOFT, HARD, HEARTBEAT = 1_500, 4_000, 3_000

_LEFT = re.compile(r"The worker process leaves: reason=.*? code=(?P<code>\d+) .* took=(?P<took>\d+) ms")


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the jobs wrote down: a line each for what, of which job, in which process."""

    path: Path

    def lines(self, what: str) -> list[tuple[str, int]]:
        """The key and the process of each line of a kind, in order."""
        lines = (line.rsplit(" ", 2) for line in self.path.read_text().splitlines())
        return [(key, int(pid)) for noted, key, pid in lines if noted == what]

    def keys(self, what: str) -> Counter[str]:
        """How often each job wrote a line of a kind."""
        return Counter(key for key, _ in self.lines(what))

    def let_all_be_fast(self) -> None:
        """Have every job that begins from now on end at once."""
        self.path.with_name(f"{self.path.name}.fast").touch()


@dataclass(slots=True)
class Run:
    """One `dramatiq` command under test, its broker and its ledger."""

    broker: Broker
    ledger: Ledger
    letters: Any
    environment: dict[str, str]
    workers: Workers

    def send(self, kind: str, key: str, **options: Any) -> None:
        """Send a job of a kind."""
        self.broker.send("ajob" if kind.startswith("async") else "job", key, kind, **options)

    def wait_begun(self, jobs: int = 1, timeout: float = 30) -> None:
        """Wait until so many jobs have begun."""
        self.wait_noted("began", jobs, timeout)

    def wait_noted(self, what: str, jobs: int = 1, timeout: float = 30) -> None:
        """Wait until so many jobs have written a line of a kind."""
        wait_until(
            lambda: len(self.ledger.lines(what)) >= jobs,
            timeout,
            lambda: f"{jobs} jobs that {what}: {self.ledger.path.read_text()!r}; the log:\n{self.workers.log}",
        )

    def process_of_a_job(self) -> int:
        """A worker process in which a job has begun."""
        return self.ledger.lines("began")[0][1]

    def signal(self, name: str, target: str) -> None:
        """Send a signal to the master, to one worker process that has begun a job, or to the whole group."""
        signum = getattr(signal, f"SIG{name}")
        with contextlib.suppress(ProcessLookupError):
            if target == "group":
                os.killpg(self.workers.pid, signum)
            elif target == "worker":
                os.kill(self.process_of_a_job(), signum)
            else:
                os.kill(self.workers.pid, signum)

    @property
    def left(self) -> list[int]:
        """The codes with which worker processes said that they leave, in order."""
        return [int(found["code"]) for found in _LEFT.finditer(self.workers.log)]

    @property
    def took(self) -> list[int]:
        """How long, in milliseconds, worker processes said that they took to leave, in order."""
        return [int(found["took"]) for found in _LEFT.finditer(self.workers.log)]

    def settled(self, planned: int, timeout: float = 10) -> Lying:
        """What lies in the broker once everything that was planned is either finished or there."""
        seen: list[Lying] = []

        def complete() -> bool:
            seen[:] = [self.broker.look()]
            return seen[0].all.total() + len(self.ledger.keys("finished")) >= planned

        # A moment, since RabbitMQ takes back what a closed connection held when it gets round to it.
        with contextlib.suppress(AssertionError):
            wait_until(complete, timeout, interval=0.1)
        return seen[0]

    def letter_count(self) -> int:
        """How many dead letters there are."""
        return len(self.letters.page(limit=100).letters)


@contextlib.contextmanager
def running(
    kind: str,
    url: str,
    letters: str,
    *,
    processes: int = 1,
    threads: int = 2,
    stack: str = "guard",
    soft: int = SOFT,
    hard: int = HARD,
    boot: bool = True,
    measured: bool = False,
    arguments: tuple[str, ...] = (),
    **environment: str,
) -> Iterator[Run]:
    """Have a command with a queue of its own; everything is gone afterwards.

    Parameters:
      kind(str): ``redis`` or ``rabbitmq``.
      url(str): Where it is.
      letters(str): The URL of a Redis for the letters.
      processes(int): How many worker processes.
      threads(int): How many threads in each.
      stack(str): ``guard``, or ``stock``.
      soft(int): The soft deadline.
      hard(int): The hard deadline.
      boot(bool): Whether to start it.
      measured(bool): Whether coverage may look on.  Not where a job is interrupted: on CPython 3.11 traced threads spin
        while an interrupt is pending.
      arguments(tuple[str, ...]): Further arguments of the command.
      **environment(str): Further variables.
    """
    name = f"exits-{uuid.uuid4().hex[:12]}"
    broker: Broker = Redis(url, name) if kind == "redis" else RabbitMQ(url, name)
    with tempfile.TemporaryDirectory(prefix="exits-") as directory:
        path = Path(directory) / "ledger"
        path.touch()
        variables = {
            "EXITS_BROKER": kind,
            "EXITS_URL": url,
            "EXITS_NAME": name,
            "EXITS_LETTERS": letters,
            "EXITS_LEDGER": str(path),
            "EXITS_STACK": stack,
            "EXITS_SOFT": str(soft),
            "EXITS_HARD": str(hard),
            "EXITS_HEARTBEAT": str(HEARTBEAT),
            "TMPDIR": directory,  # where crashes soon after a boot are remembered: not those of other tests
            **environment,
        }
        # Reloading, Dramatiq executes `python`, which is then looked up.
        variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        if not measured:
            variables |= {"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}
        workers = Workers(
            "tests.exits.app", processes=processes, threads=threads, env=variables, arguments=arguments, ready_within=60
        )
        run = Run(broker, Ledger(path), connect(letters, prefix=name).dead_letters, variables, workers)
        try:
            if boot:
                workers.start().wait_ready()
            yield run
        finally:
            workers.close()
            broker.close()


def again(run: Run, *, processes: int = 1, threads: int = 2, **environment: str) -> Workers:
    """Another command on the same queue and ledger, not yet started."""
    return Workers(
        "tests.exits.app",
        processes=processes,
        threads=threads,
        env={**run.environment, **environment},
        ready_within=60,
    )
