"""A very small OTLP collector: takes traces over HTTP and keeps their spans.

It stands for whatever a user would send traces to (Jaeger, Tempo, a vendor).  Metrics and logs are taken and dropped.
"""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .tracing import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Collector", "decode"]


class Collector:
    """Listens on a free loopback port, in a thread of this process."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        endpoint = type("Endpoint", (_Endpoint,), {"spans": self._spans})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), endpoint)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="demo-collector", daemon=True).start()

    @property
    def spans(self) -> list[Span]:
        """The spans that have arrived so far."""
        return list(self._spans)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Endpoint(BaseHTTPRequestHandler):
    spans: ClassVar[list[Span]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path == "/v1/traces":
            self.spans.extend(decode(body))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Say nothing."""


def decode(body: bytes) -> Iterator[Span]:
    """Read the spans of one export request.

    Parameters:
      body(bytes): An `ExportTraceServiceRequest` in protobuf.

    Returns:
      Iterator[Span]: Its spans.
    """
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano // 1_000,
                    end=span.end_time_unix_nano // 1_000,
                    attributes={each.key: _value(each.value) for each in span.attributes},
                    error=span.status.code == span.status.STATUS_CODE_ERROR,
                )


def _value(value: Any) -> str:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return ", ".join(_value(each) for each in value.array_value.values)
    return "" if kind is None else str(getattr(value, kind))
