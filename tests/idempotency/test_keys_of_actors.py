"""What actors ask of the guard, checked when they are declared; and which key a message is guarded by."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

import dramatiq
import pytest

from dramatiq_guard import IdempotencyGuard, keys
from dramatiq_guard.errors import SetupError
from dramatiq_guard.policy.keys import canonical, stored_key
from dramatiq_guard.stores.idempotency import DONE
from dramatiq_guard.stores.memory.idempotency import MemoryIdempotency
from tests.idempotency.bench import FAST, Bench, said
from tests.idempotency.conftest import MakeBench


def order(order_id: int, amount: int = 0) -> None:
    """A function as an actor has it."""


async def order_async(order_id: int) -> None:
    """The same, async."""


class Transactional(MemoryIdempotency):
    """A store that says that it has transactions."""

    def atomic(self) -> None: ...

    def inbox(self) -> None: ...


# -- declarations ----------------------------------------------------------------------------------------------------

KEY: dict[str, Any] = {"idempotency_key": ["order_id"]}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a key of no kind": ({"idempotency_key": 17}, "must be a function, a list of parameter names or a template"),
    "an unknown parameter in a template": ({"idempotency_key": "order:{id}"}, r"'id'.*its parameters are order_id"),
    "an unknown parameter in a list": ({"idempotency_key": ["id"]}, r"'id'.*its parameters are order_id"),
    "a template without a field": ({"idempotency_key": "order_id"}, r"'\{order_id\}'"),
    "an async key function": ({"idempotency_key": order_async}, "async function"),
    "a key function that takes something else": ({"idempotency_key": lambda a, b, c: a}, "is called with"),
    "a scope that is no name": ({**KEY, "scope": 3}, "scope must be a name, not 3"),
    "an empty scope": ({**KEY, "scope": ""}, "scope must be a name"),
    "a fingerprint of an unknown parameter": ({**KEY, "fingerprint": ["cents"]}, "fingerprint of actor.*'cents'"),
    "a fingerprint of nothing": ({**KEY, "fingerprint": []}, "names no parameter"),
    "a fingerprint that is text": ({**KEY, "fingerprint": "amount"}, "a list of parameter names, not 'amount'"),
    "another word for idempotent": ({"idempotent": "exactly-once"}, "idempotent must be True, False or one of lease"),
    "a number for idempotent": ({"idempotent": 2}, "idempotent must be True, False or one of lease"),
    "a lease that cannot be renewed in time": ({**KEY, "lease": 200}, "lease must be at least 300 ms"),
    "a lease that is no time": ({**KEY, "lease": "soon"}, "lease"),
    "a retention that is no time": ({**KEY, "retention": "for ever"}, "retention"),
    "a negative size": ({**KEY, "max_result": -1}, "max_result must be a number of bytes"),
    "a size that is none": ({**KEY, "max_result": True}, "max_result must be a number of bytes"),
    "another on_missing_key": ({**KEY, "on_missing_key": "skip"}, "on_missing_key must be one of error, message"),
    "another on_busy": ({**KEY, "on_busy": "drop"}, "on_busy must be one of requeue, wait, skip, fail"),
    "another on_store_error": ({**KEY, "on_store_error": "open"}, "on_store_error must be one of defer, run"),
    "another on_crash": ({**KEY, "on_crash": "retry"}, "on_crash must be 'rerun', 'park' or a callable"),
    "failures that are none": ({**KEY, "remember_failures": ["CardDeclined"]}, "must be exception classes"),
    "failures that are interrupts": ({**KEY, "remember_failures": KeyboardInterrupt}, "must be exception classes"),
    "atomic without transactions": ({"idempotent": "atomic"}, "needs a store on PostgreSQL"),
    "inbox without transactions": ({"idempotent": "inbox"}, "needs a store on PostgreSQL"),
    "an option without a key": ({"on_busy": "wait"}, r"on_busy needs idempotency_key=… or idempotent=True"),
    "a scope without a key": ({"scope": "orders"}, r"scope needs idempotency_key=… or idempotent=True"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("late", [False, True])
def test_a_wrong_option_is_refused_where_the_actor_is_declared(in_memory: MakeBench, wrong: str, late: bool) -> None:
    """Or where the stack is installed, if that comes after it; the error names the actor and what is wrong."""
    options, error = WRONG[wrong]
    bench = in_memory(late=late)
    if late:
        bench.broker.actor_options.update(bench.guard.actor_options)
        bench.actor(actor_name="charge", **options)(order)
        with pytest.raises(SetupError, match=error) as caught:
            bench.install()
    else:
        with pytest.raises(SetupError, match=error) as caught:
            bench.actor(actor_name="charge", **options)(order)

    assert str(caught.value).startswith("Actor 'charge': ")


@pytest.mark.parametrize("mode", ["atomic", "inbox"])
def test_transactions_are_for_sync_actors(in_memory: MakeBench, mode: str) -> None:
    """An async one is told what guards it."""
    bench = in_memory(store=Transactional())
    bench.actor(actor_name="sync", idempotent=mode)(order)

    with pytest.raises(SetupError, match=f"idempotent='{mode}' is for sync actors.*idempotent='lease'"):
        bench.actor(actor_name="async", idempotent=mode)(order_async)


def test_nothing_crashes_in_an_inbox(in_memory: MakeBench) -> None:
    """on_crash is refused there: a run that dies is rolled back."""
    bench = in_memory(store=Transactional())

    with pytest.raises(SetupError, match="on_crash has no meaning with idempotent='inbox'"):
        bench.actor(idempotent="inbox", on_crash="park")(order)


GUARD: dict[str, tuple[dict[str, Any], str]] = {
    "no store": ({"store": object()}, "store must keep idempotency keys"),
    "another mode": ({"mode": "twice"}, "mode must be one of lease, atomic, inbox, not 'twice'"),
    "atomic without transactions": ({"mode": "atomic"}, "mode='atomic' needs a store on PostgreSQL"),
    "a namespace that is none": ({"namespace": ""}, "namespace must be a name"),
    "a short lease": ({"lease": 299}, "lease must be at least 300 ms"),
    "a retention that is no time": ({"retention": "long"}, "retention"),
    "another store_wait": ({"store_wait": None}, "store_wait"),
    "another max_result": ({"max_result": "1 kB"}, "max_result must be a number of bytes"),
    "another on_missing_key": ({"on_missing_key": None}, "on_missing_key must be one of"),
    "another on_busy": ({"on_busy": "drop"}, "on_busy must be one of"),
    "another on_crash": ({"on_crash": None}, "on_crash must be"),
    "another on_store_error": ({"on_store_error": "open"}, "on_store_error must be one of"),
}


@pytest.mark.parametrize("wrong", GUARD)
def test_a_wrong_argument_of_the_guard_is_refused(wrong: str) -> None:
    """The error begins with the guard's name."""
    options, error = GUARD[wrong]

    with pytest.raises(SetupError, match=error) as caught:
        IdempotencyGuard(**{"store": MemoryIdempotency(), **options})

    assert str(caught.value).startswith("IdempotencyGuard: ")


def test_an_actor_may_opt_out(in_memory: MakeBench) -> None:
    """idempotent=False is no guard, whatever stands beside it, and an actor without options has none."""
    bench = in_memory()
    bench.actor(actor_name="out", idempotent=False, on_busy="wait", **KEY)(order)
    bench.actor(actor_name="plain")(order)
    bench.actor(actor_name="guarded", idempotent=True)(order)

    assert set(bench.guard.plans) == {"guarded"}


def test_what_an_actor_leaves_out_is_the_guards(in_memory: MakeBench) -> None:
    """Each option of the actor comes before the argument of the same name."""
    bench = in_memory(lease=10_000, on_busy="wait", retention=5, max_result=7, on_crash="park", namespace="shop")
    bench.actor(actor_name="a", idempotent=True)(order)
    bench.actor(actor_name="b", idempotent=True, lease=9_000, on_busy="skip", on_crash="rerun", scope="s")(order)
    a, b = bench.guard.plans["a"], bench.guard.plans["b"]

    assert (a.lease, a.on_busy, a.retention, a.max_result, a.parks, a.namespace) == (10_000, "wait", 5, 7, True, "shop")
    assert (b.lease, b.on_busy, b.retention, b.max_result, b.parks, b.namespace) == (9_000, "skip", 5, 7, False, "shop")
    assert (a.scope, b.scope) == ("a", "s")


@pytest.mark.parametrize("late", [False, True])
def test_t78_actors_may_be_declared_before_and_after_the_stack(make: MakeBench, late: bool) -> None:
    """They are guarded alike."""
    bench = make(late=late)
    if late:
        bench.broker.actor_options.update(bench.guard.actor_options)

    @bench.actor(idempotency_key="order:{order_id}")
    def charge(order_id: int) -> None:
        bench.note("run")

    if late:
        bench.install()
    bench.run(charge.message(1))
    bench.run(charge.message(1))

    assert bench.count("run") == 1


def test_an_actor_that_is_declared_anew_has_its_new_plan(in_memory: MakeBench) -> None:
    """As when a module is loaded again."""
    bench = in_memory()
    bench.actor(actor_name="charge", **KEY)(order)
    bench.broker.actors.clear()
    bench.actor(actor_name="charge")(order)

    assert bench.guard.plans == {}


# -- the key of a message --------------------------------------------------------------------------------------------


def test_the_message_comes_before_the_actor_and_the_actor_before_the_id(make: MakeBench) -> None:
    """Each under its own kind, so that no id is ever taken for a key."""
    bench = make()

    @bench.actor(idempotency_key="order:{order_id}")
    def charge(order_id: int) -> None:
        bench.note("run")

    @bench.actor(idempotent=True)
    def refund(order_id: int) -> None:
        bench.note("run")

    message = charge.message_with_options(args=(1,), idempotency_key="given")
    plain = refund.message(1)
    for each in (message, charge.message(1), plain):
        bench.run(each)

    assert {record.key for record in bench.records()} == {
        stored_key("default", "charge", "key", canonical("given")),
        stored_key("default", "charge", "key", canonical(("order:{}", 1))),
        stored_key("default", "refund", "message", canonical(plain.message_id)),
    }


def test_a_key_that_was_sent_with_the_message_works_on_an_actor_without_one(make: MakeBench) -> None:
    """Two messages with it are one piece of work."""
    bench = make()

    @bench.actor(idempotent=True)
    def refund(order_id: int) -> None:
        bench.note("run")

    for _ in range(2):
        bench.run(refund.message_with_options(args=(1,), idempotency_key=["refund", 1]))

    assert bench.count("run") == 1


@pytest.mark.parametrize(
    ("on_missing_key", "runs", "keys_kept", "reasons"),
    [("error", 0, 0, ["missing_key"]), ("message", 1, 1, []), ("unguarded", 2, 0, [])],
)
def test_t45_a_message_without_a_key(
    make: MakeBench, on_missing_key: str, runs: int, keys_kept: int, reasons: list[str]
) -> None:
    """By default it is a dead letter that never ran; or it is guarded by its id, or not at all."""
    bench = make(on_missing_key=on_missing_key)

    @bench.actor(idempotency_key=["order_id"], max_retries=5, **FAST)
    def charge(order_id: int | None) -> None:
        bench.note("run")

    bench.run(charge.message(None), times=2)

    assert bench.count("run") == runs
    assert len(bench.records()) == keys_kept
    assert bench.reasons() == reasons
    if reasons:
        assert "has no idempotency key" in said(bench.letters()[0])
        assert bench.letters()[0].attempts_total <= 1


def test_t52_a_key_function_that_raises_is_a_dead_letter_at_once(make: MakeBench) -> None:
    """It would raise again at every attempt; on_missing_key is about keys that are not there, not about this."""
    bench = make(on_missing_key="unguarded")

    def broken(order_id: int) -> int:
        bench.note("asked")
        raise KeyError("order")

    @bench.actor(idempotency_key=broken, max_retries=5, **FAST)
    def charge(order_id: int) -> None:
        bench.note("run")

    bench.run(charge.message(1))

    assert (bench.count("asked"), bench.count("run")) == (1, 0)
    assert bench.reasons() == ["missing_key"]
    assert "cannot be made: KeyError: 'order'" in said(bench.letters()[0])


@pytest.mark.parametrize("value", [1.5, float("nan"), {"id": 1}, {1}, object(), datetime(2026, 5, 1)])  # noqa: DTZ001
def test_t48_a_value_that_makes_no_key_is_a_dead_letter(in_memory: MakeBench, value: Any) -> None:
    """Floats, dicts, sets, objects and naive datetimes; what to write instead is said."""
    bench = in_memory()

    @bench.actor(idempotency_key=lambda order_id: value)
    def charge(order_id: int) -> None:
        bench.note("run")

    bench.run(charge.message(1))

    assert bench.count("run") == 0
    assert bench.reasons() == ["missing_key"]
    assert "TypeError" in said(bench.letters()[0])


def test_t48_a_list_is_a_key(make: MakeBench) -> None:
    """Equal lists are equal keys."""
    bench = make()

    @bench.actor(idempotency_key=["parts"])
    def work(parts: list[Any]) -> None:
        bench.note("run", parts)

    for parts in ([1, "1"], [1, "1"], [1, 1], ["1", 1]):
        bench.run(work.message(parts))

    assert bench.notes("run") == [[1, "1"], [1, 1], ["1", 1]]


def test_t46_a_long_key_is_hashed_and_never_cut(make: MakeBench) -> None:
    """Of 5 kB, twice, and of another that differs in its last character: two runs."""
    bench = make()

    @bench.actor(idempotency_key=["text"])
    def work(text: str) -> None:
        bench.note("run")

    for text in ("x" * 5_000, "x" * 5_000, "x" * 4_999 + "y"):
        bench.run(work.message(text))

    assert bench.count("run") == 2
    assert all(len(record.key) <= 255 for record in bench.records())


def test_t49_a_key_with_another_payload_is_refused(on_each_store: MakeBench) -> None:
    """The second is the dead letter key_reused; the first one's result is untouched."""
    bench = on_each_store()

    @bench.actor(idempotency_key=["order_id"], store_results=True, max_retries=5, **FAST)
    def charge(order_id: int, amount: int) -> int:
        bench.note("run")
        return amount

    first = bench.run(charge.message(1, 100))
    bench.run(charge.message(1, 999))
    again = bench.run(charge.message(1, amount=100))

    assert bench.count("run") == 1
    assert bench.reasons() == ["key_reused"]
    assert "give it another key" in said(bench.letters()[0])
    assert [bench.result(each) for each in (first, again)] == [100, 100]
    assert bench.record().state == DONE


@pytest.mark.parametrize("fingerprint", [["amount"], False])
def test_what_does_not_count_may_differ(make: MakeBench, fingerprint: Any) -> None:
    """The fingerprint is of the named parameters alone; False compares nothing."""
    bench = make()

    @bench.actor(idempotency_key=["order_id"], fingerprint=fingerprint, store_results=True)
    def charge(order_id: int, amount: int, note: str) -> str:
        bench.note("run")
        return note

    bench.run(charge.message(1, 100, "first"))
    second = bench.run(charge.message(1, 100, "second"))
    bench.run(charge.message(1, 101, "third"))

    assert bench.count("run") == 1
    assert bench.result(second) == "first"
    assert bench.reasons() == ([] if fingerprint is False else ["key_reused"])


def test_t50_the_first_payload_of_a_message_id_counts(make: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    """A pipeline's stage has one id, and what comes before it may have given it two payloads: it is warned of once."""
    bench = make()

    @bench.actor(idempotent=True, store_results=True)
    def work(value: int) -> int:
        bench.note("run")
        return value

    first = work.message(1)
    with caplog.at_level(logging.WARNING, "dramatiq_guard"):
        bench.run(first)
        bench.run(first.copy(args=(2,)))
        bench.run(first.copy(args=(3,)))

    assert bench.count("run") == 1
    assert bench.result(first) == 1
    assert bench.letters() == []
    assert len([each for each in caplog.records if "another payload than before" in each.getMessage()]) == 1


def test_a_fingerprint_on_a_message_id_may_be_strict(make: MakeBench) -> None:
    """fingerprint=True, or the names of what counts, refuses another payload there as well."""
    bench = make()

    @bench.actor(idempotent=True, fingerprint=True)
    def work(value: int) -> None:
        bench.note("run")

    first = work.message(1)
    bench.run(first)
    bench.run(first.copy(args=(2,)))

    assert bench.count("run") == 1
    assert bench.reasons() == ["key_reused"]


@pytest.mark.parametrize(("scope", "runs"), [("charges", 1), (None, 2)])
def test_t54_a_scope_outlives_the_name_of_an_actor(make: MakeBench, scope: str | None, runs: int) -> None:
    """Without one a renamed actor does not know the keys of its former name."""
    bench = make()

    def body(order_id: int) -> None:
        bench.note("run")

    before = bench.actor(actor_name="charge", idempotency_key=["order_id"], scope=scope)(body)
    after = bench.actor(actor_name="charge_v2", idempotency_key=["order_id"], scope=scope)(body)
    bench.run(before.message(1))
    bench.run(after.message(1))

    assert bench.count("run") == runs


def test_t55_namespaces_do_not_collide(in_memory: MakeBench) -> None:
    """Two applications with one store each do their own work."""
    store = MemoryIdempotency()
    runs = []
    for namespace in ("shop", "blog"):
        bench = in_memory(store=store, namespace=namespace)
        actor = bench.actor(actor_name="charge", idempotency_key=["order_id"])(order)
        bench.run(actor.message(1))
        runs.append({record.key.split("/")[0] for record in bench.records()})

    assert runs == [{"shop"}, {"shop", "blog"}]


def test_once_an_hour(make: MakeBench) -> None:
    """keys.per goes by when the message was made; its copies belong to the hour of their original."""
    bench = make()

    @bench.actor(idempotency_key=keys.per(hours=1))
    def collect() -> None:
        bench.note("run")

    message = collect.message()
    hour = 3_600_000
    for shift in (0, 1, hour, hour + 1):
        stamp = message.message_timestamp // hour * hour + shift
        again = dramatiq.Message("default", "collect", (), {}, {}, message_timestamp=stamp)
        bench.run(again)

    assert bench.count("run") == 2


def test_a_bench_is_guarded(in_memory: MakeBench) -> None:
    """Without the guard the tests of this folder would see two runs."""
    bench: Bench = in_memory()

    @bench.actor
    def work() -> None:
        bench.note("run")

    bench.run(work.message(), times=2)

    assert bench.count("run") == 2
