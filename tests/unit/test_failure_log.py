"""Which records of the worker's log are let through, shortened or hidden."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from dramatiq_guard import delivery as deliveries
from dramatiq_guard import failure_log as module
from dramatiq_guard import host
from dramatiq_guard.failure_log import FailureLog
from dramatiq_guard.policy.decision import Decision, Step
from tests.unit.conftest import deliver


def record(text=host.FAILURE_LOG_TEXT, error: Exception | None = None, args=("the message",)):
    """A record as Dramatiq's worker makes it."""
    exc_info = None
    if error is not None:
        try:
            raise error
        except type(error):
            exc_info = sys.exc_info()
    return logging.LogRecord(host.WORKER_LOGGER, logging.ERROR, __file__, 1, text, args, exc_info)


@pytest.fixture
def current(broker):
    """The delivery that runs here, on the broker of the test."""
    delivery = deliver("job")
    delivery.stack = SimpleNamespace(broker=broker, redact_text=None)
    deliveries.enter(delivery)
    yield delivery
    deliveries.enter(None)


def decided(step):
    """A decision for a step."""
    return Decision(step, "exhausted", None, counted=True, exit_process=False, why="no retries are left")


@pytest.mark.parametrize(
    ("step", "shown"), [(None, True), (Step.GIVE_UP, True), (Step.DEFER, False), (Step.REQUEUE, False)]
)
def test_a_skip_is_hidden_where_it_is_a_putting_off(broker, current, step, shown):
    """A skip of somebody else's is news."""
    current.decision = None if step is None else decided(step)
    assert FailureLog(broker, "throttled").filter(record(host.SKIP_LOG_TEXT)) is shown


def test_other_records_pass_as_they_are(broker, current):
    """Also one that tells of a failure without an error, or of another broker's."""
    log = FailureLog(broker, "summary")
    for each in (record("Something else."), record()):
        assert log.filter(each)
        assert each.args == ("the message",)

    current.stack.broker = object()
    foreign = record(error=ValueError("x"))
    assert log.filter(foreign)
    assert foreign.exc_info is not None


def test_a_message_of_ten_megabytes_is_cut_short_beside_its_traceback(broker, current):
    """A storm must not fill the disk."""
    current.message._message = current.message.copy(args=("x" * 10_000_000,))
    shown = record(error=ValueError("boom"))

    assert FailureLog(broker, "traceback").filter(shown)
    assert len(shown.getMessage()) < 1_000
    assert shown.getMessage().endswith("… with unhandled exception.")
    assert "ValueError: boom" in shown.exc_text


def test_a_summary_says_what_becomes_of_the_message_where_that_is_known(broker, current):
    """And where it is not, says nothing of it."""
    log = FailureLog(broker, "summary")
    undecided = record(error=ValueError("boom"))
    log.filter(undecided)
    assert "(job) failed: ValueError: boom at" in undecided.getMessage()
    assert not current.said

    current.decision = decided(Step.GIVE_UP)
    given_up = record(error=ValueError("boom"))
    log.filter(given_up)
    assert given_up.getMessage().endswith("; given up (exhausted): no retries are left")
    assert current.said


def test_a_traceback_is_shown_again_after_a_minute(broker, current, virtual):
    """Once for each kind of failure in between."""
    log = FailureLog(broker, "throttled")

    def shows(error):
        each = record(error=error)
        log.filter(each)
        return each.exc_info is not None

    assert [shows(ValueError("a")), shows(ValueError("b")), shows(KeyError("a"))] == [True, False, True]
    virtual.time += module.QUIET
    assert shows(ValueError("c"))


def test_no_more_kinds_are_remembered_than_a_thousand(broker, current, monkeypatch):
    """Code that is generated anew each time would fill the memory; they begin anew."""
    monkeypatch.setattr(module, "REMEMBERED", 2)
    log = FailureLog(broker, "throttled")
    for kind in (ValueError, KeyError, TypeError):
        log.filter(record(error=kind("x")))

    assert len(log._shown) == 1


def test_a_filter_stands_in_for_the_one_before_it(broker, stub_broker):
    """For the same broker; another broker's stays."""
    logger = logging.getLogger(host.WORKER_LOGGER)
    before = list(logger.filters)
    try:
        other, first, second = (FailureLog(each, "summary") for each in (stub_broker, broker, broker))
        for each in (other, first, second):
            each.install()
        assert [each for each in logger.filters if each not in before] == [other, second]
    finally:
        logger.filters[:] = before
