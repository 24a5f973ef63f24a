"""An OTLP receiver that is not ours: `oteltap`, whose asynchronous interface runs on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Self

from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from dramatiq_guard.testing.private_server import free_port
from tests.support.waiting import wait_until

__all__ = ["Tap"]


class Tap:
    """Receives spans, metrics and logs at `.endpoint`; a context manager."""

    def __init__(self) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.spans: list[Any] = []
        self.metrics: list[Any] = []
        self.logs: list[Any] = []
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "oteltap did not start"
        assert self._failure is None, f"oteltap did not start: {self._failure!r}"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def wait_span(self, name: str, count: int = 1, timeout: float = 15.0) -> list[Any]:
        """Wait until so many spans of this name have arrived."""
        wait_until(
            lambda: len([span for span in self.spans if span.name == name]) >= count,
            timeout,
            lambda: f"{count} of {name!r} among {[span.name for span in self.spans]}",
        )
        return [span for span in self.spans if span.name == name]

    def wait_metric(self, name: str, timeout: float = 15.0) -> Any:
        """Wait until a metric of this name has arrived."""
        wait_until(
            lambda: any(metric.name == name for metric in self.metrics),
            timeout,
            lambda: f"{name!r} among {[metric.name for metric in self.metrics]}",
        )
        return next(metric for metric in self.metrics if metric.name == name)

    def _run(self) -> None:
        try:
            asyncio.run(self._receive())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _receive(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        settings = OtelTapHttpProtobufReceiverSettings(http_port=self.port)
        async with OtelTapHttpProtobufReceiver(settings) as receiver:
            streams = [
                (receiver.stream_traces(), self.spans),
                (receiver.stream_metrics(), self.metrics),
                (receiver.stream_logs(), self.logs),
            ]
            tasks = [asyncio.create_task(_collect(stream, into)) for stream, into in streams]
            await asyncio.sleep(0)
            self._ready.set()
            await self._stop.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(stream: Any, into: list[Any]) -> None:
    async for each in stream:
        into.append(each)
