"""What Dramatiq makes of an async function, which `async_actors` takes apart."""

from __future__ import annotations

import asyncio

import dramatiq
from dramatiq.asyncio import async_to_sync
from dramatiq.brokers.stub import StubBroker


def test_an_async_actor_is_the_wrapper_of_async_to_sync(stub_broker: StubBroker) -> None:
    """H16: what a worker calls is one and the same function with the async one inside, which can be taken out and
    wrapped again."""

    @dramatiq.actor(broker=stub_broker)
    async def actor() -> None: ...

    async def other() -> None: ...

    assert async_to_sync(other).__code__ is actor.fn.__code__
    assert asyncio.iscoroutinefunction(actor.fn.__wrapped__)  # type: ignore[attr-defined]
    assert async_to_sync(other).__wrapped__ is other  # type: ignore[attr-defined]
