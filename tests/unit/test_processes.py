"""Whether a process number still means the process that was meant."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

import pytest

from dramatiq_guard import clock
from dramatiq_guard.exits import processes
from tests.support.waiting import wait_until


@pytest.fixture
def sleeper():
    """A process of the test's own."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_this_process_is_alive():
    """It was started before now."""
    assert processes.alive(os.getpid(), clock.now())


def test_nobody_is_dead():
    """A number that nobody has, or that nobody can have."""
    assert not processes.alive(2**22 + 1, clock.now())
    assert not processes.alive(2**80, clock.now())
    assert processes.started_at(2**22 + 1) is None


def test_a_process_that_nobody_has_waited_for_is_dead(sleeper):
    """A zombie holds its number, and does nothing more."""
    assert processes.alive(sleeper.pid, clock.now())
    os.kill(sleeper.pid, 9)
    wait_until(lambda: not processes.alive(sleeper.pid, clock.now()), describe="the zombie to count as dead")
    os.kill(sleeper.pid, 0)  # the number is still taken


def test_a_younger_process_with_the_same_number_is_another_one(sleeper):
    """Containers give the same numbers again within a second."""
    assert not processes.alive(sleeper.pid, clock.now() - 60_000)


def test_somebody_elses_process_counts(monkeypatch):
    """That it may not be signalled says that it is there."""

    def refuse(pid, signum):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert processes.alive(os.getpid(), clock.now())


def test_where_the_machine_does_not_tell_whoever_has_the_number_counts(monkeypatch):
    """Without /proc there is no more to go by."""
    monkeypatch.setattr(processes, "_stat", lambda pid: None)
    assert processes.alive(os.getpid(), 0)


def test_a_process_starts_before_it_can_be_asked(sleeper):
    """On the same scale as the clock, to within a tick or two."""
    started = processes.started_at(sleeper.pid)
    assert started is not None
    assert started <= time.time_ns() // 1_000_000
    assert started > processes.started_at(1)


def test_memory_is_counted_in_bytes():
    """Ten megabytes more show; from a mapping of its own, since the heap may have as much lying about."""
    before = processes.resident_bytes()
    with mmap.mmap(-1, 64_000_000) as ballast:
        ballast.write(b"x" * len(ballast))
        assert processes.resident_bytes() - before > 10_000_000
