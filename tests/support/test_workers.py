"""The workers under test are real processes, and none of them outlives its block."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker

from tests.support.workers import Workers

_APP = """
import os
import dramatiq
from dramatiq.brokers.redis import RedisBroker

dramatiq.set_broker(RedisBroker(url=os.environ["REDIS_URL"]))

@dramatiq.actor
def greet(name):
    print("hello,", name, flush=True)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "greeting_app.py").write_text(_APP)
    return tmp_path


def test_workers_run_what_is_sent_and_end_when_asked(app: Path, redis_url: str, redis_broker: RedisBroker) -> None:
    """They are ready when the block begins, run an actor, and SIGTERM ends them with 0."""
    message: dramatiq.Message[None] = dramatiq.Message("default", "greet", ("world",), {}, {})
    with Workers("greeting_app", processes=2, path=app, env={"REDIS_URL": redis_url}) as workers:
        assert 2 == len(workers.pids)
        assert {workers.pid, *workers.pids} <= set(workers.alive)
        redis_broker.enqueue(message)
        workers.wait_log("hello, world")
        workers.term()
        assert 0 == workers.wait()


def test_orphans_of_a_killed_master_end_with_the_block(app: Path, redis_url: str) -> None:
    """SIGKILL to the master leaves its workers running, as in life; the end of the block ends them."""
    with Workers("greeting_app", path=app, env={"REDIS_URL": redis_url}) as workers:
        workers.signal(signal.SIGKILL)
        assert -signal.SIGKILL == workers.wait()
        assert set(workers.pids) <= set(workers.alive)

    assert [] == workers.alive


def test_an_app_that_does_not_boot_is_told_at_once(tmp_path: Path) -> None:
    """The error holds the log of the workers."""
    with pytest.raises(AssertionError, match="No module named 'no_such_app'"), Workers("no_such_app", path=tmp_path):
        pytest.fail("it booted")


def test_the_log_is_removed(app: Path, redis_url: str) -> None:
    """Nothing is left in the temporary directory."""
    with Workers("greeting_app", path=app, env={"REDIS_URL": redis_url}) as workers:
        assert os.path.exists(workers.log_path)

    assert not os.path.exists(workers.log_path)
