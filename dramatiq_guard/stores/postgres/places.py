"""Connections that lie idle between two uses, and a bound on how many are in use at once.

This module must not know what is done with them, only how psycopg's look when they are at rest.
"""

from __future__ import annotations

import os
import select
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any

from ...errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Places", "has_news"]


class Places:
    """So many places for connections of one process, which each process that was forked has for itself.

    Parameters:
      limit(int): How many are in use at once.
      taken(str): What is said where all are taken.
    """

    def __init__(self, limit: int, taken: str) -> None:
        self._limit = limit
        self._taken = taken
        self._lock = Lock()
        self._pid = 0
        self._idle: list[Any] = []
        self._inherited: list[Any] = []
        self._free = BoundedSemaphore(limit)

    @contextmanager
    def place(self, *, timeout: int) -> Iterator[None]:
        """Take a place, for which one waits so many milliseconds.

        Raises:
          StoreUnavailable: None was free in that time.
        """
        with self._lock:
            if self._pid != os.getpid():
                # After a fork the idle connections are the parent's: not even closed here, for that would end them.
                # (Nor let go, for that closes them.)
                self._pid, self._idle, self._inherited = os.getpid(), [], [*self._inherited, *self._idle]
                self._free = BoundedSemaphore(self._limit)
        free = self._free
        if not free.acquire(timeout=timeout / 1000):
            raise StoreUnavailable(self._taken)
        try:
            yield
        finally:
            free.release()

    def pick_up(self) -> Any:
        """One of the idle connections that is alive, if there is any."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not connection.closed and not has_news(connection):
                return connection
            connection.close()

    def lay_down(self, connection: Any) -> None:
        """Keep a connection for the next one."""
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Close this process's idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
            if self._pid == os.getpid():
                for connection in idle:
                    connection.close()


def has_news(connection: Any) -> bool:
    """Whether an idle connection has something to read: the server's goodbye."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))
