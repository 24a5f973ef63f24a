"""The answers to probes over HTTP: ``/startup``, ``/live``, ``/ready`` and ``/draining`` say 200 or 503, and why.

All worker processes of one master are given the same port.  The first binds it and answers for all of them, from their
files (see `probe_files`); when it ends, another takes over.

This module must not know Dramatiq.
"""

from __future__ import annotations

import errno
import json
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from .probe_files import STATES, ask

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ProbeServer"]


class ProbeServer:
    """The endpoint of one master's processes, in one of them.

    Parameters:
      directory(Path): Where the processes keep their files.
      host(str): The address to listen on.
      port(int): The port; 0 for a free one.
    """

    def __init__(self, directory: Path, host: str, port: int) -> None:
        self.directory = directory
        self.host = host
        self.port = port
        self._server: _Server | None = None

    @property
    def bound(self) -> bool:
        """Whether this process is the one that answers."""
        return self._server is not None

    def bind(self) -> bool:
        """Answer from now on, unless another process does.

        Raises:
          OSError: When the address is not to be had for another reason.
        """
        if self._server is None:
            try:
                server = _Server((self.host, self.port), _Probe)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
                raise
            server.directory = self.directory
            self.port = server.server_address[1]
            threading.Thread(
                target=server.serve_forever, args=(0.1,), name="dramatiq-guard-probe-server", daemon=True
            ).start()
            self._server = server
        return True

    def close(self) -> None:
        """Answer no more, and let another process take over."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Server(ThreadingHTTPServer):
    directory: Path
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        # The library's own asks the name service for this host's name, and may wait for it.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class _Probe(BaseHTTPRequestHandler):
    timeout = 5
    server: _Server

    def do_GET(self) -> None:
        state = self.path.partition("?")[0].strip("/")
        if state not in STATES:
            self._answer(HTTPStatus.NOT_FOUND, json.dumps({"probes": STATES}))
            return
        answer = ask(self.server.directory, state)
        self._answer(HTTPStatus.OK if answer.holds else HTTPStatus.SERVICE_UNAVAILABLE, answer.as_json())

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """A probe every few seconds is no news."""

    def _answer(self, status: HTTPStatus, line: str) -> None:
        body = f"{line}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
