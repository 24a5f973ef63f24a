"""The application of the tests in this folder: what a user has, and what stands in for its third parties."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard import Classify, IdempotencyGuard, JitterBackoff, connect, install

#: Nobody listens there: whatever is sent to it fails.
NOWHERE = "redis://127.0.0.1:1"


class Gateway:
    """Charges each time, unless it is given a key that it knows."""

    def __init__(self) -> None:
        self.charges: list[tuple[str, int]] = []
        self.known: dict[str, str] = {}

    def charge(self, order: str, cents: int, key: str | None = None) -> str:
        """Charge an order, and return the number of the charge."""
        if key in self.known:
            return self.known[key]
        self.charges.append((order, cents))
        number = f"charge {len(self.charges)}"
        if key is not None:
            self.known[key] = number
        return number

    def forget(self) -> None:
        """Begin anew."""
        self.charges.clear()
        self.known.clear()


def broker_of_a_shop(*middlewares: Any, **guarding: Any) -> RedisBroker:
    """The broker of production: on Redis, with its keys there."""
    broker = RedisBroker(url=NOWHERE)
    guard = IdempotencyGuard(connect(NOWHERE).idempotency, **guarding)
    install(broker, Classify(permanent=[ValueError]), JitterBackoff(max_retries=3), guard)
    for middleware in middlewares:
        broker.add_middleware(middleware)
    dramatiq.set_broker(broker)
    return broker


def complaint(failure: pytest.ExceptionInfo[AssertionError]) -> list[str]:
    """The schedules that a report complains of, and what it says of each."""
    table, _, complaints = str(failure.value).rpartition("\n\n")
    lines = complaints.splitlines()
    assert len(lines) == sum(line.startswith("✗") for line in table.splitlines())
    return lines
