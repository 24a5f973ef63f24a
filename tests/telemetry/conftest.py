"""An SDK that records in memory, in place of whatever the process has; and brokers that trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dramatiq
import opentelemetry.metrics._internal as metrics_api
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AgeLimit
from opentelemetry import trace as trace_api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dramatiq_guard.middleware.tracing import Tracing
from dramatiq_guard.telemetry import signals
from tests.support.waiting import wait_until


class Recorder:
    """What an SDK was given."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer_provider = TracerProvider(shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self.reader], shutdown_on_exit=False)

    @property
    def spans(self) -> list[ReadableSpan]:
        """The spans that have ended, in the order in which they began."""
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        """The spans of this name."""
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        (span,) = self.named(name)
        return span

    def wait(self, name: str, count: int = 1) -> list[ReadableSpan]:
        """Wait until so many spans of this name have ended."""
        wait_until(
            lambda: len(self.named(name)) >= count,
            describe=lambda: f"{count} of {name!r} among {[span.name for span in self.spans]}",
        )
        return self.named(name)

    @property
    def traces(self) -> set[int]:
        """The ids of the traces that there are."""
        return {span.context.trace_id for span in self.spans}

    def points(self, name: str) -> list[Any]:
        """The data points of a metric; none where it has none."""
        data = self.reader.get_metrics_data()
        if data is None:
            return []
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    def total(self, name: str, **attributes: str) -> float:
        """The sum of a counter, or the count of a histogram, over the points that have these attributes' last words."""
        total = 0.0
        for point in self.points(name):
            if all(_by_last_word(point.attributes).get(key) == value for key, value in attributes.items()):
                total += point.value if hasattr(point, "value") else point.count
        return total


def _by_last_word(attributes: Any) -> dict[str, Any]:
    return {key.removesuffix(".name").rpartition(".")[2]: value for key, value in attributes.items()}


@pytest.fixture(autouse=True)
def _fresh_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a process without an SDK, on threads that do nothing."""
    monkeypatch.setattr(trace_api, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(metrics_api, "_METER_PROVIDER", None)
    monkeypatch.setattr(signals, "_first_use", None)
    monkeypatch.setattr(signals, "_complained", set())
    here = signals.here
    here.attempt = here.send = None
    here.carrying = here.settling = here.promoting = False


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """An SDK in memory, set as the process's own."""
    recorder = Recorder()
    monkeypatch.setattr(trace_api, "_TRACER_PROVIDER", recorder.tracer_provider)
    monkeypatch.setattr(metrics_api, "_METER_PROVIDER", recorder.meter_provider)
    return recorder


@pytest.fixture(params=["stub", pytest.param("redis", marks=pytest.mark.redis)])
def broker(request: pytest.FixtureRequest) -> dramatiq.Broker:
    """A broker with Dramatiq's own middleware and `Tracing`, in memory and on Redis."""
    broker: dramatiq.Broker = request.getfixturevalue(f"{request.param}_broker")
    broker.add_middleware(Tracing(), before=AgeLimit)
    return broker


@pytest.fixture
def tracing_stub(stub_broker: StubBroker) -> StubBroker:
    """A broker in memory with Dramatiq's own middleware and `Tracing`."""
    stub_broker.add_middleware(Tracing(), before=AgeLimit)
    return stub_broker


@contextmanager
def working(broker: dramatiq.Broker, threads: int = 1) -> Iterator[dramatiq.Worker]:
    """A running worker; one thread by default, so that whatever leaks meets the next message."""
    worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=threads)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
