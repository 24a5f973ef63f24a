"""What each test of this folder is given."""

from __future__ import annotations

import pytest
from dramatiq.brokers.redis import RedisBroker

from .shop import Gateway, broker_of_a_shop


@pytest.fixture
def gateway() -> Gateway:
    """A third party that remembers what it was asked."""
    return Gateway()


@pytest.fixture
def broker() -> RedisBroker:
    """The broker of production, which no test reaches."""
    return broker_of_a_shop()
