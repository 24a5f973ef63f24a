"""Waiting for a downstream, beside all else that may befall a message: a shutdown, a limit, a pipeline, a coroutine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import GroupCallbacks
from dramatiq.middleware.asyncio import AsyncIO
from dramatiq.rate_limits.backends import StubBackend as Barriers
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

from dramatiq_guard import GracefulShutdown, Retryable, current_delivery
from dramatiq_guard.downstreams import gates
from dramatiq_guard.policy.breaker import Lease, Mode
from dramatiq_guard.stores.memory.breakers import MemoryBreakers
from tests.support.waiting import wait_until

from .conftest import Bench

SHUT = Lease(Mode.RECOVERING, 1, tokens=0, look=100, apart=20.0, soonest=100, latest=300)


class Dial(MemoryBreakers):
    """Breakers that say what they are told to, whatever is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.lease = SHUT
        self.asked = 0
        self.reports: list[Any] = []

    def update(self, name: str, change: Any) -> Any:
        self.asked += 1
        return self.lease

    def let_go(self) -> None:
        """Everything may go."""
        self.lease = Lease(Mode.CLOSED, 2, look=1_000)


@pytest.fixture
def dial() -> Dial:
    return Dial()


@pytest.fixture
def bench(dial: Dial, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Where threads wait for their turn until somebody says otherwise; two actors share the queue, so none is held."""
    monkeypatch.setattr(gates, "_PATIENCE", 600_000)
    with closing(Bench(redis_url, GracefulShutdown(), breakers=dial, waiting_threads=4)) as here:
        here.actor(lambda: None, actor_name="other", downstream=None)
        yield here


def waiting(bench: Bench) -> int:
    """How many threads wait."""
    known = bench.breaker.gates._known.get("payments")
    return 0 if known is None else known.gate.waiting


@pytest.mark.timeout(60)
def test_who_waits_leaves_when_the_worker_is_told_to_stop(bench: Bench, dial: Dial) -> None:
    """At once, whatever the gate says; its message was not tried, and is where the others are."""
    charge = bench.actor(max_retries=0)
    bench.work(threads=4)
    for at in range(3):
        charge.send(at)
    wait_until(lambda: waiting(bench) == 3, 20)

    dial.lease = replace(SHUT, look=60_000)
    assert bench.worker is not None
    bench.worker.stop()
    bench.worker = None

    kept = [
        json.loads(raw)
        for queue in ("default", "default.DQ")
        for raw in bench.broker.client.hvals(f"dramatiq:{queue}.msgs")
    ]
    assert sorted(message["args"][0] for message in kept) == [0, 1, 2]
    assert not any(message["options"].get("retries") for message in kept)
    assert bench.downstream.order == []
    assert bench.letters.page().letters == ()


@pytest.mark.timeout(60)
def test_waiting_for_a_turn_is_no_part_of_the_time_limit(bench: Bench, dial: Dial) -> None:
    """The clock of a job begins when it does."""
    charge = bench.actor(time_limit=100, max_retries=0)
    bench.work()
    charge.send("patient")
    wait_until(lambda: waiting(bench) == 1, 20)
    asked = dial.asked
    wait_until(lambda: dial.asked > asked + 25, 30)  # two and a half seconds: limits are looked at every second

    dial.let_go()
    wait_until(lambda: bench.downstream.order == ["patient"], 20)
    assert bench.letters.page().letters == ()


@pytest.mark.timeout(60)
def test_what_grows_too_old_meanwhile_is_dropped(bench: Bench, dial: Dial) -> None:
    """An age limit holds for what was put off as for anything else."""
    dial.lease = replace(SHUT, mode=Mode.FORCED_OPEN, apart=0.0)
    charge = bench.actor(max_age=100)
    bench.work()
    charge.send("old")

    (letter,) = wait_until(lambda: bench.letters.page().letters, 30)
    assert letter.reason == "expired"
    assert bench.downstream.order == []


@pytest.mark.timeout(60)
def test_a_pipeline_goes_on_once_its_stage_was_let_through(bench: Bench, dial: Dial) -> None:
    """With the result, and once."""
    backend = StubBackend()
    bench.broker.add_middleware(Results(backend=backend))
    dial.lease = replace(SHUT, mode=Mode.FORCED_OPEN, apart=0.0)
    double = bench.actor(lambda number: 2 * number, store_results=True)
    told: list[int] = []
    tell = bench.actor(told.append, actor_name="tell", downstream=None)
    bench.work()
    pipe = dramatiq.pipeline([double.message(21), tell.message()], broker=bench.broker).run()
    wait_until(lambda: bench.broker.client.hlen("dramatiq:default.DQ.msgs") == 1, 20)
    assert told == []

    dial.let_go()
    wait_until(lambda: told == [42], 30)
    assert pipe.messages[0].get_result(backend=backend, block=True, timeout=5_000) == 42


@pytest.mark.timeout(60)
def test_a_group_is_complete_when_all_were_let_through(bench: Bench, dial: Dial) -> None:
    """What is put off counts as not done."""
    bench.broker.add_middleware(GroupCallbacks(Barriers()))  # type: ignore[no-untyped-call]
    dial.lease = replace(SHUT, mode=Mode.FORCED_OPEN, apart=0.0)
    charge = bench.actor()
    complete: list[int] = []
    tell = bench.actor(lambda: complete.append(len(bench.downstream.order)), actor_name="tell", downstream=None)
    bench.work()
    members = dramatiq.group([charge.message(at) for at in range(5)], broker=bench.broker)
    members.add_completion_callback(tell.message())
    members.run()
    wait_until(lambda: bench.broker.client.hlen("dramatiq:default.DQ.msgs") == 5, 20)
    assert complete == []

    dial.let_go()
    wait_until(lambda: complete == [5], 30)


@pytest.mark.timeout(60)
def test_a_coroutine_waits_as_any_other(bench: Bench, dial: Dial) -> None:
    """In its thread, and its outcome is told when it has ended and not when it has begun."""
    bench.broker.add_middleware(AsyncIO())
    outcomes: list[bool] = []
    left = bench.breaker.gates.left

    def told(name: str, period: int, *, ok: bool, retry_after: int | None = None) -> None:
        outcomes.append(ok)
        left(name, period, ok=ok, retry_after=retry_after)

    bench.breaker.gates.left = told  # type: ignore[method-assign]

    async def work(of: int) -> None:
        await asyncio.sleep(0)
        if current_delivery().attempt == 1:
            raise Retryable("not yet")
        bench.downstream.call(current_delivery().attempt)

    charge = bench.actor(work)
    bench.work()
    charge.send(1)
    wait_until(lambda: waiting(bench) == 1, 20)
    assert outcomes == []
    dial.let_go()

    wait_until(lambda: bench.downstream.order == [2], 20)
    assert outcomes[0] is False


@pytest.mark.timeout(60)
def test_a_worker_that_is_started_again_begins_anew(redis_url: str) -> None:
    """In the same process: it asks again what all others know, and one that was paused is paused."""
    with closing(Bench(redis_url)) as bench:
        charge = bench.actor()
        bench.work()
        charge.send(1)
        wait_until(lambda: bench.downstream.order == [1], 20)
        assert bench.worker is not None
        bench.worker.stop()
        bench.stores.breakers.update(
            "payments", lambda state, _: (replace(state, mode=Mode.FORCED_OPEN, since=state.at), None)
        )
        bench.work()
        charge.send(2)
        wait_until(lambda: bench.breaker.gates._known.get("payments"), 20)
        wait_until(lambda: bench.breaker.gates._known["payments"].gate.mode is Mode.FORCED_OPEN, 20)
        assert bench.downstream.order == [1]
