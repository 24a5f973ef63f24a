"""Steps: what was done and recorded is not done again, whatever becomes of the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dramatiq_guard import current_delivery
from dramatiq_guard.idempotency.values import decode
from dramatiq_guard.reconcile import Done, NotDone, Unknown
from dramatiq_guard.stores.idempotency import DONE, PARKED
from tests.idempotency.bench import FAST, FOR_EVER, Faulty, said
from tests.idempotency.conftest import MakeBench

RETRIED: dict[str, Any] = {"max_retries": 5, **FAST}


# -- recorded --------------------------------------------------------------------------------------------------------


def test_a_step_that_was_recorded_is_not_done_again(on_each_store: MakeBench) -> None:
    """Its value is what it was; one that raised was not done, and is done by the next run with the same key."""
    bench = on_each_store()

    @bench.actor(idempotent=True, store_results=True, **RETRIED)
    def work() -> Any:
        delivery = current_delivery()
        first = delivery.step("charge", lambda key: {"id": bench.note("charge", key)})

        def mail(key: str) -> str:
            if bench.note("mail", key) == 1:
                raise OSError
            return "sent"

        return [first, delivery.step("mail", mail)]

    message = bench.run(work.message())

    assert bench.result(message) == [{"id": 1}, "sent"]
    assert (bench.count("charge"), bench.count("mail")) == (1, 2)
    assert len(set(bench.notes("mail"))) == 1
    assert set(bench.notes("mail")).isdisjoint(bench.notes("charge"))
    assert bench.record().attempts == 2


def test_a_step_returns_what_another_run_would_get(make: MakeBench) -> None:
    """As it was stored: a tuple is a list at once, not only after a crash."""
    bench = make()

    @bench.actor(idempotent=True)
    def work() -> None:
        bench.note("value", current_delivery().step("pair", lambda key: (1, 2)))
        bench.note("value", current_delivery().step("none", lambda key: None))

    bench.run(work.message())

    assert bench.notes("value") == [[1, 2], None]
    assert {name: decode(data) for name, data in bench.record().steps.items()} in ({}, {"pair": [1, 2], "none": None})


def test_a_step_of_none_is_recorded(make: MakeBench) -> None:
    """None is a value like any other."""
    bench = make()

    @bench.actor(idempotent=True, **RETRIED)
    def work() -> None:
        current_delivery().step("mail", lambda key: bench.note("mail") and None)
        if bench.note("run") == 1:
            raise OSError

    bench.run(work.message())

    assert (bench.count("run"), bench.count("mail")) == (2, 1)


def test_a_name_is_taken_once_in_a_run(make: MakeBench) -> None:
    """A loop gives each its own; two of one name would be given one value."""
    bench = make()

    @bench.actor(idempotent=True, **RETRIED)
    def work(names: list[str]) -> None:
        for name in names:
            current_delivery().step(name, lambda key: bench.note("done"))

    bench.run(work.message(["line:1", "line:2"]))
    assert bench.count("done") == 2
    bench.run(work.message(["line", "line"]))

    assert bench.count("done") == 3
    assert bench.reasons() == ["permanent"]
    assert "step 'line' was taken twice in one run" in said(bench.letters()[0])


def test_a_value_that_cannot_be_stored_is_a_dead_letter(make: MakeBench) -> None:
    """It has been done, and cannot be recorded: trying again would do it again."""
    bench = make()

    @bench.actor(idempotent=True, **RETRIED)
    def work() -> None:
        current_delivery().step("make", lambda key: [bench.note("made"), object()])

    bench.run(work.message())

    assert bench.count("made") == 1
    assert bench.reasons() == ["permanent"]
    assert "what step 'make' returned cannot be stored" in said(bench.letters()[0])


def test_the_key_of_a_step_is_stable_and_its_own(make: MakeBench) -> None:
    """The same over all runs of one key, another for each step, generation and key; 36 characters, as a UUID."""
    bench = make()

    @bench.actor(idempotency_key=["order_id"], **RETRIED)
    def work(order_id: int) -> None:
        delivery = current_delivery()
        bench.note(f"keys of {order_id}", [delivery.key_for(name) for name in ("charge", "mail")])
        bench.note("next", delivery.key_for("charge", generation=1))
        if order_id == 1 and bench.count("keys of 1") == 1:
            raise OSError

    bench.run(work.message(1))
    bench.run(work.message(2))

    ones, twos = bench.notes("keys of 1"), bench.notes("keys of 2")
    assert ones[0] == ones[1]
    different = {*ones[0], *twos[0], *bench.notes("next")}
    assert len(different) == 6
    assert {len(each) for each in different} == {36}


# -- not known -------------------------------------------------------------------------------------------------------


def begun(make: MakeBench, answer: Any = None, **options: Any) -> Any:
    """Run a message whose step had begun when its process died; what it led to."""
    bench = make()
    asked: list[str] = []

    def reconcile(key: str) -> Any:
        asked.append(key)
        return answer

    @bench.actor(idempotency_key=["order_id"], store_results=True, max_retries=0)
    def work(order_id: int) -> Any:
        known = {"reconcile": reconcile} if answer is not None else {}
        return current_delivery().step("charge", lambda key: bench.note("charge", key), **options, **known)

    key = bench.guard.plans["work"]._stored("key", (1,))
    claimed = bench.store.claim(key, owner="dead", lease=60_000, retention=60_000)
    if options.get("at_most_once"):
        assert bench.store.step(key, claimed.fence, "charge", b"?")
    bench.store.release(key, claimed.fence)
    message = bench.run(work.message(1))
    return bench, message, asked


def test_a_step_that_must_not_be_done_twice_notes_that_it_begins(in_memory: MakeBench) -> None:
    """Before it is done, with a second word to the store."""
    store = Faulty()
    bench = in_memory(store=store)

    @bench.actor(idempotent=True)
    def work() -> None:
        current_delivery().step("sms", lambda key: bench.note("sms", store.asked("step")), at_most_once=True)

    bench.run(work.message())

    assert bench.notes("sms") == [1]
    assert store.asked("step") == 2


def test_a_step_that_had_begun_is_parked(make: MakeBench) -> None:
    """Without a reconciliation nobody knows whether it was done."""
    bench, _, _ = begun(make, at_most_once=True)

    assert bench.count("charge") == 0
    assert bench.reasons() == ["outcome_unknown"]
    assert "step 'charge' had begun when its process died" in said(bench.letters()[0])
    assert bench.record().state == PARKED


@pytest.mark.parametrize("doubt", [{"at_most_once": True}, {"key_ttl": 0}])
def test_a_reconciliation_that_finds_it_done_gives_its_value(make: MakeBench, doubt: dict[str, Any]) -> None:
    """It is asked with the key that the third party was given."""
    bench, message, asked = begun(make, Done("ch_17"), **doubt)

    assert bench.count("charge") == 0
    assert bench.result(message) == "ch_17"
    assert len(asked) == 1
    assert len(asked[0]) == 36
    assert bench.record().state == DONE


@pytest.mark.parametrize("doubt", [{"at_most_once": True}, {"key_ttl": 0}])
def test_a_reconciliation_that_finds_it_not_done_lets_it_be_done(make: MakeBench, doubt: dict[str, Any]) -> None:
    """With the same key."""
    bench, message, asked = begun(make, NotDone(), **doubt)

    assert bench.notes("charge") == asked
    assert bench.result(message) == 1


@pytest.mark.parametrize("doubt", [{"at_most_once": True}, {"key_ttl": 0}])
def test_a_reconciliation_that_cannot_tell_parks(make: MakeBench, doubt: dict[str, Any]) -> None:
    """A person has to look."""
    bench, _, _ = begun(make, Unknown(), **doubt)

    assert bench.count("charge") == 0
    assert bench.reasons() == ["outcome_unknown"]
    assert bench.record().state == PARKED


def test_a_reconciliation_that_returns_something_else_is_a_dead_letter(make: MakeBench) -> None:
    """True may mean either."""
    bench, _, _ = begun(make, True, at_most_once=True)

    assert bench.count("charge") == 0
    assert bench.reasons() == ["permanent"]
    assert "must return Done(…), NotDone() or Unknown(), not True" in said(bench.letters()[0])


@pytest.mark.parametrize(("key_ttl", "runs"), [(60_000, 1), (0, 0)])
def test_a_key_that_a_third_party_has_forgotten_protects_no_more(make: MakeBench, key_ttl: int, runs: int) -> None:
    """A later run of an old key is parked where it does not know whether the step was done; a young one goes on."""
    bench, _, _ = begun(make, key_ttl=key_ttl)

    assert bench.count("charge") == runs
    assert bench.reasons() == ([] if runs else ["outcome_unknown"])


def test_the_first_run_of_a_key_has_nothing_to_be_forgotten(make: MakeBench) -> None:
    """However late its step comes: no run before it has given the third party the key."""
    bench = make()

    @bench.actor(idempotent=True)
    def work() -> None:
        from tests.support.waiting import wait_until

        began = bench.store.posture().now
        wait_until(lambda: bench.store.posture().now > began + 5, describe="time to pass")
        current_delivery().step("charge", lambda key: bench.note("charge"), key_ttl=1)

    bench.run(work.message())

    assert bench.count("charge") == 1


# -- stores ----------------------------------------------------------------------------------------------------------


def test_a_step_that_cannot_be_recorded_puts_the_message_off(in_memory: MakeBench) -> None:
    """No attempt is burnt; the step is done again with the same key, which is what it is for."""
    store = Faulty()
    bench = in_memory(store=store, store_wait=0)

    @bench.actor(idempotent=True, max_retries=0)
    def work() -> None:
        current_delivery().step("charge", lambda key: bench.note("charge", key))

    store.out["step"] = 2
    bench.run(work.message())

    assert bench.count("charge") == 3
    assert len(set(bench.notes("charge"))) == 1
    assert bench.letters() == []


def test_a_hiccup_of_the_store_does_not_repeat_a_step(in_memory: MakeBench) -> None:
    """It is asked again for store_wait."""
    store = Faulty()
    bench = in_memory(store=store)

    @bench.actor(idempotent=True, max_retries=0)
    def work() -> None:
        current_delivery().step("charge", lambda key: bench.note("charge", key))

    store.out["step"] = 2
    bench.run(work.message())

    assert bench.count("charge") == 1


def test_a_run_that_was_fenced_out_records_no_step(make: MakeBench) -> None:
    """It is put off, uncounted, and finds what the other left."""
    bench = make()

    @bench.actor(idempotent=True, max_retries=0, store_results=True)
    def work() -> Any:
        if bench.note("run") == 1:
            record = bench.record()
            bench.store.release(record.key, record.fence)
            other = bench.store.claim(record.key, owner="other", lease=60_000, retention=60_000)
            try:
                return current_delivery().step("charge", lambda key: "mine")
            finally:
                bench.store.step(record.key, other.fence, "charge", b'{"value":"the other\'s"}')
                bench.store.release(record.key, other.fence)
        return current_delivery().step("charge", lambda key: "again")

    message = bench.run(work.message())

    assert bench.count("run") == 2
    assert bench.result(message) == "the other's"
    assert bench.letters() == []


def test_a_step_cannot_be_parked_while_the_store_is_out(in_memory: MakeBench) -> None:
    """The message is put off until it can; nothing runs meanwhile."""
    store = Faulty()
    bench = in_memory(store=store, store_wait=0)
    store.out["park"] = 2

    @bench.actor(idempotent=True, max_retries=0)
    def work() -> None:
        current_delivery().step("sms", lambda key: bench.note("sms"), at_most_once=True)

    message = work.message()
    key = bench.guard.plans["work"]._stored("message", message.message_id)
    claimed = store.claim(key, owner="dead", lease=60_000, retention=60_000)
    store.step(key, claimed.fence, "sms", b"?")
    store.release(key, claimed.fence)
    bench.run(message)

    assert store.asked("park") == 3
    assert bench.count("sms") == 0
    assert bench.reasons() == ["outcome_unknown"]


# -- async actors ----------------------------------------------------------------------------------------------------


def test_steps_of_async_actors_are_awaited(make: MakeBench) -> None:
    """They may return an awaitable or a value; the loop is not blocked by the store."""
    bench = make()

    @bench.actor(idempotent=True, store_results=True, **RETRIED)
    async def work() -> Any:
        async def charge(key: str) -> int:
            await asyncio.sleep(0)
            return bench.note("charge", key)

        delivery = current_delivery()
        values = [await delivery.step("charge", charge), await delivery.step("plain", lambda key: bench.note("plain"))]
        if bench.note("run") == 1:
            raise OSError
        return values

    message = bench.run(work.message())

    assert bench.result(message) == [1, 1]
    assert (bench.count("run"), bench.count("charge"), bench.count("plain")) == (2, 1, 1)


def test_steps_of_async_actors_may_run_side_by_side(make: MakeBench) -> None:
    """Each is recorded by itself."""
    bench = make()

    @bench.actor(idempotent=True, store_results=True)
    async def work() -> Any:
        async def line(key: str) -> str:
            await asyncio.sleep(0.001)
            return key

        delivery = current_delivery()
        return await asyncio.gather(*(delivery.step(f"line:{number}", line) for number in range(8)))

    message = bench.run(work.message())

    assert len(set(bench.result(message))) == 8


class _Inbox:
    mode = "inbox"


def test_an_inbox_has_no_steps() -> None:
    """A step must outlive a rollback."""
    from dramatiq_guard.errors import Permanent
    from dramatiq_guard.idempotency.claimed import Claimed
    from dramatiq_guard.stores.idempotency import Claim

    plan: Any = _Inbox()
    plan.lease = 300
    claimed = Claimed("k", plan, None, Claim(answer="fresh"), None, 0)

    with pytest.raises(Permanent, match="in an actor with idempotent='inbox'"):
        claimed.step("charge", lambda key: None)


def test_a_store_that_is_out_for_ever_does_not_repeat_what_is_at_most_once(in_memory: MakeBench) -> None:
    """What cannot note its beginning does not begin."""
    store = Faulty()
    bench = in_memory(store=store, store_wait=0, max_deferrals=2)
    store.out["step"] = FOR_EVER

    @bench.actor(idempotent=True, max_retries=0)
    def work() -> None:
        current_delivery().step("sms", lambda key: bench.note("sms"), at_most_once=True)

    bench.run(work.message())

    assert bench.count("sms") == 0
    assert bench.reasons() == ["deferred_too_often"]
