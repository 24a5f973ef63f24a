"""What the demo sends."""

from __future__ import annotations

import dramatiq
import pytest

from dramatiq_guard.demo.plan import ALWAYS, KINDS, Job, Kind, after_the_fix, job_of, kind_of, manner_of, plan


def test_every_kind_is_sent_as_often_as_it_says():
    """The first job of each message, counted by kind, is what the kinds promise."""
    firsts = [job for job in plan() if job.after is None]

    assert {kind.name: sum(job.kind == kind.name for job in firsts) for kind in KINDS} == {
        kind.name: kind.count for kind in KINDS
    }


def test_names_are_unique_and_tell_the_kind():
    """The downstream knows a job by its name alone."""
    names = [job.name for job in plan()]

    assert len(set(names)) == len(names)
    assert all(kind_of(job.name) == job.kind for job in plan())


def test_a_job_that_ends_well_is_planned_with_one_request_more_than_it_is_refused():
    """The plan and the downstream's manners agree."""
    for job in plan():
        if job.ends == "done":
            assert job.requests == manner_of(job.name).refusals + 1


def test_a_job_that_dies_after_requests_is_refused_for_ever():
    """Nothing dies that the downstream would serve."""
    for job in plan():
        if job.ends == "dead" and job.requests:
            assert manner_of(job.name).refusals == ALWAYS


def test_a_job_stands_after_the_one_it_waits_for():
    """The accounting goes through the plan once, in order."""
    seen = set()
    for job in plan():
        assert job.after is None or job.after in seen
        seen.add(job.name)


def test_an_unknown_kind_is_refused_by_name():
    """A kind that the demo does not know is named, with those that it does."""
    with pytest.raises(ValueError, match=r"no kind 'odd'.*fine"):
        plan((Kind("odd", 1, ""),))


def test_a_replayed_job_is_done_with_one_more_request():
    """The fix turns a planned death into a planned success."""
    job = Job("a", "exhausted", "render_report", ends="dead", reason="exhausted", requests=3)

    assert after_the_fix(job, frozenset("a")) == Job("a", "exhausted", "render_report", requests=4)
    assert after_the_fix(job, frozenset()) == job


@pytest.mark.parametrize(
    ("actor", "args", "job"),
    [
        ("ship", ["fine-001"], "fine-001"),
        ("extract", ["pipeline-001.extract"], "pipeline-001.extract"),
        ("transform", ["pipeline-001"], "pipeline-001.transform"),
        ("thank", [{"args": ["on_success-001"]}, None], "on_success-001.thank"),
    ],
)
def test_the_job_is_read_from_the_message(actor, args, job):
    """Every message of the demo says which job it is about, whoever sent it."""
    assert job_of(actor, args) == job
    assert dramatiq.Message("default", actor, tuple(args), {}, {}).encode()
