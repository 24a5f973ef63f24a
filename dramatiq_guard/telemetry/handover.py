"""Handing over what has been recorded, in a bounded time, whatever the SDK and the collector do.

The SDK's own ``force_flush`` and ``shutdown`` do not keep to their timeouts: with a collector that is down they go on
for ten seconds and more.  So each provider's runs in a daemon thread, which is left behind when its time is over.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import metrics, trace

from .. import clock
from . import exceptions
from .signals import complain, logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FLUSH_TIMEOUT", "flush", "flush_at_exit"]

#: Milliseconds that the end of a process may spend on it.
FLUSH_TIMEOUT: Final = 5_000


class _Flush:
    """The flush of one provider, on a thread of its own.

    Parameters:
      force_flush(Callable): The provider's.
      timeout_ms(int): What it is told; it may not listen.
      start(threading.Event | None): What it waits for.
    """

    def __init__(self, force_flush: Callable[..., Any], timeout_ms: int, start: threading.Event | None = None) -> None:
        self.force_flush = force_flush
        self.timeout_ms = timeout_ms
        self.start = start
        self.finished = threading.Event()
        self.failed = False
        threading.Thread(target=self._run, name="dramatiq-guard-flush", daemon=True).start()

    def _run(self) -> None:
        if self.start is not None:
            self.start.wait()
        try:
            self.force_flush(self.timeout_ms)
        except Exception as error:  # noqa: BLE001 - the meter provider raises when a reader fails
            self.failed = True
            logger.warning("Telemetry could not be flushed: %.500r", error)
        finally:
            self.finished.set()


def flush(timeout_ms: int = FLUSH_TIMEOUT) -> bool:
    """Hand over what has been recorded.

    Parameters:
      timeout_ms(int): The number of milliseconds to wait.

    Returns:
      bool: Whether all of it was done in time.  It may have been done by giving up: exporters do not say.
    """
    try:
        flushes = [_Flush(force_flush, timeout_ms) for force_flush in _providers()]
    except Exception:  # noqa: BLE001 - no thread can be started any more
        complain("flush")
        return False
    return _wait(flushes, timeout_ms)


def flush_at_exit() -> None:
    """Have this process flush when it exits.  The threads start now, because later they may not (Python 3.12)."""
    process = os.getpid()
    leaving = threading.Event()
    flushes = [_Flush(force_flush, FLUSH_TIMEOUT, leaving) for force_flush in _providers()]

    def at_exit() -> None:
        if os.getpid() == process:  # threads do not come along into a fork
            leaving.set()
            _wait(flushes, FLUSH_TIMEOUT)
        else:
            flush()

    atexit.register(at_exit)


def _wait(flushes: list[_Flush], timeout_ms: int) -> bool:
    deadline = clock.monotonic() + timeout_ms
    done = [clock.wait(each.finished, deadline - clock.monotonic()) and not each.failed for each in flushes]
    return all(done)


def _providers() -> list[Callable[..., Any]]:
    providers: list[Any] = [trace.get_tracer_provider(), metrics.get_meter_provider()]
    if exceptions.wants_logs():
        from opentelemetry._logs import get_logger_provider

        providers.append(get_logger_provider())
    return [provider.force_flush for provider in providers if hasattr(provider, "force_flush")]
