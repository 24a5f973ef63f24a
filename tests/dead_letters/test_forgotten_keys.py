"""A letter whose idempotency key is forgotten is not replayed, unless somebody insists."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import IdempotencyGuard, clock, install
from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.dead_letters.operations import DeadLetters
from dramatiq_guard.errors import StoreUnavailable
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.stores.memory.idempotency import MemoryIdempotency

HOUR = 3_600_000


@pytest.fixture
def store() -> MemoryDeadLetters:
    """A letter without a key, one whose key is remembered, one whose key is not, and one of which that is not known."""
    store = MemoryDeadLetters()
    store.put(letter("free"))
    store.put(letter("known", key="k1", remembered_until=clock.now() + HOUR))
    store.put(letter("forgotten", key="k2", remembered_until=clock.now() - HOUR))
    store.put(letter("unrecorded", key="k3"))
    return store


@pytest.fixture
def keys() -> MemoryIdempotency:
    """An empty store of keys."""
    return MemoryIdempotency()


def letter(message_id: str, **known: Any) -> Letter:
    message = dramatiq.Message("default", "charge", (1,), {}, {}, message_id=message_id)
    return Letter.from_message(message.asdict(), reason="exhausted", died_at=clock.now(), **known)


IDS = ["free", "known", "forgotten", "unrecorded"]


def enqueued(broker: StubBroker) -> set[str]:
    return {dramatiq.Message.decode(data).message_id for data in list(broker.queues["default"].queue)}


def test_it_is_refused_and_stays_dead(store: MemoryDeadLetters, stub_broker: StubBroker) -> None:
    """The others are replayed; the refusal says why, and is counted."""
    report = DeadLetters(store, stub_broker).replay(IDS, by="ada")

    assert {"free", "known", "unrecorded"} == set(report.replayed) == enqueued(stub_broker)
    assert ("forgotten",) == report.forgotten
    ((refused, why),) = report.refused
    assert "forgotten" == refused
    assert "the record of its key k2 has expired, so nobody can tell whether its effect happened" in why
    kept = store.get("forgotten")
    assert kept is not None
    assert "dead" == kept.state


def test_by_force_it_is_replayed(store: MemoryDeadLetters, stub_broker: StubBroker) -> None:
    """And still counted: whoever insists is told of how many."""
    report = DeadLetters(store, stub_broker).replay(IDS, force=True)

    assert set(IDS) == set(report.replayed) == enqueued(stub_broker)
    assert (("forgotten",), ()) == (report.forgotten, report.refused)


@pytest.mark.parametrize("force", [False, True])
def test_a_dry_run_foresees_it(store: MemoryDeadLetters, stub_broker: StubBroker, force: bool) -> None:
    """With the same counts and words."""
    letters = DeadLetters(store, stub_broker)
    foreseen = letters.replay(IDS, dry_run=True, force=force)
    done = letters.replay(IDS, force=force)

    assert (set(foreseen.replayed), foreseen.refused, foreseen.forgotten) == (
        set(done.replayed),
        done.refused,
        done.forgotten,
    )


def test_a_key_that_was_claimed_again_since_is_remembered(
    store: MemoryDeadLetters, stub_broker: StubBroker, keys: MemoryIdempotency
) -> None:
    """Another message of the same work may have renewed its record: its store knows best."""
    keys.claim("k2", owner="o", lease=1_000, retention=HOUR)

    report = DeadLetters(store, stub_broker, keys).replay(IDS)

    assert (4, ()) == (len(report.replayed), report.forgotten)


def test_the_brokers_guard_names_the_store_of_keys(
    store: MemoryDeadLetters, stub_broker: StubBroker, keys: MemoryIdempotency
) -> None:
    """Unless another is given."""
    assert DeadLetters(store, stub_broker).keys is None
    install(stub_broker, IdempotencyGuard(keys))

    assert DeadLetters(store, stub_broker).keys is keys
    other = MemoryIdempotency()
    assert DeadLetters(store, stub_broker, other).keys is other


def test_a_store_that_cannot_be_asked_refuses_nothing_more(
    store: MemoryDeadLetters, stub_broker: StubBroker, keys: MemoryIdempotency, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the letter says counts then, and no letter is left half replayed."""

    def out(key: str) -> Any:
        raise StoreUnavailable("out")

    monkeypatch.setattr(keys, "get", out)
    report = DeadLetters(store, stub_broker, keys).replay(IDS)

    assert (3, ("forgotten",)) == (len(report.replayed), report.forgotten)
    assert 1 == store.depth()
