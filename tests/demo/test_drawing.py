"""The report as people and programs see it, and the progress before it."""

from __future__ import annotations

import io
import json

from rich.console import Console

from dramatiq_guard.demo.accounting import Letter, Request, account
from dramatiq_guard.demo.drawing import draw
from dramatiq_guard.demo.plan import Job
from dramatiq_guard.demo.progress import Lines, Live, Standing
from dramatiq_guard.demo.report import Group, Replayed, Report

FINE = Job("fine-000", "fine", "ship")
DEAD = Job("permanent-000", "permanent", "import_row", ends="dead", reason="permanent")
SERVED = [Request("fine-000", 200, "<fine-000#1>")]
REFUSED = [Request("permanent-000", 422, "<permanent-000#1>")]
LETTER = Letter("permanent-000", "permanent", "<permanent-000#1>")


def drawn(report):
    """What the report looks like on a wide page."""
    page = io.StringIO()
    draw(report, Console(file=page, width=160))
    return page.getvalue()


def accounts(seen=(), letters=(), **where):
    """The accounts of the two jobs."""
    return tuple(account([FINE, DEAD], seen, letters, **where))


def test_a_report_without_fault_says_so():
    """The last sentence is the answer."""
    report = Report(
        stock=False,
        accounts=accounts(SERVED + REFUSED, [LETTER]),
        groups=(Group(1, "permanent", "HTTPError: 422", "f00d"),),
        trace=("send default", "└─ process default"),
        seconds=7.2,
    )

    page = drawn(report)
    assert report.accounted
    assert page.rstrip().endswith("Every one of 2 messages is accounted for, and was tried as planned. (7 s)")
    assert "└─ process default" in page
    assert "HTTPError: 422" in page


def test_what_was_lost_is_named():
    """A lost message is called by its name, since nobody would ever find it."""
    report = Report(stock=True, accounts=accounts(REFUSED, [LETTER]), events=("the broker was stopped",))

    page = drawn(report)
    assert not report.accounted
    assert "1 of 2: lost" in page
    assert "    fine-000" in page
    assert "the broker was stopped" in page
    assert "There is nothing to replay the dead letters with" in page


def test_a_replay_that_left_something_behind_is_no_success():
    """All that was to be replayed must have been sent and be done."""
    kept = accounts(SERVED + REFUSED, [LETTER])

    assert Report(stock=False, accounts=kept, replayed=Replayed(1, 1, 0, kept)).accounted
    assert not Report(stock=False, accounts=kept, replayed=Replayed(2, 1, 0, kept)).accounted
    lost = accounts(REFUSED, [LETTER])
    assert not Report(stock=False, accounts=kept, replayed=Replayed(1, 1, 0, lost)).accounted


def test_a_run_that_sent_nothing_is_no_success():
    """Nothing to account for is no proof of anything."""
    assert not Report(stock=False, accounts=()).accounted


def test_the_document_names_every_miss():
    """A program finds each fault with its job."""
    document = json.loads(json.dumps(Report(stock=True, accounts=accounts(REFUSED, [LETTER])).as_dict()))

    assert document["misses"] == [
        {"job": "fine-000", "fate": "lost", "requests": 0, "planned": 1, "faults": ["lost"]},
    ]
    assert (document["messages"], document["fates"]["lost"], document["replay"]) == (2, 1, None)


def test_progress_is_told_in_lines_now_and_then():
    """Off a terminal, what happens gets a line, and so does every tenth look."""
    page = io.StringIO()
    with Lines(Console(file=page, width=160)) as lines:
        lines.say("started")
        for served in range(11):
            lines.show(Standing(promised=20, served=served))

    text = page.getvalue().splitlines()
    assert text[0] == "· started"
    assert [line.split(" · ")[1] for line in text[1:]] == ["0 served", "10 served"]


def test_progress_on_a_terminal_is_one_line_drawn_anew():
    """What stays is above it."""
    page = io.StringIO()
    with Live(Console(file=page, width=160, force_terminal=True)) as live:
        live.say("started")
        live.show(Standing(served=3))

    assert "started" in page.getvalue()
