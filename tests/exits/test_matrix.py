"""Whatever a worker process is told, however often, and whatever its jobs are at: out in time, with nothing lost.

A small part of the matrix; `nox -s exit_matrix` runs all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from .cells import AT_ONCE, Outcome, Servers, run_cell
from .matrix import FACTORS, Cell, every_cell, expected, pairwise
from .table import PAGE, table_in

SOME = pairwise()


@pytest.fixture(scope="module")
def outcome(valkey, rabbitmq, request: pytest.FixtureRequest) -> Iterator[Callable[[Cell], Outcome]]:
    """What came of a cell: many run beside each other, as each waits for deadlines most of the time."""
    servers = Servers(valkey.url, rabbitmq.url)
    wanted = [item.callspec.params["cell"] for item in request.session.items if _wants_a_cell(item)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = {cell: pool.submit(run_cell, cell, servers) for cell in wanted}
        yield lambda cell: outcomes[cell].result()
        pool.shutdown(cancel_futures=True)


def _wants_a_cell(item: pytest.Item) -> bool:
    return "cell" in getattr(item, "fixturenames", ()) and item.path.name == "test_matrix.py"


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_c43_a_worker_that_is_told_to_stop_is_out_in_time_and_loses_nothing(cell: Cell, outcome) -> None:
    """The exit code says what happened; every message is finished once or back in its queue, no retry burnt, nothing
    dead, nothing left in an ack set."""
    assert not (wrong := outcome(cell).wrong), "\n".join(wrong)


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


def test_the_table_in_the_docs_is_of_all_cells() -> None:
    """It was written by a run of the whole matrix, in which every cell came out as expected."""
    for job, row in table_in(PAGE.read_text()).items():
        cells = [cell for cell in every_cell() if cell.job == job]
        assert str(expected(cells[0]).code) == row["exit code"]
        for target in FACTORS["target"]:
            count = len([cell for cell in cells if cell.target == target])
            assert f"{count} of {count}" == row[f"{target}"]
