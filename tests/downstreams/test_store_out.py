"""A breaker whose store is killed in the middle of a storm: work goes on, and the breaker is back with its store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from dramatiq_guard.policy.breaker import Mode, force
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.stores.protocols import Stores
from dramatiq_guard.testing.private_server import PrivateServer
from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until

from .conftest import Bench


class Place:
    """A worker whose breakers are on a server of their own; its messages are elsewhere.

    Parameters:
      server(PrivateServer): The server.
      stores(Stores): What it keeps.
      broker_url(str): The Redis that the messages are on.
    """

    def __init__(self, server: PrivateServer, stores: Stores, broker_url: str) -> None:
        self.server = server
        self.breakers = stores.breakers
        self.bench = Bench(broker_url, breakers=stores.breakers)
        self.downstream = self.bench.downstream
        self.sent = 0
        self.charge = self.bench.actor()

    def storm(self, messages: int) -> None:
        """Send messages."""
        for _ in range(messages):
            self.charge.send(self.sent)
            self.sent += 1

    def until(self, mode: Mode) -> None:
        """Wait until the record says that a breaker is in a mode."""
        wait_until(lambda: (known := self.breakers.read("payments")) and known.mode is mode, 30)

    def done(self) -> bool:
        """Whether all that was sent is done."""
        return len(self.downstream.order) >= self.sent

    def describe(self) -> object:
        return self.sent, len(self.downstream.order), self.downstream.calls


SERVERS = {"redis": "own_valkey", "postgres": "own_postgres"}


def _url(server: Any) -> str:
    if hasattr(server, "create_database"):
        url: str = server.create_database("breakers")
        apply_schema(url)
        return url
    return str(server.url)


@pytest.fixture(params=SERVERS)
def place(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Place]:
    """A place whose breakers are on each kind of server."""
    server = request.getfixturevalue(SERVERS[request.param])
    with closing(connect(_url(server))) as stores:
        made = Place(server, stores, redis_url)
        with closing(made.bench):
            yield made


@pytest.mark.timeout(180)
def test_a_store_that_is_killed_in_a_storm_holds_nobody_up(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """With messages under way, in line and put off: all are done without it, the log says so once, and it comes back.

    The downstream fails while the store is out, too: what is lost is the pace, and not a message.
    """
    place.downstream.does = "fail"
    with caplog.at_level(logging.WARNING, "dramatiq_guard.downstreams"):
        place.bench.work()
        place.storm(40)
        place.until(Mode.OPEN)
        place.server.kill()
        wait_until(lambda: "does not answer" in caplog.text, 30)
        failed = place.downstream.calls["fail"]
        place.storm(40)
        # Nothing holds them back: more fail in a moment than probes would in minutes.
        wait_until(lambda: place.downstream.calls["fail"] > failed + 40, 60, place.describe)

        place.downstream.does = "answer"
        wait_until(place.done, 60, place.describe)
        assert sorted(place.downstream.order) == list(range(place.sent))
        assert caplog.text.count("does not answer") == 1

        place.server.start()
        wait_until(lambda: "answers again" in caplog.text, 30)

    place.downstream.does = "fail"
    place.storm(40)
    place.until(Mode.OPEN)
    assert place.bench.letters.page().letters == ()


@pytest.mark.timeout(120)
def test_what_an_operator_said_is_back_with_the_store(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A paused downstream is called while the store is out, and not any more as soon as it is back."""
    place.breakers.update("payments", lambda state, now: (force(state, Mode.FORCED_OPEN, now), None))
    with caplog.at_level(logging.WARNING, "dramatiq_guard.downstreams"):
        place.bench.work()
        place.storm(1)
        wait_until(lambda: "is paused by an operator" in caplog.text, 20)
        assert place.downstream.order == []

        place.server.kill()
        wait_until(lambda: "does not answer" in caplog.text, 30)
        place.storm(1)
        wait_until(lambda: 1 in place.downstream.order, 30, place.describe)

        place.server.start()
        wait_until(lambda: "answers again" in caplog.text, 30)
    wait_until(lambda: place.bench.breaker.gates._known["payments"].gate.mode is Mode.FORCED_OPEN, 20)


@pytest.mark.timeout(120)
def test_those_that_wait_for_their_turn_go_when_the_store_is_lost(redis_url: str) -> None:
    """A store that answers nothing any more (a cut cable, a frozen server) is out, too: nobody waits for ever."""
    with FaultyProxy(redis_url) as proxy, closing(connect(proxy.url)) as stores, closing(connect(redis_url)) as direct:
        with closing(Bench(redis_url, breakers=stores.breakers)) as bench:
            charge = bench.actor()
            bench.downstream.does = "fail"
            bench.work()
            for at in range(20):
                charge.send(at)
            wait_until(lambda: (known := direct.breakers.read("payments")) and known.mode is Mode.OPEN, 30)
            bench.downstream.does = "answer"
            proxy.blackhole()
            wait_until(lambda: len(bench.downstream.order) == 20, 60, lambda: bench.downstream.calls)
            proxy.heal()
            wait_until(lambda: not bench.breaker.gates._store_is_out, 30)


def test_a_lost_reply_costs_one_report(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The connection is cut after the store has written: for a second all go, then the breaker is back."""
    with FaultyProxy(redis_url) as proxy, closing(connect(proxy.url)) as stores:
        with closing(Bench(redis_url, breakers=stores.breakers)) as bench:
            charge = bench.actor()
            lost = proxy.lose_reply(matching=b"EVALSHA")
            with caplog.at_level(logging.WARNING, "dramatiq_guard.downstreams"):
                bench.work()
                charge.send(0)
                wait_until(lost.is_set)
                wait_until(lambda: bench.downstream.order == [0], 20)
                wait_until(lambda: "answers again" in caplog.text, 20)


def test_a_store_that_hangs_holds_up_nobody_but_the_first(redis_url: str) -> None:
    """Who meets a downstream first asks for it, within the store's own limit; those that know it go on."""
    hangs, asked = threading.Event(), threading.Event()
    with closing(Bench(redis_url)) as bench:
        update: Callable[..., Any] = bench.stores.breakers.update

        def hanging(name: str, change: Any) -> Any:
            if name == "courier":
                asked.set()
                hangs.wait(30)
            return update(name, change)

        bench.stores.breakers.update = hanging  # type: ignore[method-assign]
        charge = bench.actor()
        ship = bench.actor(actor_name="ship", downstream="courier")
        bench.work(threads=2)
        charge.send("first")
        wait_until(lambda: bench.downstream.order == ["first"])
        ship.send("shipped")
        assert asked.wait(20)
        for at in range(20):
            charge.send(at)
        try:
            wait_until(lambda: len(bench.downstream.order) == 21, 20, lambda: bench.downstream.order)
            assert "shipped" not in bench.downstream.order
        finally:
            hangs.set()
        wait_until(lambda: "shipped" in bench.downstream.order)
