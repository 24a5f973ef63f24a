"""One process's way to a PostgreSQL server: lazy, bounded in time, and without retries of its own.

A pool with threads in the background would not survive a fork and would hide why a server cannot be reached, so idle
connections simply lie in a list.  This module must not know what the statements do.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from ... import clock
from ...errors import SetupError, StoreError, StoreUnavailable
from ..urls import masked
from .places import Places
from .transactions import PsycopgTransaction

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from .transactions import Statement, Transaction

__all__ = ["PostgresConnection", "Queries"]

CONNECT_TIMEOUT: Final = 2
COMMAND_TIMEOUT: Final = 5_000
MAX_CONNECTIONS: Final = 10
MAX_TRANSACTIONS: Final = 10

#: Connection failures, resources, intervention, system errors, serialization and deadlocks; a lock not to be had; a
#: server that only reads.
_PASSING: Final = ("08", "53", "57", "58", "40", "55P03", "25006")
_NO_SCHEMA: Final = ("42P01", "3F000", "42883", "42703")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


class Queries:
    """The statements of a ``.sql`` file by name, for one schema.

    Parameters:
      schema(str): The schema.
      file(str): The file.
      **parts(str): What stands for ``{name}`` in them.
    """

    def __init__(self, schema: str, *, file: str = "queries.sql", **parts: str) -> None:
        text = (files(__package__) / file).read_text("utf-8")
        self._texts: dict[str, str] = {}
        for section in re.split(r"^-- (?=\w+ --)", text, flags=re.MULTILINE)[1:]:
            name, _, body = section.partition(" --")
            statement = body.partition("\n")[2].strip()
            for part, value in {**parts, "schema": f'"{schema}"'}.items():
                statement = statement.replace(f"{{{part}}}", value)
            self._texts[name] = statement

    def __getitem__(self, name: str) -> str:
        return self._texts[name]


class PostgresConnection:
    """Runs statements on a server.

    Connections are made on first use, by each process for itself: one per thread that is busy at once, ten at most.

    Parameters:
      target(str | ConnectionPool): A URL, or a pool of psycopg, whose timeouts are then its owner's.
      schema(str): The schema of the tables.

    Raises:
      SetupError: The schema has no name that can be one, or psycopg is not installed.
    """

    def __init__(self, target: Any, *, schema: str = "dramatiq_guard") -> None:
        if not isinstance(schema, str) or not _NAME.fullmatch(schema):
            raise SetupError(f"schema must be the name of a schema (letters, digits, underscores), not {schema!r}")
        try:
            import psycopg
        except ImportError as error:
            raise SetupError(
                "a store on PostgreSQL needs psycopg, which is not installed; run "
                "pip install 'dramatiq-guard[postgres]'"
            ) from error
        self.schema = schema
        self.name = masked(target) if isinstance(target, str) else f"the given {type(target).__name__}"
        self._psycopg = psycopg
        self._pool: Any = None if isinstance(target, str) else target
        self._parameters = self._parsed(target) if isinstance(target, str) else {}
        self._calls = Places(
            MAX_CONNECTIONS, f"{self.name}: all {MAX_CONNECTIONS} connections of this process are busy"
        )
        room = max(1, self._room())
        self._transactions = Places(room, f"{self.name}: this process has {room} transactions open already")

    def __repr__(self) -> str:
        return f"<PostgresConnection to {self.name}>"

    def rows(self, what: str, statement: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run one statement that returns rows; see `using` for what it raises."""
        with self.using(what) as connection:
            cursor = connection.cursor(row_factory=self._psycopg.rows.tuple_row)
            found: list[tuple[Any, ...]] = cursor.execute(statement, parameters).fetchall()
            return found

    def change(self, what: str, statement: str, parameters: Mapping[str, Any]) -> int:
        """Run one statement that changes rows, and say how many; see `using` for what it raises."""
        with self.using(what) as connection:
            return int(connection.execute(statement, parameters).rowcount)

    @contextmanager
    def using(self, what: str) -> Iterator[Any]:
        """Lend a connection; each statement is a transaction of its own unless one is opened.

        Parameters:
          what(str): What it is for, for errors.

        Raises:
          StoreUnavailable: The server cannot be reached, or cannot serve now.
          SetupError: The tables are not there.
          StoreError: The server answered with any other error.
        """
        with self._errors(what):
            if self._pool is not None:
                with self._pool.connection() as connection:
                    yield connection
            else:
                with self._own() as connection:
                    yield connection

    @contextmanager
    def transaction(self, what: str, *opening: Statement) -> Iterator[Transaction]:
        """Open a transaction for somebody else's statements, which may take their time.

        At most ten are open at once, on connections beside those for short calls (of a given pool: all but one of its
        connections).  So however many wait for one, and however long they are open, a short call finds a connection.

        Parameters:
          what(str): What it is for, for errors.
          *opening(Statement): What is run first.

        Yields:
          Transaction: The transaction; left without a `commit`, it is rolled back.

        Raises:
          StoreUnavailable: The server cannot be reached, or cannot serve now, or too many are open for 5 seconds.
        """
        with self._transactions.place(timeout=COMMAND_TIMEOUT):
            with self._errors(what):
                own = self._pool is None
                connection = (self._transactions.pick_up() or self._new_one()) if own else self._pool.getconn()
            autocommit = connection.autocommit
            transaction = None
            try:
                with self._errors(what):
                    connection.autocommit = True
                    transaction = PsycopgTransaction(connection, self._errors)
                with transaction.opened(what, opening):
                    yield transaction
            finally:
                if transaction is None or not transaction.at_rest:
                    connection.close()
                elif own:
                    self._transactions.lay_down(connection)
                else:
                    connection.autocommit = autocommit
                if not own:
                    self._pool.putconn(connection)

    def dedicated(self, what: str) -> Any:
        """Make a connection beside the others, in autocommit, which belongs to whoever asked; see `using`."""
        with self._errors(what):
            if self._pool is None:
                return self._new_one()
            given = self._pool.kwargs
            known = {**((given() if callable(given) else given) or {}), "autocommit": True}
            address = self._pool.conninfo
            return self._pool.connection_class.connect(address() if callable(address) else address, **known)

    def _room(self) -> int:
        """How many transactions may be open: of a pool one connection is left for short calls."""
        size = getattr(self._pool, "max_size", 0)
        return size - 1 if size else MAX_TRANSACTIONS

    def close(self) -> None:
        """Close this process's idle connections, unless they are somebody else's."""
        self._calls.close()
        self._transactions.close()

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Make of the driver's errors ours."""
        try:
            yield
        except self._psycopg.Error as error:
            raise self._translated(error, what) from error
        except OSError as error:
            raise StoreUnavailable(f"{self.name} is not available while {what}: {error}") from error

    @contextmanager
    def _own(self) -> Iterator[Any]:
        with self._calls.place(timeout=COMMAND_TIMEOUT):
            connection = None
            try:
                connection = self._calls.pick_up() or self._new_one()
                yield connection
            except BaseException:
                # Whatever it was in the middle of, nobody else shall find it so.
                if connection is not None:
                    connection.close()
                raise
            self._calls.lay_down(connection)

    def _new_one(self) -> Any:
        return _patient(self._psycopg).connect(**self._parameters, autocommit=True)

    def _parsed(self, url: str) -> dict[str, Any]:
        try:
            given = self._psycopg.conninfo.conninfo_to_dict(url)
        except self._psycopg.Error as error:
            raise SetupError(f"not a usable PostgreSQL URL: {masked(url)}: {str(error).strip()}") from error
        return {"connect_timeout": CONNECT_TIMEOUT, "application_name": "dramatiq-guard", **given}

    def _translated(self, error: Any, what: str) -> StoreError | SetupError:
        code = error.sqlstate or ""
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        if code.startswith(_NO_SCHEMA):
            return SetupError(
                f"{self.name} has no usable tables in schema {self.schema!r} ({text}); run dramatiq-guard schema apply "
                f"{self.name} once, with a role that may create them"
            )
        if code.startswith(_PASSING) or (not code and isinstance(error, self._psycopg.OperationalError)):
            return StoreUnavailable(
                f"{self.name} is not available while {what}: {text}; is the server up and writable?"
            )
        return StoreError(f"{self.name} answered with an error while {what}: {text} (SQLSTATE {code or 'unknown'})")


def _patient(psycopg: Any) -> Any:
    """A connection class that waits so long for an answer and no longer, even from a server that was frozen."""

    class Patient(psycopg.Connection):  # type: ignore[misc]
        hurried = True

        def wait(self, generator: Any, *args: Any, **known: Any) -> Any:
            if not self.hurried:
                return super().wait(generator, *args, **known)
            return super().wait(_bounded(generator, clock.monotonic() + COMMAND_TIMEOUT), *args, **known)

    return Patient


def _bounded(generator: Any, deadline: int) -> Generator[Any, Any, Any]:
    """Pass a generator of psycopg on, and raise where it is told that nothing is ready and the time is over."""
    try:
        wanted = next(generator)
        while True:
            ready = yield wanted
            if not ready and clock.monotonic() > deadline:
                raise TimeoutError(f"no answer within {COMMAND_TIMEOUT} ms")
            wanted = generator.send(ready)
    except StopIteration as end:
        return end.value
