"""A clock that the test turns, and workers on a broker in memory that are stopped at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import dramatiq.worker
import pytest
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import Classify, clock, install


class TurnedClock(clock.SystemClock):
    """The system's clock, and what the test adds to it."""

    def __init__(self) -> None:
        self.added = 0

    def now(self) -> int:
        return super().now() + self.added

    def monotonic(self) -> int:
        return super().monotonic() + self.added


@pytest.fixture
def turned() -> Iterator[TurnedClock]:
    """The clock that everything uses during the test."""
    turned = TurnedClock()
    with clock.use(turned):
        yield turned


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dramatiq.Worker]]:
    """Starts a worker on a broker with the stack; one in memory, by default."""
    monkeypatch.setattr(dramatiq.worker, "CONSUMER_RESTART_DELAY_SECS", 0.02)
    workers: list[dramatiq.Worker] = []

    def work(broker: Any = None, *, threads: int = 2, boot: bool = True) -> dramatiq.Worker:
        if broker is None:
            broker = StubBroker()
        install(broker, Classify())
        broker.declare_queue("default")
        worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=threads)
        if boot:
            worker.start()
            workers.append(worker)
        return worker

    yield work
    for worker in workers:
        worker.stop(timeout=5_000)
        worker.broker.close()


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The exceptions that ended threads."""
    ended: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_value))
    return ended
