"""What a worker process remembers of its letters between nack and store, and what it does when the store is out."""

from __future__ import annotations

import logging
from threading import Event
from typing import Any

import pytest

from dramatiq_guard import clock
from dramatiq_guard.errors import StoreUnavailable
from dramatiq_guard.settle.withdrawals import Withdrawals
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from tests.stores.letters import T0, letter
from tests.support.waiting import wait_until

#: Rounds are so many milliseconds apart.
ROUND = 5_000


class SlowClock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.time = T0 + 2 * ROUND

    def now(self) -> int:
        return self.time

    def monotonic(self) -> int:
        return self.time

    def uniform(self) -> float:
        return 0.5

    def wait(self, event: Event, milliseconds: int) -> bool:
        return event.wait(milliseconds / 1000)


class Letters(MemoryDeadLetters):
    """A store that can be out, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.out = False
        self.asked: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("settled", "unsettled", "withdraw"):
            self.asked.append(name)
            if self.out:
                raise StoreUnavailable("frozen")
        return super().__getattribute__(name)

    def notes(self) -> list[str]:
        return sorted(self._unsettled)


class Connection:
    """A consumer whose connection may be lost."""

    def __init__(self) -> None:
        self.open = True

    def alive(self) -> bool:
        return self.open


@pytest.fixture(autouse=True)
def slow_clock() -> Any:
    """The time is in the hands of the test."""
    slow = SlowClock()
    with clock.use(slow):
        yield slow


@pytest.fixture
def letters() -> Letters:
    return Letters()


@pytest.fixture
def withdrawals(letters: Letters) -> Withdrawals:
    return Withdrawals(letters)


def test_a_letter_is_settled_two_rounds_after_its_nack(letters: Letters, withdrawals: Withdrawals) -> None:
    """Not at once: a connection that was lost with the nack in it shows itself only some seconds later."""
    letters.put(letter("m"))
    withdrawals.buried("m", Connection())

    withdrawals.round()
    assert ["m"] == letters.notes()
    withdrawals.round()
    assert [] == letters.notes()


def test_a_nack_that_was_lost_with_its_connection_settles_nothing(letters: Letters, withdrawals: Withdrawals) -> None:
    """The broker delivers the message again, and its letter can still be withdrawn."""
    connection = Connection()
    letters.put(letter("m"))
    withdrawals.buried("m", connection)
    withdrawals.round()
    connection.open = False

    withdrawals.round()
    withdrawals.round()

    assert ["m"] == letters.notes()
    assert withdrawals.suspects("m")


def test_the_end_of_a_worker_settles_all(letters: Letters, withdrawals: Withdrawals) -> None:
    """The consumers are closed by then, and were heard to the end."""
    withdrawals.start()
    ended, later = Connection(), Connection()
    letters.put(letter("a"))
    letters.put(letter("b"))
    withdrawals.buried("a", ended)
    withdrawals.shut_down()
    withdrawals.buried("b", later)
    ended.open = later.open = False

    withdrawals.close()

    wait_until(lambda: not letters.notes(), 5, letters.notes)


def test_what_others_left_unsettled_is_suspect_from_the_start(letters: Letters, withdrawals: Withdrawals) -> None:
    """Known before the first message comes; what has died just now is still in somebody's hands."""
    letters.put(letter("old"))
    letters.put(letter("fresh", 2 * ROUND))

    withdrawals.start()

    assert withdrawals.suspects("old")
    assert not withdrawals.suspects("fresh")
    assert not withdrawals.suspects("nobody")
    withdrawals.close()


@pytest.mark.parametrize(("heartbeat", "every"), [(None, 5_000), (60_000, 5_000), (3_000, 750), (100, 50)])
def test_a_broker_that_is_quick_to_reclaim_is_looked_at_more_often(
    withdrawals: Withdrawals, heartbeat: int | None, every: int
) -> None:
    """A letter must be seen before its message comes again."""
    withdrawals.start(heartbeat)

    assert every == withdrawals.every
    withdrawals.close()


def test_a_letter_that_travelled_is_settled_when_it_arrives(letters: Letters, withdrawals: Withdrawals) -> None:
    """Its message was nacked before it; the process that did it still knows, for a while."""
    withdrawals.buried("m")
    withdrawals.round()
    withdrawals.round()
    letters.put(letter("m"))

    withdrawals.round()

    assert [] == letters.notes()
    assert not withdrawals.suspects("m")


def test_after_ten_minutes_a_note_is_somebody_else_s(
    letters: Letters, withdrawals: Withdrawals, slow_clock: SlowClock
) -> None:
    """A later death of the same message is not taken for the one that was settled."""
    withdrawals.buried("m")
    withdrawals.round()
    withdrawals.round()
    slow_clock.time += 11 * 60 * 1000
    letters.put(letter("m"))

    withdrawals.round()

    assert ["m"] == letters.notes()
    assert withdrawals.suspects("m")


def test_an_outage_forgets_nothing_and_is_said_once(
    letters: Letters, withdrawals: Withdrawals, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not be settled or withdrawn is, when the store is back."""
    caplog.set_level(logging.WARNING)
    letters.put(letter("dead"))
    letters.put(letter("alive"))
    letters.out = True
    withdrawals.buried("dead")

    withdrawals.withdraw("alive", ended=True)
    for _ in range(3):
        withdrawals.round()

    assert 1 == sum("goes on trying" in each.message for each in caplog.records)
    letters.out = False
    withdrawals.round()
    withdrawals.round()
    assert [] == letters.notes()
    assert letters.get("alive") is None
    assert letters.get("dead") is not None


def test_a_store_that_is_out_is_waited_for_once(letters: Letters, withdrawals: Withdrawals) -> None:
    """By the first message that finds out; after that the thread alone asks, until it gets an answer."""
    letters.out = True
    for at in range(5):
        withdrawals.withdraw(f"m{at}", ended=True)
    assert ["withdraw"] == letters.asked

    letters.out = False
    withdrawals.round()
    letters.asked.clear()
    withdrawals.withdraw("m", ended=True)

    assert ["withdraw"] == letters.asked


def test_a_message_that_goes_on_is_not_withdrawn_behind_its_back(letters: Letters, withdrawals: Withdrawals) -> None:
    """It may die for good meanwhile, and then the same letter is the truth; its end will see to it."""
    letters.put(letter("m"))
    letters.out = True
    withdrawals.withdraw("m", ended=False)
    letters.out = False

    withdrawals.round()

    assert letters.get("m") is not None
    assert withdrawals.suspects("m")
