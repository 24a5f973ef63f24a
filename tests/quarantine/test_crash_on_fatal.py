"""What CrashOnFatal costs a message, and what it says of wrong options."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import CrashOnFatal, JitterBackoff, connect, install
from dramatiq_guard.errors import SetupError
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.wiring import stack_of
from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until


@pytest.fixture(params=["redis", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    """A server for the store."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    if request.param == "postgres":
        apply_schema(url)
    return url


def test_an_ordinary_message_waits_for_no_answer_of_the_store(store_url: str, valkey: Any) -> None:
    """Two hundred messages are done while the store's answers are held back."""
    broker = RedisBroker(url=valkey.url, namespace="costs")
    with FaultyProxy(store_url) as proxy, closing(connect(proxy.through(store_url))) as stores:
        install(broker, JitterBackoff(), CrashOnFatal(stores.deliveries, heartbeat=60_000))
        done: list[int] = []

        @dramatiq.actor(broker=broker)
        def work(number: int) -> None:
            done.append(number)

        worker = dramatiq.Worker(broker, worker_threads=4, worker_timeout=50)
        worker.start()
        work.send(0)
        wait_until(lambda: done)
        proxy.blackhole(replies_only=True)
        for number in range(1, 201):
            work.send(number)
        wait_until(lambda: len(done) == 201)
        broker.join("default")
        if store_url.startswith("redis"):
            proxy.heal()
            turns = proxy.turns
            for number in range(201, 401):
                work.send(number)
            wait_until(lambda: len(done) == 401)
            assert turns == proxy.turns, "on Redis there is not even an answer"
        proxy.heal()
        worker.stop()
        broker.flush_all()
        broker.close()


def test_the_heartbeat_is_short_enough_for_the_broker() -> None:
    """Redis returns what a dead worker held after its own timeout; by then everybody must know what it died of."""
    broker = StubBroker()
    broker.heartbeat_timeout = 2_000  # type: ignore[attr-defined]
    guard = CrashOnFatal(connect("memory://").deliveries)
    install(broker, JitterBackoff(), guard)
    worker = dramatiq.Worker(broker, worker_threads=1)
    worker.start()
    try:
        assert guard._quarantine is not None
        # Three without a sign, one until somebody looks, one until all have heard; and the broker's own are as old as a
        # quarter of its timeout.
        assert 5 * guard._quarantine.every < 2_000 * 3 / 4
    finally:
        worker.stop()


@pytest.mark.parametrize(
    "options",
    [
        {"deliveries": "redis://localhost"},
        {"max_crashes": 0},
        {"max_crashes": True},
        {"max_memory": "1G"},
        {"window": "3d"},
        {"heartbeat": 0},
        {"stuck_after": -1},
        {"held_after": timedelta(seconds=-1)},
    ],
    ids=str,
)
def test_a_wrong_option_is_named(options: dict[str, Any]) -> None:
    """When the middleware is made, not when a worker boots."""
    (name,) = options
    with pytest.raises(SetupError, match="CrashOnFatal") as refused:
        CrashOnFatal(**options)
    assert name in str(refused.value) or name == "deliveries"


@pytest.fixture
def working() -> Iterator[Any]:
    """Starts a worker with CrashOnFatal and no store; says for what it would end."""
    workers = []

    def work(**options: Any) -> StubBroker:
        broker = StubBroker()
        install(broker, JitterBackoff(), CrashOnFatal(**options))
        worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=10)
        worker.start()
        workers.append(worker)
        return broker

    yield work
    for worker in workers:
        worker.stop()
        worker.broker.close()


class Broken:
    """Raises when it is destroyed."""

    def __del__(self) -> None:
        raise ValueError("in a destructor")


def test_an_error_in_a_destructor_is_fatal_where_it_is_asked_for(working: Any, capsys: Any) -> None:
    """By default it is only printed, as always."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        tolerant = working()
        Broken()
        assert not stack_of(tolerant).exit.begun

        strict = working(unraisable_errors=True)
        Broken()
        wait_until(lambda: stack_of(strict).exit.begun)
        assert "ValueError was raised where nobody can catch it" in stack_of(strict).exit.reason
    finally:
        sys.unraisablehook = before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_exits_is_no_error(working: Any) -> None:
    """Nor is one that dies where nobody shall care."""
    broker = working()
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()
    assert not stack_of(broker).exit.begun
