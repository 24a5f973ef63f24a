"""What every store of deliveries does alike: of the copies of one message, one runs."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import psycopg
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dramatiq_guard.errors import StoreUnavailable
from dramatiq_guard.settle.forks import Deliveries
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.memory.deliveries import MemoryDeliveries
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.stores.protocols import DELIVERIES_KEPT, DeliveryStore
from dramatiq_guard.testing.private_server import free_port
from tests.support.proxy import FaultyProxy

from .letters import T0


def test_the_first_fork_that_asks_has_the_sequence(deliveries: DeliveryStore) -> None:
    """Its twin is turned away; it itself may come again, after a crash."""
    assert deliveries.claim("m", 1, "a", now=T0)
    assert not deliveries.claim("m", 1, "b", now=T0)
    assert deliveries.claim("m", 1, "a", now=T0 + 1)


def test_a_later_sequence_takes_the_record(deliveries: DeliveryStore) -> None:
    """A copy of a later settlement proves that those before it are stale."""
    assert deliveries.claim("m", 1, "a", now=T0)
    assert deliveries.claim("m", 2, "b", now=T0)

    assert not deliveries.claim("m", 1, "a", now=T0)
    assert not deliveries.claim("m", 2, "a", now=T0)


def test_an_advance_makes_what_came_before_it_stale(deliveries: DeliveryStore) -> None:
    """Even copies that nobody had claimed; and the next sequence is free for the first that asks."""
    deliveries.advance("m", 3, now=T0)

    assert not deliveries.claim("m", 2, "a", now=T0)
    assert deliveries.claim("m", 3, "b", now=T0)
    assert not deliveries.claim("m", 3, "c", now=T0)


def test_an_advance_to_where_the_record_stands_leaves_the_fork(deliveries: DeliveryStore) -> None:
    """The successor may have been claimed before its sender comes to note that it was sent."""
    assert deliveries.claim("m", 1, "a", now=T0)

    deliveries.advance("m", 1, now=T0)
    deliveries.advance("m", 0, now=T0)

    assert not deliveries.claim("m", 1, "b", now=T0)
    assert deliveries.claim("m", 1, "a", now=T0)


def test_an_empty_fork_is_a_fork(deliveries: DeliveryStore) -> None:
    """A message that was never published by the stack has no mark, and is told from its marked copies."""
    assert deliveries.claim("m", 0, "", now=T0)
    assert not deliveries.claim("m", 0, "a", now=T0)
    assert deliveries.claim("m", 0, "", now=T0)


def test_messages_do_not_meet(deliveries: DeliveryStore) -> None:
    """Each has its own record, whatever its id is made of."""
    ids = ["m", "m:1", "{m}", "a}b{c", "Ünïcode ☃", "nul\0", "half\ud800", "x" * 5_000, ""]
    for message_id in ids:
        assert deliveries.claim(message_id, 1, f"fork of {message_id}", now=T0)
    for message_id in ids:
        assert not deliveries.claim(message_id, 1, "another", now=T0)
        assert deliveries.claim(message_id, 1, f"fork of {message_id}", now=T0)


def test_a_record_is_kept_longer_than_the_longest_delay(deliveries: DeliveryStore) -> None:
    """Dramatiq delays by 7 days at most; after 8 without a write the message is unheard of again."""
    day = 24 * 60 * 60 * 1000
    assert deliveries.claim("m", 1, "a", now=T0)
    assert not deliveries.claim("m", 1, "b", now=T0 + 7 * day)
    assert deliveries.claim("m", 1, "a", now=T0 + 7 * day)
    assert not deliveries.claim("m", 1, "b", now=T0 + 14 * day), "each write counts anew"
    assert deliveries.claim("m", 0, "b", now=T0 + 15 * day)

    deliveries.advance("m", 5, now=T0 + 15 * day)
    deliveries.advance("m", 2, now=T0 + 23 * day)

    assert deliveries.claim("m", 2, "c", now=T0 + 23 * day)


def test_a_purge_removes_what_is_over_and_nothing_else(deliveries: DeliveryStore) -> None:
    """So many at a time; a server that lets them expire has none to remove."""
    for at in range(5):
        assert deliveries.claim(f"m{at}", 1, "a", now=T0 + at)
    now = T0 + 3 + DELIVERIES_KEPT

    removed = [deliveries.purge(now=now, limit=3) for _ in range(3)]

    assert removed in ([3, 1, 0], [0, 0, 0])
    assert not deliveries.claim("m4", 1, "b", now=now)


def test_of_fifty_forks_at_once_one_wins(deliveries: DeliveryStore) -> None:
    """However close they come, and each time they ask again it is the same one."""
    start = threading.Barrier(50)
    lock = threading.Lock()
    won: list[str] = []

    def race(fork: str) -> None:
        start.wait()
        answers = {deliveries.claim("m", 7, fork, now=T0) for _ in range(3)}
        with lock:
            won.extend([fork] * answers.pop() if len(answers) == 1 else ["changed its mind"])

    threads = [threading.Thread(target=race, args=(f"fork-{at}",)) for at in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 1 == len(won), won
    assert deliveries.claim("m", 7, won[0], now=T0)


calls = st.lists(
    st.tuples(
        st.sampled_from(["claim", "claim", "advance", "purge"]),
        st.sampled_from(["m", "n"]),
        st.integers(0, 4),
        st.sampled_from(["", "a", "b"]),
        # The clocks of two workers may differ, and records may be over.
        st.sampled_from([0, 1, 5, -3, DELIVERIES_KEPT - 1, DELIVERIES_KEPT]),
    ),
    max_size=25,
)


def test_every_store_answers_as_the_model_does(deliveries: DeliveryStore) -> None:
    """Whatever is asked in whatever order, the answers are those of the plain model in memory."""
    runs = iter(range(10_000))

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(calls)
    def same(steps: list[tuple[str, str, int, str, int]]) -> None:
        model, run, now = MemoryDeliveries(), next(runs), T0
        for verb, name, sequence, fork, passed in steps:
            now += passed
            if verb == "claim":
                ours = model.claim(name, sequence, fork, now=now)
                assert ours == deliveries.claim(f"{run}-{name}", sequence, fork, now=now)
            elif verb == "advance":
                model.advance(name, sequence, now=now)
                deliveries.advance(f"{run}-{name}", sequence, now=now)
            else:
                deliveries.purge(now=now - 100)

    same()


# -- What only servers have ------------------------------------------------------------------------------------------


def test_redis_forgets_by_itself(redis_url: str, redis_client: redis.Redis) -> None:
    """Every write gives the one key of a message 8 days to live, in a slot of its own."""
    with closing(connect(redis_url, prefix="shop")) as stores:
        for write in (
            lambda: stores.deliveries.claim("m", 1, "a", now=T0),
            lambda: stores.deliveries.claim("m", 1, "a", now=T0),
            lambda: stores.deliveries.advance("m", 2, now=T0),
            lambda: stores.deliveries.advance("m", 2, now=T0),
        ):
            redis_client.persist("shop:delivery:{m}")
            write()
            assert [b"shop:delivery:{m}"] == redis_client.keys()
            assert DELIVERIES_KEPT - 60_000 < redis_client.pttl("shop:delivery:{m}") <= DELIVERIES_KEPT


@pytest.mark.parametrize("verb", ["claim", "advance"])
def test_one_round_trip_each(redis_url: str, verb: str) -> None:
    """Once the server knows the script, a call is one request and one reply."""
    with FaultyProxy(redis_url) as proxy, closing(connect(proxy.url)) as stores:

        def call() -> Any:
            if verb == "claim":
                return stores.deliveries.claim("m", 1, "a", now=T0)
            return stores.deliveries.advance("m", 1, now=T0)

        call()
        before = proxy.turns
        call()

        assert 1 == proxy.turns - before


def test_a_purge_passes_over_what_is_being_written(postgres_url: str) -> None:
    """Two purges at once, or a claim that comes between, wait for nobody."""
    apply_schema(postgres_url)
    with closing(connect(postgres_url)) as stores:
        assert stores.deliveries.claim("m", 1, "a", now=T0)
        with psycopg.connect(postgres_url) as other:
            other.execute("SELECT FROM dramatiq_guard.deliveries FOR UPDATE")

            assert 0 == stores.deliveries.purge(now=T0 + DELIVERIES_KEPT)

        assert 1 == stores.deliveries.purge(now=T0 + DELIVERIES_KEPT)


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
def test_a_server_that_is_not_there(scheme: str) -> None:
    """Is said to be unavailable, so that whoever asked can go on without."""
    with closing(connect(f"{scheme}://127.0.0.1:{free_port()}/0")) as stores:
        with pytest.raises(StoreUnavailable):
            stores.deliveries.claim("m", 1, "a", now=T0)
        with pytest.raises(StoreUnavailable):
            stores.deliveries.ping()


def test_the_stack_can_use_it(deliveries: DeliveryStore) -> None:
    """It is what `JitterBackoff(deliveries=…)` asks for."""
    used: Deliveries = deliveries

    assert isinstance(used, DeliveryStore)
    deliveries.ping()
