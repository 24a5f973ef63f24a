"""Fixtures of the host facts: benches that are taken down again, and a host that does not sleep for seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq.worker
import pytest
from dramatiq.middleware import Middleware

from .rig import Bench


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Build benches from middlewares; their workers are stopped at the end."""
    built: list[Bench] = []

    def build(*middleware: Middleware) -> Bench:
        built.append(Bench(middleware))
        return built[-1]

    yield build
    for each in built:
        each.stop()


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The exceptions that ended threads, which is where the fact *is* that a thread dies."""
    ended: list[BaseException] = []

    def note(args: Any) -> None:
        ended.append(args.exc_value)

    monkeypatch.setattr(threading, "excepthook", note)
    return ended


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the host's own sleeps, which it looks up in its module each time."""
    monkeypatch.setattr(dramatiq.worker, "POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.02)
    monkeypatch.setattr(dramatiq.worker, "CONSUMER_RESTART_DELAY_SECS", 0.02)
