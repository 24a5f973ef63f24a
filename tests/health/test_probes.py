"""The thread that keeps the answers up to date, in one process."""

from __future__ import annotations

import http.client
import os
import stat

import pytest

from dramatiq_guard.errors import SetupError
from dramatiq_guard.probing import probes as module
from dramatiq_guard.probing.health import Condition
from dramatiq_guard.probing.probe_files import ProbeFiles, ask
from dramatiq_guard.probing.probes import Probes
from dramatiq_guard.probing.sd_notify import Notifier
from dramatiq_guard.testing.private_server import free_port
from tests.support.waiting import wait_until


class Patient:
    """A health that is what the test says."""

    def __init__(self):
        self.draining = False
        self.started = True
        self.complaints = ()
        self.waits = ()

    def look(self):
        if self.draining:
            return Condition(self.started, draining=True, waits=("it is draining",))
        return Condition(self.started, False, self.complaints, self.waits)


class Heard(Notifier):
    """Writes down what systemd would hear."""

    def __init__(self, watchdog=True):
        super().__init__({"NOTIFY_SOCKET": "@nobody", **({"WATCHDOG_USEC": "100000"} if watchdog else {})})
        self.messages = []

    def _send(self, message):
        self.messages.append(message)
        return True


@pytest.fixture
def patient():
    return Patient()


@pytest.fixture
def answering(patient, tmp_path, monkeypatch):
    """Starts probes that look twenty times a second, in a directory of the test's own unless told otherwise."""
    monkeypatch.setattr(module, "EVERY", 50)
    started = []

    def answer(**options):
        probes = Probes(patient, **{"directory": tmp_path, "notifier": Notifier({}), **options})
        started.append(probes)
        probes.start()
        return probes

    yield answer
    for probes in started:
        probes.close()


def test_the_files_follow_the_health(answering, patient, tmp_path):
    """From ready to not ready, to not live, to draining."""
    answering()
    assert [state for state in ("startup", "live", "ready", "draining") if ask(tmp_path, state).holds] == [
        "startup",
        "live",
        "ready",
    ]

    patient.waits = ("the broker has not answered on queue 'default'",)
    wait_until(lambda: not ask(tmp_path, "ready").holds)
    assert ask(tmp_path, "live").holds
    assert ask(tmp_path, "ready").reasons == (f"process {os.getpid()}: the broker has not answered on queue 'default'",)

    patient.complaints = ("worker thread 'Thread-3' is dead",)
    wait_until(lambda: not ask(tmp_path, "live").holds)
    assert ask(tmp_path, "live").reasons == (f"process {os.getpid()}: worker thread 'Thread-3' is dead",)

    patient.draining = True
    wait_until(lambda: ask(tmp_path, "draining").holds)
    assert ask(tmp_path, "live").holds
    assert not ask(tmp_path, "ready").holds


def test_it_says_at_once_that_it_drains(answering, patient, tmp_path, monkeypatch):
    """Whoever begins the end does not wait for the next look."""
    monkeypatch.setattr(module, "EVERY", 3_600_000)
    probes = answering()
    probes.drain()

    wait_until(lambda: ask(tmp_path, "draining").holds)
    assert patient.draining


def test_nothing_is_left_when_it_ends(answering, tmp_path):
    """Nor does its thread write it again."""
    probes = answering()
    probes.close()
    probes._thread.join(10)
    assert not probes._thread.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_a_port_is_answered_on(answering, tmp_path):
    """With a directory that nobody named."""
    port = free_port()
    probes = answering(directory=None, port=port)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/ready")
    assert connection.getresponse().status == 200
    connection.close()
    assert probes.directory.name == f"dramatiq-guard-{os.getuid()}-{os.getppid()}"
    assert stat.S_IMODE(probes.directory.stat().st_mode) == 0o700

    probes.close()
    assert not probes.directory.exists()


def test_without_a_wish_nothing_is_started(patient):
    """No directory, no port, no systemd."""
    probes = Probes(patient, notifier=Notifier({}))
    probes.start()
    probes.drain()
    probes.close()

    assert probes._thread is None
    assert not probes.directory.exists()


def test_a_directory_of_somebody_else_stops_the_boot(patient, tmp_path, monkeypatch):
    """The name of the private one can be guessed."""
    monkeypatch.setattr(module, "_private_directory", lambda: tmp_path / "private")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "private").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(SetupError, match="belongs to somebody else"):
        Probes(patient, port=0, notifier=Notifier({})).start()


def test_a_directory_that_cannot_be_made_stops_the_boot(patient, tmp_path):
    """A probe that could never hold would have the worker killed again and again."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="Give them a directory"):
        Probes(patient, directory=tmp_path / "file" / "probes", notifier=Notifier({})).start()


def test_what_fails_later_is_said_once_and_tried_again(answering, patient, tmp_path, caplog):
    """The disk is full for a while."""
    probes = answering()
    write, failures = probes._files.write, []

    def full(*_):
        failures.append(1)
        raise OSError("No space left on device")

    probes._files.write = full
    wait_until(lambda: len(failures) > 3)
    probes._files.write = write
    patient.waits = ("because",)
    wait_until(lambda: not ask(tmp_path, "ready").holds)

    said = [record.getMessage() for record in caplog.records if "just now" in record.getMessage()]
    assert said == ["Probes cannot be answered just now: No space left on device"]


def test_systemd_hears_of_start_life_and_end(answering, patient):
    """And of what it waits for."""
    patient.started = False
    patient.waits = ("its worker threads have not all started",)
    heard = Heard()
    answering(notifier=heard)
    wait_until(lambda: heard.messages.count("WATCHDOG=1") >= 2)
    assert "READY=1" not in heard.messages

    patient.started = True
    patient.waits = ("the broker has not answered on queue 'default'",)
    wait_until(lambda: "READY=1" in heard.messages)
    patient.waits = ()
    wait_until(lambda: "STATUS=ready" in heard.messages)
    patient.draining = True
    wait_until(lambda: "STOPPING=1" in heard.messages)
    seen = len(heard.messages)
    wait_until(lambda: "WATCHDOG=1" in heard.messages[seen:])

    assert [message for message in heard.messages if message != "WATCHDOG=1"] == [
        "STATUS=its worker threads have not all started",
        "READY=1",
        "STATUS=the broker has not answered on queue 'default'",
        "STATUS=ready",
        "STOPPING=1",
        "STATUS=draining",
    ]


def test_a_reload_is_no_end_to_systemd(answering):
    """The same master goes on with new processes, and a unit that stops is killed after a while."""
    heard = Heard()
    answering(notifier=heard).drain(reloading=True)
    wait_until(lambda: "STATUS=reloading" in heard.messages)

    assert "STOPPING=1" not in heard.messages


def test_the_watchdog_hears_nothing_of_a_process_that_is_not_live(answering, patient):
    """So systemd ends the unit."""
    heard = Heard()
    answering(notifier=heard)
    patient.complaints = ("worker thread 'Thread-3' is dead",)
    wait_until(lambda: "STATUS=worker thread 'Thread-3' is dead" in heard.messages)
    seen, looks = len(heard.messages), []
    look = patient.look
    patient.look = lambda: looks.append(1) or look()
    wait_until(lambda: len(looks) > 3)

    assert heard.messages[seen:] == []


def test_the_watchdog_hears_nothing_while_another_process_hangs(answering, tmp_path, turned):
    """Each process alone could keep the unit alive."""
    heard = Heard()
    probes = answering(notifier=heard)
    sibling = ProbeFiles(tmp_path, os.getppid())
    sibling.write({"startup", "live"}, {})
    wait_until(lambda: "WATCHDOG=1" in heard.messages)

    turned.added += 20_000
    wait_until(
        lambda: (
            ask(tmp_path, "live").reasons
            == (f"process {os.getppid()}: it has not been heard of for more than 10000 ms: it was killed, or hangs",)
        )
    )
    seen = probes._files
    rounds = []
    write = seen.write
    seen.write = lambda *arguments: rounds.append(len(heard.messages)) or write(*arguments)
    wait_until(lambda: len(rounds) > 3)
    assert rounds[-1] == rounds[1], "no word to the watchdog between two rounds"

    sibling.write({"startup", "live"}, {})
    wait_until(lambda: len(heard.messages) > rounds[-1])
