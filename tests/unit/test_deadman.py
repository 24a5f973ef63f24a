"""The timer in C that ends a process whose interpreter is held; faulthandler is a fake here."""

from __future__ import annotations

import faulthandler
import sys

import pytest

from dramatiq_guard import host
from dramatiq_guard.exits.deadman import Deadman


@pytest.fixture
def timer(monkeypatch):
    """What faulthandler is told."""
    told: list[object] = []

    def later(seconds, *, exit, file):  # noqa: A002 - the library's name
        assert exit
        assert file is sys.__stderr__, "anything else is Dramatiq's log pipe"
        told.append(seconds)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: told.append("cancelled"))
    return told


@pytest.fixture
def in_worker(monkeypatch):
    """This is a worker process of the dramatiq command."""
    monkeypatch.setattr(host, "in_command_line_worker", lambda: True)


def test_it_is_kept_off_for_as_long_as_python_runs(timer, in_worker):
    """Later and later; for two seconds at least, since a busy machine is no held interpreter."""
    deadman = Deadman()
    for milliseconds in (25_000, 25_000, 10):
        deadman.keep_off(milliseconds)

    assert timer == [25, 25, 2]


def test_at_the_end_nothing_keeps_it_off_any_more(timer, in_worker):
    """The watchdog may still be at it."""
    deadman = Deadman()
    deadman.last(30_000)
    deadman.keep_off(25_000)

    assert timer == [30]


def test_a_process_that_ends_by_itself_needs_it_no_more(timer, in_worker):
    """Nor is it armed again."""
    deadman = Deadman()
    deadman.keep_off(25_000)
    deadman.disarm()
    deadman.keep_off(25_000)

    assert timer == [25, "cancelled"]


def test_a_process_that_is_not_ours_is_not_ended(timer):
    """A worker inside of somebody else's program, or one without a standard error."""
    Deadman().keep_off(25_000)
    Deadman().last(25_000)
    assert timer == []


def test_without_a_standard_error_there_is_no_timer(timer, in_worker, monkeypatch):
    """faulthandler would refuse, in the middle of the end."""
    monkeypatch.setattr(sys, "__stderr__", None)
    Deadman().last(25_000)
    assert timer == []
