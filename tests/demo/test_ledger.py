"""The ledgers and the downstream that keeps one of them."""

from __future__ import annotations

import pytest

from dramatiq_guard.demo.downstream import Downstream
from dramatiq_guard.demo.ledger import Ledger, read_ledger


@pytest.fixture
def path(tmp_path):
    """Where a ledger is kept."""
    return tmp_path / "ledger.jsonl"


def test_a_ledger_is_read_as_it_was_written(path):
    """Entries come back in order, over several writers."""
    for number in range(2):
        with Ledger(path) as ledger:
            ledger.write(number=number)

    assert read_ledger(path) == [{"number": 0}, {"number": 1}]


def test_a_torn_last_line_is_no_line(path):
    """A writer that was killed in the middle of a line leaves the ledger readable."""
    path.write_bytes(b'{"number":0}\n{"num')

    assert read_ledger(path) == [{"number": 0}]


def test_a_ledger_that_nobody_wrote_is_empty(path):
    """A reader may come before the writer."""
    assert read_ledger(path) == []


def answers(downstream, job, count):
    """The statuses of some requests for one job."""
    return [downstream.answer(job, pid=1)[0] for _ in range(count)]


def test_the_downstream_treats_each_kind_in_its_manner(path):
    """Transient jobs are refused once or twice, hopeless ones for ever, the others not at all."""
    with Ledger(path) as ledger:
        downstream = Downstream(ledger)

        assert answers(downstream, "fine-000", 2) == [200, 200]
        assert answers(downstream, "transient-000", 2) == [503, 200]
        assert answers(downstream, "transient-001", 3) == [503, 503, 200]
        assert answers(downstream, "permanent-000", 3) == [422, 422, 422]


def test_a_client_that_comes_back_too_early_is_refused_again(path):
    """The wait that a Retry-After asks for is not shortened by asking again."""
    with Ledger(path) as ledger:
        downstream = Downstream(ledger)
        status, _, wait = downstream.answer("rate_limited-000", pid=1)

        assert (status, wait) == (429, 2)
        assert answers(downstream, "rate_limited-000", 1) == [429]


def test_the_fix_serves_what_was_refused_for_ever(path):
    """After the fix there are no hopeless jobs; a passing refusal still passes as before."""
    with Ledger(path) as ledger:
        downstream = Downstream(ledger)
        downstream.answer("permanent-000", pid=1)
        downstream.fix()

        assert answers(downstream, "permanent-000", 1) == [200]
        assert answers(downstream, "transient-000", 1) == [503]


def test_every_answer_is_written_down_and_names_itself(path):
    """Two answers to one job can be told apart in any error text."""
    with Ledger(path) as ledger:
        downstream = Downstream(ledger)
        incidents = [downstream.answer("permanent-000", pid=pid)[1] for pid in (1, 2)]

    entries = read_ledger(path)
    assert [entry["incident"] for entry in entries] == incidents == ["<permanent-000#1>", "<permanent-000#2>"]
    assert [entry["pid"] for entry in entries] == [1, 2]
