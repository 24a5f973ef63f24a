"""Messages that meet a breaker, as they are exported: a span inside their attempt's, its outcome, and the gauge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from dramatiq_guard import telemetry
from dramatiq_guard.policy.breaker import Mode, force
from dramatiq_guard.telemetry import signals
from tests.downstreams.conftest import Bench
from tests.support.waiting import wait_until
from tests.telemetry.conftest import Recorder


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    signals.breakers.clear()
    yield
    signals.breakers.clear()


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    """A worker's place, with a second actor on the queue, so that it is not held."""
    with closing(Bench(redis_url)) as here:
        here.actor(lambda: None, actor_name="other", downstream=None)
        yield here


def put(bench: Bench, mode: Mode) -> None:
    """An operator's word."""
    bench.stores.breakers.update("payments", lambda state, now: (force(state, mode, now), None))


def inside(recorder: Recorder, outcome: str) -> list[tuple[Any, Any]]:
    """The spans of breakers with an outcome, each with the one that it is in."""
    spans = {span.context.span_id: span for span in recorder.spans if span.context}
    return [
        (span, spans.get(span.parent.span_id if span.parent else 0))
        for span in spans.values()
        if span.name == "dramatiq_guard.breaker" and (span.attributes or {}).get("dramatiq_guard.outcome") == outcome
    ]


def test_what_is_put_off_is_a_span_in_an_attempt_that_did_not_fail(bench: Bench, recorder: Recorder) -> None:
    """INTERNAL, with the downstream and the mode; the attempt is deferred, and no error."""
    put(bench, Mode.FORCED_OPEN)
    charge = bench.actor()
    bench.work()
    charge.send(1)

    ((span, attempt),) = wait_until(lambda: [pair for pair in inside(recorder, "deferred") if pair[1]], 20)
    assert span.kind is SpanKind.INTERNAL
    assert span.attributes["dramatiq_guard.downstream"] == "payments"
    assert span.attributes["dramatiq_guard.breaker.mode"] == "forced_open"
    assert attempt.name == "process default"
    assert attempt.attributes["dramatiq_guard.outcome"] == "deferred"
    assert attempt.status.status_code is span.status.status_code is StatusCode.UNSET


def test_what_is_let_through_in_a_recovery_is_a_span_too(bench: Bench, recorder: Recorder) -> None:
    """And what a closed breaker lets through is none."""
    put(bench, Mode.FORCED_OPEN)
    put(bench, Mode.RECOVERING)
    charge = bench.actor()
    bench.work()
    charge.send(1)

    ((span, attempt),) = wait_until(lambda: [pair for pair in inside(recorder, "admitted") if pair[1]], 20)
    assert span.attributes["dramatiq_guard.breaker.mode"] == "recovering"
    assert attempt.attributes["dramatiq_guard.outcome"] == "succeeded"

    bench.until(Mode.CLOSED)
    wait_until(lambda: bench.breaker.gates._known["payments"].free is not None, 20)
    before = len(recorder.spans)
    charge.send(2)
    wait_until(lambda: [span for span in recorder.spans[before:] if span.name == "process default"], 20)
    assert not [span for span in recorder.spans[before:] if span.name == "dramatiq_guard.breaker"]


def test_the_gauge_follows_a_breaker(bench: Bench, recorder: Recorder) -> None:
    """3 while it is paused, 1 while it recovers, 0 when it is closed."""
    signals.meters()

    def value() -> float | None:
        points = list(recorder.points("dramatiq_guard.breaker.state"))
        assert all(set(point.attributes) == {"dramatiq_guard.downstream"} for point in points)
        return next((point.value for point in points), None)

    put(bench, Mode.FORCED_OPEN)
    charge = bench.actor()
    bench.work()
    charge.send(1)
    wait_until(lambda: value() == 3, 20)
    put(bench, Mode.RECOVERING)
    wait_until(lambda: value() == 1, 20)
    wait_until(lambda: value() == 0, 40)


def test_a_name_that_no_exporter_could_write_spoils_nothing(recorder: Recorder) -> None:
    """A message may make any name: it is shortened, and holds nothing that is not Unicode."""
    telemetry.breaker_passed("\ud800" + "x" * 10_000, "open", admitted=False)

    name = (recorder.one("dramatiq_guard.breaker").attributes or {})["dramatiq_guard.downstream"]
    assert len(json.dumps(name).encode()) < 1_000
    assert str(name).encode()


def test_the_gauge_has_so_many_downstreams_and_no_more(recorder: Recorder) -> None:
    """Names that messages make would fill the memory; those that are well make room for those that are not."""
    signals.meters()
    for at in range(3_000):
        telemetry.breaker_is(f"well-{at}", "closed")
    telemetry.breaker_is("ill", "open")
    for at in range(3_000):
        telemetry.breaker_is(f"ill-{at}", "open")
    telemetry.breaker_is("one too many", "open")

    values = {
        str(point.attributes["dramatiq_guard.downstream"]): point.value
        for point in recorder.points("dramatiq_guard.breaker.state")
    }
    assert len(values) == 1_000
    assert values["ill"] == 2
