"""Where the tracer and the instruments come from: whatever OpenTelemetry SDK the process has, looked up lazily.

A provider may be set after this is imported, and after a fork; so the tracer and the instruments are kept per provider
and made anew when another one is there.  Without an SDK the answers are ``None``, and callers build nothing: that is
what "costs next to nothing" rests on.

Nothing here may touch a message: a telemetry that breaks is logged once, and work goes on.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from opentelemetry import metrics, trace
from opentelemetry.environment_variables import OTEL_PYTHON_METER_PROVIDER, OTEL_PYTHON_TRACER_PROVIDER
from opentelemetry.metrics import Observation

from ..version import __version__
from . import names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.metrics import Histogram, Meter, MeterProvider
    from opentelemetry.trace import Tracer, TracerProvider

    from .attempts import Attempt
    from .sends import OpenSend

__all__ = [
    "Meters",
    "breakers",
    "complain",
    "drops_unsampled",
    "here",
    "idle",
    "meters",
    "on_first_use",
    "quiet",
    "recording",
    "silent",
    "tracer",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

logger = logging.getLogger("dramatiq_guard.telemetry")

#: Seconds.  The conventions' own for durations of work, then some that reach Dramatiq's longest waits.
_WORK = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 300, 600)
_WAIT = (0.01, 0.1, 0.5, 1, 5, 15, 30, 60, 300, 900, 3_600, 21_600, 86_400, 604_800)


class _Here(threading.local):
    """What a thread is doing, as far as its spans are concerned."""

    #: The attempt whose context is attached.
    attempt: Attempt | None = None
    #: The send whose after hook has not come yet.
    send: OpenSend | None = None
    #: Inside `sending` or `replaying`, which make the span themselves.
    carrying: bool = False
    #: Inside `settling`: what is enqueued here is new, even on a consumer's thread.
    settling: bool = False
    #: A consumer's thread, which enqueues delayed messages when they fall due.
    promoting: bool = False


here = _Here()


def quiet(function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Decorate a function whose failure must not touch a message: it is logged once, and the answer is ``None``."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            return function(*args, **kwargs)
        except Exception:  # noqa: BLE001 - exporters, processors and samplers are the user's
            complain(function.__qualname__)
            return None

    return call


_complained: set[str] = set()


def complain(what: str) -> None:
    """Log the exception being handled, the first time that this part of the telemetry breaks in this process."""
    if what not in _complained:
        _complained.add(what)
        logger.warning(
            "Telemetry failed in %s; messages are not affected. This is logged once.",
            what,
            exc_info=True,  # noqa: LOG014 - every caller is handling one
        )


_first_use: Callable[[], None] | None = None


def on_first_use(set_up: Callable[[], None] | None) -> None:
    """Have the SDK set up by this function when the process first needs a tracer or a meter."""
    global _first_use  # noqa: PLW0603 - one process has one telemetry
    _first_use = set_up


def silent(provider: object) -> bool:
    """Whether a provider is one of the API's own, which record nothing."""
    return type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics", "opentelemetry._logs"))


# Where there is no SDK, the API looks into the environment each time that it is asked for a provider, which is most of
# what telemetry would cost there.  So its own variables are looked at first; where they have moved, it is asked.
_MOVED: Final = object()
_trace_globals: Final[dict[str, Any]] = vars(trace)
_metrics_globals: Final[dict[str, Any]] = metrics.get_meter_provider.__globals__
_BY_ENVIRONMENT: Final = not {OTEL_PYTHON_TRACER_PROVIDER, OTEL_PYTHON_METER_PROVIDER}.isdisjoint(os.environ)

_tracer: tuple[TracerProvider | None, Tracer | None] = (None, None)
_drops_unsampled = False
_meters: tuple[MeterProvider | None, Meters | None] = (None, None)


def idle() -> bool:
    """Whether nothing can be recorded: there is no SDK, and none is to be set up."""
    return (
        _trace_globals.get("_TRACER_PROVIDER", _MOVED) is None
        and _metrics_globals.get("_METER_PROVIDER", _MOVED) is None
        and _first_use is None
        and not _BY_ENVIRONMENT
    )


def recording(function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Decorate a function that only records: it is `quiet`, and not even called where nothing can be recorded."""
    record = quiet(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        return None if idle() else record(*args, **kwargs)

    return call


def tracer() -> Tracer | None:
    """The tracer of the provider that is set now; ``None`` without an SDK."""
    global _tracer, _drops_unsampled  # noqa: PLW0603 - kept per provider
    if (set_up := _first_use) is not None:
        set_up()
    if _trace_globals.get("_TRACER_PROVIDER", _MOVED) is None and not _BY_ENVIRONMENT:
        return None
    provider = trace.get_tracer_provider()
    known, answer = _tracer
    if provider is not known:
        answer = None if silent(provider) else provider.get_tracer(names.SCOPE, __version__, names.SCHEMA_URL)
        _drops_unsampled = _surely_drops(answer)
        _tracer = (provider, answer)
    return answer


def drops_unsampled() -> bool:
    """Whether the tracer is known to drop whatever is below a remote span that is not sampled, without being asked."""
    return _drops_unsampled


def _surely_drops(tracer: Tracer | None) -> bool:
    try:
        sampler = str(tracer.sampler.get_description())  # type: ignore[union-attr]  # the SDK's has one
    except Exception:  # noqa: BLE001 - another SDK, or a sampler of the user's
        return False
    below = "remoteParentNotSampled:AlwaysOffSampler"
    return sampler == "AlwaysOffSampler" or (sampler.startswith("ParentBased{") and below in sampler)


def meters() -> Meters | None:
    """The instruments of the provider that is set now; ``None`` without an SDK."""
    global _meters  # noqa: PLW0603 - kept per provider
    if (set_up := _first_use) is not None:
        set_up()
    if _metrics_globals.get("_METER_PROVIDER", _MOVED) is None and not _BY_ENVIRONMENT:
        return None
    provider = metrics.get_meter_provider()
    known, answer = _meters
    if provider is not known:
        meter = None if silent(provider) else provider.get_meter(names.SCOPE, __version__, names.SCHEMA_URL)
        answer = None if meter is None else Meters(meter)
        _meters = (provider, answer)
    return answer


#: The mode of each breaker that this process knows, by downstream; written by `breakers`.
breakers: Final[dict[str, str]] = {}
_STATES: Final = {"closed": 0, "forced_closed": 0, "recovering": 1, "open": 2, "forced_open": 3}


def _breaker_states(_: object) -> list[Observation]:
    return [Observation(_STATES.get(mode, 0), {names.DOWNSTREAM: name}) for name, mode in list(breakers.items())]


class Meters:
    """Every instrument of the library.

    Parameters:
      meter(Meter): What makes them.
    """

    def __init__(self, meter: Meter) -> None:
        counter, message = meter.create_counter, "{message}"
        self.sent = counter(names.SENT_MESSAGES, message, "Messages sent, each retry once; delay moves do not count.")
        self.consumed = counter(names.CONSUMED_MESSAGES, message, "Messages given to an actor.")
        self.process_duration = _histogram(meter, names.PROCESS_DURATION, "How long attempts took.", _WORK)
        self.operation_duration = _histogram(meter, names.OPERATION_DURATION, "How long broker calls took.", _WORK)
        self.wait_duration = _histogram(
            meter, names.WAIT_DURATION, "From when a message could have run until it did.", _WAIT
        )
        self.in_flight = meter.create_up_down_counter(names.IN_FLIGHT, message, "Messages that actors are working on.")
        self.classified = counter(names.CLASSIFIED_EXCEPTIONS, "{exception}", "Exceptions, by verdict.")
        self.retry_delay = _histogram(meter, names.RETRY_DELAY, "Delays chosen for the next delivery.", _WAIT)
        self.dead_letters = counter(names.DEAD_LETTER_MESSAGES, message, "Messages that died, by reason.")
        self.letters_purged = counter(names.DEAD_LETTER_PURGED, "{letter}", "Dead letters dropped by retention.")
        self.crashes = counter(names.CRASHES, "{process}", "Worker processes that ended for a fatal reason.")
        self.crashes_uncounted = counter(
            names.CRASHES_UNCOUNTED, "{time}", "Times the store of crashes was out, and messages ran without a look."
        )
        self.jobs_stuck = counter(names.JOBS_STUCK, message, "Messages whose jobs could not be interrupted in time.")
        self.quarantined = counter(names.QUARANTINED_MESSAGES, message, "Messages that were not run any more.")
        self.shutdown_duration = _histogram(
            meter, names.SHUTDOWN_DURATION, "How long worker processes took to end.", _WORK
        )
        self.key_decisions = counter(
            names.KEY_DECISIONS, "{operation}", "Words with the store of the idempotency keys, by what came of them."
        )
        self.key_duration = _histogram(meter, names.KEY_DURATION, "How long each took.", _WORK)
        meter.create_observable_gauge(
            names.BREAKER_STATE, [_breaker_states], "1", "Circuit breakers: 0 closed, 1 recovering, 2 open, 3 paused."
        )
        self.held = counter(names.SETTLEMENT_HELD, "{hold}", "Times a settlement had to wait, by part.")


def _histogram(meter: Meter, name: str, description: str, bounds: Sequence[float]) -> Histogram:
    try:
        return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=bounds)
    except TypeError:  # an API older than the advisory parameter: the SDK's own buckets
        return meter.create_histogram(name, "s", description)
