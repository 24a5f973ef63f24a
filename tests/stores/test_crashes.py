"""What every store of crashes does alike: who died while it was at work on a message, counted once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import psycopg
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dramatiq_guard.errors import SetupError, StoreUnavailable
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.crashes import Crash, CrashStore, History
from dramatiq_guard.stores.memory.crashes import MemoryCrashes
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.stores.protocols import Stores
from dramatiq_guard.testing.private_server import free_port
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.postgres import PrivatePostgres
from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until

from .letters import T0

TTL = 900


@pytest.fixture
def crashes(stores: Stores) -> CrashStore:
    """The crashes of a store of each kind, empty."""
    return stores.deliveries.crashes


def begin(crashes: CrashStore, process: str, *messages: str, now: int = T0, host: str = "web", pid: int = 7) -> None:
    """A process says that it lives, and marks messages."""
    crashes.live(process, host=host, pid=pid, now=now, ttl=TTL)
    with closing(crashes.starter(process)) as starter:
        for message in messages:
            assert starter.start(message, now=now)
        assert starter.flush()


def die(crashes: CrashStore, process: str, *messages: str, now: int = T0, pid: int = 7) -> None:
    """A process marks messages, is not heard of any more, and is found dead."""
    begin(crashes, process, *messages, now=now, pid=pid)
    assert len(messages) == crashes.inquest(now=now + TTL)


def test_a_process_that_falls_silent_is_found_dead_once(crashes: CrashStore) -> None:
    """Each message that it had marked has one crash, whoever looks how often."""
    begin(crashes, "p", "m", "n", host="web one", pid=41)

    assert 0 == crashes.inquest(now=T0 + TTL - 1)
    assert 2 == crashes.inquest(now=T0 + TTL)
    assert 0 == crashes.inquest(now=T0 + TTL)

    assert {"m": 1, "n": 1} == dict(crashes.suspects(since=T0))
    assert History((Crash(T0, "p", "web one", 41),)) == crashes.history("m", since=T0)
    assert History() == crashes.history("another", since=T0)


def test_a_process_that_goes_on_saying_that_it_lives_does(crashes: CrashStore) -> None:
    """The last time counts."""
    begin(crashes, "p", "m")
    crashes.live("p", host="web", pid=7, now=T0 + 800, ttl=TTL)

    assert 0 == crashes.inquest(now=T0 + TTL)
    assert 1 == crashes.inquest(now=T0 + 800 + TTL)


def test_each_process_that_dies_at_a_message_counts(crashes: CrashStore) -> None:
    """The history names them all, oldest first."""
    for at, process in enumerate(("p", "q", "r")):
        die(crashes, process, "poison", now=T0 + 1_000 * at, pid=at)

    assert {"poison": 3} == dict(crashes.suspects(since=T0))
    assert (
        Crash(T0, "p", "web", 0),
        Crash(T0 + 1_000, "q", "web", 1),
        Crash(T0 + 2_000, "r", "web", 2),
    ) == crashes.history("poison", since=T0).crashes


def test_who_leaves_has_not_crashed(crashes: CrashStore) -> None:
    """Its marks go with it."""
    begin(crashes, "p", "m")

    crashes.leave("p")
    crashes.leave("nobody")

    assert 0 == crashes.inquest(now=T0 + TTL)
    assert History() == crashes.history("m", since=T0)


def test_a_finished_message_is_not_what_a_process_died_of(crashes: CrashStore) -> None:
    """A finish goes along with the next mark, or with a flush."""
    crashes.live("p", host="web", pid=7, now=T0, ttl=TTL)
    with closing(crashes.starter("p")) as starter:
        for message in ("first", "second", "third"):
            starter.start(message, now=T0)
        starter.finish("first")
        starter.start("fourth", now=T0)
        starter.finish("second")
        starter.finish("never begun")
        assert starter.flush()

        assert 2 == crashes.inquest(now=T0 + TTL)
    assert {"third", "fourth"} == set(crashes.suspects(since=T0))


def test_a_message_that_comes_again_is_marked_again(crashes: CrashStore) -> None:
    """Its own finish, which goes along with the mark, does not take the mark away."""
    crashes.live("p", host="web", pid=7, now=T0, ttl=TTL)
    with closing(crashes.starter("p")) as starter:
        starter.start("m", now=T0)
        starter.finish("m")
        starter.finish("another")
        starter.start("m", now=T0 + 5)
        assert starter.flush()

    assert ((Crash(T0 + 5, "p", "web", 7), T0 + TTL),) == crashes.history("m", since=T0).open


def test_what_has_been_begun_and_not_ended_is_told(crashes: CrashStore) -> None:
    """By whom, and until when that process counts as alive."""
    begin(crashes, "p", "m", host="one", pid=1)
    begin(crashes, "q", "m", "n", now=T0 + 10, host="two", pid=2)

    history = crashes.history("m", since=T0)

    assert () == history.crashes
    assert (
        (Crash(T0, "p", "one", 1), T0 + TTL),
        (Crash(T0 + 10, "q", "two", 2), T0 + 10 + TTL),
    ) == history.open


def test_a_process_that_is_known_to_be_dead_need_not_be_waited_for(crashes: CrashStore) -> None:
    """It is given no time any more, and found alone, whoever else looks dead just now."""
    begin(crashes, "dead", "m", host="one", pid=1)
    begin(crashes, "silent", "m", now=T0 - 10_000)

    crashes.live("dead", host="one", pid=1, now=0, ttl=0)
    assert 1 == crashes.inquest(now=0)
    crashes.live("dead", host="one", pid=1, now=0, ttl=0)
    assert 0 == crashes.inquest(now=0), "somebody else had found it meanwhile"

    assert (Crash(T0, "dead", "one", 1),) == crashes.history("m", since=0).crashes
    assert 1 == crashes.inquest(now=T0)


def test_a_message_is_a_suspect_until_it_is_forgiven(crashes: CrashStore) -> None:
    """What it may have begun elsewhere meanwhile stays."""
    die(crashes, "p", "m", "n")
    begin(crashes, "q", "m", now=T0 + 2_000)

    crashes.forgive("m")
    crashes.forgive("nobody")

    assert {"n": 1} == dict(crashes.suspects(since=T0))
    assert () == crashes.history("m", since=T0).crashes
    assert 1 == crashes.inquest(now=T0 + 2_000 + TTL)


def test_a_crash_is_held_against_a_message_for_a_while(crashes: CrashStore) -> None:
    """Those whose last one is too long ago are suspects no more, and are forgotten."""
    die(crashes, "p", "old", "both")
    die(crashes, "q", "both", "new", now=T0 + 10_000)

    assert {"old": 1, "both": 2, "new": 1} == dict(crashes.suspects(since=T0))
    assert {"both": 2, "new": 1} == dict(crashes.suspects(since=T0 + 1))
    assert 1 == len(crashes.history("both", since=T0 + 1).crashes)
    assert {"both": 2, "new": 1} == dict(crashes.suspects(since=T0)), "what was forgotten does not come back"
    die(crashes, "r", "old", now=T0 + 20_000)
    assert 1 == crashes.suspects(since=T0)["old"]
    assert 1 == len(crashes.history("old", since=0).crashes)


def test_the_last_crash_counts_in_whatever_order_the_dead_are_found(crashes: CrashStore) -> None:
    """One who had begun it earlier may be found later."""
    begin(crashes, "q", "m", now=T0 + 500)
    crashes.live("q", host="web", pid=7, now=T0, ttl=TTL)
    begin(crashes, "p", "m", now=T0 + 100)

    assert 2 == crashes.inquest(now=T0 + 10_000)
    assert {"m": 2} == dict(crashes.suspects(since=T0 + 500))


def test_the_latest_suspects_come_first(crashes: CrashStore) -> None:
    """So many of them; a fleet that died together is no reason to carry a million names about."""
    for at in range(5):
        die(crashes, f"p{at}", f"m{at}", now=T0 + at * 1_000)

    assert {"m4", "m3"} == set(crashes.suspects(since=T0, limit=2))


def test_messages_and_hosts_may_have_any_name(crashes: CrashStore) -> None:
    """None meets another, or breaks what is written."""
    names = ["m", "m:1", "{m}", 'quo"te\\', "Ünïcode ☃", "a b c", "x" * 5_000, "", "%s", "{schema}"]
    begin(crashes, "p", *names, host="a host's name ☃ % {x}", pid=2**22)
    with closing(crashes.starter("p")) as starter:
        starter.finish('quo"te\\')
        assert starter.flush()

    assert len(names) - 1 == crashes.inquest(now=T0 + TTL)
    assert set(names) - {'quo"te\\'} == set(crashes.suspects(since=T0))
    assert (Crash(T0, "p", "a host's name ☃ % {x}", 2**22),) == crashes.history("", since=T0).crashes
    for odd in ("nul\0", "half\ud800"):
        begin(crashes, "q", odd)
        assert 1 == len(crashes.history(odd, since=T0).open)
        crashes.forgive(odd)


def test_of_two_inquests_at_once_each_crash_is_counted_by_one(crashes: CrashStore) -> None:
    """However many processes look for the dead at the same moment."""
    for at in range(20):
        begin(crashes, f"p{at}", *(f"m{at}-{which}" for which in range(5)), "shared")
    start = threading.Barrier(8)
    found: list[int] = []

    def look() -> None:
        start.wait()
        found.append(crashes.inquest(now=T0 + TTL))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 20 * 6 == sum(found) + crashes.inquest(now=T0 + TTL)
    suspects = crashes.suspects(since=T0)
    assert 20 == suspects.pop("shared")
    assert 100 == len(suspects)
    assert {1} == set(suspects.values())


def test_marks_come_from_many_threads(crashes: CrashStore) -> None:
    """What was started and not finished is what is found, whoever did it."""
    crashes.live("p", host="web", pid=7, now=T0, ttl=TTL)
    with closing(crashes.starter("p")) as starter:

        def work(thread: int) -> None:
            for at in range(50):
                starter.start(f"{thread}-{at}", now=T0)
                if at != 7:
                    starter.finish(f"{thread}-{at}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert starter.flush()

    assert 8 == crashes.inquest(now=T0 + TTL)
    assert {f"{thread}-7" for thread in range(8)} == set(crashes.suspects(since=T0))


def test_a_closed_starter_marks_nothing(crashes: CrashStore) -> None:
    """Of a process that has left, nothing shall be found."""
    crashes.live("p", host="web", pid=7, now=T0, ttl=TTL)
    starter = crashes.starter("p")
    starter.close()
    starter.close()

    starter.finish("m")
    assert not starter.start("m", now=T0)
    assert not starter.flush()
    assert 0 == crashes.inquest(now=T0 + TTL)


# -- Whatever the order ----------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.sampled_from(["live", "live", "start", "start", "start", "finish", "leave", "inquest", "forgive", "look"]),
        st.sampled_from("pq"),
        st.sampled_from("mno"),
        st.sampled_from([0, 1, 500, TTL, 5 * TTL]),
    ),
    max_size=40,
)


def test_every_store_answers_as_the_model_does(crashes: CrashStore) -> None:
    """Whatever is done in whatever order, the answers are those of the plain model in memory."""
    runs = count()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps)
    def same(steps: list[tuple[str, str, str, int]]) -> None:
        model, run, now = MemoryCrashes(), f"{next(runs)}-", T0
        crashes.suspects(since=T0 * 2)  # forgets what the run before has left
        both: tuple[CrashStore, ...] = (model, crashes)
        starters = {(store, name): store.starter(run + name) for store in both for name in "pq"}

        def same_of(call: Callable[[CrashStore], object]) -> None:
            ours, theirs = (call(store) for store in both)
            assert ours == theirs

        try:
            for verb, process, message, passed in steps:
                now += passed
                for store in both:
                    starter = starters[store, process]
                    if verb == "live":
                        store.live(run + process, host=process, pid=1, now=now, ttl=TTL)
                    elif verb == "start":
                        starter.start(run + message, now=now)
                    elif verb == "finish":
                        starter.finish(run + message)
                    elif verb == "leave":
                        starter.flush()
                        store.leave(run + process)
                    elif verb == "forgive":
                        store.forgive(run + message)
                if verb in ("inquest", "look"):
                    for starter in starters.values():
                        starter.flush()
                if verb == "inquest":
                    same_of(lambda store: store.inquest(now=now))
                same_of(lambda store: dict(store.suspects(since=now - 5 * TTL)))
                if verb == "look":
                    same_of(lambda store: store.history(run + message, since=now - 3 * TTL))
            for starter in starters.values():
                starter.flush()
            same_of(lambda store: store.inquest(now=now + 5 * TTL))
        finally:
            for (store, name), starter in starters.items():
                starter.close()
                store.leave(run + name)

    same()


# -- What only servers have ------------------------------------------------------------------------------------------


@pytest.fixture(params=["redis", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """A server of each kind, set up."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    if request.param == "postgres":
        apply_schema(found)
    return found


@pytest.fixture
def through_proxy(url: str) -> Iterator[tuple[FaultyProxy, CrashStore]]:
    """A server behind a proxy."""
    with FaultyProxy(url) as proxy:
        with closing(connect(proxy.through(url))) as stores:
            yield proxy, stores.deliveries.crashes


def test_a_mark_waits_for_no_answer(through_proxy: tuple[FaultyProxy, CrashStore]) -> None:
    """A thousand of them are over while every answer takes a second; on Redis there is no answer at all."""
    proxy, crashes = through_proxy
    crashes.live("p", host="web", pid=7, now=T0, ttl=TTL)
    with closing(crashes.starter("p")) as starter:
        assert starter.start("first", now=T0)  # connects
        assert starter.flush()
        proxy.blackhole(replies_only=True)

        for at in range(1_000):
            assert starter.start(f"m{at}", now=T0)
            starter.finish(f"m{at}")

        proxy.heal()
        assert starter.flush()
        assert 1 == crashes.inquest(now=T0 + TTL)


def test_on_redis_marks_have_no_answers(redis_url: str) -> None:
    """A hundred messages are a hundred packets and no turn of the wire."""
    with FaultyProxy(redis_url) as proxy, closing(connect(proxy.url)) as stores:
        with closing(stores.deliveries.crashes.starter("p")) as starter:
            assert starter.flush()
            proxy.forget()

            for at in range(100):
                starter.start(f"m{at}", now=T0)
                starter.finish(f"m{at}")

            assert 0 == proxy.turns
            assert starter.flush()
            assert 1 == proxy.turns


@pytest.mark.parametrize("call", ["live", "leave", "inquest", "suspects", "history", "forgive"])
def test_all_else_is_one_round_trip(through_proxy: tuple[FaultyProxy, CrashStore], call: str) -> None:
    """Once the server knows the scripts."""
    proxy, crashes = through_proxy
    calls: dict[str, Callable[[], object]] = {
        "live": lambda: crashes.live("p", host="web", pid=7, now=T0, ttl=TTL),
        "leave": lambda: crashes.leave("p"),
        "inquest": lambda: crashes.inquest(now=T0),
        "suspects": lambda: crashes.suspects(since=T0),
        "history": lambda: crashes.history("m", since=T0),
        "forgive": lambda: crashes.forgive("m"),
    }
    calls[call]()
    before = proxy.turns
    calls[call]()

    assert 1 == proxy.turns - before


KILLED = """
import os, signal, sys
import psycopg, redis  # once, before the forks
from dramatiq_guard.stores.connect import connect
url, burst, *processes = sys.argv[1:]
crashes = connect(url).deliveries.crashes
for process in processes:
    if os.fork() == 0:
        crashes.live(process, host="web", pid=os.getpid(), now=int(1e12), ttl=900)
        starter = crashes.starter(process)
        starter.start("before", now=int(1e12))
        starter.flush()
        for at in range(int(burst)):
            starter.start(f"{process}-{at}", now=int(1e12))
            starter.finish(f"{process}-{at}")
        starter.start(f"{process}-last", now=int(1e12))
        os.kill(os.getpid(), signal.SIGKILL)
for process in processes:
    pid, status = os.wait()
    assert os.WTERMSIG(status) == signal.SIGKILL
"""


@pytest.mark.parametrize(("server", "burst"), [("redis", 20), ("postgres", 0)])
def test_a_mark_that_was_written_just_before_a_kill_arrives(
    request: pytest.FixtureRequest, server: str, burst: int
) -> None:
    """Processes write theirs and are gone by SIGKILL in the next instant: all of the 200 are found.

    On PostgreSQL only those that follow an answered one (with a burst of 20 before it, about half of them): it gives a
    connection up when it finds nobody to answer to, whatever else has come over it.
    """
    url: str = request.getfixturevalue(f"{server}_url")
    if server == "postgres":
        apply_schema(url)
    names = [uuid.uuid4().hex for _ in range(200)]
    for some in (names[at : at + 25] for at in range(0, 200, 25)):
        subprocess.run([sys.executable, "-c", KILLED, url, str(burst), *some], cwd=Path.cwd(), check=True, timeout=60)
    with closing(connect(url)) as stores:
        crashes = stores.deliveries.crashes

        def arrived() -> int:
            return sum(bool(crashes.history(f"{name}-last", since=0).open) for name in names)

        wait_until(lambda: arrived() == 200, 10, lambda: f"200 marks, not {arrived()}", interval=0.5)
        found = 0
        while some_found := crashes.inquest(now=int(1e12) + 900):  # so many at a time
            found += some_found
        assert 400 == found
        assert {"before", *(f"{name}-last" for name in names)} == set(crashes.suspects(since=0))


def test_a_server_that_is_not_there(url: str) -> None:
    """No mark raises; everything else says that the store is unavailable."""
    scheme = url.partition("://")[0]
    with closing(connect(f"{scheme}://127.0.0.1:{free_port()}/0")) as stores:
        crashes = stores.deliveries.crashes
        with closing(crashes.starter("p")) as starter:
            assert not starter.start("m", now=T0)
            starter.finish("m")
            assert not starter.flush()
        for call in (
            lambda: crashes.live("p", host="web", pid=7, now=T0, ttl=TTL),
            lambda: crashes.leave("p"),
            lambda: crashes.inquest(now=T0),
            lambda: crashes.suspects(since=T0),
            lambda: crashes.history("m", since=T0),
            lambda: crashes.forgive("m"),
        ):
            with pytest.raises(StoreUnavailable):
                call()


def test_a_starter_outlives_its_connection(through_proxy: tuple[FaultyProxy, CrashStore]) -> None:
    """One that was cut is made anew; while the server refuses, only a flush looks whether it is there again."""
    proxy, crashes = through_proxy
    crashes.live("p", host="web", pid=7, now=T0, ttl=TTL)
    with closing(crashes.starter("p")) as starter:
        starter.start("first", now=T0)
        assert starter.flush()
        proxy.refuse()
        wait_until(lambda: not starter.start("lost", now=T0), 10)
        starter.finish("first")
        attempts = len(proxy.conversations)
        assert not starter.start("lost too", now=T0)
        assert not starter.flush()
        proxy.heal()
        assert not starter.start("lost as well", now=T0)
        assert attempts == len(proxy.conversations)

        assert starter.flush()
        assert starter.start("second", now=T0)
        assert starter.flush()

    crashes.inquest(now=T0 + TTL)
    assert {"second"} == set(crashes.suspects(since=T0))


def test_marks_outlive_a_restart_of_redis(own_valkey: PrivateValkey) -> None:
    """A worker goes on marking without being told that its server was away."""
    with closing(connect(own_valkey.url)) as stores:
        crashes = stores.deliveries.crashes
        crashes.live("p", host="web", pid=7, now=T0, ttl=TTL)
        with closing(crashes.starter("p")) as starter:
            assert starter.start("first", now=T0)
            assert starter.flush()
            own_valkey.restart(signal.SIGKILL)
            wait_until(starter.flush, 10)
            assert starter.start("second", now=T0)
            assert starter.flush()
        assert 2 == crashes.inquest(now=T0 + TTL)


def test_a_crash_of_postgresql_loses_marks_and_keeps_crashes(own_postgres: PrivatePostgres) -> None:
    """Marks are not worth a log; who lives says so again, and what has been counted stays counted."""
    apply_schema(own_postgres.url)
    with closing(connect(own_postgres.url)) as stores:
        crashes = stores.deliveries.crashes
        die(crashes, "p", "poison")
        begin(crashes, "q", "m", now=T0 + 1_000)
        own_postgres.restart(signal.SIGKILL)

        assert {"poison": 1} == dict(crashes.suspects(since=T0))
        assert 0 == crashes.inquest(now=T0 + 10_000)
        begin(crashes, "q", "m", now=T0 + 10_000)
        assert 1 == crashes.inquest(now=T0 + 10_000 + TTL)


def test_tables_that_are_not_there(postgres_url: str) -> None:
    """Say what to do; a mark is not written, and a flush knows."""
    with closing(connect(postgres_url)) as stores:
        crashes = stores.deliveries.crashes
        with pytest.raises(SetupError, match="schema apply"):
            crashes.inquest(now=T0)
        with closing(crashes.starter("p")) as starter:
            starter.start("m", now=T0)
            assert not starter.flush()


def test_a_pool_of_the_users_lends_its_address(postgres_url: str) -> None:
    """Marks have a connection of their own, which takes no place of the pool's."""
    from psycopg_pool import ConnectionPool

    apply_schema(postgres_url)
    with ConnectionPool(postgres_url, min_size=1, max_size=1) as pool:
        with closing(connect(pool)) as stores:
            crashes = stores.deliveries.crashes
            begin(crashes, "p", "m")
            assert 1 == crashes.inquest(now=T0 + TTL)


def test_nothing_stays_of_a_process_that_has_left(url: str, request: pytest.FixtureRequest) -> None:
    """Neither a key nor a row, however many messages it has been through."""
    with closing(connect(url)) as stores:
        crashes = stores.deliveries.crashes
        begin(crashes, "p", *(f"m{at}" for at in range(50)))
        crashes.leave("p")
    if url.startswith("redis"):
        with redis.Redis.from_url(url) as client:
            assert [] == client.keys()
    else:
        with psycopg.connect(url) as connection:
            for table in ("processes", "starts", "crashes"):
                assert (0,) == connection.execute(f"SELECT count(*) FROM dramatiq_guard.{table}").fetchone()


def test_a_process_that_forks_does_not_write_to_its_parents_connection(url: str) -> None:
    """Each process makes a starter of its own; what the parent's had noted is not the child's."""
    with closing(connect(url)) as stores:
        crashes = stores.deliveries.crashes
        begin(crashes, "parent", "m")
        child = os.fork()
        if child == 0:
            try:
                begin(crashes, "child", "n", pid=8)
            finally:
                os._exit(0)
        os.waitpid(child, 0)

        assert 2 == crashes.inquest(now=T0 + TTL)
        assert {"m": 1, "n": 1} == dict(crashes.suspects(since=T0))
