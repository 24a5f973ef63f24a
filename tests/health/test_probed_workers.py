"""Real worker processes that answer probes: started, frozen, without a broker, drained."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket

import pytest

from dramatiq_guard.probing import probe_files
from dramatiq_guard.probing.probe_files import ask
from dramatiq_guard.testing.private_server import free_port
from tests.support.waiting import wait_until
from tests.support.workers import Workers

APP = "tests.health.probed_app"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """As the application is."""
    monkeypatch.setattr(probe_files, "FRESH_FOR", 1_000)


def get(port, state):
    """What the endpoint says: the status and the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", f"/{state}")
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_two_processes_answer_as_one(redis_url, tmp_path):
    """Ready when both are, over HTTP as by files; not live while one is frozen; draining, and then gone."""
    port = free_port()
    env = {"REDIS_URL": redis_url, "PROBE_DIR": str(tmp_path / "probes"), "PROBE_PORT": str(port)}
    with Workers(APP, processes=2, env=env) as workers:
        wait_until(lambda: get(port, "ready")[0] == 200, describe=lambda: get(port, "ready"))
        directory = tmp_path / "probes"
        for pid in workers.pids:
            assert (directory / f"ready.{pid}").exists()
        for state in ("startup", "live", "ready"):
            assert ask(directory, state).holds
            assert get(port, state)[0] == 200
        assert get(port, "draining")[0] == 503

        owner = _listener(port, workers.pids)
        frozen = next(pid for pid in workers.pids if pid != owner)
        os.kill(frozen, signal.SIGSTOP)
        wait_until(lambda: get(port, "live")[0] == 503)
        assert get(port, "live")[1]["reasons"][0].startswith(f"process {frozen}: it has not been heard of")
        assert not ask(directory, "live").holds
        os.kill(frozen, signal.SIGCONT)
        wait_until(lambda: get(port, "live")[0] == 200)

        _send(redis_url, tmp_path / "go")
        wait_until((tmp_path / "go.begun").exists)
        workers.term()
        wait_until(lambda: ask(directory, "draining").holds)
        assert ask(directory, "live").holds
        assert not ask(directory, "ready").holds
        (tmp_path / "go").touch()
        assert workers.wait() == 0
        assert list(directory.iterdir()) == []


def test_without_a_broker_workers_are_live_and_not_ready(own_valkey, tmp_path):
    """Down at boot, up, down again: the processes are the same all the time."""
    own_valkey.stop()
    env = {"REDIS_URL": own_valkey.url, "PROBE_DIR": str(tmp_path)}
    with Workers(APP, env=env) as workers:
        wait_until(lambda: ask(tmp_path, "startup").holds, describe=lambda: ask(tmp_path, "startup"))
        assert ask(tmp_path, "live").holds
        assert "the broker has not answered on queue 'default'" in ask(tmp_path, "ready").reasons[0]

        own_valkey.start()
        wait_until(lambda: ask(tmp_path, "ready").holds, 20, lambda: ask(tmp_path, "ready"))
        own_valkey.stop()
        wait_until(lambda: not ask(tmp_path, "ready").holds, 20)
        assert ask(tmp_path, "live").holds
        assert len(workers.pids) == 1


def test_systemd_hears_of_real_workers(redis_url, tmp_path):
    """READY, a status, the watchdog's beat, STOPPING; from the workers, not from the master."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        systemd.settimeout(20)
        env = {"REDIS_URL": redis_url, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "400000"}
        with Workers(APP, env=env) as workers:
            heard = _listen(systemd, until=("READY=1", "WATCHDOG=1", "STATUS=ready"))
            assert "STOPPING=1" not in heard
            workers.term()
            _listen(systemd, until=("STOPPING=1",))
            assert workers.wait() == 0


def _listen(systemd, until):
    heard = set()
    while not heard.issuperset(until):
        heard.add(systemd.recv(4096).decode())
    return heard


def _send(redis_url, path):
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(url=redis_url)
    broker.enqueue(dramatiq.Message("default", "wait_for", (str(path),), {}, {}))
    broker.close()
    broker.client.connection_pool.disconnect()


def _listener(port, pids):
    """Which of the processes listens on a port."""
    with open("/proc/net/tcp") as table:
        (inode,) = (
            fields[9] for fields in map(str.split, table) if fields[1] == f"0100007F:{port:04X}" and fields[3] == "0A"
        )
    (owner,) = (
        pid
        for pid in pids
        if any(_points_at(f"/proc/{pid}/fd/{name}", f"socket:[{inode}]") for name in os.listdir(f"/proc/{pid}/fd"))
    )
    return owner


def _points_at(path, target):
    try:
        return os.readlink(path) == target
    except FileNotFoundError:  # closed meanwhile
        return False
