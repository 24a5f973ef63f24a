"""The tables on PostgreSQL, in numbered steps: applied once by a person or a deploy, never by a worker on the way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from ...errors import SetupError
from .ways import way_to

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .connection import PostgresConnection

__all__ = ["SchemaStatus", "Step", "apply_schema", "check_version", "latest_version", "schema_status"]

#: Two deploys at once: the second waits.
_LOCK: Final = 0x6472616D


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the schema.

    Parameters:
      version(int): Its number.
      name(str): What it is about.
      text(str): Its statements, with ``{schema}`` for the schema.
    """

    version: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class SchemaStatus:
    """Which steps a database has taken.

    Parameters:
      schema(str): The schema.
      applied(tuple[int, ...]): The steps it has taken.
      missing(tuple[str, ...]): The names of those it has not, in order.
      unknown(tuple[int, ...]): Those that a later version of the library took.
    """

    schema: str
    applied: tuple[int, ...]
    missing: tuple[str, ...]
    unknown: tuple[int, ...]

    @property
    def ready(self) -> bool:
        """Whether the stores can work on it."""
        return not self.missing


def steps() -> tuple[Step, ...]:
    """The steps of this version of the library, in order."""
    return tuple(sorted(_steps(), key=lambda step: step.version))


def _steps() -> Iterator[Step]:
    for file in (files(__package__) / "schema").iterdir():
        found = re.fullmatch(r"(\d{3})_(\w+)\.sql", file.name)
        if found:
            yield Step(int(found[1]), file.name.removesuffix(".sql"), file.read_text("utf-8"))


def latest_version() -> int:
    """The number of the last step."""
    return steps()[-1].version


def check_version(connection: PostgresConnection) -> None:
    """Make sure that the stores can work on a database.

    Raises:
      StoreUnavailable: The server cannot be reached.
      SetupError: A step is missing.
    """
    ((version,),) = connection.rows(
        "reading the version of the schema",
        f'SELECT coalesce(max(version), 0) FROM "{connection.schema}".schema_steps',  # noqa: S608
        {},
    )
    if version < latest_version():
        raise SetupError(
            f"{connection.name}: schema {connection.schema!r} is at version {version}, and this library needs "
            f"{latest_version()}; run dramatiq-guard schema apply {connection.name}"
        )


def schema_status(target: Any, *, schema: str = "dramatiq_guard") -> SchemaStatus:
    """Say which steps a database has taken.

    Parameters:
      target(str | ConnectionPool | Engine): What `connect` takes for PostgreSQL.
      schema(str): The schema of the tables.

    Returns:
      SchemaStatus: The status.

    Raises:
      SetupError: The target is no URL of a PostgreSQL.
      StoreUnavailable: The server cannot be reached.
    """
    way = _way_to(target, schema)
    try:
        with way.using("reading the version of the schema") as connection:
            return _status(connection, schema)
    finally:
        way.close()


def apply_schema(target: Any, *, schema: str = "dramatiq_guard") -> SchemaStatus:
    """Take the steps that a database has not taken yet, each in a transaction.

    Parameters:
      target(str | ConnectionPool | Engine): What `connect` takes for PostgreSQL.
      schema(str): The schema of the tables, which is made if it is not there.

    Returns:
      SchemaStatus: The status before; its `missing` is what was done.

    Raises:
      SetupError: The target is no URL of a PostgreSQL.
      StoreUnavailable: The server cannot be reached.
      StoreError: The role may not create tables, or a step failed.
    """
    way = _way_to(target, schema)
    try:
        with way.using("applying the schema") as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            before = _status(connection, schema)
            if before.ready:
                return before
            connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
            connection.execute(
                f'CREATE TABLE IF NOT EXISTS "{schema}".schema_steps '
                "(version integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
            )
            for step in steps():
                if step.version not in before.applied:
                    connection.execute(step.text.replace("{schema}", f'"{schema}"'))
                    connection.execute(
                        f'INSERT INTO "{schema}".schema_steps (version, name) VALUES (%s, %s)',  # noqa: S608
                        (step.version, step.name),
                    )
            return before
    finally:
        way.close()


def _status(connection: Any, schema: str) -> SchemaStatus:
    there = connection.execute("SELECT to_regclass(%s) IS NOT NULL", (f'"{schema}".schema_steps',)).fetchone()[0]
    rows = connection.execute(f'SELECT version FROM "{schema}".schema_steps') if there else ()  # noqa: S608
    applied = {row[0] for row in rows}
    known = {step.version for step in steps()}
    return SchemaStatus(
        schema=schema,
        applied=tuple(sorted(applied)),
        missing=tuple(step.name for step in steps() if step.version not in applied),
        unknown=tuple(sorted(applied - known)),
    )


def _way_to(target: Any, schema: str) -> PostgresConnection:
    if isinstance(target, str) and target.partition("://")[0] not in ("postgresql", "postgres", "django"):
        raise SetupError("only PostgreSQL has a schema; write postgresql://user@host/database")
    return way_to(target, schema)
