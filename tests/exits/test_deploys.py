"""A deploy burns no retry, buries nothing, and doubles nothing, whatever the jobs are."""

from __future__ import annotations

import time

import pytest

from dramatiq_guard.delivery import CARRIER
from tests.support.waiting import wait_until

from .running import HEARTBEAT, Run, again, running


def test_c41_an_interrupted_job_burns_no_retry_and_waits_for_no_backoff(on_each) -> None:
    """It is back in its queue when the process has left, one interruption on its account, even with max_retries=0."""
    with on_each(threads=2) as run:
        run.send("long", "mortal", max_retries=0)
        run.send("long", "patient", max_retries=3)
        run.wait_begun(2)
        run.workers.term()
        assert 0 == run.workers.wait()
        lying = run.settled(2)
        assert {"mortal", "patient"} == {message.args[0] for message in lying.waiting}
        for message in lying.waiting:
            assert 0 == message.options.get("retries", 0)
            assert 1 == message.options[CARRIER]["interruptions"]
        assert not lying.dead
        assert 0 == run.letter_count()


def test_c41_stock_dramatiq_buries_a_notified_job_because_of_a_deploy(on_redis) -> None:
    """`notify_shutdown` is an attempt like any other to it."""
    with on_redis(stack="stock", threads=1) as run:
        run.broker.send("notified", "unlucky")
        run.wait_begun()
        run.workers.term()
        run.workers.wait()
        assert ["unlucky"] == [message.args[0] for message in run.broker.look().dead]


def test_c45_every_job_that_asks_is_notified_at_once(on_redis) -> None:
    """Eight of eight, long before the soft deadline, and all of them are back in their queue."""
    with on_redis(threads=8, soft=20_000, hard=25_000) as run:
        for number in range(8):
            run.broker.send("notified", f"job-{number}")
        run.wait_begun(8)
        run.workers.term()
        run.wait_noted("notified", 8, 15)
        assert 0 == run.workers.wait()
        lying = run.settled(8)
        assert 8 == len(lying.waiting)
        assert not lying.dead
        assert 0 == run.letter_count()


def test_c48_interruptions_have_an_end(on_redis) -> None:
    """A job that every deploy interrupts is given up after the fifth time, with a letter that says so."""
    with on_redis(threads=1) as run:
        run.send("long", "endless", **{CARRIER: {"interruptions": 5}})
        run.wait_begun()
        run.workers.term()
        assert 0 == run.workers.wait()
        assert ["endless"] == [message.args[0] for message in run.broker.look().dead]
        assert ["interrupted_too_often"] == [letter.reason for letter in run.letters.page(limit=5).letters]


def test_c17_a_process_that_drains_is_alive_to_others(on_redis) -> None:
    """A job that goes on for longer than the heartbeat timeout is not taken away from a process that drains."""
    seconds = 2 * HEARTBEAT / 1000
    with on_redis(threads=1, soft=20_000, hard=25_000) as run:
        run.send(f"{seconds} s", "slow")
        run.wait_begun()
        with again(run, threads=1):
            run.workers.term()
            assert 0 == run.workers.wait()
            assert [1, 1] == [run.ledger.keys("began")["slow"], run.ledger.keys("finished")["slow"]]
            assert not run.broker.look().all


def test_c44_async_actors_keep_no_process_alive(on_redis) -> None:
    """Dramatiq's event loop thread is no daemon: a coroutine that blocks it, and two TERMs, and it never ends."""
    with on_redis(stack="stock", threads=1) as run:
        run.send("async blocking", "stuck")
        run.wait_begun()
        run.workers.term()
        run.workers.wait_log("Stopping worker process")
        run.workers.term()
        run.workers.wait_log("Killing worker process")
        with pytest.raises(AssertionError, match="did not end"):
            run.workers.wait(3)
    with on_redis(threads=1) as run:
        run.send("async blocking", "stuck")
        run.wait_begun()
        run.workers.term()
        run.workers.wait_log("Stopping worker process")
        run.workers.term()
        assert 75 == run.workers.wait()


def test_a_later_signal_jumps_to_the_hard_deadline(on_redis) -> None:
    """Whoever repeats it after more than two seconds does not want to wait: interruptible jobs go back, others are
    abandoned."""
    with on_redis(threads=2, soft=50_000, hard=60_000) as run:
        run.send("long", "interruptible")
        run.send("in C", "not")
        run.wait_begun(2)
        run.workers.term()
        _after_two_seconds(run)
        run.workers.term()
        assert 75 == run.workers.wait(20)
        lying = run.settled(2)
        assert {"interruptible": 1, "not": 1} == lying.all
        assert not lying.held
        assert "interrupted=1" in run.workers.log


def test_signals_within_two_seconds_are_one(on_redis) -> None:
    """What a process group or an impatient hand sends twice does not cut a job short that has time to finish."""
    with on_redis(threads=1, soft=50_000, hard=60_000) as run:
        run.send("4 s", "unhurried")
        run.wait_begun()
        for _ in range(3):
            run.signal("TERM", "group")
        assert 0 == run.workers.wait()
        assert {"unhurried": 1} == run.ledger.keys("finished")


def test_a_long_job_can_ask_and_leave_early(on_each) -> None:
    """`current_delivery().shutting_down` turns true when the process is told to stop, and `time_left()` says how long
    there is until the job is interrupted."""
    with on_each(threads=1, soft=20_000, hard=25_000) as run:
        run.broker.send("leaves_early", "polite")
        run.wait_noted("in time")
        run.workers.term()
        assert 0 == run.workers.wait()
        assert {"polite": 1} == run.ledger.keys("finished")
        assert {"polite": 1} == run.ledger.keys("in a hurry")
        assert not run.settled(1).all


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_a_broker_that_does_not_answer_holds_nobody_up(kind: str, valkey, request: pytest.FixtureRequest) -> None:
    """It is frozen: out by the hard deadline all the same, not with 0, and what could not be settled comes back."""
    server = request.getfixturevalue("own_valkey" if kind == "redis" else "private_rabbitmq")
    with running(kind, server.url, valkey.url, threads=2) as run:
        for number in range(6):
            run.send("long", f"job-{number}")
        run.wait_begun(2)
        server.pause()
        try:
            run.workers.term()
            assert 75 == run.workers.wait()
        finally:
            server.resume()
        run.ledger.let_all_be_fast()
        with again(run):
            run.wait_noted("finished", 6)
        assert not run.settled(6).all
        assert 1 == max(run.ledger.keys("finished").values())


def _after_two_seconds(run: Run) -> None:
    """Wait until another signal would not count as the same one."""
    run.workers.wait_log("The worker process ends")
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 2.2, 10)
