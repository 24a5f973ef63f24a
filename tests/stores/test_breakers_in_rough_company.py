"""Breakers beside what nobody planned: odd names, foreign records, a crowd, and a server that dies in the middle."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest
import redis

from dramatiq_guard.errors import StoreError, StoreUnavailable
from dramatiq_guard.policy.breaker import Limits, Mode, Report, State, Tally, force, step
from dramatiq_guard.stores.breakers import BreakerStore, decoded, encoded, kept_name
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.proxy import FaultyProxy

KEY = "dramatiq-guard:breaker:payments"


def paused(state: State, now: int) -> tuple[State, None]:
    """An operator's word."""
    return force(state, Mode.FORCED_OPEN, now), None


def count(state: State, now: int) -> tuple[State, int]:
    """One more, and how many there are."""
    return replace(state, streak=state.streak + 1), state.streak + 1


# -- names -----------------------------------------------------------------------------------------------------------

ODD = ["a\nb", "[/bold]", "a:b:c", "x\x1b[31m", "\0", "\ud800", "ü" * 400, "*", "\\", " ", "x" * 10_000_000]


@pytest.mark.parametrize("name", ODD, ids=lambda name: f"{len(name)} × {name[:1]!r}")
def test_a_downstream_may_be_called_anything(breakers: BreakerStore, name: str) -> None:
    """A function of the message gives its name, so it may hold anything, at any length; it is listed and found."""
    breakers.update(name, paused)

    assert breakers.names() == (kept_name(name),)
    assert all((known := breakers.read(each)) and known.mode is Mode.FORCED_OPEN for each in (name, *breakers.names()))
    assert breakers.forget(breakers.names()[0])
    assert breakers.read(name) is None


def test_long_names_are_told_apart_by_their_ends() -> None:
    """And those that a store takes as they are stay so."""
    one, other = ("x" * 1_000 + end for end in "ab")

    assert kept_name(one) != kept_name(other)
    assert len(kept_name(one)) == 500
    assert kept_name(kept_name(one)) == kept_name(one)
    assert kept_name("x" * 500) == "x" * 500


def test_what_all_keys_begin_with_may_hold_anything(redis_url: str) -> None:
    """Also what means something in a pattern."""
    stores = connect(redis_url, prefix="app[1]*\\?")
    stores.breakers.update("payments", paused)

    assert stores.breakers.names() == ("payments",)
    stores.close()


def test_a_downstream_that_a_scan_comes_upon_twice_is_listed_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Redis may while its table of keys grows."""
    stores = connect(redis_url)
    stores.breakers.update("payments", paused)
    scan = redis.Redis.scan_iter
    monkeypatch.setattr(redis.Redis, "scan_iter", lambda *given, **more: [*scan(*given, **more)] * 2)

    assert stores.breakers.names() == ("payments",)
    stores.close()


def test_old_downstreams_are_removed_from_postgres(postgres_url: str) -> None:
    """Those that nobody has reported to for a month, when others come: there may be as many as there are messages."""
    apply_schema(postgres_url)
    stores = connect(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute(
            "INSERT INTO dramatiq_guard.breakers SELECT 'old-' || n, '{}', now() - interval '31 days'"
            " FROM generate_series(1, 500) n"
        )
        stores.breakers.update("payments", paused)
        left = server.execute("SELECT name FROM dramatiq_guard.breakers").fetchall()

    assert left == [("payments",)]
    stores.close()


# -- records ---------------------------------------------------------------------------------------------------------

RUBBISH = [b"\xff\xfe\x00", b"", b"{}", b"[" * 100_000, b"\x80" * 10]


@pytest.mark.parametrize("rubbish", RUBBISH, ids=lambda rubbish: repr(rubbish[:4]))
def test_foreign_bytes_are_written_over(redis_url: str, redis_client: redis.Redis, rubbish: bytes) -> None:
    """They are nothing known, and not in the way for ever."""
    stores = connect(redis_url)
    redis_client.set(KEY, rubbish)
    assert stores.breakers.read("payments") == State()

    stores.breakers.update("payments", paused)

    assert stores.breakers.read("payments").mode is Mode.FORCED_OPEN  # type: ignore[union-attr]
    stores.close()


def test_a_key_of_another_kind_is_left_alone(redis_url: str, redis_client: redis.Redis) -> None:
    """It is somebody's; the error names what is wrong."""
    stores = connect(redis_url)
    redis_client.rpush(KEY, "theirs")

    with pytest.raises(StoreError, match="WRONGTYPE"):
        stores.breakers.update("payments", paused)
    assert redis_client.lrange(KEY, 0, -1) == [b"theirs"]
    stores.close()


UNSOUND: list[dict[str, object]] = [
    {"mode": "recovering"},
    {"mode": "recovering", "rate": 0},
    {"mode": "recovering", "rate": -4},
    {"mode": "recovering", "rate": float("nan")},
    {"mode": "open", "at": float("inf")},
    {"mode": "open", "at": 10**30},
    {"mode": "closed", "recent": [1, -1, 0]},
    {"mode": "closed", "learned": [1, float("inf"), 0]},
    {"mode": "closed", "present": [float("nan"), 0, 0]},
]


@pytest.mark.parametrize("record", UNSOUND, ids=json.dumps)
def test_a_record_that_cannot_be_reckoned_with_counts_as_nothing_known(record: dict[str, object]) -> None:
    """Whatever wrote it: a policy that failed over it would let everything go for as long as it is there."""
    state = decoded(json.dumps({"v": 1, **record}))

    assert state == State()
    for now in (1_700_000_000_000, 1_700_000_000_001):
        state, _ = step(Limits(), state, Report(state.mode, state.since, ok=1, wants=3, span=200), now)


def test_the_word_of_an_operator_outlives_an_unsound_record() -> None:
    """That somebody paused the downstream is understood, whatever else is there."""
    assert decoded('{"v":1,"mode":"forced_open","at":1e400}').mode is Mode.FORCED_OPEN
    assert decoded('{"v":1,"mode":"forced_open","learned":[1]}').mode is Mode.FORCED_OPEN


def test_all_that_the_policy_writes_is_sound() -> None:
    """An outage with everything in it reads as it was written, at every step."""
    state, modes = State(), set()
    for at in range(600):
        bad = 8 if 50 < at < 150 or at % 97 == 0 else 0
        report = Report(state.mode, state.since, ok=0 if bad else 5, bad=bad, span=200, wants=at % 40, put_off=at % 3)
        state, _ = step(Limits(), state, report, 1_700_000_000_000 + 200 * at)
        modes.add(state.mode)
        assert decoded(encoded(state)) == state
    assert modes == {Mode.CLOSED, Mode.OPEN, Mode.RECOVERING}


# -- a crowd ---------------------------------------------------------------------------------------------------------


def test_a_crowd_that_meets_an_outage_at_once_is_served(redis_url: str) -> None:
    """None of a hundred processes is told that the store is out, only because the others were faster."""
    crowd = 100
    members = [connect(redis_url) for _ in range(crowd)]
    ready = threading.Barrier(crowd)

    def work(at: int) -> None:
        ready.wait(30)
        for _ in range(3):
            members[at].breakers.update("payments", count)

    with ThreadPoolExecutor(crowd) as pool:
        list(pool.map(work, range(crowd)))
    known = members[0].breakers.read("payments")
    assert known is not None
    assert known.streak == 3 * crowd
    for each in members:
        each.close()


# -- a server that dies in the middle ---------------------------------------------------------------------------------


def test_a_reply_that_is_lost_is_an_outage_and_the_change_is_made_once(redis_url: str) -> None:
    """Whoever was not told whether it was written says so, and repeats nothing by itself."""
    with FaultyProxy(redis_url) as proxy, closing(connect(proxy.url)) as through, closing(connect(redis_url)) as direct:
        through.breakers.update("payments", count)
        asked: list[int] = []

        def lost(state: State, now: int) -> tuple[State, int]:
            asked.append(state.streak)
            proxy.lose_reply()
            return count(state, now)

        with pytest.raises(StoreUnavailable):
            through.breakers.update("payments", lost)
        assert asked == [1]
        assert direct.breakers.read("payments").streak == 2  # type: ignore[union-attr]
        assert through.breakers.update("payments", count) == 3


def test_a_server_that_is_killed_between_reading_and_writing_is_an_outage(own_valkey: PrivateValkey) -> None:
    """And what it knew is there when it is back."""
    stores = connect(own_valkey.url)
    stores.breakers.update("payments", lambda state, _: (replace(state, learned=Tally(9, 0, 9)), None))

    def killed(state: State, now: int) -> tuple[State, int]:
        own_valkey.kill()
        return count(state, now)

    with pytest.raises(StoreUnavailable):
        stores.breakers.update("payments", killed)
    own_valkey.start()
    assert stores.breakers.update("payments", lambda state, now: (state, state.learned)) == Tally(9, 0, 9)
    stores.close()
