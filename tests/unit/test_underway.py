"""Which copy of a message a process has begun already, and what becomes of the copy that comes again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dramatiq_guard.settle import underway as module
from dramatiq_guard.settle.underway import Copy, Underway
from tests.unit.conftest import deliver


def channel(open_: bool = True):
    """A consumer, as far as its channel is concerned."""
    consumer = SimpleNamespace(open=open_)
    consumer.alive = lambda: consumer.open
    return consumer


def arrive(name, consumer, tag, **options):
    """A message over a channel, under a tag of that channel."""
    delivery = deliver(name, consumer, **options)
    delivery.message._tag = tag
    delivery.message.redelivered = False
    return delivery


@pytest.fixture
def lost():
    """A channel that is gone."""
    return channel(open_=False)


@pytest.fixture
def fresh():
    """The channel after it."""
    return channel()


def test_what_was_never_begun_here_is_new(fresh):
    """It runs: whoever had it before is somebody else."""
    copy = arrive("a", fresh, 1)
    assert Underway().take_over(copy) == (Copy.NEW, copy)


def test_a_run_that_goes_on_takes_the_place_of_the_copy(lost, fresh):
    """It will settle under the copy's tag, on the copy's channel."""
    underway = Underway()
    running = arrive("a", lost, 7)
    underway.enter(running)

    assert underway.take_over(arrive("a", fresh, 1)) == (Copy.RUNNING, running)
    assert (running.message._tag, running.consumer, running.message.redelivered) == (1, fresh, True)


def test_a_run_whose_channel_is_open_is_not_taken_for_the_copy(fresh):
    """Two messages with one id, both delivered: each is settled by itself."""
    underway = Underway()
    underway.enter(arrive("a", channel(), 7))
    copy = arrive("a", fresh, 1)

    assert underway.take_over(copy) == (Copy.NEW, copy)


def test_another_attempt_of_the_same_message_is_no_copy(lost, fresh):
    """Its options differ: a retry runs although the attempt before it hangs here."""
    underway = Underway()
    underway.enter(arrive("a", lost, 7, retries=1))
    copy = arrive("a", fresh, 1, retries=2)

    assert underway.take_over(copy) == (Copy.NEW, copy)


def test_an_end_whose_channel_is_gone_waits_for_the_copy(lost, fresh):
    """Parked, it settles as soon as the message comes again, and only once."""
    underway = Underway()
    ended = arrive("a", lost, 7)
    underway.enter(ended)

    assert underway.park(ended, lost)
    assert underway.take_over(arrive("a", fresh, 1)) == (Copy.ENDED, ended)
    assert ended.consumer is fresh
    underway.settle(ended)
    fresh.open = False
    assert underway.take_over(arrive("a", channel(), 2))[0] is Copy.ACKED


def test_a_run_that_has_taken_a_copy_over_is_not_parked(lost, fresh):
    """It has a channel again, and can settle."""
    underway = Underway()
    running = arrive("a", lost, 7)
    underway.enter(running)
    underway.take_over(arrive("a", fresh, 1))

    assert not underway.park(running, lost)
    assert not underway.leave(running, lost)


def test_a_run_that_is_not_entered_after_all_is_forgotten(lost, fresh):
    """Its copy runs."""
    underway = Underway()
    refused = arrive("a", lost, 7)
    underway.enter(refused)

    assert underway.leave(refused, lost)
    assert underway.leave(refused)  # it is gone already, and that is no error
    assert underway.take_over(arrive("a", fresh, 1))[0] is Copy.NEW


@pytest.mark.parametrize(("failed", "known_as"), [(False, Copy.ACKED), (True, Copy.NACKED)])
def test_what_was_settled_is_settled_in_the_same_way_again(lost, fresh, failed, known_as):
    """The ack was lost with its channel, and the next one may be lost, too."""
    underway = Underway()
    settled = arrive("a", lost, 7)
    underway.enter(settled)
    settled.message.failed = failed
    underway.settle(settled)

    assert underway.take_over(arrive("a", fresh, 1))[0] is known_as
    assert underway.take_over(arrive("a", channel(), 1))[0] is Copy.NEW  # the fresh channel is open: another message
    fresh.open = False
    assert underway.take_over(arrive("a", channel(), 1))[0] is known_as


def test_a_message_that_is_sent_anew_is_not_taken_for_one_that_was_settled(lost, fresh):
    """Its first delivery says so."""
    underway = Underway()
    underway.settle(arrive("a", lost, 7))
    underway.arrive(arrive("a", fresh, 1))
    underway.arrive(arrive("b", fresh, 2))

    assert underway.take_over(arrive("a", channel(), 1))[0] is Copy.NEW


def test_what_is_remembered_is_bounded(lost, fresh, monkeypatch):
    """The oldest is forgotten first."""
    monkeypatch.setattr(module, "_SETTLED", 2)
    monkeypatch.setattr(module, "_PARKED", 2)
    underway = Underway()
    for name in ("a", "b", "c"):
        underway.settle(arrive(name, lost, 7))
    for name in ("x", "y", "z"):
        parked = arrive(name, lost, 7)
        underway.enter(parked)
        underway.park(parked, lost)

    known = {name: underway.take_over(arrive(name, fresh, 1))[0] for name in "abcxyz"}
    assert known == {
        "a": Copy.NEW,
        "b": Copy.ACKED,
        "c": Copy.ACKED,
        "x": Copy.NEW,
        "y": Copy.ENDED,
        "z": Copy.ENDED,
    }


def test_two_runs_of_one_id_are_told_apart(lost, fresh):
    """Sent twice with the same id: the end of one leaves the other."""
    underway = Underway()
    one, two = arrive("a", lost, 7), arrive("a", lost, 8)
    underway.enter(one)
    underway.enter(two)
    underway.leave(one)

    assert underway.take_over(arrive("a", fresh, 1)) == (Copy.RUNNING, two)
