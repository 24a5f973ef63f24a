"""Deliveries on Redis or Valkey: one key a message, which expires by itself, and one script a call."""

from __future__ import annotations

from typing import Final

from ..cells import clean
from ..protocols import DELIVERIES_KEPT
from .connection import RedisConnection, Script
from .crashes import RedisCrashes

__all__ = ["RedisDeliveries"]

CLAIM: Final = Script("claim", shared="delivery")
ADVANCE: Final = Script("advance", shared="delivery")


class RedisDeliveries:
    """A `DeliveryStore` on Redis or Valkey.

    Parameters:
      connection(RedisConnection): The way to the server.
      prefix(str): What all keys begin with.
    """

    def __init__(self, connection: RedisConnection, *, prefix: str = "dramatiq-guard") -> None:
        self._connection = connection
        self._prefix = prefix
        self.crashes = RedisCrashes(connection, prefix=prefix)

    def __repr__(self) -> str:
        return f"<RedisDeliveries at {self._connection.name}, {self._prefix}:delivery>"

    def claim(self, message_id: str, sequence: int, fork: str, *, now: int) -> bool:
        key = self._key(message_id)
        return bool(self._connection.run(CLAIM, key, sequence, clean(fork), now, DELIVERIES_KEPT))

    def advance(self, message_id: str, sequence: int, *, now: int) -> None:
        self._connection.run(ADVANCE, self._key(message_id), sequence, now, DELIVERIES_KEPT)

    def purge(self, *, now: int, limit: int = 1_000) -> int:  # the server does it
        return 0

    def ping(self) -> None:
        self._connection.call("saying hello", lambda client: client.ping())

    def close(self) -> None:
        self._connection.close()

    def _key(self, message_id: str) -> str:
        return f"{self._prefix}:delivery:{{{clean(message_id)}}}"
