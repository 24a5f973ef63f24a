"""From a URL to stores: lazily, and with errors that say what to write."""

from __future__ import annotations

from typing import Any

import pytest
import redis
import valkey as valkey_py
from psycopg_pool import ConnectionPool

from dramatiq_guard.errors import SetupError, StoreUnavailable
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.stores.urls import masked
from dramatiq_guard.testing.private_server import free_port
from dramatiq_guard.testing.valkey import PrivateValkey

from .letters import letter


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("mysql://root:hunter2@db/app", r"mysql://root:\*\*\*@db/app.*'mysql' is unknown; write redis://"),
        ("localhost:6379", "not a URL.*write redis://"),
        ("redis://localhost:notaport", "not a usable Redis URL"),
        ("postgresql://localhost:notaport:1/x=?y", "not a usable PostgreSQL URL"),
        (object(), "no store for a object"),
        (None, "no store for a NoneType"),
    ],
)
def test_a_target_that_is_none(target: Any, says: str) -> None:
    """The error says what was given, without its password, and what to write."""
    with pytest.raises(SetupError, match=says) as caught:
        connect(target).dead_letters.ping()

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("known", [{"prefix": "a{b}"}, {"prefix": ""}])
def test_a_prefix_that_is_none(known: dict[str, str]) -> None:
    """Braces would tear the keys over the slots of a cluster."""
    with pytest.raises(SetupError, match="prefix"):
        connect("redis://localhost", **known)


def test_a_schema_that_is_none() -> None:
    """It goes into statements, so it must be a plain name."""
    with pytest.raises(SetupError, match="schema"):
        connect("postgresql://localhost/app", schema='x"; DROP TABLE students')


@pytest.mark.parametrize("scheme", ["redis", "valkey", "postgresql"])
def test_nothing_is_connected_until_it_is_needed_and_a_refusal_is_clear(scheme: str) -> None:
    """A module that is imported while the server is down still imports; the first use names server and remedy."""
    stores = connect(f"{scheme}://user:hunter2@127.0.0.1:{free_port()}/0")

    with pytest.raises(StoreUnavailable, match=r"user:\*\*\*@127.0.0.1.* is the server up") as caught:
        stores.dead_letters.put(letter())

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cret@host:1/0", "redis://:***@host:1/0"),
        ("rediss://ada:s3:cr@et@host", "rediss://ada:***@host"),
        ("postgresql://ada@host/app?password=s3cret&x=1", "postgresql://ada@host/app?password=***&x=1"),
        ("redis://host", "redis://host"),
        ("unix:///tmp/s.sock?db=0&password=s3cret", "unix:///tmp/s.sock?db=0&password=***"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    """What is logged can be shown to anyone."""
    assert shown == masked(url)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("library", [redis, valkey_py])
def test_a_client_of_ones_own(valkey: PrivateValkey, redis_url: str, library: Any, decode: bool) -> None:
    """redis-py's and valkey-py's clients serve, whatever they decode, and stay open afterwards."""
    client = (library.Redis if library is redis else library.Valkey)(
        host="127.0.0.1", port=valkey.port, decode_responses=decode
    )
    with client:
        stores = connect(client, prefix="mine")
        assert stores.dead_letters.put(letter())
        read = stores.dead_letters.get("m")
        stores.close()

        assert read is not None
        assert "m" == read.letter_id
        assert client.exists("{mine}:dead-letters:letter:m")


def test_a_pool_of_ones_own(postgres_url: str) -> None:
    """psycopg's pool serves, and stays open afterwards."""
    apply_schema(postgres_url)
    with ConnectionPool(postgres_url, min_size=1, open=True) as pool:
        stores = connect(pool)
        assert stores.dead_letters.put(letter())
        stores.close()

        with pool.connection() as connection:
            found = connection.execute("SELECT count(*) FROM dramatiq_guard.dead_letters").fetchone()
        assert (1,) == found


def test_two_prefixes_are_two_stores(redis_url: str) -> None:
    """Applications can share a server."""
    one, two = connect(redis_url, prefix="one"), connect(redis_url, prefix="two")
    one.dead_letters.put(letter())

    assert 0 == two.dead_letters.depth()
    one.close()
    two.close()
