"""RabbitMQ, a connection that is closed while jobs run: tags start anew, and nobody else is settled by them."""

from __future__ import annotations

import pytest

from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.waiting import wait_until

from .rabbitmq_world import World

pytestmark = pytest.mark.usefixtures("impatient")


def _run_jobs(world: World) -> None:
    """Eight jobs of different ages run, with tags that no new channel begins with; a prefetch of innocents waits."""
    for n in range(5):
        world.send(f"early-{n}")
    wait_until(lambda: len(world.done) == 5, describe=lambda: f"five early jobs in {world.done}")
    for n in range(3):
        world.send(f"good-{n}", gate="jobs", sync=n != 1)
    for n in range(3):
        world.send(f"refused-{n}", gate="jobs", refused=True)
    for n in range(2):
        world.send(f"again-{n}", gate="jobs", fails=1)
    wait_until(lambda: sum(world.runs.values()) == 13, describe=lambda: f"eight running jobs in {world.runs}")
    for n in range(12):
        world.send(f"innocent-{n}", gate="innocents")
    wait_until(lambda: world.waiting() <= 4, describe="a full prefetch")


def _close(world: World, rabbitmq: PrivateRabbitMQ) -> None:
    """Close all connections, and wait until the consumers are back and have prefetched."""
    before = world.consuming()
    rabbitmq.close_all_connections()
    wait_until(lambda: len(world.consuming() - before) == 2, describe="both consumers to be back")
    wait_until(lambda: world.waiting() <= 4, describe="a full prefetch again")


def _innocents_run(world: World, count: int) -> None:
    wait_until(
        lambda: sum(runs for key, runs in world.runs.items() if "innocent" in key) >= count,
        describe=lambda: f"{count} innocents running in {world.runs}",
    )


def test_jobs_whose_connection_was_closed_settle_their_own_messages_once(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str
) -> None:
    """Connections are closed while eight jobs run, and again while others do: each attempt runs once, none is lost,
    and only those that were refused are dead."""
    world = World(private_rabbitmq, rabbitmq_url)
    with world.working(threads=8):
        _run_jobs(world)
        _close(world, private_rabbitmq)
        world.gate("jobs").set()
        _innocents_run(world, 8)
        _close(world, private_rabbitmq)
        world.gate("innocents").set()
        world.finish()
        world.check()

    assert {f"refused-{n}": 1 for n in range(3)} == world.dead()


def test_prefetched_messages_of_a_lost_connection_are_dropped_before_they_run(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str
) -> None:
    """A message waits in the process behind a job as their connection is closed: it runs once, when it comes again."""
    world = World(private_rabbitmq, rabbitmq_url)
    with world.working(threads=1):
        world.send("job", gate="job")
        wait_until(lambda: world.runs["job"], describe="the job to run")
        world.send("prefetched")
        wait_until(lambda: world.waiting() == 0, describe="the prefetch")
        _close(world, private_rabbitmq)
        world.gate("job").set()
        world.finish()
        world.check()


def test_a_connection_that_was_closed_while_idle_holds_nothing_up(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection over which a thread publishes was closed since its last retry: the next one goes out at once."""
    world = World(private_rabbitmq, rabbitmq_url)
    with world.working(threads=1):
        world.send("before", fails=1)
        world.finish()
        _close(world, private_rabbitmq)
        world.send("after", fails=1)
        world.finish()
        world.check()
    assert "stays unacked" not in caplog.text


def test_stock_dead_letters_innocents_and_completes_failing_jobs_twice(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str
) -> None:
    """The control: the same jobs on plain Dramatiq, one closing."""
    world = World(private_rabbitmq, rabbitmq_url, stock=True)
    with world.working(threads=8):
        _run_jobs(world)
        _close(world, private_rabbitmq)
        world.gate("jobs").set()
        _innocents_run(world, 8)
        world.gate("innocents").set()
        again = {"again-0": 2, "again-1": 2}
        wait_until(lambda: again.items() <= world.done.items(), describe=lambda: f"{again} in {world.done}")

    assert [key for key in world.dead() if "innocent" in key]
