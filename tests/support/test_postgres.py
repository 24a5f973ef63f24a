"""The private PostgreSQL boots whoever we are, and keeps its port and its data over a crash."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.support.postgres import PrivatePostgres


def test_committed_rows_survive_a_crash_on_the_same_port(own_postgres: PrivatePostgres) -> None:
    """After SIGKILL and a start the same URL gives the same rows."""
    own_postgres.sql("CREATE TABLE kept AS SELECT 7 AS n")
    url = own_postgres.url
    own_postgres.restart(signal.SIGKILL)

    assert url == own_postgres.url
    assert [(7,)] == own_postgres.sql("SELECT n FROM kept")


def test_it_starts_again_at_once_with_sessions_open(own_postgres: PrivatePostgres) -> None:
    """What a killed server's children still hold is waited for: ten times in a row."""
    sessions = []
    for _ in range(10):
        session = psycopg.connect(own_postgres.url, autocommit=True)
        sessions.append(session)  # open while its server is killed
        session.execute("SELECT 7")
        own_postgres.restart(signal.SIGKILL)

    assert [(7,)] == own_postgres.sql("SELECT 7")
    for session in sessions:
        session.close()


def test_a_frozen_server_answers_nobody_until_thawed(own_postgres: PrivatePostgres) -> None:
    """`pause` freezes open sessions too, and `resume` lets their answer come."""
    with psycopg.connect(own_postgres.url) as session, ThreadPoolExecutor(1) as elsewhere:
        own_postgres.pause()
        answer = elsewhere.submit(lambda: session.execute("SELECT 7").fetchone())
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(own_postgres.url, connect_timeout=2)
        assert not answer.done()

        own_postgres.resume()
        assert (7,) == answer.result(10)


def test_each_test_gets_an_empty_database(postgres: PrivatePostgres, postgres_url: str) -> None:
    """The URL of the fixture is a database without tables."""
    database = postgres_url.rpartition("/")[2]

    assert [] == postgres.sql("SELECT 1 FROM pg_tables WHERE schemaname = 'public'", database)
