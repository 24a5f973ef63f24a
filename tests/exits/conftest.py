"""The brokers of these tests: each test has a queue of its own on the servers that all share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from .running import Run, running

Start = Callable[..., AbstractContextManager[Run]]


@pytest.fixture
def on_redis(valkey) -> Start:
    """Start a command on Redis."""
    return lambda **options: running("redis", valkey.url, valkey.url, **options)


@pytest.fixture(params=["redis", "rabbitmq"])
def on_each(request: pytest.FixtureRequest, valkey) -> Start:
    """Start a command, on either broker."""
    server: Any = valkey if request.param == "redis" else request.getfixturevalue("rabbitmq")
    return lambda **options: running(request.param, server.url, valkey.url, **options)
