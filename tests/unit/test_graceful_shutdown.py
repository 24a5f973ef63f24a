"""Deadlines, probes, and who is told when the end begins."""

from __future__ import annotations

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import GracefulShutdown, host, install
from dramatiq_guard.errors import SetupError
from dramatiq_guard.probing import probes
from dramatiq_guard.probing.probe_files import ask
from dramatiq_guard.wiring import stack_of
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"soft_deadline": "25s"}, "soft_deadline"),
        ({"hard_deadline": -1}, "hard_deadline"),
        ({"soft_deadline": 5, "hard_deadline": 5}, r"hard_deadline \(5 ms\) must come after soft_deadline \(5 ms\)"),
        ({"probe_port": 0}, "probe_port must be a port from 1 to 65535, not 0"),
        ({"probe_port": True}, "probe_port must be a port"),
        ({"probe_port": "80"}, "probe_port must be a port"),
        ({"probe_port": 65_536}, "probe_port must be a port"),
    ],
)
def test_a_wrong_argument_is_named(options, complaint):
    """When the middleware is made."""
    with pytest.raises(SetupError, match=complaint):
        GracefulShutdown(**options)


@pytest.fixture
def shutting(monkeypatch):
    """Makes a worker, not started, on a broker in memory whose stack shuts down gracefully."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    made = []

    def make(**options):
        broker = StubBroker()
        install(broker, GracefulShutdown(**options))
        broker.declare_queue("default")
        worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=1)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.broker.close()


def test_the_end_of_the_process_has_its_deadlines(shutting):
    """As soon as the worker has booted."""
    worker = shutting(soft_deadline=1_000, hard_deadline=2_000)
    worker.start()
    ending = stack_of(worker.broker).exit
    try:
        assert (ending.soft_deadline, ending.hard_deadline, ending.begun) == (1_000, 2_000, False)
    finally:
        worker.stop()
    assert ending.begun
    assert ending.reason == "the worker was stopped"
    assert ending._finished.is_set()


def test_probes_are_answered_from_the_boot_to_the_end(shutting, tmp_path, monkeypatch):
    """Ready; draining as soon as the end begins; nothing any more when it is over."""
    monkeypatch.setattr(probes, "EVERY", 20)
    worker = shutting(probe_dir=tmp_path / "probes")
    worker.start()
    try:
        wait_until(lambda: ask(tmp_path / "probes", "ready").holds, describe=lambda: ask(tmp_path / "probes", "ready"))
        stack_of(worker.broker).exit.begin("the test says so")
        wait_until(lambda: ask(tmp_path / "probes", "draining").holds, describe="the end to be told")
        assert not ask(tmp_path / "probes", "ready").holds
    finally:
        worker.stop()
    assert list((tmp_path / "probes").iterdir()) == []


def test_probes_that_cannot_be_answered_stop_the_boot(shutting, tmp_path, monkeypatch):
    """And with it the event loop, which would keep the process."""
    stopped = []
    monkeypatch.setattr(host, "stop_event_loop", lambda: stopped.append(1))
    (tmp_path / "file").write_text("")
    worker = shutting(probe_dir=tmp_path / "file" / "probes")
    with pytest.raises(SetupError, match="Probes cannot be answered"):
        worker.broker.emit_before("worker_boot", worker)
    stack_of(worker.broker).stop()

    assert stopped == [1]
