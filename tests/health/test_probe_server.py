"""The HTTP endpoint: one for all worker processes of a master, and the next one when it ends."""

from __future__ import annotations

import http.client
import json
import socket

import pytest

from dramatiq_guard.probing.probe_files import STATES, ProbeFiles
from dramatiq_guard.probing.probe_server import ProbeServer


@pytest.fixture
def server(tmp_path):
    """An endpoint on a free port of this host."""
    server = ProbeServer(tmp_path, "127.0.0.1", 0)
    assert server.bind()
    yield server
    server.close()


def get(port, path, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("state", STATES)
def test_each_probe_has_its_path(server, tmp_path, state):
    """200 if it holds, 503 with the reasons in one line of JSON if not."""
    files = ProbeFiles(tmp_path, 41)
    files.write({state}, {})
    status, body = get(server.port, f"/{state}")
    assert (status, json.loads(body)) == (200, {"probe": state, "ok": True, "reasons": []})

    files.write((), {each: ["so"] for each in STATES})
    status, body = get(server.port, f"/{state}?whatever")
    assert status == 503
    assert body.count(b"\n") == 1
    answer = json.loads(body)
    assert not answer["ok"]
    assert len(answer["reasons"]) == 1


def test_a_head_request_has_no_body(server):
    """Some load balancers ask so."""
    assert get(server.port, "/live", "HEAD") == (503, b"")


def test_an_unknown_path_says_which_there_are(server):
    """404."""
    status, body = get(server.port, "/healthz")
    assert (status, json.loads(body)) == (404, {"probes": list(STATES)})


def test_the_first_that_binds_answers_and_the_next_takes_over(tmp_path, server):
    """Each process tries again and again."""
    other = ProbeServer(tmp_path, "127.0.0.1", server.port)
    assert not other.bind()
    assert not other.bound
    assert get(server.port, "/live")[0] == 503

    server.close()
    assert other.bind()
    assert other.bind(), "it is bound already"
    assert get(other.port, "/live")[0] == 503
    other.close()
    other.close()


def test_it_listens_on_loopback_only(server):
    """Unless it is told otherwise."""
    assert server._server.socket.getsockname()[0] == "127.0.0.1"


def test_an_address_that_is_not_ours_is_an_error(tmp_path):
    """192.0.2.0/24 is nobody's."""
    with pytest.raises(OSError, match="Cannot assign"):
        ProbeServer(tmp_path, "192.0.2.1", 0).bind()


def test_a_client_that_hangs_up_disturbs_nobody(server, capsys):
    """No traceback on standard error, which is the log pipe of the workers."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\n")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    assert get(server.port, "/live")[0] == 503
    assert capsys.readouterr().err == ""
