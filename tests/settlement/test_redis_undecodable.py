"""A message that nobody can decode becomes a letter, and the batch that it came in goes on (C10)."""

from __future__ import annotations

from pathlib import Path

import dramatiq.worker
import pytest
import redis

from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from tests.support.waiting import wait_until

from .redis_jobs import Ledger, guarded, stock
from .redis_world import World

RUBBISH = (b"\x00 not json", b"{}", b'{"queue_name": "default"}', b"\x00 not json")


def put_batch(world: World, client: redis.Redis) -> None:
    """Put four undecodable messages among eight good ones, on the queue and on the delay queue."""
    for n in range(8):
        world.send(world.jobs.plain, f"plain-{n}")
        world.send(world.jobs.plain, f"late-{n}", delay=1)
        if n % 2:
            for queue in ("default", "default.DQ"):
                name = f"rubbish-{queue}-{n}"
                client.hset(f"dramatiq:{queue}.msgs", name, RUBBISH[n // 2])
                client.rpush(f"dramatiq:{queue}", name)


def test_an_undecodable_message_becomes_a_letter_and_its_batch_goes_on(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """The good messages run at once, without the consumer having to restart, and each bad one lies in a letter."""
    letters = MemoryDeadLetters()
    world = World(guarded(redis_url, letters), Ledger(tmp_path / "runs"), redis_url, letters)
    put_batch(world, redis_client)
    with world.working(threads=8):
        wait_until(lambda: not world.missing() and not world.keys.waiting() and not world.keys.stranded(), 10)
        assert not world.dead_threads()
    assert not world.surplus()
    written = letters.page(limit=50).letters
    assert sorted(letter.raw for letter in written) == sorted(raw.decode() for raw in RUBBISH * 2)
    assert {letter.reason for letter in written} == {"undecodable"}
    assert redis_client.zcard("dramatiq:default.XQ") == 8, "the broker's own copies"


def test_stock_dramatiq_strands_the_batch_of_an_undecodable_message(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: under stock Dramatiq the batch lies in the ack set of a live worker, and nobody looks for it."""
    monkeypatch.setattr(dramatiq.worker, "CONSUMER_RESTART_DELAY_SECS", 0.1)
    world = World(stock(redis_url), Ledger(tmp_path / "runs"), redis_url)
    client = redis_client
    client.hset("dramatiq:default.msgs", "rubbish", RUBBISH[0])
    client.rpush("dramatiq:default", "rubbish")
    for n in range(4):
        world.send(world.jobs.plain, f"plain-{n}")
    with world.working(threads=8):
        wait_until(lambda: world.keys.stranded() and not client.exists("dramatiq:default"), 10)
        world.send(world.jobs.plain, "after")
        wait_until(lambda: world.ledger.runs["after"], 10)
        assert sum(world.keys.stranded().values()) >= 5
        assert set(world.ledger.runs) == {"after"}
