"""A message's whole way is one trace, on a broker in memory and on Redis."""

from __future__ import annotations

import dramatiq
import pytest
from dramatiq.middleware import AgeLimit, Middleware, SkipMessage
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from dramatiq_guard.middleware.tracing import Tracing
from tests.telemetry.conftest import Recorder, working


def parent_of(span: ReadableSpan, among: list[ReadableSpan]) -> str | None:
    """The name of a span's parent."""
    names = {each.context.span_id: each.name for each in among}
    return names.get(span.parent.span_id) if span.parent else None


def test_retries_stay_in_the_trace_of_the_send(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """Send, two failures and the success are one trace, each attempt linked to the one before."""
    runs = []

    @dramatiq.actor(min_backoff=1, max_backoff=5)
    def flaky() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise ConnectionError("reset by peer")

    flaky.send()
    with working(broker):
        processed = recorder.wait("process default", 3)

    assert len(recorder.traces) == 1
    send = recorder.one("send default")
    assert [parent_of(span, recorder.spans) for span in processed] == ["send default"] * 3
    assert [span.attributes["dramatiq.message.attempt"] for span in processed] == [1, 2, 3]
    assert [span.attributes["dramatiq_guard.outcome"] for span in processed] == ["retried", "retried", "succeeded"]
    assert [span.status.status_code for span in processed] == [StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET]
    links = [{link.context.span_id for link in span.links} for span in processed]
    ids = [span.context.span_id for span in processed]
    assert links == [{send.context.span_id}, {send.context.span_id, ids[0]}, {send.context.span_id, ids[1]}]
    retries = recorder.named("retry default")
    assert [span.kind for span in retries] == [SpanKind.CLIENT] * 2
    assert [span.parent.span_id for span in retries] == ids[:2]
    assert [[link.context.span_id for link in span.links] for span in retries] == [[send.context.span_id]] * 2


def test_a_retry_counts_once_and_delay_moves_do_not(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """Two messages sent: the message, and its retry; moving the retry from the delay queue is no third."""
    runs = []

    @dramatiq.actor(min_backoff=1, max_backoff=5)
    def flaky() -> None:
        runs.append(1)
        if len(runs) < 2:
            raise ConnectionError

    flaky.send_with_options(delay=5)
    with working(broker):
        recorder.wait("process default", 2)

    assert recorder.total("messaging.client.sent.messages", operation="send") == 1
    assert recorder.total("messaging.client.sent.messages", operation="retry") == 1
    assert recorder.total("messaging.client.sent.messages") == 2
    assert recorder.total("messaging.client.consumed.messages") == 2
    assert recorder.total("messaging.client.operation.duration") == 2
    assert recorder.total("messaging.process.duration", outcome="succeeded") == 1
    assert recorder.total("messaging.process.duration", outcome="retried", type="ConnectionError") == 1
    assert recorder.total("dramatiq_guard.messages.in_flight") == 0


def test_a_delayed_message_stays_in_its_trace(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """The move from the delay queue makes no span and no trace, and the queue's name has no suffix."""

    @dramatiq.actor
    def later() -> None:
        pass

    later.send_with_options(delay=20)
    with working(broker):
        recorder.wait("process default")

    assert [span.name for span in recorder.spans] == ["send default", "process default"]
    assert len(recorder.traces) == 1
    assert {span.attributes["messaging.destination.name"] for span in recorder.spans} == {"default"}


def test_the_wait_of_a_delayed_message_begins_when_it_is_due(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """The delay that was asked for is no waiting."""

    @dramatiq.actor
    def later() -> None:
        pass

    later.send_with_options(delay=300)
    with working(broker):
        recorder.wait("process default")

    (point,) = recorder.points("dramatiq_guard.message.wait.duration")
    send, process = recorder.one("send default"), recorder.one("process default")
    since_sent = (process.start_time - send.start_time) / 1e9
    assert point.count == 1
    assert 0 <= point.sum <= since_sent - 0.25


def test_a_pipeline_is_one_trace(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """Each stage is sent by the settlement of the stage before, below its attempt."""

    @dramatiq.actor
    def double(number: int) -> int:
        return number * 2

    (double.message(1) | double.message() | double.message()).run()
    with working(broker):
        processed = recorder.wait("process default", 3)

    assert len(recorder.traces) == 1
    sends = recorder.named("send default")
    settled = recorder.named("dramatiq_guard.settle")
    assert [span.parent.span_id for span in settled] == [span.context.span_id for span in processed[:2]]
    assert [span.parent and span.parent.span_id for span in sends] == [
        None,
        *(span.context.span_id for span in settled),
    ]
    assert [span.parent.span_id for span in processed] == [span.context.span_id for span in sends]


def test_what_an_actor_sends_is_below_its_attempt(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """A message sent by an actor joins the actor's trace, and the actor's own spans too."""

    @dramatiq.actor(queue_name="inner")
    def inner() -> None:
        pass

    @dramatiq.actor(queue_name="outer")
    def outer() -> None:
        inner.send()

    outer.send()
    with working(broker):
        recorder.wait("process inner")

    assert len(recorder.traces) == 1
    assert recorder.one("send inner").parent.span_id == recorder.one("process outer").context.span_id


def test_a_skip_leaves_nothing_behind(broker: dramatiq.Broker, recorder: Recorder) -> None:
    """The message after a skipped one is in its own trace, and the skip is no error."""

    class Skips(Middleware):
        def before_process_message(self, broker: dramatiq.Broker, message: dramatiq.broker.MessageProxy) -> None:
            if message.actor_name == "unwanted":
                raise SkipMessage

    broker.add_middleware(Skips())
    current = []

    @dramatiq.actor(queue_name="unwanted")
    def unwanted() -> None:
        pass

    @dramatiq.actor(queue_name="wanted")
    def wanted() -> None:
        current.append(get_current_span().get_span_context().trace_id)

    unwanted.send()
    with working(broker):
        skipped = recorder.wait("process unwanted")[0]
        wanted.send()
        processed = recorder.wait("process wanted")[0]

    assert skipped.attributes["dramatiq_guard.outcome"] == "skipped"
    assert skipped.status.status_code is StatusCode.UNSET
    assert processed.context.trace_id != skipped.context.trace_id
    assert current == [processed.context.trace_id]


def test_link_only_begins_a_trace_of_its_own(stub_broker: dramatiq.Broker, recorder: Recorder) -> None:
    """With link_only an attempt is a root span that links to the send."""
    stub_broker.add_middleware(Tracing(link_only=True), before=AgeLimit)

    @dramatiq.actor
    def work() -> None:
        pass

    work.send()
    with working(stub_broker):
        process = recorder.wait("process default")[0]

    send = recorder.one("send default")
    assert process.parent is None
    assert process.context.trace_id != send.context.trace_id
    assert [link.context.span_id for link in process.links] == [send.context.span_id]


def test_settle_spans_are_asked_for(stub_broker: dramatiq.Broker, recorder: Recorder) -> None:
    """Acks and nacks are spans only with settle_spans, below the attempt that they end."""
    stub_broker.add_middleware(Tracing(settle_spans=True), before=AgeLimit)

    @dramatiq.actor(max_retries=0)
    def work(fails: bool) -> None:
        if fails:
            raise ValueError

    work.send(False)
    work.send(True)
    with working(stub_broker):
        recorder.wait("ack default")
        recorder.wait("nack default")

    processed = recorder.named("process default")
    assert recorder.one("ack default").parent.span_id == processed[0].context.span_id
    assert recorder.one("nack default").parent.span_id == processed[1].context.span_id
    assert recorder.one("nack default").attributes["messaging.operation.type"] == "settle"
    assert [span.attributes["dramatiq_guard.outcome"] for span in processed] == ["succeeded", "dead_lettered"]


@pytest.mark.parametrize(
    ("error", "options", "outcome", "status"),
    [
        (ValueError("no"), {"max_retries": 0}, "dead_lettered", StatusCode.ERROR),
        (ValueError("no"), {"throws": ValueError}, "dead_lettered", StatusCode.UNSET),
        (dramatiq.Retry("later", delay=1), {"max_retries": 1}, "retried", StatusCode.UNSET),
        (dramatiq.RateLimitExceeded("later"), {"min_backoff": 1, "max_backoff": 1}, "retried", StatusCode.UNSET),
        (SystemExit(3), {"max_retries": 0}, "dead_lettered", StatusCode.ERROR),
    ],
)
def test_only_a_failure_is_an_error(
    tracing_stub: dramatiq.Broker,
    recorder: Recorder,
    error: BaseException,
    options: dict,
    outcome: str,
    status: StatusCode,
) -> None:
    """A retry that was asked for, a used-up rate and what `throws` announces are outcomes, no errors; none is OK."""

    @dramatiq.actor(**options)
    def work() -> None:
        raise error

    work.send()
    with working(tracing_stub):
        process = recorder.wait("process default")[0]

    assert process.attributes["dramatiq_guard.outcome"] == outcome
    assert process.status.status_code is status
    assert (process.attributes.get("error.type") == type(error).__qualname__) is (status is StatusCode.ERROR)
