"""The whole stack as spans: what a failing message's trace looks like with every middleware in place."""

from __future__ import annotations

import dramatiq
import pytest
from dramatiq.middleware import Retries
from opentelemetry.trace import StatusCode

from dramatiq_guard import Classify, DeadLetter, Defer, JitterBackoff, Permanent, connect, install
from tests.telemetry.conftest import Recorder, working

pytestmark = pytest.mark.usefixtures("recorder")


@pytest.fixture(params=["stub", pytest.param("redis", marks=pytest.mark.redis)])
def broker(request: pytest.FixtureRequest) -> dramatiq.Broker:
    """A broker with the stack on it, in memory and on Redis."""
    broker: dramatiq.Broker = request.getfixturevalue(f"{request.param}_broker")
    broker.middleware[:] = [each for each in broker.middleware if not isinstance(each, Retries)]
    letters = DeadLetter(connect("memory://").dead_letters)
    install(broker, Classify(), JitterBackoff(min_backoff=1, max_backoff=5), letters)
    return broker


def tree(recorder: Recorder) -> list[str]:
    """Every span in the order in which they began, indented by depth."""
    by_id = {span.context.span_id: span for span in recorder.spans}

    def depth(span_id: int) -> int:
        span = by_id[span_id]
        return 0 if span.parent is None else 1 + depth(span.parent.span_id)

    return ["  " * depth(span.context.span_id) + span.name for span in recorder.spans]


def test_retry_and_success_are_one_tree(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """The failure, its verdict, its backoff, the settlement with the retry, and the success: one trace."""
    runs = []

    @dramatiq.actor
    def flaky() -> None:
        runs.append(1)
        if len(runs) < 2:
            raise ConnectionError("reset by peer")

    flaky.send()
    with working(broker):
        recorder.wait("process default", 2)

    assert tree(recorder) == [
        "send default",
        "  process default",
        "    dramatiq_guard.classify",
        "    dramatiq_guard.backoff",
        "    dramatiq_guard.settle",
        "      retry default",
        "  process default",
    ]
    first, second = recorder.named("process default")
    assert len(recorder.traces) == 1
    assert (first.attributes["dramatiq_guard.outcome"], second.attributes["dramatiq_guard.outcome"]) == (
        "retried",
        "succeeded",
    )
    assert first.context.span_id in {link.context.span_id for link in second.links}
    assert recorder.one("dramatiq_guard.settle").attributes["dramatiq_guard.settle.sent"] == ("retry",)
    assert recorder.total("messaging.client.sent.messages", operation="retry") == 1


def test_a_dead_letter_is_a_span_in_the_trace(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """The letter is written at the barrier, and names the attempt that died."""

    @dramatiq.actor
    def hopeless() -> None:
        raise Permanent("no such order")

    hopeless.send()
    with working(broker):
        recorder.wait("dramatiq_guard.settle")

    assert tree(recorder) == [
        "send default",
        "  process default",
        "    dramatiq_guard.classify",
        "    dramatiq_guard.settle",
        "      dramatiq_guard.dead_letter",
    ]
    process = recorder.one("process default")
    assert process.attributes["dramatiq_guard.outcome"] == "dead_lettered"
    assert process.status.status_code is StatusCode.ERROR
    assert recorder.total("dramatiq_guard.dead_letter.messages", reason="permanent") == 1


def test_a_deferral_is_an_outcome_and_no_error(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """A message that was put off has not failed, and its copy is in the same trace."""
    runs = []

    @dramatiq.actor
    def busy() -> None:
        runs.append(1)
        if len(runs) < 2:
            raise Defer("the key is held", delay=1)

    busy.send()
    with working(broker):
        first, second = recorder.wait("process default", 2)

    assert len(recorder.traces) == 1
    assert first.attributes["dramatiq_guard.outcome"] == "deferred"
    assert (first.status.status_code, first.events) == (StatusCode.UNSET, ())
    assert second.attributes["dramatiq_guard.outcome"] == "succeeded"
    assert recorder.one("defer default").attributes["messaging.operation.type"] == "send"


def test_an_unknown_actors_letter_is_in_the_trace_of_its_send(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """Nothing processed it, but the settlement on the consumer's thread knows where it came from."""

    @dramatiq.actor
    def known() -> None:
        pass

    broker.enqueue(known.message().copy(actor_name="unknown"))
    with working(broker):
        recorder.wait("dramatiq_guard.settle")

    assert tree(recorder) == ["send default", "  dramatiq_guard.settle", "    dramatiq_guard.dead_letter"]
