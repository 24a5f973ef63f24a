"""What is said while a worker boots is read at once, and never by a broken pipe's leave."""

from __future__ import annotations

import io
import logging
import os
import sys

import pytest

from dramatiq_guard import boot_log, host

LOGGER = logging.getLogger("dramatiq_guard.boot")


@pytest.fixture
def error_output(monkeypatch):
    """The standard error output of a worker process of the dramatiq command."""
    monkeypatch.setattr(host, "in_command_line_worker", lambda: True)
    output = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", output)
    return output


def test_a_worker_says_it_twice(error_output, caplog):
    """In its log, which the master reads late, and where both of them write; as it stands, percent signs and all."""
    boot_log.say(LOGGER, logging.WARNING, "waits: 100%s")

    assert [record.getMessage() for record in caplog.records] == ["waits: 100%s"]
    assert error_output.getvalue() == f"[PID {os.getpid()}] [dramatiq_guard.boot] waits: 100%s\n"


def test_elsewhere_the_log_is_enough(error_output, caplog, monkeypatch):
    """Somebody else's program has its own standard error."""
    monkeypatch.setattr(host, "in_command_line_worker", lambda: False)
    boot_log.say(LOGGER, logging.WARNING, "waits")

    assert (len(caplog.records), error_output.getvalue()) == (1, "")


@pytest.mark.parametrize("gone", ["none", "closed"])
def test_without_a_standard_error_the_log_is_all(error_output, caplog, monkeypatch, gone):
    """No boot fails for it."""
    error_output.close()
    if gone == "none":
        monkeypatch.setattr(sys, "__stderr__", None)
    boot_log.say(LOGGER, logging.WARNING, "waits")

    assert len(caplog.records) == 1
