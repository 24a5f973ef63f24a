"""Redis is there and will not write: a replica after a failover, or out of memory.

What is due is held, and settled when it will.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.waiting import wait_until

from .redis_jobs import Gate, Ledger, guarded
from .redis_world import World, gating


def read_only(client: redis.Redis) -> None:
    """As after a failover: the server is a replica now, of a primary that cannot be reached."""
    client.replicaof("127.0.0.1", "1")


def read_only_no_more(client: redis.Redis) -> None:
    client.replicaof("NO", "ONE")


def out_of_memory(client: redis.Redis) -> None:
    client.config_set("maxmemory", "1")


def out_of_memory_no_more(client: redis.Redis) -> None:
    client.config_set("maxmemory", "0")


REFUSALS: dict[str, tuple[Callable[[redis.Redis], None], Callable[[redis.Redis], None]]] = {
    "READONLY": (read_only, read_only_no_more),
    "OOM": (out_of_memory, out_of_memory_no_more),
}


@pytest.mark.parametrize(
    ("refusal", "held"), [("READONLY", ("retry", "ack", "nack")), ("OOM", ("nack",))], ids=["READONLY", "OOM"]
)
def test_a_server_that_refuses_to_write_holds_the_settlement_and_costs_nothing(
    refusal: str,
    held: tuple[str, ...],
    own_valkey: PrivateValkey,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Acks, nacks, retries and promotions that are refused are made when the server takes writes again.

    A server that is out of memory still takes an ack, and moves a message to its retry: the scripts free first.
    """
    gate = Gate("before-retry/flaky", "before-ack/plain", "before-nack/doomed", "before-promote")
    letters = MemoryDeadLetters()
    world = World(guarded(own_valkey.url, letters), Ledger(tmp_path / "runs"), own_valkey.url, letters)
    refuse, relent = REFUSALS[refusal]
    caplog.set_level("INFO", "dramatiq_guard")
    with gating(gate.reach), world.working(threads=6):
        world.send(world.jobs.flaky, "flaky", attempts=4)
        world.send(world.jobs.plain, "plain")
        world.send(world.jobs.doomed, "doomed")
        world.send(world.jobs.plain, "due", delay=50)
        for n in range(10):
            world.send(world.jobs.flaky, f"delayed-{n}", attempts=2, delay=300)
        wait_until(gate.full.is_set, 10, lambda: f"jobs at {gate.awaited}")
        refuse(world.keys.client)
        gate.opened.set()
        for what in held:
            wait_until(lambda what=what: f"stays unacked: {what} waits" in caplog.text, 10, lambda: caplog.text)
        assert sum(world.keys.stranded().values()) >= len(held)
        relent(world.keys.client)
        world.check()
    assert caplog.text.count("is settled, after it was held for") >= len(held)
