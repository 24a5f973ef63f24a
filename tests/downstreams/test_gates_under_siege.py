"""Gates where much goes on: long jobs, names without end, workers that come and go, one record that fails."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any

import pytest

from dramatiq_guard.downstreams.gates import Gates
from dramatiq_guard.errors import StoreError
from dramatiq_guard.policy.breaker import Limits, Mode
from dramatiq_guard.stores.memory.breakers import MemoryBreakers
from dramatiq_guard.telemetry import signals
from tests.support.waiting import wait_until

from .conftest import Bench


@pytest.mark.timeout(120)
def test_a_long_job_does_not_keep_its_queue_held(redis_url: str) -> None:
    """One that was let through while all was well is not one that waits."""
    with closing(Bench(redis_url)) as bench:
        release, started = threading.Event(), threading.Event()

        def work(what: object) -> None:
            if what == "long":
                started.set()
                release.wait(100)
                return
            bench.downstream.call(what)

        charge = bench.actor(work, queue_name="payments")
        bench.work(threads=4)
        try:
            charge.send("warm")
            wait_until(lambda: bench.downstream.order == ["warm"])
            charge.send("long")
            assert started.wait(10)
            bench.downstream.does = "fail"
            for at in range(20):
                charge.send(at)
            bench.until(Mode.OPEN)
            failed = bench.downstream.calls["fail"]
            # Probes go on beyond what had been fetched before.
            wait_until(lambda: bench.downstream.calls["fail"] >= failed + 9, 60, lambda: bench.downstream.calls)
            bench.downstream.does = "answer"
            wait_until(lambda: len(bench.downstream.order) == 21, 60, lambda: bench.downstream.calls)
        finally:
            release.set()


class Declined(Exception):
    """An answer of the bank; no rule knows it."""


@pytest.mark.timeout(60)
def test_what_an_actor_throws_by_design_is_an_answer(redis_url: str) -> None:
    """`throws` names what is no failure: a downstream that gives such answers is well."""
    with closing(Bench(redis_url)) as bench:
        calls: list[int] = []

        def work(of: int) -> None:
            calls.append(of)
            raise Declined

        charge = bench.actor(work, throws=Declined)
        bench.work()
        for at in range(40):
            charge.send(at)
        wait_until(lambda: len(calls) == 40, 10, lambda: (len(calls), bench.state().mode))


class Counting(MemoryBreakers):
    asked = 0

    def update(self, name: str, change: Any) -> Any:
        self.asked += 1
        if name == "bad":
            raise StoreError("index row size exceeds btree maximum")
        return super().update(name, change)


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "dramatiq-guard-breakers"]


def test_a_worker_that_is_started_again_has_one_reporting_thread() -> None:
    """Whatever was stopped a moment ago ends."""
    before = len(threads())
    gates = Gates(MemoryBreakers(), Limits())
    for _ in range(5):
        gates.start(4)
        gates.close()
    gates.start(4)
    wait_until(lambda: len(threads()) == before + 1, 5, lambda: len(threads()) - before)
    gates.close()


def test_closing_one_of_two_workers_leaves_the_other_its_reports() -> None:
    """A breaker that nobody reports of any more would stay open for ever."""
    store = Counting()
    gates = Gates(store, Limits())
    gates.start(4)
    gates.start(4)
    gates.close()
    gates.enter("a", again=False, hurried=lambda: False)
    gates.left("a", 0, ok=False)
    asked = store.asked
    try:
        wait_until(lambda: store.asked > asked, 8)
    finally:
        gates.close()


def test_downstreams_that_nobody_calls_are_left_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names made of messages fill neither the memory nor the store's time."""
    store = Counting()
    gates = Gates(store, Limits())
    gates.start(4)
    for at in range(200):
        gates.answered(f"n-{at}", gates.enter(f"n-{at}", again=False, hurried=lambda: False))
    try:
        wait_until(lambda: not any(each.met for each in gates._known.values()), 40, lambda: store.asked)
        asked = store.asked
        gates.left("n-7", 0, ok=False)
        wait_until(lambda: store.asked > asked, 5)
        gates.enter("n-8", again=False, hurried=lambda: False)
        assert store.asked <= asked + 3
    finally:
        gates.close()


def test_one_record_that_fails_is_not_the_store_being_out(caplog: pytest.LogCaptureFixture) -> None:
    """Said once, not again and again, nor taken back by each other downstream."""
    gates = Gates(Counting(), Limits())
    gates.start(4)
    try:
        for name in ("bad", "good"):
            gates.enter(name, again=False, hurried=lambda: False)
        deadline = time.monotonic() + 6
        wait_until(lambda: time.monotonic() > deadline, 10)
        assert caplog.text.count("does not answer") <= 1
        assert caplog.text.count("answers again") == 0
    finally:
        gates.close()


def test_the_gauge_knows_a_downstream_that_is_well_and_forgets_an_earlier_worker() -> None:
    """Closed is 0 in it, and not missing; what an earlier worker of this process knew is not said any more."""
    signals.breakers.clear()
    gates = Gates(MemoryBreakers(), Limits())
    gates.start(4)
    gates.enter("payments", again=False, hurried=lambda: False)
    try:
        assert dict(signals.breakers) == {"payments": "closed"}
        signals.breakers["payments"] = "open"  # left by an earlier worker of this process
        gates.close()
        gates.start(4)
        gates.enter("payments", again=False, hurried=lambda: False)
        assert dict(signals.breakers) == {"payments": "closed"}
    finally:
        gates.close()
        signals.breakers.clear()
