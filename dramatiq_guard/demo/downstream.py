"""The flaky downstream: a small HTTP server in a process of its own, with an append-only ledger.

It treats each job in the manner of its kind until it is told to behave (``POST /fix``), and writes down every request
and its answer before it answers.  It must not know who asks, or why.

Run as ``python -m dramatiq_guard.demo.downstream LEDGER``; prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from .ledger import Ledger
from .plan import ALWAYS, manner_of

__all__ = ["Downstream", "serve"]


class Downstream:
    """What the downstream remembers, and how it answers; safe to share between threads.

    Parameters:
      ledger(Ledger): Gets one line for every request.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.behaves = False
        self._lock = threading.Lock()
        self._requests: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    def fix(self) -> None:
        """From now on, what was refused for ever is served."""
        self.behaves = True
        self.ledger.write(event="fixed", at=_now())

    def answer(self, job: str, pid: int) -> tuple[int, str, int]:
        """Answer one request, and write it down first.

        Parameters:
          job(str): What is asked for.
          pid(int): The process that asks.

        Returns:
          tuple[int, str, int]: The status, what the answer calls itself, and the seconds of its Retry-After (0: none).
        """
        with self._lock:
            number = self._requests[job] = self._requests.get(job, 0) + 1
            status, wait = self._decide(job)
        incident = f"<{job}#{number}>"
        self.ledger.write(event="request", at=_now(), job=job, status=status, incident=incident, pid=pid)
        return status, incident, wait

    def _decide(self, job: str) -> tuple[int, int]:
        manner = manner_of(job)
        early = self._not_before.get(job, 0.0) - time.monotonic()
        if early > 0:
            return manner.status, math.ceil(early)
        refused = self._refused.get(job, 0)
        if refused >= manner.refusals or (manner.refusals == ALWAYS and self.behaves):
            return 200, 0
        self._refused[job] = refused + 1
        if manner.retry_after:
            self._not_before[job] = time.monotonic() + manner.retry_after
        return manner.status, manner.retry_after


def _now() -> int:
    return int(time.time() * 1000)


class _Endpoint(BaseHTTPRequestHandler):
    downstream: ClassVar[Downstream]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/fix":
            self.downstream.fix()
            status, incident, wait = 200, "fixed", 0
        else:
            job = self.path.rpartition("/")[2]
            status, incident, wait = self.downstream.answer(job, int(self.headers.get("X-Worker-Pid") or 0))
        # The incident is the reason phrase, so that every client's error text names the answer that caused it.
        self.send_response(status, incident)
        if wait:
            self.send_header("Retry-After", str(wait))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Say nothing: the ledger is the log."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def serve(ledger: Path) -> None:
    """Serve on a free loopback port until standard input ends, which it does when the demo is gone."""
    with Ledger(ledger) as book:
        endpoint = type("Endpoint", (_Endpoint,), {"downstream": Downstream(book)})
        server = _Server(("127.0.0.1", 0), endpoint)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdout.write(f"{server.server_address[1]}\n")
        sys.stdout.flush()
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
