"""The proxy does to a connection what it says, and counts what it carried."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until


class _Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            self.server.heard.append(line.strip())  # type: ignore[attr-defined]
            self.wfile.write(b"re:" + line)


class _EchoServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Echo)
        self.heard: list[bytes] = []

    def handle_error(self, *_: object) -> None:
        """A connection that the proxy has cut is what the tests are about."""


@pytest.fixture
def echo() -> Iterator[_EchoServer]:
    with _EchoServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: _EchoServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(("127.0.0.1", echo.server_address[1])) as proxy:
        yield proxy
    wait_until(lambda: proxy.open_connections == 0, describe="the proxy's connections to be over")


def _connect(proxy: FaultyProxy, timeout: float = 5.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout)


def _ask(connection: socket.socket, line: bytes) -> bytes:
    connection.sendall(line + b"\n")
    return connection.recv(1024)


def test_turns_are_counted_for_each_connection(proxy: FaultyProxy) -> None:
    """A request and its answer are one turn, counted for their own connection."""
    with _connect(proxy) as one, _connect(proxy) as other:
        assert b"re:a\n" == _ask(one, b"a")
        assert b"re:b\n" == _ask(one, b"b")
        assert b"re:c\n" == _ask(other, b"c")

    assert [2, 1] == [conversation.turns for conversation in proxy.conversations]
    assert 3 == proxy.turns


def test_a_lost_reply_belongs_to_a_request_that_was_carried_out(proxy: FaultyProxy, echo: _EchoServer) -> None:
    """The second matching request reaches the server, its answer is dropped, and the connection is cut."""
    lost = proxy.lose_reply(2, matching=b"pay")
    with _connect(proxy) as connection:
        assert b"re:pay 1\n" == _ask(connection, b"pay 1")
        assert b"re:look\n" == _ask(connection, b"look")
        assert b"" == _ask(connection, b"pay 2")

    assert lost.is_set()
    assert [b"pay 1", b"look", b"pay 2"] == echo.heard
    with _connect(proxy) as connection:
        assert b"re:pay 3\n" == _ask(connection, b"pay 3")


def test_a_refusing_proxy_cuts_and_accepts_nothing_until_healed(proxy: FaultyProxy) -> None:
    """Open connections end, new ones are refused, and after `heal` the same port serves again."""
    with _connect(proxy) as connection:
        _ask(connection, b"a")
        proxy.refuse()
        with pytest.raises(ConnectionError):
            if connection.recv(1) == b"":
                raise ConnectionResetError
    with pytest.raises(ConnectionRefusedError):
        _connect(proxy)

    proxy.heal()
    with _connect(proxy) as connection:
        assert b"re:b\n" == _ask(connection, b"b")


def test_a_black_hole_keeps_connections_open_and_says_nothing(proxy: FaultyProxy, echo: _EchoServer) -> None:
    """Requests do not arrive while it is dark, and arrive once it is healed."""
    with _connect(proxy, timeout=0.3) as old:
        _ask(old, b"before")
        proxy.blackhole()
        with pytest.raises(TimeoutError):
            _ask(old, b"dark")
        with _connect(proxy, timeout=0.3) as new, pytest.raises(TimeoutError):
            _ask(new, b"dark too")
        assert [b"before"] == echo.heard

        proxy.heal()
        old.settimeout(5)
        assert b"re:dark\n" == old.recv(1024)


def test_a_black_hole_for_replies_lets_requests_be_carried_out(proxy: FaultyProxy, echo: _EchoServer) -> None:
    """With `replies_only` the server hears the request and the client does not hear the answer."""
    with _connect(proxy, timeout=0.3) as connection:
        _ask(connection, b"before")
        proxy.blackhole(replies_only=True)
        with pytest.raises(TimeoutError):
            _ask(connection, b"dark")
        wait_until(lambda: echo.heard == [b"before", b"dark"], describe=lambda: echo.heard)


def test_a_connection_is_cut_in_the_middle_of_an_answer(proxy: FaultyProxy) -> None:
    """After the given count of bytes the rest of the answer never comes."""
    with _connect(proxy) as connection:
        _ask(connection, b"first")
        proxy.cut_after(5)
        assert b"re:se" == _ask(connection, b"second")
        assert b"" == connection.recv(1024)


def test_latency_holds_answers_back(proxy: FaultyProxy) -> None:
    """An answer takes no less than the delay."""
    proxy.delay(0.2)
    with _connect(proxy) as connection:
        asked = time.monotonic()
        assert b"re:a\n" == _ask(connection, b"a")
        assert time.monotonic() - asked >= 0.2


def test_a_cut_ends_connections_even_in_the_dark(proxy: FaultyProxy) -> None:
    """`cut` ends what is open now, swallowed traffic or not."""
    with _connect(proxy) as connection:
        _ask(connection, b"a")
        proxy.blackhole()
        connection.sendall(b"unread\n")
        proxy.cut()
        wait_until(lambda: proxy.open_connections == 0, describe="the cut")
        with pytest.raises(ConnectionError):
            if connection.recv(1) == b"":
                raise ConnectionResetError


def test_a_url_is_pointed_at_the_proxy() -> None:
    """User, password, path and query stay as they are."""
    proxy = FaultyProxy("amqp://guest:s%40crit@127.0.0.1:5672/vh?heartbeat=5")

    assert f"amqp://guest:s%40crit@127.0.0.1:{proxy.port}/vh?heartbeat=5" == proxy.url
