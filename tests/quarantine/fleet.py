"""A `dramatiq` command under a supervisor, which starts it again whenever it ends; and what became of every message."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pika
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.stores.protocols import Stores
from tests.support.waiting import wait_until
from tests.support.workers import Workers

__all__ = ["Fleet", "fleet"]


@dataclass(slots=True)
class Fleet:
    """One command, its queue, its ledger.

    Attributes:
      codes(list[int]): With what the command has ended so far, each time.
    """

    kind: str
    url: str
    name: str
    ledger: Path
    environment: dict[str, str]
    stores: Stores
    processes: int
    threads: int
    codes: list[int] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    _workers: Workers | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)
    _supervisor: threading.Thread | None = None
    _errors: list[BaseException] = field(default_factory=list)

    # -- the queue ---------------------------------------------------------------------------------------------------

    def send(self, actor: str, *args: Any, **options: Any) -> Message[Any]:
        """Send a message."""
        message: Message[Any] = Message(self.name, actor, args, {}, options)
        if self.kind == "redis":
            broker = RedisBroker(url=self.url, namespace=self.name, middleware=[])  # type: ignore[no-untyped-call]
            broker.declare_queue(self.name)  # type: ignore[no-untyped-call]
            broker.enqueue(message)
            broker.client.connection_pool.disconnect()
            return message
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            self._declare(channel)
            channel.basic_publish("", self.name, message.encode(), pika.BasicProperties(delivery_mode=2))
        return message

    def left(self) -> int:
        """How many messages lie in the queue and the delay queue, held or not."""
        if self.kind == "redis":
            with redis.Redis.from_url(self.url) as client:
                return sum(
                    int(client.hlen(f"{self.name}:{queue}.msgs"))  # type: ignore[arg-type]
                    for queue in (self.name, f"{self.name}.DQ")
                )
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            return sum(self._declare(connection.channel()))

    def lying(self) -> dict[str, Message[Any]]:
        """The messages that lie in the queue and the delay queue of a Redis, by the key of their job."""
        with redis.Redis.from_url(self.url) as client, client.pipeline(transaction=True) as both:
            # At one moment: a message moves from one to the other.
            for queue in (self.name, f"{self.name}.DQ"):
                both.hvals(f"{self.name}:{queue}.msgs")
            bodies = [body for found in both.execute() for body in found]
        messages = [Message.decode(body) for body in bodies]
        assert len({message.args[0] for message in messages}) == len(messages), f"twice in a queue: {messages}"
        return {message.args[0]: message for message in messages}

    def held(self, *, delayed: bool = True) -> int:
        """How many messages lie in the ack set of a process of a Redis; those that sleep in its memory, too, or not."""
        with redis.Redis.from_url(self.url) as client:
            keys = [key for key in client.scan_iter(f"{self.name}:__acks__.*") if delayed or not key.endswith(b".DQ")]
            return sum(int(client.scard(key)) for key in keys)  # type: ignore[arg-type]

    def _declare(self, channel: Any) -> list[int]:
        kind = {"x-queue-type": "quorum"} if self.kind == "quorum" else {}
        return [
            channel.queue_declare(
                queue,
                durable=True,
                arguments={
                    "x-dead-letter-exchange": "",
                    "x-dead-letter-routing-key": f"{self.name}.XQ",
                    **kind,
                },
            ).method.message_count
            for queue in (self.name, f"{self.name}.DQ")
        ]

    # -- the ledger --------------------------------------------------------------------------------------------------

    def keys(self, what: str) -> Counter[str]:
        """How often each job wrote a line of a kind."""
        lines = (line.rsplit(" ", 2) for line in self.ledger.read_text().splitlines())
        return Counter(key for word, key, _ in lines if word == what)

    def pids(self, what: str) -> list[int]:
        """The processes of the lines of a kind."""
        return [int(line.rsplit(" ", 1)[1]) for line in self.ledger.read_text().splitlines() if line.startswith(what)]

    def wait_noted(self, what: str, count: int = 1, timeout: float = 30) -> None:
        """Wait until so many lines of a kind have been written."""
        wait_until(lambda: self.keys(what).total() >= count, timeout, self.story)

    def letters(self) -> list[Any]:
        """The dead letters."""
        return list(self.stores.dead_letters.page(limit=100).letters)

    def story(self) -> str:
        """What happened so far, for the message of a failure."""
        return f"{self.ledger.read_text()}\ncodes {self.codes}\n" + "\n".join([*self.logs[-10:], self.log])

    # -- the command -------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> Workers:
        """The command as it runs now."""
        assert self._workers is not None, "it has not been started"
        return self._workers

    @property
    def log(self) -> str:
        """What it has printed since it was last started."""
        with contextlib.suppress(OSError, AssertionError):
            return self.workers.log
        return ""

    def start(self, *, ready: bool = True) -> Workers:
        """Start it, without a supervisor."""
        self._workers = Workers(
            "tests.quarantine.app",
            processes=self.processes,
            threads=self.threads,
            env=self.environment,
            ready_within=60,
        )
        self._workers.start()
        return self._workers.wait_ready() or self._workers if ready else self._workers

    def supervise(self) -> None:
        """Start it, and start it again whenever it ends."""

        def run() -> None:
            try:
                while not self._stopping.is_set():
                    workers = self.start(ready=False)
                    while workers.process is not None and workers.process.poll() is None:
                        time.sleep(0.02)
                    self.codes.append(workers.wait())
                    self.logs.append(workers.log)
                    workers.close()
            except BaseException as error:
                self._errors.append(error)

        self._supervisor = threading.Thread(target=run, daemon=True)
        self._supervisor.start()

    def close(self) -> None:
        """End everything."""
        self._stopping.set()
        if self._workers is not None:
            with contextlib.suppress(ProcessLookupError):
                self._workers.kill()
        if self._supervisor is not None:
            self._supervisor.join(30)
        if self._workers is not None:
            self._workers.close()
        if self._errors:
            raise self._errors[0]


@contextlib.contextmanager
def fleet(
    kind: str,
    url: str,
    store: str,
    *,
    processes: int = 1,
    threads: int = 8,
    stack: str = "guard",
    **options: Any,
) -> Iterator[Fleet]:
    """Have a command with a queue of its own, not yet started; everything is gone afterwards.

    Parameters:
      kind(str): ``redis``, ``rabbitmq`` or ``quorum``.
      url(str): Where it is.
      store(str): The URL of the stores.
      processes(int): How many worker processes.
      threads(int): How many threads in each.
      stack(str): ``guard``, or ``stock``.
      **options: Options of CrashOnFatal.
    """
    name = f"q_{uuid.uuid4().hex[:12]}"
    if store.startswith("postgresql"):
        apply_schema(store, schema=name)
    with (
        tempfile.TemporaryDirectory(prefix="quarantine-") as directory,
        contextlib.closing(connect(store, prefix=name, schema=name)) as stores,
    ):
        ledger = Path(directory) / "ledger"
        ledger.touch()
        environment = {
            "QUARANTINE_BROKER": kind,
            "QUARANTINE_URL": url,
            "QUARANTINE_NAME": name,
            "QUARANTINE_STORE": store,
            "QUARANTINE_LEDGER": str(ledger),
            "QUARANTINE_STACK": stack,
            "QUARANTINE_OPTIONS": json.dumps(options),
            # The brake would find the boots of other tests, and of this one, too soon after each other.
            "TMPDIR": directory,
            "COVERAGE_PROCESS_START": "",
            "COVERAGE_PROCESS_CONFIG": "",
        }
        running = Fleet(kind, url, name, ledger, environment, stores, processes, threads)
        try:
            yield running
        finally:
            running.close()
