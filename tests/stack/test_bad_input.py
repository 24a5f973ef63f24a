"""Bad input gets a clear error, and loses nothing: the message runs, is retried or dies with a letter."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.middleware import CurrentMessage

from dramatiq_guard import DeadLetter, JitterBackoff, connect, install
from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.errors import SetupError, StoreUnavailable
from dramatiq_guard.testing.private_server import free_port
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.stack.rig import FAST, Rig, build

#: What a letter keeps of an error's text and of its traceback, with some room for the marks of what was cut.
TEXT, TRACEBACK = 9 * 1024, 40 * 1024


@pytest.fixture(params=["stub", "redis"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig with the stack, in memory and on Redis."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    rig, put_on = build(request.param, "install", url)
    put_on()
    yield rig
    rig.close()


def letters(rig: Rig) -> list[Letter]:
    """The letters that were written."""
    assert rig.letters is not None
    return list(rig.letters.page().letters)


def dies(rig: Rig, work: Callable[..., Any], *, runs: int = 2, **options: Any) -> Letter:
    """Run an actor with one retry until its message dies; the letter."""

    def noted() -> None:
        rig.note("run")
        work()

    actor = rig.actor(actor_name="work", max_retries=1, **FAST)(noted)
    worker = rig.work(threads=2)
    message = actor.send_with_options(**options)
    rig.settle()

    assert rig.count("run") == runs
    assert rig.ends(message)["nack"] == 1
    assert rig.dead() == {"work": 1}
    assert all(thread.is_alive() for thread in worker.workers)
    (letter,) = letters(rig)
    # It can be stored and read again.
    assert Letter.from_json(letter.to_json()).letter_id == letter.letter_id
    return letter


# -- stores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("mysql://localhost/app", "the scheme 'mysql' is unknown"),
        ("localhost:6379", "not a URL of a store"),
        ("", "not a URL of a store"),
        (3, "no store for a int"),
    ],
)
def test_a_store_url_of_another_kind_is_refused(target: Any, says: str) -> None:
    """The error says what may be written."""
    with pytest.raises(SetupError, match=says) as caught:
        connect(target)

    assert "redis://" in str(caught.value)
    assert "postgresql://" in str(caught.value)


def test_a_password_in_a_bad_url_is_not_shown() -> None:
    """The error names the URL without it."""
    with pytest.raises(SetupError) as caught:
        connect("mysql://me:s3cret@localhost/app")

    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
def test_a_server_that_refuses_is_said_to_be_out_of_reach(scheme: str) -> None:
    """connect itself does not connect; the first command says that the store cannot be reached."""
    stores = connect(f"{scheme}://127.0.0.1:{free_port()}/0")

    with pytest.raises(StoreUnavailable):
        stores.dead_letters.ping()
    stores.dead_letters.close()


def test_a_store_that_refuses_loses_no_message(own_valkey: PrivateValkey, redis_url: str) -> None:
    """The store is out when the message dies: the letter is in it when it is back."""
    stores = connect(own_valkey.url)
    rig, _ = build("redis", "stock", redis_url)
    install(rig.broker, JitterBackoff(), DeadLetter(stores.dead_letters))
    own_valkey.stop()
    try:

        @rig.actor(max_retries=0)
        def work() -> None:
            raise OSError("for good")

        rig.work(threads=1)
        message = work.send()
        own_valkey.start()
        rig.settle()

        assert rig.ends(message)["nack"] == 1
        (letter,) = stores.dead_letters.page().letters
        assert letter.message_id == message.message_id
    finally:
        rig.close()
        stores.dead_letters.close()


# -- errors ----------------------------------------------------------------------------------------------------------


class Unpicklable(Exception):
    """Holds what no pickle takes, and cannot be made from its args."""

    def __init__(self, first: str, *, second: object) -> None:
        super().__init__(first)
        self.lock = threading.Lock()
        self.second = second


class Unprintable(Exception):
    """Has neither text nor representation."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Hostile(BaseException):
    """Raises something that is no Exception when it is looked at."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


def test_an_exception_that_cannot_be_pickled(rig: Rig) -> None:
    """Nothing is pickled: its type and text are in the letter."""

    def work() -> None:
        raise Unpicklable("first", second=rig)

    letter = dies(rig, work)

    assert letter.error is not None
    assert letter.error.type.endswith("Unpicklable")
    assert letter.error.message == "first"


@pytest.mark.parametrize("kind", [Unprintable, Hostile])
def test_an_exception_whose_text_raises(rig: Rig, kind: type[BaseException]) -> None:
    """Its type is in the letter, and something in place of the text."""

    def work() -> None:
        raise kind

    letter = dies(rig, work)

    assert letter.error is not None
    assert letter.error.type.endswith(kind.__name__)


def test_a_traceback_of_10_000_frames(rig: Rig) -> None:
    """It is bounded, and both its ends are there."""

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        else:
            raise OSError("the bottom")

    def work() -> None:
        import sys

        before = sys.getrecursionlimit()
        sys.setrecursionlimit(20_000)
        try:
            deep(10_000)
        finally:
            sys.setrecursionlimit(before)

    letter = dies(rig, work)

    assert letter.error is not None
    assert "the bottom" in letter.error.message
    assert 0 < len(letter.error.traceback) < TRACEBACK
    assert "in deep" in letter.error.traceback or "deep" in letter.error.traceback


def test_an_error_message_of_ten_megabytes(rig: Rig) -> None:
    """8 KiB of it are kept, in the letter and in what travels."""

    def work() -> None:
        raise OSError("x" * 10_000_000)

    letter = dies(rig, work)

    assert letter.error is not None
    assert 1_000 < len(letter.error.message) < TEXT
    assert len(letter.to_json()) < 4 * TRACEBACK
    for message in rig.dead_messages():
        assert len(json.dumps(message.options, default=str)) < TRACEBACK


def test_a_chain_of_errors_that_is_a_circle(rig: Rig) -> None:
    """Causes that lead back to themselves are followed once."""

    def work() -> None:
        first, second = OSError("first"), ValueError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    assert dies(rig, work).error is not None


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_retries": "many"},
        {"max_retries": -1},
        {"min_backoff": "soon"},
        {"min_backoff": -5},
        {"max_backoff": []},
        {"jitter": "wobbly"},
        {"backoff": {"a": 1}},
        {"retry_for": "long"},
        {"max_deferrals": "x", "max_interruptions": [1]},
        {"time_limit": "a minute"},
        {"time_limit": -1},
        {"notify_shutdown": "maybe"},
        {"throws": "KeyError"},
        {"throws": ["KeyError", 3]},
        {"retries": "none"},
        {"retries": None},
        {"retries": [1]},
        {"retry_when": "always"},
        {"classify": "rubbish"},
        {"traceback": 3, "requeue_timestamp": "yesterday"},
    ],
    ids=str,
)
def test_an_unsound_option_in_a_message_is_passed_over(rig: Rig, options: dict[str, Any]) -> None:
    """What travels is validated by nobody: the actor's own option holds, and the message dies after its one retry."""

    def work() -> None:
        raise OSError("always")

    letter = dies(rig, work, **options)

    assert letter.reason == "exhausted"


def test_an_on_retry_exhausted_that_nobody_knows_loses_nothing(rig: Rig) -> None:
    """The callback cannot be sent; the message dies with its letter all the same."""

    def work() -> None:
        raise OSError("always")

    dies(rig, work, on_retry_exhausted="nobody")


def test_a_non_json_option_cannot_be_sent(rig: Rig) -> None:
    """The error comes to whoever sends, and nothing is enqueued."""

    @rig.actor
    def work() -> None:
        rig.note("run")

    rig.work(threads=1)
    with pytest.raises(Exception, match=r"set"):
        work.send_with_options(mine={1, 2})
    rig.settle()

    assert rig.count("run") == 0


def test_a_non_json_option_that_a_middleware_put_in_does_not_travel(rig: Rig) -> None:
    """Copies are made of the options as they were decoded, so the retry goes on without it."""

    @rig.actor(max_retries=1, **FAST)
    def work() -> None:
        message: Any = CurrentMessage.get_current_message()
        message.options["mine"] = {1, 2}
        if rig.note("run") < 2:
            raise OSError("once")

    rig.work(threads=1)
    message = work.send()
    rig.settle()

    assert rig.count("run") == 2
    assert rig.ends(message)["nack"] == 0


def test_an_argument_that_was_changed_to_what_cannot_be_encoded(rig: Rig) -> None:
    """The retry cannot be sent as it is: the message dies as unencodable, with what it held in its letter."""

    @rig.actor(max_retries=3, **FAST)
    def work(payload: dict[str, Any]) -> None:
        rig.note("run")
        payload["seen"] = {1, 2}
        raise OSError("always")

    worker = rig.work(threads=1)
    message = work.send({"order": 7})
    rig.settle()

    assert rig.count("run") == 1
    assert rig.ends(message)["nack"] == 1
    assert all(thread.is_alive() for thread in worker.workers)
    (letter,) = letters(rig)
    assert letter.reason == "unencodable"
    assert "order" in letter.to_json()


@pytest.mark.parametrize("kind", ["hook", "actor"])
def test_a_result_that_cannot_be_encoded_loses_nothing(rig: Rig, kind: str) -> None:
    """The work is done and is not run again; the message ends."""

    @rig.actor(store_results=True, max_retries=2, **FAST)
    def work() -> Any:
        rig.note("run")
        return {1, 2} if kind == "actor" else object()

    worker = rig.work(threads=1)
    message = work.send()
    rig.settle()

    assert rig.count("run") == 1
    assert sum(rig.ends(message).values()) == 1
    assert all(thread.is_alive() for thread in worker.workers)


def test_a_message_that_nobody_can_decode_holds_up_nobody(redis_url: str, redis_client: redis.Redis) -> None:
    """On Redis it becomes a dead letter, and the messages beside it run."""
    rig, put_on = build("redis", "install", redis_url)
    put_on()
    try:

        @rig.actor
        def work(n: int) -> None:
            rig.note("run", n)

        for n in range(2):
            work.send(n)
        redis_client.hset("dramatiq:default.msgs", "broken", b"\\xff not JSON")
        redis_client.rpush("dramatiq:default", "broken")
        for n in range(2, 4):
            work.send(n)
        rig.work(threads=1)
        rig.settle()

        assert sorted(rig.notes("run")) == [0, 1, 2, 3]
        assert [letter.reason for letter in letters(rig)] == ["undecodable"]
    finally:
        rig.close()


def test_options_of_the_wrong_shape_hold_up_nobody(redis_url: str) -> None:
    """A message whose options, args or eta are nonsense does not stop the queue."""
    rig, put_on = build("redis", "install", redis_url)
    put_on()
    try:

        @rig.actor(max_retries=0)
        def work(n: int) -> None:
            rig.note("run", n)

        rig.work(threads=1)
        for options in ({"eta": "soon"}, {"eta": None}, {"delay": "x"}, {"pipe_target": 3}):
            rig.broker.enqueue(
                dramatiq.Message(queue_name="default", actor_name="work", args=(1,), kwargs={}, options=dict(options))
            )
        work.send(2)
        rig.settle()

        assert 2 in rig.notes("run")
        assert rig.count("run") == 5
    finally:
        rig.close()
