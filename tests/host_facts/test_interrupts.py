"""How Dramatiq interrupts a thread (time limit, shutdown), and what an interruption that comes too late does."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Coroutine, Iterator

import dramatiq
import dramatiq.middleware.shutdown
import dramatiq.middleware.time_limit
import pytest
from dramatiq.asyncio import async_to_sync, get_event_loop_thread
from dramatiq.middleware import (
    AsyncIO,
    Interrupt,
    Middleware,
    Retries,
    Shutdown,
    ShutdownNotifications,
    TimeLimit,
    TimeLimitExceeded,
    raise_thread_exception,
)

from tests.support.waiting import wait_until

from .rig import Bench, Recorder

BenchMaker = Callable[..., Bench]
ROUNDS = 50


def interrupt_after_the_work(disarm: Callable[[int], None]) -> bool:
    """Raise an interrupt in a thread that waits in C, disarm it, let it go on, and return whether it was
    interrupted."""
    gate, waiting = threading.Lock(), threading.Event()
    gate.acquire()
    interrupted: list[bool] = []

    def work() -> None:
        try:
            waiting.set()
            gate.acquire()
            for _ in range(1_000):
                pass
            interrupted.append(False)
        except TimeLimitExceeded:
            interrupted.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    waiting.wait()
    time.sleep(0.001)  # so that the thread is more likely inside acquire(), where the interrupt stays pending
    ident = thread.ident
    assert ident is not None
    raise_thread_exception(ident, TimeLimitExceeded)
    disarm(ident)
    gate.release()
    thread.join()
    return interrupted == [True]


def test_a_pending_interrupt_is_delivered_when_the_c_call_returns() -> None:
    """H5: an interrupt raised while the thread is in a C call is delivered after that call: the work was done and is
    then retried."""
    assert [True] * ROUNDS == [interrupt_after_the_work(lambda _: None) for _ in range(ROUNDS)]


def test_unregistering_does_not_disarm_a_pending_interrupt() -> None:
    """H5: TimeLimit's remove_timeout leaves a raised exception pending, so unregistering alone does not disarm."""
    limit = TimeLimit()

    assert interrupt_after_the_work(limit.manager.remove_timeout)


def test_clearing_the_pending_exception_disarms() -> None:
    """H5: PyThreadState_SetAsyncExc(tid, NULL) takes a pending interrupt back, which is what disarming in the seam
    does."""

    def clear(ident: int) -> None:
        assert 1 == ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)

    assert [False] * ROUNDS == [interrupt_after_the_work(clear) for _ in range(ROUNDS)]


@pytest.mark.parametrize("interrupt", [TimeLimitExceeded, Shutdown])
def test_interrupts_are_base_exceptions(interrupt: type[BaseException]) -> None:
    """H4: interrupts are BaseExceptions below one public Interrupt class, so `except Exception` in a hook or an
    actor never stops one."""
    assert issubclass(interrupt, Interrupt)
    assert not issubclass(interrupt, Exception)


def test_a_time_limit_is_off_for_a_bare_worker(bench: BenchMaker) -> None:
    """H12: process_boot never runs for a bare Worker, so its stock TimeLimit is off: ours must not wait for that
    hook."""
    limit = TimeLimit(time_limit=1, interval=1)
    b = bench(limit)
    b.actor(lambda: time.sleep(0.05), actor_name="slow").send()
    b.work()
    b.drain()

    assert not limit.manager.is_alive()

    b.boot_process()
    assert limit.manager.is_alive()


def test_an_overrun_is_an_ordinary_retryable_failure(bench: BenchMaker) -> None:
    """H4: a TimeLimitExceeded raised in the actor reaches after_process as the exception, so the seam may translate
    it."""
    recorder = Recorder()
    b = bench(TimeLimit(time_limit=20, interval=5), recorder, Retries(max_retries=0))
    b.boot_process()

    def spin() -> None:
        while True:
            time.sleep(0.001)

    b.actor(spin).send()
    b.work()
    b.drain()

    (after,) = recorder.calls("after_process_message")
    assert TimeLimitExceeded is type(after.details["exception"])
    assert 1 == len(b.broker.dead_letters)


def test_a_time_limit_lands_in_another_middlewares_after_hook(bench: BenchMaker) -> None:
    """H4: an overrun inside a later middleware's after hook interrupts that hook and turns the success into a
    failure."""
    limit = TimeLimit(time_limit=20, interval=5)

    def dawdle(_: object) -> None:
        while limit.manager.deadlines.get(threading.get_ident()):
            time.sleep(0.001)
        time.sleep(0.05)

    inner = Recorder()
    b = bench(limit, Recorder().on("after_process_message", dawdle), inner, Retries(max_retries=0))
    b.boot_process()
    b.actor(lambda: None, actor_name="fine").send()
    b.work()
    b.drain()

    assert [type(None), TimeLimitExceeded] == [
        type(c.details["exception"]) for c in inner.calls("after_process_message")
    ]


def test_the_time_limit_manager_has_the_names_that_we_use() -> None:
    """Private: TimeLimit.manager is a _CtypesTimeoutManager with deadlines per thread under one lock, mu, that our
    seam shares."""
    limit = TimeLimit(time_limit=10)
    manager = limit.manager

    assert isinstance(manager, dramatiq.middleware.time_limit._CtypesTimeoutManager)
    assert isinstance(manager, threading.Thread)
    assert manager.daemon
    assert {} == manager.deadlines
    manager.add_timeout(7, 1_000)
    assert time.monotonic() < manager.deadlines[7] <= time.monotonic() + 1
    with manager.mu, manager.mu:  # re-entrant
        manager.remove_timeout(7)
    assert {7: None} == manager.deadlines


def test_the_time_limit_raises_after_it_released_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private: the stock manager raises outside its lock, so remove_timeout can return before the interrupt is
    raised: ours raises under it."""
    manager = TimeLimit().manager
    free: list[bool] = []

    def probe(thread_id: int, exception: type[BaseException]) -> None:
        def take() -> None:
            free.append(manager.mu.acquire(blocking=False))
            if free[-1]:
                manager.mu.release()

        other = threading.Thread(target=take)
        other.start()
        other.join()

    monkeypatch.setattr(dramatiq.middleware.time_limit, "raise_thread_exception", probe)
    manager.add_timeout(7, 0)
    manager._handle_deadlines()

    assert [True] == free
    assert {7: None} == manager.deadlines


def test_shutdown_notifications_iterate_a_live_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private: notifications is a bare set iterated while actors leave it, so a shutdown may notify 2 of 8: ours
    takes a snapshot."""
    notifications = ShutdownNotifications().manager.notifications
    assert set() == notifications
    manager = ShutdownNotifications().manager
    manager.notifications |= set(range(8))
    notified: list[int] = []

    def leave(thread_id: int, exception: type[BaseException]) -> None:
        assert Shutdown is exception
        notified.append(thread_id)
        manager.notifications.discard(thread_id)

    monkeypatch.setattr(dramatiq.middleware.shutdown, "raise_thread_exception", leave)
    with pytest.raises(RuntimeError, match="changed size during iteration"):
        manager.shutdown()
    assert 1 == len(notified)


def test_a_shutdown_notification_burns_a_retry(bench: BenchMaker) -> None:
    """H4: stock notify_shutdown counts a deploy as a failed attempt: with max_retries=0 the job is dead-lettered for
    it."""
    b = bench(ShutdownNotifications(notify_shutdown=True), Retries(max_retries=0))
    started = threading.Event()

    def spin() -> None:
        started.set()
        while True:
            time.sleep(0.001)

    b.actor(spin).send()
    worker = b.work(threads=1)
    assert started.wait(5)
    worker.stop(timeout=5_000)

    (dead,) = b.broker.dead_letters
    assert isinstance(dead._exception, Shutdown)


@pytest.fixture
def event_loop_bench(bench: BenchMaker) -> Iterator[Callable[..., Bench]]:
    """Benches with the AsyncIO middleware; its loop thread is not a daemon and must be ended even when a test fails."""

    def build(*middleware: Middleware) -> Bench:
        return bench(AsyncIO(), *middleware)

    yield build
    loop_thread = get_event_loop_thread()
    if loop_thread is not None and loop_thread.is_alive():
        loop_thread.loop.call_soon_threadsafe(loop_thread.loop.stop)


def test_an_async_actor_is_interrupted_by_cancelling_its_coroutine(event_loop_bench: BenchMaker) -> None:
    """H15: an interrupted async actor sees CancelledError while the worker thread sees the interrupt, after the
    cleanup ended."""
    recorder = Recorder()
    b = event_loop_bench(TimeLimit(time_limit=20, interval=5), recorder, Retries(max_retries=0))
    b.boot_process()
    cleaned: list[str] = []

    async def spin() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cleaned.append("cancelled")
            raise

    b.actor(spin).send()
    b.work()
    b.drain()

    assert ["cancelled"] == cleaned
    (after,) = recorder.calls("after_process_message")
    assert isinstance(after.details["exception"], TimeLimitExceeded)


def test_an_async_cleanup_over_a_second_turns_the_interrupt_into_a_runtime_error(event_loop_bench: BenchMaker) -> None:
    """H15: a slow async cleanup turns the interrupt into a RuntimeError caused by it, so deciding looks through
    __cause__."""
    recorder = Recorder()
    b = event_loop_bench(TimeLimit(time_limit=20, interval=5), recorder, Retries(max_retries=0))
    b.boot_process()

    async def spin() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(1.3)

    b.actor(spin).send()
    b.work()
    b.drain()

    (after,) = recorder.calls("after_process_message")
    assert RuntimeError is type(after.details["exception"])
    assert isinstance(after.details["exception"].__cause__, TimeLimitExceeded)


@pytest.mark.parametrize("error", [MemoryError(), SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_a_fatal_exception_of_a_sync_actor_is_an_ordinary_failure(bench: BenchMaker, error: BaseException) -> None:
    """H4: sys.exit and the like in a sync actor are ordinary failures to Dramatiq and the process lives on, so Fatal
    must be decided by us."""
    recorder = Recorder()
    b = bench(recorder, Retries(max_retries=0))

    def fail() -> None:
        raise error

    b.actor(fail).send()
    worker = b.work()
    b.drain()

    (after,) = recorder.calls("after_process_message")
    assert error is after.details["exception"]
    assert {True} == {thread.is_alive() for thread in worker.workers}


def test_sys_exit_in_an_async_actor_kills_the_event_loop(
    event_loop_bench: BenchMaker, deaths: list[BaseException]
) -> None:
    """H15: sys.exit in an async actor ends the loop, holds its own worker thread until a time limit and fails every
    later async job: a dead loop must be fatal."""
    recorder = Recorder()
    b = event_loop_bench(TimeLimit(time_limit=50, interval=5), recorder, Retries(max_retries=0))

    async def leave() -> None:
        raise SystemExit(1)

    async def innocent() -> None:
        pass

    never_awaited: list[Coroutine[None, None, None]] = []

    def start_innocent() -> Coroutine[None, None, None]:
        never_awaited.append(innocent())
        return never_awaited[-1]

    first, second = b.actor(leave), b.actor(async_to_sync(start_innocent), actor_name="innocent")
    first.send()
    worker = b.work(threads=2)
    loop_thread = get_event_loop_thread()
    assert loop_thread is not None
    wait_until(lambda: not loop_thread.is_alive())
    second.send()
    wait_until(lambda: len(b.broker.dead_letters) == 1)

    assert "Event loop is not running." == str(recorder.calls("after_process_message")[0].details["exception"])
    assert 1 == b.unsettled(), "the message that exited still holds its thread"
    assert {True} == {thread.is_alive() for thread in worker.workers}

    b.boot_process()  # starts the time limit
    b.drain()
    (_, after) = recorder.calls("after_process_message")
    assert "Event loop is closed" == str(after.details["exception"])
    for coroutine in never_awaited:
        coroutine.close()
