"""What is recorded of a process that ends, and of messages that are stuck, quarantined or not looked up."""

from __future__ import annotations

from dramatiq_guard import telemetry
from dramatiq_guard.telemetry import names

ENDED = {
    "reason": "SIGTERM was received",
    "code": 75,
    "took_ms": 2_500,
    "in_flight": 4,
    "finished": 1,
    "interrupted": 2,
    "handed_back": 7,
    "abandoned": 1,
}


def test_the_end_of_a_process_is_one_span_from_the_signal_on(recorder):
    """It belongs to no message, and says what became of each."""
    telemetry.ended(**ENDED)

    span = recorder.one("dramatiq_guard.shutdown")
    assert span.parent is None
    assert (span.end_time - span.start_time) // 1_000_000 == 2_500
    assert dict(span.attributes) == {
        names.WHY: "SIGTERM was received",
        names.EXIT_CODE: 75,
        names.SHUTDOWN_IN_FLIGHT: 4,
        names.SHUTDOWN_FINISHED: 1,
        names.SHUTDOWN_INTERRUPTED: 2,
        names.SHUTDOWN_REQUEUED: 7,
        names.SHUTDOWN_ABANDONED: 1,
    }
    (point,) = recorder.points(names.SHUTDOWN_DURATION)
    assert (point.sum, dict(point.attributes)) == (2.5, {names.EXIT_CODE: 75})


def test_a_crash_is_a_span_and_counted_by_its_code(recorder):
    """With the reason, for people."""
    telemetry.crashed(reason="a thread has died", code=70)

    assert recorder.one("dramatiq_guard.crash").attributes[names.WHY] == "a thread has died"
    (point,) = recorder.points(names.CRASHES)
    assert (point.value, dict(point.attributes)) == (1, {names.EXIT_CODE: 70})


def test_what_was_not_run_not_interrupted_or_not_looked_up_is_counted(recorder):
    """By actor and queue, where there is a message."""
    telemetry.quarantined(actor="job", queue="default")
    telemetry.job_stuck(actor="job", queue="default")
    telemetry.crashes_uncounted()
    telemetry.crashes_uncounted()

    of_the_message = {names.ACTOR: "job", names.DESTINATION: "default"}
    for name in (names.QUARANTINED_MESSAGES, names.JOBS_STUCK):
        (point,) = recorder.points(name)
        assert (point.value, dict(point.attributes)) == (1, of_the_message)
    assert recorder.total(names.CRASHES_UNCOUNTED) == 2


def test_without_an_sdk_nothing_is_recorded_and_nothing_fails():
    """The end of a process must not hang on it."""
    telemetry.ended(**ENDED)
    telemetry.crashed(reason="a thread has died", code=70)
    telemetry.quarantined(actor="job", queue="default")
    telemetry.job_stuck(actor="job", queue="default")
    telemetry.crashes_uncounted()
