"""A key is held for as long as its run lives, and given up before another may have it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from dramatiq_guard import current_delivery
from dramatiq_guard.errors import GuardError, LeaseLost
from dramatiq_guard.idempotency.leases import Leases
from dramatiq_guard.idempotency.values import encode
from dramatiq_guard.stores.idempotency import DONE, FREE, FRESH, TAKEOVER, Finish
from tests.idempotency.bench import FAST, FOR_EVER, Bench, Faulty
from tests.idempotency.conftest import MakeBench
from tests.stack.rig import spin
from tests.support.waiting import wait_until

LEASE, DAY = 2_400, 86_400_000
NAME = "dramatiq-guard-leases"


def rent(bench: Bench) -> list[threading.Thread]:
    """The threads that keep leases alive."""
    return [thread for thread in threading.enumerate() if thread.name == NAME and thread.is_alive()]


def over_by(bench: Bench, leases: int = 3) -> None:
    """Work until the lease that the run began with would have been over so often, by the store's clock."""
    until = bench.store.posture().now + leases * LEASE
    wait_until(lambda: bench.store.posture().now >= until, describe="time to pass", interval=0.01)


def take_over(bench: Bench) -> int:
    """Have another owner take the one key there is when its lease is over; its fence."""
    key = bench.record().key

    def taken() -> int:
        answer = bench.store.claim(key, owner="other", lease=60_000, retention=DAY)
        return answer.fence if answer.answer in (TAKEOVER, FRESH) else 0

    return wait_until(taken, describe="the lease to be over")


# -- kept alive ------------------------------------------------------------------------------------------------------


@pytest.mark.untraced
def test_t19_a_job_longer_than_its_lease_is_run_once(on_each_store: MakeBench) -> None:
    """Its lease is renewed; the duplicate that comes meanwhile is put off, burns no retry, and gets the result."""
    bench = on_each_store(lease=LEASE)

    @bench.actor(idempotency_key=["order_id"], store_results=True, max_retries=0)
    def charge(order_id: int) -> int:
        over_by(bench, 2)
        return bench.note("run")

    messages = [bench.deliver(charge.message(1)) for _ in range(2)]
    bench.work()
    bench.settle()

    assert bench.count("run") == 1
    assert [bench.result(message) for message in messages] == [1, 1]
    assert bench.letters() == []
    assert (bench.record().attempts, bench.record().crashes) == (1, 0)


@pytest.mark.untraced
def test_a_job_that_is_over_before_a_third_of_its_lease_is_not_renewed(in_memory: MakeBench) -> None:
    """It costs two round trips, and no third."""
    store = Faulty()
    bench = in_memory(store=store)

    @bench.actor(idempotent=True)
    def work() -> None:
        """Nothing."""

    bench.run(work.message())

    assert [name for name, _ in store.calls if name in ("claim", "renew", "complete", "release", "step")] == [
        "claim",
        "complete",
    ]


@pytest.mark.untraced
def test_all_leases_are_renewed_in_one_round_trip(in_memory: MakeBench) -> None:
    """By one thread, which begins with the worker and ends with it."""
    store = Faulty()
    bench = in_memory(store=store, lease=LEASE)
    together = threading.Barrier(8)

    @bench.actor(idempotency_key=["number"])
    def work(number: int) -> None:
        together.wait(20)
        over_by(bench, 2)

    assert rent(bench) == []
    for number in range(8):
        bench.deliver(work.message(number))
    bench.work()
    assert len(rent(bench)) == 1
    bench.settle()

    renewals = [len(args[0]) for name, args in store.calls if name == "renew"]
    assert max(renewals) == 8
    assert len(renewals) <= 2 * LEASE * 2 / (LEASE / 3) + 4
    bench.close()
    wait_until(lambda: not rent(bench), describe="the thread to end")


@pytest.mark.untraced
def test_a_second_worker_has_the_thread_to_itself(in_memory: MakeBench) -> None:
    """There is one for a process, whichever worker of it booted last."""
    bench = in_memory(lease=LEASE)

    @bench.actor(idempotent=True)
    def work() -> None:
        bench.note("run")

    first = bench.work()
    bench.work()
    wait_until(lambda: len(rent(bench)) == 1, describe="the thread of the first one to end")
    first.stop()
    bench.close()
    wait_until(lambda: not rent(bench), describe="both to have ended")


def test_a_broken_renewal_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a store raises, the leases of the next round are renewed."""
    store = Faulty()
    leases = Leases(store)
    store.error = RuntimeError
    raised = []

    def renew() -> None:
        raised.append(None)
        if len(raised) < 3:
            raise RuntimeError("a bug")

    leases.renew = renew  # type: ignore[method-assign]
    from dramatiq_guard.interrupts import Interrupts

    with caplog.at_level(logging.ERROR):
        leases.start(Interrupts(), LEASE)
        wait_until(lambda: len(raised) >= 4, describe="the thread to go on")
        leases.close()

    assert "Renewing leases failed" in caplog.text


# -- lost ------------------------------------------------------------------------------------------------------------


@pytest.mark.untraced
def test_t30_a_run_whose_lease_cannot_be_renewed_is_interrupted_before_it_is_over(in_memory: MakeBench) -> None:
    """Nobody could have taken the key when LeaseLost arrives; the message is put off, uncounted, and runs again."""
    store = Faulty()
    bench = in_memory(store=store, lease=6_000, store_wait=0)

    @bench.actor(idempotent=True, max_retries=0, store_results=True)
    def work() -> int:
        if bench.note("run") == 1:
            store.out["renew"] = FOR_EVER
            try:
                spin()
            except LeaseLost:
                left = bench.record().lease_until - bench.store.posture().now
                bench.note("left", left)
                store.out.clear()
                raise
        return bench.count("run")

    message = bench.run(work.message())

    assert bench.count("run") == 2
    assert bench.notes("left")[0] > 0, "the lease was still running"
    assert bench.result(message) == 2
    assert bench.letters() == []
    assert (bench.record().state, bench.record().crashes) == (DONE, 0)


@pytest.mark.untraced
def test_t30_an_outage_that_is_shorter_than_the_lease_is_not_noticed(in_memory: MakeBench) -> None:
    """The renewals are tried again, and the run goes on."""
    store = Faulty()
    bench = in_memory(store=store, lease=3_000)

    @bench.actor(idempotent=True)
    def work() -> None:
        bench.note("run")
        store.out["renew"] = 2
        before = store.asked("renew")
        wait_until(lambda: store.asked("renew") >= before + 4, describe="renewals to go on")

    bench.run(work.message())

    assert bench.count("run") == 1
    assert bench.record().state == DONE


@pytest.mark.untraced
def test_t20_a_run_whose_key_was_taken_is_interrupted(in_memory: MakeBench) -> None:
    """The next renewal says so; what stands is what the other has recorded."""
    bench = in_memory(lease=LEASE)

    @bench.actor(idempotent=True, max_retries=0, store_results=True)
    def work() -> str:
        bench.note("run")
        record = bench.record()
        # As if this process had been stopped for longer than its lease.
        bench.store._records[record.key].lease_until = 0
        fence = take_over(bench)
        try:
            spin()
        except LeaseLost:
            bench.note("lost")
            bench.store.complete(record.key, fence, Finish(encode("the other's")), retention=DAY)
            raise
        return "mine"

    message = bench.run(work.message())

    assert (bench.count("run"), bench.count("lost")) == (1, 1)
    assert bench.result(message) == "the other's"
    assert bench.letters() == []


def zombie(bench: Bench, then: Any, **options: Any) -> Any:
    """Run a message whose key is taken over while it runs; `then` is done to it by the other before it returns."""

    @bench.actor(idempotent=True, max_retries=0, store_results=True, **options)
    def work() -> str:
        if bench.note("run") == 1:
            record = bench.record()
            bench.store.release(record.key, record.fence)
            then(record.key, take_over(bench))
            if options:
                raise ValueError("mine")
        return f"run {bench.count('run')}"

    return bench.run(work.message())


def test_t21_a_zombie_is_given_the_result_of_the_run_that_finished_first(on_each_store: MakeBench) -> None:
    """Its own result does not count."""
    bench = on_each_store()

    message = zombie(
        bench, lambda key, fence: bench.store.complete(key, fence, Finish(encode("the other's")), retention=DAY)
    )

    assert bench.count("run") == 1
    assert bench.result(message) == "the other's"
    assert bench.letters() == []


def test_t21_a_zombie_whose_successor_gave_up_runs_again(on_each_store: MakeBench) -> None:
    """It is put off, uncounted: its record is nobody's result."""
    bench = on_each_store()

    message = zombie(bench, lambda key, fence: bench.store.release(key, fence))

    assert bench.count("run") == 2
    assert bench.result(message) == "run 2"
    assert bench.letters() == []


def test_a_zombie_does_not_remember_its_failure(make: MakeBench) -> None:
    """The other has succeeded: that is the answer, and the zombie's message comes back as its duplicate."""
    bench = make()

    message = zombie(
        bench,
        lambda key, fence: bench.store.complete(key, fence, Finish(encode("the other's")), retention=DAY),
        remember_failures=ValueError,
    )

    assert bench.count("run") == 1
    assert bench.result(message) == "the other's"
    assert bench.letters() == []


def test_a_zombie_is_given_the_failure_that_was_remembered_first(make: MakeBench) -> None:
    """As any other duplicate."""
    from dramatiq_guard.idempotency.values import failed

    bench = make()

    zombie(bench, lambda key, fence: bench.store.complete(key, fence, failed(KeyError("x")), retention=DAY))

    assert bench.count("run") == 1
    assert bench.reasons() == ["permanent"]


# -- time limits, shutdowns ------------------------------------------------------------------------------------------


@pytest.mark.untraced
def test_t65_a_time_limit_in_the_body_is_a_failed_attempt(make: MakeBench) -> None:
    """The key is given back, so that its retry may run at once."""
    bench = make()

    @bench.actor(idempotent=True, time_limit=100, max_retries=1, **FAST)
    def work() -> None:
        if bench.note("run") == 1:
            spin()

    bench.run(work.message())

    assert bench.count("run") == 2
    assert (bench.record().state, bench.record().attempts, bench.record().crashes) == (DONE, 2, 0)


@pytest.mark.untraced
def test_a_thread_that_hangs_beyond_its_time_limit_does_not_keep_its_key(in_memory: MakeBench) -> None:
    """One lease after the limit it is renewed no more."""
    bench = in_memory(lease=LEASE)
    free = threading.Event()

    @bench.actor(idempotent=True, time_limit=100, max_retries=0)
    def work() -> None:
        if bench.note("run") == 1:
            while not free.is_set():
                try:
                    time.sleep(0.01)
                except BaseException:
                    bench.note("interrupted")

    bench.deliver(work.message())
    bench.work()
    wait_until(lambda: bench.count("run"), describe="the run to begin")
    record = bench.record()
    try:
        taken = wait_until(
            lambda: bench.store.claim(record.key, owner="other", lease=60_000, retention=DAY).answer == TAKEOVER,
            describe="the key to be free for another",
        )
    finally:
        free.set()

    assert taken
    wait_until(lambda: bench.count("interrupted") >= 1, describe="the time limit")
    bench.store.release(record.key, bench.record().fence)
    bench.settle()


@pytest.mark.untraced
def test_t12_a_shutdown_gives_the_key_back(make: MakeBench) -> None:
    """The job that was interrupted goes back to its queue, and whoever gets it runs it at once."""
    bench = make()

    @bench.actor(idempotent=True, notify_shutdown=True, max_retries=0)
    def work() -> None:
        if bench.note("run") == 1:
            spin()

    message = bench.deliver(work.message())
    worker = bench.work()
    wait_until(lambda: bench.count("run"), describe="the run to begin")
    worker.stop(timeout=10_000)
    bench.rig.worker = None

    assert (bench.record().state, bench.record().crashes) == (FREE, 0)
    assert bench.letters() == []
    if bench.rig.results is not None and hasattr(bench.rig.results, "client"):  # a queue in memory ends with its worker
        bench.work()
        wait_until(lambda: bench.record().state == DONE, 30, lambda: f"the second run: {bench.rig.ends(message)}")
        assert (bench.count("run"), bench.record().attempts, bench.record().crashes) == (2, 2, 0)


@pytest.mark.untraced
def test_t67_what_interrupts_a_later_hook_does_not_run_the_work_again(make: MakeBench) -> None:
    """The key was done before any hook was called: a delivery that was torn is a duplicate."""
    import dramatiq

    class Torn(dramatiq.Middleware):
        def after_process_message(
            self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
        ) -> None:
            if bench.note("hooks") == 1:
                raise KeyboardInterrupt

    bench = make(extra=[Torn()])

    @bench.actor(idempotent=True, store_results=True)
    def work() -> int:
        return bench.note("run")

    message = bench.deliver(work.message())
    bench.work()
    bench.settle()
    bench.run(message)

    assert bench.count("run") == 1
    assert bench.result(message) == 1


# -- async actors and direct calls -----------------------------------------------------------------------------------


def test_t73_an_async_actor_runs_once(make: MakeBench) -> None:
    """Five deliveries, one run; it sees its delivery and its key."""
    bench = make()

    @bench.actor(idempotent=True, store_results=True)
    async def work() -> int:
        await asyncio.sleep(0.01)
        bench.note("key", current_delivery().key)
        return bench.note("run")

    message = bench.run(work.message(), times=5)

    assert bench.count("run") == 1
    assert bench.result(message) == 1
    assert bench.notes("key") == [bench.record().key]


@pytest.mark.untraced
def test_t74_an_async_actor_that_its_time_limit_cancels_gives_its_key_back(make: MakeBench) -> None:
    """As any other; the retry runs."""
    bench = make()

    @bench.actor(idempotent=True, time_limit=100, max_retries=1, **FAST)
    async def work() -> None:
        if bench.note("run") == 1:
            await asyncio.sleep(30)

    bench.run(work.message())

    assert bench.count("run") == 2
    assert (bench.record().state, bench.record().crashes) == (DONE, 0)


@pytest.mark.untraced
def test_an_async_actor_longer_than_its_lease_is_run_once(make: MakeBench) -> None:
    """Its lease is kept as that of any other."""
    bench = make(lease=LEASE)

    @bench.actor(idempotent=True)
    async def work() -> None:
        bench.note("run")
        await asyncio.sleep(4 * LEASE / 1_000)

    bench.run(work.message(), times=2)

    assert bench.count("run") == 1
    assert bench.record().crashes == 0


def test_t75_direct_and_nested_calls_are_not_guarded(make: MakeBench) -> None:
    """They claim nothing: what is called from an actor is part of its run."""
    bench = make()

    @bench.actor(idempotency_key=["order_id"])
    def charge(order_id: int) -> int:
        return bench.note("charge")

    @bench.actor(idempotent=True)
    def outer() -> None:
        charge(1)
        charge(1)
        bench.note("key", current_delivery().key)

    assert [charge(1), charge(1)] == [1, 2]
    assert bench.records() == []
    with pytest.raises(GuardError):
        current_delivery()
    bench.run(outer.message())

    assert bench.count("charge") == 4
    assert bench.record().key.startswith("default/outer/message/")


def test_an_actor_that_is_not_guarded_is_told_so(make: MakeBench) -> None:
    """What only guarded actors have says what to write."""
    bench = make()

    @bench.actor
    def work() -> None:
        delivery = current_delivery()
        for ask in (
            lambda: delivery.key,
            lambda: delivery.fence,
            lambda: delivery.connection,
            lambda: delivery.key_for("x"),
            lambda: delivery.step("x", lambda key: None),
            lambda: delivery.atomic(),
        ):
            with pytest.raises(GuardError, match="its actor is not guarded"):
                ask()
        bench.note("takeover", delivery.is_takeover)

    bench.run(work.message())

    assert bench.notes("takeover") == [False]


def test_a_lease_is_no_transaction(make: MakeBench) -> None:
    """Connection and atomic() say which mode has them."""
    bench = make()

    @bench.actor(idempotent=True, max_retries=0)
    def work() -> None:
        with pytest.raises(GuardError, match="idempotent='inbox'"):
            current_delivery().connection
        with current_delivery().atomic():
            bench.note("entered")

    bench.run(work.message())

    assert bench.count("entered") == 0
    assert bench.reasons() == ["permanent"]
