"""Every store, for the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from dramatiq_guard.stores.breakers import BreakerStore
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import IdempotencyStore
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.stores.protocols import DeadLetterStore, DeliveryStore, Stores

URLS: dict[str, Callable[[pytest.FixtureRequest], str]] = {
    "memory": lambda _: "memory://",
    "redis": lambda request: request.getfixturevalue("redis_url"),
    "postgres": lambda request: _with_tables(request.getfixturevalue("postgres_url")),
}


def _with_tables(url: str) -> str:
    apply_schema(url)
    return url


@pytest.fixture(params=URLS)
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    """The stores of a server of each kind, empty."""
    with closing(connect(URLS[request.param](request))) as connected:
        yield connected


@pytest.fixture
def store(stores: Stores) -> DeadLetterStore:
    """Its letters."""
    return stores.dead_letters


@pytest.fixture
def deliveries(stores: Stores) -> DeliveryStore:
    """Its deliveries."""
    return stores.deliveries


@pytest.fixture
def idempotency(stores: Stores) -> IdempotencyStore:
    """Its keys."""
    return stores.idempotency


@pytest.fixture
def breakers(stores: Stores) -> BreakerStore:
    """Its breakers."""
    return stores.breakers
