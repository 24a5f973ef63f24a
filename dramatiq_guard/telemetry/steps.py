"""What happens to a message between its attempts: short spans, counters, and the settle span around them.

Every function takes plain values, never raises, and builds nothing where nothing is recorded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as contexts
from opentelemetry.trace import INVALID_SPAN, SpanKind, Status, StatusCode, get_current_span, set_span_in_context

from .. import clock
from ..errors import SettlementHeld
from . import names
from .attempts import Attempt, attempt_of
from .signals import complain, here, meters, quiet, recording, tracer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Token
    from types import TracebackType

    from opentelemetry.context import Context
    from opentelemetry.util.types import AttributeValue

    from ..delivery import Delivery

__all__ = [
    "ack_began",
    "ack_ended",
    "backed_off",
    "classified",
    "dead_lettered",
    "letters_purged",
    "settlement_held",
    "settling",
    "short_span",
]

_NOTHING: Final = nullcontext()


def short_span(name: str, attributes: Callable[[], dict[str, AttributeValue | None]]) -> None:
    """Export a moment as a span below what is going on, unless that is not sampled."""
    spans = tracer()
    if spans is None:
        return
    parent = get_current_span().get_span_context()
    if parent.is_valid and not parent.trace_flags.sampled:
        return
    known = {key: value for key, value in attributes().items() if value is not None}
    spans.start_span(name, attributes=known).end()


@recording
def classified(*, verdict: str, rule: str, why: str, error_type: str) -> None:
    """An exception was given its verdict.

    Parameters:
      verdict(str): What it means.
      rule(str): The rule that says so.
      why(str): The reason in a sentence.
      error_type(str): The name of its class.
    """
    short_span(
        names.SPAN_CLASSIFY,
        lambda: {names.VERDICT: verdict, names.RULE: rule, names.WHY: why, names.ERROR_TYPE: error_type},
    )
    instruments = meters()
    if instruments is not None:
        instruments.classified.add(1, {names.VERDICT: verdict, names.RULE: rule, names.ERROR_TYPE: error_type})


@recording
def backed_off(
    *, delay_ms: int, strategy: str, capped: bool, retry_after_ms: int | None = None, verdict: str | None = None
) -> None:
    """The delay of a message's next delivery was chosen.

    Parameters:
      delay_ms(int): The delay in milliseconds.
      strategy(str): How it was chosen.
      capped(bool): Whether it was cut to its upper bound.
      retry_after_ms(int | None): Milliseconds that the downstream asked for.
      verdict(str | None): What the error meant.
    """
    short_span(
        names.SPAN_BACKOFF,
        lambda: {
            names.DELAY: delay_ms / 1000,
            names.STRATEGY: strategy,
            names.CAPPED: capped,
            names.RETRY_AFTER: None if retry_after_ms is None else retry_after_ms / 1000,
            names.VERDICT: verdict,
        },
    )
    instruments = meters()
    if instruments is not None:
        attributes = {names.STRATEGY: strategy}
        if verdict is not None:
            attributes[names.VERDICT] = verdict
        instruments.retry_delay.record(delay_ms / 1000, attributes)


@recording
def dead_lettered(*, reason: str, actor: str, queue: str, fingerprint: str | None = None) -> None:
    """A message became a dead letter.

    Parameters:
      reason(str): The reason code.
      actor(str): The name of its actor, which may be unknown.
      queue(str): The name of its queue.
      fingerprint(str | None): The fingerprint of its error.
    """
    short_span(
        names.SPAN_DEAD_LETTER,
        lambda: {
            names.REASON: reason,
            names.ACTOR: actor,
            names.DESTINATION: queue,
            names.FINGERPRINT: fingerprint,
        },
    )
    instruments = meters()
    if instruments is not None:
        instruments.dead_letters.add(1, {names.REASON: reason, names.ACTOR: actor, names.DESTINATION: queue})


@recording
def letters_purged(*, by_age: int, by_count: int) -> None:
    """Retention dropped dead letters.

    Parameters:
      by_age(int): How many were too old.
      by_count(int): How many were too many.
    """
    instruments = meters()
    if instruments is None:
        return
    for bound, dropped in (("age", by_age), ("count", by_count)):
        if dropped:
            instruments.letters_purged.add(dropped, {names.BOUND: bound})


@recording
def settlement_held(*, what: str, why: str) -> None:
    """A settlement has to wait; the message stays unacked.

    Parameters:
      what(str): The part that could not be performed.
      why(str): The name of the error's class.
    """
    instruments = meters()
    if instruments is not None:
        instruments.held.add(1, {names.PART: what, names.ERROR_TYPE: why})


def settling(delivery: Delivery) -> AbstractContextManager[Any]:
    """A context manager around one try of the settlement, on whichever thread it runs.

    It takes up the attempt's context again.  The settle span lasts from the first try to the one that succeeds, however
    often the barrier held in between.

    Parameters:
      delivery(Delivery): The delivery that is settled; something is owed.
    """
    try:
        if tracer() is None:
            # The mark is wanted all the same: what is enqueued inside is new, whichever thread this is.
            return _Settling(None) if here.promoting else _NOTHING
        return _Settling(delivery)
    except Exception:  # noqa: BLE001 - exporters, processors and samplers are the user's
        complain("settling")
        return _NOTHING


class _Settling:
    __slots__ = ("delivery", "marked", "token")

    def __init__(self, delivery: Delivery | None) -> None:
        self.delivery = delivery
        self.token: Token[Context] | None = None
        self.marked = False

    def __enter__(self) -> None:
        self.marked, here.settling = here.settling, True
        if self.delivery is not None:
            self._start(self.delivery)

    @quiet
    def _start(self, delivery: Delivery) -> None:
        attempt = attempt_of(delivery)
        if attempt.settle is None:
            spans = tracer()
            attempt.settle_began = clock.monotonic()
            attempt.settle = INVALID_SPAN if spans is None else spans.start_span(names.SPAN_SETTLE, attempt.context)
        self.token = contexts.attach(set_span_in_context(attempt.settle, attempt.context))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        here.settling = self.marked
        if self.token is not None:
            contexts.detach(self.token)
        if self.delivery is not None and not isinstance(error, SettlementHeld):
            self._end(self.delivery, error)

    @quiet
    def _end(self, delivery: Delivery, error: BaseException | None) -> None:
        attempt = attempt_of(delivery)
        span, attempt.settle = attempt.settle, None
        if span is None:
            return
        if span.is_recording():
            held = clock.monotonic() - attempt.settle_began if delivery.holds else 0
            span.set_attributes(
                {
                    names.SENT: [due.name for due in delivery.dues if due.done],
                    names.HOLDS: delivery.holds,
                    names.HELD: held / 1000,
                }
            )
            if error is not None:
                span.set_attribute(names.ERROR_TYPE, type(error).__qualname__)
                span.set_status(Status(StatusCode.ERROR))
        span.end()


@quiet
def ack_began(delivery: Delivery, operation: str) -> None:
    """A message is about to be acked or nacked; the barrier may repeat this.

    Parameters:
      delivery(Delivery): Its delivery; only one that was attempted has such a span.
      operation(str): ``ack`` or ``nack``.
    """
    attempt, spans = delivery.span, tracer()
    if spans is None or not isinstance(attempt, Attempt):
        return
    if attempt.ack is not None:
        if attempt.ack[0] == operation:
            return
        attempt.ack[1].end()
    span = spans.start_span(
        f"{operation} {attempt.queue}",
        attempt.context,
        SpanKind.CLIENT,
        {
            names.SYSTEM: names.SYSTEM_NAME,
            names.OPERATION_NAME: operation,
            names.OPERATION_TYPE: "settle",
            names.DESTINATION: attempt.queue,
            names.MESSAGE_ID: attempt.message_id,
        },
    )
    attempt.ack = (operation, span)


@quiet
def ack_ended(delivery: Delivery) -> None:
    """A message has been acked or nacked."""
    attempt = delivery.span
    if isinstance(attempt, Attempt) and attempt.ack is not None:
        span, attempt.ack = attempt.ack[1], None
        span.end()
