"""RabbitMQ, replies that are lost three times in a row: what was planned for four attempts runs four times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dramatiq_guard.settle.killpoints import reaching
from dramatiq_guard.stores.memory.deliveries import MemoryDeliveries
from dramatiq_guard.wiring import stack_of
from tests.support.proxy import FaultyProxy
from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.waiting import wait_until

from .rabbitmq_world import World

pytestmark = pytest.mark.usefixtures("impatient")

#: What only the copy of a retry has that is published to the delay queue, and what only the one that is moved from it.
DELAYED, SECOND_RETRY = b'"eta":', b'"retries":2'


@pytest.fixture
def proxy(rabbitmq_url: str) -> Iterator[FaultyProxy]:
    """What stands between the workers and RabbitMQ."""
    with FaultyProxy(rabbitmq_url) as proxy:
        yield proxy


@contextmanager
def losing(proxy: FaultyProxy, name: str, times: int = 3) -> Iterator[list[str]]:
    """Lose the first acks (or nacks) of a single worker thread on their way, with all connections.

    Parameters:
      proxy(FaultyProxy): The proxy before the server.
      name(str): ``ack`` or ``nack``.
      times(int): How many.

    Returns:
      list[str]: One entry for each that was lost.
    """
    lost: list[str] = []

    def at(point: str) -> None:
        if len(lost) >= times:
            return
        if point == f"before-{name}":
            proxy.blackhole()
        elif point == f"after-{name}":
            lost.append(name)
            proxy.cut()
            proxy.heal()

    with reaching(at):
        yield lost


@pytest.mark.parametrize("matching", [DELAYED, SECOND_RETRY], ids=["retry", "promotion"])
def test_confirms_of_a_retry_are_lost(
    matching: bytes, private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, proxy: FaultyProxy
) -> None:
    """Three confirms in a row are lost as a retry is published, or as it is moved from the delay queue: the server has
    four copies, and one of them runs."""
    world = World(private_rabbitmq, rabbitmq_url, proxy=proxy, deliveries=MemoryDeliveries())
    world.send("job", fails=3)
    lost = [proxy.lose_reply(matching=matching) for _ in range(3)]
    with world.working(threads=4):
        world.finish()
        assert all(event.wait(10) for event in lost)
        world.check()


def test_confirms_of_a_retry_are_lost_without_a_store(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, proxy: FaultyProxy
) -> None:
    """Where no store tells the four copies of a retry apart, one process does so for itself."""
    world = World(private_rabbitmq, rabbitmq_url, proxy=proxy)
    world.send("job", fails=3)
    lost = [proxy.lose_reply(matching=DELAYED) for _ in range(3)]
    with world.working(threads=4):
        world.finish()
        assert all(event.wait(10) for event in lost)
        world.check()


def test_copies_that_nobody_tells_apart_go_the_way_that_was_planned_for_one(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if four processes had met one copy each: none is retried further than the plan."""
    world = World(private_rabbitmq, rabbitmq_url, proxy=proxy)
    monkeypatch.setattr(stack_of(world.broker), "seen_here", None)
    world.send("job", fails=3)
    lost = [proxy.lose_reply(matching=DELAYED) for _ in range(3)]
    with world.working(threads=4):
        assert all(event.wait(10) for event in lost)
        wait_until(lambda: world.done["job"] >= 2, describe=lambda: f"two of the copies done: {world.done}")
        wait_until(lambda: not world.unsettled(), describe=lambda: f"empty queues: {world.unsettled()}")
        assert 4 < world.runs["job"] <= 1 + 4 * 3


@pytest.mark.parametrize("name", ["ack", "nack"])
def test_acks_are_lost(name: str, private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, proxy: FaultyProxy) -> None:
    """Three times in a row an ack, or a nack, does not arrive: RabbitMQ delivers again what was settled, and it is
    settled again."""
    world = World(private_rabbitmq, rabbitmq_url, proxy=proxy, deliveries=MemoryDeliveries())
    for n in range(3):
        world.send(f"job-{n}", fails=3)
        world.send(f"refused-{n}", refused=True, sync=False)
    with losing(proxy, name) as lost, world.working(threads=1):
        world.finish()
        wait_until(lambda: len(lost) == 3, describe=lambda: f"three lost {name}s: {lost}")
        world.check()
    assert {f"refused-{n}": 1 for n in range(3)} == world.dead()


def test_confirms_of_a_next_stage_are_lost(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, proxy: FaultyProxy
) -> None:
    """Three confirms are lost as a pipeline's next stage is sent: it runs once, and so does the stage after it."""
    world = World(private_rabbitmq, rabbitmq_url, proxy=proxy, deliveries=MemoryDeliveries())
    world.pipe("first", "second", "third")
    lost = [proxy.lose_reply(matching=b'"args":["second"') for _ in range(3)]
    with world.working(threads=4):
        world.finish()
        assert all(event.wait(10) for event in lost)
        world.check()


def test_a_message_that_is_enqueued_twice_lives_twice(private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str) -> None:
    """One message, with one id, is enqueued twice, and a pipeline is run twice: the store lets every retry and stage of
    both run."""
    world = World(private_rabbitmq, rabbitmq_url, deliveries=MemoryDeliveries())
    message = world.job.message("twice", 3)
    pipe = world.pipe("first", "second")
    with world.working(threads=4):
        world.broker.enqueue(message)
        world.finish()
        pipe.run()
        world.broker.enqueue(message)
        world.planned.update(twice=8, first=1, second=1)
        wait_until(lambda: not world.missing, describe=lambda: f"no missing runs: {world.missing}")
        world.check()


def test_stock_multiplies(private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, proxy: FaultyProxy) -> None:
    """The control: three confirms of one retry lost, on plain Dramatiq."""
    world = World(private_rabbitmq, rabbitmq_url, proxy=proxy, stock=True)
    world.send("job", fails=3)
    for _ in range(3):
        proxy.lose_reply(matching=DELAYED)
    with world.working(threads=4):
        wait_until(lambda: world.runs["job"] > 4, 20, lambda: f"more than four runs in {world.runs}")
