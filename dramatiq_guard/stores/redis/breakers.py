"""Breakers on Redis or Valkey: one string a downstream, which expires if nobody reports for a month."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeVar

from ..breakers import BREAKERS_KEPT, changed, decoded, kept_name
from .connection import RedisConnection, Script

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...policy.breaker import State

__all__ = ["RedisBreakers"]

READ: Final = Script("breaker_read", shared="breaker")
SWAP: Final = Script("breaker_swap", shared="breaker")

T = TypeVar("T")


class RedisBreakers:
    """A `BreakerStore` on Redis or Valkey.

    Parameters:
      connection(RedisConnection): The way to the server.
      prefix(str): What all keys begin with.
    """

    def __init__(self, connection: RedisConnection, *, prefix: str = "dramatiq-guard") -> None:
        self._connection = connection
        self._base = f"{prefix}:breaker:"

    def __repr__(self) -> str:
        return f"<RedisBreakers at {self._connection.name}, {self._base}*>"

    def update(self, name: str, change: Callable[[State, int], tuple[State, T]]) -> T:
        key = self._base + kept_name(name)

        def read() -> tuple[str | None, int]:
            text, now = self._connection.run_raw(READ, key)
            return _text(text), now

        def swap(was: str | None, text: str) -> tuple[bool, str | None, int]:
            done, found, now = self._connection.run_raw(SWAP, key, _bytes(was or ""), text, BREAKERS_KEPT)
            return bool(done), _text(found), now

        return changed(read, swap, change)

    def read(self, name: str) -> State | None:
        found, _ = self._connection.run_raw(READ, self._base + kept_name(name))
        text = _text(found)
        return None if text is None else decoded(text)

    def names(self) -> tuple[str, ...]:
        pattern = re.sub(r"([\\*?\[\]])", r"\\\1", self._base) + "*"
        keys = self._connection.call(
            "listing breakers", lambda client: list(client.scan_iter(match=pattern, count=1_000))
        )
        # A scan may come upon a key twice.
        return tuple(sorted({str(key).removeprefix(self._base) for key in keys}))

    def forget(self, name: str) -> bool:
        key = self._base + kept_name(name)
        return bool(self._connection.call("forgetting a breaker", lambda client: client.delete(key)))

    def ping(self) -> None:
        self._connection.call("saying hello", lambda client: client.ping())

    def close(self) -> None:
        self._connection.close()


def _text(found: bytes | None) -> str | None:
    """What is stored, whatever it is: what cannot be told from what was read would never be replaced."""
    return None if found is None else found.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
