"""Messages on their way out: what is written into them, and what happens when they do not get out."""

from __future__ import annotations

import json

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Middleware
from opentelemetry import trace as trace_api
from opentelemetry.trace import StatusCode

from dramatiq_guard import clock, telemetry
from tests.telemetry.conftest import Recorder, working

VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def queued(broker: StubBroker, queue: str = "default") -> list[dict]:
    """The messages of a queue as they lie there."""
    return [json.loads(data) for data in list(broker.queues[queue].queue)]


@pytest.fixture
def work(tracing_stub: StubBroker) -> dramatiq.Actor:
    @dramatiq.actor
    def work() -> None:
        pass

    return work


def test_the_creation_context_travels_in_one_option(
    work: dramatiq.Actor, tracing_stub: StubBroker, recorder: Recorder
) -> None:
    """The carrier holds the send's context and the time, and is the only option that is added."""
    work.send()

    send = recorder.one("send default")
    (message,) = queued(tracing_stub)
    assert set(message["options"]) == {"dramatiq_guard"}
    carrier = message["options"]["dramatiq_guard"]
    assert set(carrier) == {"tp", "t"}
    assert carrier["tp"].split("-")[1:3] == [f"{send.context.trace_id:032x}", f"{send.context.span_id:016x}"]


def test_without_an_sdk_only_the_time_travels(work: dramatiq.Actor, tracing_stub: StubBroker) -> None:
    """A producer without an SDK still tells its consumers since when the message waits."""
    before = clock.now()
    work.send_with_options(delay=1_000)

    (message,) = queued(tracing_stub, "default.DQ")
    carrier = message["options"]["dramatiq_guard"]
    assert set(carrier) == {"t"}
    assert before + 1_000 <= carrier["t"] <= clock.now() + 1_000


def test_a_message_that_is_sent_twice_has_two_traces(
    work: dramatiq.Actor, tracing_stub: StubBroker, recorder: Recorder
) -> None:
    """The caller's message is left as it was, though the broker enqueues the very object."""
    message = work.message_with_options(tag="mine")

    tracing_stub.enqueue(message)
    tracing_stub.enqueue(message)

    assert message.options == {"tag": "mine"}
    assert len(recorder.traces) == 2
    first, second = (each["options"]["dramatiq_guard"]["tp"] for each in queued(tracing_stub))
    assert first != second


def test_a_send_is_below_what_is_going_on_and_not_current(
    work: dramatiq.Actor, tracing_stub: StubBroker, recorder: Recorder
) -> None:
    """The span of the request stays current during the enqueue, and is the send's parent."""
    current = []

    class Looks(Middleware):
        def before_enqueue(self, broker: dramatiq.Broker, message: dramatiq.Message, delay: int) -> None:
            current.append(trace_api.get_current_span())

    tracing_stub.add_middleware(Looks())
    with trace_api.get_tracer("test").start_as_current_span("request") as request:
        work.send()

    assert current == [request]
    assert recorder.one("send default").parent.span_id == request.get_span_context().span_id


def test_a_failed_enqueue_is_an_error_at_the_next_send(
    work: dramatiq.Actor, tracing_stub: StubBroker, recorder: Recorder
) -> None:
    """An enqueue that fails has no after hook; its span ends with the next send, and the caller's message is clean."""
    message = work.message()
    unencodable = message.copy(args=(object(),))
    with pytest.raises(TypeError):
        tracing_stub.enqueue(unencodable)
    tracing_stub.enqueue(message)

    failed, sent = recorder.named("send default")
    assert (failed.status.status_code, failed.attributes["error.type"]) == (StatusCode.ERROR, "_OTHER")
    assert sent.status.status_code is StatusCode.UNSET
    assert failed.context.trace_id != sent.context.trace_id
    assert unencodable.options == {}
    assert recorder.total("messaging.client.sent.messages", type="_OTHER") == 1


def test_the_creation_context_is_never_rewritten(
    work: dramatiq.Actor, tracing_stub: StubBroker, recorder: Recorder
) -> None:
    """A message that has one keeps it: no span, no other trace."""
    tracing_stub.enqueue(work.message_with_options(dramatiq_guard={"tp": VALID, "other": 1}))

    assert recorder.spans == []
    assert queued(tracing_stub)[0]["options"]["dramatiq_guard"] == {"tp": VALID, "other": 1}


@pytest.mark.parametrize(
    "rubbish", ["text", 7, None, [], {"tp": 7}, {"tp": "00-zz"}, {"prev": {}}, {"t": "x", "ts": 3}]
)
def test_rubbish_in_the_carrier_is_no_context(
    work: dramatiq.Actor, tracing_stub: StubBroker, recorder: Recorder, rubbish: object
) -> None:
    """Whatever somebody put into the option, the message is processed and traced."""
    tracing_stub.enqueue(work.message_with_options(dramatiq_guard=rubbish))
    with working(tracing_stub):
        process = recorder.wait("process default")[0]

    assert process.attributes["dramatiq_guard.outcome"] == "succeeded"


def test_an_unsampled_trace_stays_unsampled(work: dramatiq.Actor, tracing_stub: StubBroker, recorder: Recorder) -> None:
    """The producer's decision not to sample travels with the message."""
    tracing_stub.enqueue(work.message_with_options(dramatiq_guard={"tp": VALID[:-2] + "00"}))
    work.send()
    with working(tracing_stub):
        recorder.wait("process default")

    assert len(recorder.named("process default")) == 1
    assert int("0af7651916cd43dd8448eb211c80319c", 16) not in recorder.traces


def test_vendor_state_travels(work: dramatiq.Actor, tracing_stub: StubBroker, recorder: Recorder) -> None:
    """The W3C tracestate reaches the consumer."""
    state = trace_api.TraceState([("vendor", "abc")])
    context = trace_api.SpanContext(1, 2, is_remote=True, trace_flags=trace_api.TraceFlags(1), trace_state=state)
    parent = trace_api.set_span_in_context(trace_api.NonRecordingSpan(context))
    token = trace_api.context_api.attach(parent)
    work.send()
    trace_api.context_api.detach(token)
    with working(tracing_stub):
        process = recorder.wait("process default")[0]

    assert process.context.trace_state.get("vendor") == "abc"


def test_a_stage_that_sends_a_message_again_keeps_its_carrier(recorder: Recorder, stub_broker: StubBroker) -> None:
    """Messages of a producer without the stack are promoted by a consumer's thread without a span."""

    @dramatiq.actor
    def work() -> None:
        pass

    work.send_with_options(delay=1)
    from dramatiq_guard.middleware.tracing import Tracing

    stub_broker.add_middleware(Tracing(), before=dramatiq.middleware.AgeLimit)
    with working(stub_broker):
        recorder.wait("process default")

    assert [span.name for span in recorder.spans] == ["process default"]


def test_a_replay_links_the_attempt_and_the_operator(
    work: dramatiq.Actor, tracing_stub: StubBroker, recorder: Recorder
) -> None:
    """A replay is a trace of its own, joined by the replayed message and linked to both others."""
    _, trace_id, span_id, _ = VALID.split("-")
    message = work.message_with_options(dramatiq_guard={"tp": VALID})
    with trace_api.get_tracer("test").start_as_current_span("operator") as operator:
        with telemetry.replaying(message, trace_id=trace_id, span_id=span_id, reason="exhausted", fingerprint="f00"):
            tracing_stub.enqueue(message)
    with working(tracing_stub):
        process = recorder.wait("process default")[0]

    replay = recorder.one("dramatiq_guard.replay")
    assert replay.parent is None
    assert replay.context.trace_id not in (operator.get_span_context().trace_id, int(trace_id, 16))
    assert {link.context.span_id for link in replay.links} == {int(span_id, 16), operator.get_span_context().span_id}
    assert replay.attributes["dramatiq_guard.reason"] == "exhausted"
    assert replay.attributes["dramatiq_guard.fingerprint"] == "f00"
    assert process.parent.span_id == replay.context.span_id
    assert int(span_id, 16) in {link.context.span_id for link in process.links}
    assert recorder.named("send default") == []
    assert recorder.total("messaging.client.sent.messages", operation="replay") == 1


def test_an_error_passes_through_sending(work: dramatiq.Actor, recorder: Recorder) -> None:
    """What the broker raises reaches the barrier, and the span is an error."""
    with pytest.raises(ConnectionError):
        with telemetry.sending(work.message(), "retry"):
            raise ConnectionError

    retry = recorder.one("retry default")
    assert (retry.status.status_code, retry.attributes["error.type"]) == (StatusCode.ERROR, "ConnectionError")
    assert trace_api.get_current_span() is trace_api.INVALID_SPAN
