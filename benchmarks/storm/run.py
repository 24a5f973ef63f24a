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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard import connect
from dramatiq_guard.simulation.comparison import Run, curves
from dramatiq_guard.simulation.measure import measure
from dramatiq_guard.simulation.world import BIN, Job, Recording
from dramatiq_guard.stores.protocols import Filter
from dramatiq_guard.testing.valkey import PrivateValkey

from .downstream import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis

    from .cases import Case

__all__ = ["Storm", "storm"]

ROOT = Path(__file__).resolve().parents[2]
QUEUE = "storm"
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
      lost(int): Jobs that were neither served, nor lie in a queue or among the dead letters.
      dead_bad(int): Jobs that can never succeed and lie among the dead letters.
      dead_good(int): Jobs that could have succeeded and lie among the dead letters.
      bad(int): Jobs that can never succeed.
      answers(int): How often such a job had its answer, which is the same each time; what befell it during the outage
        could not be told from what befell the others, and is not counted here.
      headroom(float): What the workers can offer, by the capacity.
      states(tuple): The breaker from time to time: milliseconds, mode, rate.
    """

    case: Case
    run: Run
    lost: int
    dead_bad: int
    dead_good: int
    bad: int
    answers: int
    headroom: float
    states: tuple[tuple[int, str, float], ...]

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
            env=_environment(),
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
    """The worker processes, their log in a file.

    Parameters:
      case(Case): Says how many, and what they do.
      url(str): Of the Valkey.
      port(int): Of the downstream.
      log(Path): Gets what they print.
    """

    def __init__(self, case: Case, url: str, port: int, log: Path) -> None:
        scenario = case.scenario
        self.log = log
        command = [sys.executable, "-m", "dramatiq", "benchmarks.storm.app", "--log-file", str(log)]
        command += ["--processes", str(scenario.processes), "--threads", str(scenario.threads)]
        command += ["--worker-shutdown-timeout", "10000"]
        own = {"STORM_POLICY": case.policy.name, "STORM_URL": url, "STORM_PORT": str(port)}
        self.process = subprocess.Popen(command, cwd=ROOT, env=_environment() | own, start_new_session=True)

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
    with PrivateValkey() as valkey, Downstream(case, directory / f"{name}.book") as downstream:
        broker = RedisBroker(url=valkey.url, middleware=[])
        broker.declare_queue(QUEUE)
        stores = connect(valkey.url)
        with Workers(case, valkey.url, downstream.port, directory / f"{name}.log") as workers:
            say("warming up")
            offered = _warm_up(case, broker, workers)
            t0 = clock() + 200
            downstream.begin(t0)
            arrivals = _Arrivals(case, broker, t0)
            arrivals.start()
            states = []
            while (now := clock() - t0) < case.given_up_after:
                workers.check()
                state = stores.breakers.read("payments")
                if state is not None:
                    states.append((round(now), state.mode.value, round(state.rate, 1)))
                if arrivals.over and downstream.served() >= len(arrivals.jobs):
                    break
                say(f"{now / 1000:.0f} s of at most {case.given_up_after / 1000:.0f}")
                time.sleep(_LOOK / 1000)
            ended = clock() - t0
            if not arrivals.over:
                raise SystemExit(f"storm: {case.name}: the run was over before all jobs had arrived")
            _settled(broker.client)
        book = downstream.end()
        waiting = _waiting(broker.client)
        dead = _dead(stores, broker.client)
        stores.close()
        broker.close()
    recording = _recording(arrivals.jobs, book, ended)
    kept = waiting | dead
    # The answer of a job that can never succeed is not its end: that is a dead letter.
    owed = {number for number, job in enumerate(recording.jobs) if job.done < 0 or job.permanent}
    figures = measure(case.scenario, recording)
    recording.modes = _changes(states)
    return Storm(
        case,
        Run(case.scenario, case.policy, figures, curves(recording), tuple(recording.modes)),
        len(owed - kept),
        sum(recording.jobs[number].permanent for number in dead),
        sum(not recording.jobs[number].permanent for number in dead),
        sum(job.permanent for job in recording.jobs),
        sum(status == 400 for _, _, status, _ in book),
        offered / case.scenario.capacity,
        tuple(states),
    )


class _Arrivals(threading.Thread):
    """Jobs arrive, at random."""

    def __init__(self, case: Case, broker: RedisBroker, t0: float) -> None:
        super().__init__(daemon=True)
        self.over = False
        self._broker, self._t0 = broker, t0
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
            self._broker.enqueue(_message("work", number, job.shard, int(job.permanent)))
        self.over = True


def _message(actor: str, *args: Any) -> Message[Any]:
    return Message(queue_name=QUEUE, actor_name=actor, args=args, kwargs={}, options={})


def _warm_up(case: Case, broker: RedisBroker, workers: Workers) -> float:
    """Make every thread's connection, and see how many requests per second the workers can make."""

    def drained() -> None:
        deadline = time.monotonic() + 60
        while broker.client.hlen(f"dramatiq:{QUEUE}.msgs"):
            workers.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"storm: the workers did not warm up; the end of their log:\n{workers.said()}")
            time.sleep(0.005)

    threads = case.scenario.processes * case.scenario.threads
    broker.enqueue(_message("warm", -1))
    drained()
    for _ in range(threads):
        broker.enqueue(_message("warm", -1))
    drained()
    began = clock()
    for _ in range(_WARM_UP * threads):
        broker.enqueue(_message("warm", -1))
    drained()
    return _WARM_UP * threads * 1000 / (clock() - began)


def _settled(client: redis.Redis) -> None:
    """Give the workers a moment to write down what they were answered last."""
    deadline = clock() + 2_000
    while clock() < deadline and any(client.hlen(f"dramatiq:{queue}.msgs") for queue in (QUEUE, f"{QUEUE}.DQ")):
        time.sleep(0.02)


def _decoded(body: Any) -> Message[Any]:
    return Message.decode(body)


def _waiting(client: redis.Redis) -> set[int]:
    """The jobs that lie in the queues, or were with a worker when it ended."""
    bodies = [body for queue in (QUEUE, f"{QUEUE}.DQ") for body in client.hvals(f"dramatiq:{queue}.msgs")]
    return {int(_decoded(body).args[0]) for body in bodies}


def _dead(stores: Any, client: redis.Redis) -> set[int]:
    """The jobs among the dead letters, Dramatiq's own or the guard's."""
    dead = {int(_decoded(body).args[0]) for body in client.hvals(f"dramatiq:{QUEUE}.XQ.msgs")}
    cursor = None
    while True:
        page = stores.dead_letters.page(Filter(), limit=500, cursor=cursor)
        dead |= {int(letter.args[0]) for letter in page.letters}
        cursor = page.cursor
        if cursor is None:
            return dead


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


def _changes(states: list[tuple[int, str, float]]) -> list[tuple[int, str]]:
    changes: list[tuple[int, str]] = []
    for at, mode, _ in states:
        if not changes or changes[-1][1] != mode:
            changes.append((at, mode))
    return changes


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path}


def _end(process: subprocess.Popen[bytes], within: float) -> None:
    """End a process and whatever it started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
