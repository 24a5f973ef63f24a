"""Traces and metrics: the one place that knows OpenTelemetry, and the functions by which the library speaks to it.

Middlewares, the settle barrier and the dead letters say what happened, in plain values; nothing here ever raises into
them, and without an SDK nothing is built.  What is exported, under which names, is in `names`;
docs/telemetry.md has the tables.

============  ==========================================================================
`names`       every span, metric and attribute name
`signals`     the tracer and the instruments of whatever SDK is there
`carrier`     trace context in a message's options
`sends`       messages on their way out: ``send``, ``retry``, ``dramatiq_guard.replay``
`attempts`    ``process``: one attempt, and the context that it runs in
`outcome`     what became of an attempt, in one word
`exceptions`  an exception as span event or log record
`steps`       what happens between attempts, and the settle span
`setup`       `configure_telemetry`
`breakers`    what the circuit breakers do
`keys`        what happens to an idempotency key
`handover`    the bounded flush
============  ==========================================================================

It must not know any middleware, store or broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.trace import get_current_span

from .attempts import attempt_began, attempt_ended
from .breakers import breaker_is, breaker_passed
from .carrier import traceparent
from .ends import crashed, crashes_uncounted, ended, job_stuck, quarantined
from .handover import FLUSH_TIMEOUT, flush
from .keys import key_operation
from .sends import Carrying, Sending, replaying, send_began, send_ended
from .setup import boot, configure_telemetry
from .signals import here, idle, quiet
from .steps import (
    ack_began,
    ack_ended,
    backed_off,
    classified,
    dead_lettered,
    letters_purged,
    settlement_held,
    settling,
)

if TYPE_CHECKING:
    from dramatiq import Message

__all__ = [
    "FLUSH_TIMEOUT",
    "ack_began",
    "ack_ended",
    "attempt_began",
    "attempt_ended",
    "backed_off",
    "boot",
    "breaker_is",
    "breaker_passed",
    "classified",
    "configure_telemetry",
    "crashed",
    "crashes_uncounted",
    "current_ids",
    "current_traceparent",
    "dead_lettered",
    "ended",
    "flush",
    "job_stuck",
    "key_operation",
    "letters_purged",
    "promotes",
    "quarantined",
    "replaying",
    "send_began",
    "send_ended",
    "sending",
    "settlement_held",
    "settling",
]


@quiet
def current_traceparent() -> str | None:
    """The W3C traceparent of the span that is current here; ``None`` where none is recorded."""
    span = get_current_span()
    return traceparent(span.get_span_context()) if span.is_recording() else None


@quiet
def current_ids() -> tuple[str, str] | None:
    """The trace id and the span id that are current here, in hexadecimal; ``None`` where none is recorded."""
    span = get_current_span()
    if not span.is_recording():
        return None
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def sending(message: Message[Any], kind: str) -> Sending | Carrying:
    """A context manager around the enqueue of a message's successor, at the settle barrier.

    Parameters:
      message(Message): The successor.
      kind(str): What it is for: ``retry``, ``defer``, ``requeue``.
    """
    return Carrying() if idle() else Sending(message, kind)


def promotes() -> None:
    """Say that this thread is a consumer's: what it enqueues outside a settlement is a delayed message falling due."""
    here.promoting = True
