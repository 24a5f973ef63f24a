"""Pipelines, groups and callbacks whose members are delivered again: whoever is to hear of it hears of it once."""

from __future__ import annotations

import logging
from typing import Any

import dramatiq
import pytest
from dramatiq.message import Message

from dramatiq_guard import current_delivery, keys
from dramatiq_guard.idempotency.values import encode
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import Finish
from dramatiq_guard.stores.postgres.schema import apply_schema
from tests.idempotency.bench import FOR_EVER, Bench, Faulty
from tests.idempotency.conftest import MakeBench
from tests.support.waiting import wait_until


def sent(bench: Bench, group: Any, *, unless: tuple[int, ...] = ()) -> list[Message[Any]]:
    """Make the messages of a group as its `run` would send them, and send those that are not held back."""
    kept: list[Message[Any]] = []

    class Keeping(dramatiq.Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            kept.append(message)

    keeping = Keeping()
    bench.broker.middleware.append(keeping)
    try:
        group.run()
    finally:
        bench.broker.middleware.remove(keeping)
    return [message for message in kept if message.message_id in {child.message_id for child in group.children}]


# -- pipelines -------------------------------------------------------------------------------------------------------


def test_t69_a_stage_that_is_delivered_again_leads_to_one_run_of_the_next(
    make: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Each delivery of stage 1 sends stage 2, whose id is the same: guarded, it runs once."""
    bench = make()

    @bench.actor(idempotent=True)
    def first(value: int) -> int:
        return bench.note("first") + value

    @bench.actor(idempotent=True, store_results=True)
    def second(value: int) -> int:
        bench.note("second")
        return value * 2

    pipe = first.message(16) | second.message()
    with caplog.at_level(logging.WARNING, "dramatiq_guard"):
        bench.run(pipe.messages[0], times=3)
        bench.run(pipe.messages[0])

    assert (bench.count("first"), bench.count("second")) == (1, 1)
    assert bench.result(pipe.messages[1]) == 34
    assert bench.letters() == []
    assert "next stage of its pipeline" not in caplog.text


def test_t69_a_stage_that_is_not_guarded_is_warned_of_once(make: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    """It runs as often as the stage before it is delivered, which cannot be known when the actors are declared."""
    bench = make()

    @bench.actor(idempotent=True)
    def first() -> int:
        return bench.note("first")

    @bench.actor
    def second(value: int) -> None:
        bench.note("second")

    pipe = first.message() | second.message()
    with caplog.at_level(logging.WARNING, "dramatiq_guard"):
        for _ in range(3):
            bench.run(pipe.messages[0])

    assert (bench.count("first"), bench.count("second")) == (1, 3)
    assert caplog.text.count("the next stage of its pipeline, 'second', is not") == 1


def test_a_stage_whose_result_was_not_kept_stops_the_duplicate(make: MakeBench) -> None:
    """The next stage cannot be given it; one that takes no result goes on."""
    bench = make(max_result=5)

    @bench.actor(idempotent=True)
    def first() -> str:
        return "x" * (10 + bench.note("first"))

    @bench.actor(idempotent=True)
    def second(*values: Any) -> None:
        bench.note("second", values)

    pipe = first.message() | second.message()
    ignoring = first.message() | second.message_with_options(pipe_ignore=True)
    for _ in range(2):
        bench.run(ignoring.messages[0])
    assert bench.reasons() == []
    for _ in range(2):
        bench.run(pipe.messages[0])

    assert bench.count("first") == 2
    assert [len(values) for values in bench.notes("second")] == [0, 1]
    assert bench.reasons() == ["outcome_unknown"]


# -- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before its siblings", "after its siblings"])
def test_t26_a_group_is_complete_once_and_last(make: MakeBench, when: str) -> None:
    """A member that is delivered again is not counted twice: neither too early, nor a second time."""
    bench = make()

    @bench.actor(idempotent=True, store_results=True)
    def member(number: int) -> int:
        bench.note("member", number)
        bench.note("order", number)
        return number

    @bench.actor(idempotent=True)
    def complete() -> None:
        bench.note("order", "complete")

    group = dramatiq.group([member.message(number) for number in range(3)], broker=bench.broker)
    group.add_completion_callback(complete.message())
    messages = sent(bench, group)
    if when == "before its siblings":
        # The queue has all three by now: the duplicates come behind them, but one thread keeps the order.
        bench.deliver(messages[0], times=3)
        bench.work(threads=1)
        bench.settle()
    else:
        bench.work()
        bench.settle()
        bench.run(messages[2], times=3)

    assert sorted(bench.notes("member")) == [0, 1, 2]
    assert bench.notes("order").count("complete") == 1
    assert bench.notes("order")[-1] == "complete"
    assert [bench.result(message) for message in messages] == [0, 1, 2]


def test_t26_a_member_that_comes_thrice_does_not_complete_its_group(make: MakeBench) -> None:
    """While a sibling is outstanding nothing is complete."""
    bench = make()

    @bench.actor(idempotent=True)
    def member(number: int) -> None:
        bench.note("order", number)

    @bench.actor(idempotent=True)
    def late(number: int) -> None:
        bench.note("order", number)
        if bench.count("order") < 4:
            raise dramatiq.Retry("not yet", delay=100)

    @bench.actor(idempotent=True)
    def complete() -> None:
        bench.note("order", "complete")

    children = [member.message(1), member.message(2), late.message(3)]
    group = dramatiq.group(children, broker=bench.broker)
    group.add_completion_callback(complete.message())
    messages = sent(bench, group)
    bench.deliver(messages[0], times=3)
    bench.work()
    bench.settle()

    assert bench.notes("order").count(1) == 1
    assert bench.notes("order")[-2:] == [3, "complete"]
    assert bench.notes("order").count("complete") == 1


def test_a_group_that_is_run_twice_completes_twice(make: MakeBench) -> None:
    """Its second run has the same message ids and another barrier; the work is not done again."""
    bench = make()

    @bench.actor(idempotent=True)
    def member(number: int) -> None:
        bench.note("member")

    @bench.actor
    def complete() -> None:
        bench.note("complete")

    group = dramatiq.group([member.message(number) for number in range(2)], broker=bench.broker)
    group.add_completion_callback(complete.message())
    bench.work()
    for _ in range(2):
        group.run()
        bench.settle()

    assert (bench.count("member"), bench.count("complete")) == (2, 2)


# -- callbacks and results -------------------------------------------------------------------------------------------


def test_a_callback_is_sent_once(make: MakeBench) -> None:
    """By the mark that its message has told it."""
    bench = make()

    @bench.actor
    def told(message: Any, result: Any) -> None:
        bench.note("told", result)

    @bench.actor(idempotent=True, on_success="told")
    def work() -> int:
        return bench.note("run")

    message = bench.run(work.message())
    bench.run(message, times=3)

    assert bench.count("run") == 1
    assert bench.notes("told") == [1]


def test_a_first_delivery_that_died_before_it_told_is_made_good(make: MakeBench) -> None:
    """Its key is done, and the mark is not there: the duplicate tells the callback, with the recorded result."""
    bench = make()
    store = Faulty(bench.store)
    bench.guard.store = bench.guard.keyring.store = store

    @bench.actor
    def told(message: Any, result: Any) -> None:
        bench.note("told", result)

    @bench.actor(idempotent=True, on_success="told")
    def work() -> int:
        return bench.note("run")

    message = work.message()
    key = bench.guard.plans["work"]._stored("message", message.message_id)
    claimed = store.claim(key, owner="dead", lease=60_000, retention=60_000)
    store.complete(key, claimed.fence, Finish(encode(17)), retention=60_000)
    bench.run(message)
    bench.run(message)

    assert bench.count("run") == 0
    assert bench.notes("told") == [17]


def test_the_callback_of_another_message_with_the_key_is_told_too(make: MakeBench) -> None:
    """The mark is of the message, not of the key: who sent the second message waits for its callback."""
    bench = make()

    @bench.actor
    def told(message: Any, result: Any) -> None:
        bench.note("told", result)

    @bench.actor(idempotency_key=["order_id"], on_success="told")
    def work(order_id: int) -> int:
        return bench.note("run")

    for _ in range(2):
        bench.run(work.message(1))

    assert bench.count("run") == 1
    assert bench.notes("told") == [1, 1]


def test_a_callback_actor_is_keyed_by_its_parent(make: MakeBench) -> None:
    """Its messages have ids of their own, each time it is told; keys.parent makes them one."""
    bench = make()

    @bench.actor(idempotency_key=keys.parent)
    def told(message: Any, result: Any) -> None:
        bench.note("told", message["message_id"])

    @bench.actor(on_success="told")
    def work() -> None:
        bench.note("run")

    first, second = work.message(), work.message()
    bench.run(first, times=3)
    bench.run(second)

    assert bench.count("run") == 4
    assert sorted(bench.notes("told")) == sorted([first.message_id, second.message_id])


def test_t60_a_stored_result_is_not_overwritten_by_the_duplicates_that_are_left_out(make: MakeBench) -> None:
    """A duplicate that is skipped since all was told stores the result again, in case it was lost; never None."""
    bench = make()

    @bench.actor
    def told(message: Any, result: Any) -> None:
        """Told."""

    @bench.actor(idempotent=True, on_success="told", store_results=True)
    def work() -> int:
        return 16 + bench.note("run")

    message = bench.run(work.message())
    bench.run(message, times=3)
    assert bench.result(message) == 17
    backend = bench.rig.results
    key = backend.build_message_key(message)
    if hasattr(backend, "results"):
        backend.results.clear()
    else:
        backend.client.delete(key)
    bench.run(message)

    assert bench.result(message) == 17
    assert bench.count("run") == 1


def test_a_duplicate_whose_mark_cannot_be_read_waits(in_memory: MakeBench) -> None:
    """It must neither tell again nor be dropped."""
    store = Faulty()
    bench = in_memory(store=store, store_wait=0)

    @bench.actor
    def told(message: Any, result: Any) -> None:
        bench.note("told")

    @bench.actor(idempotent=True, on_success="told", max_retries=0)
    def work() -> None:
        bench.note("run")

    message = bench.run(work.message())
    store.out["marked"] = 3
    bench.run(message)

    assert store.asked("marked") == 4
    assert (bench.count("run"), bench.count("told")) == (1, 1)
    assert bench.letters() == []


def test_a_mark_that_cannot_be_written_holds_the_message(in_memory: MakeBench) -> None:
    """It stays unacked until its duplicates will know."""
    store = Faulty()
    bench = in_memory(store=store, store_wait=0)

    @bench.actor
    def told(message: Any, result: Any) -> None:
        bench.note("told")

    @bench.actor(idempotent=True, on_success="told")
    def work() -> None:
        bench.note("run")

    store.out["mark"] = FOR_EVER
    message = bench.deliver(work.message())
    bench.work()
    wait_until(lambda: store.asked("mark") >= 1 and bench.count("told") == 1, describe="the callback")
    assert not bench.rig.ends(message)
    store.out.clear()
    bench.settle()
    bench.run(message)

    assert (bench.count("run"), bench.count("told")) == (1, 1)


def telling(bench: Bench, **options: Any) -> Any:
    """A guarded actor with a callback."""

    @bench.actor
    def told(message: Any, result: Any) -> None:
        bench.note("told", result)

    @bench.actor(idempotent=True, on_success="told", max_retries=0, **options)
    def work() -> int:
        return bench.note("run")

    return work


def test_a_duplicate_waits_while_the_first_delivery_is_telling(in_memory: MakeBench) -> None:
    """The key is done and the mark is not there: to tell as well would count a member, or send a callback, twice."""
    store = Faulty()
    bench = in_memory(store=store, store_wait=0)
    work = telling(bench)
    store.out["mark"] = FOR_EVER
    message = bench.deliver(work.message())
    bench.work()
    wait_until(lambda: bench.count("told"), describe="the callback")

    bench.deliver(message)
    wait_until(lambda: bench.rig.ends(message)["ack"] >= 2, describe="the duplicate to be put off")
    assert bench.notes("told") == [1]
    store.out.clear()
    bench.settle()

    assert bench.count("run") == 1
    assert bench.notes("told") == [1]
    assert bench.letters() == []


def test_a_duplicate_tells_in_place_of_a_delivery_that_died_while_it_told(make: MakeBench) -> None:
    """What that one had reserved runs out as a lease does."""
    bench = make()
    work = telling(bench)
    message = work.message()
    key = bench.guard.plans["work"]._stored("message", message.message_id)
    claimed = bench.store.claim(key, owner="dead", lease=60_000, retention=60_000)
    assert bench.store.reserve(f"tell:{message.message_id}:", "the dead", ttl=150) == "the dead"
    bench.store.complete(key, claimed.fence, Finish(encode(17)), retention=60_000)

    bench.deliver(message)
    bench.work()
    wait_until(lambda: bench.rig.ends(message)["ack"] >= 1, describe="the duplicate to be put off")
    bench.settle()
    bench.run(message)

    assert bench.count("run") == 0
    assert bench.notes("told") == [17]


def test_a_zombie_does_not_tell_what_its_successor_tells(make: MakeBench) -> None:
    """It comes back as a duplicate of the run that finished first."""
    bench = make()

    @bench.actor
    def told(message: Any, result: Any) -> None:
        bench.note("told", result)

    @bench.actor(idempotent=True, on_success="told", max_retries=0)
    def work() -> str:
        bench.note("run")
        record = bench.record()
        bench.store.release(record.key, record.fence)
        other = bench.store.claim(record.key, owner="other", lease=60_000, retention=60_000)
        bench.store.complete(record.key, other.fence, Finish(encode("the other's")), retention=60_000)
        return "mine"

    message = bench.run(work.message())
    bench.run(message)

    assert bench.count("run") == 1
    assert bench.notes("told") == ["the other's"]


@pytest.mark.parametrize("mode", ["atomic", "inbox"])
def test_a_transaction_that_completes_a_key_reserves_the_telling_before_it(
    in_memory: MakeBench, postgres_url: str, mode: str
) -> None:
    """From its commit on a duplicate may find the key done."""
    apply_schema(postgres_url)
    stores = connect(postgres_url)
    store = Faulty(stores.idempotency)
    bench = in_memory(store=store)
    reserved: list[int] = []

    @bench.actor
    def told(message: Any, result: Any) -> None:
        bench.note("told", result)

    @bench.actor(idempotent=mode, on_success="told", max_retries=0)
    def work() -> int:
        if mode == "atomic":
            with current_delivery().atomic(result=17):
                bench.note("run")
            reserved.append(store.asked("reserve"))
        else:
            bench.note("run")
        return 17

    message = bench.run(work.message(), times=3)
    bench.run(message)

    assert bench.count("run") == 1
    assert bench.notes("told") == [17]
    assert reserved in ([1], [])
    assert "reserve" in {name for name, _ in store.calls}
    stores.close()
