"""What may interrupt a run, and what becomes of an interrupt that comes too late; nothing is really raised here."""

from __future__ import annotations

import threading

import pytest
from dramatiq.middleware import Shutdown, TimeLimitExceeded

from dramatiq_guard import host
from dramatiq_guard.interrupts import Interrupts, Run, call_interruptibly
from tests.support.waiting import wait_until


@pytest.fixture
def raised(monkeypatch):
    """What was raised in which thread, and when one was taken back."""
    raised: list[object] = []
    monkeypatch.setattr(host, "raise_thread_exception", lambda thread_id, kind: raised.append((thread_id, kind)))
    monkeypatch.setattr(host, "clear_interrupt", lambda: raised.append("taken back"))
    return raised


@pytest.fixture
def interrupts():
    """The interrupts of one worker, whose watch is not started."""
    return Interrupts()


HERE = threading.get_ident


def test_a_shutdown_interrupts_those_that_asked_for_it(interrupts, raised):
    """Once, however often it is said."""
    run, other = Run(interrupts, None, notify=True), Run(interrupts, None, notify=False)
    interrupts.arm(run)
    thread = threading.Thread(target=interrupts.arm, args=(other,))
    thread.start()
    thread.join()
    interrupts.shutdown()
    interrupts.shutdown()

    assert raised == [(HERE(), Shutdown)]
    assert run.shutting_down


def test_at_the_deadline_everything_is_interrupted(interrupts, raised):
    """Whether it asked to be told or not."""
    interrupts.arm(Run(interrupts, None, notify=False))

    assert interrupts.interrupt_all() == 1
    assert raised == [(HERE(), Shutdown)]


@pytest.mark.parametrize(
    ("begin", "notify", "interrupted"),
    [("shutdown", True, True), ("shutdown", False, False), ("interrupt_all", False, True)],
)
def test_a_run_that_begins_too_late_is_interrupted_at_once(interrupts, raised, begin, notify, interrupted):
    """Its thread had taken the message up already."""
    getattr(interrupts, begin)()
    interrupts.arm(Run(interrupts, None, notify=notify))

    assert raised == ([(HERE(), Shutdown)] if interrupted else [])


def test_an_interrupt_that_has_not_arrived_is_taken_back(interrupts, raised):
    """The run is over: it would hit a hook."""
    run = Run(interrupts, None, notify=True)
    interrupts.arm(run)
    interrupts.shutdown()
    interrupts.disarm(run)
    interrupts.disarm(run)
    interrupts.shutdown()

    assert raised == [(HERE(), Shutdown), "taken back"]


def test_a_run_past_its_time_limit_is_interrupted_once(virtual, raised):
    """Its thread is looked at again and again."""
    interrupts = Interrupts(interval=100)
    run = Run(interrupts, 250, notify=False)
    interrupts.arm(run)
    rounds = []

    def stop():
        rounds.append(list(raised))
        if len(rounds) == 6:
            interrupts.close()

    virtual.meanwhile = stop
    interrupts._watch()

    assert rounds[:3] == [[], [], []], "at 0, 100 and 200 ms it still has time"
    assert raised == [(HERE(), TimeLimitExceeded)]


def test_the_watch_looks_in_a_thread_of_its_own(raised):
    """Started once."""
    interrupts = Interrupts(interval=5)
    before = set(threading.enumerate())
    interrupts.start()
    interrupts.start()
    started = [each for each in threading.enumerate() if each not in before]
    try:
        interrupts.arm(Run(interrupts, 1, notify=False))
        wait_until(lambda: raised, describe="the time limit")
    finally:
        interrupts.close()
    (watch,) = started
    watch.join(10)
    assert not watch.is_alive()


@pytest.mark.parametrize(
    ("limit", "announced", "left"), [(None, None, None), (5_000, None, 5_000), (5_000, 2_000, 2_000), (None, 0, 0)]
)
def test_a_run_can_ask_what_time_is_left(virtual, interrupts, raised, limit, announced, left):
    """Until its limit, or the shutdown's interrupt, whichever comes first; never less than nothing."""
    run = Run(interrupts, limit, notify=False)
    interrupts.arm(run)
    if announced is not None:
        interrupts.announce(virtual.time + announced)
    assert run.time_left() == left
    assert run.shutting_down is (announced is not None)

    virtual.time += 60_000
    assert run.time_left() in (None, 0)


def test_a_run_that_goes_on_after_its_limit_is_overdue(virtual, interrupts, raised):
    """By its limit, not by whether it was interrupted; one without a limit never is."""
    run = Run(interrupts, 1_000, notify=False)
    interrupts.arm(run)
    virtual.time += 3_000
    assert interrupts.overdue(2_000) == []
    virtual.time += 1
    assert interrupts.overdue(2_000) == [(HERE(), run)]

    interrupts.arm(Run(interrupts, float("inf"), notify=False))
    virtual.time += 10**9
    assert interrupts.overdue(0) == []


class Disarming(Interrupts):
    """Interrupts that arrive in the disarming itself, so many times."""

    times = 0

    def disarm(self, run):
        super().disarm(run)
        if self.times:
            self.times -= 1
            raise Shutdown


@pytest.mark.parametrize("times", [0, 1, 3])
def test_an_interrupt_after_the_function_has_returned_is_swallowed(raised, times):
    """The work is done, whatever arrives in the disarming."""
    interrupts = Disarming()
    interrupts.times = times

    assert call_interruptibly(Run(interrupts, None, notify=True), lambda x: x + 1, (1,), {}) == 2
    assert interrupts._runs == {}


def test_an_interrupt_in_the_function_leaves_it(raised):
    """And nothing stays armed."""
    interrupts = Disarming()
    interrupts.times = 2

    def interrupted():
        raise TimeLimitExceeded

    with pytest.raises(Shutdown):  # the last one to arrive
        call_interruptibly(Run(interrupts, None, notify=True), interrupted, (), {})
    assert interrupts._runs == {}


def test_an_error_of_the_function_is_its_own(interrupts, raised):
    """Disarmed all the same."""
    with pytest.raises(ZeroDivisionError):
        call_interruptibly(Run(interrupts, 1_000, notify=True), lambda: 1 // 0, (), {})
    assert interrupts._runs == {}


class Registry:
    """Dramatiq's registries under gevent, as far as they are called."""

    def __init__(self):
        self.heard: list[object] = []

    def __getattr__(self, name):
        return lambda *arguments: self.heard.append((name, *arguments))


@pytest.mark.parametrize(
    ("limit", "notify"), [(1_000, True), (None, False)], ids=["limited and notified", "neither of both"]
)
def test_under_gevent_dramatiqs_own_registries_interrupt(raised, limit, notify):
    """Nothing can be raised in a greenlet from outside."""
    timer, notifier = Registry(), Registry()
    interrupts = Interrupts(gevent_timer=timer, gevent_notifier=notifier)
    interrupts.start()
    run = Run(interrupts, limit, notify=notify)
    interrupts.arm(run)
    interrupts.shutdown()
    interrupts.disarm(run)

    assert timer.heard == [("add_timeout", HERE(), limit or float("inf")), ("remove_timeout", HERE())]
    told = [("add_notification",), ("shutdown",), ("remove_notification",)]
    assert notifier.heard == (told if notify else [("shutdown",)])
    assert raised == []
    assert interrupts.shutting_down
    assert interrupts._thread is None
