"""Each word with the store of the idempotency keys is a span, a count and a duration."""

from __future__ import annotations

import time

import pytest
from opentelemetry.trace import StatusCode

from dramatiq_guard import telemetry
from dramatiq_guard.errors import StoreUnavailable
from tests.telemetry.conftest import Recorder

DECISIONS = "dramatiq_guard.idempotency.decisions"
DURATION = "dramatiq_guard.idempotency.operation.duration"


def test_a_word_with_the_store_is_a_span_that_lasts_as_long(recorder: Recorder) -> None:
    """With what came of it, the fence and the kind of store; the fence is in no metric."""
    with telemetry.key_operation("claim", "redis") as operation:
        time.sleep(0.01)
        operation.outcome, operation.fence = "claimed", 17

    span = recorder.one("dramatiq_guard.idempotency.claim")
    assert dict(span.attributes or {}) == {
        "dramatiq_guard.outcome": "claimed",
        "db.system.name": "redis",
        "dramatiq_guard.idempotency.fence": 17,
    }
    assert (span.end_time or 0) - (span.start_time or 0) >= 10_000_000
    (point,) = recorder.points(DECISIONS)
    assert dict(point.attributes) == {
        "dramatiq_guard.outcome": "claimed",
        "db.system.name": "redis",
        "dramatiq_guard.idempotency.operation": "claim",
    }
    assert recorder.total(DURATION) == 1


def test_a_store_that_is_out_is_an_error(recorder: Recorder) -> None:
    """Of the operation; what becomes of the message is on the attempt."""
    with pytest.raises(StoreUnavailable), telemetry.key_operation("complete", "postgresql"):
        raise StoreUnavailable("out")

    span = recorder.one("dramatiq_guard.idempotency.complete")
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "StoreUnavailable"
    (point,) = recorder.points(DECISIONS)
    assert point.attributes["dramatiq_guard.outcome"] == "unavailable"


def test_without_an_sdk_nothing_is_built() -> None:
    """One object stands in for all."""
    assert telemetry.key_operation("claim", "redis") is telemetry.key_operation("release", "memory")
    with telemetry.key_operation("claim", "redis") as operation:
        operation.outcome = "claimed"
