"""Benches with a guard, in memory and on Redis, whose deferrals come soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from dramatiq_guard.idempotency import claiming, ending
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.postgres.schema import apply_schema
from tests.idempotency.bench import Bench

MakeBench = Callable[..., Bench]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "_BUSY_WAITS", (20, 100))
    monkeypatch.setattr(claiming, "_OUT_WAITS", (20, 100))
    monkeypatch.setattr(ending, "_FENCED_OUT", 20)


def _maker(request: pytest.FixtureRequest, kind: str, stack: ExitStack) -> MakeBench:
    url, broker, store = None, "stub", None
    if kind == "redis":
        url, broker = request.getfixturevalue("redis_url"), "redis"
        store = stack.enter_context(closing(connect(url))).idempotency
    elif kind == "postgres":
        database = request.getfixturevalue("postgres_url")
        apply_schema(database)
        store = stack.enter_context(closing(connect(database))).idempotency

    def make(**options: Any) -> Bench:
        bench = Bench(broker, url, **{"store": store, **options})
        stack.callback(bench.close)
        return bench

    return make


@pytest.fixture
def in_memory(request: pytest.FixtureRequest) -> Iterator[MakeBench]:
    """Makes benches in memory."""
    with ExitStack() as stack:
        yield _maker(request, "memory", stack)


@pytest.fixture(params=["memory", "redis"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeBench]:
    """Makes benches of each kind: broker and keys in memory, and both on Redis."""
    with ExitStack() as stack:
        yield _maker(request, request.param, stack)


@pytest.fixture(params=["memory", "redis", "postgres"])
def on_each_store(request: pytest.FixtureRequest) -> Iterator[MakeBench]:
    """The same, and with the keys on PostgreSQL, too."""
    with ExitStack() as stack:
        yield _maker(request, request.param, stack)
