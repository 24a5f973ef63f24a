"""CircuitBreaker, in real worker threads, with its breakers on a real server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.worker import Worker

from dramatiq_guard import Classify, JitterBackoff, Permanent, install
from dramatiq_guard.errors import SetupError, StoreUnavailable
from dramatiq_guard.middleware.circuit_breaker import CircuitBreaker
from dramatiq_guard.policy.breaker import Mode
from dramatiq_guard.stores.breaker import Breakers
from dramatiq_guard.stores.redis.breaker import RedisBreakers
from dramatiq_guard.stores.redis.connection import RedisConnection


def until(true: Callable[[], bool], within: float = 40.0) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.01)


@pytest.fixture
def breakers(redis_url: str) -> Iterator[Breakers]:
    """Breakers on a real server."""
    with closing(RedisConnection(redis_url)) as connection:
        yield Breakers(RedisBreakers(connection))


class Downstream:
    """What the actor calls."""

    def __init__(self) -> None:
        self.up = True
        self.calls = 0
        self.latency = 0.0
        self.done: set[int] = set()

    def call(self, number: int) -> None:
        self.calls += 1
        time.sleep(self.latency)
        if not self.up:
            raise ConnectionError("refused")
        if number < 0:
            raise Permanent("no such order")
        self.done.add(number)


@contextmanager
def working(breaker: CircuitBreaker, called: Downstream, **options: object) -> Iterator[dramatiq.Actor]:
    broker = StubBroker()
    install(broker, Classify(), JitterBackoff(min_backoff=200, max_backoff=1_000, max_retries=None), breaker)

    @dramatiq.actor(broker=broker, **({"downstream": "shop"} | options))
    def order(number: int) -> None:
        called.call(number)

    worker = Worker(broker, worker_threads=4, worker_timeout=50)
    worker.start()
    try:
        yield order
    finally:
        worker.stop()


def test_an_outage_is_not_called_into_and_everything_is_done_after_it(breakers: Breakers) -> None:
    """Few calls while it is down, few more than one a message in all."""
    downstream = Downstream()
    with working(CircuitBreaker(breakers), downstream) as order:
        downstream.latency = 0.02
        order.send(1_000)
        until(lambda: downstream.done == {1_000})
        downstream.up = False
        for number in range(40):
            order.send(number)
        until(lambda: "shop" in breakers.states() and breakers.states()["shop"].mode is Mode.OPEN)
        calls = downstream.calls
        assert calls <= 25
        downstream.up = True
        until(lambda: len(downstream.done) == 41)

    assert downstream.calls <= calls + 40 + 5


def test_permanent_errors_open_nothing(breakers: Breakers) -> None:
    """A downstream that says no is up."""
    downstream = Downstream()
    with working(CircuitBreaker(breakers), downstream, throws=()) as order:
        for number in range(1, 21):
            order.send(-number)
        until(lambda: downstream.calls == 20)
        order.send(1)
        until(lambda: 1 in downstream.done)

    assert breakers.states()["shop"].mode is Mode.CLOSED


def test_a_pause_holds_one_downstream_and_no_other(breakers: Breakers) -> None:
    """What the function of the message names is what is held."""
    downstream = Downstream()
    breakers.force("shop-1", Mode.FORCED_OPEN)
    with working(CircuitBreaker(breakers), downstream, downstream=lambda message: f"shop-{message.args[0]}") as order:
        order.send(1)
        order.send(2)
        until(lambda: downstream.done == {2})
        assert downstream.calls == 1


def test_an_actor_without_a_downstream_is_left_alone(breakers: Breakers) -> None:
    """The breaker is off unless an actor asks for it."""
    downstream = Downstream()
    with working(CircuitBreaker(breakers), downstream, downstream=None) as order:
        order.send(1)
        until(lambda: downstream.done == {1})

    assert breakers.states() == {}


def test_a_store_that_is_out_holds_nobody_back(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and the work goes on."""

    class Gone:
        def exchange(self, key: str, report: object) -> object:
            raise StoreUnavailable("no such host")

    downstream = Downstream()
    with caplog.at_level(logging.WARNING), working(CircuitBreaker(Gone()), downstream) as order:
        for number in range(20):
            order.send(number)
        until(lambda: len(downstream.done) == 20)

    assert [record.message for record in caplog.records if "nothing is held back" in record.message]


def test_a_healthy_downstream_costs_few_exchanges(breakers: Breakers) -> None:
    """One at the start, then one in seconds."""

    class Counting(Breakers):
        exchanges = 0

        def exchange(self, key, report):
            self.exchanges += 1
            return super().exchange(key, report)

    counting, downstream = Counting(breakers.records), Downstream()
    with working(CircuitBreaker(counting), downstream) as order:
        for number in range(200):
            order.send(number)
        until(lambda: len(downstream.done) == 200)

    assert counting.exchanges <= 5


@pytest.mark.parametrize("options", [{"room": 0}, {"patience": -1}])
def test_numbers_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    """At once, with what is allowed."""
    with pytest.raises(SetupError, match="room ≥ 1"):
        CircuitBreaker(None, **options)


def test_a_downstream_that_is_no_name_is_refused() -> None:
    """When the actor is declared."""
    with pytest.raises(SetupError, match="must be a name"), working(CircuitBreaker(None), Downstream(), downstream=7):
        pass
