"""A worker inside the test on a RabbitMQ that fails, and the accounts of it: planned, done, dead, left behind."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import dramatiq
import pika
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.middleware import (
    AgeLimit,
    AsyncIO,
    Callbacks,
    CurrentMessage,
    Middleware,
    Pipelines,
    Retries,
    ShutdownNotifications,
    TimeLimit,
)

from dramatiq_guard import Classify, DeadLetter, JitterBackoff, install
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from tests.support.proxy import FaultyProxy
from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.waiting import wait_until

__all__ = ["Refused", "World", "dead", "unsettled"]

#: Short waits, so that four attempts end within seconds.
BACKOFF: dict[str, Any] = {"min_backoff": 200, "max_backoff": 600}


class Refused(Exception):
    """What a job dies of that must not be tried again."""


def unsettled(rabbitmq: PrivateRabbitMQ, url: str) -> dict[str, int]:
    """How many messages there are on each queue and delay queue of a virtual host, delivered or not."""
    vhost = pika.URLParameters(url).virtual_host
    answer = rabbitmq.erlang(
        "[{binary_to_list(element(4, proplists:get_value(name, I))), proplists:get_value(messages, I)} || Q <- "
        f'rabbit_amqqueue:list(<<"{vhost}">>), I <- [rabbit_amqqueue:info(Q, [name, messages])]].'
    )
    found = {name: int(count) for name, count in re.findall(r'"([^"]*)", (\d+)', answer)}
    assert found, f"queues in {answer}"
    return {name: count for name, count in found.items() if count and not name.endswith(".XQ")}


def dead(url: str, queue_name: str = "default") -> Counter[str]:
    """The jobs among the broker's own dead letters of a queue, which are taken out."""
    found: Counter[str] = Counter()
    with contextlib.closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        while (answer := channel.basic_get(f"{queue_name}.XQ", auto_ack=True))[0] is not None:
            found[dramatiq.Message.decode(answer[2]).args[0]] += 1
    return found


class World:
    """A broker, its jobs and what became of them.

    Parameters:
      rabbitmq(PrivateRabbitMQ): The server.
      url(str): A virtual host of it.
      proxy(FaultyProxy): What stands between the broker and the server.
      stock(bool): Whether the stack is left out.
      deliveries(object): The store of deliveries, or none.
      letters(MemoryDeadLetters): The store of letters.
      middleware(Iterable[Middleware]): Further middlewares.
    """

    def __init__(
        self,
        rabbitmq: PrivateRabbitMQ,
        url: str,
        *,
        proxy: FaultyProxy | None = None,
        stock: bool = False,
        deliveries: Any = None,
        letters: Any = None,
        middleware: Iterable[Middleware] = (),
    ) -> None:
        self.rabbitmq = rabbitmq
        self.server = url
        self.letters = letters if letters is not None else MemoryDeadLetters()
        others = [AgeLimit(), TimeLimit(interval=100), ShutdownNotifications(), Callbacks(), Pipelines()]
        self.broker = RabbitmqBroker(
            url=proxy.through(url) if proxy is not None else url,
            confirm_delivery=True,
            middleware=[*others, CurrentMessage(), AsyncIO(), *middleware, Retries()],
        )
        if not stock:
            install(
                self.broker,
                Classify(builtin=False),
                JitterBackoff(log="summary", deliveries=deliveries, **BACKOFF),
                DeadLetter(self.letters),
            )
        self.worker: dramatiq.Worker | None = None
        self.planned: Counter[str] = Counter()
        self.dying: set[str] = set()
        self._lock = threading.Lock()
        self._runs: list[str] = []
        self._done: list[str] = []
        self._gates: dict[str, threading.Event] = {}
        self._declare()

    # -- the jobs ----------------------------------------------------------------------------------------------------

    def _declare(self) -> None:
        @dramatiq.actor(broker=self.broker, max_retries=10, throws=Refused, **BACKOFF)
        def job(key: str, fails: int = 0, gate: str = "", refused: bool = False) -> None:
            self._run(key)
            if gate:
                assert self.gate(gate).wait(60), f"nobody opened {gate}"
            self._end(key, fails, refused)

        @dramatiq.actor(broker=self.broker, max_retries=10, throws=Refused, **BACKOFF)
        async def ajob(key: str, fails: int = 0, gate: str = "", refused: bool = False) -> None:
            self._run(key)
            if gate:
                assert await asyncio.to_thread(self.gate(gate).wait, 60), f"nobody opened {gate}"
            self._end(key, fails, refused)

        self.job, self.ajob = job, ajob

    def _run(self, key: str) -> None:
        with self._lock:
            self._runs.append(key)

    def _end(self, key: str, fails: int, refused: bool) -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        if refused:
            raise Refused(key)
        if message.options.get("retries", 0) < fails:
            raise RuntimeError(key)
        with self._lock:
            self._done.append(key)

    def gate(self, name: str) -> threading.Event:
        """The event that jobs with this gate wait for."""
        with self._lock:
            return self._gates.setdefault(name, threading.Event())

    def send(
        self,
        key: str,
        *,
        fails: int = 0,
        refused: bool = False,
        gate: str = "",
        delay: int | None = None,
        sync: bool = True,
    ) -> None:
        """Send a job, and plan how often it runs and how it ends."""
        self.planned[key] = 1 + fails
        if refused:
            self.dying.add(key)
        actor = self.job if sync else self.ajob
        actor.send_with_options(args=(key, fails, gate, refused), delay=delay)

    def send_unknown(self, key: str) -> None:
        """Send a message of an actor that no worker knows, and plan that it dies without having run."""
        self.dying.add(key)
        self.broker.enqueue(dramatiq.Message("default", "nobody", (key,), {}, {}))

    def pipe(self, *keys: str) -> Any:
        """Run jobs one after the other, as a pipeline, which is returned."""
        self.planned.update(keys)
        stages = [self.job.message_with_options(args=(key,), pipe_ignore=True) for key in keys]
        return dramatiq.pipeline(stages, broker=self.broker).run()

    # -- the worker --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def working(self, threads: int = 8) -> Iterator[dramatiq.Worker]:
        """Run a worker; it is stopped at the end, whatever happened."""
        self.worker = dramatiq.Worker(self.broker, worker_timeout=200, worker_threads=threads)
        self.worker.start()
        try:
            yield self.worker
        finally:
            for gate in self._gates.values():
                gate.set()
            self.worker.stop(timeout=10_000)
            self.broker.close()

    def consuming(self) -> set[int]:
        """The consumers, by identity, that are connected now; a reconnect makes new ones."""
        assert self.worker is not None
        found = set()
        for thread in self.worker.consumers.values():
            consumer: Any = thread.consumer
            if consumer is not None and consumer.connection.is_open:
                found.add(id(consumer.connection))
        return found

    def dead_threads(self) -> list[str]:
        """The worker and consumer threads that have died."""
        assert self.worker is not None
        threads: list[Any] = [*self.worker.workers, *self.worker.consumers.values()]
        return [repr(thread) for thread in threads if not thread.is_alive()]

    # -- the accounts ------------------------------------------------------------------------------------------------

    @property
    def runs(self) -> Counter[str]:
        """How often each job has been run."""
        with self._lock:
            return Counter(self._runs)

    @property
    def done(self) -> Counter[str]:
        """How often each job has come to its good end."""
        with self._lock:
            return Counter(self._done)

    @property
    def surplus(self) -> dict[str, int]:
        """The runs beyond the plan."""
        return dict(self.runs - self.planned)

    @property
    def missing(self) -> dict[str, int]:
        """The planned runs that did not happen."""
        return dict(self.planned - self.runs)

    @property
    def buried(self) -> Counter[str]:
        """The jobs that left a letter."""
        return Counter(letter.args[0] for letter in self.letters.page(limit=500).letters if letter.args)

    def waiting(self) -> int:
        """How many messages lie ready on the queue and the delay queue."""
        with contextlib.closing(pika.BlockingConnection(pika.URLParameters(self.server))) as connection:
            channel = connection.channel()
            names = ("default", "default.DQ")
            return sum(int(channel.queue_declare(name, passive=True).method.message_count) for name in names)

    def unsettled(self) -> dict[str, int]:
        """How many messages there are on each queue and delay queue, delivered or not."""
        return unsettled(self.rabbitmq, self.server)

    def dead(self) -> Counter[str]:
        """The jobs among the broker's own dead letters."""
        return dead(self.server)

    def finish(self, timeout: float = 45.0) -> None:
        """Wait until every job has come to the end that was planned for it."""
        good = self.planned.keys() - self.dying
        wait_until(
            lambda: good <= self.done.keys() and self.dying <= self.buried.keys(),
            timeout,
            lambda: (
                f"the end: not done {good - self.done.keys()}, not buried {self.dying - self.buried.keys()}, "
                f"missing {self.missing}, surplus {self.surplus}"
            ),
        )

    def check(self, timeout: float = 15.0) -> None:
        """Wait until the queues are empty, and hold what happened against the plan."""
        wait_until(
            lambda: not self.unsettled(), timeout, lambda: f"empty queues: {self.unsettled()}, surplus {self.surplus}"
        )
        assert [] == self.dead_threads()
        assert self.planned == self.runs, f"surplus {self.surplus}, missing {self.missing}"
        assert dict.fromkeys(self.dying, 1) == self.buried
