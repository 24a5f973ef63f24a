"""Running scripts on connections of the broker's own pool.

What redis-py's commands do around sending and reading (metrics, repeats, choices that do not arise here) takes as long
as the rest, and it is done three times for a message that is retried once.  So its methods of connections are called,
which its own commands stand on; and a connection is kept from one script to the next, because the pool looks at its
socket each time, which for a thread among others is the dearest part.  For the same reason the timeout of a connection
that is kept is the kernel's: Python's own has a thread let go of the interpreter twice for each sending and for each
reading, once to wait and once to act.  It must not know any script.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from redis import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .. import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["KeptConnections", "Scripts"]

#: How long, in milliseconds, a connection may have rested and still be taken for alive without a look.
_FRESH: Final = 1_000

#: This process.  Noted once: asking the system for each command would cost as much as the choice of a connection.
_process = os.getpid()


def _begin_in_child() -> None:
    global _process  # noqa: PLW0603 - there is one process
    _process = os.getpid()


os.register_at_fork(after_in_child=_begin_in_child)


class Scripts:
    """The scripts that are run by one broker's client.

    Parameters:
      client(Redis): The client.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._connections = KeptConnections(client.connection_pool)
        self._registered: dict[str, Callable[[Sequence[Any], Sequence[Any]], Any]] = {}

    def __getitem__(self, source: str) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
        """A script that can be called with keys and arguments; it raises what redis-py raises."""
        found = self._registered.get(source)
        if found is None:
            found = self._registered[source] = self.keeping(self._client.register_script(source))
        return found

    def keeping(self, script: Any) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
        """A script of redis-py's that is run on kept connections from now on; one of another client stays as it is."""
        if hasattr(script, "sha") and hasattr(self._client.connection_pool, "get_connection"):
            return _Script(self._connections, script)
        return lambda keys, args: script(keys=keys, args=args)


class _Script:
    """A script on kept connections.

    Parameters:
      connections(KeptConnections): What it is run on.
      script(Script): It as redis-py knows it.
    """

    __slots__ = ("connections", "script", "sha")

    def __init__(self, connections: KeptConnections, script: Any) -> None:
        self.connections = connections
        self.script = script
        self.sha = script.sha.encode()  # in bytes, which redis-py need not look at twice

    def __call__(self, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        try:
            return self.connections.ask(b"EVALSHA", self.sha, len(keys), *keys, *args)
        except NoScriptError:
            # A server that was restarted, or another one after a failover.
            return self.script(keys=keys, args=args)


class KeptConnections:
    """Connections of a pool, kept from one use to the next.

    No more than a quarter of what the pool may have, and of a pool in which others wait for one, none.  A process that
    was forked begins without any.

    Parameters:
      pool(ConnectionPool): The pool.
    """

    __slots__ = ("_kept", "_most", "_pool", "_process")

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._most = pool.max_connections // 4 if type(pool) is ConnectionPool else 0
        self._kept: deque[tuple[Any, int]] = deque()
        self._process = _process

    def ask(self, *command: Any, as_it_is: bool = False) -> Any:
        """Send a command and wait for its answer; raises what redis-py raises.

        Parameters:
          *command: The command.
          as_it_is(bool): Whether the answer is left undecoded also where the client decodes what it gets.
        """
        now = clock.monotonic()
        connection = self.take(now)
        try:
            connection.send_packed_command(connection.pack_command(*command))
            answer = connection.read_response(disable_decoding=as_it_is)
        except NoScriptError:
            self.give(connection, now)
            raise
        except RedisConnectionError as error:
            self.drop(connection)
            if isinstance(error.__context__, BlockingIOError):
                raise RedisTimeoutError("Timeout while talking to the server") from error
            raise
        except BaseException:
            self.drop(connection)
            raise
        self.give(connection, now)
        return answer

    def take(self, now: int) -> Any:
        """A connection, the one used last if one is kept.

        Parameters:
          now(int): The time, monotonic.
        """
        if self._process != _process:
            # They are the parent's, and so are their sockets; the pool has noticed, too.
            self._kept, self._process = deque(), _process
        try:
            connection, used = self._kept.pop()
        except IndexError:
            return self._taken()
        if now - used > _FRESH:
            # The pool looks whether it is alive still.
            self._release(connection)
            return self._taken()
        return connection

    def give(self, connection: Any, taken: int) -> None:
        """Put back a connection that was answered on.

        Parameters:
          connection: The connection.
          taken(int): When it was taken, monotonic: it may have rested since then.
        """
        if len(self._kept) < self._most:
            self._kept.append((connection, taken))
        else:
            self._release(connection)

    def drop(self, connection: Any) -> None:
        """Put back a connection that failed; those that are kept will not have fared better."""
        connection.disconnect()  # perhaps an answer is still to come, which nobody is to take for another
        self._pool.release(connection)
        self.clear()

    def clear(self) -> None:
        """Put back those that are kept."""
        while True:
            try:
                connection, _ = self._kept.pop()
            except IndexError:
                return
            self._release(connection)

    def _taken(self) -> Any:
        connection = self._pool.get_connection()
        if self._most:
            _leave_waiting_to_kernel(connection)
        return connection

    def _release(self, connection: Any) -> None:
        """Put back a connection as the pool knows it."""
        if connection._sock is not None:
            connection._sock.settimeout(connection.socket_timeout)
        self._pool.release(connection)


def _leave_waiting_to_kernel(connection: Any) -> None:
    """Have the kernel end a wait that takes too long, where it can: on plain sockets, and not under gevent."""
    timeout = connection.socket_timeout
    if timeout and sys.platform == "linux" and type(connection._sock).__module__ == "socket":
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1_000_000))
        connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection._sock.settimeout(None)
