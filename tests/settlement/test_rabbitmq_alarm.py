"""RabbitMQ out of memory: it reads nothing from who publishes, and carries out later what it was sent meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dramatiq.middleware import Middleware

from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.waiting import wait_until
from tests.support.workers import Workers

from .rabbitmq_jobs import Jobs, send
from .rabbitmq_world import World

pytestmark = pytest.mark.usefixtures("impatient")

#: In a URL: how long a publisher waits, in seconds, where the stack would choose ten.
SOON = "?blocked_connection_timeout=2"


class Superseded(Middleware):
    """Counts the copies that did not run because another one had."""

    count = 0

    def after_skip_message(self, broker: Any, message: Any) -> None:
        self.count += 1


def test_an_alarm_multiplies_nothing(private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str) -> None:
    """Jobs fail and delayed ones fall due while publishers are blocked: good jobs go on, no more than one copy each of
    the others comes true when the alarm is over, and each runs as planned."""
    superseded = Superseded()
    world = World(private_rabbitmq, rabbitmq_url + SOON, middleware=[superseded])
    for n in range(8):
        world.send(f"failing-{n}", gate="alarm", fails=2)
    for n in range(10):
        world.send(f"delayed-{n}", delay=2_000)
    for n in range(20):
        world.send(f"good-{n}", gate="alarm")
    with world.working(threads=16):
        wait_until(lambda: len(world.runs) == 16, describe=lambda: f"running jobs in {world.runs}")
        with private_rabbitmq.memory_alarm():
            world.gate("alarm").set()
            wait_until(lambda: len(world.done) == 20, describe=lambda: f"good jobs done in {world.done}")
            time.sleep(9)
        world.finish()
        world.check()
    assert superseded.count <= 8 + 2, "one copy of each failing job, and of what the delay consumer held, was given up"


def test_a_worker_stops_in_the_middle_of_an_alarm(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, redis_url: str, tmp_path: Path
) -> None:
    """TERM comes while all threads wait to publish their retries: the process leaves at its deadline and says so, and
    the next one goes on with what was left."""
    jobs = Jobs(tmp_path / "jobs")
    env = {"RABBITMQ_URL": rabbitmq_url + SOON, "STORE": redis_url, "JOBS": str(jobs.path)}
    keys = [f"job-{n}" for n in range(8)]
    send(rabbitmq_url, *((key, 2, False, 1_000) for key in keys))
    with Workers("tests.settlement.rabbitmq_app", threads=8, env=env) as workers:
        wait_until(lambda: len(jobs.began) == 8, describe=lambda: f"eight running jobs in {jobs.began}")
        with private_rabbitmq.memory_alarm():
            wait_until(lambda: len(jobs.runs) == 8, describe=lambda: f"eight failed jobs in {jobs.runs}")
            workers.wait_log("stays unacked")
            workers.term()
            assert workers.wait(timeout=12) == 75, workers.log
    with Workers("tests.settlement.rabbitmq_app", threads=8, env=env) as workers:
        wait_until(lambda: len(jobs.done) == 8, 30, lambda: f"eight jobs done in {jobs.done}\n{workers.log}")
        workers.term()
        assert workers.wait() == 0, workers.log
    assert Counter(keys) == jobs.done
    assert Counter(dict.fromkeys(keys, 4)) == jobs.runs, "the attempt that could not be settled, and the plan"


def test_stock_does_not_stop(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, redis_url: str, tmp_path: Path
) -> None:
    """The control: plain Dramatiq has not stopped long after it was told to."""
    jobs = Jobs(tmp_path / "jobs")
    env = {"RABBITMQ_URL": rabbitmq_url, "STORE": redis_url, "JOBS": str(jobs.path), "STOCK": "1"}
    send(rabbitmq_url, *((f"job-{n}", 2, False, 1_000) for n in range(8)))
    arguments = ("--worker-shutdown-timeout", "1000")
    with Workers("tests.settlement.rabbitmq_app", threads=8, env=env, arguments=arguments) as workers:
        wait_until(lambda: len(jobs.began) == 8, describe=lambda: f"eight running jobs in {jobs.began}")
        with private_rabbitmq.memory_alarm():
            wait_until(lambda: len(jobs.runs) == 8, describe=lambda: f"eight failed jobs in {jobs.runs}")
            workers.term()
            workers.wait_log("Shutting down")
            time.sleep(4)
            assert workers.alive
