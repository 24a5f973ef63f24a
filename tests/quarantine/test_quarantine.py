"""Who is taken for dead, when, and what is held against the messages that died with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.broker import MessageProxy

from dramatiq_guard import clock
from dramatiq_guard.delivery import Delivery, stamp
from dramatiq_guard.errors import SetupError, StoreUnavailable
from dramatiq_guard.exits import processes, quarantine
from dramatiq_guard.exits.quarantine import Quarantine
from dramatiq_guard.stores.memory.crashes import MemoryCrashes
from tests.support.waiting import wait_until

from .conftest import VirtualClock

EVERY = 1_000
TTL = 3 * EVERY


class Store(MemoryCrashes):
    """Crashes in memory that note who was asked what, and can be out.

    Attributes:
      asked(list[str]): The calls that cost a round trip, in order.
      out(Exception | None): What is raised instead of an answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.out: Exception | None = None

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("live", "leave", "inquest", "suspects", "history", "forgive"):
            return found

        def call(*args: Any, **known: Any) -> Any:
            self.asked.append(name)
            if self.out is not None:
                raise self.out
            return found(*args, **known)

        return call


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def mine(store: Store, virtual: VirtualClock) -> Quarantine:
    """This process's part, which has just given its first sign of life."""
    mine = Quarantine(store, max_crashes=3, window=72 * 3_600_000, every=EVERY, given_up=lambda: False)
    mine.beat()
    return mine


@pytest.fixture
def process(virtual: VirtualClock) -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine, which was started a while ago."""
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    virtual.time += 10_000
    yield started
    started.kill()
    started.wait()
    assert started.stdin is not None
    started.stdin.close()


def other(mine: Quarantine, *messages: str, host: str | None = None, pid: int = 0, name: str = "other") -> str:
    """Another process that has begun messages: of this machine, unless a host is named."""
    process = f"{mine.process.partition('.')[0]}.{name}"
    mine.store.live(process, host=host or quarantine._HOST, pid=pid, now=clock.now(), ttl=TTL)
    starter = mine.store.starter(process)
    for message in messages:
        starter.start(message, now=clock.now())
    return process


def deliver(message_id: str) -> Delivery:
    message: dramatiq.Message[Any] = dramatiq.Message("default", "job", (), {}, {}, message_id=message_id)
    return stamp(MessageProxy(message), None)


def beats(mine: Quarantine, virtual: VirtualClock, count: int) -> None:
    """Some signs of life of this process, as its thread gives them."""
    for _ in range(count):
        virtual.time += EVERY
        mine.beat()


# -- what an ordinary message pays -----------------------------------------------------------------------------------


def test_an_ordinary_message_asks_nobody(mine: Quarantine, store: Store) -> None:
    """It is marked, and the mark is not waited for."""
    store.asked.clear()
    delivery = deliver("m")

    suspicion = mine.suspicion("m", redelivered=False)
    with mine.watched(delivery, suspicion) as admitted:
        assert admitted
        assert {"m"} == set(store._starts[mine.process])

    assert suspicion is None
    assert [] == store.asked
    assert {} == store._starts[mine.process]


def test_what_was_delivered_before_is_looked_up(mine: Quarantine, store: Store) -> None:
    """Nothing is held against it if nobody had begun it: it was only prefetched."""
    store.asked.clear()
    assert mine.suspicion("m", redelivered=True) is None
    assert ["history"] == store.asked


def test_a_suspect_is_looked_up_wherever_it_arrives(mine: Quarantine, virtual: VirtualClock) -> None:
    """A broker that does not say what it has delivered before need not."""
    other(mine, "poison", host="far")
    beats(mine, virtual, 4)

    suspicion = mine.suspicion("poison", redelivered=False)

    assert suspicion is not None
    assert ["far"] == [crash.host for crash in suspicion.crashes]
    assert 0 == suspicion.wait


def test_a_suspect_that_survives_is_forgiven(mine: Quarantine, virtual: VirtualClock, store: Store) -> None:
    """Everywhere, and in this process at once."""
    other(mine, "innocent", host="far")
    beats(mine, virtual, 4)
    assert mine.suspicion("innocent", redelivered=False) is not None

    mine.forgive("innocent")

    assert mine.suspicion("innocent", redelivered=False) is None
    assert {} == store.suspects(since=0)


# -- who is dead -----------------------------------------------------------------------------------------------------


def test_a_silent_process_is_found_dead(mine: Quarantine, virtual: VirtualClock, store: Store) -> None:
    """When its last sign of life is over, and not before."""
    other(mine, "poison", host="far")

    beats(mine, virtual, 2)
    assert {} == store.suspects(since=0)
    beats(mine, virtual, 1)
    assert {"poison": 1} == store.suspects(since=0)


def test_after_an_outage_the_living_have_time_to_say_so(mine: Quarantine, virtual: VirtualClock, store: Store) -> None:
    """All look dead to whoever comes first; nobody is taken for dead until everybody could have come."""
    other(mine, "innocent", host="far")
    store.out = StoreUnavailable("out")
    beats(mine, virtual, 10)
    store.out = None

    beats(mine, virtual, 1)
    other(mine, host="far")
    beats(mine, virtual, 2)
    other(mine, host="far")
    beats(mine, virtual, 2)

    assert {} == store.suspects(since=0)


def test_a_frozen_process_takes_nobody_for_dead(mine: Quarantine, virtual: VirtualClock, store: Store) -> None:
    """It has missed what the others said, and they may have been frozen with it."""
    beats(mine, virtual, 5)
    other(mine, "innocent", host="far")
    virtual.time += 60_000

    beats(mine, virtual, 1)

    assert {} == store.suspects(since=0)


def test_a_process_of_this_machine_need_not_be_waited_for(
    mine: Quarantine, store: Store, process: subprocess.Popen[bytes]
) -> None:
    """Its number says that it is gone, though its parent has not heard of it yet; everybody is told at once."""
    other(mine, "poison", pid=process.pid)
    process.kill()
    wait_until(lambda: not processes.alive(process.pid, clock.now()))

    suspicion = mine.suspicion("poison", redelivered=True)

    assert suspicion is not None
    assert [process.pid] == [crash.pid for crash in suspicion.crashes]
    assert 0 == suspicion.wait
    assert {"poison": 1} == store.suspects(since=0)


def test_a_process_that_is_just_dying_is_waited_for(
    mine: Quarantine, virtual: VirtualClock, process: subprocess.Popen[bytes]
) -> None:
    """The broker may know before the machine does: a process's connections go before its number."""
    other(mine, "poison", pid=process.pid)

    def die() -> None:
        if len(virtual.waits) == 3:
            process.kill()
            with clock.use(clock.SystemClock()):
                wait_until(lambda: not processes.alive(process.pid, clock.now()))

    virtual.meanwhile = die

    assert mine.suspicion("poison", redelivered=True) is not None
    assert 3 == len(virtual.waits)


def test_a_living_process_that_lost_its_connection_is_no_reason_to_suspect(
    mine: Quarantine, store: Store, process: subprocess.Popen[bytes]
) -> None:
    """A reconnect is no crash."""
    other(mine, "innocent", pid=process.pid)

    assert mine.suspicion("innocent", redelivered=True) is None
    assert {} == store.suspects(since=0)


def test_another_process_under_the_same_number_is_another_process(
    mine: Quarantine, virtual: VirtualClock, process: subprocess.Popen[bytes]
) -> None:
    """In a container that is started anew the numbers come again."""
    started = processes.started_at(process.pid)
    assert started is not None
    virtual.time = started - 1_000
    other(mine, "poison", pid=process.pid)

    assert mine.suspicion("poison", redelivered=True) is not None


def test_a_process_of_another_machine_may_be_alive(mine: Quarantine, virtual: VirtualClock) -> None:
    """Then the message is put off until its silence has told, and everybody has heard of it."""
    other(mine, "poison", host="far", pid=os.getpid())

    first = mine.suspicion("poison", redelivered=True)
    assert first is not None
    assert () == first.crashes
    waited = 0
    while waited < first.wait:
        beats(mine, virtual, 1)
        waited += EVERY

    second = mine.suspicion("poison", redelivered=False)
    assert second is not None
    assert (1, 0) == (len(second.crashes), second.wait)


def test_the_same_host_name_in_another_container_is_another_machine(mine: Quarantine) -> None:
    """Process numbers mean something else there."""
    mine.store.live("elsewhere.p", host=quarantine._HOST, pid=2**22 - 1, now=clock.now(), ttl=TTL)
    mine.store.starter("elsewhere.p").start("m", now=clock.now())

    suspicion = mine.suspicion("m", redelivered=True)

    assert suspicion is not None
    assert () == suspicion.crashes
    assert suspicion.wait > 0


def test_what_this_process_has_begun_itself_is_not_held_against_a_message(mine: Quarantine) -> None:
    """Its own connection was lost."""
    with mine.watched(deliver("m"), None):
        assert mine.suspicion("m", redelivered=True) is None


# -- a suspect runs alone --------------------------------------------------------------------------------------------


def test_who_dies_at_a_suspect_dies_alone(mine: Quarantine, store: Store) -> None:
    """While it runs, its mark is the only one of the process, and is known to be there."""
    with mine.watched(deliver("before"), None):
        pass
    with mine.watched(deliver("suspect"), quarantine.Suspicion(())) as admitted:
        assert admitted
        assert {"suspect"} == set(store._starts[mine.process])
    assert {} == store._starts[mine.process]


# -- the end ---------------------------------------------------------------------------------------------------------


def test_a_process_that_leaves_takes_its_marks_along(mine: Quarantine, virtual: VirtualClock, store: Store) -> None:
    """What is still at work is no crash, whatever becomes of the process; nor is it marked any more."""
    with mine.watched(deliver("m"), None):
        mine.leave()
        mine.leave()
        with mine.watched(deliver("n"), None) as admitted:
            assert admitted
        mine.beat()

        assert 1 == store.asked.count("leave") - 1, "a late sign of life is taken back"
    assert 0 == store.inquest(now=virtual.time + 10 * TTL)


def test_a_farewell_that_did_not_arrive_is_said_again(mine: Quarantine, store: Store) -> None:
    """Until it has, or the process is gone."""
    store.out = StoreUnavailable("out")
    mine.leave()
    store.out = None

    mine.leave()

    assert mine.process not in store._alive


# -- a store that is out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StoreUnavailable("out"), SetupError("the tables are gone")])
def test_a_store_that_is_out_holds_nothing_up(
    mine: Quarantine, virtual: VirtualClock, store: Store, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Messages run unwatched; it is said once, and counted."""
    other(mine, "m", host="far")
    beats(mine, virtual, 4)
    store.out = error

    assert mine.suspicion("m", redelivered=True) is None
    mine.forgive("m")
    beats(mine, virtual, 5)

    assert 1 == caplog.text.count("Crashes are not counted")
    store.out = None
    beats(mine, virtual, 1)
    store.out = error
    beats(mine, virtual, 1)
    assert 2 == caplog.text.count("Crashes are not counted")


def test_its_thread_outlives_whatever_happens_to_it(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A sign of life that fails for another reason is followed by the next one."""
    mine = Quarantine(store, max_crashes=3, window=1_000, every=5, given_up=lambda: False)
    mine.start()
    store.out = ValueError("a mistake of ours")
    wait_until(lambda: "could not be given" in caplog.text)
    store.out = None
    store.asked.clear()
    wait_until(lambda: store.asked.count("live") > 2)
    mine.leave()
