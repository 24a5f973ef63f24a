"""Designs by which one might see to it that a job is done once, as `idempotency` compares them.

Each runs a job under a key: the words that it says to its server before and after are what is measured.  Only those
that have one winner, whatever happens at once, do what they are for.  It must not know how anything is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
import redis

from dramatiq_guard import connect
from dramatiq_guard.stores.idempotency import DONE, FRESH, Finish

if TYPE_CHECKING:
    from collections.abc import Callable

TTL = 86_400_000


class Design(Protocol):
    """Runs jobs under keys."""

    def run(self, key: str, result: str) -> str | None:
        """Do the job, which gives this result, unless it was done; ``None`` where somebody is at it."""
        ...

    def hold(self, key: str) -> None:
        """Leave a key as a job leaves it that is still running."""
        ...

    def close(self) -> None:
        """Give back the connections."""
        ...


class Guard:
    """The stores of IdempotencyGuard."""

    def __init__(self, url: str) -> None:
        self.stores = connect(url)
        self.store: Any = self.stores.idempotency

    def run(self, key: str, result: str) -> str | None:
        claim = self._claim(key, "me")
        if claim.answer == DONE:
            return str(claim.result.decode())
        if claim.answer != FRESH:
            return None
        self.store.complete(key, claim.fence, Finish(result.encode()), retention=TTL)
        return result

    def hold(self, key: str) -> None:
        self._claim(key, "another")

    def close(self) -> None:
        self.stores.close()

    def _claim(self, key: str, owner: str) -> Any:
        return self.store.claim(key, owner=owner, lease=30_000, retention=TTL)


class OnRedis:
    """What the designs on Redis have in common."""

    def __init__(self, url: str) -> None:
        self.client: Any = redis.Redis.from_url(url)

    def hold(self, key: str) -> None:
        self.client.set(key, "running", px=TTL)

    def close(self) -> None:
        self.client.close()


class GetSet(OnRedis):
    """Look, mark, work, note: whoever looks in the same moment works, too."""

    def run(self, key: str, result: str) -> str | None:
        known = self.client.get(key)
        if known is not None:
            return None if known == b"running" else str(known.decode())
        self.client.set(key, "running", px=TTL)
        self.client.set(key, result, px=TTL)
        return result


class SetNx(OnRedis):
    """Mark if there is nothing, else look."""

    def run(self, key: str, result: str) -> str | None:
        if self.client.set(key, "running", nx=True, px=TTL):
            self.client.set(key, result, px=TTL)
            return result
        known = self.client.get(key)
        return None if known is None or known == b"running" else str(known.decode())


class Locked(OnRedis):
    """redis-py's lock around a look and a note."""

    def run(self, key: str, result: str) -> str | None:
        lock = self.client.lock(f"lock:{key}", timeout=30, blocking=False)
        if not lock.acquire():
            return None
        try:
            known = self.client.get(key)
            if known is not None:
                return str(known.decode())
            self.client.set(key, result, px=TTL)
            return result
        finally:
            lock.release()

    def hold(self, key: str) -> None:
        self.client.lock(f"lock:{key}", timeout=3_600, blocking=False).acquire()


class Powertools(OnRedis):
    """aws-lambda-powertools, as it is used around any function."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
        from aws_lambda_powertools.utilities.idempotency.persistence.redis import RedisCachePersistenceLayer

        layer = RedisCachePersistenceLayer(client=self.client)
        config = IdempotencyConfig(expires_after_seconds=TTL // 1000, raise_on_no_idempotency_key=True)

        @idempotent_function(data_keyword_argument="order", persistence_store=layer, config=config)
        def charge(order: Any, result: str) -> str:
            return result

        self.charge: Any = charge
        self.layer = layer
        self.run("first", "")  # which tells the layer the function's name

    def run(self, key: str, result: str) -> str | None:
        from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyAlreadyInProgressError

        try:
            return str(self.charge(order=key, result=result))
        except IdempotencyAlreadyInProgressError:
            return None

    def hold(self, key: str) -> None:
        self.layer.save_inprogress(data=key, remaining_time_in_millis=3_600_000)


class OnPostgres:
    """What the designs on PostgreSQL have in common."""

    def __init__(self, url: str) -> None:
        self.connection: Any = psycopg.connect(url, autocommit=True)
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS jobs (key text PRIMARY KEY, state text NOT NULL, result text)"
        )

    def hold(self, key: str) -> None:
        self.connection.execute("INSERT INTO jobs VALUES (%s, 'running') ON CONFLICT DO NOTHING", (key,))

    def close(self) -> None:
        self.connection.close()


class Upsert(OnPostgres):
    """One statement that writes the row whether it is there or not, so that it can return it."""

    def run(self, key: str, result: str) -> str | None:
        claim = (
            "INSERT INTO jobs AS j VALUES (%s, 'running') ON CONFLICT (key) DO UPDATE SET state = j.state "
            "RETURNING state, result, xmax = 0"
        )
        state, known, fresh = self.connection.execute(claim, (key,)).fetchone()
        if not fresh:
            return str(known) if state == "done" else None
        self.connection.execute("UPDATE jobs SET state = 'done', result = %s WHERE key = %s", (result, key))
        return result


class TwoTransactions(OnPostgres):
    """Insert, look with a lock, mark, commit; work; lock, note, commit."""

    def run(self, key: str, result: str) -> str | None:
        with self.connection.transaction():
            inserted = self.connection.execute(
                "INSERT INTO jobs VALUES (%s, 'new') ON CONFLICT DO NOTHING", (key,)
            ).rowcount
            asked = "SELECT state, result FROM jobs WHERE key = %s FOR UPDATE"
            state, known = self.connection.execute(asked, (key,)).fetchone()
            if not inserted:
                return str(known) if state == "done" else None
            self.connection.execute("UPDATE jobs SET state = 'running' WHERE key = %s", (key,))
        with self.connection.transaction():
            self.connection.execute("UPDATE jobs SET state = 'done', result = %s WHERE key = %s", (result, key))
        return result


@dataclass(frozen=True, slots=True)
class Kind:
    """A design, and what is known about it.

    Parameters:
      kind(str): What it needs: ``redis`` or ``postgresql``.
      title(str): For people.
      make(Callable): Makes it for a URL.
      one_winner(str): Whether of many at once one works: ``yes``, ``no``, or ``no fence`` where an owner whose time was
        over may overwrite what the next one noted.
    """

    kind: str
    title: str
    make: Callable[[str], Design]
    one_winner: str


def designs(*, powertools: bool) -> list[Kind]:
    """All designs."""
    library = [Kind("redis", "aws-lambda-powertools, Redis layer", Powertools, "no fence")] if powertools else []
    return [
        Kind("redis", "IdempotencyGuard's store on Redis", Guard, "yes"),
        Kind("redis", "GET, SET, SET", GetSet, "no"),
        Kind("redis", "SET NX, GET, SET", SetNx, "no fence"),
        Kind("redis", "Lock, GET, SET", Locked, "no fence"),
        *library,
        Kind("postgresql", "IdempotencyGuard's store on PostgreSQL", Guard, "yes"),
        Kind("postgresql", "upsert always", Upsert, "no fence"),
        Kind("postgresql", "two transactions", TwoTransactions, "no fence"),
    ]
