"""kill -9: nobody can hand anything back, so others must notice, and orphans must not live on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.support.waiting import wait_until

from .running import HEARTBEAT, Run, again, running

#: Seconds within which what a dead process held must run elsewhere.
REDELIVERED = (HEARTBEAT + 10_000) / 1000

JOBS = [f"job-{number}" for number in range(8)]


def _worker(run: Run) -> None:
    os.kill(run.process_of_a_job(), signal.SIGKILL)


def _master(run: Run) -> None:
    run.workers.signal(signal.SIGKILL)


def _all(run: Run) -> None:
    run.workers.kill()


@pytest.mark.parametrize("kill", [_worker, _master, _all])
def test_what_a_killed_process_held_runs_elsewhere(kill: Callable[[Run], None], on_redis) -> None:
    """Within the heartbeat timeout and ten seconds, on Redis, whichever process was killed; each job finishes once."""
    with on_redis(processes=2) as run:
        for key in JOBS:
            run.send("long", key)
        run.wait_begun(2)
        run.ledger.let_all_be_fast()
        with again(run):
            kill(run)
            wait_until(
                lambda: run.ledger.keys("finished").total() >= len(JOBS),
                REDELIVERED,
                lambda: f"{run.ledger.path.read_text()}\n{run.workers.log}",
            )
        assert set(JOBS) == set(run.ledger.keys("finished"))
        assert 1 == max(run.ledger.keys("finished").values())
        lying = run.broker.look()
        assert not lying.all
        assert not lying.dead


def test_rabbitmq_delivers_again_what_a_killed_process_held(rabbitmq, valkey) -> None:
    """The connection ends with the process, so nobody has to notice anything."""
    with running("rabbitmq", rabbitmq.url, valkey.url) as run:
        for key in JOBS:
            run.send("long", key)
        run.wait_begun()
        run.ledger.let_all_be_fast()
        run.workers.kill()
        with again(run):
            run.wait_noted("finished", len(JOBS), REDELIVERED)
        assert 1 == max(run.ledger.keys("finished").values())


@pytest.mark.parametrize("kind", ["long", "in C", "async blocking"])
def test_orphans_are_gone_within_five_seconds(kind: str, on_redis) -> None:
    """Whoever kills a master means its workers, too, and may have started another one."""
    with on_redis(processes=2, soft=20_000, hard=25_000) as run:
        for key in JOBS:
            run.send(kind, key)
        run.wait_begun()
        run.workers.signal(signal.SIGKILL)
        wait_until(lambda: not run.workers.alive, 5, lambda: f"{run.workers.alive} have not ended:\n{run.workers.log}")
        lying = run.settled(len(JOBS))
        assert dict.fromkeys(JOBS, 1) == lying.all
        assert not lying.held


def test_a_held_interpreter_ends_its_process(on_redis) -> None:
    """Nobody has to tell it: no signal would get through, nor a heartbeat.  Its stacks are in the log."""
    with on_redis(threads=1) as run:
        run.send("GIL held", "selfish")
        assert 1 == run.workers.wait()
        assert "hold_the_interpreter" in run.workers.log
        assert {"selfish": 1} == run.settled(1).all


def test_stock_orphans_live_on(on_redis) -> None:
    """They go on working unseen, beside those that were started in their place."""
    with on_redis(stack="stock", threads=1) as run:
        run.workers.signal(signal.SIGKILL)
        run.workers.wait(10)
        run.send("short", "unseen")
        run.wait_noted("finished")
        assert run.workers.alive
