"""What only the keys on Redis have: every kind of client, what is kept there and for how long, how it is set up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
import redis
import valkey as valkey_py

from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import BUSY, DONE, FRESH, HELD, Ended, Finish
from dramatiq_guard.testing.private_server import free_port
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.waiting import wait_until

LONG, DAY = 600_000, 24 * 60 * 60 * 1_000
EVERY_BYTE = bytes(range(256))


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[int, ...]]:
    """The ports of a cluster of two, each with half of the slots."""
    with ExitStack() as stack:
        ports: list[tuple[int, int]] = []
        for first, last in ((0, 8_191), (8_192, 16_383)):
            bus = free_port()
            server = stack.enter_context(PrivateValkey(extra=("--cluster-enabled", "yes", "--cluster-port", str(bus))))
            client = stack.enter_context(redis.Redis.from_url(server.url))
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
            if ports:
                client.execute_command("CLUSTER MEET", "127.0.0.1", ports[0][0], ports[0][1])
            ports.append((server.port, bus))
        for port, _ in ports:
            client = stack.enter_context(redis.Redis(port=port))
            wait_until(partial(_is_whole, client), timeout=30, describe="the two to know each other")
        yield tuple(port for port, _ in ports)


def _is_whole(client: redis.Redis) -> bool:
    info: Any = client.execute_command("CLUSTER INFO")
    text = info if isinstance(info, dict) else dict(line.split(":", 1) for line in info.decode().split())
    return (text["cluster_state"], text["cluster_known_nodes"], text["cluster_size"]) == ("ok", "2", "2")


def _clustered(request: pytest.FixtureRequest, **known: Any) -> Any:
    client = redis.RedisCluster(host="127.0.0.1", port=request.getfixturevalue("cluster")[0], **known)
    client.flushall(target_nodes="primaries")
    return client


CLIENTS: dict[str, Callable[[pytest.FixtureRequest], Any]] = {
    "redis": lambda request: redis.Redis.from_url(request.getfixturevalue("redis_url")),
    "decoding": lambda request: redis.Redis.from_url(request.getfixturevalue("redis_url"), decode_responses=True),
    "RESP2": lambda request: redis.Redis.from_url(request.getfixturevalue("redis_url"), protocol=2),
    "RESP3": lambda request: redis.Redis.from_url(request.getfixturevalue("redis_url"), protocol=3),
    "decoding RESP3": lambda request: redis.Redis.from_url(
        request.getfixturevalue("redis_url"), protocol=3, decode_responses=True
    ),
    "latin-1": lambda request: redis.Redis.from_url(request.getfixturevalue("redis_url"), encoding="latin-1"),
    "valkey": lambda request: valkey_py.Valkey.from_url(request.getfixturevalue("redis_url")),
    "decoding valkey": lambda request: valkey_py.Valkey.from_url(
        request.getfixturevalue("redis_url"), decode_responses=True
    ),
    "cluster": _clustered,
    "decoding cluster": lambda request: _clustered(request, decode_responses=True),
}


@pytest.mark.redis
@pytest.mark.parametrize("kind", CLIENTS)
def test_any_client_will_do(kind: str, request: pytest.FixtureRequest) -> None:
    """Also one that decodes what it gets, and one that looks for each key's server; bytes come back as they went."""
    client = CLIENTS[kind](request)
    store = connect(client, prefix="shop").idempotency
    keys = [f"order:{at}" for at in range(30)]
    fences = [store.claim(key, owner="☃", lease=LONG, retention=DAY, fingerprint=EVERY_BYTE).fence for key in keys]

    assert all(store.step(key, fence, "☃", EVERY_BYTE) for key, fence in zip(keys, fences, strict=True))
    assert (True,) * 30 == store.renew(list(zip(keys, fences, strict=True)), lease=LONG)
    clustered = hasattr(client, "get_primaries")
    for server in map(client.get_redis_connection, client.get_primaries()) if clustered else [client]:
        server.script_flush()
    assert (True,) * 30 == store.renew(list(zip(keys, fences, strict=True)), lease=LONG)
    assert BUSY == store.claim(keys[0], owner="x", lease=LONG, retention=DAY).answer
    assert store.release(keys[1], fences[1])
    assert {"☃": EVERY_BYTE} == store.claim(keys[1], owner="x", lease=LONG, retention=DAY).steps
    assert store.park(keys[2], fences[2])
    assert "parked" == store.resolve(keys[2], done=True, finish=Finish(EVERY_BYTE))
    assert Ended(DONE, ours=True) == store.complete(keys[0], fences[0], Finish(EVERY_BYTE), retention=DAY)
    assert EVERY_BYTE == store.claim(keys[0], owner="x", lease=LONG, retention=DAY).result
    assert Ended(DONE, ours=False, result=EVERY_BYTE) == store.complete(keys[0], 1, Finish(b"x"), retention=DAY)
    record = store.get(keys[3])
    assert record is not None
    assert (HELD, "☃", fences[3], EVERY_BYTE) == (record.state, record.owner, record.fence, record.fingerprint)

    found, page = [], store.page(prefix="order:", limit=5)
    while True:
        found += [each.key for each in page.records]
        if page.cursor is None:
            break
        page = store.page(prefix="order:", limit=5, cursor=page.cursor)
    assert sorted(keys) == sorted(found)

    store.mark("m", retention=DAY)
    assert store.marked("m")
    assert "☃" == store.reserve("n", "☃", ttl=DAY) == store.reserve("n", "x", ttl=DAY)
    assert store.unreserve("n", "☃")
    assert store.forget(keys[3])
    posture = store.posture()
    assert ("redis", 40, None, False) == (posture.engine, len(posture.server), posture.evicts, posture.durable)
    store.ping()
    client.close()


def test_what_is_kept_is_under_the_prefix_and_expires(redis_url: str, redis_client: redis.Redis) -> None:
    """One key each, in a slot of its own; the server removes it."""
    with closing(connect(redis_url, prefix="shop")) as stores:
        store = stores.idempotency
        fence = store.claim("order:1", owner="me", lease=LONG, retention=DAY).fence
        store.mark("m", retention=DAY)
        store.reserve("n", "me", ttl=DAY)
        assert {b"shop:key:order:1", b"shop:mark:m", b"shop:name:n"} == set(redis_client.keys())
        for write in (
            lambda: store.renew([("order:1", fence)], lease=LONG),
            lambda: store.step("order:1", fence, "s", b"v"),
            lambda: store.complete("order:1", fence, Finish(b"r"), retention=1),
        ):
            write()
            assert DAY < redis_client.pttl("shop:key:order:1") <= DAY + LONG
        for name in ("shop:mark:m", "shop:name:n"):
            assert 0 < redis_client.pttl(name) <= DAY


def test_a_step_that_is_recorded_again_takes_no_more_room(redis_url: str, redis_client: redis.Redis) -> None:
    """The old value is not kept."""
    with closing(connect(redis_url)) as stores:
        fence = stores.idempotency.claim("k", owner="me", lease=LONG, retention=DAY).fence
        sizes = set()
        for value in (b"one", b"two", b"six"):
            stores.idempotency.step("k", fence, "s", value)
            sizes.add(redis_client.strlen("dramatiq-guard:key:k"))

        assert 1 == len(sizes)


@pytest.mark.redis
def test_a_server_that_left_the_cluster_meanwhile(request: pytest.FixtureRequest) -> None:
    """A page goes on with the next one, from its beginning: a position means nothing on another server."""
    client = _clustered(request)
    store = connect(client).idempotency
    for at in range(20):
        store.claim(f"k{at}", owner="me", lease=LONG, retention=DAY)

    first, last = (store.page(limit=1_000, cursor=f"{node} 5") for node in ("0.0.0.0:1", "256.0.0.0:1"))

    assert {f"k{at}" for at in range(20)} == {each.key for each in first.records}
    assert (None, None, ()) == (first.cursor, last.cursor, last.records)
    client.close()


def test_two_prefixes_do_not_meet(redis_url: str) -> None:
    """Nor does one see the keys of another that begins alike."""
    with closing(connect(redis_url, prefix="shop")) as ours, closing(connect(redis_url, prefix="shop:key")) as theirs:
        for stores in (ours, theirs):
            assert FRESH == stores.idempotency.claim("k", owner="me", lease=LONG, retention=DAY).answer
        assert ["k"] == [each.key for each in theirs.idempotency.page().records]


@pytest.mark.parametrize("prefix", ["sh*p", "sh?p", "[shop]", "sh\\p"])
def test_a_prefix_is_taken_literally(redis_url: str, prefix: str) -> None:
    """No character of it stands for others."""
    with closing(connect(redis_url, prefix=prefix)) as ours, closing(connect(redis_url, prefix="shop")) as theirs:
        for stores, key in ((ours, "a"), (theirs, "b")):
            stores.idempotency.claim(key, owner="me", lease=LONG, retention=DAY)

        assert ["a"] == [each.key for each in ours.idempotency.page().records]


def test_keys_are_found_among_many_others(redis_url: str, redis_client: redis.Redis) -> None:
    """A page looks further where it found nothing, and says where to go on where it has looked enough."""
    with redis_client.pipeline(transaction=False) as pipeline:
        for at in range(30_000):
            pipeline.set(f"another:{at}", 1)
        pipeline.execute()
    with closing(connect(redis_url)) as stores:
        for key in ("a", "b"):
            stores.idempotency.claim(key, owner="me", lease=LONG, retention=DAY)
        found, cursor, pages = [], None, 0
        while pages == 0 or cursor is not None:
            page = stores.idempotency.page(limit=1, cursor=cursor)
            found += [each.key for each in page.records]
            cursor, pages = page.cursor, pages + 1

        assert ["a", "b"] == sorted(found)
        assert pages < 20


@pytest.mark.parametrize("cursor", ["k", "1 x", "-1", "1.5"])
def test_a_cursor_must_be_one(redis_url: str, cursor: str) -> None:
    """Anything else is a mistake."""
    with closing(connect(redis_url)) as stores, pytest.raises(ValueError, match="not a cursor"):
        stores.idempotency.page(cursor=cursor)


def test_fences_grow_though_the_clock_went_back(redis_url: str, redis_client: redis.Redis) -> None:
    """A server that took over may be behind: the record's own fence is the least that the next one exceeds."""
    ahead = 1 << 52
    with closing(connect(redis_url)) as stores:
        store = stores.idempotency
        store.complete("k", ahead, Finish(), retention=DAY)
        record = store.get("k")
        assert record is not None
        assert ahead == record.fence
        # Done by somebody else's clock; a person lets it run again by forgetting, which is not what happens here.
        redis_client.eval(
            "local r = cmsgpack.unpack(redis.call('GET', KEYS[1])) r[1] = 'f' "
            "redis.call('SET', KEYS[1], cmsgpack.pack(r))",
            1,
            "dramatiq-guard:key:k",
        )

        assert ahead + 1 == store.claim("k", owner="me", lease=LONG, retention=DAY).fence


# -- how the server is set up ----------------------------------------------------------------------------------------


def test_a_server_that_evicts_and_writes_nothing_down(own_valkey: PrivateValkey) -> None:
    """Both are seen, also where CONFIG is forbidden; which server it is, whatever the way to it."""
    with closing(connect(own_valkey.url)) as stores, redis.Redis.from_url(own_valkey.url) as client:
        before = stores.idempotency.posture()
        client.config_set("maxmemory-policy", "volatile-lru")
        client.config_set("appendonly", "no")
        after = stores.idempotency.posture()

        assert (None, True) == (before.evicts, before.durable)
        assert ("volatile-lru", False) == (after.evicts, after.durable)
        assert before.server == after.server == client.info("server")["run_id"]


def test_a_server_that_does_not_let_everybody_look(own_valkey: PrivateValkey) -> None:
    """What could not be read is not known; the store works."""
    with redis.Redis.from_url(own_valkey.url) as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~*", "+@all", "-info")
    url = own_valkey.url.replace("redis://", "redis://app:pw@")
    with closing(connect(url)) as stores:
        posture = stores.idempotency.posture()

        assert ("redis", "", None, None) == (posture.engine, posture.server, posture.evicts, posture.durable)
        assert posture.now > 0
        assert FRESH == stores.idempotency.claim("k", owner="me", lease=LONG, retention=DAY).answer


def test_a_record_takes_little_memory(redis_url: str, redis_client: redis.Redis) -> None:
    """Of a done one neither owner nor lease are kept; a hash would take twice as much for a result of 200 bytes."""
    sizes: dict[int, int] = {}
    with closing(connect(redis_url)) as stores:
        for size in (4, 40, 200, 2_048):
            key = f"{size:040}"
            claimed = stores.idempotency.claim(
                key, owner="host:1234:thread", lease=LONG, retention=DAY, fingerprint=bytes(range(16))
            )
            stores.idempotency.complete(key, claimed.fence, Finish(b"r" * size), retention=DAY)
            sizes[size] = redis_client.memory_usage(f"dramatiq-guard:key:{key}") or 0

    assert all(sizes[size] <= most for size, most in ((4, 200), (40, 260), (200, 470), (2_048, 2_710))), sizes
