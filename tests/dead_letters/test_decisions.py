"""What a person decided about a parked key holds: the run that follows does not stop where the one before it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import DeadLetter, IdempotencyGuard, JitterBackoff, clock, current_delivery, install
from dramatiq_guard.dead_letters.operations import DeadLetters
from dramatiq_guard.idempotency.claimed import DECIDED, STARTED, decided
from dramatiq_guard.idempotency.resolving import resolve
from dramatiq_guard.idempotency.values import encode
from dramatiq_guard.reconcile import Unknown
from dramatiq_guard.stores.idempotency import FREE, FRESH, HELD, IdempotencyStore
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.stores.memory.idempotency import MemoryIdempotency
from tests.support.waiting import wait_until

DAY = 86_400_000
KEY = 'default/charge/key/["int",1]'


@pytest.fixture
def letters() -> MemoryDeadLetters:
    """Where letters are kept."""
    return MemoryDeadLetters()


@pytest.fixture
def keys() -> MemoryIdempotency:
    """Where keys are kept; the run of `KEY` has died in its second step."""
    keys = MemoryIdempotency()
    claim = keys.claim(KEY, owner="gone", lease=1, retention=8 * DAY)
    keys.step(KEY, claim.fence, "book", encode("b-1"))
    keys.step(KEY, claim.fence, "charge", STARTED)
    until(lambda: (record := keys.get(KEY)) is not None and record.lease_until < clock.now())
    return keys


def until(condition: Callable[[], Any]) -> None:
    wait_until(condition)


@pytest.fixture
def work(stub_broker: StubBroker, letters: MemoryDeadLetters, keys: MemoryIdempotency) -> Iterator[Callable[..., Any]]:
    """Declares an actor of two steps, sends it a message, and gives what it did and the broker."""
    workers = []
    install(stub_broker, JitterBackoff(), DeadLetter(letters), IdempotencyGuard(keys, retention=8 * DAY))

    def work(*, steps: dict[str, Any], **options: Any) -> list[Any]:
        seen: list[Any] = []

        known = {"idempotency_key": lambda order_id: order_id, "max_retries": 0, **options}

        @dramatiq.actor(broker=stub_broker, actor_name="charge", **known)
        def charge(order_id: int) -> None:
            delivery = current_delivery()
            seen.append(delivery.is_takeover)
            for name in ("book", "charge"):
                delivery.step(name, lambda _, name=name: seen.append(name), **steps)  # type: ignore[misc]

        worker = dramatiq.Worker(stub_broker, worker_timeout=10, worker_threads=2)
        worker.start()
        workers.append(worker)
        charge.send(1)
        return seen

    yield work
    for worker in workers:
        worker.stop()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"on_crash": "park"}, {}),
        ({"on_crash": lambda _: Unknown()}, {}),
        ({}, {"at_most_once": True}),
        ({}, {"key_ttl": 1}),
    ],
    ids=["park", "reconcile", "at_most_once", "key_ttl"],
)
def test_work_that_was_declared_undone_is_run(
    work: Callable[..., Any],
    letters: MemoryDeadLetters,
    keys: MemoryIdempotency,
    stub_broker: StubBroker,
    options: Any,
    steps: Any,
) -> None:
    """Once, from where it had stopped, whatever it was that had parked it; and it is no takeover any more."""
    if "key_ttl" in steps:
        steps = {"key_ttl": 5_000}
        # The third party has forgotten the key by the time at which the second run comes.
        keys._records[KEY].first_claim_at -= DAY
        del keys._records[KEY].steps["charge"]
    seen = work(steps=steps, **options)
    until(lambda: letters.depth() == 1)
    (letter,) = letters.page().letters
    assert "outcome_unknown" == letter.reason
    seen.clear()

    assert "parked" == resolve(keys, KEY, done=False)
    DeadLetters(letters, stub_broker).replay([letter.letter_id])

    until(lambda: (record := keys.get(KEY)) is not None and record.state == "done")
    assert [False, "charge"] == seen


def test_a_decision_is_on_record(keys: MemoryIdempotency) -> None:
    """The key is free, remembered for a day at least, and what had ended stays done."""
    keys._records[KEY].expires_at = clock.now() + 5_000

    assert HELD == resolve(keys, KEY, done=False)

    record = keys.get(KEY)
    assert record is not None
    assert (FREE, 1) == (record.state, record.crashes)
    assert record.expires_at >= clock.now() + DAY - 60_000
    assert (encode("b-1"), b"!") == (record.steps["book"], record.steps["charge"])
    assert record.steps[DECIDED].endswith(b" 1")


def test_a_decision_that_there_is_nothing_to_decide_about_leaves_no_trace(keys: MemoryIdempotency) -> None:
    """Nor does one that work is done, or one that a run was faster than."""
    assert "absent" == resolve(keys, "other", done=False)
    assert keys.get("other") is None
    claim = keys.claim(KEY, owner="new", lease=60_000, retention=DAY)
    assert "busy" == resolve(keys, KEY, done=False)
    keys.park(KEY, claim.fence)
    assert "parked" == resolve(keys, KEY, done=True)
    record = keys.get(KEY)
    assert record is not None
    assert ("done", False) == (record.state, DECIDED in record.steps)


@pytest.mark.parametrize("moment", ["get", "claim"])
def test_a_run_that_is_faster_is_left_alone(
    keys: MemoryIdempotency, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It holds the key by now."""
    inner = getattr(keys, moment)
    claimed = []

    def late(*args: Any, **known: Any) -> Any:
        if not claimed:
            claimed.append(True)
            assert FRESH == MemoryIdempotency.claim(keys, KEY, owner="fast", lease=60_000, retention=DAY).answer
        return inner(*args, **known)

    monkeypatch.setattr(keys, moment, late)
    assert HELD == resolve(keys, KEY, done=False)

    record = keys.get(KEY)
    assert record is not None
    assert (HELD, "fast", False) == (record.state, record.owner, DECIDED in record.steps)


def test_a_step_that_is_named_like_a_decision_is_none(keys: IdempotencyStore) -> None:
    """What is no decision counts for nothing."""
    assert (0, 0) == decided({}) == decided({DECIDED: encode(1)}) == decided({DECIDED: b"7"})
    assert (7, 2) == decided({DECIDED: b"7 2"})
