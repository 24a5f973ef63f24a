"""What the tests on a RabbitMQ that fails have in common."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

#: pika leaves the sockets of a connection that broke as it was opened to the garbage collector.
_LEFT_BEHIND = "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let no such socket fail a test."""
    for item in items:
        if "impatient" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings(_LEFT_BEHIND))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let consumers come back sooner than Dramatiq's three seconds, and stock settlements than its five."""
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.5)
    monkeypatch.setattr("dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.5)
    yield
    gc.collect()
