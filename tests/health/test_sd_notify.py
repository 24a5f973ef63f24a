"""What systemd hears, on a socket like its own."""

from __future__ import annotations

import os
import socket
import uuid

import pytest

from dramatiq_guard.probing.sd_notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def systemd(request, tmp_path):
    """A socket as systemd's: its address, and what it has heard."""
    address = str(tmp_path / "notify") if request.param == "path" else f"@guard-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address.replace("@", "\0") if request.param == "abstract" else address)
        listener.setblocking(False)

        def heard():
            messages = []
            while True:
                try:
                    messages.append(listener.recv(4096).decode())
                except BlockingIOError:
                    return messages

        yield address, heard


def test_ready_and_stopping_are_said_once(systemd):
    """However often they are true."""
    address, heard = systemd
    notifier = Notifier({"NOTIFY_SOCKET": address})
    for _ in range(3):
        notifier.ready()
        notifier.stopping()

    assert heard() == ["READY=1", "STOPPING=1"]


def test_the_status_is_said_when_it_changes(systemd):
    """In one line."""
    address, heard = systemd
    notifier = Notifier({"NOTIFY_SOCKET": address})
    for text in ("ready", "ready", "the broker\nis out", "ready"):
        notifier.status(text)

    assert heard() == ["STATUS=ready", "STATUS=the broker is out", "STATUS=ready"]


def test_the_watchdog_hears_us_where_it_listens(systemd):
    """Twice in its time; the process that it names is our master."""
    address, heard = systemd
    for pid in ({}, {"WATCHDOG_PID": str(os.getppid())}, {"WATCHDOG_PID": str(os.getpid())}):
        notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000000", **pid})
        assert notifier.every == 15_000
        notifier.alive()
        assert heard() == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    "variables",
    [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1000000000"}],
)
def test_no_watchdog_hears_nothing(systemd, variables):
    """Or one that watches somebody else."""
    address, heard = systemd
    notifier = Notifier({"NOTIFY_SOCKET": address, **variables})
    notifier.alive()

    assert notifier.every is None
    assert heard() == []


def test_without_systemd_nothing_is_sent():
    """There is nobody."""
    notifier = Notifier({"WATCHDOG_USEC": "30000000"})
    assert (notifier.enabled, notifier.every) == (False, None)
    notifier.ready()
    notifier.alive()


def test_what_cannot_be_sent_is_dropped_and_said_later(tmp_path):
    """The socket is gone for a while."""
    address = str(tmp_path / "notify")
    notifier = Notifier({"NOTIFY_SOCKET": address})
    notifier.ready()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.settimeout(5)
        notifier.ready()
        assert listener.recv(100) == b"READY=1"


def test_the_environment_is_the_processs_own(systemd, monkeypatch):
    """Where none is given."""
    address, heard = systemd
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    Notifier().ready()

    assert heard() == ["READY=1"]
