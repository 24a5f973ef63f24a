"""The way to a PostgreSQL server through Django: each thread's connection to a database of ``settings.DATABASES``.

Our own calls go past Django to psycopg.  What a user is given is Django's connection, inside ``transaction.atomic()``,
which is the one that models use.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...errors import SetupError, StoreError
from .connection import PostgresConnection
from .places import has_news

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .transactions import Errors, Statement

__all__ = ["DjangoConnection", "DjangoTransaction"]


class DjangoConnection(PostgresConnection):
    """Runs statements through Django.

    Each thread has one connection, for calls and transactions alike: a call inside a transaction belongs to it.

    Parameters:
      url(str): ``django://`` and the alias of the database.
      schema(str): The schema of the tables.

    Raises:
      SetupError: Django is not installed or not configured, has no such database, or does not use psycopg 3 for it.
    """

    def __init__(self, url: str, *, schema: str = "dramatiq_guard") -> None:
        self._alias = url.removeprefix("django://").rstrip("/") or "default"
        try:
            from django.core.exceptions import ImproperlyConfigured
            from django.db import connections
            from django.utils.connection import ConnectionDoesNotExist
        except ImportError as error:
            raise SetupError(f"{url} needs Django, which is not installed") from error
        try:
            database = connections[self._alias]
        except (ImproperlyConfigured, ConnectionDoesNotExist) as error:
            raise SetupError(f"{url} names no database of Django's settings: {error}") from error
        if database.vendor != "postgresql":
            raise SetupError(f"no store for {url}, whose engine is {database.vendor}; name one on PostgreSQL")
        if database.Database.__name__ != "psycopg":
            raise SetupError(f"Django uses {database.Database.__name__} for {url}; install psycopg 3 in its place")
        super().__init__(connections, schema=schema)
        self.name = url

    @contextmanager
    def using(self, what: str) -> Iterator[Any]:
        with self._errors(what):
            yield _Plain(self._alive().connection)

    @contextmanager
    def transaction(self, what: str, *opening: Statement) -> Iterator[DjangoTransaction]:
        with self._errors(what):
            database = self._alive()
        with DjangoTransaction(database, self._errors).opened(what, opening) as transaction:
            yield transaction

    def dedicated(self, what: str) -> Any:
        with self._errors(what):
            database = self._pool.create_connection(self._alias)
            database.ensure_connection()
            return database.connection

    def _alive(self) -> Any:
        """This thread's connection to the database, made anew if it died while it was idle."""
        database = self._pool[self._alias]
        if not database.in_atomic_block:
            if database.connection is not None and (database.connection.closed or has_news(database.connection)):
                database.close()
            database.ensure_connection()
            if not database.get_autocommit():
                raise SetupError(
                    f"{self.name} is not in autocommit, so nothing would ever be committed; set AUTOCOMMIT"
                )
        return database

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        from django.db.utils import Error

        with super()._errors(what):
            try:
                yield
            except Error as error:
                if isinstance(error.__cause__, self._psycopg.Error):
                    raise error.__cause__ from error
                raise StoreError(f"{self.name} cannot be used while {what}: {error}") from error


class DjangoTransaction:
    """A `Transaction` of Django, which refuses a ``commit()`` or ``rollback()`` inside.

    Parameters:
      database(BaseDatabaseWrapper): This thread's connection.
      errors(Errors): What makes of the driver's errors ours.
    """

    def __init__(self, database: Any, errors: Errors) -> None:
        from django.db import transaction

        self.connection = database
        self.answers: list[list[tuple[Any, ...]]] = []
        self._errors = errors
        self._block = transaction.atomic(using=database.alias, durable=True)
        self._open = False

    @contextmanager
    def opened(self, what: str, opening: Sequence[Statement]) -> Iterator[DjangoTransaction]:
        """Begin it; on leaving it is rolled back, unless it was committed."""
        with self._errors(what):
            self._block.__enter__()
            self._open = True
        try:
            with self._errors(what):
                self.answers = [self._rows(*statement) for statement in opening]
            yield self
        except BaseException as error:
            if self._open:
                self._block.__exit__(type(error), error, error.__traceback__)
            raise
        if self._open:
            self.connection.set_rollback(True)
            self._block.__exit__(None, None, None)

    def commit(self, statement: str, parameters: Mapping[str, Any]) -> None:
        from django.db.utils import IntegrityError

        broken: Exception | None = None
        with self._errors("committing"):
            # It refuses if the transaction is to be rolled back: by ``set_rollback()``, or after an error in it.
            self.connection.validate_no_broken_transaction()
            self._rows(statement, parameters)
            self._open = False
            try:
                self._block.__exit__(None, None, None)
            except IntegrityError as error:
                broken = error
        if broken is not None:
            raise broken

    def _rows(self, statement: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return _Plain(self.connection.connection).execute(statement, parameters).fetchall()  # type: ignore[no-any-return]


class _Plain:
    """A connection of psycopg without what Django does to its cursors and to JSON."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def cursor(self, **known: Any) -> Any:
        from psycopg import Cursor
        from psycopg.types.json import JsonbLoader

        cursor = Cursor(self._connection, **known)
        cursor.adapters.register_loader("jsonb", JsonbLoader)
        return cursor

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        from psycopg.rows import tuple_row

        return self.cursor(row_factory=tuple_row).execute(statement, parameters)

    def transaction(self) -> Any:
        return self._connection.transaction()
