"""Exceptions as span events or log records, bounded."""

from __future__ import annotations

import pytest
from opentelemetry import _logs as logs_api
from opentelemetry._logs import _internal as logs_internal
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

from dramatiq_guard import telemetry
from tests.telemetry.conftest import Recorder
from tests.telemetry.test_facade import delivery


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> InMemoryLogRecordExporter:
    """The log records of an SDK in memory."""
    exporter = InMemoryLogRecordExporter()
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    monkeypatch.setattr(logs_internal, "_LOGGER_PROVIDER", provider)
    return exporter


def fail(error: BaseException) -> None:
    """An attempt that fails with this error."""
    it = delivery()
    telemetry.attempt_began(it)
    try:
        raise error
    except BaseException as raised:
        telemetry.attempt_ended(it, raised)


@pytest.mark.parametrize(
    ("value", "events", "records"),
    [(None, 1, 0), ("", 1, 0), ("logs", 0, 1), ("logs/dup", 1, 1), ("other, logs/dup", 1, 1), ("nonsense", 1, 0)],
)
def test_the_environment_says_where_exceptions_go(
    recorder: Recorder,
    logs: InMemoryLogRecordExporter,
    monkeypatch: pytest.MonkeyPatch,
    value: str | None,
    events: int,
    records: int,
) -> None:
    """OTEL_SEMCONV_EXCEPTION_SIGNAL_OPT_IN chooses span events, log records or both."""
    monkeypatch.delenv("OTEL_SEMCONV_EXCEPTION_SIGNAL_OPT_IN", raising=False)
    if value is not None:
        monkeypatch.setenv("OTEL_SEMCONV_EXCEPTION_SIGNAL_OPT_IN", value)
    fail(ValueError("this is no order"))

    process = recorder.one("process orders")
    written = logs.get_finished_logs()
    assert (len(process.events), len(written)) == (events, records)
    for each in written:
        record = each.log_record
        assert record.event_name == "messaging.process.exception"
        assert record.severity_number == logs_api.SeverityNumber.ERROR
        assert record.attributes["exception.type"].endswith("ValueError")
        assert record.attributes["exception.message"] == "this is no order"
        assert (record.trace_id, record.span_id) == (process.context.trace_id, process.context.span_id)


def test_log_records_without_a_logger_are_no_trouble(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where logs are asked for and no logger provider is set, the attempt ends all the same."""
    monkeypatch.setenv("OTEL_SEMCONV_EXCEPTION_SIGNAL_OPT_IN", "logs")
    fail(ValueError("this is no order"))

    assert recorder.one("process orders").events == ()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_is_bounded_whatever_it_carries(recorder: Recorder) -> None:
    """Ten megabytes of text, a __str__ that raises, thousands of frames: an event of a few kilobytes."""

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        raise ValueError("x" * 10_000_000)

    for error in (Unspeakable(), ValueError("x" * 10_000_000)):
        fail(error)
    it = delivery()
    telemetry.attempt_began(it)
    try:
        deep(500)
    except ValueError as error:
        telemetry.attempt_ended(it, error)

    events = [span.events[0].attributes for span in recorder.spans]
    assert len(events) == 3
    assert max(len(event["exception.message"]) for event in events) <= 8 * 1024
    assert max(len(event["exception.stacktrace"]) for event in events) <= 32 * 1024
