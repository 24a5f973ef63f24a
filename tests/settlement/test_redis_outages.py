"""Redis goes away and comes back, and every job is done as often as planned (C38, C73).

Each fault meets jobs at every moment that matters at once: as they raise, at the barrier before their retry, before
their ack and nack, as a delayed one falls due, and while 80 are delayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until

from .redis_jobs import Gate, Ledger, guarded, stock
from .redis_world import World, gating

MOMENTS = (
    "raise/flaky",
    "raise/aflaky",
    "before-retry/flaky",
    "before-retry/aflaky",
    "before-ack/plain",
    "before-ack/aplain",
    "before-nack/doomed",
    "before-nack/adoomed",
    "before-promote",
)


def stopped(server: PrivateValkey, proxy: FaultyProxy, seconds: float, gate: Gate) -> None:
    """Stopped as an operator does, and started again."""
    server.stop()
    gate.opened.set()
    threading.Event().wait(seconds)
    server.start()


def killed(server: PrivateValkey, proxy: FaultyProxy, seconds: float, gate: Gate) -> None:
    """Killed, and started again on its append-only file."""
    server.kill()
    gate.opened.set()
    threading.Event().wait(seconds)
    server.start()


def frozen(server: PrivateValkey, proxy: FaultyProxy, seconds: float, gate: Gate) -> None:
    """Frozen for longer than the client waits: what was sent meanwhile is carried out when it thaws."""
    server.pause()
    gate.opened.set()
    threading.Event().wait(seconds)
    server.resume()


def cut(server: PrivateValkey, proxy: FaultyProxy, seconds: float, gate: Gate) -> None:
    """All connections are cut again and again, while commands are under way on them."""
    proxy.delay(0.1)
    gate.opened.set()
    for _ in range(int(seconds / 0.7)):
        threading.Event().wait(0.7)
        proxy.cut()
    proxy.heal()


FAULTS: dict[str, Callable[[PrivateValkey, FaultyProxy, float, Gate], None]] = {
    "stopped": stopped,
    "killed": killed,
    "frozen": frozen,
    "cut": cut,
}


def load(world: World) -> None:
    """What is under way when the fault comes."""
    jobs = world.jobs
    for n in range(12):
        world.send((jobs.flaky, jobs.aflaky)[n % 2], f"flaky-{n}", attempts=4)
        world.send((jobs.plain, jobs.aplain)[n % 2], f"plain-{n}")
        world.send((jobs.doomed, jobs.adoomed)[n % 2], f"doomed-{n}")
    world.send(jobs.plain, "due", delay=100)
    for n in range(80):
        actor = (jobs.flaky, jobs.aflaky)[n % 2]
        world.send(actor, f"delayed-{n}", attempts=1 + n % 3, delay=1_000 + 100 * n)


def run(server: PrivateValkey, ledger: Path, fault: str, seconds: float, moments: tuple[str, ...]) -> None:
    """Let a fault meet jobs at these moments, and hold what became of them against the plan."""
    gate = Gate(*moments)
    letters = MemoryDeadLetters()
    with FaultyProxy(server.url) as proxy:
        world = World(guarded(proxy.url, letters), Ledger(ledger), server.url, letters, gate.reach)
        load(world)
        with gating(gate.reach), world.working(threads=10):
            wait_until(gate.full.is_set, 10, lambda: f"jobs at {gate.awaited}")
            FAULTS[fault](server, proxy, seconds, gate)
            world.check()


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [("killed", 8), ("frozen", 8), ("cut", 4), pytest.param("stopped", 11, marks=pytest.mark.matrix)],
)
def test_an_outage_costs_no_message_no_thread_and_no_attempt(
    fault: str, seconds: float, own_valkey: PrivateValkey, tmp_path: Path
) -> None:
    """Whatever the outage meets, afterwards nothing is lost, stranded or doubled, and all threads live."""
    run(own_valkey, tmp_path / "runs", fault, seconds, MOMENTS)


@pytest.mark.matrix
@pytest.mark.parametrize("seconds", [8, 14])
@pytest.mark.parametrize("moment", [*MOMENTS, "while delayed"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_matrix_of_outages(
    fault: str, moment: str, seconds: float, own_valkey: PrivateValkey, tmp_path: Path
) -> None:
    """The same, each fault at each moment by itself, short and long."""
    moments = () if moment == "while delayed" else (moment,)
    run(own_valkey, tmp_path / "runs", fault, seconds, moments)


def test_stock_dramatiq_loses_a_retry_that_an_outage_meets(own_valkey: PrivateValkey, tmp_path: Path) -> None:
    """The control: a job that fails while the broker is away is acked under stock Dramatiq, and that was it."""
    gate = Gate("raise/flaky")
    world = World(stock(own_valkey.url), Ledger(tmp_path / "runs"), own_valkey.url, reach=gate.reach)
    world.send(world.jobs.flaky, "flaky", attempts=4)
    with world.working(threads=2):
        wait_until(gate.full.is_set, 10)
        own_valkey.kill()
        gate.opened.set()
        threading.Event().wait(1)
        own_valkey.start()
        world.keys.wait_empty()
        assert world.ledger.runs == {"flaky": 1}
        assert not world.keys.dead(), "it is not among the dead, either"
