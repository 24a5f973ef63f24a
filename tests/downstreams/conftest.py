"""A broker with a circuit breaker, and a downstream that does as it is told."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import CircuitBreaker, Classify, DeadLetter, JitterBackoff, Permanent, Retryable, connect, install
from dramatiq_guard.policy.breaker import Mode, State
from tests.support.waiting import wait_until


class Downstream:
    """What actors call: it answers, fails, or says that they shall come back later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.does = "answer"
        self.calls: Counter[str] = Counter()
        self.order: list[Any] = []

    def call(self, what: Any = None) -> None:
        """Be called."""
        with self._lock:
            does = self.does
            self.calls[does] += 1
            if does == "answer":
                self.order.append(what)
        if does == "fail":
            time.sleep(0.02)  # as one that times out; none fails in no time
            raise Retryable("out")
        if does == "refuse":
            raise Permanent("no")


class Bench:
    """A broker, its stores and a worker.

    Parameters:
      url(str | None): Of a Redis for broker and breakers; in memory without one.
      guards(Any): Further guard middlewares.
      **options(Any): Of the CircuitBreaker; ``breakers`` is its store.
    """

    def __init__(self, url: str | None, *guards: Any, **options: Any) -> None:
        self.stores = connect(url or "memory://")
        self.broker: Any = StubBroker() if url is None else RedisBroker(url=url)  # type: ignore[no-untyped-call]
        self.broker.emit_after("process_boot")
        self.letters = connect("memory://").dead_letters
        self.breaker = CircuitBreaker(options.pop("breakers", self.stores.breakers), **options)
        install(
            self.broker,
            Classify(),
            JitterBackoff(min_backoff=20, max_backoff=50, max_retries=1_000, log="summary"),
            DeadLetter(self.letters),
            self.breaker,
            *guards,
        )
        self.downstream = Downstream()
        self.worker: dramatiq.Worker | None = None

    def actor(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """An actor that calls the downstream, unless it is another."""
        options = {"downstream": "payments", "actor_name": "charge", **options}
        return dramatiq.actor(function or self.downstream.call, broker=self.broker, **options)

    def work(self, threads: int = 4) -> None:
        """Start a worker."""
        self.worker = dramatiq.Worker(self.broker, worker_timeout=20, worker_threads=threads)
        self.worker.start()

    def state(self, name: str = "payments") -> State:
        """What the store knows of a downstream."""
        return self.stores.breakers.read(name) or State()

    def until(self, mode: Mode, name: str = "payments") -> None:
        """Wait until a breaker is in a mode."""
        wait_until(lambda: self.state(name).mode is mode, 20, lambda: self.state(name))

    def close(self) -> None:
        """Stop everything."""
        if self.worker is not None:
            self.worker.stop()
        self.broker.close()
        self.stores.close()


@pytest.fixture(params=["memory", "redis"])
def bench(request: pytest.FixtureRequest) -> Iterator[Callable[..., Bench]]:
    """Makes benches: broker and breakers in memory, or both on Redis."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    with ExitStack() as stack:
        yield lambda *guards, **options: stack.enter_context(closing(Bench(url, *guards, **options)))
