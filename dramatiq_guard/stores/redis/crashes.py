"""Crashes on Redis or Valkey: marks are written without waiting for a reply, all else is one round trip.

A process's marks go over a connection of its own on which the server was told to be silent (``CLIENT REPLY OFF``): what
was written just before a SIGKILL still arrives, and an ordinary message waits for nothing.

On Linux the connection is corked: a mark is only put down in the kernel, which sends what has gathered after 200 ms, or
when the process dies.  That is as certain, and costs a tenth.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from ..cells import clean
from ..crashes import Crash, History
from .connection import Script

if TYPE_CHECKING:
    from .connection import RedisConnection

__all__ = ["RedisCrashes"]

INQUEST: Final = Script("inquest", shared="nothing")
SUSPECTS: Final = Script("suspects", shared="nothing")
HISTORY: Final = Script("history", shared="nothing")

#: How long crashes are kept at the longest, and marks of a process of which nothing is heard, in milliseconds.
_KEPT: Final = 7 * 24 * 60 * 60 * 1000

#: How many finishes are kept for a server that is out.
_FINISHES_KEPT: Final = 10_000


class RedisCrashes:
    """A `CrashStore` on Redis or Valkey.

    Parameters:
      connection(RedisConnection): The way to the server.
      prefix(str): What all keys begin with.
    """

    def __init__(self, connection: RedisConnection, *, prefix: str = "dramatiq-guard") -> None:
        self._connection = connection
        #: One hash tag for all, since an inquest touches what belongs to many messages.
        self._base = f"{prefix}:{{crashes}}"
        self._live = f"{self._base}:live"

    def live(self, process: str, *, host: str, pid: int, now: int, ttl: int) -> None:
        def perform(client: Any) -> None:
            with client.pipeline(transaction=False) as pipeline:
                pipeline.zadd(self._live, {process: now + ttl})
                pipeline.hset(f"{self._base}:who", process, f"{pid} {host}")
                pipeline.pexpire(self._starts(process), _KEPT)
                pipeline.execute()

        self._connection.call("saying that the process is alive", perform)

    def leave(self, process: str) -> None:
        def perform(client: Any) -> None:
            with client.pipeline(transaction=False) as pipeline:
                pipeline.delete(self._starts(process))
                pipeline.zrem(self._live, process)
                pipeline.hdel(f"{self._base}:who", process)
                pipeline.execute()

        self._connection.call("leaving", perform)

    def starter(self, process: str) -> RedisStarter:
        return RedisStarter(self._connection, self._starts(process))

    def inquest(self, *, now: int) -> int:
        return int(self._connection.run(INQUEST, self._live, now, _KEPT))

    def suspects(self, *, since: int, limit: int = 1_000) -> dict[str, int]:
        found = self._connection.run(SUSPECTS, self._live, since, limit)
        return dict(zip(found[::2], map(int, found[1::2]), strict=True))

    def history(self, message_id: str, *, since: int) -> History:
        crashes, open_ = self._connection.run(HISTORY, self._live, clean(message_id))
        return History(
            tuple(sorted(crash for crash in map(_crash, crashes) if crash.at >= since)),
            tuple(sorted(zip(map(_crash, open_[::2]), map(int, open_[1::2]), strict=True))),
        )

    def forgive(self, message_id: str) -> None:
        def perform(client: Any) -> None:
            with client.pipeline(transaction=False) as pipeline:
                pipeline.delete(f"{self._base}:of:{clean(message_id)}")
                pipeline.zrem(f"{self._base}:suspects", clean(message_id))
                pipeline.execute()

        self._connection.call("forgiving a message", perform)

    def _starts(self, process: str) -> str:
        return f"{self._base}:starts:{process}"


class RedisStarter:
    """A `Starter` on a silent connection.

    Each message passes here, so the protocol is written by hand: a client takes longer to encode a mark than the kernel
    to take it.

    Parameters:
      connection(RedisConnection): The way to the server.
      key(str): The hash of the process's marks.
    """

    def __init__(self, connection: RedisConnection, key: str) -> None:
        self._connection = connection
        self._key = key
        self._hset = b"*4\r\n$4\r\nHSET\r\n%b" % _bulk(key.encode())
        self._hdel = b"\r\n$4\r\nHDEL\r\n%b" % _bulk(key.encode())
        self._lock = Lock()
        self._finished: list[bytes] = []
        self._silent: Any = None
        self._breaks = 0
        self._out = self._closed = False

    def start(self, message_id: str, *, now: int) -> bool:
        mark = self._hset + _bulk(_clean(message_id)) + _bulk(b"%d" % now)
        with self._lock:
            # Only a flush looks whether a server that was out is there again: no message waits for that.
            return not self._out and self._send(mark)

    def finish(self, message_id: str) -> None:
        self._finished.append(_clean(message_id))

    def flush(self) -> bool:
        with self._lock:
            broken = self._breaks
            if not self._send(b"*3\r\n$6\r\nCLIENT\r\n$5\r\nREPLY\r\n$2\r\nON\r\n"):
                return False
            try:
                _cork(self._silent, corked=False)
                self._silent.read_response()
                self._silent.send_command("CLIENT", "REPLY", "OFF")
                _cork(self._silent, corked=True)
            except Exception:  # noqa: BLE001 - whatever the client calls it: nothing is known to have arrived
                self._drop()
            return self._breaks == broken

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop()

    def _send(self, command: bytes) -> bool:
        """Send a command after the finishes that are due; once more on a new connection if this one is gone."""
        due = len(self._finished)
        if due:
            ended = self._finished[:due]
            command = b"*%d%b%b%b" % (2 + due, self._hdel, b"".join(map(_bulk, ended)), command)
        for _ in range(2):
            if self._closed:
                break
            try:
                if self._silent is None:
                    self._silent = self._connection.call("connecting", partial(_connection_to, self._key))
                    self._silent.connect()
                    self._silent.send_command("CLIENT", "REPLY", "OFF")
                    _cork(self._silent, corked=True)
                _write(self._silent, command)
            except Exception:  # noqa: BLE001 - a mark that cannot be written holds no message up
                self._drop()
                continue
            del self._finished[:due]
            self._out = False
            return True
        self._out = True
        del self._finished[:-_FINISHES_KEPT]
        return False

    def _drop(self) -> None:
        if self._silent is not None:
            self._breaks += 1
            self._silent.disconnect()
            self._silent = None


def _write(silent: Any, command: bytes) -> None:
    """Write to a connection; past the client and the waiting of Python's socket where it is a plain one."""
    sock = getattr(silent, "_sock", None)
    if type(sock) is not socket.socket:
        silent.send_packed_command([command], check_health=False)
        return
    try:
        written = os.write(sock.fileno(), command)
    except BlockingIOError:
        written = 0
    if written < len(command):
        sock.sendall(command[written:])


def _cork(silent: Any, *, corked: bool) -> None:
    """Let the kernel gather what is written, or send it now; where it cannot, each mark is sent by itself."""
    sock: Any = getattr(silent, "_sock", None)
    if hasattr(socket, "TCP_CORK") and getattr(sock, "family", None) in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, corked)


def _bulk(text: bytes) -> bytes:
    """A string as the protocol has it."""
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _clean(message_id: str) -> bytes:
    """What `clean` gives, encoded."""
    return message_id.encode("utf-8", "replace").replace(b"\0", b"\xef\xbf\xbd")


def _connection_to(key: str, client: Any) -> Any:
    """A connection of one's own to the server that holds a key."""
    if hasattr(client, "get_node_from_key"):  # a cluster
        client = client.get_redis_connection(client.get_node_from_key(key))
    # Not of the pool's number: that would count each one made anew, and never give the place back.
    pool = client.connection_pool
    return pool.connection_class(**pool.connection_kwargs)


def _crash(text: str) -> Crash:
    at, process, pid, host = (*text.split(" ", 3), "", "", "")[:4]
    return Crash(int(at), process, host, int(pid or 0))
