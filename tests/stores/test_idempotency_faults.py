"""What the idempotency stores say when their server forgot, is gone or cannot write, and what a call costs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from dramatiq_guard.errors import StoreError, StoreUnavailable
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import BUSY, DONE, FRESH, Claim, Ended, Finish, IdempotencyStore
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.testing.private_server import free_port
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until

LONG, DAY = 600_000, 24 * 60 * 60 * 1_000


def claim(store: IdempotencyStore, key: str = "k", **known: Any) -> Claim:
    return store.claim(key, **{"owner": "me", "lease": LONG, "retention": DAY, **known})


EVERY_CALL: dict[str, Callable[[IdempotencyStore], object]] = {
    "claim": claim,
    "complete": lambda store: store.complete("k", 1, Finish(b"r"), retention=DAY),
    "renew": lambda store: store.renew([("k", 1)], lease=LONG),
    "step": lambda store: store.step("k", 1, "s", b"v"),
    "release": lambda store: store.release("k", 1),
    "park": lambda store: store.park("k", 1),
    "resolve": lambda store: store.resolve("k", done=True),
    "forget": lambda store: store.forget("k"),
    "get": lambda store: store.get("k"),
    "page": lambda store: store.page(),
    "mark": lambda store: store.mark("n", retention=DAY),
    "marked": lambda store: store.marked("n"),
    "reserve": lambda store: store.reserve("n", "me", ttl=DAY),
    "unreserve": lambda store: store.unreserve("n", "me"),
    "posture": lambda store: store.posture(),
    "ping": lambda store: store.ping(),
}


@pytest.fixture(params=["redis", "postgres"])
def proxied(request: pytest.FixtureRequest) -> Iterator[tuple[FaultyProxy, IdempotencyStore]]:
    """A store on a server of each kind, through a proxy, with its connection made."""
    url = request.getfixturevalue(f"{request.param}_url")
    if request.param == "postgres":
        apply_schema(url)
    with FaultyProxy(url) as proxy, closing(connect(proxy.url)) as stores:
        warm = claim(stores.idempotency, "warm")
        stores.idempotency.complete("warm", warm.fence, Finish(b"r"), retention=DAY)
        stores.idempotency.renew([("warm", warm.fence)], lease=LONG)
        stores.idempotency.step("warm", warm.fence, "s", b"v")
        yield proxy, stores.idempotency


# -- what a call costs -----------------------------------------------------------------------------------------------


def test_round_trips(proxied: tuple[FaultyProxy, IdempotencyStore]) -> None:
    """Work that is done once costs two; a duplicate, one who comes too early, a step and a release cost one."""
    proxy, store = proxied

    def cost(call: Callable[[], object]) -> int:
        before = proxy.turns
        call()
        return proxy.turns - before

    claimed: list[Claim] = []
    assert 1 == cost(lambda: claimed.append(claim(store)))
    assert 1 == cost(lambda: claim(store, owner="you")), "busy"
    assert 1 == cost(lambda: store.step("k", claimed[0].fence, "s", b"v"))
    assert 1 == cost(lambda: store.complete("k", claimed[0].fence, Finish(b"r"), retention=DAY))
    assert 1 == cost(lambda: claim(store)), "done"
    assert 0 == cost(lambda: store.renew([], lease=LONG))


def test_a_hundred_leases_are_renewed_in_one_round_trip(redis_url: str) -> None:
    """The server has all of them before its first answer is read."""
    with FaultyProxy(redis_url) as proxy, closing(connect(proxy.url)) as stores:
        held = [(f"k{at:02}", claim(stores.idempotency, f"k{at:02}").fence) for at in range(100)]
        stores.idempotency.renew(held, lease=LONG)
        proxy.forget()
        stores.idempotency.renew(held, lease=LONG)
        size = sum(each.bytes_up for each in proxy.conversations)
        proxy.forget()
        answers: list[tuple[bool, ...]] = []
        proxy.blackhole(replies_only=True)

        thread = threading.Thread(target=lambda: answers.append(stores.idempotency.renew(held, lease=LONG)))
        thread.start()
        try:
            wait_until(
                lambda: sum(each.bytes_up for each in proxy.conversations) == size, describe="all to have been sent"
            )
        finally:
            proxy.heal()
            thread.join()

        assert [(True,) * 100] == answers
        assert 1 == proxy.turns


# -- servers that forget ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", EVERY_CALL)
def test_a_server_that_forgot_its_scripts_is_told_again(redis_url: str, redis_client: redis.Redis, verb: str) -> None:
    """After a restart or a failover no script is known there, and nobody notices."""
    with closing(connect(redis_url)) as stores:
        claim(stores.idempotency, "another")
        redis_client.script_flush()

        EVERY_CALL[verb](stores.idempotency)


def test_a_server_that_forgot_its_scripts_renews_every_lease(redis_url: str, redis_client: redis.Redis) -> None:
    """Each claim is renewed once, and answered in the order asked."""
    with closing(connect(redis_url)) as stores:
        store = stores.idempotency
        held = [(f"k{at}", claim(store, f"k{at}", lease=10_000).fence) for at in range(20)]
        store.release(*held[3])
        redis_client.script_flush()

        assert [at != 3 for at in range(20)] == list(store.renew(held, lease=LONG))

        for at, (key, _) in enumerate(held):
            record = store.get(key)
            assert record is not None
            assert at == 3 or record.lease_until > record.first_claim_at + 10_000


def test_a_server_that_forgot_everything(redis_url: str, redis_client: redis.Redis) -> None:
    """A run that goes on meanwhile is noted when it ends; its fence still counts."""
    with closing(connect(redis_url)) as stores:
        claimed = claim(stores.idempotency)
        redis_client.flushall()

        assert (False,) == stores.idempotency.renew([("k", claimed.fence)], lease=LONG)
        ended = stores.idempotency.complete("k", claimed.fence, Finish(b"r"), retention=DAY)

        assert Ended(DONE, ours=True) == ended
        assert (DONE, b"r") == (claim(stores.idempotency).answer, claim(stores.idempotency).result)


# -- servers that are not there --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
@pytest.mark.parametrize("verb", EVERY_CALL)
def test_a_server_that_is_not_there(scheme: str, verb: str) -> None:
    """Is said to be unavailable, whatever it is asked."""
    with closing(connect(f"{scheme}://127.0.0.1:{free_port()}/0")) as stores, pytest.raises(StoreUnavailable):
        EVERY_CALL[verb](stores.idempotency)


def test_a_claim_whose_reply_was_lost_is_repeated(proxied: tuple[FaultyProxy, IdempotencyStore]) -> None:
    """By its owner it is answered as the first was; anybody else is too early."""
    proxy, store = proxied
    lost = proxy.lose_reply(matching=b"lost-claim")

    with pytest.raises(StoreUnavailable):
        claim(store, "lost-claim")

    assert lost.is_set()
    made = store.get("lost-claim")
    assert made is not None
    assert BUSY == claim(store, "lost-claim", owner="you").answer
    again = claim(store, "lost-claim")
    assert (FRESH, made.fence, 1) == (again.answer, again.fence, again.attempts)


def test_a_complete_whose_reply_was_lost_is_repeated(proxied: tuple[FaultyProxy, IdempotencyStore]) -> None:
    """The second says what the first did."""
    proxy, store = proxied
    fence = claim(store, "lost-end").fence
    lost = proxy.lose_reply(matching=b"lost-end")

    with pytest.raises(StoreUnavailable):
        store.complete("lost-end", fence, Finish(b"r"), retention=DAY)

    assert lost.is_set()
    assert Ended(DONE, ours=True) == store.complete("lost-end", fence, Finish(b"r"), retention=DAY)


def test_a_renewal_that_is_cut_off(proxied: tuple[FaultyProxy, IdempotencyStore]) -> None:
    """Is unavailable as a whole; the next one goes through."""
    proxy, store = proxied
    held = [(f"k{at}", claim(store, f"k{at}").fence) for at in range(10)]
    proxy.cut_after(4)

    with pytest.raises(StoreUnavailable):
        store.renew(held, lease=LONG)

    proxy.heal()
    assert (True,) * 10 == store.renew(held, lease=LONG)


# -- servers that cannot write ---------------------------------------------------------------------------------------


def test_a_replica_cannot_be_written_to(own_valkey: PrivateValkey) -> None:
    """A server that lost its office is as good as gone, for whatever would be written; what it knows, it says."""
    with closing(connect(own_valkey.url)) as stores, redis.Redis.from_url(own_valkey.url) as client:
        store = stores.idempotency
        fences = {key: claim(store, key).fence for key in ("done", "held")}
        store.complete("done", fences["done"], Finish(b"r"), retention=DAY)
        client.replicaof("127.0.0.1", str(free_port()))

        fence = fences["held"]
        for write in (
            lambda: claim(store, "new"),
            lambda: store.complete("held", fence, Finish(), retention=DAY),
            lambda: store.complete("new", 5, Finish(), retention=DAY),
            lambda: store.renew([("held", fence)], lease=LONG),
            lambda: store.step("held", fence, "s", b"v"),
            lambda: store.release("held", fence),
            lambda: store.park("held", fence),
            lambda: store.forget("held"),
            lambda: store.mark("n", retention=DAY),
            lambda: store.reserve("n", "me", ttl=DAY),
        ):
            with pytest.raises(StoreUnavailable, match=r"READONLY|read only"):
                write()
        assert (BUSY, DONE) == (claim(store, "held", owner="you").answer, claim(store, "done").answer)

        client.replicaof("NO", "ONE")
        assert FRESH == claim(store, "new").answer
        assert Ended(DONE, ours=True) == store.complete("held", fence, Finish(b"r"), retention=DAY)


def test_a_server_that_is_full(own_valkey: PrivateValkey) -> None:
    """Out of memory passes, so it is unavailable; and nothing is half written."""
    with closing(connect(own_valkey.url)) as stores, redis.Redis.from_url(own_valkey.url) as client:
        store = stores.idempotency
        fence = claim(store).fence
        client.config_set("maxmemory", "1")
        for write in (
            lambda: claim(store, "new"),
            lambda: store.complete("k", fence, Finish(b"r"), retention=DAY),
            lambda: store.renew([("k", fence)], lease=LONG),
        ):
            with pytest.raises(StoreUnavailable, match=r"OOM|memory"):
                write()
        client.config_set("maxmemory", "0")

        assert store.get("new") is None
        assert BUSY == claim(store, owner="you").answer
        assert Ended(DONE, ours=True) == store.complete("k", fence, Finish(b"r"), retention=DAY)


@pytest.mark.parametrize("verb", ["claim", "get", "page", "renew"])
def test_a_key_that_is_something_else(redis_url: str, redis_client: redis.Redis, verb: str) -> None:
    """What others put under our names is an error that does not pass."""
    redis_client.hset("dramatiq-guard:key:k", "field", 1)
    with closing(connect(redis_url)) as stores, pytest.raises(StoreError) as error:
        EVERY_CALL[verb](stores.idempotency)
    assert not isinstance(error.value, StoreUnavailable)
