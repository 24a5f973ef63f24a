"""However often a message is delivered, and whatever becomes of its result, its work is done once."""

from __future__ import annotations

import logging
import threading
from typing import Any

import dramatiq
import pytest
from dramatiq.results import ResultMissing

from dramatiq_guard import current_delivery
from dramatiq_guard.idempotency import claiming
from dramatiq_guard.stores.idempotency import DONE, FAILURE, FREE, HELD, OMITTED
from tests.idempotency.bench import FAST, Bench, died_of, said
from tests.idempotency.conftest import MakeBench
from tests.support.waiting import wait_until


class CardDeclined(Exception):
    """A final answer."""


class Rendezvous:
    """Where a run is held until the test lets it go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.free = threading.Event()

    def pass_through(self) -> None:
        self.entered.set()
        assert self.free.wait(30)

    def wait(self) -> None:
        assert self.entered.wait(30)


def deferred(bench: Bench, message: Any, times: int = 1) -> None:
    """Wait until copies of a message have been put off."""
    wait_until(
        lambda: bench.rig.ends(message)["ack"] >= times,
        describe=lambda: f"{times} copies to be put off: {bench.rig.ends(message)}",
    )


# -- one run -----------------------------------------------------------------------------------------------------------


def test_t17_ten_deliveries_of_one_message_are_one_run(on_each_store: MakeBench) -> None:
    """The result is that of the run, and no duplicate writes None over it."""
    bench = on_each_store()

    @bench.actor(idempotent=True, store_results=True)
    def charge(cents: int) -> dict[str, int]:
        return {"run": bench.note("run", cents)}

    message = bench.run(charge.message(4900), times=10)

    assert bench.count("run") == 1
    assert bench.result(message) == {"run": 1}
    assert bench.letters() == []
    assert bench.record().state == DONE
    assert bench.record().attempts == 1


def test_t16_fifty_messages_with_one_business_key_are_one_run(on_each_store: MakeBench) -> None:
    """All of them end with its result, though many came while it ran."""
    bench = on_each_store()

    @bench.actor(idempotency_key="order:{order_id}", store_results=True)
    def charge(order_id: int) -> int:
        bench.note("run")
        wait_until(lambda: len(bench.rig.watch.ends) > 0, describe="another to be put off")
        return 17

    messages = [charge.message(1) for _ in range(50)]
    for message in messages:
        bench.deliver(message)
    bench.work(threads=50)
    bench.settle()

    assert bench.count("run") == 1
    assert [bench.result(message) for message in messages] == [17] * 50
    assert bench.letters() == []


def test_a_duplicate_that_comes_later_is_given_the_result_that_was_recorded(make: MakeBench) -> None:
    """Another message with the same key has the first one's result, whatever it would have computed."""
    bench = make()

    @bench.actor(idempotency_key=["order_id"], store_results=True)
    def charge(order_id: int) -> int:
        return bench.note("run")

    first = bench.run(charge.message(1))
    second = bench.run(charge.message(1))
    other = bench.run(charge.message(2))

    assert [bench.result(each) for each in (first, second, other)] == [1, 1, 2]


def test_t58_a_result_of_none_is_a_result(make: MakeBench) -> None:
    """It is stored as None, and its duplicates are no dead letters, as they are where a result was not kept."""
    bench = make()

    @bench.actor(idempotent=True, store_results=True)
    def work() -> None:
        bench.note("run")

    message = bench.run(work.message(), times=3)

    assert bench.count("run") == 1
    assert bench.result(message) is None
    assert bench.record().flags == 0
    assert bench.letters() == []


# -- results that cannot be kept -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["t56 unserialisable", "t57 too large"])
def test_a_result_that_cannot_be_kept_is_left_out(make: MakeBench, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """The work is done all the same: its duplicates do not run, and it is said once why they get nothing."""
    bench = make(max_result=1_000)

    @bench.actor(idempotent=True)
    def work() -> object:
        bench.note("run")
        return object() if "unserialisable" in what else "x" * 100_000

    with caplog.at_level(logging.WARNING, "dramatiq_guard"):
        bench.run(work.message(), times=2)
        bench.run(work.message())

    assert bench.count("run") == 2, "two messages"
    assert {(record.state, record.flags, record.result) for record in bench.records()} == {(DONE, OMITTED, None)}
    assert bench.letters() == []
    logged = [record.getMessage() for record in caplog.records if "is not kept" in record.getMessage()]
    assert len(logged) == 1
    assert "cannot be encoded" in logged[0] if "unserialisable" in what else "max_result is 1000" in logged[0]


def test_who_waits_for_a_result_that_was_not_kept_is_told(make: MakeBench) -> None:
    """A duplicate whose result is wanted cannot be given it, nor run again: nobody knows what to tell, so it dies."""
    bench = make(max_result=10)

    @bench.actor(idempotency_key="order:{order_id}", store_results=True)
    def work(order_id: int) -> str:
        bench.note("run")
        return "x" * 100

    first = bench.run(work.message(1))
    bench.run(work.message(1))

    assert bench.count("run") == 1
    assert bench.result(first) == "x" * 100
    assert bench.reasons() == ["outcome_unknown"]
    assert bench.record().state == DONE


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classify", [True, False])
def test_t61_a_remembered_failure_is_replayed_without_running(make: MakeBench, classify: bool) -> None:
    """It is final at once; its duplicates fail as it did, and nobody is told of the failure a second time."""
    bench = make(classify=classify)

    @bench.actor
    def told(message: Any, error: Any) -> None:
        bench.note("told", error["type"])

    @bench.actor(
        idempotency_key="order:{order_id}", remember_failures=(CardDeclined,), on_failure="told", max_retries=5, **FAST
    )
    def charge(order_id: int) -> None:
        bench.note("run")
        raise CardDeclined("no money")

    bench.run(charge.message(1))
    assert bench.reasons() == ["permanent"]
    assert died_of(bench.letters()[0]).endswith("CardDeclined")
    bench.run(charge.message(1))

    assert bench.count("run") == 1
    assert bench.notes("told") == ["CardDeclined"]
    assert bench.reasons() == ["permanent", "permanent"]
    replayed = [letter for letter in bench.letters() if "ReplayedFailure" in died_of(letter)]
    assert len(replayed) == 1
    assert "CardDeclined: no money" in said(replayed[0])
    assert (bench.record().state, bench.record().flags) == (DONE, FAILURE)


def test_an_error_that_is_not_remembered_is_tried_again_under_its_key(make: MakeBench) -> None:
    """The key is given back before the retry, which finds it free."""
    bench = make()

    @bench.actor(idempotent=True, store_results=True, remember_failures=[CardDeclined], max_retries=5, **FAST)
    def work() -> int:
        if bench.note("run", current_delivery().fence) < 3:
            raise OSError("not yet")
        return 17

    message = bench.run(work.message())

    assert bench.count("run") == 3
    assert bench.result(message) == 17
    assert bench.notes("run") == sorted(set(bench.notes("run"))), "each run has a larger fence"
    assert (bench.record().attempts, bench.record().crashes) == (3, 0)


@pytest.mark.parametrize("how", ["throws", "exhausted", "declined"])
def test_t62_a_message_that_died_may_be_replayed(make: MakeBench, how: str) -> None:
    """Its key is free again; the replay goes on from the steps that were done."""
    bench = make()
    options: dict[str, Any] = {
        "throws": {"throws": OSError},
        "exhausted": {"max_retries": 0},
        "declined": {"retry_when": lambda retries, error: False},
    }[how]

    @bench.actor(idempotent=True, store_results=True, **options)
    def work() -> Any:
        made = current_delivery().step("make", lambda key: bench.note("made"))
        if bench.note("run") == 1:
            raise OSError("broken")
        return made

    message = bench.run(work.message())
    assert bench.record().state == FREE
    assert len(bench.letters()) == 1
    bench.run(message)

    assert (bench.count("run"), bench.count("made")) == (2, 1)
    assert bench.result(message) == 1
    assert bench.record().state == DONE


def test_t68_a_retry_that_the_actor_asks_for_keeps_its_steps(make: MakeBench) -> None:
    """dramatiq.Retry is a failed attempt like any other: the key is free meanwhile."""
    bench = make()

    @bench.actor(idempotent=True)
    def work() -> None:
        current_delivery().step("make", lambda key: bench.note("made"))
        if bench.note("run") == 1:
            raise dramatiq.Retry("not yet", delay=10)

    bench.run(work.message())

    assert (bench.count("run"), bench.count("made")) == (2, 1)
    assert bench.record().state == DONE


def test_a_run_that_asks_to_be_skipped_gives_its_key_back(make: MakeBench) -> None:
    """SkipMessage from the body is the user's choice; another delivery runs."""
    bench = make()

    @bench.actor(idempotent=True)
    def work() -> None:
        if bench.note("run") == 1:
            raise dramatiq.middleware.SkipMessage("not me")

    message = bench.run(work.message())
    bench.run(message)

    assert bench.count("run") == 2
    assert bench.record().state == DONE


@pytest.mark.parametrize("done", [True, False])
def test_t64_a_parked_key_stays_parked_until_it_is_resolved(make: MakeBench, done: bool) -> None:
    """Replays of its message die as outcome_unknown; after the decision they are done, or run."""
    bench = make()

    @bench.actor(idempotency_key=["order_id"])
    def work(order_id: int) -> None:
        bench.note("run")

    message = work.message(1)
    key = bench.guard.plans["work"]._stored("key", (1,))
    claimed = bench.store.claim(key, owner="dead", lease=60_000, retention=60_000)
    assert bench.store.park(key, claimed.fence)

    bench.run(message)
    bench.run(message)
    assert bench.reasons() == ["outcome_unknown"] * len(bench.letters())
    assert bench.count("run") == 0
    assert f"keys resolve '{key}'" in said(bench.letters()[0])

    assert bench.store.resolve(key, done=done) == "parked"
    bench.run(message)
    assert bench.count("run") == (0 if done else 1)
    assert bench.record().state == DONE


# -- busy ------------------------------------------------------------------------------------------------------------


def test_a_duplicate_of_running_work_is_put_off_and_burns_no_attempt(on_each_store: MakeBench) -> None:
    """max_retries=0: as a failed attempt it would die at once.  It is given the result when that is there."""
    bench = on_each_store()
    rendezvous = Rendezvous()

    @bench.actor(idempotency_key="order:{order_id}", store_results=True, max_retries=0)
    def charge(order_id: int) -> str:
        bench.note("run")
        rendezvous.pass_through()
        return "paid"

    first = bench.deliver(charge.message(1))
    bench.work()
    rendezvous.wait()
    second = bench.deliver(charge.message(1))
    deferred(bench, second, 2)
    with pytest.raises(ResultMissing):
        bench.result(second)
    rendezvous.free.set()
    bench.settle()

    assert bench.count("run") == 1
    assert [bench.result(each) for each in (first, second)] == ["paid", "paid"]
    assert bench.letters() == []


def test_the_waits_of_a_busy_duplicate_grow_but_end_with_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second first, doubled up to a minute; never longer than the lease that is in the way."""
    monkeypatch.undo()
    waits = [claiming._backed_off(_deferred(times), claiming._BUSY_WAITS) for times in (0, 1, 2, 5, 6, 100)]
    out = [claiming._backed_off(_deferred(times), claiming._OUT_WAITS) for times in (0, 1, 5, 6, 100)]

    assert waits == [1_000, 2_000, 4_000, 32_000, 60_000, 60_000]
    assert out == [5_000, 10_000, 160_000, 300_000, 300_000]


class _deferred:
    def __init__(self, times: int) -> None:
        self.options = {"dramatiq_guard": {"deferrals": times}}


@pytest.mark.parametrize(("lease", "expected"), [(60_000, 1_000), (500, 500)])
def test_a_busy_duplicate_looks_again_when_the_lease_is_over_at_the_latest(
    in_memory: MakeBench, monkeypatch: pytest.MonkeyPatch, lease: int, expected: int
) -> None:
    """The delay of its copy is the smaller of the two."""
    monkeypatch.setattr(claiming, "_BUSY_WAITS", (1_000, 60_000))
    delays: list[int | None] = []

    class Delays(dramatiq.Middleware):
        def after_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            if delay is not None:
                delays.append(delay)

    bench = in_memory(extra=[Delays()])

    @bench.actor(idempotency_key=["order_id"])
    def work(order_id: int) -> None:
        bench.note("run")

    key = bench.guard.plans["work"]._stored("key", (1,))
    claimed = bench.store.claim(key, owner="other", lease=lease, retention=60_000)
    bench.deliver(work.message(1))
    bench.work()
    wait_until(lambda: delays, describe="the duplicate to be put off")
    bench.store.release(key, claimed.fence)
    bench.settle()

    assert expected - 400 <= delays[0] <= expected * 1.2  # type: ignore[operator]
    assert bench.count("run") == 1


def test_on_busy_wait_keeps_the_thread_until_the_result_is_there(make: MakeBench) -> None:
    """The duplicate is not put off once."""
    bench = make(on_busy="wait")
    rendezvous = Rendezvous()

    @bench.actor(idempotency_key="order:{order_id}", store_results=True)
    def charge(order_id: int) -> str:
        bench.note("run")
        rendezvous.pass_through()
        return "paid"

    bench.deliver(charge.message(1))
    bench.work()
    rendezvous.wait()
    asked = len(bench.rig.watch.ends)
    second = bench.deliver(charge.message(1))
    threading.Timer(0.3, rendezvous.free.set).start()
    bench.settle()

    assert asked == 0
    assert bench.count("run") == 1
    assert bench.rig.ends(second) == {"ack": 1}
    assert bench.result(second) == "paid"


def test_on_busy_wait_ends_by_putting_off(make: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread is not kept for as long as the other run may take."""
    monkeypatch.setattr(claiming, "_WAIT_FOR_BUSY", 100)
    bench = make()
    rendezvous = Rendezvous()

    @bench.actor(idempotency_key="order:{order_id}", on_busy="wait")
    def charge(order_id: int) -> None:
        bench.note("run")
        rendezvous.pass_through()

    bench.deliver(charge.message(1))
    bench.work()
    rendezvous.wait()
    second = bench.deliver(charge.message(1))
    deferred(bench, second)
    rendezvous.free.set()
    bench.settle()

    assert bench.count("run") == 1
    assert bench.letters() == []


def test_on_busy_skip_drops_the_duplicate(make: MakeBench) -> None:
    """Nothing is stored for it, and it is no dead letter."""
    bench = make()
    rendezvous = Rendezvous()

    @bench.actor(idempotency_key="order:{order_id}", on_busy="skip", store_results=True)
    def charge(order_id: int) -> str:
        bench.note("run")
        rendezvous.pass_through()
        return "paid"

    first = bench.deliver(charge.message(1))
    bench.work()
    rendezvous.wait()
    second = bench.deliver(charge.message(1))
    deferred(bench, second)
    rendezvous.free.set()
    bench.settle()

    assert bench.count("run") == 1
    assert bench.rig.ends(second) == {"ack": 1}
    assert bench.result(first) == "paid"
    with pytest.raises(ResultMissing):
        bench.result(second)
    assert bench.letters() == []


def test_on_busy_fail_makes_a_dead_letter(make: MakeBench) -> None:
    """At once, whatever its retries."""
    bench = make()
    rendezvous = Rendezvous()

    @bench.actor(idempotency_key="order:{order_id}", on_busy="fail")
    def charge(order_id: int) -> None:
        bench.note("run")
        rendezvous.pass_through()

    bench.deliver(charge.message(1))
    bench.work()
    rendezvous.wait()
    second = bench.deliver(charge.message(1))
    wait_until(lambda: bench.letters(), describe="the duplicate to die")
    rendezvous.free.set()
    bench.settle()

    assert [(letter.message_id, letter.reason) for letter in bench.letters()] == [(second.message_id, "permanent")]
    assert bench.count("run") == 1


@pytest.mark.parametrize("on_busy", ["skip", "fail"])
def test_t22_a_redelivered_message_is_put_off_whatever_on_busy_says(make: MakeBench, on_busy: str) -> None:
    """It may be the only copy there is: if the run that is in the way fails without a word, it has to go on."""
    bench = make(on_busy=on_busy)
    rendezvous = Rendezvous()

    @bench.actor(idempotent=True)
    def work() -> None:
        bench.note("run")
        rendezvous.pass_through()

    message = bench.deliver(work.message())
    bench.work()
    rendezvous.wait()
    bench.deliver(message)
    deferred(bench, message)
    rendezvous.free.set()
    bench.settle()

    assert bench.count("run") == 1
    assert bench.letters() == []


def test_a_duplicate_is_put_off_only_so_often(make: MakeBench) -> None:
    """Then it is the dead letter deferred_too_often; the record of the run in its way is left alone."""
    bench = make(max_deferrals=3)

    @bench.actor(idempotency_key=["order_id"])
    def work(order_id: int) -> None:
        bench.note("run")

    key = bench.guard.plans["work"]._stored("key", (1,))
    claimed = bench.store.claim(key, owner="other", lease=60_000, retention=60_000)
    bench.run(work.message(1))

    assert bench.reasons() == ["deferred_too_often"]
    assert bench.count("run") == 0
    record = bench.record()
    assert (record.state, record.fence, record.attempts) == (HELD, claimed.fence, 1)
