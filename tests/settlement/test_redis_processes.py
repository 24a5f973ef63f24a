"""Worker processes on Redis: killed, told to stop while everything is out, or only out of each other's sight."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dramatiq_guard.stores.connect import connect
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.waiting import wait_until
from tests.support.workers import Workers

from .redis_jobs import Ledger, guarded
from .redis_world import World

APP = "tests.settlement.redis_worker"

#: The broker's heartbeat timeout in milliseconds, and the seconds after which a killed worker's messages must be back.
HEARTBEAT = 3_000
BACK_WITHIN = 13.0

#: The seconds that a worker may take to end: its jobs, and each thread's one call that is not answered.
OUT_WITHIN = 30.0


@pytest.fixture
def store() -> Iterator[PrivateValkey]:
    """The store of letters: another server than the broker's."""
    with PrivateValkey(aof=True) as server:
        yield server


@pytest.fixture
def world(own_valkey: PrivateValkey, store: PrivateValkey, tmp_path: Path) -> Iterator[World]:
    """Sends jobs and keeps the accounts; the workers are processes."""
    letters = connect(store.url).dead_letters
    sender = World(guarded(own_valkey.url, letters), Ledger(tmp_path / "runs"), own_valkey.url, letters)
    yield sender
    sender.broker.close()
    sender.broker.client.connection_pool.disconnect()
    sender.keys.close()
    letters.close()


@pytest.fixture
def environment(own_valkey: PrivateValkey, store: PrivateValkey, world: World) -> dict[str, str]:
    """What the workers' processes are told."""
    return {
        "JOBS_REDIS": own_valkey.url,
        "JOBS_LETTERS": store.url,
        "JOBS_LEDGER": str(world.ledger.path),
        "JOBS_HEARTBEAT": str(HEARTBEAT),
    }


def test_a_killed_workers_messages_are_back_soon(world: World, environment: dict[str, str]) -> None:
    """What a worker ran, had fetched and had delayed is another one's within the heartbeat timeout and ten seconds."""
    for n in range(2):
        world.send(world.jobs.stuck, f"run-{n}", attempts=2)
        world.send(world.jobs.plain, f"delayed-{n}", delay=4_000)
    with Workers(APP, threads=2, env=environment) as doomed:
        wait_until(lambda: world.ledger.runs.total() == 2, 10, lambda: world.ledger.runs)
        for n in range(2):
            world.send(world.jobs.plain, f"fetched-{n}")
        wait_until(lambda: sum(world.keys.stranded().values()) == 6, 10, world.keys.stranded)
        with Workers(APP, threads=2, env=environment):
            doomed.kill()
            wait_until(lambda: not world.missing(), BACK_WITHIN, lambda: (world.missing(), world.keys.stranded()))
            world.keys.wait_empty(5)
    assert world.ledger.runs == world.planned


def test_an_outage_does_not_make_the_living_look_dead(
    world: World, environment: dict[str, str], own_valkey: PrivateValkey
) -> None:
    """After an outage longer than the heartbeat timeout no process takes the other's jobs for a dead one's."""
    for n in range(4):
        world.send(world.jobs.plain, f"long-{n}", 7_000)
    with Workers(APP, processes=2, threads=2, env=environment):
        wait_until(lambda: world.ledger.runs.total() >= 4, 10)
        own_valkey.kill()
        threading.Event().wait(HEARTBEAT / 1000 + 1)
        own_valkey.start()
        world.keys.wait_empty()
    assert world.ledger.runs == world.planned


@pytest.mark.matrix
@pytest.mark.parametrize("seconds", [8, 14])
@pytest.mark.parametrize("how", ["stopped", "killed", "frozen"])
def test_the_matrix_of_outages_on_processes(
    how: str, seconds: float, world: World, environment: dict[str, str], own_valkey: PrivateValkey
) -> None:
    """Two processes at full load, an outage of several heartbeats: all is done as planned, and all threads live."""
    jobs = world.jobs
    for n in range(40):
        world.send((jobs.flaky, jobs.aflaky)[n % 2], f"flaky-{n}", attempts=4)
        world.send((jobs.doomed, jobs.adoomed)[n % 2], f"doomed-{n}")
        world.send((jobs.flaky, jobs.aflaky)[n % 2], f"delayed-{n}", attempts=2, delay=500 * n)
        world.send(jobs.plain, f"plain-{n}", 1_000)
    with Workers(APP, processes=2, threads=4, env=environment) as workers:
        wait_until(lambda: world.ledger.runs.total() > 60, 20, lambda: world.ledger.runs)
        {"stopped": own_valkey.stop, "killed": own_valkey.kill, "frozen": own_valkey.pause}[how]()
        threading.Event().wait(seconds)
        own_valkey.resume() if how == "frozen" else own_valkey.start()
        wait_until(lambda: not world.missing(), 60, world.missing)
        world.keys.wait_empty()
        assert not world.surplus()
        # Each process fetches twice as many jobs as it has threads, and these end when all threads are at one.
        world.planned["muster"] = 16
        for _ in range(16):
            jobs.muster.send(8)
        wait_until(lambda: not world.missing(), 10, lambda: (world.ledger.runs["muster"], workers.log))
    assert world.buried() == Counter(world.dying)
    assert world.keys.dead() == Counter(world.dying)


@pytest.mark.parametrize("how", ["frozen", pytest.param("killed", marks=pytest.mark.matrix)])
def test_a_worker_told_to_stop_while_all_is_out_ends_and_loses_nothing(
    how: str, world: World, environment: dict[str, str], own_valkey: PrivateValkey, store: PrivateValkey
) -> None:
    """With broker and store out it ends, and what it could not settle is run by the next one."""
    jobs = world.jobs
    for n in range(2):
        world.send(jobs.plain, f"ends-{n}", 2_000)
        world.send(jobs.doomed, f"doomed-{n}")
    for n in range(10):
        world.send(jobs.flaky, f"delayed-{n}", attempts=2, delay=4_000)
    with Workers(APP, threads=4, env=environment) as workers:
        wait_until(lambda: world.ledger.runs["ends-1"], 10)
        for server in (own_valkey, store):
            server.kill() if how == "killed" else server.pause()
        workers.term()
        assert workers.wait(OUT_WITHIN) == 0
    for server in (own_valkey, store):
        server.start() if how == "killed" else server.resume()
    with Workers(APP, threads=4, env=environment):
        wait_until(lambda: not world.missing(), 30, world.missing)
        world.keys.wait_empty()
    under_way = {"ends-0", "ends-1", "doomed-0", "doomed-1"}
    assert world.surplus().keys() <= under_way, "only what could not be settled runs again"
    assert world.buried() == Counter(world.dying)
