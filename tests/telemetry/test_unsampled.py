"""What the sender did not sample is not sampled further on, and costs little; unless the sampler wants it."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from opentelemetry import trace as trace_api
from opentelemetry.sdk.trace import Tracer, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, DEFAULT_ON, ParentBased, Sampler
from opentelemetry.trace import SpanContext, get_current_span

from .conftest import working

UNSAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"


class Run:
    """One message from a sender that did not sample, and what became of it."""

    def __init__(self, broker: StubBroker, sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exporter = InMemorySpanExporter()
        self.started: list[str] = []
        self.inside: list[SpanContext] = []
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        monkeypatch.setattr(trace_api, "_TRACER_PROVIDER", provider)
        start_span = Tracer.start_span

        def started(tracer: Tracer, name: str, *args: Any, **kwargs: Any) -> Any:
            self.started.append(name)
            return start_span(tracer, name, *args, **kwargs)

        monkeypatch.setattr(Tracer, "start_span", started)

        def work() -> None:
            self.inside.append(get_current_span().get_span_context())

        actor = dramatiq.actor(broker=broker, actor_name="work")(work)
        with working(broker):
            broker.enqueue(actor.message_with_options(dramatiq_guard={"tp": UNSAMPLED, "t": 1}))
            broker.join("default")

    @property
    def recorded(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]


@pytest.mark.parametrize("sampler", [DEFAULT_ON, ALWAYS_OFF], ids=["the parent's", "off"])
def test_a_sampler_that_would_drop_the_attempt_is_not_asked(
    sampler: Sampler, tracing_stub: StubBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor runs in the sender's context, which says that nothing below it is wanted either."""
    run = Run(tracing_stub, sampler, monkeypatch)

    assert [] == run.started
    (context,) = run.inside
    assert (0x4BF92F3577B34DA6A3CE929D0E0E4736, False) == (context.trace_id, context.trace_flags.sampled)


def test_a_sampler_that_may_want_the_attempt_is_asked(
    tracing_stub: StubBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that samples below unsampled parents has its way."""
    run = Run(tracing_stub, ParentBased(ALWAYS_ON, remote_parent_not_sampled=ALWAYS_ON), monkeypatch)

    assert ["process default"] == run.recorded


def test_a_sampler_that_cannot_describe_itself_is_asked(
    tracing_stub: StubBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is assumed of a sampler of the user's."""

    class Secretive(ParentBased):
        def get_description(self) -> str:
            raise RuntimeError("none of your business")

    run = Run(tracing_stub, Secretive(ALWAYS_ON), monkeypatch)

    assert ["process default"] == run.started
    assert [] == run.recorded
