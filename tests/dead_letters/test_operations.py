"""Replay, discard and restore lose nothing, double nothing, and say what they did."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import clock
from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.dead_letters.operations import DeadLetters, LetterMissing, ReplayStopped
from dramatiq_guard.dead_letters.redact import Redaction
from dramatiq_guard.errors import GuardError
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.stores.protocols import Filter
from tests.support.waiting import wait_until


def letter(message_id: str = "m", *, enqueued_at: int = 1, redaction: Redaction | None = None, **known: Any) -> Letter:
    message = {
        "queue_name": "default",
        "actor_name": "charge",
        "args": ("order-1",),
        "kwargs": {},
        "options": {},
        "message_id": message_id,
        "message_timestamp": enqueued_at,
    }
    message.update({name: known.pop(name) for name in list(known) if name in message})
    return Letter.from_message(message, reason="permanent", died_at=clock.now(), redaction=redaction, **known)


@pytest.fixture
def store() -> MemoryDeadLetters:
    """An empty store."""
    return MemoryDeadLetters()


@pytest.fixture
def letters(store: MemoryDeadLetters, stub_broker: StubBroker) -> DeadLetters:
    """The operations on `store`, with a broker in memory."""
    return DeadLetters(store, stub_broker)


def enqueued(broker: StubBroker, queue: str = "default") -> list[dramatiq.Message[Any]]:
    return [dramatiq.Message.decode(data) for data in list(broker.queues[queue].queue)]


def test_a_replayed_message_is_as_on_its_first_day(
    letters: DeadLetters, store: MemoryDeadLetters, stub_broker: StubBroker
) -> None:
    """Same id, arguments and own options; nothing left of what earlier deliveries wrote; a mark of the replay."""
    spent = {"retries": 3, "traceback": "…", "eta": 5, "redis_message_id": "r", "requeue_timestamp": 6}
    ours = {"dramatiq_guard": {"tp": "00-trace", "history": [1], "deferrals": 2}}
    store.put(letter(options={"max_age": 9, "pipe_target": {"x": 1}, **spent, **ours}))

    letters.replay(["m"], by="ada", why="fixed")

    (sent,) = enqueued(stub_broker)
    replayed = store.get("m")
    assert replayed is not None
    token = replayed.standing.replay.token
    assert ("m", "charge", ("order-1",)) == (sent.message_id, sent.actor_name, sent.args)
    assert {
        "max_age": 9,
        "pipe_target": {"x": 1},
        "dramatiq_guard": {"tp": "00-trace", "replay": {"of": "m", "n": 1, "token": token, "enqueued_at": 1}},
    } == sent.options
    assert sent.message_timestamp > 1, "an age limit counts from the replay"
    assert ("replayed", "ada", "fixed") == (replayed.state, replayed.standing.by, replayed.standing.why)


def test_everything_that_matches_is_replayed_in_the_order_of_enqueueing(
    letters: DeadLetters, store: MemoryDeadLetters, stub_broker: StubBroker
) -> None:
    """Over many batches; and what does not match stays."""
    for at in range(60):
        store.put(letter(f"m{at:02}", enqueued_at=1_000 - at))
    store.put(letter("other", actor_name="refund"))

    report = letters.replay(Filter(actor="charge"))

    expected = [f"m{at:02}" for at in reversed(range(60))]
    assert expected == [message.message_id for message in enqueued(stub_broker)]
    assert (60, tuple(expected), {"charge": 60}, ()) == (
        report.selected,
        report.replayed,
        report.per_actor,
        report.refused,
    )
    assert 1 == store.depth()


def test_a_dry_run_changes_nothing_and_foresees_the_rest(
    letters: DeadLetters, store: MemoryDeadLetters, stub_broker: StubBroker
) -> None:
    """It names what a replay would send and what it would refuse, and why."""
    store.put(letter("good", enqueued_at=5))
    store.put(letter("secret", kwargs={"password": "x"}, redaction=Redaction()))
    store.put(letter("gone"))
    store.discard(["gone"], now=1)
    what = ["good", "secret", "gone", "nobody"]

    foreseen = letters.replay(what, dry_run=True)
    before = store.depth()
    done = letters.replay(what)

    assert 2 == before
    assert (foreseen.replayed, sorted(foreseen.refused), foreseen.per_actor) == (
        done.replayed,
        sorted(done.refused),
        done.per_actor,
    )
    assert ("good",) == done.replayed
    why = dict(done.refused)
    assert "kwargs.password" in why["secret"]
    assert "restore" in why["gone"]
    assert "no such letter" in why["nobody"]
    secret = store.get("secret")
    assert secret is not None
    assert "dead" == secret.state


def test_a_double_click_sends_once(letters: DeadLetters, store: MemoryDeadLetters, stub_broker: StubBroker) -> None:
    """The second replay is told that the first was there."""
    store.put(letter())

    letters.replay(["m"])
    second = letters.replay(["m", "m"])

    assert 1 == len(enqueued(stub_broker))
    assert (1, (("m", "it was replayed already"),)) == (second.selected, second.refused)


class BrokenBroker(StubBroker):
    """Takes so many messages and then none."""

    def __init__(self, takes: int, error: BaseException) -> None:
        super().__init__()
        self.takes, self.error = takes, error

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        if self.takes == 0:
            raise self.error
        self.takes -= 1
        return super().enqueue(message, delay=delay)


def test_a_broker_that_goes_away_leaves_the_rest_dead(store: MemoryDeadLetters) -> None:
    """What was sent is replayed, what was not is dead, and the error says how far it came."""
    for at in range(5):
        store.put(letter(f"m{at}", enqueued_at=at))
    broker = BrokenBroker(2, ConnectionError("gone"))

    with pytest.raises(ReplayStopped, match=r"after 2 of 5 .* 'm2': gone; .* replay again") as caught:
        DeadLetters(store, broker).replay(Filter())

    assert ("m0", "m1") == caught.value.report.replayed
    assert (3, 2, 0) == (store.depth(), store.depth("replayed"), store.depth("replaying"))
    broker.takes = 99
    assert ("m2", "m3", "m4") == DeadLetters(store, broker).replay(Filter()).replayed
    assert 5 == len(enqueued(broker))


def test_an_interrupted_replay_leaves_nothing_in_doubt(store: MemoryDeadLetters) -> None:
    """Control-C is not a crash."""
    for at in range(3):
        store.put(letter(f"m{at}"))

    with pytest.raises(KeyboardInterrupt):
        DeadLetters(store, BrokenBroker(1, KeyboardInterrupt())).replay(Filter())

    assert (2, 1, 0) == (store.depth(), store.depth("replayed"), store.depth("replaying"))


def test_a_killed_replay_is_taken_up_again(
    letters: DeadLetters, store: MemoryDeadLetters, stub_broker: StubBroker
) -> None:
    """What another process held is replayed once its lease is over, by the same filter as before."""
    store.put(letter())
    now = clock.now()
    store.begin_replay(["m"], owner="killed", now=now - 100_000, lease=99_000)
    store.put(letter("n"))
    store.begin_replay(["n"], owner="alive", now=now, lease=99_000)

    report = letters.replay(Filter())

    assert ("m",) == report.replayed
    assert (("n", "another replay has it now"),) == report.refused


def test_an_unknown_letter_is_named(letters: DeadLetters) -> None:
    """Showing what is not there says so."""
    with pytest.raises(LetterMissing, match="'nobody'"):
        letters.show("nobody")


def test_a_replay_needs_a_broker(store: MemoryDeadLetters) -> None:
    """Looking does not; replaying says what is missing."""
    store.put(letter())
    letters = DeadLetters(store)

    assert "m" == letters.show("m").letter_id
    with pytest.raises(GuardError, match="broker"):
        letters.replay(["m"])


def test_discard_and_restore_by_filter(letters: DeadLetters, store: MemoryDeadLetters) -> None:
    """Everything that matches is laid aside, and can be taken back."""
    for at in range(450):
        store.put(letter(f"m{at}"))

    discarded = letters.discard(Filter(actor="charge"), by="ada", why="test data")

    assert (450, 450) == (discarded.selected, len(discarded.moved))
    assert 0 == store.depth()
    assert ("m3",) == letters.restore(["m3", "nobody"]).moved
    assert "ada" == letters.list(Filter(states=("discarded",))).letters[0].standing.by
    assert 1 == letters.groups()[0].count


# -- The broker's own copy -------------------------------------------------------------------------------------------


def die_on(broker: RedisBroker, client: redis.Redis, **known: Any) -> dramatiq.Message[Any]:
    """Let a real worker of stock Dramatiq dead-letter a message, and return it as it lies in ``.XQ``."""

    @dramatiq.actor(broker=broker, max_retries=0, actor_name="charge")
    def charge(**_: Any) -> None:
        raise ValueError("declined")

    charge.send(**known)
    worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=1)
    worker.start()
    try:
        wait_until(lambda: client.zcard("dramatiq:default.XQ"), describe="the broker's own dead letter")
    finally:
        worker.stop()
    (data,) = client.hgetall("dramatiq:default.XQ.msgs").values()
    return dramatiq.Message.decode(data)


def copies(client: redis.Redis) -> tuple[int, int]:
    return client.zcard("dramatiq:default.XQ"), client.hlen("dramatiq:default.XQ.msgs")


def letter_of(message: dramatiq.Message[Any], **known: Any) -> Letter:
    return Letter.from_message(message.asdict(), reason="permanent", died_at=clock.now(), **known)


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_the_brokers_own_copy_is_removed(
    verb: str, store: MemoryDeadLetters, redis_broker: RedisBroker, redis_client: redis.Redis
) -> None:
    """What was dealt with cannot be replayed from ``.XQ`` a second time."""
    dead = die_on(redis_broker, redis_client, cents=5)
    assert (1, 1) == copies(redis_client)
    store.put(letter_of(dead))

    report = getattr(DeadLetters(store, redis_broker), verb)([dead.message_id])

    assert (0, 0) == copies(redis_client)
    assert 1 == report.copies_removed


def test_a_redacted_letter_is_replayed_from_the_brokers_copy(
    store: MemoryDeadLetters, redis_broker: RedisBroker, redis_client: redis.Redis
) -> None:
    """The store never held the secret; the broker still does."""
    dead = die_on(redis_broker, redis_client, password="s3cret")
    store.put(letter_of(dead, redaction=Redaction()))
    letters = DeadLetters(store, redis_broker)

    assert (dead.message_id,) == letters.replay([dead.message_id], dry_run=True).replayed
    assert (dead.message_id,) == letters.replay([dead.message_id]).replayed

    (data,) = redis_client.hgetall("dramatiq:default.msgs").values()
    sent = dramatiq.Message.decode(data)
    assert ({"password": "s3cret"}, dead.message_id) == (sent.kwargs, sent.message_id)
    shown = store.get(dead.message_id)
    assert shown is not None
    assert "s3cret" not in shown.to_json()
