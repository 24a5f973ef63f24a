"""The store of the keys is restarted, or loses everything, while a guarded job runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psycopg
import pytest
import redis

from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.postgres import PrivatePostgres

from .world import Servers, World, world

MATRIX = pytest.mark.matrix

#: A lease that no restart outlasts, however busy the machine is.
UNHURRIED = 60_000


@pytest.fixture
def frail(servers: Servers, own_postgres: PrivatePostgres) -> Servers:
    """The same servers with a PostgreSQL that may be killed."""
    return replace(servers, postgres=own_postgres.url).prepare()


def _begun(here: World, actor: str) -> Any:
    message = here.send(actor, "job", "interruptibly")
    here.wait_noted("waits")
    return message


def _check(here: World, message: Any, runs: int | None = 1) -> None:
    """One charge, which is the result, and the key is done; and so many runs."""
    record = here.record(message)
    assert record is not None
    assert "done" == record.state
    (made,) = here.gateway.charges()["job"]
    assert made == here.result(message)
    assert not here.letters()
    assert runs in (None, here.runs("job")), here.story


@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=MATRIX)])
@pytest.mark.parametrize("actor", ["lease", pytest.param("step", marks=MATRIX)])
def test_redis_is_killed_and_started_again_while_a_job_runs(
    actor: str, broker: str, servers: Servers, store_valkey: PrivateValkey, request: pytest.FixtureRequest
) -> None:
    """One execution: the lease is in the append-only file."""
    if broker == "rabbitmq":
        servers = replace(servers, rabbitmq=request.getfixturevalue("server"))
    with world(servers, broker, "redis", lease=UNHURRIED) as here, here.working():
        message = _begun(here, actor)
        store_valkey.kill()
        store_valkey.start()
        here.open()
        here.wait_settled()
        _check(here, message)


def test_redis_is_out_for_longer_than_a_lease(servers: Servers, store_valkey: PrivateValkey) -> None:
    """The run is interrupted before anybody could take its key, waits for the store, and has one effect by its key."""
    with world(servers, "redis", "redis") as here, here.working():
        message = _begun(here, "key")
        store_valkey.kill()
        try:
            here.wait_noted("LeaseLost")
        finally:
            store_valkey.start()
        here.open()
        here.wait_settled()
        _check(here, message, runs=None)


@pytest.mark.parametrize("actor", ["lease", pytest.param("step", marks=MATRIX)])
def test_redis_forgets_everything_while_a_job_runs(actor: str, servers: Servers, store_valkey: PrivateValkey) -> None:
    """One execution: its end is noted anew, and a duplicate that comes later finds it."""
    with world(servers, "redis", "redis", lease=UNHURRIED) as here, here.working():
        message = _begun(here, actor)
        with redis.Redis.from_url(store_valkey.url) as client:
            client.flushall()
        here.open()
        here.wait_settled()
        here.again(message)
        here.wait_settled()
        _check(here, message)


@MATRIX
def test_redis_forgets_everything_while_a_job_runs_for_longer_than_a_lease(
    servers: Servers, store_valkey: PrivateValkey
) -> None:
    """Nobody knows who holds the key, so the run is interrupted and begins anew: one charge, as the gateway has it."""
    with world(servers, "redis", "redis") as here, here.working():
        message = _begun(here, "key")
        with redis.Redis.from_url(store_valkey.url) as client:
            client.flushall()
        here.wait_noted("LeaseLost")
        here.open()
        here.wait_settled()
        _check(here, message, runs=2)


@pytest.mark.parametrize("actor", ["key", "atomic", "inbox", pytest.param("step", marks=MATRIX)])
def test_postgresql_is_killed_and_started_again_while_a_job_runs(
    actor: str, frail: Servers, own_postgres: PrivatePostgres
) -> None:
    """One charge and one row: a transaction that was open is rolled back, and its job runs again."""
    with world(frail, "redis", "postgresql", lease=UNHURRIED) as here, here.working():
        message = _begun(here, actor)
        own_postgres.kill()
        own_postgres.start()
        here.open()
        here.wait_settled()
        _check(here, message, runs=None if actor in ("atomic", "inbox") else 1)
        assert (actor in ("atomic", "inbox")) == here.rows()["job"], here.story


@pytest.mark.parametrize("actor", ["atomic", "inbox"])
@MATRIX
def test_the_connection_of_a_transaction_is_ended_by_postgresql(actor: str, servers: Servers) -> None:
    """It is rolled back, and the job runs again: one row."""
    with world(servers, "redis", "postgresql", lease=UNHURRIED) as here, here.working():
        message = _begun(here, actor)
        with psycopg.connect(servers.postgres, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND "
                "pid <> pg_backend_pid()"
            )
        here.open()
        here.wait_settled()
        _check(here, message, runs=2)
        assert 1 == here.rows()["job"]
