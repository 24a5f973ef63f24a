"""What is done about a key whose run ended without a word."""

from __future__ import annotations

from typing import Any

import pytest

from dramatiq_guard import current_delivery
from dramatiq_guard.reconcile import Done, NotDone, Unknown
from dramatiq_guard.stores.idempotency import DONE, PARKED
from tests.idempotency.bench import FAST, Bench, Faulty, said
from tests.idempotency.conftest import MakeBench
from tests.support.waiting import wait_until


def died(bench: Bench, actor: Any, *args: Any) -> Any:
    """A message whose first delivery died in the middle of its run."""
    message = actor.message(*args)
    key = bench.guard.plans[actor.actor_name]._stored("message", message.message_id)
    bench.store.claim(key, owner="dead", lease=1, retention=86_400_000)
    until = bench.store.get(key).lease_until
    wait_until(lambda: bench.store.posture().now > until, describe="the lease to be over")
    return message


def test_by_default_it_is_run_again(on_each_store: MakeBench) -> None:
    """The run knows that it is a takeover, and its fence is larger."""
    bench = on_each_store()

    @bench.actor(idempotent=True, max_retries=0)
    def work() -> None:
        delivery = current_delivery()
        bench.note("run", (delivery.is_takeover, delivery.fence))

    message = died(bench, work)
    dead = bench.record().fence
    bench.run(message)

    ((takeover, fence),) = bench.notes("run")
    assert takeover
    assert fence > dead
    assert (bench.record().state, bench.record().crashes, bench.record().attempts) == (DONE, 1, 2)


def test_a_run_that_is_no_takeover_knows_it(make: MakeBench) -> None:
    """A retry after a failure that was heard of is none."""
    bench = make()

    @bench.actor(idempotent=True, max_retries=1, **FAST)
    def work() -> None:
        if bench.note("run", current_delivery().is_takeover) == 1:
            raise OSError

    bench.run(work.message())

    assert bench.notes("run") == [False, False]


@pytest.mark.parametrize("done", [True, False])
def test_park_leaves_it_to_a_person(on_each_store: MakeBench, done: bool) -> None:
    """It is the dead letter outcome_unknown and does not run, until it is resolved."""
    bench = on_each_store(on_crash="park")

    @bench.actor(idempotent=True, max_retries=5, **FAST)
    def work() -> None:
        bench.note("run")

    message = bench.run(died(bench, work))
    assert bench.count("run") == 0
    assert bench.reasons() == ["outcome_unknown"]
    assert (bench.record().state, bench.record().crashes) == (PARKED, 1)

    bench.store.resolve(bench.record().key, done=done)
    bench.run(message)

    assert bench.count("run") == (0 if done else 1)
    assert bench.record().state == DONE


def reconciled(make: MakeBench, answer: Any) -> tuple[Bench, Any]:
    """Run a message whose first delivery died, with a reconciliation that answers so."""
    bench = make()

    def reconcile(delivery: Any) -> Any:
        bench.note("asked", (delivery.message.args, delivery.key_for("charge"), delivery.is_takeover))
        if isinstance(answer, Exception) and bench.count("asked") == 1:
            raise answer
        return NotDone() if isinstance(answer, Exception) else answer

    @bench.actor(idempotent=True, on_crash=reconcile, store_results=True, max_retries=1, **FAST)
    def charge(order_id: int) -> str:
        bench.note("run")
        return "charged"

    return bench, bench.run(died(bench, charge, 17))


def test_a_reconciliation_that_finds_it_done_gives_the_result(make: MakeBench) -> None:
    """Nothing runs; whoever waits is given what it found."""
    bench, message = reconciled(make, Done("ch_17"))

    assert bench.count("run") == 0
    assert bench.result(message) == "ch_17"
    assert bench.record().state == DONE
    ((args, key, takeover),) = bench.notes("asked")
    assert (list(args), len(key), takeover) == ([17], 36, True)


def test_a_reconciliation_that_finds_it_not_done_lets_it_run(make: MakeBench) -> None:
    """Once."""
    bench, message = reconciled(make, NotDone())

    assert (bench.count("asked"), bench.count("run")) == (1, 1)
    assert bench.result(message) == "charged"


def test_a_reconciliation_that_cannot_tell_parks(make: MakeBench) -> None:
    """A person has to look."""
    bench, _ = reconciled(make, Unknown())

    assert bench.count("run") == 0
    assert bench.reasons() == ["outcome_unknown"]
    assert "its reconciliation cannot tell" in said(bench.letters()[0])
    assert bench.record().state == PARKED


def test_a_reconciliation_that_returns_something_else_is_a_dead_letter(make: MakeBench) -> None:
    """None is no answer, and nothing is run on it."""
    bench, _ = reconciled(make, None)

    assert bench.count("run") == 0
    assert bench.reasons() == ["permanent"]
    assert "on_crash of actor 'charge' must return Done(…), NotDone() or Unknown(), not None" in said(
        bench.letters()[0]
    )


def test_a_reconciliation_that_fails_is_asked_again(make: MakeBench) -> None:
    """It is a failed attempt like any other: the next one still does not know what the dead run did."""
    bench, message = reconciled(make, OSError("the gateway does not answer"))

    assert (bench.count("asked"), bench.count("run")) == (2, 1)
    assert bench.result(message) == "charged"


def test_a_reconciliation_of_a_first_run_is_not_asked(make: MakeBench) -> None:
    """Nobody has died."""
    bench = make()

    @bench.actor(idempotent=True, on_crash=lambda delivery: bench.note("asked"))
    def work() -> None:
        bench.note("run")

    bench.run(work.message())

    assert (bench.count("asked"), bench.count("run")) == (0, 1)


def test_a_key_that_cannot_be_parked_now_waits(in_memory: MakeBench) -> None:
    """The store is out just when the reconciliation could not tell: the message is put off, and asked again."""
    store = Faulty()
    bench = in_memory(store=store, store_wait=0)

    @bench.actor(idempotent=True, on_crash=lambda delivery: Unknown(), max_retries=0)
    def work() -> None:
        bench.note("run")

    message = died(bench, work)
    store.out["park"] = 2
    bench.run(message)

    assert bench.count("run") == 0
    assert bench.reasons() == ["outcome_unknown"]
    assert bench.record().state == PARKED
