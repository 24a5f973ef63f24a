"""The way to a PostgreSQL server through an engine of SQLAlchemy: its connections, and its transactions for the user.

Our own calls go past SQLAlchemy to psycopg, in autocommit.  What a user is given is a SQLAlchemy `Connection`.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ...errors import SetupError, StoreError, StoreUnavailable
from . import connection as own
from .connection import PostgresConnection
from .places import has_news

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .transactions import Errors, Statement

__all__ = ["EngineConnection", "EngineTransaction"]


class EngineConnection(PostgresConnection):
    """Runs statements through an engine.

    Parameters:
      engine(Engine): An engine of SQLAlchemy with the dialect ``postgresql+psycopg``.
      schema(str): The schema of the tables.

    Raises:
      SetupError: It has another dialect.
    """

    def __init__(self, engine: Any, *, schema: str = "dramatiq_guard") -> None:
        dialect = engine.dialect
        if (dialect.name, dialect.driver) != ("postgresql", "psycopg") or dialect.is_async:
            raise SetupError(
                f"no store for an engine with the dialect {dialect.name}+{dialect.driver}; make it with "
                'create_engine("postgresql+psycopg://...")'
            )
        super().__init__(engine, schema=schema)

    @contextmanager
    def using(self, what: str) -> Iterator[Any]:
        with self._errors(what):
            lent = self._alive()
            connection = lent.driver_connection
            autocommit = connection.autocommit
            try:
                connection.autocommit = True
                yield connection
            finally:
                if connection.closed or connection.info.transaction_status != self._psycopg.pq.TransactionStatus.IDLE:
                    lent.invalidate()
                else:
                    connection.autocommit = autocommit
                lent.close()

    @contextmanager
    def transaction(self, what: str, *opening: Statement) -> Iterator[EngineTransaction]:
        with self._transactions.place(timeout=own.COMMAND_TIMEOUT):
            with self._errors(what):
                connection = self._pool.connect()
            with connection, EngineTransaction(connection, self._errors).opened(what, opening) as transaction:
                yield transaction

    def dedicated(self, what: str) -> Any:
        with self._errors(what):
            lent = self._alive()
            connection = lent.driver_connection
            lent.detach()
            connection.autocommit = True
            return connection

    def _alive(self) -> Any:
        """A connection of the engine's pool that did not die while it was idle."""
        while True:
            lent = self._pool.raw_connection()
            if not lent.driver_connection.closed and not has_news(lent.driver_connection):
                return lent
            lent.invalidate()

    def _room(self) -> int:
        size, overflow = getattr(self._pool.pool, "size", None), getattr(self._pool.pool, "_max_overflow", -1)
        return size() + overflow - 1 if callable(size) and overflow >= 0 else own.MAX_TRANSACTIONS

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        from sqlalchemy.exc import DBAPIError
        from sqlalchemy.exc import TimeoutError as NoConnection

        with super()._errors(what):
            try:
                yield
            except NoConnection as error:
                raise StoreUnavailable(f"{self.name} has no connection left for {what}: {error}") from error
            except DBAPIError as error:
                if error.orig is None:
                    raise
                raise error.orig from error


class EngineTransaction:
    """A `Transaction` on a connection of SQLAlchemy, which lets nobody else commit it.

    Parameters:
      connection(Connection): A connection of SQLAlchemy without a transaction.
      errors(Errors): What makes of the driver's errors ours.
    """

    def __init__(self, connection: Any, errors: Errors) -> None:
        self.connection = connection
        self.answers: list[list[tuple[Any, ...]]] = []
        self._errors = errors
        self._root: Any = None

    @contextmanager
    def opened(self, what: str, opening: Sequence[Statement]) -> Iterator[EngineTransaction]:
        """Begin it; on leaving it is rolled back, unless it was committed."""
        from sqlalchemy import event
        from sqlalchemy.exc import DBAPIError

        with self._errors(what):
            self._root = self.connection.begin()
            self.answers = [self._rows(*statement) for statement in opening]
            driver = self.connection.connection.driver_connection
            if driver.autocommit:
                raise SetupError("the engine is in AUTOCOMMIT, which has no transactions; give one that is not")
        event.listen(self.connection, "commit", _refuse)
        try:
            yield self
        finally:
            if event.contains(self.connection, "commit", _refuse):
                event.remove(self.connection, "commit", _refuse)
            with suppress(DBAPIError):  # a connection that is gone has rolled back
                if self._root.is_active:
                    self._root.rollback()
            if not driver.closed and driver.info.transaction_status != driver.info.transaction_status.IDLE:
                # A commit that was refused leaves it so.
                self.connection.invalidate()

    def commit(self, statement: str, parameters: Mapping[str, Any]) -> None:
        from sqlalchemy import event
        from sqlalchemy.exc import IntegrityError

        event.remove(self.connection, "commit", _refuse)
        broken: Exception | None = None
        with self._errors("committing"):
            # Whoever ended the transaction began another by what he did next, or we do now: our statement fails in it.
            self._rows(statement, parameters)
            try:
                self._root.commit()
            except IntegrityError as error:
                broken = error
        if broken is not None:
            raise broken

    def _rows(self, statement: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.connection.exec_driver_sql(statement, dict(parameters)).fetchall()]


def _refuse(_: Any) -> None:
    raise StoreError(
        "this transaction is committed by its context manager, together with its key; bind a session to the "
        'connection with join_transaction_mode="create_savepoint", and its commit() ends only a savepoint'
    )
