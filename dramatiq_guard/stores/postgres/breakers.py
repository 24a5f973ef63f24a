"""Breakers on PostgreSQL: one row a downstream."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final, TypeVar

from ..breakers import BREAKERS_KEPT, changed, decoded, kept_name
from .connection import PostgresConnection, Queries
from .schema import check_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...policy.breaker import State

__all__ = ["PostgresBreakers"]

T = TypeVar("T")

#: After so many new downstreams a process removes those that nobody has reported to for long.
_SWEEP: Final = 100


class PostgresBreakers:
    """A `BreakerStore` on PostgreSQL.

    Parameters:
      connection(PostgresConnection): The way to the server, and the schema of the tables.
    """

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        self._queries = Queries(connection.schema, file="breakers.sql")
        self._added = count()

    def __repr__(self) -> str:
        return f"<PostgresBreakers at {self._connection.name}, schema {self._connection.schema}>"

    def update(self, name: str, change: Callable[[State, int], tuple[State, T]]) -> T:
        name = kept_name(name)

        def swap(was: str | None, text: str) -> tuple[bool, str | None, int]:
            statement = self._queries["insert" if was is None else "swap"]
            asked = {"name": name, "record": text, "was": was}
            if not self._connection.change("changing a breaker", statement, asked):
                return False, *self._look(name)
            if was is None and next(self._added) % _SWEEP == 0:
                kept = {"kept": BREAKERS_KEPT / 1000}
                self._connection.change("removing old breakers", self._queries["sweep"], kept)
            return True, text, 0

        return changed(lambda: self._look(name), swap, change)

    def read(self, name: str) -> State | None:
        text, _ = self._look(kept_name(name))
        return None if text is None else decoded(text)

    def names(self) -> tuple[str, ...]:
        asked = {"kept": BREAKERS_KEPT / 1000}
        return tuple(name for (name,) in self._connection.rows("listing breakers", self._queries["names"], asked))

    def forget(self, name: str) -> bool:
        asked = {"name": kept_name(name)}
        return self._connection.change("forgetting a breaker", self._queries["forget"], asked) > 0

    def ping(self) -> None:
        check_version(self._connection)

    def close(self) -> None:
        self._connection.close()

    def _look(self, name: str) -> tuple[str | None, int]:
        ((text, now),) = self._connection.rows("reading a breaker", self._queries["read"], {"name": name})
        return text, int(now)
