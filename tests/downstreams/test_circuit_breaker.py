"""A failing downstream is left alone, and nobody's attempt is burnt over it; what is well pays nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any, ClassVar

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import (
    CircuitBreaker,
    IdempotencyGuard,
    JitterBackoff,
    Retryable,
    connect,
    current_delivery,
    install,
)
from dramatiq_guard.errors import SetupError, StoreUnavailable
from dramatiq_guard.policy.breaker import Mode, force
from dramatiq_guard.stores.memory.breakers import MemoryBreakers
from tests.support.waiting import wait_until

from .conftest import Bench

MakeBench = Callable[..., Bench]


class Store(MemoryBreakers):
    """Breakers in memory that count who asks, and may be out."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.out = False

    def update(self, name: str, change: Any) -> Any:
        self.asked += 1
        if self.out:
            raise StoreUnavailable("out")
        return super().update(name, change)


# -- an outage -------------------------------------------------------------------------------------------------------


def test_an_outage_is_met_once_and_not_by_every_message(bench: MakeBench) -> None:
    """A few fail until the breaker opens, then one at a time tries; when it is over all are done."""
    here = bench()
    charge = here.actor()
    here.work()
    messages = 60
    here.downstream.does = "fail"
    for at in range(messages):
        charge.send(at)
    here.until(Mode.OPEN)
    wait_until(lambda: here.downstream.calls["fail"] >= 6)

    here.downstream.does = "answer"
    wait_until(lambda: len(here.downstream.order) == messages, 60, lambda: (here.state(), here.downstream.calls))

    assert sorted(here.downstream.order) == list(range(messages))
    # Four threads and the probes, and not sixty.
    assert here.downstream.calls["fail"] < messages // 2
    assert here.letters.page().letters == ()


def test_what_is_put_off_has_made_no_attempt(bench: MakeBench) -> None:
    """Not one, however long the outage: with no retry to spare all messages are done in the end."""
    here = bench()
    attempts: list[int] = []
    done = threading.Lock()

    def work(of: int) -> None:
        here.downstream.call(of)
        with done:
            attempts.append(current_delivery().attempt)

    charge = here.actor(work, max_retries=0)
    here.stores.breakers.update("payments", lambda state, now: (force(state, Mode.FORCED_OPEN, now), None))
    here.work()
    for at in range(20):
        charge.send(at)
    known = here.breaker.gates._known
    wait_until(lambda: known and known["payments"].gate.mode is Mode.FORCED_OPEN)
    assert attempts == []

    here.stores.breakers.update("payments", lambda state, now: (force(state, Mode.CLOSED, now), None))
    wait_until(lambda: len(attempts) == 20, 60, lambda: here.state())
    assert attempts == [1] * 20
    assert here.letters.page().letters == ()


def test_a_permanent_error_is_an_answer(bench: MakeBench) -> None:
    """However many there are: a downstream that refuses is well."""
    here = bench()
    charge = here.actor()
    here.downstream.does = "refuse"
    here.work()
    for at in range(40):
        charge.send(at)

    wait_until(lambda: here.downstream.calls["refuse"] == 40)
    assert here.state().mode is Mode.CLOSED


def test_a_retry_after_holds_everybody_back(bench: MakeBench) -> None:
    """One is told to come back later, and no other is sent to be told the same."""
    here = bench()
    calls: list[int] = []

    class Busy(Exception):
        class response:
            status_code = 503
            headers: ClassVar = {"Retry-After": "600"}

    def work(of: int) -> None:
        calls.append(of)
        raise Busy if not calls[1:] else Retryable("again")

    Busy.__module__, Busy.__qualname__ = "requests.exceptions", "HTTPError"
    charge = here.actor(work)
    here.work(threads=1)
    charge.send(0)
    here.until(Mode.OPEN)
    for at in range(1, 20):
        charge.send(at)
    wait_until(lambda: here.breaker.gates._known["payments"].gate.mode is Mode.OPEN)

    assert here.state().floor - here.state().at > 500_000
    assert len(calls) == 1


def test_another_downstream_is_not_touched(bench: MakeBench) -> None:
    """Nor is an actor without one."""
    here = bench()
    charge = here.actor()
    seen: list[str] = []
    ship = here.actor(lambda: seen.append("ship"), actor_name="ship", downstream="courier")
    count = here.actor(lambda: seen.append("count"), actor_name="count", downstream=None)
    here.downstream.does = "fail"
    here.work()
    for at in range(20):
        charge.send(at)
    here.until(Mode.OPEN)
    for actor in (ship, count):
        actor.send()

    wait_until(lambda: sorted(seen) == ["count", "ship"])


# -- what is well ----------------------------------------------------------------------------------------------------


def test_a_downstream_that_is_well_costs_no_round_trip(bench: MakeBench) -> None:
    """A process reports when it first meets it, and then every few seconds; not for each message."""
    store = Store()
    here = bench(breakers=store)
    charge = here.actor()
    here.work()
    for at in range(300):
        charge.send(at)

    wait_until(lambda: len(here.downstream.order) == 300)
    assert store.asked < 10


def test_while_its_store_is_out_all_messages_go(bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once; and the breaker is back with its store."""
    store = Store()
    store.out = True
    here = bench(breakers=store)
    charge = here.actor()
    with caplog.at_level(logging.WARNING, "dramatiq_guard.downstreams"):
        here.work()
        for at in range(40):
            charge.send(at)
        wait_until(lambda: len(here.downstream.order) == 40)
        wait_until(lambda: store.asked > 1)
        store.out = False
        wait_until(lambda: "answers again" in caplog.text)

    assert caplog.text.count("The store of CircuitBreaker does not answer (out); all messages go freely") == 1
    here.downstream.does = "fail"
    for at in range(20):
        charge.send(at)
    wait_until(lambda: (known := store.read("payments")) is not None and known.mode is Mode.OPEN)


def test_the_thread_that_reports_survives_whatever_happens(bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    """Without it a breaker that is open would stay so for ever."""
    here = bench()
    gates, report = here.breaker.gates, here.breaker.gates.report
    calls: list[None] = []

    def broken() -> int:
        calls.append(None)
        if len(calls) == 1:
            raise RuntimeError("what nobody thought of")
        return report()

    gates.report = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "dramatiq_guard.downstreams"):
        here.work()
        wait_until(lambda: len(calls) > 1)

    assert "Reporting of the downstreams failed" in caplog.text


# -- beside the idempotency guard ------------------------------------------------------------------------------------


def test_a_duplicate_needs_no_admission(bench: MakeBench) -> None:
    """It calls nobody: it gets its result while the downstream is paused."""
    here = bench(IdempotencyGuard(connect("memory://").idempotency))
    done = threading.Event()

    def work(of: str) -> str:
        here.downstream.call(of)
        return of

    charge = here.actor(work, idempotency_key="{of}", on_success="told")
    dramatiq.actor(lambda *_: done.set(), actor_name="told", broker=here.broker)
    here.work()
    charge.send("a")
    wait_until(done.is_set)
    here.stores.breakers.update("payments", lambda state, now: (force(state, Mode.FORCED_OPEN, now), None))
    wait_until(lambda: here.breaker.gates._known["payments"].gate.mode is Mode.FORCED_OPEN, 30)
    done.clear()

    charge.send("a")

    wait_until(done.is_set)
    assert here.downstream.order == ["a"]


def test_what_is_put_off_holds_no_key(bench: MakeBench) -> None:
    """Its claim is given back, for whoever comes first when the downstream is back."""
    keys = connect("memory://").idempotency
    here = bench(IdempotencyGuard(keys))
    charge = here.actor(idempotency_key="{what}")
    here.stores.breakers.update("payments", lambda state, now: (force(state, Mode.FORCED_OPEN, now), None))
    here.work()
    charge.send("a")

    wait_until(lambda: [record.state for record in keys.page().records] == ["free"])


# -- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "looks"), [({"downstream": "payments"}, 100), ({}, 1_000)])
def test_what_falls_due_is_looked_for_more_often(options: dict[str, Any], looks: int) -> None:
    """By the threads of delay queues, where there is an actor that calls a downstream; else nothing is changed."""
    broker = StubBroker()
    install(broker, JitterBackoff(), CircuitBreaker(MemoryBreakers()))
    dramatiq.actor(lambda: None, actor_name="charge", broker=broker, **options)
    worker = dramatiq.Worker(broker, worker_timeout=1_000, worker_threads=1)
    worker.start()
    try:
        wait_until(lambda: {"default", "default.DQ"} == set(worker.consumers))
        wait_until(lambda: looks == worker.consumers["default.DQ"].worker_timeout)
        assert 1_000 == worker.consumers["default"].worker_timeout
    finally:
        worker.stop()


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"failure_ratio": 0}, "failure_ratio must be a share above 0 and below 1"),
        ({"failure_ratio": "half"}, "failure_ratio must be a share"),
        ({"min_failures": 0}, "min_failures must be a whole number from 1"),
        ({"min_failures": 2.5}, "min_failures must be a whole number from 1"),
        ({"first_rate": -1}, "first_rate must be a number of messages per second"),
        ({"first_rate": float("inf")}, "first_rate must be a number of messages per second"),
        ({"waiting_threads": True}, "waiting_threads must be a whole number of threads"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], said: str) -> None:
    """And what may be written instead."""
    with pytest.raises(SetupError, match=said):
        CircuitBreaker(MemoryBreakers(), **options)


def test_its_store_must_keep_breakers() -> None:
    """Not letters."""
    with pytest.raises(SetupError, match=r"e\.g\. connect\('redis://…'\)\.breakers"):
        CircuitBreaker(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("downstream", ["", 7, ["a"]])
def test_an_actor_must_name_what_it_calls(downstream: Any) -> None:
    """By a name or a function; it is said when the actor is declared."""
    broker = StubBroker()
    install(broker, JitterBackoff(), CircuitBreaker(MemoryBreakers()))

    with pytest.raises(SetupError, match=r"Actor 'charge': downstream must be the name"):
        dramatiq.actor(lambda: None, actor_name="charge", broker=broker, downstream=downstream)


# -- a function of the message ---------------------------------------------------------------------------------------


def test_a_function_may_tell_the_downstream(bench: MakeBench) -> None:
    """Each shard has a breaker of its own; ``None`` means that this message calls nobody."""
    here = bench()
    charge = here.actor(downstream=lambda message: message.args[0] and f"shard-{message.args[0]}")
    here.work()
    for at in (1, 2, 0):
        charge.send(at)

    wait_until(lambda: sorted(here.downstream.order) == [0, 1, 2])
    wait_until(lambda: here.stores.breakers.names() == ("shard-1", "shard-2"))


@pytest.mark.parametrize("answer", [17, "", KeyError("shard")])
def test_a_function_that_fails_holds_nobody_up(bench: MakeBench, caplog: pytest.LogCaptureFixture, answer: Any) -> None:
    """The message goes freely, and the log says it, once."""
    here = bench()

    def ask(_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    charge = here.actor(downstream=ask)
    with caplog.at_level(logging.ERROR, "dramatiq_guard.middleware.circuit_breaker"):
        here.work()
        for at in range(3):
            charge.send(at)
        wait_until(lambda: len(here.downstream.order) == 3)

    assert caplog.text.count("downstream of actor 'charge' did not give a name") == 1


# -- beside many that wait -------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_five_thousand_that_wait_hold_nobody_else_up(redis_url: str) -> None:
    """A message of another downstream that falls due is not behind those that were put off before it was sent.

    Dramatiq takes a delay queue out into its workers' memory, first come, first served: what does not fit waits until
    something there is due.
    """
    with closing(Bench(redis_url)) as here:
        charge = here.actor()
        arrived: list[int] = []
        ship = here.actor(
            lambda: arrived.append(here.broker.client.hlen("dramatiq:default.DQ.msgs")),
            actor_name="ship",
            downstream="courier",
        )
        here.stores.breakers.update("payments", lambda state, now: (force(state, Mode.FORCED_OPEN, now), None))
        for at in range(5_000):
            charge.send(at)
        here.work(threads=4)
        wait_until(lambda: here.broker.client.hlen("dramatiq:default.DQ.msgs") >= 4_900, 120)

        ship.send_with_options(delay=1_000)

        wait_until(lambda: arrived, 60, lambda: here.broker.client.hlen("dramatiq:default.DQ.msgs"))
        # All the others were waiting still, and none had been given up for it.
        assert arrived[0] >= 4_500
        assert here.downstream.order == []
