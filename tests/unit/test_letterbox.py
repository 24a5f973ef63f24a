"""Where a letter goes while its store is out or silent, and how it comes home."""

from __future__ import annotations

import threading
from typing import Any

import dramatiq
import pytest
from dramatiq.common import current_millis

from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.errors import Defer, StoreError, StoreUnavailable
from dramatiq_guard.settle import letterbox as module
from dramatiq_guard.settle.letterbox import LETTER_ACTOR, Letterbox
from tests.stores.letters import letter as letter_of
from tests.support.waiting import wait_until


class Store:
    """A store of letters that does what the test says.

    Attributes:
      error(Exception): What it raises.
      frozen(Event): While it is clear, nobody is answered.
    """

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.asked = 0
        self.error: BaseException | None = None
        self.frozen = threading.Event()
        self.frozen.set()

    def put(self, letter: Letter) -> None:
        self.asked += 1
        self.frozen.wait(30)
        if self.error is not None:
            raise self.error
        self.letters.append(letter)


@pytest.fixture
def store():
    """A store in good order."""
    store = Store()
    yield store
    store.frozen.set()


@pytest.fixture
def box(store, broker):
    """A letterbox whose actor is declared beside an actor of the user's."""
    dramatiq.actor(lambda: None, actor_name="job", queue_name="default", broker=broker)
    box = Letterbox(store.put)
    box.open(broker)
    return box


def travelling(broker) -> list[Any]:
    """The letters on their way, delayed."""
    return [broker.queues["default.DQ"].get_nowait() for _ in range(broker.queues["default.DQ"].qsize())]


def test_a_letter_goes_into_its_store(box, store, broker):
    """And nowhere else."""
    letter = letter_of()
    box.post(broker, letter)

    assert store.letters == [letter]
    assert travelling(broker) == []


def test_without_actors_there_is_nobody_to_carry_a_letter(store, broker):
    """The store's error is the caller's."""
    box = Letterbox(store.put)
    box.open(broker)
    assert LETTER_ACTOR not in broker.actors

    store.error = StoreUnavailable("out")
    with pytest.raises(StoreUnavailable):
        box.post(broker, letter_of())


def test_the_actor_is_declared_once(box, broker):
    """Each worker that boots asks for it."""
    actor = broker.actors[LETTER_ACTOR]
    box.open(broker)
    assert broker.actors[LETTER_ACTOR] is actor


def test_while_the_store_is_out_letters_travel_and_it_is_said_once(box, store, broker, caplog):
    """On the queue of their message, delayed, whole; and the store is left alone for a while."""
    store.error = StoreUnavailable("connection refused")
    letters = [letter_of("a"), letter_of("b")]
    for letter in letters:
        box.post(broker, letter)

    messages = [dramatiq.Message.decode(raw) for raw in travelling(broker)]
    assert [Letter.from_json(message.args[0]) for message in messages] == letters
    assert {message.actor_name for message in messages} == {LETTER_ACTOR}
    assert all(0 < message.options["eta"] - current_millis() <= 5_000 for message in messages)
    assert store.asked == 1
    assert caplog.text.count("connection refused") == 1


def test_it_is_asked_again_after_a_while(box, store, broker, virtual):
    """And is in order again with the first letter that it takes."""
    store.error = StoreUnavailable("out")
    box.post(broker, letter_of("a"))
    store.error = None
    virtual.time += module._QUIET
    box.post(broker, letter_of("b"))
    box.post(broker, letter_of("c"))

    assert [letter.message_id for letter in store.letters] == ["b", "c"]


def test_a_store_that_is_silent_holds_nobody_up(box, store, broker, monkeypatch):
    """One thread asks it, for all; what it takes late is no harm."""
    monkeypatch.setattr(module, "_PATIENCE", 20)
    monkeypatch.setattr(module, "_QUIET", 0)
    store.frozen.clear()
    for name in ("a", "b", "c"):
        box.post(broker, letter_of(name))
    assert len(travelling(broker)) == 3
    assert store.asked == 1

    store.frozen.set()
    wait_until(lambda: store.letters, describe="the letter that was asked for")
    wait_until(lambda: not box._out, describe="the store to be in order")
    box.post(broker, letter_of("d"))
    assert [letter.message_id for letter in store.letters] == ["a", "d"]


def test_a_letter_that_is_refused_is_the_callers(box, store, broker):
    """The store is there, and says no: it would say so again."""
    store.error = StoreError("too large")
    with pytest.raises(StoreError, match="too large"):
        box.post(broker, letter_of())
    assert travelling(broker) == []


def test_an_error_of_the_store_that_is_called_timeout_is_an_error(box, store, broker):
    """It has answered: it is not silent."""
    store.error = TimeoutError("its own")
    with pytest.raises(TimeoutError, match="its own"):
        box.post(broker, letter_of())


def test_a_travelling_letter_is_delivered_or_put_off(box, store, broker):
    """For as long as it takes."""
    letter = letter_of()
    deliver = broker.actors[LETTER_ACTOR].fn
    store.error = StoreUnavailable("out")
    with pytest.raises(Defer):
        deliver(letter.to_json())

    store.error = None
    box._quiet_until = 0
    deliver(letter.to_json())
    assert store.letters == [letter]


def test_a_travelling_letter_that_is_refused_is_written_into_the_log(box, store, broker, caplog):
    """Whole: it is the last place that is left."""
    letter = letter_of()
    store.error = StoreError("too large")
    broker.actors[LETTER_ACTOR].fn(letter.to_json())

    assert "too large" in caplog.text
    assert letter.to_json() in caplog.text
