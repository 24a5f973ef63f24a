"""Redis does what it is asked and the answer is lost: nothing is done twice on account of it (C15)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dramatiq.worker
import pytest

from dramatiq_guard import host
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until

from .redis_jobs import Ledger, guarded, stock
from .redis_world import World

#: What stands in the request of each step of a message's way.
REQUESTS = {
    "fetch": b"\r\nfetch\r\n",
    "retry": b"\r\ndramatiq:default.DQ\r\n",
    "promote": b"\r\ndramatiq:default\r\n",
    "ack": hashlib.sha1(host._ACK.encode()).hexdigest().encode(),
    "nack": b"\r\nnack\r\n",
}


@pytest.fixture(autouse=True)
def _consumers_restart_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dramatiq waits three seconds before it restarts a consumer; not what is tested here."""
    monkeypatch.setattr(dramatiq.worker, "CONSUMER_RESTART_DELAY_SECS", 0.1)


@pytest.fixture
def proxy(valkey: PrivateValkey, redis_url: str) -> Iterator[FaultyProxy]:
    """The way to an empty Redis, on which answers are lost."""
    with FaultyProxy(redis_url) as between:
        yield between


def address(proxy: FaultyProxy) -> dict[str, Any]:
    """The form of a broker's address that makes redis-py repeat a command up to ten times by itself."""
    return {"url": None, "host": "127.0.0.1", "port": proxy.port}


@pytest.mark.parametrize("step", REQUESTS)
def test_three_lost_replies_in_a_row_change_no_number_of_attempts(
    step: str, proxy: FaultyProxy, redis_url: str, tmp_path: Path
) -> None:
    """A job planned for four attempts runs four times, and one that dies dies once, whichever answers are lost."""
    letters = MemoryDeadLetters()
    world = World(guarded(letters=letters, **address(proxy)), Ledger(tmp_path / "runs"), redis_url, letters)
    with world.working(threads=2, timeout=100):
        lost = [proxy.lose_reply(matching=REQUESTS[step]) for _ in range(3)]
        world.send(world.jobs.flaky, "flaky", attempts=4)
        world.send(world.jobs.doomed, "doomed")
        world.send(world.jobs.aplain, "plain")
        world.check()
    assert all(each.is_set() for each in lost), "the answers were not lost: the test shows nothing"


def test_stock_dramatiq_multiplies_a_job_whose_retry_is_not_answered(
    proxy: FaultyProxy, redis_url: str, tmp_path: Path
) -> None:
    """The control: under stock Dramatiq the client repeats the enqueue of a retry, and each repeat is another copy."""
    world = World(stock(**address(proxy)), Ledger(tmp_path / "runs"), redis_url)
    world.send(world.jobs.flaky, "flaky", attempts=2)
    lost = [proxy.lose_reply(matching=b"\r\nenqueue\r\n") for _ in range(3)]
    with world.working(threads=2, timeout=100):
        wait_until(lambda: world.ledger.runs["flaky"] > 2, 20, lambda: world.ledger.runs)
    assert all(each.is_set() for each in lost)
