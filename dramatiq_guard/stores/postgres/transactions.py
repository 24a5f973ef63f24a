"""A transaction in which somebody else's statements run between our first and our last.

It begins in one round trip with our first, and commits in one round trip with our last: if that one fails, so does the
commit.  This module must not know what the statements do.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    Statement = tuple[str, Mapping[str, Any]]
    Errors = Callable[[str], AbstractContextManager[None]]

__all__ = ["PsycopgTransaction", "Transaction"]


class Transaction(Protocol):
    """An open transaction.

    Attributes:
      connection(Any): For its user.
      answers(list[list[tuple]]): The rows of the statements that it was opened with.
    """

    connection: Any
    answers: list[list[tuple[Any, ...]]]

    def commit(self, statement: str, parameters: Mapping[str, Any]) -> None:
        """Run the last statement and commit, unless it fails.

        Raises:
          StoreUnavailable: The server cannot be reached: nobody knows whether it was committed.
          StoreError: The statement failed, or the transaction was over; its cause is the driver's error, if any.
          Exception: What the user wrote breaks a constraint that is checked now: the driver's error.
        """
        ...


class PsycopgTransaction:
    """A `Transaction` on a connection of psycopg, which refuses a ``commit()`` or ``rollback()`` inside.

    Parameters:
      connection(Connection): A connection at rest, in autocommit.
      errors(Errors): What makes of the driver's errors ours.
    """

    def __init__(self, connection: Any, errors: Errors) -> None:
        from psycopg import Transaction as Block

        self.connection = connection
        self.answers: list[list[tuple[Any, ...]]] = []
        self._errors = errors
        self._block = Block(connection)
        self._open = False
        self._whole = False

    @property
    def at_rest(self) -> bool:
        """Whether it ended in order, and the connection can be used for something else."""
        from psycopg.pq import TransactionStatus

        return self._whole and not self._open and self.connection.info.transaction_status == TransactionStatus.IDLE

    @contextmanager
    def opened(self, what: str, opening: Sequence[Statement]) -> Iterator[PsycopgTransaction]:
        """Begin it; on leaving it is rolled back, unless it was committed."""
        with self._errors(what):
            with self.connection.pipeline():
                self._block.__enter__()
                cursors = [self._run(*statement) for statement in opening]
            self.answers = [cursor.fetchall() for cursor in cursors]
        # What the user runs may take its time: the server's own `statement_timeout` bounds it, and the actor's limit.
        self._open, self.connection.hurried = True, False
        try:
            yield self
        except BaseException as error:
            self._end(error)
            raise
        if self._open:
            self._end(_Left())

    def commit(self, statement: str, parameters: Mapping[str, Any]) -> None:
        from psycopg import Error, IntegrityError
        from psycopg.errors import PipelineAborted

        self._open, self.connection.hurried = False, True
        broken: Exception | None = None
        with self._errors("committing"):
            try:
                with self.connection.pipeline():
                    cursor = self._run(statement, parameters)
                    self._block.__exit__(None, None, None)
                cursor.fetchall()
            except PipelineAborted as aborted:
                # What it was aborted by may have been seen first, or not.
                failure = aborted.__context__
                raise failure if isinstance(failure, Error) else aborted from None
            except IntegrityError as error:
                broken = error
        if broken is not None:
            raise broken
        if self._block.status is not self._block.Status.COMMITTED:
            raise StoreUnavailable("the connection broke before the transaction was committed")
        self._whole = True

    def _end(self, error: BaseException) -> None:
        if self._open:
            self._open, self.connection.hurried = False, True
            self._block.__exit__(type(error), error, error.__traceback__)
            self._whole = True

    def _run(self, statement: str, parameters: Mapping[str, Any]) -> Any:
        from psycopg.rows import tuple_row

        return self.connection.cursor(row_factory=tuple_row).execute(statement, parameters)


class _Left(Exception):
    """A transaction was left without a commit."""
