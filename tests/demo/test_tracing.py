"""One trace as a tree, and the collector that spans come from."""

from __future__ import annotations

import gzip

import pytest
import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from dramatiq_guard.demo.collector import Collector
from dramatiq_guard.demo.tracing import Span, tree

SEND = Span("send default", "t", "1", start=0, end=1_000)
FIRST = Span("process default", "t", "2", "1", 5_000, 9_000, {"dramatiq.message.attempt": "1"}, error=True)
BACKOFF = Span("dramatiq_guard.backoff", "t", "3", "2", 8_000, 8_500, {"dramatiq_guard.delay": "0.2"})
SECOND = Span("process default", "t", "4", "1", 250_000, 255_000, {"dramatiq_guard.outcome": "succeeded"})


def test_a_trace_is_drawn_in_the_order_in_which_it_happened():
    """Children stand below their parents, each with its distance from the start and what it says."""
    assert tree([SECOND, BACKOFF, SEND, FIRST]) == [
        "send default  +0 ms, 1.0 ms",
        "├─ process default ✗  +5 ms, 4.0 ms  attempt 1",
        "│  └─ dramatiq_guard.backoff  +8 ms, 0.5 ms  delay 0.20 s",
        "└─ process default  +250 ms, 5.0 ms  → succeeded",
    ]


def test_a_span_without_its_parent_is_a_root():
    """A trace of which a part is missing is still drawn whole."""
    assert tree([BACKOFF, SECOND]) == [
        "dramatiq_guard.backoff  +0 ms, 0.5 ms  delay 0.20 s",
        "process default  +242 ms, 5.0 ms  → succeeded",
    ]


def test_no_spans_are_no_lines():
    """There may be nothing to draw."""
    assert tree([]) == []


@pytest.mark.parametrize("zipped", [False, True])
def test_the_collector_keeps_the_spans_of_an_export(zipped):
    """What an exporter posts, plain or zipped, can be read back as spans."""
    export = ExportTraceServiceRequest()
    span = export.resource_spans.add().scope_spans.add().spans.add()
    span.name, span.trace_id, span.span_id = "process default", b"\x01" * 16, b"\x02" * 8
    span.start_time_unix_nano, span.end_time_unix_nano = 5_000_000, 9_000_000
    span.status.code = Status.STATUS_CODE_ERROR
    attribute = span.attributes.add()
    attribute.key, attribute.value.int_value = "dramatiq.message.attempt", 1
    body, headers = export.SerializeToString(), {}
    if zipped:
        body, headers = gzip.compress(body), {"Content-Encoding": "gzip"}

    with Collector() as collector:
        answer = requests.post(f"{collector.url}/v1/traces", data=body, headers=headers, timeout=5)
        metrics = requests.post(f"{collector.url}/v1/metrics", data=b"anything", timeout=5)

        assert (answer.status_code, metrics.status_code) == (200, 200)
        assert collector.spans == [
            Span(
                "process default", "01" * 16, "02" * 8, "", 5_000, 9_000, {"dramatiq.message.attempt": "1"}, error=True
            )
        ]
