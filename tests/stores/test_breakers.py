"""Shared breakers, the same on every store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from dramatiq_guard.errors import StoreError, StoreUnavailable
from dramatiq_guard.policy.breaker import Limits, Mode, Report, State, Tally
from dramatiq_guard.stores.breaker import BreakerRecords, Breakers, Found, decode, encode
from dramatiq_guard.stores.memory.breaker import MemoryBreakers
from dramatiq_guard.stores.redis.breaker import RedisBreakers
from dramatiq_guard.stores.redis.connection import RedisConnection

FAILING = Report(bad=6, span=50)


@pytest.fixture(params=["memory", "redis"])
def records(request: pytest.FixtureRequest) -> Iterator[BreakerRecords]:
    """The records of each kind of store, none yet."""
    if request.param == "memory":
        yield MemoryBreakers()
        return
    with closing(RedisConnection(request.getfixturevalue("redis_url"))) as connection:
        yield RedisBreakers(connection)


def test_a_key_that_nobody_has_named_has_no_record(records: BreakerRecords) -> None:
    """Its breaker is closed."""
    found = records.read("payments")
    assert (found.version, found.record) == (0, None)
    assert found.now > 1_600_000_000_000
    assert Breakers(records).exchange("payments", Report()).mode is Mode.CLOSED


def test_a_record_is_written_only_over_the_version_that_was_read(records: BreakerRecords) -> None:
    """Who comes second reads again."""
    assert records.write("payments", 0, "first")
    assert not records.write("payments", 0, "second")
    assert records.write("payments", 1, "third")
    found = records.read("payments")
    assert (found.version, found.record) == (2, "third")


def test_processes_share_what_one_of_them_met(records: BreakerRecords) -> None:
    """The failures of one open the breaker for all, and of another key for nobody."""
    one, other = Breakers(records), Breakers(records)
    assert one.exchange("payments", FAILING).mode is Mode.OPEN
    assert other.exchange("payments", Report()).mode is Mode.OPEN
    assert other.exchange("mail: ü {x}", Report()).mode is Mode.CLOSED
    assert set(one.states()) == {"payments", "mail: ü {x}"}
    assert one.states()["payments"].mode is Mode.OPEN


def test_nothing_is_lost_where_many_report_at_once(records: BreakerRecords) -> None:
    """Each report is counted once, whoever was first."""
    breakers = Breakers(records, Limits(failure_ratio=2.0, memory=10**9))
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(breakers.exchange, "payments", Report(ok=1, span=1)) for _ in range(100)]:
            future.result()
    assert breakers.states()["payments"].learned.ok == pytest.approx(100, abs=0.01)


def test_an_operators_word_is_kept(records: BreakerRecords) -> None:
    """A pause holds for every process until it is taken back."""
    breakers = Breakers(records)
    assert breakers.force("payments", Mode.FORCED_OPEN).mode is Mode.FORCED_OPEN
    assert breakers.exchange("payments", Report(ok=5, wants=3, span=9)).tokens == 0
    assert breakers.force("payments", Mode.CLOSED).mode is Mode.CLOSED


def test_a_state_survives_being_kept() -> None:
    """Every part of it."""
    state = State(mode=Mode.RECOVERING, rate=12.5, learned=Tally(1.0, 2.0, 3.0), streak=4, line_until=9)
    assert decode("payments", encode(state)) == state


def test_a_record_of_an_older_release_is_completed() -> None:
    """What it does not know is as in a new state."""
    assert decode("payments", '{"form":1,"mode":"open","rate":3.0,"gone":1}') == State(mode=Mode.OPEN, rate=3.0)


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"form":99,"mode":"open"}', '{"form":1,"mode":"ajar"}'])
def test_a_record_that_cannot_be_read_is_named(record: str) -> None:
    """An error says which, and what to do."""
    with pytest.raises(StoreError, match="'payments' cannot be read"):
        decode("payments", record)


def test_endless_contention_is_an_outage() -> None:
    """No thread tries for ever."""

    class Contended(MemoryBreakers):
        def write(self, key: str, version: int, record: str) -> bool:
            return False

        def read(self, key: str) -> Found:
            return Found(7, json.dumps({"form": 1, "mode": "closed"}), 1)

    with pytest.raises(StoreUnavailable, match="changed by others"):
        Breakers(Contended()).exchange("payments", Report())
