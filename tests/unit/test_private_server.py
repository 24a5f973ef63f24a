"""A server of one's own, told with a small one in Python: what becomes of one that does not start, answer or stop."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import ClassVar

import pytest

from dramatiq_guard.testing import private_server as module
from dramatiq_guard.testing.private_server import PrivateServer, ServerDidNotStart, free_port

LISTEN = """
import signal, socket, sys, time
print("listening", flush=True)
{deaf}
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    server.accept()
"""


class Small(PrivateServer):
    """Listens, and does nothing else."""

    name = "small"
    source: ClassVar[str] = LISTEN.format(deaf="")

    def command(self) -> list[str]:
        return [sys.executable, "-S", "-c", self.source, str(self.port)]

    def answers(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), 1).close()
        return True


class Deaf(Small):
    """Does not hear SIGTERM."""

    source = LISTEN.format(deaf="signal.signal(signal.SIGTERM, signal.SIG_IGN)")


class Ending(Small):
    """Says why it cannot, and ends."""

    source = "print('the disk is full'); raise SystemExit(7)"


class Silent(Small):
    """Runs, and answers nobody."""

    source = "import time; print('thinking', flush=True); time.sleep(60)"


def test_it_runs_inside_the_block_and_leaves_nothing():
    """No process, no directory; and may be closed twice."""
    with Small() as server:
        assert server.running
        assert server.start() is server
        assert repr(server) == f"<Small 127.0.0.1:{server.port} pid {server.pid}>"
        assert "listening" in server.log
        pid = server.pid
    server.close()

    assert not server.directory.exists()
    assert not server.running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "not running" in repr(server)
    assert server.log == ""


def test_a_server_that_ended_while_starting_is_told_with_the_end_of_its_log():
    """And its directory goes, too."""
    server = Ending()
    with pytest.raises(ServerDidNotStart, match=r"ended with status 7 while starting.*\n.*the disk is full"):
        server.__enter__()
    assert not server.directory.exists()


def test_a_server_that_stays_silent_is_killed():
    """With what it said, and for how long it was waited for."""
    server = Silent(ready_within=0.3)
    with pytest.raises(ServerDidNotStart, match=r"did not answer within 0.3 s"), server:
        pytest.fail("it does not answer")
    assert not server.running


def test_port_and_data_stay_over_a_restart():
    """Another process answers on the same port."""
    with Small() as server:
        (server.directory / "data").write_text("kept")
        before = (server.pid, server.port)
        server.restart(signal.SIGKILL)

        assert server.port == before[1]
        assert server.pid != before[0]
        assert (server.directory / "data").read_text() == "kept"
        assert server.log.count("listening") == 2


def test_a_frozen_server_can_be_stopped():
    """It would not see the signal otherwise."""
    with Small() as server:
        server.pause()
        server.stop(timeout=5)
        assert not server.running
        with pytest.raises(RuntimeError, match=r"call start\(\) first"):
            _ = server.pid
        server.stop()  # once more is no error


def test_a_server_that_does_not_hear_is_killed():
    """After it was asked."""
    with Deaf() as server:
        server.stop(timeout=0.05)
        assert not server.running


def test_the_death_of_a_process_that_is_gone_already_is_no_error():
    """It ended by itself between the look and the signal."""
    with Small() as server:
        server.family = lambda: [2**22 + 1, server.pid]  # type: ignore[method-assign]
        server.pause()
        server.resume()
        assert server.answers()


def test_a_forked_child_leaves_its_parents_server_alone(monkeypatch):
    """It runs the same callbacks when it ends."""
    with Small() as server:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            server.close()
        assert server.running
        assert server.directory.exists()


def test_what_a_server_is_a_subclass_says():
    """How it is started, and when it answers."""
    server = PrivateServer(port=1)
    try:
        for question in (server.command, server.answers):
            with pytest.raises(NotImplementedError):
                question()
    finally:
        server.close()


def test_a_free_port_is_free_and_none_is_an_error(monkeypatch):
    """Among two hundred tried."""
    port = free_port()
    assert port in module._PORTS
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(module.random.SystemRandom, "sample", lambda self, ports, count: [port] * count)
        with pytest.raises(OSError, match="no free port"):
            free_port()
