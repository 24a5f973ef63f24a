"""The spans of messages on their way out: `send {queue}`, `retry {queue}` and the replay of a dead letter.

The life of a send:

1. Before the enqueue: a PRODUCER span begins, below whatever is going on here, and its context is written into the
   message as the creation context.  It is not attached: an enqueue that fails has no after hook that could detach it.
2. After the enqueue: the span ends, and the caller's message is as it was (some brokers enqueue the very object they
   were given, and sending it again must be a send of its own).
3. An enqueue that failed is noticed by the next one on the thread, and its span ends as an error.

A message that has a creation context keeps it.  One that comes from its own attempt is a retry of stock `Retries`; one
that a consumer's thread enqueues fell due, which is neither a span nor a count.

This module must not know any middleware or broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from dramatiq.common import q_name
from opentelemetry import context as contexts
from opentelemetry.trace import INVALID_SPAN, SpanKind, Status, StatusCode, get_current_span, set_span_in_context

from .. import clock
from ..delivery import CARRIER, carrier_of
from . import names
from .carrier import AVAILABLE, CREATION, PREVIOUS, creation_in, links_to, remote, traceparent, write
from .signals import complain, here, meters, quiet, tracer

if TYPE_CHECKING:
    from contextvars import Token
    from types import TracebackType

    from dramatiq import Message
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, Tracer

__all__ = ["Carrying", "OpenSend", "Sending", "replaying", "send_began", "send_ended"]

#: The error type of an enqueue that never came to its end: the error itself is not shown to any hook.
_UNSEEN: Final = "_OTHER"


class OpenSend:
    """One operation on a broker that has begun: its span, and what its metrics need.

    Parameters:
      message(Message): What is sent.
      operation(str): ``send``, ``retry``, or what else a successor is for.
      span(Span): The span; an invalid one where there is no tracer.
    """

    __slots__ = ("before", "began", "message", "operation", "queue", "span")

    def __init__(self, message: Message[Any], operation: str, span: Span) -> None:
        self.message = message
        self.operation = operation
        self.span = span
        self.queue = q_name(message.queue_name)
        self.before = message.options.get(CARRIER)
        self.began = clock.monotonic()

    def end(self, error_type: str | None = None) -> None:
        """End the span and count the message."""
        if error_type is not None:
            self.span.set_attribute(names.ERROR_TYPE, error_type)
            self.span.set_status(Status(StatusCode.ERROR))
        self.span.end()
        instruments = meters()
        if instruments is not None:
            attributes = {
                names.SYSTEM: names.SYSTEM_NAME,
                names.OPERATION_NAME: self.operation,
                names.DESTINATION: self.queue,
            }
            if error_type is not None:
                attributes[names.ERROR_TYPE] = error_type
            instruments.sent.add(1, attributes)
            instruments.operation_duration.record((clock.monotonic() - self.began) / 1000, attributes)

    def restore(self) -> None:
        """Give the caller's message back the carrier that it had."""
        if self.before is None:
            self.message.options.pop(CARRIER, None)
        else:
            self.message.options[CARRIER] = self.before


def _start(
    tracer: Tracer | None,
    message: Message[Any],
    operation: str,
    kind: SpanKind,
    *,
    name: str | None = None,
    links: list[Link] | None = None,
    context: Context | None = None,
) -> Span:
    if tracer is None:
        return INVALID_SPAN
    queue = q_name(message.queue_name)
    return tracer.start_span(
        name or f"{operation} {queue}",
        context,
        kind,
        {
            names.SYSTEM: names.SYSTEM_NAME,
            names.OPERATION_NAME: operation,
            names.OPERATION_TYPE: "send",
            names.DESTINATION: queue,
            names.MESSAGE_ID: message.message_id,
            names.ACTOR: message.actor_name,
        },
        links,
    )


@quiet
def send_began(message: Message[Any], delay: int | None) -> None:
    """A message is about to be enqueued."""
    if here.send is not None:
        _abandon()
    if here.promoting and not here.settling:
        return
    options = message.options
    available = clock.now() + (delay or 0)
    if here.carrying:
        write(options, {AVAILABLE: available})
        return
    attempt = here.attempt
    if attempt is not None and attempt.message_id == message.message_id:
        span = _start(tracer(), message, "retry", SpanKind.CLIENT, links=links_to(creation_in(carrier_of(options))))
        here.send = OpenSend(message, "retry", span)
        attempt.resent = True
        previous = attempt.span.get_span_context()
        known = {PREVIOUS: traceparent(previous)} if previous.is_valid else {}
        write(options, {AVAILABLE: available, **known})
        return
    carrier = options.get(CARRIER)
    if isinstance(carrier, dict) and CREATION in carrier:
        return
    sends = tracer()
    if sends is not None or meters() is not None:
        span = _start(sends, message, "send", SpanKind.PRODUCER)
        here.send = OpenSend(message, "send", span)
        write(options, {AVAILABLE: available}, creation=span.get_span_context())
    elif not isinstance(carrier, dict) or AVAILABLE not in carrier:
        # Whoever consumes it may have an SDK, and wants to know how long it waited.
        write(options, {AVAILABLE: available})


@quiet
def send_ended(message: Message[Any]) -> None:
    """A message has been enqueued."""
    send = here.send
    if send is not None and send.message.message_id == message.message_id:
        here.send = None
        send.restore()
        send.end()


def _abandon() -> None:
    send, here.send = here.send, None
    if send is not None:
        send.restore()
        send.end(_UNSEEN)


class Sending:
    """A context manager around an enqueue that the stack makes itself, at the settle barrier or for a replay.

    Its span is attached, so that what an instrumented client does appears below it.  An error passes through; the
    telemetry's own do not.

    Parameters:
      message(Message): What is sent.
      operation(str): What it is sent for.
    """

    __slots__ = ("carried", "message", "operation", "send", "token")

    def __init__(self, message: Message[Any], operation: str) -> None:
        self.message = message
        self.operation = operation
        self.send: OpenSend | None = None
        self.token: Token[Context] | None = None
        self.carried = False

    def start(self) -> Span:
        """Start the span."""
        links = links_to(creation_in(carrier_of(self.message.options)))
        return _start(tracer(), self.message, self.operation, SpanKind.CLIENT, links=links)

    def __enter__(self) -> Self:
        self.carried, here.carrying = here.carrying, True
        try:
            span = self.start()
            self.send = OpenSend(self.message, self.operation, span)
            if span.get_span_context().is_valid:
                self.token = contexts.attach(set_span_in_context(span))
        except Exception:  # noqa: BLE001 - exporters, processors and samplers are the user's
            complain("sending")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        here.carrying = self.carried
        try:
            if self.token is not None:
                contexts.detach(self.token)
            if self.send is not None:
                self.send.end(None if kind is None else kind.__qualname__)
        except Exception:  # noqa: BLE001 - as above
            complain("sending")


class Carrying:
    """`Sending` where there is no SDK: the message is marked with the time from which it can run, and that is all."""

    __slots__ = ("carried",)

    def __enter__(self) -> Self:
        self.carried, here.carrying = here.carrying, True
        return self

    def __exit__(self, *_: object) -> None:
        here.carrying = self.carried


class _Replaying(Sending):
    __slots__ = ("attributes", "original")

    def __init__(self, message: Message[Any], original: str | None, attributes: dict[str, str]) -> None:
        super().__init__(message, "replay")
        self.original = original
        self.attributes = attributes

    def start(self) -> Span:
        operator = get_current_span().get_span_context()
        original = remote(self.original)
        span = _start(
            tracer(),
            self.message,
            self.operation,
            SpanKind.PRODUCER,
            name=names.SPAN_REPLAY,
            links=links_to(original, operator if operator.is_valid else None),
            context=contexts.Context(),
        )
        if span.is_recording():
            span.set_attributes(self.attributes)
        known = {} if original is None else {PREVIOUS: self.original}
        write(self.message.options, known, creation=span.get_span_context())
        return span


def replaying(
    message: Message[Any], *, trace_id: str = "", span_id: str = "", reason: str = "", fingerprint: str = ""
) -> Sending:
    """A context manager around the enqueue of a dead letter's replay.

    The replay begins a trace of its own, which the replayed message joins; it links to the attempt that the letter died
    in and to the trace of whoever replays it.

    Parameters:
      message(Message): The copy to be sent.  Its creation context becomes this replay.
      trace_id(str): The trace that the letter's message died in.
      span_id(str): The span that it died in.
      reason(str): The reason code of the letter.
      fingerprint(str): The fingerprint of its error.
    """
    attributes = {names.REASON: reason, names.FINGERPRINT: fingerprint}
    original = f"00-{trace_id}-{span_id}-01" if trace_id and span_id else None
    return _Replaying(message, original, {name: value for name, value in attributes.items() if value})
