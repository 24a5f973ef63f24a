"""The `process {queue}` span: one attempt of one message, from the outermost before hook to the outermost after hook.

The life of an attempt:

1. Before: whatever the thread still holds of an earlier message is cleared (an interrupt can skip an after hook).  The
   span begins as a child of the send that created the message, with links to it and to the attempt before, and its
   context is attached: what the actor does and sends happens below it.
2. After, or after a skip: the outcome is read off the delivery, the span ends, its context is detached, once.
3. At the settle barrier, which may run on any thread, `settling` takes the context up again.

This module must not know any middleware or broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dramatiq.common import q_name
from opentelemetry import context as contexts
from opentelemetry.trace import INVALID_SPAN, NonRecordingSpan, SpanKind, Status, StatusCode, set_span_in_context

from .. import clock
from ..delivery import carrier_of, count
from . import exceptions, names
from .carrier import AVAILABLE, PREVIOUS, STATE, below, creation_in, links_to, remote
from .outcome import failed, outcome_of
from .signals import drops_unsampled, here, idle, meters, quiet, tracer

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from ..delivery import Delivery
    from .signals import Meters

__all__ = ["Attempt", "attempt_began", "attempt_ended", "attempt_of"]


_EMPTY: Final = contexts.Context()


class Attempt:
    """What telemetry keeps of one delivery, in `delivery.span`.

    Parameters:
      message_id(str): The id of its message.
      queue(str): The name of its queue.
      span(Span): Its process span; an invalid one where there is no tracer, or no attempt.
      context(Context): The context that the span is in.
      instruments(Meters | None): What counted it in, and will count it out.
    """

    __slots__ = (
        "ack",
        "context",
        "ended",
        "instruments",
        "message_id",
        "queue",
        "resent",
        "settle",
        "settle_began",
        "span",
        "token",
    )

    def __init__(self, message_id: str, queue: str, span: Span, context: Context, instruments: Meters | None) -> None:
        self.message_id = message_id
        self.queue = queue
        self.span = span
        self.context = context
        self.instruments = instruments
        self.token: Token[Context] | None = None
        self.ended = False
        #: Stock `Retries` has enqueued the message again.
        self.resent = False
        #: The settle span, from its first try until it succeeds, and when that first try was.
        self.settle: Span | None = None
        self.settle_began = 0
        #: The operation and the span of an ack or nack that has begun.
        self.ack: tuple[str, Span] | None = None

    @property
    def attributes(self) -> dict[str, str]:
        """What its measurements have in common."""
        return {names.SYSTEM: names.SYSTEM_NAME, names.DESTINATION: self.queue}

    def detach(self) -> None:
        """Leave the context, if this thread is still in it."""
        token, self.token = self.token, None
        if token is not None:
            contexts.detach(token)


def attempt_began(delivery: Delivery, *, link_only: bool = False) -> None:
    """A message is about to be processed on this thread.

    Parameters:
      delivery(Delivery): Its delivery.
      link_only(bool): Whether the span begins a trace of its own, which only links to that of the send.
    """
    if here.attempt is not None or not idle():
        _begin(delivery, link_only)


@quiet
def _begin(delivery: Delivery, link_only: bool) -> None:
    if here.attempt is not None:
        _clear()
    spans, instruments = tracer(), meters()
    if spans is None and instruments is None:
        return
    delivery.started_at = clock.monotonic()
    carrier = carrier_of(delivery.options)
    message_id, queue = delivery.message_id, q_name(delivery.message.queue_name)
    if spans is not None:
        span, context = _start(spans, delivery, queue, carrier, link_only)
        attempt = Attempt(message_id, queue, span, context, instruments)
        delivery.span = here.attempt = attempt
        if span.get_span_context().is_valid:
            attempt.token = contexts.attach(context)
    else:
        delivery.span = here.attempt = attempt = Attempt(message_id, queue, INVALID_SPAN, _EMPTY, instruments)
    if instruments is not None:
        _count_in(instruments, attempt, delivery, carrier)


def _start(
    spans: Tracer, delivery: Delivery, queue: str, carrier: dict[str, Any], link_only: bool
) -> tuple[Span, Context]:
    creation = creation_in(carrier)
    if creation is not None and not link_only and not creation.trace_flags.sampled and drops_unsampled():
        # Nothing will come of it, and that is what everything below it has to know.
        unsampled = NonRecordingSpan(creation)
        return unsampled, set_span_in_context(unsampled, _EMPTY)
    # Not the thread's own context: whatever is in it belongs to somebody else.
    context = below(None if link_only else creation, _EMPTY)
    span = spans.start_span(
        f"process {queue}",
        context,
        SpanKind.CONSUMER,
        {
            names.SYSTEM: names.SYSTEM_NAME,
            names.OPERATION_NAME: "process",
            names.OPERATION_TYPE: "process",
            names.DESTINATION: queue,
            names.MESSAGE_ID: delivery.message_id,
            names.ACTOR: delivery.actor_name,
            names.ATTEMPT: delivery.attempt,
        },
        links_to(creation, remote(carrier.get(PREVIOUS), carrier.get(STATE))),
    )
    return span, set_span_in_context(span, context)


def _count_in(instruments: Meters, attempt: Attempt, delivery: Delivery, carrier: dict[str, Any]) -> None:
    instruments.in_flight.add(1, attempt.attributes)
    attributes = {**attempt.attributes, names.OPERATION_NAME: "process"}
    instruments.consumed.add(1, attributes)
    available = count(carrier.get(AVAILABLE))
    # A later time of stock `Retries` says that whoever sent this retry did not know the carrier.
    if available and count(delivery.options.get("requeue_timestamp")) <= available:
        instruments.wait_duration.record(max(0, clock.now() - available) / 1000, attributes)


@quiet
def attempt_ended(
    delivery: Delivery, error: BaseException | None = None, *, skipped: bool = False, throws: Any = None
) -> None:
    """A message has been processed, or skipped.  Only the first call for a delivery does anything.

    Parameters:
      delivery(Delivery): Its delivery.
      error(BaseException | None): What its actor, or a hook, raised.
      skipped(bool): Whether it was skipped.
      throws: The errors that its actor announces.
    """
    attempt = delivery.span
    if not isinstance(attempt, Attempt) or attempt.ended:
        return
    attempt.ended = True
    if error is None and attempt.instruments is None and not attempt.span.is_recording():
        _close(attempt)
        return
    try:
        is_failure = failed(delivery, error, throws)
        outcome = outcome_of(delivery, error, skipped=skipped, resent=attempt.resent)
        if error is not None and is_failure:
            exceptions.record(attempt.span, attempt.context, error)
        _describe(attempt, outcome, type(error).__qualname__ if is_failure else None)
        _count_out(attempt, delivery, outcome, type(error).__qualname__ if is_failure else None)
    finally:
        _close(attempt)


def _describe(attempt: Attempt, outcome: str | None, error_type: str | None) -> None:
    span = attempt.span
    if not span.is_recording():
        return
    if outcome is not None:
        span.set_attribute(names.OUTCOME, outcome)
    if error_type is not None:
        span.set_attribute(names.ERROR_TYPE, error_type)
        span.set_status(Status(StatusCode.ERROR))


def _count_out(attempt: Attempt, delivery: Delivery, outcome: str | None, error_type: str | None) -> None:
    if attempt.instruments is None:
        return
    attributes = {
        **attempt.attributes,
        names.OPERATION_NAME: "process",
        names.ACTOR: delivery.actor_name,
    }
    if outcome is not None:
        attributes[names.OUTCOME] = outcome
    if error_type is not None:
        attributes[names.ERROR_TYPE] = error_type
    attempt.instruments.process_duration.record((clock.monotonic() - delivery.started_at) / 1000, attributes)


def _close(attempt: Attempt) -> None:
    """End the span and leave its context; again, if an interrupt came between."""
    try:
        if attempt.instruments is not None:
            _count_down(attempt)
        if attempt.span.is_recording():
            quiet(attempt.span.end)()
    finally:
        attempt.detach()
        if here.attempt is attempt:
            here.attempt = None


@quiet
def _count_down(attempt: Attempt) -> None:
    instruments, attempt.instruments = attempt.instruments, None
    if instruments is not None:
        instruments.in_flight.add(-1, attempt.attributes)


@quiet
def _clear() -> None:
    """End what an attempt left on this thread whose after hook was skipped, or cut short, by an interrupt."""
    attempt = here.attempt
    if attempt is None:
        return
    if not attempt.ended:
        attempt.ended = True
        quiet(_describe)(attempt, "interrupted", None)
    _close(attempt)


def attempt_of(delivery: Delivery) -> Attempt:
    """What telemetry keeps of a delivery; made up for one that never became an attempt (an unknown actor)."""
    attempt = delivery.span
    if not isinstance(attempt, Attempt):
        creation = creation_in(carrier_of(delivery.options))
        queue = q_name(delivery.message.queue_name)
        attempt = Attempt(delivery.message_id, queue, INVALID_SPAN, below(creation, _EMPTY), None)
        attempt.ended = True
        delivery.span = attempt
    return attempt
