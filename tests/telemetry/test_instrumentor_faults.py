"""What the one instrumentor that exists for Dramatiq gets wrong, and does not go wrong here."""

from __future__ import annotations

import logging

import dramatiq
import pytest
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from tests.telemetry.conftest import Recorder, working


def test_options_of_send_with_options_arrive(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """An option given with the message is obeyed and stays where Dramatiq looks for it."""
    seen = []

    @dramatiq.actor(max_retries=5, min_backoff=1, max_backoff=1)
    def work() -> None:
        message = dramatiq.middleware.CurrentMessage.get_current_message()
        seen.append(dict(message.options))
        raise ValueError

    broker.add_middleware(dramatiq.middleware.CurrentMessage())
    work.send_with_options(max_retries=0, tag="mine")
    with working(broker):
        recorder.wait("process default")

    assert len(seen) == 1
    assert (seen[0]["max_retries"], seen[0]["tag"]) == (0, "mine")
    assert "options" not in seen[0]


def test_kinds_are_producer_and_consumer(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """A message is produced and consumed; nobody serves a request."""

    @dramatiq.actor
    def work() -> None:
        pass

    work.send()
    with working(broker):
        recorder.wait("process default")

    assert [span.kind for span in recorder.spans] == [SpanKind.PRODUCER, SpanKind.CONSUMER]


def test_a_failed_actor_is_an_error_with_its_exception(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """A failure is an error, has its type, and the exception with the traceback is an event."""

    @dramatiq.actor(max_retries=0)
    def work() -> None:
        raise ValueError("this is no order")

    work.send()
    with working(broker):
        process = recorder.wait("process default")[0]

    assert process.status.status_code is StatusCode.ERROR
    assert process.attributes["error.type"] == "ValueError"
    (event,) = process.events
    assert event.name == "exception"
    assert event.attributes["exception.message"] == "this is no order"
    assert "in test_a_failed_actor" in event.attributes["exception.stacktrace"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_consumer_span_is_current_in_the_actor(
    tracing_stub: dramatiq.Broker, recorder: Recorder, asynchronous: bool
) -> None:
    """Whatever the actor traces is below its attempt, in sync and in async actors."""
    current = []

    if asynchronous:
        tracing_stub.add_middleware(dramatiq.middleware.AsyncIO())

        @dramatiq.actor
        async def work() -> None:
            current.append(get_current_span().get_span_context().span_id)
    else:

        @dramatiq.actor
        def work() -> None:
            current.append(get_current_span().get_span_context().span_id)

    work.send()
    with working(tracing_stub):
        process = recorder.wait("process default")[0]

    assert current == [process.context.span_id]


def test_an_unrelated_message_is_in_a_trace_of_its_own(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """Two messages, one after the other on one thread, by success and by failure: four traces."""

    @dramatiq.actor(max_retries=0)
    def work(fails: bool) -> None:
        if fails:
            raise ValueError

    for fails in (False, True, False, True):
        work.send(fails)
    with working(broker):
        processed = recorder.wait("process default", 4)

    assert len({span.context.trace_id for span in processed}) == 4


def test_debug_logging_breaks_nothing(
    broker: dramatiq.Broker, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """With everything logged at DEBUG, messages are processed and nothing is logged as an error."""
    caplog.set_level(logging.DEBUG)

    @dramatiq.actor
    def work() -> None:
        pass

    work.send()
    with working(broker):
        recorder.wait("process default")

    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
