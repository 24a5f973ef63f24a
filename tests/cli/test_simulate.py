"""``simulate``: a policy on one's own numbers."""

from __future__ import annotations

import sys

NUMBERS = ("simulate", "--capacity", "50", "--arrivals", "30", "--outage", "5", "--processes", "2")


def test_policies_are_compared_on_the_given_numbers(call):
    """A table, and the requests at the downstream over time."""
    outcome = call(*NUMBERS, "--policy", "guard", "--policy", "oracle")

    assert outcome.code == 0
    assert "outage of 5 s: 30 jobs/s for 50 requests/s" in outcome.out
    assert "oracle" in outcome.out
    assert "× trouble" in outcome.out


def test_the_figures_are_to_be_had_as_json(call):
    """For programs."""
    outcome = call(*NUMBERS, "--policy", "guard", "--trouble", "flapping", "--json")

    assert outcome.code == 0
    (entry,) = outcome.document
    assert entry["figures"]["undone"] == 0
    assert entry["scenario"]["name"] == "flapping"


def test_a_queue_that_cannot_be_held_puts_its_messages_off(call):
    """One that others share; with a queue of its own next to nothing is."""
    put_offs = []
    for more in ((), ("--shared-queue",)):
        outcome = call(*NUMBERS, "--policy", "guard", "--json", *more)
        (entry,) = outcome.document
        assert entry["figures"]["undone"] == 0
        put_offs.append(entry["figures"]["put_offs"])

    assert 5 * put_offs[0] < put_offs[1]


def test_a_picture_is_written(call, tmp_path):
    """In the format of its suffix."""
    outcome = call(*NUMBERS, "--policy", "guard", "--picture", str(tmp_path / "storm.svg"))

    assert outcome.code == 0
    assert "<svg" in (tmp_path / "storm.svg").read_text()


def test_a_load_that_nobody_can_serve_is_refused(call):
    """No policy works off a backlog without spare capacity."""
    outcome = call("simulate", "--capacity", "50", "--arrivals", "50")

    assert outcome.code == 2
    assert "Give --arrivals below --capacity" in outcome.err


def test_what_is_missing_is_named(call, monkeypatch):
    """With the command that installs it."""
    for name in [name for name in sys.modules if name.startswith("dramatiq_guard.simulation")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "simpy", None)
    outcome = call(*NUMBERS)

    assert outcome.code == 1
    assert "pip install 'dramatiq-guard[simulate]'" in outcome.err
