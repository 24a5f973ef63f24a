"""A worker is killed between any two lines that write, and an outsider counts what it has done.

A small part of the matrix; `nox -s idempotency_matrix` runs all of it, and prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from .batches import Outcome, batches, run_batch
from .cells import POINTS, SOME, Cell, every_cell, expected
from .table import table_of
from .world import Servers

BROKERS = ("redis", "rabbitmq")

#: How many batches run beside each other.
_AT_ONCE = 2

#: Seconds for the first cell, which waits for all that run before it in the matrix.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def outcome(servers: Servers, server: Any, request: pytest.FixtureRequest) -> Iterator[Callable[[Cell], Outcome]]:
    """What came of a cell: they run beside each other, as each waits for leases most of the time."""
    wanted = [item.callspec.params["cell"] for item in request.session.items if _wants_a_cell(item)]
    here = replace(servers, rabbitmq=server)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        running = [(some, pool.submit(run_batch, some, here)) for some in batches(wanted)]
        batch_of = {cell: batch for some, batch in running for cell in some}
        yield lambda cell: batch_of[cell].result()[cell]
        pool.shutdown(cancel_futures=True)
    done = [batch.result() for _, batch in running if not batch.cancelled() and not batch.exception()]
    if len(wanted) > len(SOME):
        table = table_of({cell: each for batch in done for cell, each in batch.items()})
        with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
            print(f"\n\n{table}\n")


def _wants_a_cell(item: pytest.Item) -> bool:
    return "cell" in getattr(item, "fixturenames", ()) and item.path.parent.name == "kills"


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_a_worker_killed_at_a_point_repeats_no_more_than_is_promised(cell: Cell, outcome) -> None:
    """The gateway was called and has charged as often as expected, rows were committed once, the result is that of a
    charge, no message was lost, and the key is done."""
    assert not (wrong := outcome(cell).wrong), "\n".join(wrong)


@pytest.mark.matrix
@pytest.mark.parametrize("cell", every_cell(), ids=str)
def test_a_worker_killed_at_any_point_repeats_no_more_than_is_promised(cell: Cell, outcome) -> None:
    """The same, at every point, with every store and broker."""
    assert not (wrong := outcome(cell).wrong), "\n".join(wrong)


def test_the_small_part_has_every_way_of_guarding_on_every_broker() -> None:
    """And both stores, and only cells of the matrix."""
    assert {cell.mode for cell in SOME} == set(POINTS) - {"park"}
    assert {(cell.mode, cell.broker) for cell in SOME} >= set(
        product(set(POINTS) - {"retried", "busy", "park"}, BROKERS)
    )
    assert {(cell.store, cell.broker) for cell in SOME} == set(product(("redis", "postgresql"), BROKERS))
    assert set(SOME) <= set(every_cell())


def test_what_is_promised() -> None:
    """One charge wherever the key is passed on, one row wherever it commits with the key; two only without, and none
    only where a person is asked."""
    for cell in every_cell():
        due = expected(cell)
        if cell.mode not in ("none", "lease", "park"):
            assert (1,) == due.charges
        assert (0 in due.charges) <= bool(due.letters)
        assert due.rows == (cell.mode in ("atomic", "inbox"))
    doubled = {(cell.mode, cell.point) for cell in every_cell() if 2 in expected(cell).charges}
    assert doubled == {
        *(("none", point) for point in POINTS["none"]),  # after an ack only where it may not have been sent any more
        ("lease", "after-effect"),
        ("lease", "before-complete"),
    }
