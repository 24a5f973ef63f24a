"""Deliveries on PostgreSQL: one statement a call, and rows that a purge removes."""

from __future__ import annotations

from typing import Any

from ..cells import clean
from ..protocols import DELIVERIES_KEPT
from .connection import PostgresConnection, Queries
from .crashes import PostgresCrashes
from .schema import check_version

__all__ = ["PostgresDeliveries"]


class PostgresDeliveries:
    """A `DeliveryStore` on PostgreSQL.

    Parameters:
      connection(PostgresConnection): The way to the server, and the schema of the tables.
    """

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        self._queries = Queries(connection.schema, file="deliveries.sql")
        self.crashes = PostgresCrashes(connection)

    def __repr__(self) -> str:
        return f"<PostgresDeliveries at {self._connection.name}, schema {self._connection.schema}>"

    def claim(self, message_id: str, sequence: int, fork: str, *, now: int) -> bool:
        asked = {**_asked(message_id, sequence, now), "fork": clean(fork)}
        return self._connection.change("claiming a delivery", self._queries["claim"], asked) > 0

    def advance(self, message_id: str, sequence: int, *, now: int) -> None:
        asked = _asked(message_id, sequence, now)
        self._connection.change("noting that a delivery is settled", self._queries["advance"], asked)

    def purge(self, *, now: int, limit: int = 1_000) -> int:
        asked = {"over": now - DELIVERIES_KEPT, "limit": limit}
        return self._connection.change("purging deliveries", self._queries["purge"], asked)

    def ping(self) -> None:
        check_version(self._connection)

    def close(self) -> None:
        self._connection.close()


def _asked(message_id: str, sequence: int, now: int) -> dict[str, Any]:
    return {"message_id": clean(message_id), "sequence": sequence, "now": now, "over": now - DELIVERIES_KEPT}
