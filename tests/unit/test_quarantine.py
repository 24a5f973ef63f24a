"""One process's part in finding the message that kills its workers: signs of life, suspects, and running them alone."""

from __future__ import annotations

import os
import threading

import pytest

from dramatiq_guard.errors import StoreUnavailable
from dramatiq_guard.exits import processes
from dramatiq_guard.exits import quarantine as module
from dramatiq_guard.exits.quarantine import Quarantine, Suspicion
from dramatiq_guard.stores.crashes import Crash
from dramatiq_guard.stores.memory.crashes import MemoryCrashes
from tests.support.waiting import wait_until
from tests.unit.conftest import deliver

#: Milliseconds between two signs of life, and for how long one lasts.
BEAT = 1_000
TTL = 3 * BEAT


class Store(MemoryCrashes):
    """Crashes in memory, on a store that can be out.

    Attributes:
      out(bool): Whether it is.
    """

    out = False

    def _reached(self):
        if self.out:
            raise StoreUnavailable("connection refused")

    def live(self, *args, **kwargs):
        self._reached()
        super().live(*args, **kwargs)

    def leave(self, process):
        self._reached()
        super().leave(process)

    def history(self, *args, **kwargs):
        self._reached()
        return super().history(*args, **kwargs)

    def forgive(self, message_id):
        self._reached()
        super().forgive(message_id)

    def stranger(self, message_id, *, now, ttl=TTL, host="elsewhere", pid=7, process="other.1"):
        """Let another process begin a message."""
        self.live(process, host=host, pid=pid, now=now, ttl=ttl)
        self.starter(process).start(message_id, now=now)


@pytest.fixture
def store():
    """Where crashes are remembered."""
    return Store()


@pytest.fixture
def quarantine(store, virtual):
    """This process's part; its thread is not started."""
    return Quarantine(store, max_crashes=2, window=3_600_000, every=BEAT, given_up=lambda: False)


def live_on(quarantine, virtual, beats):
    """Let time pass, with signs of life."""
    for _ in range(beats):
        quarantine.beat()
        virtual.time += BEAT


def test_an_ordinary_message_is_not_looked_up(quarantine, store):
    """Nobody is asked, and so nobody's outage is felt."""
    store.out = True
    assert quarantine.suspicion("a", redelivered=False) is None


def test_a_message_that_a_dead_process_had_begun_is_suspect(quarantine, store, virtual):
    """Once its liveness has lapsed and this process has been in touch for long enough to know."""
    store.stranger("a", now=virtual.time)
    live_on(quarantine, virtual, 3)
    assert quarantine.suspicion("a", redelivered=False) is None
    live_on(quarantine, virtual, 1)

    suspicion = quarantine.suspicion("a", redelivered=False)
    assert [crash.process for crash in suspicion.crashes] == ["other.1"]
    assert suspicion.wait == 0


def test_after_an_outage_the_living_are_not_taken_for_dead(quarantine, store, virtual, caplog):
    """All of them look dead to whoever comes first."""
    live_on(quarantine, virtual, 4)
    store.stranger("a", now=virtual.time)
    store.out = True
    live_on(quarantine, virtual, 2)
    virtual.time += 60_000
    store.out = False
    live_on(quarantine, virtual, 1)
    store.live("other.1", host="elsewhere", pid=7, now=virtual.time, ttl=TTL)
    live_on(quarantine, virtual, 2)

    assert quarantine.suspicion("a", redelivered=False) is None
    assert caplog.text.count("Crashes are not counted while their store is out") == 1


def test_who_was_frozen_itself_takes_nobody_for_dead(quarantine, store, virtual):
    """A gap in its own signs of life counts like an outage."""
    live_on(quarantine, virtual, 4)
    virtual.time += 60_000
    store.stranger("a", now=virtual.time - 2 * TTL)
    quarantine.beat()

    assert quarantine.suspicion("a", redelivered=False) is None


def test_a_process_that_leaves_knowingly_leaves_no_crash(quarantine, store, virtual):
    """What it had begun is no crash, and what it still begins is not marked."""
    quarantine.beat()
    with quarantine.watched(deliver("a"), None) as admitted:
        assert admitted
        quarantine.leave()
        quarantine.leave()
    with quarantine.watched(deliver("b"), None) as admitted:
        assert admitted

    assert store.inquest(now=virtual.time + 10**9) == 0


def test_a_sign_of_life_on_its_way_does_not_bring_it_back(quarantine, store, virtual):
    """It has left meanwhile."""
    quarantine.leave()
    quarantine.beat()
    assert store.inquest(now=virtual.time + 10**9) == 0
    assert store._alive == {}


def test_marks_that_could_not_be_removed_are_said_and_tried_again(quarantine, store, virtual, caplog):
    """By the next farewell."""
    quarantine.beat()
    store.out = True
    quarantine.leave()
    assert "could not be removed" in caplog.text
    store.out = False
    quarantine.leave()
    assert store._alive == {}


def test_a_running_message_is_marked_and_a_finished_one_is_not(quarantine, store, virtual):
    """Also if it raised."""
    quarantine.beat()
    with pytest.raises(ZeroDivisionError), quarantine.watched(deliver("a"), None):
        assert [crash.pid for crash, _ in store.history("a", since=0).open] == [os.getpid()]
        raise ZeroDivisionError
    assert store.history("a", since=0).open == ()


def test_a_suspect_is_marked_while_it_is_alone(quarantine, store, virtual):
    """And runs, if nobody else does."""
    quarantine.beat()
    with quarantine.watched(deliver("a"), Suspicion(())) as admitted:
        assert admitted
        assert store.history("a", since=0).open
    assert store.history("a", since=0).open == ()


def test_nobody_is_run_who_waits_while_the_process_ends(store, virtual):
    """Neither an ordinary message beside a suspect, nor a second suspect; and neither is marked."""
    ending = []
    quarantine = Quarantine(store, 2, 3_600_000, BEAT, lambda: bool(ending))
    with quarantine.watched(deliver("a"), Suspicion(())):
        ending.append(True)
        for suspicion in (None, Suspicion(())):
            with quarantine.watched(deliver("b"), suspicion) as admitted:
                assert not admitted
        assert store.history("b", since=0).open == ()


@pytest.mark.parametrize("judged", ["alive", "dead"])
def test_a_process_of_this_machine_is_asked_for(quarantine, store, virtual, monkeypatch, judged):
    """Alive, it has lost its connection to the broker: no reason to suspect anything; dead, everybody hears of it."""
    process = f"{module._namespace()}.other"
    store.stranger("a", now=virtual.time, host=module._HOST, pid=7, process=process)
    monkeypatch.setattr(processes, "alive", lambda pid, at: judged == "alive" or len(virtual.waits) < 2)
    suspicion = quarantine.suspicion("a", redelivered=True)

    if judged == "alive":
        assert suspicion is None
        assert sum(virtual.waits) == 500, "one that is just dying is waited for, and no longer"
    else:
        assert [crash.process for crash in suspicion.crashes] == [process]
        assert store.suspects(since=0) == {"a": 1}


def test_this_process_is_no_suspect_of_its_own(quarantine, store, virtual):
    """It runs the message, and gets it a second time."""
    quarantine.beat()
    with quarantine.watched(deliver("a"), None):
        assert quarantine.suspicion("a", redelivered=True) is None


def test_of_a_process_elsewhere_only_its_silence_tells(quarantine, store, virtual):
    """Until then, and until everybody has heard of it, the message waits."""
    store.stranger("a", now=virtual.time)
    live_on(quarantine, virtual, 1)
    suspicion = quarantine.suspicion("a", redelivered=True)
    assert (suspicion.crashes, suspicion.wait) == ((), (TTL - BEAT) + TTL + 2 * BEAT)

    store.live("other.1", host="elsewhere", pid=7, now=virtual.time - TTL, ttl=TTL)
    quarantine._in_touch_since = virtual.time - TTL
    over = quarantine.suspicion("a", redelivered=True)
    assert [crash.process for crash in over.crashes] == ["other.1"]


def test_while_the_store_is_out_messages_run_without_a_look(quarantine, store, virtual, caplog):
    """Which is said."""
    store.out = True
    assert quarantine.suspicion("a", redelivered=True) is None
    assert "runs without a look at its crashes" in caplog.text


def test_a_forgiven_message_is_no_suspect(quarantine, store, virtual, caplog):
    """Here at once, elsewhere once the store knows; an outage is no error of the message's."""
    for name in ("a", "b"):
        store.stranger(name, now=0, process=f"other.{name}")
    live_on(quarantine, virtual, 4)
    quarantine._suspects = {"a": 1, "b": 1}
    quarantine.forgive("a")
    assert quarantine.suspicion("a", redelivered=False) is None
    store.out = True
    quarantine.forgive("b")

    assert quarantine._suspects == {}
    assert "could not be forgiven" in caplog.text


def test_signs_of_life_are_given_until_it_leaves(store, caplog):
    """An error of its own stops them not."""
    quarantine = Quarantine(store, 2, 3_600_000, 5, lambda: False)
    quarantine.start()
    real, times = store.live, []

    def live(*args, **kwargs):
        times.append(1)
        if len(times) == 1:
            raise ZeroDivisionError
        real(*args, **kwargs)

    store.live = live
    wait_until(lambda: len(times) > 2, describe="signs of life after an error")
    quarantine.leave()
    (thread,) = [each for each in threading.enumerate() if each.name == "dramatiq-guard-quarantine"] or [None]
    if thread is not None:
        thread.join(5)
        assert not thread.is_alive()
    assert "the next one is tried all the same" in caplog.text
    assert store._alive == {}


def test_where_the_machine_tells_no_namespace_all_numbers_mean_the_same(monkeypatch):
    """Outside of Linux."""

    def refuse(path):
        raise OSError(path)

    module._namespace.cache_clear()
    try:
        monkeypatch.setattr(os, "stat", refuse)
        assert module._namespace() == ""
    finally:
        monkeypatch.undo()
        module._namespace.cache_clear()
    assert module._namespace()


def test_crashes_are_told_oldest_first(quarantine, store, virtual):
    """Those that are counted and those that are found now, in one line."""
    store._crashes["a"] = [Crash(virtual.time - 5, "x", "elsewhere", 1), Crash(virtual.time - 9, "y", "elsewhere", 2)]
    store.stranger("a", now=virtual.time - 7, ttl=0)
    quarantine._in_touch_since = virtual.time - TTL
    suspicion = quarantine.suspicion("a", redelivered=True)
    assert [crash.process for crash in suspicion.crashes] == ["y", "other.1", "x"]
