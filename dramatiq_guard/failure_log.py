"""What the worker says of a failure: a storm must not fill the disk.

Dramatiq's worker threads log every failure with its traceback before any middleware sees the error, which is most of
what a failed attempt costs.  A filter on that logger lets the traceback of each fingerprint through once a minute per
process, bounded, and makes one line of the others.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Literal

from . import clock, host
from .dead_letters.letter import compact_traceback, fingerprint, summarize_error
from .delivery import peek
from .policy.decision import Step

if TYPE_CHECKING:
    from dramatiq import Broker

    from .policy.decision import Decision

__all__ = ["LOG_MODES", "FailureLog", "LogMode"]

LogMode = Literal["throttled", "traceback", "summary"]
LOG_MODES: Final = ("throttled", "traceback", "summary")

#: How long, in milliseconds, a fingerprint's traceback is not repeated, and how many fingerprints are remembered.
QUIET: Final = 60_000
REMEMBERED: Final = 1_000


class FailureLog(logging.Filter):
    """A filter on the worker's logger.

    Parameters:
      broker(Broker): Whose deliveries it speaks of; the others' pass as they are.
      mode(LogMode): ``throttled``, ``traceback`` for every traceback, ``summary`` for none.
    """

    def __init__(self, broker: Broker, mode: LogMode) -> None:
        super().__init__()
        self.broker = broker
        self.mode = mode
        self._shown: dict[str, int] = {}

    def install(self) -> None:
        """Put the filter on the worker's logger, in place of an earlier one for the same broker."""
        logger = logging.getLogger(host.WORKER_LOGGER)
        for filter_ in list(logger.filters):
            if isinstance(filter_, FailureLog) and filter_.broker is self.broker:
                logger.removeFilter(filter_)
        logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten a record about a failure; hide one about a message that was merely put off."""
        if record.msg == host.SKIP_LOG_TEXT:
            delivery = peek()
            put_off = delivery is not None and delivery.decision is not None
            return not (put_off and delivery.decision.step in (Step.DEFER, Step.REQUEUE))  # type: ignore[union-attr]
        if record.msg != host.FAILURE_LOG_TEXT or not record.exc_info:
            return True
        delivery = peek()
        error = record.exc_info[1]
        if delivery is None or error is None or delivery.stack.broker is not self.broker:
            return True
        if self._shows(error):
            # Formatters that format tracebacks themselves take this text, which is bounded.
            record.exc_text = compact_traceback(error, 60, source=True)
            record.args = (_Short(delivery.message),)
            return True
        kind, text, place = delivery.summary or summarize_error(error, redact=delivery.stack.redact_text)
        # One line tells it all: where it has been decided what becomes of the message, that too.
        delivery.said = delivery.decision is not None
        record.msg = "Attempt %d of message %s (%s) failed: %s: %s at %s%s"
        record.args = (
            delivery.attempt,
            delivery.message_id,
            delivery.actor_name,
            kind,
            text,
            place,
            f"; {_fate(delivery.decision)}" if delivery.decision is not None else "",
        )
        record.exc_info = None
        return True

    def _shows(self, error: BaseException) -> bool:
        if self.mode != "throttled":
            return self.mode == "traceback"
        name = fingerprint(error)
        now = clock.monotonic()
        shown = self._shown.get(name)
        if shown is not None and now - shown < QUIET:
            return False
        if len(self._shown) >= REMEMBERED:
            self._shown.clear()
        self._shown[name] = now
        return True


def _fate(decision: Decision) -> str:
    return f"given up ({decision.reason}): {decision.why}" if decision.step is Step.GIVE_UP else decision.why


class _Short:
    """A message in a log line, whose arguments may be ten megabytes."""

    __slots__ = ("message",)

    def __init__(self, message: Any) -> None:
        self.message = message

    def __str__(self) -> str:
        text = str(self.message)
        return text if len(text) <= 500 else text[:500] + "…"
