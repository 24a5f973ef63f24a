"""A store that is out, says nothing, or says something else: no work runs unguarded, twice, or not at all for it."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from dramatiq_guard import current_delivery
from dramatiq_guard.errors import StoreError
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import DONE, FREE, HELD
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.idempotency.bench import FAST, FOR_EVER, Bench, Faulty
from tests.idempotency.conftest import MakeBench
from tests.support.waiting import wait_until


@pytest.fixture
def store() -> Faulty:
    """A store that can be out."""
    return Faulty()


@pytest.fixture(params=["memory", "redis"])
def bench(request: pytest.FixtureRequest, store: Faulty, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bench on it."""
    from contextlib import ExitStack

    from tests.idempotency.conftest import _maker

    with ExitStack() as stack:
        yield _maker(request, request.param, stack)(store=store, store_wait=0)


# -- at the claim ----------------------------------------------------------------------------------------------------


def test_t27_a_message_waits_while_its_store_is_out(bench: Bench, store: Faulty) -> None:
    """It does not run, is put off, and burns nothing: with max_retries=0 it would be dead."""

    @bench.actor(idempotent=True, max_retries=0, store_results=True)
    def work() -> int:
        bench.note("attempt", current_delivery().attempt)
        return bench.note("run")

    store.out["claim"] = 4
    message = bench.run(work.message())

    assert store.asked("claim") == 5
    assert bench.count("run") == 1
    assert bench.notes("attempt") == [1]
    assert bench.result(message) == 1
    assert bench.letters() == []


def test_a_store_is_asked_again_before_the_message_is_put_off(in_memory: MakeBench, store: Faulty) -> None:
    """For store_wait: a hiccup costs no deferral."""
    bench = in_memory(store=store, store_wait=10_000)

    @bench.actor(idempotent=True)
    def work() -> None:
        bench.note("run")

    store.out["claim"] = 3
    message = bench.run(work.message())

    assert bench.count("run") == 1
    assert bench.rig.ends(message) == {"ack": 1}


def test_t28_what_a_store_raises_never_runs_the_actor(bench: Bench, store: Faulty) -> None:
    """Not only an outage: an error that nobody expected is a failed attempt, in which nothing ran."""

    @bench.actor(idempotent=True, max_retries=2, **FAST)
    def work() -> None:
        bench.note("run")

    store.error = RuntimeError
    store.out["claim"] = FOR_EVER
    bench.run(work.message())

    assert bench.count("run") == 0
    assert bench.reasons() == ["exhausted"]


@pytest.mark.parametrize("name", ["claim", "complete"])
def test_a_lost_reply_is_asked_for_again(in_memory: MakeBench, store: Faulty, name: str) -> None:
    """The store did it, and nobody was told: the same owner is given its fence again, and the run is one run."""
    bench = in_memory(store=store, store_wait=5_000)

    @bench.actor(idempotent=True, store_results=True)
    def work() -> int:
        return bench.note("run")

    store.losing[name] = 1
    message = bench.run(work.message())

    assert store.asked(name) == 2
    assert bench.count("run") == 1
    assert bench.result(message) == 1
    assert (bench.record().attempts, bench.record().crashes, bench.record().state) == (1, 0, DONE)
    assert bench.rig.ends(message) == {"ack": 1}


def test_on_store_error_run_runs_without_the_store(
    bench: Bench, store: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; the key for third parties is there all the same, steps just run, and atomic() is refused."""

    @bench.actor(idempotent=True, on_store_error="run")
    def work() -> None:
        delivery = current_delivery()
        bench.note("key", (delivery.key, delivery.key_for("pay"), delivery.fence, delivery.is_takeover))
        delivery.step("pay", lambda key: bench.note("paid", key), at_most_once=True)

    store.out["*"] = FOR_EVER
    with caplog.at_level(logging.WARNING, "dramatiq_guard"):
        messages = [bench.run(work.message()) for _ in range(2)]

    key, derived, fence, takeover = bench.notes("key")[0]
    assert key == bench.guard.plans["work"]._stored("message", messages[0].message_id)
    assert (fence, takeover) == (0, False)
    assert bench.notes("paid")[0] == derived
    assert caplog.text.count("runs without it, as on_store_error='run' says") == 1
    assert bench.letters() == []


# -- at the end ------------------------------------------------------------------------------------------------------


def held(bench: Bench, store: Faulty, name: str, message: Any) -> None:
    """Wait until a message is held at the barrier, since the store does not take its word."""
    wait_until(lambda: store.asked(name) >= 3, describe=lambda: f"{name} to be tried again: {store.calls}")
    assert not bench.rig.ends(message)


def test_t29_a_completion_waits_at_the_barrier(bench: Bench, store: Faulty) -> None:
    """The effect has happened: the message stays unacked until that is recorded, and is run once."""

    @bench.actor(idempotent=True, max_retries=0, store_results=True)
    def work() -> int:
        return bench.note("run")

    store.out["complete"] = FOR_EVER
    message = bench.deliver(work.message())
    bench.work()
    held(bench, store, "complete", message)
    assert bench.record().state == HELD
    store.out.clear()
    bench.settle()
    bench.run(message)

    assert bench.count("run") == 1
    assert bench.result(message) == 1
    assert bench.record().state == DONE


@pytest.mark.parametrize("name", ["complete", "release"])
def test_whatever_a_store_says_at_the_end_runs_nothing_again(
    in_memory: MakeBench, store: Faulty, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that will not pass is tried thrice and reported; the outcome of the run is what it was."""
    bench = in_memory(store=store, store_wait=0)
    store.error = StoreError

    @bench.actor(idempotent=True, max_retries=0, store_results=True)
    def work() -> int:
        if name == "release":
            raise KeyError("mine")
        return bench.note("run")

    store.out[name] = FOR_EVER
    message = bench.run(work.message())

    if name == "complete":
        assert bench.count("run") == 1
        assert bench.result(message) == 1
    assert "KeyError" in "".join(str(letter.error) for letter in bench.letters()) or name == "complete"
    assert f"{name} failed" in caplog.text


def test_a_release_waits_at_the_barrier_so_that_nothing_is_parked(bench: Bench, store: Faulty) -> None:
    """A lease that ran out would look like a crash; the retry comes after the release, and finds the key free."""

    @bench.actor(idempotent=True, on_crash="park", max_retries=1, lease=2_400, store_results=True, **FAST)
    def work() -> int:
        if bench.note("run") == 1:
            store.out["release"] = FOR_EVER
            raise OSError
        return 17

    message = bench.deliver(work.message())
    bench.work()
    held(bench, store, "release", message)
    until = store.posture().now + 900
    wait_until(lambda: store.posture().now > until, describe="the lease to be over, were it not renewed")
    assert bench.record().state == HELD
    assert bench.count("run") == 1
    store.out.clear()
    bench.settle()

    assert bench.count("run") == 2
    assert bench.result(message) == 17
    assert (bench.record().state, bench.record().crashes) == (DONE, 0)
    assert bench.letters() == []


def test_a_remembered_failure_waits_too(bench: Bench, store: Faulty) -> None:
    """It is the answer, as a result is."""

    @bench.actor(idempotency_key=["order_id"], remember_failures=ValueError)
    def work(order_id: int) -> None:
        bench.note("run")
        raise ValueError

    store.out["complete"] = FOR_EVER
    message = bench.deliver(work.message(1))
    bench.work()
    held(bench, store, "complete", message)
    store.out.clear()
    bench.settle()
    bench.run(work.message(1))

    assert bench.count("run") == 1
    assert bench.reasons() == ["permanent", "permanent"]


def test_the_lease_thread_pays_what_the_barrier_owes(in_memory: MakeBench, store: Faulty) -> None:
    """The message may be with another consumer by then, and nobody asks this barrier again."""
    bench = in_memory(store=store, store_wait=0, lease=300)
    payers: list[str] = []

    @bench.actor(idempotent=True)
    def work() -> None:
        bench.note("run")

    inner = store.store.complete

    def complete(*args: Any, **known: Any) -> Any:
        payers.append(threading.current_thread().name)
        return inner(*args, **known)

    store.store.complete = complete
    store.out["complete"] = 2
    bench.run(work.message())

    assert payers[0] == "dramatiq-guard-leases"
    assert bench.record().state == DONE


# -- a server --------------------------------------------------------------------------------------------------------


def test_t33_a_server_that_became_a_replica_is_out(in_memory: MakeBench, own_valkey: PrivateValkey) -> None:
    """READONLY, at the claim and at the completion, is waited for like any outage."""
    import redis

    stores = connect(own_valkey.url)
    bench = in_memory(store=stores.idempotency, store_wait=0)
    with redis.Redis.from_url(own_valkey.url) as client:

        @bench.actor(idempotent=True, max_retries=0, store_results=True)
        def work() -> int:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            threading.Timer(0.3, lambda: client.execute_command("REPLICAOF", "NO", "ONE")).start()
            return bench.note("run")

        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        message = bench.deliver(work.message())
        bench.work()
        wait_until(lambda: bench.rig.ends(message)["ack"] >= 2, describe="the claim to be put off")
        assert bench.count("run") == 0
        client.execute_command("REPLICAOF", "NO", "ONE")
        bench.settle()

    assert bench.count("run") == 1
    assert bench.result(message) == 1
    assert bench.record().state == DONE
    stores.close()


def test_t31_a_server_that_forgot_all_is_told_that_it_is_done(make: MakeBench) -> None:
    """FLUSHALL in the middle of a run: the record is made anew at its completion."""
    bench = make()

    @bench.actor(idempotent=True)
    def work() -> None:
        bench.note("run")
        bench.store.forget(bench.record().key)

    message = bench.run(work.message())
    bench.run(message)

    assert bench.count("run") == 1
    assert bench.record().state == DONE


def test_a_worker_boots_while_its_store_is_down(in_memory: MakeBench, own_valkey: PrivateValkey) -> None:
    """It says so; messages wait until it is there."""
    own_valkey.stop()
    stores = connect(own_valkey.url)
    bench = in_memory(store=stores.idempotency, store_wait=0)

    @bench.actor(idempotent=True, max_retries=0)
    def work() -> None:
        bench.note("run")

    message = bench.deliver(work.message())
    bench.work()
    wait_until(lambda: bench.rig.ends(message)["ack"] >= 1, describe="it to be put off")
    assert bench.count("run") == 0
    own_valkey.start()
    bench.settle()

    assert bench.count("run") == 1
    stores.close()


def test_a_record_that_is_free_is_kept(bench: Bench, store: Faulty) -> None:
    """When its key was first claimed tells how long a third party has known the keys of its steps."""

    @bench.actor(idempotent=True, max_retries=0)
    def work() -> None:
        raise OSError

    bench.run(work.message())

    assert bench.record().state == FREE
    assert store.asked("release") == 1
