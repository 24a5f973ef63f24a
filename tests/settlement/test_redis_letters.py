"""The store of letters is out, and the good jobs do not notice."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import dramatiq
import pytest

from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.postgres import PrivatePostgres
from tests.support.waiting import wait_until

from .redis_jobs import Ledger, guarded
from .redis_world import World

THREADS = 4


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[PrivateValkey | PrivatePostgres]:
    """The store of letters: another server than the broker's."""
    if request.param == "valkey":
        with PrivateValkey() as server:
            yield server
        return
    with PrivatePostgres() as database:
        apply_schema(database.url)
        yield database


@pytest.mark.parametrize(
    ("store", "seconds"),
    [
        ("valkey", 10),
        pytest.param("valkey", 20, marks=pytest.mark.matrix),
        pytest.param("postgres", 20, marks=[pytest.mark.matrix, pytest.mark.postgres]),
    ],
    indirect=["store"],
)
def test_a_store_of_letters_that_is_out_holds_up_no_good_job(
    store: PrivateValkey | PrivatePostgres, seconds: int, redis_url: str, tmp_path: Path
) -> None:
    """While the store is out, messages die and unknown actors are met, and the good jobs go on as without them.

    The good jobs alone need six tenths of what the threads can do before the store is back; all must be done by then.
    """
    written = connect(store.url).dead_letters
    world = World(guarded(redis_url, connect(store.url).dead_letters), Ledger(tmp_path / "runs"), redis_url)
    jobs = world.jobs
    with world.working(threads=THREADS):
        world.send(jobs.doomed, "doomed-before")
        wait_until(lambda: written.count() == 1, 10)
        store.pause()
        began = time.monotonic()
        for n in range(int(THREADS * seconds * 0.6 / 0.2)):
            world.send(jobs.plain, f"plain-{n}", 200)
            if n % 3 == 0:
                world.send(jobs.doomed, f"doomed-{n}")
            if n % 6 == 0:
                world.dying.add(f"unknown-{n}")
                world.broker.enqueue(
                    dramatiq.Message(
                        queue_name="default", actor_name="nobody", args=(f"unknown-{n}",), kwargs={}, options={}
                    )
                )
        try:
            wait_until(lambda: not world.missing(), began + seconds - time.monotonic(), world.missing)
            threading.Event().wait(began + seconds - time.monotonic())
        finally:
            store.resume()
        world.keys.wait_empty(60)
        assert not world.surplus()
        assert not world.dead_threads()
    assert Counter(letter.args[0] for letter in written.page(limit=500).letters) == Counter(world.dying)
    written.close()
