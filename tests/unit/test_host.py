"""What the library does through Dramatiq's private names, where no server is needed for it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from dramatiq.asyncio import get_event_loop_thread, set_event_loop_thread
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard import host


@pytest.fixture
def loop():
    """Puts a thread in the place of the event loop's."""
    yield set_event_loop_thread
    set_event_loop_thread(None)


def loop_thread(answers=True, alive=True, closed=False):
    """An event loop's thread as far as it is asked."""

    def call_soon_threadsafe(call):
        if closed:
            raise RuntimeError("Event loop is closed")
        if answers:
            call()

    said = []
    return SimpleNamespace(
        is_alive=lambda: alive,
        loop=SimpleNamespace(call_soon_threadsafe=call_soon_threadsafe),
        stop=lambda: said.append("stop"),
        join=lambda timeout: said.append("join"),
        said=said,
    )


@pytest.mark.parametrize(
    ("thread", "blocked"),
    [
        (None, False),
        (loop_thread(alive=False), False),
        (loop_thread(), False),
        (loop_thread(closed=True), False),
        (loop_thread(answers=False), True),
    ],
    ids=["none", "dead", "in order", "closed", "blocked"],
)
def test_a_loop_that_does_not_come_round_is_blocked(loop, thread, blocked):
    """One that is not there, or dead, blocks nobody."""
    loop(thread)
    assert host.event_loop_is_blocked() is blocked


def test_the_event_loop_is_ended_with_the_boot(loop):
    """Its thread is no daemon; where there is none, that is no error."""
    thread = loop_thread()
    loop(thread)
    host.stop_event_loop()
    host.stop_event_loop()

    assert thread.said == ["stop", "join"]
    assert get_event_loop_thread() is None


def test_a_worker_process_is_known_once_it_has_been_entered(monkeypatch):
    """By whoever took over its signals."""
    monkeypatch.setattr(host, "_COMMAND_LINE_WORKER", threading.Event())
    assert not host.in_command_line_worker()
    host.enter_command_line_worker()
    assert host.in_command_line_worker()


def test_only_the_handler_of_a_worker_process_is_taken_for_one():
    """Not that of another function called so, nor a default."""

    def termhandler(signum, frame):
        """Somebody else's."""

    assert not host.is_command_line_handler(termhandler)
    assert not host.is_command_line_handler(None)
    termhandler.__qualname__ = "worker_process.<locals>.termhandler"
    assert host.is_command_line_handler(termhandler)


@pytest.mark.parametrize("count", [0, 1, 500, 1_201])
def test_messages_are_handed_back_to_the_head_of_their_queue_in_their_order(count):
    """In portions that the script can take: the last ones first, so that the first come to lie before them."""
    broker = RedisBroker(url="redis://127.0.0.1:1", middleware=[])
    queue: list[str] = []

    def script(keys, args):
        assert len(args) <= 500
        assert keys[2] == "dramatiq:default"
        queue[:0] = args
        return len(args)

    broker.client.register_script = lambda source: script
    ids = [str(number) for number in range(count)]

    assert host.redis_hand_back(broker, "default", ids) == count
    assert queue == ids
