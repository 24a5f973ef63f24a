"""Whatever a worker process is told, however often, and whatever its jobs are at: out in time, with nothing lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from .cells import Servers, run_cell
from .matrix import FACTORS, Cell, every_cell, expected, pairwise

#: How many cells run at once: most of the time they wait.
_AT_ONCE = 4 * (os.cpu_count() or 1)

SOME = pairwise()
REST = [cell for cell in every_cell() if cell not in SOME]


@pytest.fixture(scope="module")
def outcome(valkey, rabbitmq, request: pytest.FixtureRequest) -> Iterator[Callable[[Cell], list[str]]]:
    """What came of a cell: many run beside each other, as each waits for deadlines most of the time."""
    servers = Servers(valkey.url, rabbitmq.url)
    wanted = [item.callspec.params["cell"] for item in request.session.items if "outcome" in _fixtures(item)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        outcomes = {cell: pool.submit(run_cell, cell, servers) for cell in wanted}
        yield lambda cell: outcomes[cell].result()
        pool.shutdown(cancel_futures=True)


def _fixtures(item: pytest.Item) -> tuple[str, ...]:
    return tuple(getattr(item, "fixturenames", ()))


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_c43_a_worker_that_is_told_to_stop_is_out_in_time_and_loses_nothing(cell: Cell, outcome) -> None:
    """The exit code says what happened; every message is finished once or back in its queue, no retry burnt, nothing
    dead, nothing left in an ack set."""
    assert not (wrong := outcome(cell)), "\n".join(wrong)


@pytest.mark.matrix
@pytest.mark.parametrize("cell", REST, ids=str)
def test_all_other_cells(cell: Cell, outcome) -> None:
    """The same for every other way of telling, job, broker and number of processes."""
    assert not (wrong := outcome(cell)), "\n".join(wrong)


def test_every_two_values_meet_in_the_small_part() -> None:
    """Of each two factors, all values meet."""
    for one, values in FACTORS.items():
        for other, others in FACTORS.items():
            met = {(getattr(cell, one), getattr(cell, other)) for cell in SOME}
            assert one == other or len(met) == len(values) * len(others)


def test_what_is_expected_is_one_of_the_promised_codes() -> None:
    """0, 1 or 75; never 0 where a job was abandoned."""
    for cell in every_cell():
        assert expected(cell).code in {0, 1, 75}
        assert (expected(cell).code == 0) == (cell.job not in {"in C", "GIL held", "async blocking"})
