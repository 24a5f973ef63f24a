"""What an async actor raises ends its message, and the event loop lives on."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.asyncio import EventLoopThread, async_to_sync, get_event_loop_thread, set_event_loop_thread
from dramatiq.logging import get_logger
from dramatiq.middleware import AsyncIO, Shutdown, raise_thread_exception

from dramatiq_guard import Defer, JitterBackoff, install
from dramatiq_guard.async_actors import event_loop_is_gone, spare_the_loop


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    """An event loop for async actors."""
    thread = EventLoopThread(get_logger(__name__, "loop"))  # type: ignore[no-untyped-call]
    thread.start(timeout=5)
    set_event_loop_thread(thread)
    yield thread
    thread.stop()  # type: ignore[no-untyped-call]
    set_event_loop_thread(None)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, ValueError])
def test_whatever_it_raises_arrives_and_spares_the_loop(kind: type[BaseException], loop: EventLoopThread) -> None:
    """The very error, with the place where it was raised; the next call succeeds."""

    async def actor(fails: bool) -> str:
        await asyncio.sleep(0)
        if fails:
            raise kind(3)
        return "done"

    function = spare_the_loop(async_to_sync(actor))

    with pytest.raises(BaseException) as raised:
        function(True)
    assert kind.__name__ == type(raised.value).__name__
    if kind is not asyncio.CancelledError:
        assert (3,) == raised.value.args
        assert "raise kind(3)" in str(raised.traceback[-1].statement)
    assert "done" == function(False)
    assert not event_loop_is_gone()


def test_a_sync_function_is_left_as_it_is() -> None:
    """And so is one that waits for a coroutine by itself."""

    async def coroutine() -> None: ...

    @functools.wraps(coroutine)
    def waits_by_itself() -> None: ...

    for function in (len, lambda: None, waits_by_itself, functools.partial(max, 1)):
        assert function is spare_the_loop(function)


def test_the_function_keeps_its_names(loop: EventLoopThread) -> None:
    """Names, documentation and signature are the actor's."""

    async def actor(a: int, b: str = "") -> None:
        """What it is for."""

    function = spare_the_loop(async_to_sync(actor))

    assert ("actor", "What it is for.") == (function.__name__, function.__doc__)


def test_the_seam_spares_the_loop(loop: EventLoopThread, stub_broker: Any) -> None:
    """Every async actor of a broker with the stack, also where it is called directly."""
    stub_broker.add_middleware(AsyncIO())
    install(stub_broker, JitterBackoff())

    @dramatiq.actor(broker=stub_broker)
    async def leaves() -> None:
        sys.exit(7)

    with pytest.raises(SystemExit, match="7"):
        leaves()
    assert not event_loop_is_gone()


class TestALoopThatHasDied:
    """Something else has killed it, and the process is about to end for it."""

    @pytest.fixture(autouse=True)
    def _dead(self, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("threading.excepthook", lambda _: None)
        loop.loop.call_soon_threadsafe(sys.exit)
        loop.join(10)
        assert not loop.is_alive()

    def test_what_comes_to_it_is_put_off(self) -> None:
        """It is not the message's fault."""

        async def actor() -> None: ...

        assert event_loop_is_gone()
        with pytest.raises(Defer) as deferred:
            spare_the_loop(async_to_sync(actor))()
        assert 5_000 == deferred.value.delay

    def test_a_loop_that_is_not_there_is_another_matter(self) -> None:
        """A broker without the AsyncIO middleware says so itself."""
        set_event_loop_thread(None)

        async def actor() -> None: ...

        assert not event_loop_is_gone()
        with pytest.raises(RuntimeError, match="AsyncIO"):
            spare_the_loop(async_to_sync(actor))()


@pytest.mark.untraced
def test_what_was_on_a_loop_that_dies_can_be_interrupted(
    loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread waits for an end that does not come; the interrupt arrives as what it is."""
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    began = threading.Event()
    seen: list[BaseException] = []

    async def actor() -> None:
        began.set()
        await asyncio.sleep(60)

    def call() -> None:
        try:
            spare_the_loop(async_to_sync(actor))()
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert began.wait(10)
    loop.loop.call_soon_threadsafe(sys.exit)
    loop.join(10)
    assert get_event_loop_thread() is loop
    assert thread.ident is not None
    raise_thread_exception(thread.ident, Shutdown)
    thread.join(10)

    assert [Shutdown] == [type(error) for error in seen]
