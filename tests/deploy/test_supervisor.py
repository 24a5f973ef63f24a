"""supervisord, for real: a crash is started again, an end that was asked for is not."""

from __future__ import annotations

import configparser
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.limits import HARD_DEADLINE
from tests.support.waiting import wait_until

PROJECT = Path(__file__).parents[2]
CONFIGURATION = PROJECT / "deploy" / "supervisor" / "supervisord.conf"
SOCKET = ("unix_http_server", "file"), ("supervisorctl", "serverurl")


@pytest.fixture
def configuration():
    """What is delivered."""
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";",))
    parser.read(CONFIGURATION)
    return parser


@pytest.fixture
def supervised(configuration, tmp_path):
    """supervisord with what is delivered, but for paths, and for the 5 s before which every end is a failed start."""
    (tmp_path / "ends").write_text("")
    program = configuration["program:worker"]
    program["command"] = f"{sys.executable} -m dramatiq tests.deploy.deployed_app --processes 1 --threads 1"
    program["directory"] = str(PROJECT)
    program["environment"] = f'ENDS="{tmp_path / "ends"}"'
    program["stdout_logfile"] = str(tmp_path / "worker.log")
    program["startsecs"] = "0"
    configuration["unix_http_server"]["file"] = str(tmp_path / "socket")
    configuration["supervisorctl"]["serverurl"] = f"unix://{tmp_path / 'socket'}"
    configuration["supervisord"].update(
        {"logfile": str(tmp_path / "log"), "pidfile": str(tmp_path / "pid"), "user": "root"}
    )
    with (tmp_path / "conf").open("w") as file:
        configuration.write(file)
    started = []

    def start(*ends):
        (tmp_path / "ends").write_text("".join(f"{code}\n" for code in ends))
        command = [sys.executable, "-W", "ignore", "-m", "supervisor.supervisord", "-c", str(tmp_path / "conf")]
        with (tmp_path / "output").open("w") as output:
            started.append(subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True))
        return started[0]

    yield start
    for process in started:
        process.terminate()
        process.wait(60)


def status(tmp_path):
    """What supervisorctl says of the workers."""
    command = [sys.executable, "-W", "ignore", "-m", "supervisor.supervisorctl", "-c", str(tmp_path / "conf"), "status"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout


def test_crashes_are_started_again_and_a_clean_end_is_not(supervised, tmp_path):
    """70, 75 and 1 come back; 0 stays down."""
    process = supervised(70, 75, 1, 0)

    def log():
        assert process.poll() is None, (tmp_path / "output").read_text()
        return (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""

    wait_until(lambda: "exit status 0; expected" in log(), 60, log)
    assert re.findall(r"exited: worker \((?:exit status )(\d+); (expected|not expected)\)", log()) == [
        ("70", "not expected"),
        ("75", "not expected"),
        ("1", "not expected"),
        ("0", "expected"),
    ], log()
    assert log().count("spawned: 'worker'") == 4
    assert "EXITED" in status(tmp_path)


def test_it_stops_the_workers_as_they_want_to_be_stopped(supervised, tmp_path):
    """supervisord itself is told to stop: TERM, and they are shut down."""
    process = supervised()
    log = tmp_path / "worker.log"
    wait_until(lambda: log.exists() and "ready for action" in log.read_text(), 30)
    process.send_signal(signal.SIGTERM)
    process.wait(60)

    assert "Worker has been shut down." in log.read_text()
    assert "terminated by SIGTERM" not in (tmp_path / "log").read_text()
    assert "SIGKILL" not in (tmp_path / "log").read_text()


def test_it_waits_longer_than_the_hard_deadline(configuration):
    """Before it kills."""
    program = configuration["program:worker"]
    assert int(program["stopwaitsecs"]) * 1_000 > HARD_DEADLINE
    assert program["autorestart"] == "unexpected"
    assert program["exitcodes"] == "0"
