"""A message that meets a breaker that is not closed is a span; what the breakers do is a gauge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dramatiq_guard import telemetry
from dramatiq_guard.telemetry import signals
from tests.telemetry.conftest import Recorder


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    signals.breakers.clear()
    yield
    signals.breakers.clear()


@pytest.mark.parametrize(("admitted", "outcome"), [(True, "admitted"), (False, "deferred")])
def test_a_message_at_a_breaker_is_a_span(recorder: Recorder, admitted: bool, outcome: str) -> None:
    """With the downstream and what its breaker does."""
    telemetry.breaker_passed("payments", "recovering", admitted=admitted)

    assert dict(recorder.one("dramatiq_guard.breaker").attributes or {}) == {
        "dramatiq_guard.downstream": "payments",
        "dramatiq_guard.breaker.mode": "recovering",
        "dramatiq_guard.outcome": outcome,
    }


def test_the_gauge_says_what_each_breaker_does(recorder: Recorder) -> None:
    """As far as this process knows."""
    for name, mode in {"a": "closed", "b": "recovering", "c": "open", "d": "forced_open", "e": "forced_closed"}.items():
        telemetry.breaker_is(name, mode)
    telemetry.breaker_is("c", "recovering")
    signals.meters()

    values = {
        point.attributes["dramatiq_guard.downstream"]: point.value
        for point in recorder.points("dramatiq_guard.breaker.state")
    }
    assert values == {"a": 0, "b": 1, "c": 1, "d": 3, "e": 0}
