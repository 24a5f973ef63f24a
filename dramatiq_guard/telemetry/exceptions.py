"""An exception as telemetry: a span event, a log record, or both, as the environment says.

``OTEL_SEMCONV_EXCEPTION_SIGNAL_OPT_IN`` is OpenTelemetry's switch: ``logs`` for log records only, ``logs/dup`` for
both, anything else for span events.  Texts and tracebacks are bounded, whatever the exception carries.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from ..dead_letters.evidence import describe_error
from ..version import __version__
from . import names
from .signals import complain, silent

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

__all__ = ["record"]

_SWITCH: Final = "OTEL_SEMCONV_EXCEPTION_SIGNAL_OPT_IN"


def wants_logs() -> bool:
    """Whether the environment asks for log records."""
    return bool(_asked() & {"logs", "logs/dup"})


def _asked() -> set[str]:
    return {part.strip() for part in os.environ.get(_SWITCH, "").split(",")}


def record(span: Span, context: Context, error: BaseException) -> None:
    """Record the exception that an attempt failed with.

    Parameters:
      span(Span): The attempt's span.
      context(Context): The context that the span is in.
      error(BaseException): The exception.
    """
    asked = _asked()
    as_log = "logs" in asked or "logs/dup" in asked
    as_event = span.is_recording() and ("logs/dup" in asked or "logs" not in asked)
    if not as_event and not as_log:
        return
    described = describe_error(error)
    attributes = {
        names.EXCEPTION_TYPE: described.type,
        names.EXCEPTION_MESSAGE: described.message,
        names.EXCEPTION_STACKTRACE: described.traceback,
    }
    if as_event:
        span.add_event(names.EVENT_EXCEPTION, attributes)
    if as_log:
        try:
            _emit(context, attributes)
        except (ImportError, TypeError):  # an API from before logs, or from before event names
            complain("exceptions as log records")


def _emit(context: Context, attributes: dict[str, str]) -> None:
    from opentelemetry._logs import LogRecord, SeverityNumber, get_logger_provider

    provider = get_logger_provider()
    if silent(provider):
        return
    from .. import clock

    provider.get_logger(names.SCOPE, __version__, names.SCHEMA_URL).emit(
        LogRecord(
            timestamp=clock.now() * 1_000_000,
            context=context,
            severity_text="ERROR",
            severity_number=SeverityNumber.ERROR,
            body=attributes[names.EXCEPTION_TYPE],
            attributes=attributes,
            event_name=names.LOG_EXCEPTION,
        )
    )
