"""Every store, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.protocols import DeadLetterStore


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[DeadLetterStore]:
    """A store of each kind, empty."""
    if request.param == "memory":
        stores = connect("memory://")
    else:
        stores = connect(request.getfixturevalue("redis_url"))
    yield stores.dead_letters
    stores.close()
