"""Crashes on PostgreSQL: marks are sent without waiting for an answer, all else is one statement.

A process's marks go over a connection of its own in libpq's pipeline mode: each is a packet that commits by itself, and
the answers are read when they are there, or when somebody asks for a `flush`.  Nothing is synced to disk for a mark.

A mark that is the only one without an answer arrives, whatever becomes of its process.  Of several that were sent
within one round trip before a SIGKILL the later ones may be lost: the server gives a connection up when it finds nobody
to answer the earlier ones to.  Whoever must be sure asks for a flush.
"""

from __future__ import annotations

import json
import select
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from ... import clock
from ..cells import clean
from ..crashes import Crash, History
from .connection import COMMAND_TIMEOUT, PostgresConnection, Queries

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PostgresCrashes"]

#: How many marks may be without an answer before the server counts as out.
_UNANSWERED: Final = 5_000

#: How many finishes are kept for a server that is out.
_FINISHES_KEPT: Final = 10_000


class PostgresCrashes:
    """A `CrashStore` on PostgreSQL.

    Parameters:
      connection(PostgresConnection): The way to the server, and the schema of the tables.
    """

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        self._queries = Queries(connection.schema, file="crashes.sql")

    def live(self, process: str, *, host: str, pid: int, now: int, ttl: int) -> None:
        asked = {"process": process, "host": clean(host), "pid": pid, "until": now + ttl}
        self._connection.change("saying that the process is alive", self._queries["live"], asked)

    def leave(self, process: str) -> None:
        self._connection.change("leaving", self._queries["leave"], {"process": process})

    def starter(self, process: str) -> PostgresStarter:
        return PostgresStarter(self._connection, self._queries, process)

    def inquest(self, *, now: int) -> int:
        ((found,),) = self._connection.rows("looking for dead processes", self._queries["inquest"], {"now": now})
        return int(found)

    def suspects(self, *, since: int, limit: int = 1_000) -> dict[str, int]:
        asked = {"since": since, "limit": limit}
        return dict(self._connection.rows("reading the suspects", self._queries["suspects"], asked))

    def history(self, message_id: str, *, since: int) -> History:
        asked = {"message_id": clean(message_id), "since": since}
        rows = self._connection.rows("reading the crashes of a message", self._queries["history"], asked)
        return History(
            tuple(sorted(Crash(*crash) for *crash, until in rows if until is None)),
            tuple(sorted((Crash(*start), until) for *start, until in rows if until is not None)),
        )

    def forgive(self, message_id: str) -> None:
        self._connection.change("forgiving a message", self._queries["forgive"], {"message_id": clean(message_id)})


class PostgresStarter:
    """A `Starter` on a connection in pipeline mode.

    Parameters:
      connection(PostgresConnection): The way to the server.
      queries(Queries): The statements.
      process(str): The id of the process.
    """

    def __init__(self, connection: PostgresConnection, queries: Queries, process: str) -> None:
        self._connection = connection
        self._start, self._finish, self._both = (
            queries[name].encode() for name in ("start", "finish", "finish_and_start")
        )
        self._process = process.encode()
        self._lock = Lock()
        self._finished: list[str] = []
        self._wire: _Wire | None = None
        self._breaks = 0
        self._out = self._closed = False

    def start(self, message_id: str, *, now: int) -> bool:
        message_id = clean(message_id)
        mark = [message_id.encode(), self._process, str(now).encode()]

        def send(wire: _Wire) -> None:
            finished = [each for each in taken if each != message_id]
            if finished:
                wire.send(self._both, [*mark, json.dumps(finished).encode()])
            else:
                wire.send(self._start, mark)

        with self._lock:
            taken = self._finished[:]
            # Only a flush looks whether a server that was out is there again: no message waits for that.
            return not self._out and self._sent(send, len(taken))

    def finish(self, message_id: str) -> None:
        self._finished.append(clean(message_id))

    def flush(self) -> bool:
        def send(wire: _Wire) -> None:
            if taken:
                wire.send(self._finish, [self._process, json.dumps(taken).encode()])
            wire.settle(clock.monotonic() + COMMAND_TIMEOUT)

        with self._lock:
            broken = self._breaks
            taken = self._finished[:]
            # What went over a connection that has broken may not have arrived.
            return self._sent(send, len(taken)) and self._breaks == broken

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop()

    def _sent(self, send: Callable[[_Wire], None], taken: int) -> bool:
        """Send something, once more on a new connection if this one is gone."""
        for _ in range(2):
            if self._closed:
                break
            try:
                if self._wire is None:
                    self._wire = _Wire(self._connection.dedicated("marking a message"))
                send(self._wire)
            except Exception:  # noqa: BLE001 - a mark that cannot be written holds no message up
                self._drop()
                continue
            del self._finished[:taken]
            self._out = False
            return True
        self._out = True
        del self._finished[:-_FINISHES_KEPT]
        return False

    def _drop(self) -> None:
        if self._wire is not None:
            self._breaks += 1
            self._wire.close()
            self._wire = None


class _Wire:
    """A connection in pipeline mode, which is written to and whose answers are read in passing.

    Parameters:
      connection(Connection): A connection of psycopg, in autocommit.
    """

    def __init__(self, connection: Any) -> None:
        from psycopg import pq

        connection.execute("SET synchronous_commit = off")
        self._status = pq.ExecStatus
        self._connection = connection
        self._wire = connection.pgconn
        self._wire.nonblocking = 1
        self._wire.enter_pipeline_mode()
        self._poll = select.poll()
        self._poll.register(self._wire.socket, select.POLLIN)
        self._unanswered = 0
        #: What the server has said against a mark, or what has become of the connection.
        self.failure: Exception | None = None

    def send(self, statement: bytes, parameters: list[bytes]) -> None:
        """Send a statement that commits by itself, and wait for nothing.

        Raises:
          Exception: The connection is gone, or nothing has been answered for long.
        """
        if self._poll.poll(0):
            self._read()
        if self._unanswered >= _UNANSWERED:
            self._fail(TimeoutError("the server does not answer"))
        self._wire.send_query_params(statement, parameters)
        self._wire.pipeline_sync()
        self._unanswered += 1
        self._wire.flush()

    def settle(self, deadline: int) -> None:
        """Wait until everything has been answered.

        Raises:
          Exception: It has not been, or the server refused a mark.
        """
        while self._unanswered:
            left = deadline - clock.monotonic()
            unsent = self._wire.flush()
            self._poll.modify(self._wire.socket, select.POLLIN | (select.POLLOUT if unsent else 0))
            ready = self._poll.poll(max(0, left))
            self._poll.modify(self._wire.socket, select.POLLIN)
            if not ready:
                self._fail(TimeoutError("the server does not answer"))
            self._read()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self._connection.close()

    def _read(self) -> None:
        self._wire.consume_input()
        while self._unanswered and not self._wire.is_busy():
            result = self._wire.get_result()
            if result is None:
                continue  # the end of one statement's results
            if result.status == self._status.PIPELINE_SYNC:
                self._unanswered -= 1
            elif result.status == self._status.FATAL_ERROR:
                self.failure = RuntimeError(result.error_message.decode("utf-8", "replace"))

    def _fail(self, error: Exception) -> None:
        self.failure = error
        raise error
