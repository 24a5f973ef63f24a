"""Every store, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.protocols import DeadLetterStore

URLS = {
    "memory": lambda _: "memory://",
    "redis": lambda request: request.getfixturevalue("redis_url"),
}


@pytest.fixture(params=URLS)
def store(request: pytest.FixtureRequest) -> Iterator[DeadLetterStore]:
    """A store of each kind, empty."""
    stores = connect(URLS[request.param](request))
    yield stores.dead_letters
    stores.close()
