"""What happens to an idempotency key: a short span, a count and a duration for each word with its store.

It must not know any store; how a claim was answered comes in as a plain word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from opentelemetry.trace import Status, StatusCode, get_current_span

from .. import clock
from . import names
from .signals import idle, meters, quiet, tracer

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.trace import Span

__all__ = ["KeyOperation", "key_operation"]


_SPANS: Final = {
    "claim": names.SPAN_CLAIM,
    "complete": names.SPAN_COMPLETE,
    "release": names.SPAN_RELEASE,
    "step": names.SPAN_STEP,
}


class KeyOperation:
    """One word with the store about a key: `outcome` and `fence` are set before it ends.

    Parameters:
      name(str): ``claim``, ``complete``, ``release`` or ``step``.
      engine(str): What kind of store it is: ``redis``, ``postgresql``, ``memory``.
    """

    __slots__ = ("_began", "_span", "engine", "fence", "name", "outcome")

    def __init__(self, name: str, engine: str) -> None:
        self.name = name
        self.engine = engine
        self.outcome = ""
        self.fence = 0
        self._span: Span | None = None
        self._began = 0

    def __enter__(self) -> Self:
        self._start()
        return self

    @quiet
    def _start(self) -> None:
        self._began = clock.monotonic()
        spans = tracer()
        parent = get_current_span().get_span_context()
        if spans is not None and not (parent.is_valid and not parent.trace_flags.sampled):
            self._span = spans.start_span(_SPANS[self.name])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    @quiet
    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self.outcome = "unavailable"
        attributes: dict[str, Any] = {names.OUTCOME: self.outcome, names.DB_SYSTEM: self.engine}
        if error is not None:
            attributes[names.ERROR_TYPE] = type(error).__qualname__
        span = self._span
        if span is not None:
            if span.is_recording():
                span.set_attributes(attributes | ({names.FENCE: self.fence} if self.fence else {}))
                if error is not None:
                    span.set_status(Status(StatusCode.ERROR))
            span.end()
        instruments = meters()
        if instruments is not None:
            attributes[names.KEY_OPERATION] = self.name
            instruments.key_decisions.add(1, attributes)
            instruments.key_duration.record((clock.monotonic() - self._began) / 1000, attributes)


class _Idle(KeyOperation):
    """Stands in where nothing is recorded."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return


_IDLE = _Idle("", "")


def key_operation(name: str, engine: str) -> KeyOperation:
    """A context manager around one word with the store of the keys.

    Parameters:
      name(str): ``claim``, ``complete``, ``release`` or ``step``.
      engine(str): What kind of store it is.
    """
    return _IDLE if idle() else KeyOperation(name, engine)
