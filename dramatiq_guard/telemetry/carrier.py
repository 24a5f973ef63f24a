"""Trace context in a message's options: the W3C traceparent, written and read by hand.

The carrier travels as JSON through every broker and past every other version of the library, so whatever is found in it
is checked, and rubbish reads as no context.  Baggage does not travel: it is the application's, and unbounded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

from ..delivery import CARRIER, carrier_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context

__all__ = ["AVAILABLE", "CREATION", "PREVIOUS", "creation_in", "links_to", "remote", "traceparent", "write"]

#: The context of the send that created the message; written once, never changed.
CREATION: Final = "tp"
#: What a vendor's sampler wants to travel along with it.
STATE: Final = "ts"
#: The context of the attempt before this one.
PREVIOUS: Final = "prev"
#: The UNIX time in milliseconds from which the message could run.
AVAILABLE: Final = "t"

#: What the W3C asks everybody to pass on at least.
_STATE_LIMIT: Final = 512
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.ASCII)


def traceparent(context: SpanContext) -> str:
    """A span's context as a W3C traceparent."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def remote(value: object, state: object = None) -> SpanContext | None:
    """Read a traceparent; ``None`` for anything that is not a valid one."""
    found = _TRACEPARENT.fullmatch(value) if isinstance(value, str) and len(value) < 256 else None
    if found is None or value[:2] == "ff":  # type: ignore[index]
        return None
    states = TraceState.from_header([state]) if isinstance(state, str) and len(state) <= _STATE_LIMIT else None
    trace_id, span_id, flags = found.groups()
    context = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)), states)
    return context if context.is_valid else None


def creation_in(carrier: Mapping[str, Any]) -> SpanContext | None:
    """The creation context that a carrier holds."""
    return remote(carrier.get(CREATION), carrier.get(STATE))


def links_to(*contexts: SpanContext | None) -> list[Link]:
    """Links to those contexts that there are."""
    return [Link(context) for context in contexts if context is not None]


def below(parent: SpanContext | None, context: Context) -> Context:
    """A context in which new spans become children of a span somewhere else; of none without a parent."""
    return context if parent is None else set_span_in_context(NonRecordingSpan(parent), context)


def write(options: dict[str, Any], entries: Mapping[str, Any], *, creation: SpanContext | None = None) -> None:
    """Write into a message's carrier.  The old one is replaced, not changed: copies of a message share it.

    Parameters:
      options(dict): The message's options.
      entries(Mapping): What is to be in it.
      creation(SpanContext | None): The creation context, where the message has none yet.
    """
    carrier = carrier_of(options)
    if creation is not None and creation.is_valid:
        carrier[CREATION] = traceparent(creation)
        state = creation.trace_state.to_header() if creation.trace_state else ""
        if state and len(state) <= _STATE_LIMIT:
            carrier[STATE] = state
    carrier.update(entries)
    options[CARRIER] = carrier
