"""One run: the processes, the arrivals, the end, and what is made of what they left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from dramatiq_guard.simulation.comparison import Run, curves
from dramatiq_guard.simulation.measure import measure
from dramatiq_guard.simulation.world import BIN, Job, Recording
from dramatiq_guard.testing.valkey import PrivateValkey

from .downstream import clock
from .fleets import ROOT, Dramatiq, environment
from .fleets import fleet as fleet_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .cases import Case
    from .fleets import Fleet

__all__ = ["Storm", "storm"]

#: Requests of each thread before the storm.
_WARM_UP = 10
#: Milliseconds between two looks at what the processes do.
_LOOK = 250


@dataclass(frozen=True, slots=True)
class Storm:
    """What came of a run.

    Parameters:
      case(Case): What was run.
      run(Run): The figures and curves, as the simulation gives them.
      lost(int): Jobs that were neither served, nor lie in a queue or among the dead letters; None: not known.
      dead_bad(int): Jobs that can never succeed and lie among the dead letters.
      dead_good(int): Jobs that could have succeeded and lie among the dead letters.
      bad(int): Jobs that can never succeed.
      answers(int): How often such a job had its answer, which is the same each time; what befell it during the outage
        could not be told from what befell the others, and is not counted here.
      headroom(float): What the workers can offer, by the capacity.
    """

    case: Case
    run: Run
    lost: int | None
    dead_bad: int
    dead_good: int
    bad: int
    answers: int
    headroom: float

    def row(self) -> dict[str, Any]:
        """The figures by their names."""
        return {
            **self.run.figures.row(),
            "answers_per_bad_job": round(self.answers / self.bad, 4) if self.bad else None,
            "lost": self.lost,
            "dead_bad": self.dead_bad,
            "dead_good": self.dead_good,
            "bad": self.bad,
            "headroom": round(self.headroom, 1),
        }


class Downstream:
    """The downstream's process, and a connection to it.

    Parameters:
      case(Case): Says what befalls it.
      book(Path): Where it writes what it was asked.
    """

    def __init__(self, case: Case, book: Path) -> None:
        self.book = book
        arguments = ["-m", "benchmarks.storm.downstream", json.dumps(asdict(case.scenario)), str(book)]
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said:
            raise SystemExit("storm: the downstream ended before it served anything; its error is above")
        self.port = int(said)
        self._line = socket.create_connection(("127.0.0.1", self.port), timeout=30).makefile("rwb", 0)
        return self

    def begin(self, at: float) -> None:
        """Let the scenario begin."""
        self._ask(f"begin {at}")

    def served(self) -> int:
        """How many different jobs have been answered."""
        return int(self._ask("served"))

    def end(self) -> list[tuple[float, int, int, float]]:
        """End it, and give its book: when, which job, the status, when it was answered."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)
        book: list[tuple[float, int, int, float]] = json.loads(self.book.read_text())
        return book

    def __exit__(self, *_: object) -> None:
        self._line.close()
        _end(self.process, 2.0)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, line: str) -> bytes:
        self._line.write(line.encode() + b"\n")
        return bytes(self._line.readline())


class Workers:
    """The worker processes.

    Parameters:
      case(Case): What they do.
      fleet(Fleet): Whose they are.
      url(str): Of the Valkey.
      port(int): Of the downstream.
      log(Path): Gets what they print.
    """

    def __init__(self, case: Case, fleet: Fleet, url: str, port: int, log: Path) -> None:
        self.log = log
        own = {"STORM_POLICY": case.policy.name, "STORM_URL": url, "STORM_PORT": str(port)}
        own["STORM_THREADS"] = str(case.scenario.threads)
        with log.open("ab") as printed:
            self.process = subprocess.Popen(
                fleet.command, cwd=ROOT, env=environment(**own), stdout=printed, stderr=printed, start_new_session=True
            )

    def check(self) -> None:
        """Make sure that they still run."""
        if self.process.poll() is not None:
            raise SystemExit(f"storm: the workers ended; the end of their log:\n{self.said()}")

    def said(self) -> str:
        """The end of their log."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self.process, 20.0)


def storm(case: Case, directory: Path, say: Callable[[str], None] = lambda _: None) -> Storm:
    """Run a case.

    Parameters:
      case(Case): What to run.
      directory(Path): Where the processes' files go.
      say(Callable[[str], None]): Is told how far it has come.

    Returns:
      Storm: What came of it.
    """
    name = uuid.uuid4().hex[:8]
    log = directory / f"{name}.log"
    with contextlib.ExitStack() as open_:
        valkey = open_.enter_context(PrivateValkey())
        downstream = open_.enter_context(Downstream(case, directory / f"{name}.book"))
        fleet = open_.enter_context(contextlib.closing(fleet_of(case, valkey.url, log)))
        with Workers(case, fleet, valkey.url, downstream.port, log) as workers:
            say("warming up")
            offered = _warm_up(case, fleet, workers)
            t0 = clock() + 200
            downstream.begin(t0)
            arrivals = _Arrivals(case, fleet, t0)
            arrivals.start()
            modes: list[tuple[int, str]] = []
            while (now := clock() - t0) < case.given_up_after:
                workers.check()
                mode = fleet.breaker() if isinstance(fleet, Dramatiq) else None
                if mode is not None and (not modes or modes[-1][1] != mode):
                    modes.append((round(now), mode))
                if arrivals.over and downstream.served() >= len(arrivals.jobs):
                    break
                say(f"{now / 1000:.0f} s of at most {case.given_up_after / 1000:.0f}")
                time.sleep(_LOOK / 1000)
            ended = clock() - t0
            if not arrivals.over:
                raise SystemExit(f"storm: {case.name}: the run was over before all jobs had arrived")
            _settled(fleet)
        book = downstream.end()
        left = fleet.left()
    recording = _recording(arrivals.jobs, book, ended)
    # The answer of a job that can never succeed is not its end: that is a dead letter.
    waiting, dead = left or (set(), set())
    owed = {number for number, job in enumerate(recording.jobs) if job.done < 0 or job.permanent}
    figures = measure(case.scenario, recording)
    recording.modes = modes
    return Storm(
        case,
        Run(case.scenario, case.policy, figures, curves(recording), tuple(recording.modes)),
        len(owed - waiting - dead) if left else None,
        sum(recording.jobs[number].permanent for number in dead),
        sum(not recording.jobs[number].permanent for number in dead),
        sum(job.permanent for job in recording.jobs),
        sum(status == 400 for _, _, status, _ in book),
        offered / case.scenario.capacity,
    )


class _Arrivals(threading.Thread):
    """Jobs arrive, at random."""

    def __init__(self, case: Case, fleet: Fleet, t0: float) -> None:
        super().__init__(daemon=True)
        self.over = False
        self._fleet, self._t0 = fleet, t0
        scenario, dice = case.scenario, random.Random(case.scenario.seed)
        self._plan: list[Job] = []
        at = 0.0
        while (at := at + dice.expovariate(1) * 1000 / scenario.arrivals) < scenario.lasts:
            bad = dice.random() < scenario.permanent
            self._plan.append(Job(at, dice.randrange(scenario.shards), permanent=bad))
        self.jobs: list[Job] = []

    def run(self) -> None:
        for number, job in enumerate(self._plan):
            time.sleep(max(0.0, self._t0 + job.arrived - clock()) / 1000)
            job.arrived = clock() - self._t0
            self.jobs.append(job)
            self._fleet.send(number, job.shard, int(job.permanent))
        self.over = True


def _warm_up(case: Case, fleet: Fleet, workers: Workers) -> float:
    """Make every thread's connection, and see how many requests per second the workers can make."""

    def drained() -> None:
        deadline = time.monotonic() + 60
        while not fleet.idle():
            workers.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"storm: the workers did not warm up; the end of their log:\n{workers.said()}")
            time.sleep(0.005)

    threads = case.scenario.processes * case.scenario.threads
    for _ in range(threads):
        fleet.send(-1, 0, 0)
    drained()
    began = clock()
    for _ in range(_WARM_UP * threads):
        fleet.send(-1, 0, 0)
    drained()
    return _WARM_UP * threads * 1000 / (clock() - began)


def _settled(fleet: Fleet) -> None:
    """Give the workers a moment to write down what they were answered last."""
    deadline = clock() + 2_000
    while clock() < deadline and not fleet.idle():
        time.sleep(0.02)


def _recording(jobs: list[Job], book: list[tuple[float, int, int, float]], ended: float) -> Recording:
    """The downstream's book as the simulation records a run."""
    last = ended
    for at, number, status, answered in book:
        job = jobs[number]
        job.attempts += 1
        if status != 503 and job.done < 0:
            job.done = answered
        last = max(last, at)
    bins = int(last // BIN) + 1
    requests = Counter(int(at // BIN) for at, *_ in book)
    served = Counter(int(at // BIN) for at, _, status, _ in book if status != 503)
    came = Counter(int(job.arrived // BIN) for job in jobs)
    went = Counter(int(job.done // BIN) for job in jobs if job.done >= 0)
    backlog, left = [], 0
    for index in range(bins):
        left += came[index] - went[index]
        backlog.append(left)
    done = [job.done for job in jobs if job.done >= 0]
    return Recording(
        requests=[requests[index] for index in range(bins)],
        served=[served[index] for index in range(bins)],
        backlog=backlog,
        jobs=jobs,
        ended=max(done, default=ended) if len(done) == len(jobs) else ended,
        undone=sum(job.done < 0 and not job.permanent for job in jobs),
    )


def _end(process: subprocess.Popen[bytes], within: float) -> None:
    """End a process and whatever it started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
