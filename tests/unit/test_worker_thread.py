"""An interrupt that lands anywhere in a delivery's end: the thread goes on, and the end is done."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dramatiq_guard import host
from dramatiq_guard.settle.worker_thread import adopt
from tests.unit.conftest import deliver


class Abort(BaseException):
    """An interrupt of another middleware's."""


class Thread:
    """A worker thread whose processing and settling do what the test says.

    Attributes:
      processing(BaseException): What hits the processing.
      settling(list): What hits the tries to settle after it.
    """

    def __init__(self) -> None:
        self.processing: BaseException | None = None
        self.settling: list[BaseException | None] = []
        self.settled: list[str] = []
        self.done = 0
        self.work_queue = SimpleNamespace(task_done=self._task_done)
        self.consumers = {"default": SimpleNamespace(post_process_message=self._settle)}
        adopt(self)

    def process_message(self, message) -> None:
        if self.processing is not None:
            raise self.processing
        self._settle(message)
        self._task_done()

    def _task_done(self) -> None:
        self.done += 1

    def _settle(self, message) -> None:
        if self.settling and (error := self.settling.pop(0)) is not None:
            raise error
        self.settled.append(message.message_id)


@pytest.fixture
def cleared(monkeypatch):
    """How often a late interrupt was taken back."""
    cleared: list[None] = []
    monkeypatch.setattr(host, "clear_interrupt", lambda: cleared.append(None))
    return cleared


def test_an_undisturbed_message_is_dramatiqs(cleared):
    """And what was raised too late is taken back after it."""
    thread = Thread()
    thread.process_message(deliver("a").message)

    assert (thread.settled, thread.done, len(cleared)) == (["a"], 1, 1)


def test_a_torn_end_is_done_again(cleared, caplog):
    """However often it is torn again, up to five times."""
    thread = Thread()
    thread.processing = Abort()
    thread.settling = [Abort()] * 4
    thread.process_message(deliver("a").message)

    assert (thread.settled, thread.done) == (["a"], 1)
    assert caplog.text.count("was hit by 'Abort'") == 1


def test_an_end_that_is_torn_each_time_is_left_to_the_broker(cleared, caplog):
    """It stays unacked, and that is said; the thread goes on."""
    thread = Thread()
    thread.processing = Abort()
    thread.settling = [Abort()] * 5
    thread.process_message(deliver("a").message)

    assert thread.settled == []
    assert "could not be settled, since each try was interrupted" in caplog.text


def test_an_end_that_was_over_is_not_done_again(cleared):
    """The interrupt hit what Dramatiq does after it."""
    thread, delivery = Thread(), deliver("a")
    thread.processing = Abort()
    delivery.ended = True
    thread.process_message(delivery.message)

    assert thread.settled == []


def test_an_interrupt_in_the_taking_back_of_another_ends_no_thread(monkeypatch):
    """One more may arrive anywhere."""

    def hit():
        raise Abort

    monkeypatch.setattr(host, "clear_interrupt", hit)
    thread = Thread()
    thread.process_message(deliver("a").message)

    assert thread.settled == ["a"]


def test_once_the_end_has_begun_a_message_goes_back(cleared):
    """It was taken in that very moment, and is not begun."""
    thread, delivery, back = Thread(), deliver("a"), []
    delivery.stack = SimpleNamespace(draining=True, exit=SimpleNamespace(take_back=back.append))
    thread.process_message(delivery.message)

    assert (back, thread.settled, thread.done) == ([delivery.message], [], 1)
