"""The worker's CPU time per message: stock Dramatiq against the stack, on success and on failure.

    python benchmarks/overhead.py [--quick] [--json FILE] [--rounds N] [--only NAME]

The life of a measurement:

1. A real `dramatiq` worker process, 1 × 8 threads, is started on a private Valkey, its log in a file; some messages
   warm it up.
2. It is asked how much CPU time it has used; then the messages are released, all in one transaction.
3. When none is left in the queue or in the delay queue it is asked again.  The difference is the cost, and how often
   the actors ran must be exactly what was planned.

Throughput would hide what is to be seen, since a stock worker sleeps when its prefetch is full.  The cases of one round
run one after the other, each with a process of its own, and a ratio is always to stock in the same round, so that a
noisy neighbour and the accidents of one process's memory even out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from dramatiq import Message

from dramatiq_guard.testing.valkey import PrivateValkey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
QUEUE = "orders"
THREADS = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens to each message.

    Parameters:
      actor(str): The actor it is for.
      title(str): For people.
      messages(int): How many are measured.
      runs(int): How often each one's actor runs.
    """

    actor: str
    title: str
    messages: int
    runs: int


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Parameters:
      scenario(Scenario): What happens to each message.
      setup(str): What is on the broker; the name of it in `overhead_app`.
      title(str): For people.
      target(float | None): What the ratio must not exceed.
      flags(str | None): The trace flags of the sender, where it has an SDK.
    """

    scenario: Scenario
    setup: str
    title: str
    target: float | None = None
    flags: str | None = None

    @property
    def name(self) -> str:
        """What `--only` asks for."""
        return f"{self.scenario.actor}:{self.setup}"


@dataclass(slots=True)
class Result:
    """What was measured of a case: microseconds of CPU per message, round by round."""

    case: Case
    cpu_us: list[float] = field(default_factory=list)
    messages: int = 0
    runs: int = 0
    planned: int = 0

    def ratios(self, stock: Result) -> list[float]:
        """The cost against stock's, round by round."""
        return [mine / theirs for mine, theirs in zip(self.cpu_us, stock.cpu_us, strict=True)]

    def summary(self, stock: Result) -> dict[str, Any]:
        """The row as it is written to the JSON file."""
        return {
            "scenario": self.case.scenario.actor,
            "setup": self.case.setup,
            "title": self.case.title,
            "target": self.case.target,
            "ratio": round(statistics.median(self.ratios(stock)), 3),
            "ratio_of_minima": round(min(self.cpu_us) / min(stock.cpu_us), 3),
            "min_us": round(min(self.cpu_us), 1),
            "median_us": round(statistics.median(self.cpu_us), 1),
            "rounds_us": [round(each, 1) for each in self.cpu_us],
            "messages": self.messages,
            "runs": self.runs,
            "planned": self.planned,
        }


def cases(successes: int, failures: int) -> list[Case]:
    """Every row, stock first in each scenario."""
    good = Scenario("work", "a message that succeeds", successes, 1)
    bad = Scenario("flaky", "an attempt that fails ten frames deep, its delay and the retry that succeeds", failures, 2)
    return [
        Case(good, "stock", "stock"),
        Case(good, "no-ops", "stock + 6 no-op middlewares"),
        Case(good, "stack", "stack, no SDK", 1.15),
        Case(good, "crash-on-fatal", "stack + CrashOnFatal()"),
        Case(good, "counting-crashes", "stack + CrashOnFatal(deliveries)"),
        Case(good, "closed-breaker", "stack + CircuitBreaker, closed"),
        Case(good, "sampled-out", "stack, sampled out", 1.15, "00"),
        Case(good, "recorded", "stack, every span recorded", 1.5, "01"),
        Case(good, "recorded-and-counted", "stack, spans and metrics", None, "01"),
        Case(bad, "stock", "stock"),
        Case(bad, "summary", 'stack, log="summary"', 0.45),
        Case(bad, "throttled", 'stack, log="throttled"'),
        Case(bad, "traceback", 'stack, log="traceback"'),
    ]


class Worker:
    """One `dramatiq` worker process, its log in a file.

    Parameters:
      valkey(PrivateValkey): The server, which it has for itself.
      setup(str): What is on the broker.
      directory(Path): Where its log and its reports go.
    """

    def __init__(self, valkey: PrivateValkey, setup: str, directory: Path) -> None:
        self.client = redis.Redis.from_url(valkey.url)
        self.client.flushall()
        self.directory = directory
        self.log = directory / f"{uuid.uuid4().hex}.log"
        command = [sys.executable, "-m", "dramatiq", "benchmarks.overhead_app", "--processes", "1"]
        command += ["--threads", str(THREADS), "--log-file", str(self.log)]
        environment = {
            **os.environ,
            "OVERHEAD_SETUP": setup,
            "OVERHEAD_URL": valkey.url,
            "OVERHEAD_QUEUE": QUEUE,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)

    def release(self, messages: Sequence[Message[Any]]) -> None:
        """Put messages on the queue, all at once, as the Redis broker lays them out."""
        with self.client.pipeline(transaction=True) as pipeline:
            for message in messages:
                redis_id = str(uuid.uuid4())
                body = message.copy(options={"redis_message_id": redis_id}).encode()
                pipeline.hset(f"dramatiq:{QUEUE}.msgs", redis_id, body)
                pipeline.rpush(f"dramatiq:{QUEUE}", redis_id)
            pipeline.execute()

    def drain(self, pause: float = 0.01) -> None:
        """Wait until no message is left, waiting, delayed or being worked on."""

        def empty() -> bool:
            with self.client.pipeline(transaction=True) as pipeline:
                pipeline.hlen(f"dramatiq:{QUEUE}.msgs").hlen(f"dramatiq:{QUEUE}.DQ.msgs")
                return not any(pipeline.execute())

        self._wait(empty, "an empty queue", pause)

    def report(self) -> dict[str, Any]:
        """Ask the process what it has used and done so far."""
        path = self.directory / f"{uuid.uuid4().hex}.json"
        self.release([message("report", str(path))])
        self._wait(path.exists, "a report")
        self.drain()
        said: dict[str, Any] = json.loads(path.read_text())
        return said

    def close(self) -> None:
        """End the process and whatever it started."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.client.close()

    def _wait(self, done: Callable[[], bool], what: str, pause: float = 0.005) -> None:
        deadline = time.monotonic() + 120
        while not done():
            if self.process.poll() is not None or time.monotonic() > deadline:
                log = self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""
                raise SystemExit(f"overhead: the worker did not come to {what}; the end of its log:\n{log}")
            time.sleep(pause)


@contextlib.contextmanager
def worker(valkey: PrivateValkey, setup: str, directory: Path) -> Iterator[Worker]:
    """A worker process for one measurement."""
    started = Worker(valkey, setup, directory)
    try:
        yield started
    finally:
        started.close()


def message(actor: str, *args: Any, carrying: bool = False, flags: str | None = None) -> Message[Any]:
    """A message as it lies in the queue, with what a sender that has the stack, and an SDK, writes into it."""
    options: dict[str, Any] = {}
    if carrying:
        carrier: dict[str, Any] = {"t": int(time.time() * 1000)}
        if flags is not None:
            carrier["tp"] = f"00-{uuid.uuid4().hex}-00f067aa0ba902b7-{flags}"
        options["dramatiq_guard"] = carrier
    return Message(queue_name=QUEUE, actor_name=actor, args=args, kwargs={}, options=options)


def measure(case: Case, result: Result, valkey: PrivateValkey, directory: Path) -> None:
    """Measure a case once, and add it to its result.

    Raises:
      SystemExit: The actors ran more or less often than planned, or the worker ended.
    """
    scenario = case.scenario
    warm = max(1, scenario.messages // 10)
    numbers = iter(range(warm + scenario.messages))

    def some(count: int) -> list[Message[Any]]:
        carrying = case.setup not in ("stock", "no-ops")
        return [message(scenario.actor, next(numbers), carrying=carrying, flags=case.flags) for _ in range(count)]

    with worker(valkey, case.setup, directory) as process:
        process.release(some(warm))
        process.drain()
        measured = some(scenario.messages)
        before = process.report()
        process.release(measured)
        process.drain()
        after = process.report()
    # The reports count themselves.
    runs, planned = after["runs"] - before["runs"] - 1, scenario.messages * scenario.runs
    if runs != planned:
        raise SystemExit(f"overhead: {case.name}: the actors ran {runs} times, and {planned} were planned")
    result.cpu_us.append((after["cpu"] - before["cpu"]) / scenario.messages * 1_000_000)
    result.messages += scenario.messages
    result.runs += runs
    result.planned += planned


def table(results: Sequence[Result]) -> str:
    """The results for people."""
    lines = []
    for result in results:
        stock = _stock_of(result, results)
        row = result.summary(stock)
        if result is stock:
            lines += ["", result.case.scenario.title, f"  {'':32}{'ratio':>7}{'best':>7}{'min µs':>9}{'median µs':>11}"]
        target = "" if row["target"] is None else f"   ≤ {row['target']:.2f}"
        lines.append(
            f"  {row['title']:32}{row['ratio']:7.3f}{row['ratio_of_minima']:7.3f}{row['min_us']:9.0f}"
            f"{row['median_us']:11.0f}{target}"
        )
    lines += [
        "",
        "ratio: median over the rounds of the ratio to stock in the same round; best: the ratio of the minima",
    ]
    return "\n".join(lines)


def _say(progress: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{progress:60}\r", end="", file=sys.stderr, flush=True)


def _stock_of(result: Result, results: Sequence[Result]) -> Result:
    return next(each for each in results if each.case.scenario == result.case.scenario)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="overhead", description="The worker's CPU time per message, against stock.")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, says nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--rounds", type=int, default=5, help="how often each case is measured (5)")
    parser.add_argument("--successes", type=int, default=3000, help="messages a round that succeed (3000)")
    parser.add_argument("--failures", type=int, default=800, help="messages a round that fail once (800)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="such as work:stack; repeatable")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.rounds, chosen.successes, chosen.failures = 1, 100, 40

    rows = cases(chosen.successes, chosen.failures)
    known = {case.name for case in rows}
    if unknown := set(chosen.only) - known:
        parser.error(f"unknown case {min(unknown)}; known are {', '.join(sorted(known))}")
    if chosen.only:
        scenarios = {name.partition(":")[0] for name in chosen.only}
        rows = [c for c in rows if c.name in chosen.only or (c.setup == "stock" and c.scenario.actor in scenarios)]
    results = [Result(case) for case in rows]
    with tempfile.TemporaryDirectory(prefix="overhead-") as directory, PrivateValkey() as valkey:
        for number in range(1, chosen.rounds + 1):
            for result in results:
                _say(f"round {number} of {chosen.rounds}: {result.case.name}")
                measure(result.case, result, valkey, Path(directory))
        _say("")
        with redis.Redis.from_url(valkey.url) as client:
            server = client.info("server")
    about = {
        "python": platform.python_version(),
        "dramatiq": version("dramatiq"),
        "redis_py": version("redis"),
        "server": f"{server.get('server_name', 'redis')} {server.get('valkey_version', server.get('redis_version'))}",
        "machine": platform.machine(),
        "rounds": chosen.rounds,
        "threads": THREADS,
    }
    print(
        f"CPU time of a worker process per message (1 × {THREADS} threads, Python {about['python']}, "
        f"Dramatiq {about['dramatiq']}, {about['server']}, {chosen.rounds} rounds)"
    )
    print(table(results))
    if chosen.json is not None:
        summaries = [result.summary(_stock_of(result, results)) for result in results]
        chosen.json.write_text(json.dumps({**about, "cases": summaries}, indent=2) + "\n")


if __name__ == "__main__":
    main()
