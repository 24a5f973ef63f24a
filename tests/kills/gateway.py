"""The third party of these tests: a process of its own that charges, and knows a key that it was given before.

It is asked in one line of JSON and answers in one.  Each call is a line in its log before it is answered, so that
whatever happens to whoever called, the call is counted.  It must not know the library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Self

__all__ = ["Gateway", "charge"]

_PROJECT = Path(__file__).resolve().parents[2]


def charge(port: int, job: str, key: str | None) -> str:
    """Charge for a job.

    Parameters:
      port(int): Where the gateway is.
      job(str): What for.
      key(str | None): The idempotency key; a second call with it charges nothing.

    Returns:
      str: The id of the charge.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection, connection.makefile("rw") as stream:
        stream.write(json.dumps({"job": job, "key": key}) + "\n")
        stream.flush()
        return str(json.loads(stream.readline())["id"])


class Gateway:
    """The gateway's process and its log; a context manager that starts it.

    Parameters:
      log(Path): The file of its calls.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    def calls(self) -> Counter[str]:
        """How often each job called."""
        return Counter(each["job"] for each in self._lines())

    def charges(self) -> dict[str, list[str]]:
        """The ids of the charges that were made for each job."""
        made: dict[str, list[str]] = {}
        for each in self._lines():
            if each["new"]:
                made.setdefault(each["job"], []).append(each["id"])
        return made

    def _lines(self) -> list[Any]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def __enter__(self) -> Self:
        self.log.touch()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kills.gateway", str(self.log)],
            cwd=_PROJECT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""},
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, log: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Call)
        self._log = log
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}

    def charge(self, job: str, key: str | None) -> str:
        with self._lock:
            new = key is None or key not in self._known
            made = uuid.uuid4().hex if new else self._known[str(key)]
            if key is not None:
                self._known[key] = made
            with self._log.open("a") as log:
                log.write(json.dumps({"job": job, "key": key, "id": made, "new": new}) + "\n")
        return made


class _Call(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        asked = json.loads(self.rfile.readline())
        self.wfile.write(json.dumps({"id": self.server.charge(asked["job"], asked["key"])}).encode() + b"\n")


if __name__ == "__main__":
    with _Server(Path(sys.argv[1])) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever(poll_interval=5)
