"""What an async actor raises that would kill the event loop, and what is said where the loop is gone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from dramatiq.asyncio import EventLoopThread, async_to_sync, set_event_loop_thread

from dramatiq_guard import async_actors as module
from dramatiq_guard.async_actors import event_loop_is_gone, spare_the_loop
from dramatiq_guard.errors import Defer


@pytest.fixture
def loop():
    """The event loop of async actors."""
    import logging

    thread = EventLoopThread(logging.getLogger("dramatiq"))
    thread.start(timeout=5)
    set_event_loop_thread(thread)
    yield thread
    set_event_loop_thread(None)
    thread.stop()
    thread.join(5)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_what_an_async_actor_raises_is_raised_where_it_is_waited_for(loop, kind):
    """And the loop of all the others goes on."""

    async def actor():
        raise kind("x")

    with pytest.raises(kind, match="x"):
        spare_the_loop(async_to_sync(actor))()
    assert loop.is_alive()
    assert not event_loop_is_gone()


def test_an_async_actor_is_called_as_before(loop):
    """Its name, its arguments and its result are its own."""

    async def actor(one, *, two):
        return one + two

    spared = spare_the_loop(async_to_sync(actor))
    assert spared(1, two=2) == 3
    assert spared.__name__ == "actor"


def test_a_function_that_is_not_async_stays_as_it_is():
    """Also one of the user's that waits by itself."""
    for function in (lambda: None, print, SimpleNamespace()):
        assert spare_the_loop(function) is function


def test_an_error_of_the_actor_is_its_own_while_the_loop_lives(loop):
    """RuntimeError is what a dead loop says, too."""

    async def actor():
        raise RuntimeError("the actor's own")

    with pytest.raises(RuntimeError, match="the actor's own"):
        spare_the_loop(async_to_sync(actor))()


def spared_on_a_dead_loop(monkeypatch):
    """An async actor whose loop is gone, waited for as Dramatiq does."""

    async def actor():
        """Never comes to run."""

    def refused():
        raise RuntimeError("Event loop is not running.")

    function = async_to_sync(actor)
    monkeypatch.setattr(module, "async_to_sync", lambda _: refused)
    monkeypatch.setattr(module, "event_loop_is_gone", lambda: True)
    return spare_the_loop(function)


def test_where_the_loop_is_gone_a_message_is_put_off(monkeypatch):
    """Until the process is gone, too; no attempt is counted."""
    with pytest.raises(Defer) as put_off:
        spared_on_a_dead_loop(monkeypatch)()
    assert put_off.value.delay == 5_000


def test_a_loop_that_never_was_is_not_gone(monkeypatch):
    """One that has ended is."""
    thread = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(module, "get_event_loop_thread", lambda: thread)
    assert event_loop_is_gone()
    monkeypatch.setattr(module, "get_event_loop_thread", lambda: None)
    assert not event_loop_is_gone()
