from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_guard import keys
from dramatiq_guard.delivery import CARRIER
from dramatiq_guard.policy.keys import NoKey, canonical, compile_key

HOUR = 3_600_000


def remind(user_id: int, text: str = "hello") -> None: ...


def told(message: dict[str, Any], result: Any) -> None: ...


def at(*when: int) -> dict[str, Any]:
    return {"message_timestamp": int(datetime(*when, tzinfo=UTC).timestamp() * 1000)}  # type: ignore[misc, arg-type]


def key_of(spec: object, of: Any, /, *args: Any, actor: Callable[..., Any] = remind, **kwargs: Any) -> Any:
    return compile_key(spec, inspect.signature(actor), actor_name=actor.__name__)(args, kwargs, of)


# per


def test_messages_of_one_window_have_one_key() -> None:
    """An hour begins with the full hour, and its end is in the next."""
    first = key_of(keys.per(hours=1), at(2026, 12, 1, 7, 0), 1)
    assert first == key_of(keys.per(hours=1), at(2026, 12, 1, 7, 59), 2)
    assert first != key_of(keys.per(hours=1), at(2026, 12, 1, 8, 0), 1)
    assert first != key_of(keys.per(hours=1), at(2026, 12, 1, 6, 59), 1)


def test_the_key_of_a_window_can_be_read() -> None:
    """It has the length in milliseconds and the beginning of the window; it never changes."""
    spelt = canonical(key_of(keys.per(hours=1), at(2026, 12, 1, 7, 30), 1))
    assert spelt == '["list",[["str","per"],["int",3600000],["datetime","2026-12-01T07:00:00+00:00"]]]'


def test_windows_begin_with_the_full_day_and_week_of_utc() -> None:
    """A week begins on Monday."""
    assert key_of(keys.per(days=1), at(2026, 12, 1, 7, 30), 1)[2] == datetime(2026, 12, 1, tzinfo=UTC)
    assert key_of(keys.per(weeks=1), at(2026, 12, 1, 7, 30), 1)[2] == datetime(2026, 11, 30, tzinfo=UTC)
    assert datetime(2026, 11, 30, tzinfo=UTC).weekday() == 0


def test_a_replay_belongs_to_the_window_of_its_message() -> None:
    """The message that it sends is of now, and the work is of then."""
    first = dramatiq.Message(
        "default", "remind", (1,), {}, {}, message_timestamp=at(2026, 12, 1, 7)["message_timestamp"]
    )
    marker = {"of": "m", "n": 1, "token": "t", "enqueued_at": first.message_timestamp}
    again = first.copy(message_timestamp=first.message_timestamp + 24 * HOUR, options={CARRIER: {"replay": marker}})

    spec = keys.per(hours=1)
    assert key_of(spec, first, 1) == key_of(spec, again, 1) == key_of(spec, again.asdict(), 1)


def test_the_parts_of_a_length_are_added_up() -> None:
    """90 minutes are an hour and a half, in whatever words."""
    assert keys.per(hours=1, minutes=30) == keys.per(minutes=90) == keys.per(hours=1.5) == keys.per(seconds=5_400)
    assert key_of(keys.per(weeks=1, days=1), at(2026, 1, 1), 1)[1] == 8 * 24 * HOUR


@pytest.mark.parametrize("of", ["user:{user_id}", ["user_id"], lambda user_id, text: user_id])
def test_of_says_what_is_done_once_in_a_window(of: Any) -> None:
    """Any other source of keys."""
    message = at(2026, 12, 1, 7, 30)
    spec = keys.per(hours=1, of=of)
    assert key_of(spec, message, 1) == key_of(spec, at(2026, 12, 1, 7, 31), user_id=1, text="again")
    assert key_of(spec, message, 1) != key_of(spec, message, 2)
    assert key_of(spec, message, 1) != key_of(spec, at(2026, 12, 1, 8, 30), 1)
    assert key_of(spec, message, 1) != key_of(keys.per(hours=1), message, 1)


def test_of_may_be_made_of_the_message_too() -> None:
    """It gets the message."""
    key = key_of(keys.per(days=1, of=keys.parent), at(2026, 12, 1), {"message_id": "m-1"}, None, actor=told)
    assert key[3] == "m-1"


def test_what_is_wrong_with_of_is_said_when_the_actor_is_declared() -> None:
    """As for any source of keys."""
    with pytest.raises(ValueError, match="actor 'remind' names 'user': its parameters are user_id, text"):
        compile_key(keys.per(hours=1, of=["user"]), inspect.signature(remind), actor_name="remind")


def test_a_message_of_dramatiqs_will_do() -> None:
    """It need not be what travels of it."""
    message: dramatiq.Message[Any] = dramatiq.Message("q", "a", (), {}, {}, message_timestamp=5 * HOUR + 1)
    assert key_of(keys.per(hours=1), message, 1) == key_of(keys.per(hours=1), message.asdict(), 1)


@pytest.mark.parametrize("message", [{}, {"message_timestamp": None}, object()])
def test_a_message_without_a_time_has_no_key(message: object) -> None:
    """It is not given the time of now."""
    with pytest.raises(NoKey, match="actor 'remind' needs a message_timestamp"):
        key_of(keys.per(hours=1), message, 1)


@pytest.mark.parametrize(
    ("length", "says"),
    [
        ({}, "needs the length of the window"),
        ({"hours": 0}, "needs the length of the window"),
        ({"seconds": 0.0001}, "needs the length of the window"),
        ({"hours": -1}, r"keys.per\(hours=-1\) must not be negative"),
        ({"hours": 2, "minutes": -1}, r"keys.per\(minutes=-1\) must not be negative"),
        ({"seconds": float("nan")}, r"keys.per\(seconds=nan\) must not be negative"),
    ],
)
def test_a_window_without_a_length_is_refused(length: dict[str, Any], says: str) -> None:
    """When the actor is declared."""
    with pytest.raises(ValueError, match=says):
        keys.per(**length)


lengths = st.integers(1, 10 * 7 * 24 * HOUR)
stamps = st.integers(0, 4_000_000_000_000)


@given(lengths, stamps)
def test_every_moment_is_in_the_window_that_its_key_names(length: int, stamp: int) -> None:
    """Windows leave no gap and do not overlap."""
    spec = keys.per(seconds=length / 1000)
    _, milliseconds, begins = key_of(spec, {"message_timestamp": stamp}, 1)
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=stamp)
    assert begins <= moment < begins + timedelta(milliseconds=milliseconds)
    assert (begins - datetime(1970, 1, 5, tzinfo=UTC)) % timedelta(milliseconds=milliseconds) == timedelta(0)


# parent


def test_a_callback_has_the_id_of_the_message_that_it_is_told_of() -> None:
    """However it is passed, and whatever comes with it."""
    message = dramatiq.Message("q", "a", (), {}, {}, message_id="m-1").asdict()
    assert key_of(keys.parent, None, message, 5, actor=told) == "m-1"
    assert key_of(keys.parent, None, message=message, result=6, actor=told) == "m-1"
    assert key_of(keys.parent, None, {"message_id": "m-1"}, actor=lambda *args: None) == "m-1"


def test_dramatiqs_callbacks_are_told_of_the_message() -> None:
    """Their own ids differ, the parent's is the one that was sent."""
    broker = StubBroker()
    seen: list[Any] = []

    @dramatiq.actor(broker=broker)
    def done(message: dict[str, Any], result: Any) -> None:
        seen.append(
            compile_key(keys.parent, inspect.signature(done.fn), actor_name="done")((message, result), {}, None)
        )

    @dramatiq.actor(broker=broker, on_success="done")
    def work() -> None: ...

    worker = dramatiq.Worker(broker, worker_timeout=100)
    worker.start()
    try:
        sent = work.send()
        broker.join("default", timeout=10_000)
        worker.join()
    finally:
        worker.stop()
        broker.close()
    assert seen == [sent.message_id]


@pytest.mark.parametrize("first", [None, "m-1", {}, {"message_id": None}, {"message_id": 5}])
def test_what_is_no_callback_has_no_key(first: object) -> None:
    """The error says how the message should have been sent."""
    with pytest.raises(NoKey, match=r"actor 'told' is keys\.parent, but its first argument is not a message"):
        key_of(keys.parent, None, first, 5, actor=told)


@pytest.mark.parametrize("actor", [lambda: None, lambda *, message: None, lambda **message: None])
def test_an_actor_that_cannot_be_a_callback_is_refused(actor: Callable[..., Any]) -> None:
    """When it is declared."""
    with pytest.raises(ValueError, match=r"keys\.parent is for callbacks"):
        compile_key(keys.parent, inspect.signature(actor), actor_name="told")


def test_a_source_says_what_it_is() -> None:
    """In errors and in the list of actors."""
    assert repr(keys.parent) == "keys.parent"
