"""Every store, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.stores.protocols import DeadLetterStore

URLS = {
    "memory": lambda _: "memory://",
    "redis": lambda request: request.getfixturevalue("redis_url"),
    "postgres": lambda request: _with_tables(request.getfixturevalue("postgres_url")),
}


def _with_tables(url: str) -> str:
    apply_schema(url)
    return url


@pytest.fixture(params=URLS)
def store(request: pytest.FixtureRequest) -> Iterator[DeadLetterStore]:
    """A store of each kind, empty."""
    stores = connect(URLS[request.param](request))
    yield stores.dead_letters
    stores.close()
