"""Points at which a test kills the process, and how often they must be reached."""

from __future__ import annotations

import os
import signal

import pytest

from dramatiq_guard.settle import killpoints
from dramatiq_guard.settle.killpoints import reach, reaching


@pytest.fixture
def kills(monkeypatch):
    """The signals that the process would have sent itself."""
    kills: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: kills.append((pid, signum)))
    return kills


def test_the_process_dies_at_the_point_that_was_asked_for(kills):
    """As by a power cut, and at no other."""
    with reaching(killpoints._killer("before-retry")):
        reach("before-ack")
        assert kills == []
        reach("before-retry")

    assert kills == [(os.getpid(), signal.SIGKILL)]


def test_it_dies_the_third_time_if_that_was_asked_for(kills):
    """``after-letter:3``."""
    with reaching(killpoints._killer("after-letter:3")):
        for _ in range(2):
            reach("after-letter")
        assert kills == []
        reach("after-letter")

    assert len(kills) == 1


def test_without_the_variable_a_point_is_nothing(kills):
    """As in production."""
    assert killpoints._killer("") is None
    with reaching(None):
        reach("before-ack")
    assert kills == []


def test_a_simulation_sees_the_points_and_the_former_hook_comes_back(kills):
    """Also where the simulation raised."""
    outer: list[str] = []
    with reaching(outer.append):
        with pytest.raises(ZeroDivisionError), reaching(lambda point: 1 // 0):
            reach("decided")
        reach("before-ack")

    assert outer == ["before-ack"]
