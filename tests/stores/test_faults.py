"""What a store says when its server is gone, frozen, full, read-only or not set up, and that it comes back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
import redis

from dramatiq_guard.errors import SetupError, StoreError, StoreUnavailable
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.postgres import connection as postgres_connection
from dramatiq_guard.stores.postgres.schema import apply_schema, latest_version, schema_status, steps
from dramatiq_guard.stores.protocols import DeadLetterStore
from dramatiq_guard.testing.private_server import PrivateServer
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.postgres import PrivatePostgres
from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until

from .letters import T0, letter


@pytest.fixture(params=["redis", "postgres"])
def own_store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[PrivateServer, DeadLetterStore]]:
    """A server of the test's own, and a store on it that waits a second for answers."""
    if request.param == "redis":
        server = request.getfixturevalue("own_valkey")
        url = server.url + "?socket_timeout=1"
    else:
        server = request.getfixturevalue("own_postgres")
        url = server.url
        apply_schema(url)
        monkeypatch.setattr(postgres_connection, "COMMAND_TIMEOUT", 1_000)
    stores = connect(url)
    yield server, stores.dead_letters
    stores.close()


def test_a_server_that_was_killed_and_restarted(own_store: tuple[PrivateServer, DeadLetterStore]) -> None:
    """Unavailable while it is away; afterwards the first command works, and what was written is there."""
    server, store = own_store
    store.put(letter("before"))

    server.kill()
    # A backend of PostgreSQL may answer once more before it sees that its parent is gone.
    wait_until(lambda: not _answers(store), describe="the server to be away")
    with pytest.raises(StoreUnavailable):
        store.put(letter("during"))
    server.start()

    assert store.put(letter("after"))
    assert store.get("before") is not None


def test_a_server_that_was_restarted_unseen(own_store: tuple[PrivateServer, DeadLetterStore]) -> None:
    """A connection that died while it lay idle is not used again."""
    server, store = own_store
    store.put(letter("before"))

    server.restart()

    assert store.put(letter("after"))


def test_a_server_that_is_frozen(own_store: tuple[PrivateServer, DeadLetterStore]) -> None:
    """The command ends when its time is over, and the next one after the thaw works."""
    server, store = own_store
    store.put(letter("before"))

    server.pause()
    try:
        with pytest.raises(StoreUnavailable):
            store.put(letter("during"))
    finally:
        server.resume()

    wait_until(lambda: _answers(store), describe="the store to answer again")
    assert store.put(letter("after"))


def _answers(store: DeadLetterStore) -> bool:
    try:
        store.ping()
    except StoreUnavailable:
        return False
    return True


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_a_lost_reply_is_not_repeated_by_the_client(kind: str, request: pytest.FixtureRequest) -> None:
    """One call is one command: who repeats is the barrier, which knows how long it may; and nothing is doubled."""
    url = request.getfixturevalue(f"{kind}_url")
    if kind == "postgres":
        apply_schema(url)
    with FaultyProxy(url) as proxy:
        store = connect(proxy.url).dead_letters
        store.put(letter("warm"))
        lost = proxy.lose_reply(matching=b"lost-letter")

        with pytest.raises(StoreUnavailable):
            store.put(letter("lost-letter"))

        assert lost.is_set()
        assert store.put(letter("lost-letter")) is False, "the first had arrived"
        assert 2 == store.depth()
        store.close()


def test_a_replay_whose_reply_was_lost_can_be_asked_for_again(redis_url: str) -> None:
    """A client of the user's own may repeat commands: the same question gets the same answer."""
    with FaultyProxy(redis_url) as proxy, redis.Redis(host="127.0.0.1", port=proxy.port) as client:
        store = connect(client).dead_letters
        store.put(letter())
        lost = proxy.lose_reply(matching=b"replay-owner")

        begun = store.begin_replay(["m"], owner="replay-owner", now=T0)

        assert lost.is_set()
        assert ["m"] == [each.letter_id for each in begun.letters]
        assert 1 == len(begun.letters[0].standing.events)


def test_redis_that_is_full(own_valkey: PrivateValkey) -> None:
    """Out of memory passes, so it is unavailable; and a move that cannot be made whole is not made at all."""
    store = connect(own_valkey.url).dead_letters
    store.put(letter())
    with redis.Redis.from_url(own_valkey.url) as client:
        client.config_set("maxmemory", "1")

        with pytest.raises(StoreUnavailable, match=r"OOM|memory"):
            store.put(letter("n"))
        with pytest.raises(StoreUnavailable, match=r"OOM|memory"):
            store.discard(["m"], now=T0)

        assert (1, 0) == (store.depth(), store.depth("discarded"))
        client.config_set("maxmemory", "0")
    assert ("m",) == store.discard(["m"], now=T0)
    store.close()


def test_redis_that_only_reads(own_valkey: PrivateValkey) -> None:
    """A replica that was a master passes too."""
    store = connect(own_valkey.url).dead_letters
    store.ping()
    with redis.Redis.from_url(own_valkey.url) as client:
        client.replicaof("127.0.0.1", 1)

        with pytest.raises(StoreUnavailable):
            store.put(letter())

        client.replicaof("NO", "ONE")
    assert store.put(letter())
    store.close()


def test_redis_that_forgot_its_scripts(redis_url: str, redis_client: redis.Redis) -> None:
    """After a failover or SCRIPT FLUSH the scripts are sent anew."""
    store = connect(redis_url).dead_letters
    store.put(letter("a"))
    redis_client.script_flush()

    assert store.put(letter("b"))
    store.close()


def test_keys_of_another_kind_are_an_error(redis_url: str, redis_client: redis.Redis) -> None:
    """What trying again cannot cure is no unavailability."""
    redis_client.set("{dramatiq-guard}:dead-letters:state:dead", "something else")

    with pytest.raises(StoreError, match="WRONGTYPE") as caught:
        connect(redis_url).dead_letters.put(letter())

    assert not isinstance(caught.value, StoreUnavailable)


def test_wrong_credentials(own_valkey: PrivateValkey) -> None:
    """They are named, and held to be passing: a letter must not be lost to a password that is being rotated."""
    with redis.Redis.from_url(own_valkey.url) as client:
        client.config_set("requirepass", "right")
    store = connect(own_valkey.url.replace("redis://", "redis://:wrong@")).dead_letters

    with pytest.raises(StoreUnavailable, match="credentials") as caught:
        store.put(letter())

    assert "wrong@" not in str(caught.value)


# -- PostgreSQL ------------------------------------------------------------------------------------------------------


def test_tables_are_never_made_on_the_way(postgres_url: str) -> None:
    """A worker on a database without tables says which command makes them."""
    store = connect(postgres_url).dead_letters

    for use in (store.ping, store.depth, lambda: store.put(letter())):
        with pytest.raises(SetupError, match="dramatiq-guard schema apply postgresql://"):
            use()
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute("SELECT to_regnamespace('dramatiq_guard')").fetchone()
    assert (None,) == found
    store.close()


def test_the_schema_is_applied_once(postgres_url: str) -> None:
    """The second time there is nothing to do; each schema is by itself."""
    assert not schema_status(postgres_url).ready

    assert tuple(step.name for step in steps()) == apply_schema(postgres_url).missing
    assert () == apply_schema(postgres_url).missing
    assert tuple(step.version for step in steps()) == schema_status(postgres_url).applied
    assert schema_status(postgres_url).ready
    assert not schema_status(postgres_url, schema="other").ready
    apply_schema(postgres_url, schema="other")
    with closing(connect(postgres_url, schema="other")) as other, closing(connect(postgres_url)) as first:
        assert other.dead_letters.put(letter())
        assert 0 == first.dead_letters.depth()


def test_two_deploys_at_once(postgres_url: str) -> None:
    """The second waits for the first and finds nothing to do."""
    done: list[Any] = []
    threads = [threading.Thread(target=lambda: done.append(apply_schema(postgres_url).missing)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [(), (), (), tuple(step.name for step in steps())] == sorted(done)


def test_a_schema_older_than_the_library(postgres_url: str) -> None:
    """After an upgrade without its step, the boot says so."""
    apply_schema(postgres_url)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("DELETE FROM dramatiq_guard.schema_steps")
    store = connect(postgres_url).dead_letters

    with pytest.raises(SetupError, match=rf"version 0.*needs {latest_version()}"):
        store.ping()
    store.close()


def test_only_postgres_has_a_schema() -> None:
    """Asked of another store, the error says so."""
    with pytest.raises(SetupError, match="only PostgreSQL"):
        apply_schema("redis://localhost")


def test_a_database_that_only_reads(postgres_url: str) -> None:
    """A standby passes: after the failover there is a primary again."""
    apply_schema(postgres_url)
    store = connect(postgres_url + "?options=-c%20default_transaction_read_only%3Don").dead_letters

    with pytest.raises(StoreUnavailable, match="read-only"):
        store.put(letter())
    store.close()


def test_all_connections_busy(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than connections wait, and are told when that took too long."""
    apply_schema(postgres_url)
    monkeypatch.setattr(postgres_connection, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(postgres_connection, "COMMAND_TIMEOUT", 100)
    way = postgres_connection.PostgresConnection(postgres_url)
    failed: list[BaseException] = []

    def second() -> None:
        try:
            way.rows("looking", "SELECT 1", {})
        except StoreUnavailable as error:
            failed.append(error)

    with way.using("holding") as connection:
        connection.execute("SELECT 1")
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    assert "busy" in str(failed[0])
    assert [(1,)] == way.rows("looking", "SELECT 1", {})
    way.close()


@pytest.mark.parametrize("kind", ["redis", "postgres"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_store_survives_a_fork(kind: str, request: pytest.FixtureRequest) -> None:
    """Workers fork after their modules were imported, and perhaps after the store was used: nobody shares a socket."""
    url = request.getfixturevalue(f"{kind}_url")
    if kind == "postgres":
        apply_schema(url)
    store = connect(url).dead_letters
    store.put(letter("parent"))
    children = []
    for child in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                wrote = [store.put(letter(f"{child}-{at}")) for at in range(20)]
                code = 0 if all(wrote) and store.get("parent") is not None else 2
                store.close()
            finally:
                os._exit(code)
        children.append(pid)
    wrote = [store.put(letter(f"parent-{at}")) for at in range(20)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]

    assert [0, 0, 0] == codes
    assert all(wrote)
    assert 81 == store.depth()
    store.close()


def test_many_threads_on_one_store(request: pytest.FixtureRequest, postgres: PrivatePostgres) -> None:
    """A storm of letters of one kind from many threads is counted exactly, and nobody deadlocks."""
    url = request.getfixturevalue("postgres_url")
    apply_schema(url)
    store = connect(url).dead_letters
    failed: list[BaseException] = []

    def storm(thread: int) -> None:
        try:
            for at in range(40):
                store.put(letter(f"{thread}-{at}", at))
                if at % 4 == 3:
                    store.discard([f"{thread}-{at}", f"{(thread + 1) % 8}-{at}"], now=T0)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=storm, args=(each,)) for each in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == failed
    with psycopg.connect(url) as connection:
        counted = connection.execute(
            "SELECT state, count(*) FROM dramatiq_guard.dead_letters GROUP BY state ORDER BY state"
        ).fetchall()
    assert [("dead", store.depth()), ("discarded", store.depth("discarded"))] == counted
    assert 320 == store.depth() + store.depth("discarded")
    store.close()
