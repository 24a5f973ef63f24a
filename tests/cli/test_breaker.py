"""``breaker``: which downstreams are held back, and overruling a breaker."""

from __future__ import annotations

import shlex
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


def test_of_many_names_some_are_named(call, redis_url, breakers):
    """A function of the message may make thousands."""
    for at in range(23):
        put(breakers, f"shard-{at:02}")

    said = call("breaker", "close", "shard", "--store", redis_url)

    assert said.err.rstrip().endswith("'shard-18', 'shard-19' and 3 more.")


def test_letting_go_what_is_closed_throttles_nothing(call, redis_url, breakers):
    """It stays closed, and that is said."""
    put(breakers, "payments", learned=Tally(30.0, 0.0, 1_000.0))

    said = call("breaker", "close", "payments", "--store", redis_url)

    assert (said.code, breakers.read("payments").mode) == (0, Mode.CLOSED)
    assert "its messages go already" in said.out


@pytest.mark.parametrize("mode", [Mode.OPEN, Mode.RECOVERING])
def test_letting_go_ends_a_retry_after(call, redis_url, breakers, mode):
    """An operator knows better than what the downstream said an hour ago."""
    put(breakers, "payments", mode=mode, since=1, rate=5.0, floor=2**52)

    assert call("breaker", "close", "payments", "--store", redis_url).code == 0
    assert (breakers.read("payments").mode, breakers.read("payments").floor) == (Mode.RECOVERING, 0)


def test_pausing_what_nobody_knows_asks_whether_that_is_its_name(call, redis_url, breakers):
    """It may be a slip of the finger, or a downstream that no worker has met yet; it is paused."""
    said = call("breaker", "open", "payment", "--store", redis_url)
    assert (said.code, breakers.read("payment").mode) == (0, Mode.FORCED_OPEN)
    assert "No worker has reported of payment yet" in said.err

    assert call("breaker", "open", "payment", "--store", redis_url).err == ""
    assert call("breaker", "open", "", "--store", redis_url).code == 2


@pytest.mark.parametrize("name", ["[/bold]", "[red]a", "a\nb", "x\x1b[31m", "it's $HOME"])
def test_odd_names_are_printed_as_they_are(call, redis_url, breakers, name):
    """They are neither markup nor words to the terminal, and the command that is named works."""
    put(breakers, name, mode=Mode.OPEN, since=1)
    shown = name if name.isprintable() else repr(name)[1:-1]

    assert shown in call("breaker", "list", "--store", redis_url).out
    assert call("breaker", "list", "--store", redis_url, "--json").document[0]["downstream"] == name
    out = call("breaker", "open", name, "--store", redis_url).out
    assert shown in out
    assert "\x1b" not in out
    assert shlex.split(out.split("by: ")[1])[-1] == shown


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("redis://127.0.0.1:1", 1, "is the server up"),
        ("postgresql://127.0.0.1:1/x", 1, "is the server up"),
        ("http://localhost", 2, "the scheme 'http' is unknown"),
        ("", 2, "not a URL of a store"),
    ],
)
@pytest.mark.parametrize("verb", [["list", "--json"], ["open", "payments"], ["close", "payments"]])
def test_a_store_that_is_not_there_is_named(call, verb, url, code, said):
    """On standard error, with nothing on standard output, and without a traceback."""
    ended = call("breaker", *verb, "--store", url)

    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err


def test_tables_that_are_not_there_are_named(call, postgres_url):
    """With what makes them."""
    ended = call("breaker", "list", "--store", postgres_url)

    assert (ended.code, ended.out) == (2, "")
    assert "schema apply" in ended.err


def test_without_a_store_it_says_how_to_name_one(call, monkeypatch):
    """By a URL, the environment, or a broker."""
    monkeypatch.delenv("DRAMATIQ_GUARD_STORE", raising=False)
    said = call("breaker", "list")

    assert said.code == 2
    assert "--store redis://… or postgresql://…" in said.err
