"""``schema``: the tables on PostgreSQL."""

from __future__ import annotations

import uuid

import pytest

from tests.support.postgres import PrivatePostgres


@pytest.fixture
def name():
    """A schema that nobody else uses."""
    return f"guard_{uuid.uuid4().hex[:12]}"


def test_applying_makes_the_tables_and_may_be_repeated(call, postgres: PrivatePostgres, name):
    """Status says what is missing with exit code 1, apply makes it, and a second time there is nothing to do."""
    before = call("schema", "status", postgres.url, "--schema", name)
    assert before.code == 1
    assert f"{name} lacks 001_dead_letters" in before.out

    first = call("schema", "apply", postgres.url, "--schema", name)
    assert (first.code, "001_dead_letters done" in first.out) == (0, True)
    second = call("schema", "apply", postgres.url, "--schema", name, "--json")
    assert (second.code, second.document["done"]) == (0, [])

    after = call("schema", "status", postgres.url, "--schema", name, "--json")
    assert (after.code, after.document["ready"]) == (0, True)


def test_letters_can_be_listed_from_the_tables(call, postgres: PrivatePostgres, name):
    """A store without its tables says how to make them; with them, it is empty."""
    without = call("dead", "list", "--store", postgres.url, "--schema", name)
    assert without.code == 2
    assert "dramatiq-guard schema apply" in without.err

    call("schema", "apply", postgres.url, "--schema", name)
    assert "No such letters" in call("dead", "list", "--store", postgres.url, "--schema", name).out


def test_only_postgresql_has_a_schema(call):
    """Redis needs no tables; the error says what to write."""
    outcome = call("schema", "apply", "redis://localhost")

    assert outcome.code == 2
    assert "only PostgreSQL has a schema" in outcome.err


def test_a_server_that_is_down_is_a_failure(call):
    """Exit code 1, and the sentence says which server."""
    outcome = call("schema", "status", "postgresql://nobody@127.0.0.1:1/app")

    assert outcome.code == 1
    assert "Is the server up" in outcome.err
