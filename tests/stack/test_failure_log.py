"""What the log says of a failed attempt: one line, or its traceback; never both twice a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import Classify, JitterBackoff, install

from ..support.waiting import wait_until

Run = Callable[..., list[logging.LogRecord]]


@pytest.fixture
def run(caplog: pytest.LogCaptureFixture) -> Run:
    """Run messages that fail until their retries are used up; gives what was logged of it."""

    def run(log: str, *, messages: int = 1, max_retries: int = 1, error: type[Exception] = RuntimeError) -> Any:
        broker = StubBroker()
        broker.emit_after("process_boot")
        install(broker, Classify(), JitterBackoff(log=log, min_backoff=1, max_backoff=1))  # type: ignore[arg-type]
        runs = []

        def fail() -> None:
            runs.append(1)
            raise error("no luck")

        actor = dramatiq.actor(broker=broker, max_retries=max_retries)(fail)
        worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=1)
        worker.start()
        try:
            with caplog.at_level(logging.INFO, "dramatiq"), caplog.at_level(logging.INFO, "dramatiq_guard"):
                for _ in range(messages):
                    actor.send()
                wait_until(lambda: len(runs) == messages * (1 + max_retries) and broker.dead_letters, 10, lambda: runs)
                broker.join(actor.queue_name, fail_fast=False)
        finally:
            worker.stop()
            broker.close()
        return [record for record in caplog.records if "boot" not in record.getMessage()]

    return run


def lines(records: list[logging.LogRecord], text: str) -> list[str]:
    return [record.getMessage() for record in records if text in record.getMessage()]


def test_a_summary_is_one_line_that_says_what_becomes_of_the_message(run: Run) -> None:
    """The error, its place and the decision stand in it; nothing is said a second time, and no traceback."""
    records = run("summary")

    first, second = lines(records, "no luck")
    assert first.startswith("Attempt 1 of message ")
    assert "(fail) failed: RuntimeError: no luck at " in first
    assert ":fail:" in first
    assert first.endswith("; retry 1 of 1 in 1 ms (exponential)")
    assert second.endswith("; given up (exhausted): 1 retries made, max_retries is 1")
    assert not lines(records, "Retrying message")
    assert not lines(records, "Giving message")
    assert not any(record.exc_info for record in records)


def test_every_traceback_is_shown_where_that_is_asked_for(run: Run) -> None:
    """Dramatiq's own line with the traceback, and then what becomes of the message."""
    records = run("traceback")

    shown = [record for record in records if record.exc_info]
    assert 2 == len(shown)
    assert all("Failed to process message" in record.getMessage() for record in shown)
    assert 1 == len(lines(records, "Retrying message"))
    assert 1 == len(lines(records, "Giving message"))


def test_a_traceback_begins_where_the_users_function_was_called(run: Run) -> None:
    """What the worker and the stack did before says nothing about the error."""
    record = next(record for record in run("traceback") if record.exc_info)

    assert record.exc_text is not None
    assert "fail" in record.exc_text.splitlines()[1]
    assert "dramatiq/worker.py" not in record.exc_text


def test_the_traceback_of_each_kind_of_failure_is_shown_once_a_minute(run: Run) -> None:
    """Of five messages that fail the same way twice each, one traceback and nine lines."""
    records = run("throttled", messages=5)

    assert 1 == sum(bool(record.exc_info) for record in records)
    assert 9 == len(lines(records, "failed: RuntimeError: no luck"))
