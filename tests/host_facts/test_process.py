"""How a real ``dramatiq`` process boots, takes signals and ends, as far as ending it ourselves leans on that."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.workers import Workers

APP = """
import os, signal, sys, threading, time
import dramatiq
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Middleware, MiddlewareError

what = os.environ["FACT"]


def say(text):
    print(text, file=sys.__stderr__, flush=True)


class Outermost(Middleware):
    def after_process_boot(self, broker):
        say("process boot")

    def before_worker_boot(self, broker, worker):
        if what == "refused":
            raise MiddlewareError("wrong order")
        stock = signal.getsignal(signal.SIGTERM)
        main = threading.current_thread() is threading.main_thread()
        say(f"worker boot: main thread {main}, handler {stock.__name__}")

        def chained(signum, frame):
            say("our handler")
            stock(signum, frame)

        signal.signal(signal.SIGTERM, chained)

    def after_worker_boot(self, broker, worker):
        if what == "busy":
            block.send()

    def after_worker_shutdown(self, broker, worker):
        say("worker shutdown")
        if what == "exits":
            raise SystemExit(70)


broker = StubBroker(middleware=[Outermost()])
dramatiq.set_broker(broker)


@dramatiq.actor
def block():
    say("blocked")
    time.sleep(60)
"""


def workers(tmp_path: Path, fact: str, *, ready_within: float = 30.0) -> Workers:
    """The command line on the app above, with one worker process."""
    (tmp_path / "host_fact_app.py").write_text(APP)
    return Workers(
        "host_fact_app", processes=1, threads=1, path=tmp_path, env={"FACT": fact}, ready_within=ready_within
    )


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left of a process: its exit code and what it wrote."""

    code: int
    log: str


@pytest.fixture(scope="module")
def exits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """One run that is told to stop and whose outermost middleware raises SystemExit(70) at the end."""
    with workers(tmp_path_factory.mktemp("exits"), "exits") as running:
        running.term()
        yield Ended(running.wait(), running.log)


def test_system_exit_after_the_shutdown_is_the_exit_code(exits: Ended) -> None:
    """H11: SystemExit(n) raised in after_worker_shutdown ends the worker and its master with n, which is how a fatal
    end is told."""
    assert 70 == exits.code
    assert "worker shutdown" in exits.log


def test_the_worker_boots_in_the_main_thread_after_the_signal_handlers(exits: Ended) -> None:
    """H11: before_worker_boot runs in the main thread with Dramatiq's handlers in place, so a middleware may chain
    its own there."""
    assert "worker boot: main thread True, handler termhandler" in exits.log
    assert 1 == exits.log.count("our handler")


def test_the_process_boots_before_the_worker(exits: Ended) -> None:
    """H12: under the command line process_boot comes before worker_boot, in the worker process alone."""
    assert 1 == exits.log.count("process boot")
    assert exits.log.index("process boot") < exits.log.index("worker boot")


def test_a_refused_boot_exits_with_1(tmp_path: Path) -> None:
    """H11: a MiddlewareError in before_worker_boot stops the boot with exit code 1 and its text in the log."""
    with workers(tmp_path, "refused", ready_within=0) as running:
        assert 1 == running.wait()
        assert "wrong order" in running.log


def test_a_second_term_ends_a_draining_worker_at_once(tmp_path: Path) -> None:
    """H11: a second TERM while draining is sys.exit(1) without after_worker_shutdown, so our handler must swallow
    repetitions."""
    with workers(tmp_path, "busy") as running:
        running.wait_log("blocked")
        running.signal_worker(signal.SIGTERM)
        running.wait_log("Stopping worker process...")
        running.signal_worker(signal.SIGTERM)

        assert 1 == running.wait()
        assert "Killing worker process..." in running.log
        assert "worker shutdown" not in running.log


def test_a_worker_that_ends_with_0_makes_its_master_end_with_0(tmp_path: Path) -> None:
    """H11: the master never restarts a worker and takes over its exit code, 0 as well, so an abnormal end must never
    be 0."""
    with workers(tmp_path, "ends") as running:
        running.signal_worker(signal.SIGTERM)

        assert 0 == running.wait()
        assert "exited unexpectedly (code 0)" in running.log
