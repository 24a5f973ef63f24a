"""The functions that the rest of the library calls: what they export, and that nothing they do touches a message."""

from __future__ import annotations

import logging
import threading
from typing import Any

import dramatiq
import opentelemetry.metrics._internal as metrics_api
import pytest
from dramatiq.broker import MessageProxy
from dramatiq.brokers.stub import StubBroker
from opentelemetry import trace as trace_api
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import StatusCode

from dramatiq_guard import telemetry
from dramatiq_guard.delivery import Delivery, Due, delivery_of
from dramatiq_guard.errors import SettlementHeld
from dramatiq_guard.telemetry import attempts, sends, signals, steps
from tests.telemetry.conftest import Recorder, working


def delivery(**options: Any) -> Delivery:
    """A delivery that nobody has begun."""
    return delivery_of(MessageProxy(dramatiq.Message("orders", "charge", (), {}, options)))


def say_everything(it: Delivery) -> None:
    """Call every function of the facade once, around one delivery."""
    message = it.message._message
    telemetry.send_began(message, None)
    telemetry.send_ended(message)
    telemetry.attempt_began(it)
    telemetry.current_ids()
    telemetry.current_traceparent()
    telemetry.classified(verdict="retryable", rule="builtin:OSError", why="it may pass", error_type="OSError")
    telemetry.backed_off(
        delay_ms=1_500, strategy="exponential", capped=False, retry_after_ms=1_000, verdict="retryable"
    )
    telemetry.attempt_ended(it, OSError("gone"))
    telemetry.ack_began(it, "nack")
    with telemetry.settling(it):
        with telemetry.sending(message, "retry"):
            pass
        telemetry.dead_lettered(reason="exhausted", actor="charge", queue="orders", fingerprint="f00")
        telemetry.settlement_held(what="letter", why="StoreUnavailable")
    telemetry.letters_purged(by_age=2, by_count=0)
    telemetry.ack_ended(it)
    with telemetry.replaying(message, trace_id="1", span_id="2", reason="exhausted", fingerprint="f00"):
        pass


def test_everything_is_said_in_spans_and_metrics(recorder: Recorder) -> None:
    """Each function exports what the tables in docs/telemetry.md say."""
    say_everything(delivery())

    spans = {span.name: span for span in recorder.spans}
    own = {
        name: {key.removeprefix("dramatiq_guard."): value for key, value in (span.attributes or {}).items()}
        for name, span in spans.items()
        if name.startswith("dramatiq_guard.")
    }
    assert own["dramatiq_guard.classify"] == {
        "verdict": "retryable",
        "rule": "builtin:OSError",
        "why": "it may pass",
        "error.type": "OSError",
    }
    assert own["dramatiq_guard.backoff"] == {
        "delay": 1.5,
        "strategy": "exponential",
        "capped": False,
        "retry_after": 1.0,
        "verdict": "retryable",
    }
    assert own["dramatiq_guard.dead_letter"] == {
        "reason": "exhausted",
        "dramatiq.actor.name": "charge",
        "messaging.destination.name": "orders",
        "fingerprint": "f00",
    }
    assert own["dramatiq_guard.settle"] == {"settle.sent": (), "settle.holds": 0, "settle.held": 0.0}
    process = spans["process orders"].context.span_id
    settle = spans["dramatiq_guard.settle"].context.span_id
    parents = {name: span.parent.span_id for name, span in spans.items() if span.parent is not None}
    assert parents == {
        "dramatiq_guard.classify": process,
        "dramatiq_guard.backoff": process,
        "dramatiq_guard.settle": process,
        "nack orders": process,
        "retry orders": settle,
        "dramatiq_guard.dead_letter": settle,
    }
    assert recorder.total("dramatiq_guard.classified.exceptions", verdict="retryable", type="OSError") == 1
    assert recorder.points("dramatiq_guard.retry.delay")[0].sum == 1.5
    assert recorder.total("dramatiq_guard.dead_letter.messages", reason="exhausted") == 1
    assert recorder.total("dramatiq_guard.settle.settlement.held", part="letter") == 1
    assert recorder.total("dramatiq_guard.dead_letter.purged", bound="age") == 2


def test_metrics_have_no_ids_and_no_texts(recorder: Recorder) -> None:
    """Nothing unbounded is a metric attribute: no message id, trace, fingerprint, sentence or error text."""
    it = delivery()
    say_everything(it)

    data = recorder.reader.get_metrics_data()
    metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
    attributes = [point.attributes for metric in metrics for point in metric.data.data_points]
    assert len(attributes) > 10
    assert {key for each in attributes for key in each} <= {
        "messaging.system",
        "messaging.operation.name",
        "messaging.destination.name",
        "error.type",
        "dramatiq.actor.name",
        "dramatiq_guard.outcome",
        "dramatiq_guard.verdict",
        "dramatiq_guard.rule",
        "dramatiq_guard.strategy",
        "dramatiq_guard.reason",
        "dramatiq_guard.settle.part",
        "dramatiq_guard.downstream",
        "dramatiq_guard.retention.bound",
    }
    assert not any(value in (it.message_id, "gone", "f00") for each in attributes for value in each.values())


class Broken(SpanProcessor):
    """A span processor that fails in everything, as one of the user's may."""

    def on_start(self, span: object, parent_context: object = None) -> None:
        raise RuntimeError("no start")

    def on_end(self, span: object) -> None:
        raise RuntimeError("no end")

    def force_flush(self, timeout_millis: int = 0) -> bool:
        raise RuntimeError("no flush")


class BrokenAtTheEnd(Broken):
    """One that only fails when a span ends."""

    def on_start(self, span: object, parent_context: object = None) -> None:
        pass


class BrokenMeters:
    """A meter provider whose every instrument raises."""

    def get_meter(self, *arguments: object) -> BrokenMeters:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("create_"):
            return lambda *arguments, **options: self
        raise RuntimeError(f"no {name}")


def break_traces(monkeypatch: pytest.MonkeyPatch, processor: SpanProcessor) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    monkeypatch.setattr(trace_api, "_TRACER_PROVIDER", provider)


def break_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_api, "_METER_PROVIDER", BrokenMeters())


@pytest.mark.parametrize("broken", ["start", "end", "metrics", "both"])
def test_a_broken_telemetry_touches_no_message(
    monkeypatch: pytest.MonkeyPatch,
    tracing_stub: StubBroker,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    """Whatever the SDK raises, the facade does not; messages run, each in a clean context, and it is logged once."""
    if broken in ("metrics", "both"):
        break_metrics(monkeypatch)
    if broken in ("start", "end", "both"):
        break_traces(monkeypatch, BrokenAtTheEnd() if broken == "end" else Broken())
    say_everything(delivery())
    say_everything(delivery())
    telemetry.flush(5_000)
    assert trace_api.get_current_span() is trace_api.INVALID_SPAN

    runs = []

    @dramatiq.actor(min_backoff=1, max_backoff=1)
    def work() -> None:
        runs.append(trace_api.get_current_span())
        if len(runs) < 3:
            raise ConnectionError

    work.send()
    with working(tracing_stub):
        tracing_stub.join("default", timeout=10_000)

    assert len(runs) == 3
    complaints = [r.getMessage() for r in caplog.records if "Telemetry failed in" in r.getMessage()]
    assert 0 < len(complaints) == len(set(complaints))
    assert not [r for r in caplog.records if "Unexpected failure" in r.getMessage()]


def test_without_an_sdk_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """No span, no attributes, no attempt: the calls look for a provider and leave."""

    def unwanted(*arguments: object, **options: object) -> None:
        raise AssertionError("something was built")

    monkeypatch.setattr(attempts.Attempt, "__init__", unwanted)
    monkeypatch.setattr(attempts, "_start", unwanted)
    monkeypatch.setattr(sends.OpenSend, "__init__", unwanted)
    it = delivery()
    telemetry.send_began(it.message._message, None)
    telemetry.send_ended(it.message._message)
    telemetry.attempt_began(it)
    telemetry.classified(verdict="retryable", rule="builtin:OSError", why="it may pass", error_type="OSError")
    telemetry.backed_off(delay_ms=1_500, strategy="exponential", capped=False)
    telemetry.attempt_ended(it, OSError("gone"))
    telemetry.dead_lettered(reason="exhausted", actor="charge", queue="orders", fingerprint="f00")
    with telemetry.settling(it):
        pass

    assert it.span is None
    assert signals._complained == set()


def test_an_unsampled_attempt_builds_no_steps(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a span that is not sampled, the steps of a failure start no spans."""
    started = []

    class Spy:
        def start_span(self, *arguments: object, **options: object) -> trace_api.Span:
            started.append(arguments)
            return trace_api.INVALID_SPAN

    monkeypatch.setattr(steps, "tracer", Spy)
    for flags, expected in (("00", 0), ("01", 1)):
        it = delivery(dramatiq_guard={"tp": f"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}"})
        telemetry.attempt_began(it)
        telemetry.classified(verdict="retryable", rule="builtin:OSError", why="it may pass", error_type="OSError")
        telemetry.attempt_ended(it, OSError("gone"))
        assert len(started) == expected


def test_ids_are_those_of_the_current_attempt(recorder: Recorder) -> None:
    """Dead letters and the next attempt learn which span this is; outside of one there is none."""
    it = delivery()
    assert (telemetry.current_ids(), telemetry.current_traceparent()) == (None, None)
    telemetry.attempt_began(it)
    trace_id, span_id = telemetry.current_ids() or ("", "")
    traceparent = telemetry.current_traceparent()
    telemetry.attempt_ended(it)

    process = recorder.one("process orders")
    assert (int(trace_id, 16), int(span_id, 16)) == (process.context.trace_id, process.context.span_id)
    assert (traceparent or "")[3:52] == f"{trace_id}-{span_id}"
    assert telemetry.current_ids() is None


def test_an_interrupt_between_the_hooks_leaves_nothing_behind(recorder: Recorder) -> None:
    """An attempt whose after hook never came ends with the next one, and its context is left."""
    lost, following = delivery(), delivery()
    telemetry.attempt_began(lost)
    telemetry.attempt_began(following)
    telemetry.attempt_ended(following)

    first, second = recorder.named("process orders")
    assert first.attributes["dramatiq_guard.outcome"] == "interrupted"
    assert first.context.trace_id != second.context.trace_id
    assert trace_api.get_current_span() is trace_api.INVALID_SPAN
    assert recorder.total("dramatiq_guard.messages.in_flight") == 0


def test_an_attempt_ends_once(recorder: Recorder) -> None:
    """The hooks may run twice when one of them is interrupted; the first word stays, the context is left once."""
    it = delivery()
    with trace_api.get_tracer("test").start_as_current_span("around") as around:
        telemetry.attempt_began(it)
        telemetry.attempt_ended(it)
        telemetry.attempt_ended(it, OSError("gone"))
        telemetry.attempt_ended(it, skipped=True)
        assert trace_api.get_current_span() is around

    assert recorder.one("process orders").attributes["dramatiq_guard.outcome"] == "succeeded"
    assert recorder.total("dramatiq_guard.messages.in_flight") == 0


def test_a_skip_that_comes_before_the_attempt_is_nothing(recorder: Recorder) -> None:
    """A middleware outside of Tracing may skip a message before its attempt has begun."""
    telemetry.attempt_ended(delivery(), skipped=True)

    assert recorder.spans == []


def test_a_settlement_that_is_held_is_one_span(recorder: Recorder) -> None:
    """Three tries on another thread: one span below the attempt that says what was sent and how often it was held."""
    it = delivery()
    telemetry.attempt_began(it)
    telemetry.attempt_ended(it)
    it.dues.append(Due("retry", lambda: None))
    current = []

    def settle() -> None:
        for tries in range(3):
            try:
                with telemetry.settling(it):
                    current.append(trace_api.get_current_span().get_span_context())
                    if tries < 2:
                        it.holds += 1
                        raise SettlementHeld("the broker is out")
                    it.dues[0].done = True
            except SettlementHeld:
                pass

    thread = threading.Thread(target=settle)
    thread.start()
    thread.join()

    span = recorder.one("dramatiq_guard.settle")
    assert {context.span_id for context in current} == {span.context.span_id}
    assert span.parent.span_id == recorder.one("process orders").context.span_id
    assert span.attributes["dramatiq_guard.settle.sent"] == ("retry",)
    assert span.attributes["dramatiq_guard.settle.holds"] == 2
    assert span.status.status_code is StatusCode.UNSET


def test_a_settlement_that_fails_is_an_error(recorder: Recorder) -> None:
    """Any other error ends the settle span, and passes through."""
    with pytest.raises(ZeroDivisionError):
        with telemetry.settling(delivery()):
            raise ZeroDivisionError

    span = recorder.one("dramatiq_guard.settle")
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "ZeroDivisionError")


def test_a_message_that_was_never_attempted_settles_in_its_own_trace(recorder: Recorder) -> None:
    """The letter of an unknown actor belongs to the trace of the send."""
    it = delivery(dramatiq_guard={"tp": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
    with telemetry.settling(it):
        telemetry.dead_lettered(reason="unknown_actor", actor="charge", queue="orders")

    assert recorder.traces == {int("0af7651916cd43dd8448eb211c80319c", 16)}
    assert recorder.one("dramatiq_guard.settle").parent.span_id == int("b7ad6b7169203331", 16)


@pytest.mark.parametrize("sdk", [True, False])
def test_a_consumers_thread_sends_inside_a_settlement(
    request: pytest.FixtureRequest, tracing_stub: StubBroker, sdk: bool
) -> None:
    """On a consumer's thread an enqueue is a promotion, but inside a settlement it is a send like any other."""
    if sdk:
        request.getfixturevalue("recorder")
    message = dramatiq.Message("default", "tell", (), {}, {})
    tracing_stub.declare_queue("default")
    telemetry.promotes()

    tracing_stub.enqueue(message)
    assert b'"dramatiq_guard"' not in tracing_stub.queues["default"].get()
    with telemetry.settling(delivery()):
        tracing_stub.enqueue(message)
    assert b'"dramatiq_guard"' in tracing_stub.queues["default"].get()


def test_a_provider_that_comes_later_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK may be set up after the library has been used."""
    assert (signals.tracer(), signals.meters()) == (None, None)
    late = Recorder()
    monkeypatch.setattr(trace_api, "_TRACER_PROVIDER", late.tracer_provider)
    monkeypatch.setattr(metrics_api, "_METER_PROVIDER", late.meter_provider)
    telemetry.dead_lettered(reason="exhausted", actor="charge", queue="orders")

    assert [span.name for span in late.spans] == ["dramatiq_guard.dead_letter"]
    assert late.total("dramatiq_guard.dead_letter.messages") == 1


def test_a_flush_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A flush that never returns is left behind, and the answer says so; one that works says yes."""
    released = threading.Event()

    class Endless(BrokenAtTheEnd):
        def force_flush(self, timeout_millis: int = 0) -> bool:
            return released.wait()

    assert telemetry.flush(1_000) is True
    break_traces(monkeypatch, Endless())
    assert telemetry.flush(10) is False
    released.set()
    assert telemetry.flush(10_000) is True
    break_traces(monkeypatch, Broken())
    caplog.set_level(logging.CRITICAL)
    assert telemetry.flush(10_000) is False


def test_an_interrupt_in_the_midst_of_an_end_leaves_nothing_behind(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt that lands in the after hook itself passes through, and the context is left all the same."""
    it = delivery()
    telemetry.attempt_began(it)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attempts, "_close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        telemetry.attempt_ended(it)
    monkeypatch.undo()
    monkeypatch.setattr(trace_api, "_TRACER_PROVIDER", recorder.tracer_provider)
    monkeypatch.setattr(metrics_api, "_METER_PROVIDER", recorder.meter_provider)
    following = delivery()
    telemetry.attempt_began(following)
    telemetry.attempt_ended(following)

    assert [span.attributes["dramatiq_guard.outcome"] for span in recorder.spans] == ["succeeded", "succeeded"]
    assert trace_api.get_current_span() is trace_api.INVALID_SPAN
    assert recorder.total("dramatiq_guard.messages.in_flight") == 0


def test_an_ack_that_turns_into_a_nack_is_two_spans(recorder: Recorder) -> None:
    """The barrier repeats the hook, which is one span; a message that turned out to have failed is nacked instead."""
    it = delivery()
    telemetry.attempt_began(it)
    telemetry.attempt_ended(it)
    for operation in ("ack", "ack", "nack", "nack"):
        telemetry.ack_began(it, operation)
    telemetry.ack_ended(it)
    telemetry.ack_ended(it)

    assert [span.name for span in recorder.spans] == ["process orders", "ack orders", "nack orders"]


def test_an_api_without_bucket_advice_still_has_histograms() -> None:
    """Older versions of the API do not take the bounds of the buckets."""

    made = []

    class OldMeter:
        def create_counter(self, name: str, *arguments: object) -> None:
            made.append(name)

        create_up_down_counter = create_observable_gauge = create_counter

        def create_histogram(self, name: str, unit: str, description: str) -> None:
            made.append(name)

    signals.Meters(OldMeter())  # type: ignore[arg-type]

    assert "messaging.process.duration" in made
