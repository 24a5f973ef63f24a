"""The judgement: from ledgers and letters to what became of each message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_guard.demo.accounting import Fate, Fault, Letter, Request, account, promises, requests, rows
from dramatiq_guard.demo.plan import Job

DONE = Job("a", "fine", "ship")
DEAD = Job("a", "permanent", "import_row", ends="dead", reason="permanent", requests=1)


def asked(*statuses, job="a", pid=1):
    """Requests for one job, each with an incident of its own."""
    return [Request(job, status, f"<{job}#{number}>", pid) for number, status in enumerate(statuses, 1)]


def judge(job, seen=(), letters=(), **where):
    """Judge a single job."""
    (found,) = account([job], seen, letters, **where)
    return found.fate, found.faults


def test_a_message_served_as_planned_is_done():
    """What the downstream served once, after as many requests as planned, is done and without fault."""
    assert judge(DONE, asked(200)) == (Fate.DONE, frozenset())


def test_a_message_that_is_nowhere_is_lost():
    """No service, no letter, no place in a queue: lost, even where it was tried."""
    assert judge(DONE) == (Fate.LOST, {Fault.LOST})
    assert judge(DONE, asked(503)) == (Fate.LOST, {Fault.LOST})


def test_a_message_in_its_queue_waits_and_one_that_a_worker_keeps_is_stranded():
    """The queue is a place to be; the hands of a worker that does nothing are not."""
    assert judge(DONE, waiting=frozenset("a")) == (Fate.WAITING, {Fault.STILL_WAITING})
    assert judge(DONE, held=frozenset("a")) == (Fate.STRANDED, {Fault.STRANDED})


def test_a_served_message_is_done_wherever_its_body_still_lies():
    """Between the work and the ack the body is still in the broker: that is no second fate."""
    assert judge(DONE, asked(200), waiting=frozenset("a")) == (Fate.DONE, frozenset())


def test_a_message_served_twice_is_doubled():
    """Each service beyond the first is a fault, and so is the request that led to it."""
    assert judge(DONE, asked(200, 200)) == (Fate.DONE, {Fault.DOUBLED, Fault.NEEDLESS})


def test_a_message_that_was_served_and_also_died_is_doubled():
    """One message has one end."""
    fate, faults = judge(DONE, asked(200), [Letter("a", "exhausted", "<a#1>")])

    assert (Fate.DEAD, True) == (fate, Fault.DOUBLED in faults)


def test_what_a_killed_worker_asked_for_may_be_asked_for_again():
    """A worker that was killed before its ack explains a second request, but not a third."""
    twice = asked(200, pid=7) + asked(200, pid=8)

    assert judge(DONE, twice, killed=frozenset({7})) == (Fate.DONE, frozenset())
    assert Fault.DOUBLED in judge(DONE, twice + asked(200, pid=9), killed=frozenset({7}))[1]


def test_the_death_that_a_killed_worker_wrote_down_counts():
    """A letter that was written before the kill names an answer that the killed worker got."""
    job = Job("a", "exhausted", "render_report", ends="dead", reason="exhausted", requests=2)
    seen = [*asked(500, pid=8), Request("a", 500, "<a#2>", 7)]

    assert judge(job, seen, [Letter("a", "exhausted", "<a#2>")], killed=frozenset({7})) == (Fate.DEAD, frozenset())


def test_a_letter_may_name_the_answer_after_which_its_worker_was_killed():
    """A worker wrote the letter, was killed before its nack, and the message died once more; of an answer before that
    one, or of one that another worker got, the letter may not speak."""
    seen = [Request("a", 422, "<a#1>", 7), Request("a", 422, "<a#2>", 8)]

    assert judge(DEAD, seen, [Letter("a", "permanent", "<a#1>")], killed=frozenset({7})) == (Fate.DEAD, frozenset())
    assert Fault.NO_FINAL_ERROR in judge(DEAD, seen, [Letter("a", "permanent", "<a#1>")], killed=frozenset({9}))[1]


def test_a_planned_death_needs_its_reason_and_its_final_error():
    """The letter must give the reason code that was planned and name the answer that ended it."""
    assert judge(DEAD, asked(422), [Letter("a", "permanent", "… <a#1> …")]) == (Fate.DEAD, frozenset())
    assert judge(DEAD, asked(422), [Letter("a", "exhausted", "<a#1>")])[1] == {Fault.WRONG_REASON}
    assert judge(DEAD, asked(422), [Letter("a", None, "<a#1>")])[1] == {Fault.NO_REASON}


def test_the_error_of_an_earlier_attempt_is_not_the_final_error():
    """Evidence of the last attempt but one does not say how the message ended."""
    job = Job("a", "exhausted", "render_report", ends="dead", reason="exhausted", requests=2)

    assert judge(job, asked(500, 500), [Letter("a", "exhausted", "<a#1>")])[1] == {Fault.NO_FINAL_ERROR}


def test_a_hopeless_request_that_is_repeated_is_needless():
    """A permanent error is asked about once."""
    assert judge(DEAD, asked(422, 422), [Letter("a", "permanent", "<a#2>")])[1] == {Fault.NEEDLESS}


def test_giving_up_too_early_is_a_fault():
    """A message whose retries were not all made was not given its chance."""
    job = Job("a", "exhausted", "render_report", ends="dead", reason="exhausted", requests=3)

    assert judge(job, asked(500, 500), [Letter("a", "exhausted", "<a#2>")])[1] == {Fault.TOO_FEW}


def test_a_message_that_should_be_done_may_not_die():
    """A letter for work that the downstream would have done is a fault, however well explained."""
    assert judge(DONE, asked(503), [Letter("a", "exhausted", "<a#1>")])[1] == {Fault.NOT_DONE}


@pytest.mark.parametrize(("first", "fate"), [((200,), Fate.LOST), ((503,), Fate.NOT_DUE)])
def test_a_later_stage_is_due_once_the_former_is_done(first, fate):
    """A stage that never came is lost after its predecessor's success, and not due otherwise."""
    jobs = [Job("a", "pipeline", "extract"), Job("b", "pipeline", "transform", after="a")]

    assert account(jobs, asked(*first), [])[1].fate is fate


def test_a_failure_callback_is_due_once_its_message_is_dead():
    """An apology that was never made is lost only where there was something to apologise for."""
    jobs = [
        Job("a", "on_failure", "book_flight", ends="dead", reason="exhausted"),
        Job("b", "on_failure", "apologise", after="a", on="dead"),
    ]
    letters = [Letter("a", "exhausted", "<a#1>")]

    assert account(jobs, asked(500), letters)[1].fate is Fate.LOST
    assert account(jobs, asked(200), [])[1].fate is Fate.NOT_DUE


def test_a_refused_message_was_never_promised():
    """The producer answers for what the broker took, or may have taken."""
    a = {"name": "a", "kind": "fine", "actor": "ship"}
    b = {"name": "b", "kind": "fine", "actor": "ship"}
    ledger = [
        {"event": "promised", "job": a, "message_id": "1"},
        {"event": "refused", "name": "a", "error": "ConnectionError()"},
        {"event": "promised", "job": b, "message_id": "2"},
    ]

    assert [job.name for job in promises(ledger)] == ["b"]


def test_only_requests_are_read_from_the_downstreams_ledger():
    """The ledger also notes when the downstream was fixed."""
    line = {"event": "request", "at": 1, "job": "a", "status": 200, "incident": "<a#1>", "pid": 4}

    assert requests([{"event": "fixed", "at": 0}, line]) == [Request("a", 200, "<a#1>", 4, 1)]


def test_rows_sum_up_by_kind():
    """A row counts fates and faults, and plans requests only for what was due."""
    jobs = [Job("a", "pipeline", "extract"), Job("b", "pipeline", "transform", after="a"), Job("c", "fine", "ship")]
    pipeline, fine = rows(account(jobs, asked(503, job="c"), []))

    assert (pipeline.fates, pipeline.planned) == ({Fate.LOST: 1, Fate.NOT_DUE: 1}, 1)
    assert (fine.faults, fine.requests) == ({Fault.LOST: 1}, 1)


names = st.sampled_from("abcd")


@given(
    seen=st.lists(st.builds(Request, names, st.sampled_from([200, 422, 503]), st.just("<x>"), st.integers(1, 3))),
    letters=st.lists(st.builds(Letter, names, st.sampled_from([None, "permanent", "exhausted"]), st.just("<x>"))),
    waiting=st.frozensets(names),
    held=st.frozensets(names),
    killed=st.frozensets(st.integers(1, 3)),
)
def test_no_promise_is_passed_over(seen, letters, waiting, held, killed):
    """Whatever the evidence, each job gets one account, and one that is nowhere never passes as kept."""
    jobs = [DONE, Job("b", "fine", "ship"), Job("c", "fine", "ship", after="b"), Job("d", "fine", "ship", requests=3)]
    found = account(jobs, seen, letters, waiting=waiting, held=held, killed=killed)

    assert [entry.job for entry in found] == jobs
    for entry in found:
        somewhere = {letter.job for letter in letters} | {request.job for request in seen if request.status == 200}
        if entry.job.name not in somewhere | waiting | held:
            assert entry.fate is Fate.NOT_DUE or Fault.LOST in entry.faults
        if entry.fate in {Fate.LOST, Fate.STRANDED, Fate.WAITING}:
            assert entry.faults
