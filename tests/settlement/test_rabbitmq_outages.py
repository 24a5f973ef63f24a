"""RabbitMQ goes away while jobs are at every stage of their lives: each attempt runs as planned, and none is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dramatiq_guard.settle.killpoints import reaching
from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.waiting import wait_until

from .rabbitmq_world import World

pytestmark = pytest.mark.usefixtures("impatient")

#: Where the outage is to find a message each.
STAGES = ("before-retry", "after-retry", "before-letter", "before-ack", "before-nack", "before-promote")


class Stages:
    """Holds the first message at each stage until the outage has begun, so that it is met there."""

    def __init__(self, *stages: str) -> None:
        self.awaited = set(stages)
        self.opened = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Hold messages inside the block."""
        with reaching(self._at):
            yield

    def _at(self, point: str) -> None:
        with self._lock:
            if point not in self.awaited:
                return
            self.awaited.discard(point)
        assert self.opened.wait(60), f"nobody opened {point}"


def stopped(seconds: float) -> Callable[[PrivateRabbitMQ, Stages], None]:
    """An outage: the server is stopped, and started again after a time."""

    def outage(rabbitmq: PrivateRabbitMQ, stages: Stages) -> None:
        rabbitmq.stop()
        stages.opened.set()
        time.sleep(seconds)
        rabbitmq.start()

    return outage


def killed(rabbitmq: PrivateRabbitMQ, stages: Stages) -> None:
    """An outage: the server is killed, and started again; that it has the queues was written down before."""
    rabbitmq.erlang("mnesia:sync_log().")
    rabbitmq.kill()
    stages.opened.set()
    rabbitmq.start()


def cut(rabbitmq: PrivateRabbitMQ, stages: Stages) -> None:
    """An outage: all connections are closed, three times."""
    rabbitmq.close_all_connections()
    stages.opened.set()
    for _ in range(2):
        time.sleep(2)
        rabbitmq.close_all_connections()


def frozen(rabbitmq: PrivateRabbitMQ, stages: Stages) -> None:
    """An outage: the server neither answers nor hangs up."""
    rabbitmq.pause()
    stages.opened.set()
    time.sleep(12)
    rabbitmq.resume()


@pytest.mark.parametrize(
    "outage",
    [
        killed,
        pytest.param(stopped(8), marks=pytest.mark.matrix, id="stopped-8"),
        pytest.param(stopped(14), marks=pytest.mark.matrix, id="stopped-14"),
        pytest.param(cut, marks=pytest.mark.matrix),
        pytest.param(frozen, marks=pytest.mark.matrix),
    ],
)
def test_everything_at_once(
    outage: Callable[[PrivateRabbitMQ, Stages], None], private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str
) -> None:
    """Sync and async jobs run, fail, are retried, acked, dead-lettered and moved from the delay queue, and 80 are
    delayed, when the server goes away."""
    world = World(private_rabbitmq, rabbitmq_url)
    for n in range(80):
        world.send(f"delayed-{n}", delay=500 + 120 * n, fails=n % 2, sync=n % 3 != 0)
    for n in range(6):
        world.send(f"running-{n}", gate="outage", fails=n % 3, sync=n % 2 == 0)
        world.send(f"ending-{n}", gate="outage", refused=True, sync=n % 2 == 0)
    for n in range(20):
        world.send(f"failing-{n}", fails=3, sync=n % 2 == 0)
        world.send(f"refused-{n}", refused=True, sync=n % 2 == 0)
        world.send(f"good-{n}", sync=n % 2 == 0)
    stages = Stages(*STAGES)
    with stages.watched(), world.working(threads=24):
        wait_until(
            lambda: not stages.awaited and sum("ning-" in key or "ending-" in key for key in world.runs) == 12,
            describe=lambda: f"messages at {stages.awaited}, twelve running jobs in {world.runs}",
        )
        outage(private_rabbitmq, stages)
        world.gate("outage").set()
        world.finish(60)
        world.check()
    assert dict.fromkeys(world.dying, 1) == world.dead()


def test_stock_runs_what_was_not_planned(private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str) -> None:
    """The control: jobs fail on plain Dramatiq while the server is away, and are run more often than planned."""
    world = World(private_rabbitmq, rabbitmq_url, stock=True)
    for n in range(8):
        world.send(f"failing-{n}", gate="outage", fails=1)
    with world.working(threads=8):
        wait_until(lambda: len(world.runs) == 8, describe=lambda: f"eight running jobs in {world.runs}")
        killed(private_rabbitmq, Stages())
        world.gate("outage").set()
        world.finish(30)
        wait_until(lambda: not world.unsettled(), describe=lambda: f"empty queues: {world.unsettled()}")
    assert world.surplus
