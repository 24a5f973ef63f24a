"""Whatever makes a worker process unfit: it leaves with 70, its messages are retried, finished or handed back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.waiting import wait_until

from .fleet import fleet

#: How many run beside each other: most of the time they boot.
AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to become unfit.

    Parameters:
      actor(str): Which actor meets it.
      kind(str): What it is; see `app`.
      says(str): What the log tells of it.
      retried(bool): Whether it is the message's own error, so that the message is retried; otherwise it finishes.
      interrupted(bool): Whether it cannot finish, and is requeued without being counted.
      options(dict): Options of CrashOnFatal.
    """

    actor: str
    kind: str
    says: str
    retried: bool = True
    interrupted: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{'async ' if self.actor == 'afaulty' else ''}{self.kind}"


FAULTS = (
    *(
        Fault(actor, kind, f"of actor '{actor}' met a fatal error")
        for actor in ("faulty", "afaulty")
        for kind in ("MemoryError", "SystemExit", "KeyboardInterrupt", "GeneratorExit", "Fatal", "Unfit")
    ),
    Fault("faulty", "thread", "the thread of-the-actor died of ZeroDivisionError", retried=False),
    Fault("afaulty", "task", "an asyncio task left ZeroDivisionError unhandled", retried=False),
    Fault("afaulty", "loop", "the event loop of async actors has died", retried=False, interrupted=True),
    Fault("faulty", "worker thread", "(WorkerThread) has died", retried=False),
    Fault("faulty", "memory", "of memory, more than max_memory=", retried=False, options={"max_memory": 250 * 2**20}),
    Fault(
        "hanging", "stuck", "a job is stuck past its time limit", options={"stuck_after": 100, "stuck_is_fatal": True}
    ),
)


@dataclass(slots=True)
class Ended:
    """What was seen when the process had ended."""

    code: int
    log: str
    began: dict[str, int]
    finished: dict[str, int]
    lying: dict[str, Any]
    held: int
    letters: int


def run(fault: Fault, url: str) -> Ended:
    """Let a process with four threads meet a fault, with three jobs beside it and three more behind."""
    with fleet("redis", url, url, threads=4, **fault.options) as workers:
        for at in range(3):
            workers.send("innocent", f"beside{at}", 1)
        workers.send(fault.actor, "fault", fault.kind)
        for at in range(3):
            workers.send("innocent", f"behind{at}", 1)
        command = workers.start(ready=False)
        code = command.wait(60)
        return Ended(
            code, workers.log, workers.keys("began"), workers.keys("finished"), workers.lying(), workers.held(),
            len(workers.letters()),
        )  # fmt: skip


@pytest.fixture(scope="module")
def ended(valkey, request: pytest.FixtureRequest) -> Iterator[Callable[[Fault], Ended]]:
    """What was seen of a fault: all that are asked for begin with the first."""
    wanted = [
        item.callspec.params["fault"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "fault" in item.fixturenames
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = {fault: pool.submit(run, fault, valkey.url) for fault in wanted}
        yield lambda fault: outcomes[fault].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_an_unfit_process_leaves_with_70_and_loses_nothing(fault: Fault, ended) -> None:
    """It says why; the message that met the error waits for its retry, the others finish or are in their queue."""
    seen = ended(fault)

    assert 70 == seen.code, seen.log
    assert fault.says in seen.log
    assert "code=70" in seen.log
    assert 0 == seen.held
    assert 0 == seen.letters
    assert ("fault" in seen.lying) == (fault.retried or fault.interrupted), seen.log
    if fault.retried or fault.interrupted:
        assert fault.retried == seen.lying["fault"].options.get("retries", 0)
    for at in range(3):
        assert 1 == seen.finished[f"beside{at}"], seen.log
        assert (f"behind{at}" in seen.lying) != (seen.finished[f"behind{at}"] == 1)
    assert {1} == set(seen.began.values()), "nothing was begun twice"


def test_a_process_that_cannot_even_end_itself_is_gone_all_the_same(valkey) -> None:
    """There is no room for the thread that would end it in order: it leaves at once, and what it held comes back."""
    with fleet("redis", valkey.url, valkey.url, threads=2) as workers:
        workers.send("faulty", "fault", "no room")
        workers.send("innocent", "beside", 600)
        command = workers.start(ready=False)

        assert 70 == command.wait(60)

        assert {"fault", "beside"} == set(workers.lying())


def test_a_stuck_job_is_said_with_its_stack(valkey) -> None:
    """Once, with the line that it hangs at; unless somebody asks for more, the process goes on."""
    with fleet("redis", valkey.url, valkey.url, threads=2, stuck_after=100) as workers:
        stuck = workers.send("hanging", "fault", "stuck")
        command = workers.start()
        workers.wait_noted("began")
        workers.send("innocent", "beside", 0)
        command.wait_log("100 ms past its time limit")
        workers.wait_noted("finished")
        wait_until(
            lambda: "fault" in workers.lying() and not workers.held(delayed=False),
            20,
            lambda: f"{workers.lying()}, {workers.held()} held; {workers.story()}",
        )

        assert f"The job of message '{stuck.message_id}'" in command.log
        assert "in hanging" in command.log
        assert 1 == command.log.count("past its time limit")
        assert [] == workers.codes
        assert command.process is not None
        assert command.process.poll() is None


def test_a_held_interpreter_ends_the_process(valkey) -> None:
    """Nothing in Python can: faulthandler does, with 1 and the stacks; it counts as a crash, and the rest goes on."""
    with fleet("redis", valkey.url, valkey.url, threads=2, held_after=2_500, max_crashes=1) as workers:
        command = workers.start()
        # Not before it is ready: a worker that ends while it boots can leave Dramatiq's master waiting for ever.
        sent = workers.send("faulty", "fault", "held")
        assert 1 == command.wait(60)
        assert "hold_the_interpreter" in command.log

        workers.supervise()
        wait_until(workers.letters, 60, workers.story)

        (letter,) = workers.letters()
        assert ("poison", sent.message_id) == (letter.reason, letter.message_id)
        assert {"fault": 1} == workers.keys("began")


def test_an_orphan_leaves(valkey) -> None:
    """Its master was killed: within five seconds nobody is left, and what it was at is in its queue, uncounted."""
    with fleet("redis", valkey.url, valkey.url, processes=2, threads=2) as workers:
        workers.send("innocent", "long", 600)
        command = workers.start()
        workers.wait_noted("began")
        command.signal(signal.SIGKILL)

        wait_until(lambda: not [pid for pid in command.pids if _runs(pid)], 5, workers.story)

        assert "retries" not in workers.lying()["long"].options
        assert 0 == workers.held()


def test_a_process_that_leaves_by_itself_has_not_crashed(valkey) -> None:
    """Neither one that was told to stop, nor one that was killed since it took too long over that."""
    with fleet("redis", valkey.url, valkey.url, threads=2) as workers:
        workers.environment["QUARANTINE_SOFT"] = "60000"
        workers.send("innocent", "long", 600)
        command = workers.start()
        workers.wait_noted("began")
        crashes = workers.stores.deliveries.crashes
        message_id = workers.lying()["long"].message_id
        wait_until(lambda: crashes.history(message_id, since=0).open)
        command.term()
        wait_until(lambda: not crashes.history(message_id, since=0).open, 10, workers.story)
        command.kill()
        command.wait()

        assert 0 == crashes.inquest(now=2**45)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
