"""``breaker``: which downstreams are held back, and overruling a breaker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dramatiq_guard.policy.breaker import Mode, State, Tally
from dramatiq_guard.stores.connect import connect


@pytest.fixture
def breakers(redis_url):
    """The breakers of an empty server."""
    stores = connect(redis_url)
    yield stores.breakers
    stores.close()


def put(breakers, name, **known):
    """Have a record of a downstream."""
    breakers.update(name, lambda state, now: (replace(state, at=now, **known), None))


def test_a_server_that_knows_none_says_so(call, redis_url):
    """In a sentence; in JSON by an empty list."""
    assert "No downstream is known here" in call("breaker", "list", "--store", redis_url).out
    assert call("breaker", "list", "--store", redis_url, "--json").document == []


def test_each_downstream_is_listed_with_what_its_breaker_does(call, redis_url, breakers):
    """The rate is that of a recovery; what was learned is what it did when it was well."""
    put(breakers, "courier", mode=Mode.RECOVERING, since=1_700_000_000_000, rate=12.0, restart=20.0)
    put(breakers, "payments", learned=Tally(30.0, 0.0, 1_000.0))

    assert call("breaker", "list", "--store", redis_url, "--json").document == [
        {
            "downstream": "courier",
            "state": "recovering",
            "since": "2023-11-14T22:13:20+00:00",
            "rate": 12.0,
            "learned": 20.0,
        },
        {"downstream": "payments", "state": "closed", "since": None, "rate": None, "learned": 30.0},
    ]
    table = call("breaker", "list", "--store", redis_url).out
    assert "recovering" in table
    assert "12.0/s" in table


def test_a_downstream_is_paused_and_let_go(call, redis_url, breakers):
    """Paced, as after an outage; also one that nobody has reported of yet may be paused."""
    said = call("breaker", "open", "payments", "--store", redis_url)
    assert (said.code, breakers.read("payments").mode) == (0, Mode.FORCED_OPEN)
    assert "dramatiq-guard breaker close payments" in said.out

    assert call("breaker", "close", "payments", "--store", redis_url).code == 0
    assert breakers.read("payments").mode is Mode.RECOVERING


def test_it_may_be_let_go_at_once(call, redis_url, breakers):
    """For a downstream that bears it."""
    put(breakers, "payments", mode=Mode.OPEN, since=1)

    assert call("breaker", "close", "payments", "--at-once", "--store", redis_url).code == 0
    assert breakers.read("payments").mode is Mode.CLOSED


def test_a_name_that_is_not_known_is_not_closed(call, redis_url, breakers):
    """A slip of the finger: those that there are are named."""
    put(breakers, "payments")

    said = call("breaker", "close", "payment", "--store", redis_url)

    assert said.code == 1
    assert "No downstream 'payment' is known here; there are: 'payments'" in said.err
    assert breakers.names() == ("payments",)
    assert breakers.read("payments") != State()


def test_without_a_store_it_says_how_to_name_one(call, monkeypatch):
    """By a URL, the environment, or a broker."""
    monkeypatch.delenv("DRAMATIQ_GUARD_STORE", raising=False)
    said = call("breaker", "list")

    assert said.code == 2
    assert "--store redis://… or postgresql://…" in said.err
