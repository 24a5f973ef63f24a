"""The letters of guarded messages know their key, and until when it is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import DeadLetter, IdempotencyGuard, JitterBackoff, clock, install
from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.dead_letters.operations import DeadLetters
from dramatiq_guard.errors import StoreUnavailable
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.stores.memory.idempotency import MemoryIdempotency
from tests.support.waiting import wait_until

DAY = 86_400_000
LEASE = 10_000
KEY = 'default/charge/key/["list",[["str","order:{}"],["int",1]]]'


@pytest.fixture
def letters() -> MemoryDeadLetters:
    """Where letters are kept."""
    return MemoryDeadLetters()


@pytest.fixture
def keys() -> MemoryIdempotency:
    """Where keys are kept."""
    return MemoryIdempotency()


@pytest.fixture
def runs() -> list[int]:
    """What the actor was called with."""
    return []


@pytest.fixture
def guarded(
    stub_broker: StubBroker, letters: MemoryDeadLetters, keys: MemoryIdempotency, runs: list[int]
) -> Iterator[Callable[..., Any]]:
    """Declares an actor that fails below a hundred, and starts a worker."""
    workers = []
    install(
        stub_broker,
        JitterBackoff(),
        DeadLetter(letters),
        IdempotencyGuard(keys, lease=LEASE, retention=DAY * 8, store_wait=0),
    )

    def declare(**options: Any) -> Any:
        known = {"idempotency_key": "order:{order_id}", "max_retries": 0, **options}

        @dramatiq.actor(broker=stub_broker, actor_name="charge", **known)
        def charge(order_id: int, cents: int) -> None:
            runs.append(cents)
            if cents < 100:
                raise ValueError("too little")

        worker = dramatiq.Worker(stub_broker, worker_timeout=10, worker_threads=2)
        worker.start()
        workers.append(worker)
        return charge

    yield declare
    for worker in workers:
        worker.stop()


def dead(letters: MemoryDeadLetters, count: int = 1) -> Letter:
    """The latest letter, when there are so many."""
    wait_until(lambda: letters.depth() == count, describe="a letter")
    return letters.page().letters[0]


def test_a_run_that_failed_is_remembered_from_its_claim_on(
    guarded: Any, letters: MemoryDeadLetters, keys: MemoryIdempotency
) -> None:
    """For the retention and the lease: exactly as long as its record lives."""
    guarded().send(1, 50)

    letter = dead(letters)
    record = keys.get(KEY)
    assert record is not None
    assert ("exhausted", KEY, record.expires_at) == (letter.reason, letter.key, letter.remembered_until)


def test_a_key_that_was_refused_is_remembered_from_its_first_claim_on(
    guarded: Any, letters: MemoryDeadLetters, keys: MemoryIdempotency, runs: list[int]
) -> None:
    """At least that long: when it was claimed last, only its owner was told."""
    charge = guarded()
    charge.send(1, 100)
    wait_until(lambda: (record := keys.get(KEY)) is not None and record.state == "done", describe="the first run")
    charge.send(1, 200)

    letter = dead(letters)
    record = keys.get(KEY)
    assert record is not None
    assert letter.remembered_until is not None
    assert ("key_reused", KEY) == (letter.reason, letter.key)
    assert record.first_claim_at + 8 * DAY == letter.remembered_until <= record.expires_at
    assert [100] == runs


def test_a_message_without_a_key_leaves_a_letter_without_one(guarded: Any, letters: MemoryDeadLetters) -> None:
    """There is nothing to remember it by."""
    guarded(idempotency_key=lambda order_id, cents: None).send(1, 50)

    letter = dead(letters)
    assert ("missing_key", "", None) == (letter.reason, letter.key, letter.remembered_until)


def test_an_actor_that_is_not_guarded_leaves_a_letter_without_a_key(guarded: Any, letters: MemoryDeadLetters) -> None:
    """As before."""
    guarded(idempotency_key=None).send(1, 50)

    letter = dead(letters)
    assert ("exhausted", "", None) == (letter.reason, letter.key, letter.remembered_until)


def test_a_run_without_its_store_is_not_on_record(
    guarded: Any, letters: MemoryDeadLetters, keys: MemoryIdempotency, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was chosen to run unguarded, and is replayed like any other."""

    def out(key: str, **_: Any) -> Any:
        raise StoreUnavailable("out")

    monkeypatch.setattr(keys, "claim", out)
    guarded(on_store_error="run").send(1, 50)

    letter = dead(letters)
    assert ("exhausted", KEY, None) == (letter.reason, letter.key, letter.remembered_until)


@pytest.mark.parametrize(("decision", "ran"), [(None, []), ("retry", [100]), ("done", [])])
def test_a_replay_of_parked_work_waits_for_a_person(
    guarded: Any,
    letters: MemoryDeadLetters,
    keys: MemoryIdempotency,
    runs: list[int],
    stub_broker: StubBroker,
    decision: str | None,
    ran: list[int],
) -> None:
    """Until the key is resolved it dies of the same again; then it is run once, or is done without being run."""
    # A run that died: its lease is over.
    keys.claim(KEY, owner="gone", lease=1, retention=8 * DAY)
    wait_until(lambda: (record := keys.get(KEY)) is not None and record.lease_until <= clock.now())
    charge = guarded(on_crash="park")
    charge.send(1, 100)
    first = dead(letters)
    assert ("outcome_unknown", KEY, []) == (first.reason, first.key, runs)

    if decision is not None:
        assert "parked" == keys.resolve(KEY, done=decision == "done")
    report = DeadLetters(letters, stub_broker).replay([first.letter_id])

    assert (first.letter_id,) == report.replayed
    if decision is None:
        again = dead(letters)
        assert (f"{first.message_id}~1", "outcome_unknown", first.letter_id) == (
            again.letter_id,
            again.reason,
            again.replay_of,
        )
    else:
        wait_until(lambda: (letter := letters.get(first.letter_id)) and letter.standing.replay.outcome == "succeeded")
        assert 0 == letters.depth()
    assert ran == runs
