"""Which way leads to a PostgreSQL server: by a URL or a pool of ours, or through what an application has already."""

from __future__ import annotations

from typing import Any

from .connection import PostgresConnection

__all__ = ["is_engine", "way_to"]


def way_to(target: Any, schema: str) -> PostgresConnection:
    """Choose the way to a target.

    Parameters:
      target(str | ConnectionPool | Engine): A URL (``postgresql://``, ``django://`` with the alias of a database), a
        pool of psycopg, or an engine of SQLAlchemy.
      schema(str): The schema of the tables.

    Raises:
      SetupError: It cannot be used.
    """
    if isinstance(target, str) and target.startswith("django://"):
        from .through_django import DjangoConnection

        return DjangoConnection(target, schema=schema)
    if is_engine(target):
        from .through_sqlalchemy import EngineConnection

        return EngineConnection(target, schema=schema)
    return PostgresConnection(target, schema=schema)


def is_engine(target: Any) -> bool:
    """Whether this looks like an engine of SQLAlchemy, of whatever dialect."""
    return hasattr(target, "dialect") and hasattr(target, "raw_connection")
