"""What the guard says to its store for each message, counted on the wire by a proxy between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.postgres.schema import apply_schema
from tests.idempotency.bench import Bench
from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until


@pytest.fixture(params=["redis", "postgres"])
def counted(request: pytest.FixtureRequest) -> Iterator[tuple[Bench, FaultyProxy]]:
    """A bench with its keys behind a proxy."""
    url = request.getfixturevalue(f"{request.param}_url")
    if request.param == "postgres":
        apply_schema(url)
    with FaultyProxy(url) as proxy, closing(connect(proxy.url)) as stores:
        bench = Bench(store=stores.idempotency)
        with closing(bench):
            yield bench, proxy


def _turns(proxy: FaultyProxy, do: Callable[[], Any]) -> int:
    proxy.forget()
    do()
    return proxy.turns


def test_two_for_a_fresh_message_and_one_for_a_duplicate(counted: tuple[Bench, FaultyProxy]) -> None:
    """A claim and a completion; and for a duplicate a claim, which brings the result along."""
    bench, proxy = counted

    @bench.actor(idempotency_key="order:{order_id}")
    def charge(order_id: int) -> str:
        bench.note("charge", order_id)
        return f"charged {order_id}"

    bench.work(threads=1)
    bench.run(charge.message(0))  # connects, and teaches the server the scripts

    fresh = [_turns(proxy, lambda number=number: bench.run(charge.message(number))) for number in (1, 2)]
    duplicates = [_turns(proxy, lambda number=number: bench.run(charge.message(number))) for number in (1, 2)]

    assert [2, 2] == fresh
    assert [1, 1] == duplicates
    assert [0, 1, 2] == bench.notes("charge")


def test_one_for_a_busy_message(counted: tuple[Bench, FaultyProxy]) -> None:
    """A claim; the message is put off by the broker alone."""
    bench, proxy = counted
    go, began = threading.Event(), threading.Event()

    @bench.actor(idempotency_key="order:{order_id}", on_busy="fail")
    def charge(order_id: int) -> None:
        if order_id:
            began.set()
            assert go.wait(20)

    bench.work(threads=2)
    bench.run(charge.message(0))
    try:
        bench.deliver(charge.message(1))
        assert began.wait(20)
        # Its claim has been answered, and no other word comes before it returns.
        proxy.forget()
        bench.deliver(charge.message(1))
        wait_until(bench.letters, describe="the dead letter of the busy message")
        busy = proxy.turns
    finally:
        go.set()
    bench.settle()

    assert 1 == busy


def test_none_for_a_message_of_an_actor_that_is_not_guarded(counted: tuple[Bench, FaultyProxy]) -> None:
    """Whoever asked for nothing pays nothing."""
    bench, proxy = counted

    @bench.actor
    def work() -> None:
        bench.note("work")

    bench.work(threads=1)

    assert 0 == _turns(proxy, lambda: bench.run(work.message()))
    assert 1 == bench.count("work")
