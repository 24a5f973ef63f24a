"""Breakers on PostgreSQL: one row a downstream."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ..breakers import BREAKERS_KEPT, changed, decoded
from ..cells import clean
from .connection import PostgresConnection, Queries
from .schema import check_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...policy.breaker import State

__all__ = ["PostgresBreakers"]

T = TypeVar("T")


class PostgresBreakers:
    """A `BreakerStore` on PostgreSQL.

    Parameters:
      connection(PostgresConnection): The way to the server, and the schema of the tables.
    """

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        self._queries = Queries(connection.schema, file="breakers.sql")

    def __repr__(self) -> str:
        return f"<PostgresBreakers at {self._connection.name}, schema {self._connection.schema}>"

    def update(self, name: str, change: Callable[[State, int], tuple[State, T]]) -> T:
        name = clean(name)

        def swap(was: str | None, text: str) -> tuple[bool, str | None, int]:
            statement = self._queries["insert" if was is None else "swap"]
            asked = {"name": name, "record": text, "was": was}
            if self._connection.change("changing a breaker", statement, asked):
                return True, text, 0
            return False, *self._look(name)

        return changed(lambda: self._look(name), swap, change)

    def read(self, name: str) -> State | None:
        text, _ = self._look(clean(name))
        return None if text is None else decoded(text)

    def names(self) -> tuple[str, ...]:
        asked = {"kept": BREAKERS_KEPT / 1000}
        return tuple(name for (name,) in self._connection.rows("listing breakers", self._queries["names"], asked))

    def forget(self, name: str) -> bool:
        asked = {"name": clean(name)}
        return self._connection.change("forgetting a breaker", self._queries["forget"], asked) > 0

    def ping(self) -> None:
        check_version(self._connection)

    def close(self) -> None:
        self._connection.close()

    def _look(self, name: str) -> tuple[str | None, int]:
        ((text, now),) = self._connection.rows("reading a breaker", self._queries["read"], {"name": name})
        return text, int(now)
