"""What stock Dramatiq does in some of these cells: the tests of the others would notice it."""

from __future__ import annotations


def test_stock_calls_abandoned_work_a_success(on_redis) -> None:
    """With a shutdown timeout it leaves with 0, and what was running stays in the ack set of a process that is gone."""
    with on_redis(stack="stock", threads=1, arguments=("--worker-shutdown-timeout", "500")) as run:
        run.send("long", "abandoned")
        run.wait_begun()
        run.workers.term()
        assert 0 == run.workers.wait()
        assert ["abandoned"] == [message.args[0] for message in run.broker.look().held]


def test_stock_strands_what_a_process_group_was_at(on_redis) -> None:
    """systemd and a terminal send each signal to all processes: the worker gets it twice, and drops everything."""
    with on_redis(stack="stock", threads=2, EXITS_ASYNC="no") as run:
        for number in range(6):
            run.send("long", f"job-{number}")
        for number in range(2):
            run.send("short", f"delayed-{number}", delay=600_000)
        run.wait_begun(2)
        # One after the other, as the group's own and the master's arrive: both at once may be handled as one.
        run.signal("TERM", "worker")
        run.workers.wait_log("Stopping worker process")
        run.signal("TERM", "master")
        assert 1 == run.workers.wait(90)
        held = {message.args[0] for message in run.broker.look().held}
        assert len({key for key in held if key.startswith("job")}) >= 2
