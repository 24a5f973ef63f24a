"""RabbitMQ and several worker processes: what one has begun may come again to another."""

from __future__ import annotations

import signal
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from dramatiq_guard import connect
from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.waiting import wait_until
from tests.support.workers import Workers

from .rabbitmq_jobs import Jobs, send
from .rabbitmq_world import dead, unsettled

pytestmark = [pytest.mark.matrix, pytest.mark.usefixtures("impatient")]


@pytest.mark.parametrize("fault", ["closed", "killed"])
def test_two_processes_lose_nothing_and_double_no_end(
    fault: str, private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Connections are closed three times, or a worker process is killed, while sixty jobs fail three times each: all
    are done, or dead with one letter; what was running may run twice, and no retry is sent twice on account of it."""
    jobs = Jobs(tmp_path / "jobs")
    env = {"RABBITMQ_URL": rabbitmq_url, "STORE": redis_url, "JOBS": str(jobs.path)}
    keys = [f"job-{n}" for n in range(60)]
    refused = [f"refused-{n}" for n in range(20)]
    send(rabbitmq_url, *((key, 3, False, 50) for key in keys), *((key, 0, True, 50) for key in refused))
    with Workers("tests.settlement.rabbitmq_app", processes=2, threads=4, env=env) as workers:
        for turn in range(3):
            wait_until(partial(_ran, jobs, 60 * turn), 30, lambda: f"runs: {jobs.runs}")
            if fault == "closed":
                private_rabbitmq.close_all_connections()
        if fault == "killed":
            workers.signal_worker(signal.SIGKILL)
            workers.wait()
        else:
            _finish(private_rabbitmq, rabbitmq_url, workers)
    if fault == "killed":
        with Workers("tests.settlement.rabbitmq_app", processes=2, threads=4, env=env) as workers:
            _finish(private_rabbitmq, rabbitmq_url, workers)
    stores = connect(redis_url)
    letters = Counter(letter.args[0] for letter in stores.dead_letters.page(limit=500).letters)
    stores.close()
    assert set(keys) == jobs.done.keys()
    assert Counter(refused) == letters
    assert set(refused) == dead(rabbitmq_url).keys()
    surplus = jobs.runs - Counter({**dict.fromkeys(keys, 4), **dict.fromkeys(refused, 1)})
    assert sum(surplus.values()) <= 3 * 2 * 8, f"no more than was running or being acked each time: {surplus}"


def _finish(rabbitmq: PrivateRabbitMQ, url: str, workers: Workers) -> None:
    wait_until(lambda: not unsettled(rabbitmq, url), 45, lambda: f"{unsettled(rabbitmq, url)}\n{workers.log}")


def _ran(jobs: Jobs, least: int) -> bool:
    return sum(jobs.runs.values()) > least
