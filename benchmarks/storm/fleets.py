"""Whose workers they are: how they are started, how a job is sent to them, and what they left behind.

A fleet knows its own library and where it keeps its messages; it must not know the downstream, nor what is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard import connect
from dramatiq_guard.stores.protocols import Filter

if TYPE_CHECKING:
    from .cases import Case

__all__ = ["ROOT", "Dramatiq", "Fleet", "environment", "fleet"]

ROOT = Path(__file__).resolve().parents[2]
QUEUE = "storm"
#: Dramatiq's requests before the storm have one of their own, so that the other is all for the downstream.
WARM_UP_QUEUE = "storm-warm-up"


def environment(**more: str) -> dict[str, str]:
    """The environment of a process of the benchmark."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, **more}


class Fleet(Protocol):
    """The workers of a library, and the way to them."""

    #: What starts the worker processes.
    command: list[str]

    def send(self, job: int, shard: int, bad: int) -> None:
        """Send a job; -1 is a request before the storm."""
        ...

    def idle(self) -> bool:
        """Whether nothing waits and nothing is worked on."""
        ...

    def left(self) -> tuple[set[int], set[int]] | None:
        """The jobs in the queues and those among the dead letters, when the workers have ended; None: not known."""
        ...

    def close(self) -> None:
        """End the way to them."""
        ...


class Dramatiq:
    """Dramatiq, under whatever policy.

    Parameters:
      case(Case): What is run.
      url(str): Of the server.
      log(Path): Where they write their log.
    """

    def __init__(self, case: Case, url: str, log: Path) -> None:
        scenario = case.scenario
        self.command = [sys.executable, "-m", "dramatiq", "benchmarks.storm.app", "--log-file", str(log)]
        self.command += ["--processes", str(scenario.processes), "--threads", str(scenario.threads)]
        self.command += ["--worker-shutdown-timeout", "10000"]
        self._broker = RedisBroker(url=url, middleware=[])
        self._broker.declare_queue(QUEUE)
        self._broker.declare_queue(WARM_UP_QUEUE)
        self._stores = connect(url)

    def send(self, job: int, shard: int, bad: int) -> None:
        queue, actor, args = (WARM_UP_QUEUE, "warm", (job,)) if job < 0 else (QUEUE, "work", (job, shard, bad))
        self._broker.enqueue(Message(queue_name=queue, actor_name=actor, args=args, kwargs={}, options={}))

    def idle(self) -> bool:
        return not any(
            self._broker.client.hlen(f"dramatiq:{each}.msgs") for each in (QUEUE, f"{QUEUE}.DQ", WARM_UP_QUEUE)
        )

    def left(self) -> tuple[set[int], set[int]] | None:
        dead, cursor = self._jobs(f"{QUEUE}.XQ"), None
        while True:
            page = self._stores.dead_letters.page(Filter(), limit=500, cursor=cursor)
            dead |= {int(letter.args[0]) for letter in page.letters}
            cursor = page.cursor
            if cursor is None:
                return self._jobs(QUEUE) | self._jobs(f"{QUEUE}.DQ"), dead

    def breaker(self) -> str | None:
        """The mode of the breaker; None where there is none."""
        state = self._stores.breakers.read("payments")
        return None if state is None else state.mode.value

    def close(self) -> None:
        self._stores.close()
        self._broker.close()

    def _jobs(self, queue: str) -> set[int]:
        bodies: list[Any] = self._broker.client.hvals(f"dramatiq:{queue}.msgs")
        return {int(Message.decode(body).args[0]) for body in bodies}


class Celery:
    """Celery with its pool of threads.

    Parameters:
      case(Case): What is run.
      url(str): Of the server.
      log(Path): Where they write their log.
    """

    def __init__(self, case: Case, url: str, log: Path) -> None:
        import redis
        from celery import Celery as Sender

        self.command = [sys.executable, "-m", "celery", "-A", "benchmarks.storm.peers.celery_app", "worker"]
        self.command += ["--pool", "threads", "--concurrency", str(case.scenario.threads), "--loglevel", "CRITICAL"]
        self.command += ["--without-gossip", "--without-mingle", "--without-heartbeat", "--logfile", str(log)]
        self._sender = Sender("storm", broker=url)
        self._client = redis.Redis.from_url(url)

    def send(self, job: int, shard: int, bad: int) -> None:
        name, args = ("warm", (job,)) if job < 0 else ("work", (job, shard, bad))
        self._sender.send_task(name, args=args, queue=QUEUE, ignore_result=True)

    def idle(self) -> bool:
        return not self._client.llen(QUEUE) and not self._client.hlen("unacked")

    def left(self) -> tuple[set[int], set[int]] | None:
        return None

    def close(self) -> None:
        self._sender.close()
        self._client.close()


class BullMQ:
    """BullMQ, on node; ``STORM_NODE_MODULES`` says where it is installed.

    Parameters:
      case(Case): What is run.
      url(str): Of the server.
      log(Path): Is not used.
    """

    def __init__(self, case: Case, url: str, log: Path) -> None:
        import redis

        if "STORM_NODE_MODULES" not in os.environ:
            raise SystemExit("storm: STORM_NODE_MODULES must name the directory that bullmq is installed in")
        script = str(ROOT / "benchmarks" / "storm" / "peers" / "bullmq.mjs")
        self.command = ["node", script, "work"]
        own = environment(STORM_POLICY=case.policy.name, STORM_URL=url)
        self._sender = subprocess.Popen(
            ["node", script, "send"], stdin=subprocess.PIPE, env=own, start_new_session=True
        )
        self._client = redis.Redis.from_url(url)
        self._sent = 0

    def send(self, job: int, shard: int, bad: int) -> None:
        assert self._sender.stdin is not None
        self._sender.stdin.write(json.dumps([job, shard, bad]).encode() + b"\n")
        self._sender.stdin.flush()
        self._sent += 1

    def idle(self) -> bool:
        # What was written to the sender is not yet in the queue.
        arrived = int(self._client.get("bull:storm:id") or 0)
        return arrived >= self._sent and not any(self._client.llen(f"bull:storm:{each}") for each in ("wait", "active"))

    def left(self) -> tuple[set[int], set[int]] | None:
        return None

    def close(self) -> None:
        assert self._sender.stdin is not None
        self._sender.stdin.close()
        self._sender.wait(10)
        self._client.close()


def fleet(case: Case, url: str, log: Path) -> Fleet:
    """The fleet that a case is run with."""
    kinds: dict[str, type[Celery | BullMQ]] = {"celery": Celery, "bullmq": BullMQ}
    return kinds.get(case.policy.name.partition("-")[0], Dramatiq)(case, url, log)
