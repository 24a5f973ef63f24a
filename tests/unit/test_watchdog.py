"""What a worker process must end for, as it is seen from inside."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

from dramatiq_guard import async_actors, host
from dramatiq_guard.exits import processes
from dramatiq_guard.exits.watchdog import Watchdog


class Thread:
    """A thread as far as it is looked at."""

    name = "w-1"
    ident = 1
    lives = True

    def is_alive(self):
        return self.lives


@pytest.fixture
def world(monkeypatch):
    """A stack and a worker that are in order, an event loop, and what the watchdog has said."""
    world = SimpleNamespace(said=[], overdue=[], kept_off=[], loop=None, thread=Thread(), consumer=Thread())
    world.stack = SimpleNamespace(
        draining=False,
        in_flight={},
        interrupts=SimpleNamespace(overdue=lambda milliseconds: world.overdue),
        exit=SimpleNamespace(deadman=SimpleNamespace(keep_off=world.kept_off.append)),
    )
    world.worker = SimpleNamespace(workers=[world.thread], consumers={"default": world.consumer})
    monkeypatch.setattr(async_actors, "get_event_loop_thread", lambda: world.loop)
    return world


@pytest.fixture
def watching(world):
    """Makes a watchdog."""

    def watch(**options):
        defaults = {"stuck_after": None, "stuck_is_fatal": False, "max_memory": None, "held_after": None}
        return Watchdog(
            world.stack,
            world.worker,
            world.said.append,
            lambda: world.said.append("orphaned"),
            **{**defaults, **options},
        )

    return watch


def test_a_process_in_order_is_left_alone(watching):
    """As long as it lives."""
    assert watching(stuck_after=1, max_memory=2**50).look() is None


@pytest.mark.parametrize("which", ["thread", "consumer"])
def test_a_thread_that_died_is_named(world, watching, which):
    """One that has not been started yet has not died."""
    dead = getattr(world, which)
    dead.lives = False
    dead.ident = None
    assert watching().look() is None
    dead.ident = 1
    assert watching().look() == "the thread w-1 (Thread) has died"


def test_once_the_end_has_begun_threads_may_end(world, watching):
    """They are meant to."""
    world.thread.lives = False
    world.stack.draining = True
    assert watching().look() is None


def test_an_event_loop_that_is_there_must_live(world, watching):
    """Where there is none, none is missed."""
    watchdog = watching()
    assert watchdog.look() is None
    world.loop = Thread()
    assert watchdog.look() is None
    world.loop.lives = False
    assert watchdog.look() == "the event loop of async actors has died"


def test_memory_is_held_against_its_bound(watching, monkeypatch):
    """More than it is too much."""
    monkeypatch.setattr(processes, "resident_bytes", lambda: 1_000)
    assert watching(max_memory=1_000).look() is None
    assert watching(max_memory=999).look() == "it uses 1000 bytes of memory, more than max_memory=999"


@pytest.mark.parametrize("fatal", [False, True])
def test_a_stuck_job_is_logged_with_its_stack_once(world, watching, caplog, fatal):
    """And ends the process only where that is asked for."""
    world.overdue = [(threading.get_ident(), object()), (2**50, object())]
    watchdog = watching(stuck_after=60_000, stuck_is_fatal=fatal)
    said = [watchdog.look() for _ in range(3)]

    assert said == ["a job is stuck past its time limit" if fatal else None, None, None]
    assert len(caplog.messages) == 2
    assert all("60000 ms past its time limit" in message for message in caplog.messages)
    assert "in test_a_stuck_job_is_logged_with_its_stack_once" in caplog.messages[0]
    assert caplog.messages[1].endswith("It is at:\n(its thread is gone)\n")


def test_a_job_that_is_stuck_after_another_is_seen(world, watching, caplog):
    """Where the memory of one that is over is used again, it would look like the same one."""
    watchdog = watching(stuck_after=60_000)
    for _ in range(20):
        world.overdue = [(2**50, object())]
        watchdog.look()
        world.overdue = []
        watchdog.look()

    assert len(caplog.messages) == 20


def test_where_stuck_jobs_are_nobodys_business_they_are_not_looked_for(world, watching):
    """``stuck_after=None``."""
    world.overdue = [(threading.get_ident(), object())]
    assert watching(stuck_is_fatal=True).look() is None


def test_it_looks_once_a_second_and_keeps_the_deadman_off(world, watching, virtual):
    """Until it is closed."""
    watchdog = watching(held_after=25_000)
    virtual.meanwhile = lambda: len(virtual.waits) == 3 and watchdog.close()
    watchdog._run()

    assert virtual.waits == [1_000] * 3
    assert world.kept_off == [25_000, 25_000]
    assert world.said == []


def test_what_is_fatal_is_said_once(world, watching, virtual):
    """Then it has nothing more to look for."""
    world.thread.lives = False
    watching()._run()
    assert world.said == ["the thread w-1 (Thread) has died"]
    assert world.kept_off == []


def test_an_error_of_its_own_stops_it_not(world, watching, virtual, monkeypatch, caplog):
    """It is logged, and the next second is looked at."""

    def broken():
        if len(virtual.waits) < 3:
            raise ZeroDivisionError
        return 2**50

    monkeypatch.setattr(processes, "resident_bytes", broken)
    watching(max_memory=1)._run()

    assert caplog.text.count("it goes on") == 2
    assert len(world.said) == 1


def test_an_orphan_is_told_so(world, watching, virtual, monkeypatch):
    """Nobody would restart or stop it any more."""
    watchdog = watching()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    watchdog._run()
    assert world.said == ["orphaned"]


def test_it_watches_on_a_thread_of_its_own(world, watching):
    """With the deadman kept off from the first moment on."""
    watchdog = watching(held_after=25_000)
    watchdog.start()
    watchdog.close()
    assert world.kept_off[0] == 25_000


def test_under_gevent_it_says_nothing_of_the_interpreter(world, watching, monkeypatch):
    """It waits its turn like any greenlet: that it is late says nothing."""
    monkeypatch.setattr(host, "is_gevent_active", lambda: True)
    watching(held_after=25_000)._keep_deadman_off()
    assert world.kept_off == []
