"""A message that is over is freed at once, with all that hung on it; the garbage collector finds nothing."""

from __future__ import annotations

import gc

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard import Classify, DeadLetter, JitterBackoff, install
from dramatiq_guard.delivery import Delivery
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from tests.support.waiting import wait_until


def deliveries() -> int:
    """How many there are in this process, garbage among them."""
    return sum(type(each) is Delivery for each in gc.get_objects())


@pytest.mark.parametrize("failures", [0, 1], ids=["succeeds", "fails once"])
def test_a_message_that_is_over_leaves_no_garbage(failures: int, redis_url: str) -> None:
    """Neither a success nor a failure with its delay and its retry leaves a cycle that holds message and error."""
    broker = RedisBroker(url=redis_url)  # the one in memory keeps errors on purpose
    broker.emit_after("process_boot")
    install(broker, Classify(), JitterBackoff(min_backoff=1, max_backoff=1), DeadLetter(MemoryDeadLetters()))
    runs = []

    def work() -> None:
        runs.append(1)
        if len(runs) <= 20 * failures:
            raise RuntimeError("not yet")

    actor = dramatiq.actor(broker=broker)(work)
    worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=1)
    worker.start()
    gc.collect()
    before = deliveries()
    gc.disable()
    try:
        for _ in range(20):
            actor.send()
        wait_until(lambda: len(runs) == 20 * (1 + failures), 10, lambda: runs)
        broker.join("default")
        # Each thread may still hold its last one, and a log record its error.
        wait_until(lambda: deliveries() <= before + 5, 10, deliveries)
    finally:
        gc.enable()
        worker.stop()
        broker.close()
