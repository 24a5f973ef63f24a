"""What was prefetched or delayed goes back to its queue at once, in its order, and nothing is lost or doubled by it."""

from __future__ import annotations

from tests.support.waiting import wait_until

from .running import Run, again

EIGHT = [f"job-{number}" for number in range(8)]


def _across_a_restart(run: Run) -> list[str]:
    """Send eight, restart while the second one runs; in which order they began."""
    for key in EIGHT:
        run.send("short", key)
    run.workers.start()
    run.wait_begun(2)
    run.workers.term()
    run.workers.wait()
    run.ledger.let_all_be_fast()
    with again(run, threads=1):
        wait_until(lambda: run.ledger.keys("finished").keys() == set(EIGHT), 20, lambda: run.ledger.path.read_text())
    return [key for key, _ in run.ledger.lines("began")]


def test_eight_messages_run_in_their_order_across_a_restart(on_each) -> None:
    """With one thread, a restart is not to be seen in what ran when."""
    with on_each(threads=1, boot=False, dramatiq_queue_prefetch="4") as run:
        assert EIGHT == _across_a_restart(run)


def test_stock_dramatiq_runs_them_in_another_order(on_redis) -> None:
    """On Redis it puts what it had prefetched behind everything else."""
    with on_redis(stack="stock", threads=1, boot=False, dramatiq_queue_prefetch="4") as run:
        order = _across_a_restart(run)
    assert sorted(order) == EIGHT
    assert order != EIGHT


def test_all_of_it_is_back_while_jobs_still_run(on_each) -> None:
    """Nobody waits for the jobs of a process that ends: others can have what it only held."""
    with on_each(threads=1, soft=20_000, hard=25_000) as run:
        run.send("long", "running")
        run.wait_begun()
        for number in range(3):
            run.send("short", f"waiting-{number}")
            run.send("short", f"delayed-{number}", delay=(number + 1) * 600_000)
        run.workers.term()
        run.workers.wait_log("The worker process ends")

        def back() -> bool:
            lying = run.broker.look()
            return ["waiting-0", "waiting-1", "waiting-2"] == [message.args[0] for message in lying.waiting] and (
                ["delayed-0", "delayed-1", "delayed-2"] == [message.args[0] for message in lying.delayed]
            )

        wait_until(back, 10, lambda: f"{run.broker.look()}\n{run.workers.log}")
        assert run.workers.process is not None
        assert run.workers.process.poll() is None, "the job ended before what was held came back"


def test_a_healthy_worker_takes_up_what_another_one_hands_back(on_redis) -> None:
    """During a rolling deploy, messages wait for no process that drains."""
    with on_redis(threads=1, soft=20_000, hard=25_000) as run:
        run.send("long", "running")
        run.wait_begun()
        for number in range(3):
            run.send("short", f"waiting-{number}")
        run.workers.term()
        run.ledger.let_all_be_fast()
        with again(run):
            run.wait_noted("finished", 3)
        assert {"running", *(f"waiting-{number}" for number in range(3))} == set(run.ledger.keys("began"))
        assert 1 == max(run.ledger.keys("began").values())
