"""From a URL, a client or a pool to its stores."""

from __future__ import annotations

from typing import Any

from ..errors import SetupError
from .protocols import Stores
from .urls import masked

__all__ = ["connect"]

_REDIS = ("redis", "rediss", "unix", "valkey", "valkeys")
_POSTGRES = ("postgresql", "postgres", "django")
_KNOWN = "redis://, rediss://, unix://, valkey://, postgresql://, django:// or memory://"


def connect(target: Any, *, prefix: str = "dramatiq-guard", schema: str = "dramatiq_guard") -> Stores:
    """Make the stores of one server.

    Nothing is connected yet: each process connects when it first needs to, so this may be called before workers fork.
    Connecting may take 2 seconds, a command 5; the URL's own options (``?socket_timeout=``, ``?connect_timeout=``)
    win.  No command is silently repeated.  A process holds as many connections as it has threads busy with the store
    at once, on PostgreSQL no more than 10; and as many again, no more than 10, for transactions of idempotent actors
    that are open at once (of a given pool or engine: all but one of its connections).

    Parameters:
      target(str | Redis | ConnectionPool | Engine): A URL (``redis://``, ``rediss://``, ``unix://``, ``valkey://``,
        ``postgresql://``, ``memory://``; ``django://default`` is a database of Django's settings), a client of redis-py
        or valkey-py, a pool of psycopg, or an engine of SQLAlchemy with psycopg, whose timeouts and retries are then
        its owner's.
      prefix(str): What all keys begin with, on Redis.
      schema(str): The schema of the tables, on PostgreSQL.

    Returns:
      Stores: The stores.

    Raises:
      SetupError: The target is none of these, or what it needs is not installed.

    Example:
      ``stores = connect("postgresql://localhost/app")``
    """
    if isinstance(target, str):
        scheme, separator, _ = target.partition("://")
        if not separator:
            raise SetupError(f"not a URL of a store: {masked(target)!r}; write {_KNOWN}")
        if scheme in _REDIS:
            return _redis(target, prefix)
        if scheme in _POSTGRES:
            return _postgres(target, schema)
        if scheme == "memory":
            from .memory.breakers import MemoryBreakers
            from .memory.dead_letters import MemoryDeadLetters
            from .memory.deliveries import MemoryDeliveries
            from .memory.idempotency import MemoryIdempotency

            return Stores(
                dead_letters=MemoryDeadLetters(),
                deliveries=MemoryDeliveries(),
                idempotency=MemoryIdempotency(),
                breakers=MemoryBreakers(),
            )
        raise SetupError(f"no store for {masked(target)!r}: the scheme {scheme!r} is unknown; write {_KNOWN}")
    if hasattr(target, "evalsha"):
        return _redis(target, prefix)
    if (hasattr(target, "connection") and hasattr(target, "getconn")) or hasattr(target, "raw_connection"):
        return _postgres(target, schema)
    raise SetupError(
        f"no store for a {type(target).__name__}; give a URL ({_KNOWN}), a client of redis-py or valkey-py, a "
        "psycopg_pool.ConnectionPool, or an engine of SQLAlchemy"
    )


def _redis(target: Any, prefix: str) -> Stores:
    from .redis.breakers import RedisBreakers
    from .redis.connection import RedisConnection
    from .redis.dead_letters import RedisDeadLetters
    from .redis.deliveries import RedisDeliveries
    from .redis.idempotency import RedisIdempotency

    if not isinstance(prefix, str) or not prefix or "{" in prefix or "}" in prefix:
        raise SetupError(f"prefix must be a name without braces, not {prefix!r}")
    connection = RedisConnection(target)
    return Stores(
        dead_letters=RedisDeadLetters(connection, prefix=prefix),
        deliveries=RedisDeliveries(connection, prefix=prefix),
        idempotency=RedisIdempotency(connection, prefix=prefix),
        breakers=RedisBreakers(connection, prefix=prefix),
    )


def _postgres(target: Any, schema: str) -> Stores:
    from .postgres.breakers import PostgresBreakers
    from .postgres.dead_letters import PostgresDeadLetters
    from .postgres.deliveries import PostgresDeliveries
    from .postgres.idempotency import PostgresIdempotency
    from .postgres.ways import way_to

    connection = way_to(target, schema)
    return Stores(
        dead_letters=PostgresDeadLetters(connection),
        deliveries=PostgresDeliveries(connection),
        idempotency=PostgresIdempotency(connection),
        breakers=PostgresBreakers(connection),
    )
