"""Breakers on Redis or Valkey: a hash a downstream, of a version and a record, and the server's clock for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..breaker import Found
from ..cells import clean
from .connection import Script

if TYPE_CHECKING:
    from .connection import RedisConnection

__all__ = ["RedisBreakers"]

READ: Final = Script("breaker_read", shared="nothing")
WRITE: Final = Script("breaker_write", shared="nothing")

#: How long what was learned of a downstream is kept while nobody calls it, in milliseconds.
_KEPT: Final = 30 * 24 * 60 * 60 * 1000


class RedisBreakers:
    """`BreakerRecords` on Redis or Valkey.

    Parameters:
      connection(RedisConnection): The way to the server.
      prefix(str): What all keys begin with.
    """

    def __init__(self, connection: RedisConnection, *, prefix: str = "dramatiq-guard") -> None:
        self._connection = connection
        self._base = f"{prefix}:breaker:"

    def read(self, key: str) -> Found:
        version, record, now = self._connection.run(READ, self._base + clean(key))
        return Found(int(version), record or None, int(now))

    def write(self, key: str, version: int, record: str) -> bool:
        return bool(self._connection.run(WRITE, self._base + clean(key), version, record, _KEPT))

    def keys(self) -> list[str]:
        def perform(client: Any) -> list[Any]:
            return list(client.scan_iter(match=f"{self._base}*", count=1_000))

        return sorted(key.removeprefix(self._base) for key in self._connection.call("listing breakers", perform))
