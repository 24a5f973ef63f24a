"""`configure_telemetry`: an SDK that exports by OTLP over HTTP, for applications that have none.

The SDK is set up in the process that first needs it, never in the one that calls `configure_telemetry`: a worker
process when it boots, any other process when it first sends a message.  An SDK set up before a fork hands its children
cumulative counts that are not theirs, and a fork during an export deadlocks the child's flush.

What the user has set up already is left alone, signal by signal.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from opentelemetry import metrics, trace

from ..errors import SetupError
from . import exceptions
from .handover import flush_at_exit
from .signals import logger, on_first_use, quiet, silent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.resources import Resource

__all__ = ["boot", "configure_telemetry"]

_NEEDED: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@dataclass(frozen=True, slots=True)
class _Plan:
    endpoint: str | None
    service_name: str | None
    headers: dict[str, str] | None

    def exporter(self, signal: str) -> dict[str, Any]:
        """The arguments of a signal's exporter; what is left out, it reads from the environment."""
        arguments: dict[str, Any] = {}
        if self.endpoint is not None:
            arguments["endpoint"] = f"{self.endpoint.rstrip('/')}/v1/{signal}"
        if self.headers is not None:
            arguments["headers"] = self.headers
        return arguments


_plan: _Plan | None = None
_done_in: int | None = None
_lock = threading.Lock()


def configure_telemetry(
    endpoint: str | None = None, *, service_name: str | None = None, headers: Mapping[str, str] | None = None
) -> None:
    """Export traces and metrics by OTLP over HTTP.  Call it once, in the module that makes the broker.

    It only notes what is wanted: the SDK is set up when a worker process boots, or when another process sends its first
    message.  OpenTelemetry's environment variables hold for everything that is not said here (sampling, intervals,
    resource attributes, certificates).  An application that sets up an SDK of its own has no need of this.

    Parameters:
      endpoint(str | None): The collector's URL, such as ``http://localhost:4318``.  By default it is read from
        ``OTEL_EXPORTER_OTLP_ENDPOINT``.
      service_name(str | None): The service's name.  By default it is read from ``OTEL_SERVICE_NAME``.
      headers(Mapping[str, str] | None): HTTP headers for the collector.  By default they are read from
        ``OTEL_EXPORTER_OTLP_HEADERS``.

    Raises:
      SetupError: When the packages of the ``otel`` extra are missing, or the endpoint is no HTTP URL.

    Example:
      >>> configure_telemetry("http://localhost:4318", service_name="shop")
    """
    global _plan  # noqa: PLW0603 - one process has one telemetry
    _check_installed()
    if endpoint is not None:
        _check_endpoint(endpoint)
    with _lock:
        if _plan is not None and _done_in == os.getpid():
            logger.warning("configure_telemetry() came too late: telemetry is set up in this process already.")
            return
        _plan = _Plan(endpoint, service_name, None if headers is None else dict(headers))
        on_first_use(_set_up)


def _check_installed() -> None:
    for module in _NEEDED:
        try:
            found = importlib.util.find_spec(module) is not None
        except ImportError:
            found = False
        if not found:
            raise SetupError(
                f"configure_telemetry() needs {module}, which is not installed: pip install 'dramatiq-guard[otel]'"
            )


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint) if isinstance(endpoint, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise SetupError(
            f"configure_telemetry() got the endpoint {endpoint!r}, which is no HTTP URL. "
            "Telemetry goes by OTLP over HTTP, mostly on port 4318: write endpoint='http://localhost:4318'."
        )


def boot() -> None:
    """Set up in a worker process what `configure_telemetry` was told; nothing without it."""
    if _plan is not None:
        _set_up(worker=True)


@quiet
def _set_up(*, worker: bool = False) -> None:
    global _done_in  # noqa: PLW0603 - which process has been set up
    if _done_in == os.getpid():
        return
    with _lock:
        if _plan is None or _done_in == os.getpid():
            return
        # First, so that a set-up that fails is not tried again with every message.
        _done_in = os.getpid()
        on_first_use(None)
        os.register_at_fork(after_in_child=_again_in_child)
        resource = _resource(_plan)
        _set_up_traces(_plan, resource)
        _set_up_metrics(_plan, resource)
        if exceptions.wants_logs():
            _set_up_logs(_plan, resource)
        if not worker:
            # The end of a worker flushes by itself, and `atexit` does not run in a fork before Python 3.13.
            flush_at_exit()


def _again_in_child() -> None:
    # A provider that is set cannot be replaced; the SDK starts its threads anew in the child by itself.
    global _done_in  # noqa: PLW0603 - as above
    if _done_in is not None:
        _done_in = os.getpid()


def _resource(plan: _Plan) -> Resource:
    from opentelemetry.sdk.resources import Resource

    attributes: dict[str, str] = {}
    if plan.service_name is not None:
        attributes["service.name"] = plan.service_name
    if "service.instance.id" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        # Every worker process counts for itself: without this their metrics would overwrite each other.
        attributes["service.instance.id"] = str(uuid.uuid4())
    return Resource.create(attributes)


def _set_up_traces(plan: _Plan, resource: Resource) -> None:
    if not silent(trace.get_tracer_provider()):
        logger.info("A tracer provider is set already; configure_telemetry() leaves traces to it.")
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(**plan.exporter("traces"))))
    trace.set_tracer_provider(provider)


def _set_up_metrics(plan: _Plan, resource: Resource) -> None:
    if not silent(metrics.get_meter_provider()):
        logger.info("A meter provider is set already; configure_telemetry() leaves metrics to it.")
        return
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(OTLPMetricExporter(**plan.exporter("metrics")))
    metrics.set_meter_provider(MeterProvider([reader], resource=resource, shutdown_on_exit=False))


def _set_up_logs(plan: _Plan, resource: Resource) -> None:
    from opentelemetry._logs import get_logger_provider, set_logger_provider

    if not silent(get_logger_provider()):
        return
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter(**plan.exporter("logs"))))
    set_logger_provider(provider)
