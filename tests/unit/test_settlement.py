"""The settle barrier: what a message's end owes is done, once, or the message stays."""

from __future__ import annotations

import logging

import pytest
from dramatiq.errors import ConnectionClosed

from dramatiq_guard.delivery import Due, Successor
from dramatiq_guard.errors import SettlementHeld, StoreError, StoreUnavailable
from dramatiq_guard.policy.decision import Decision, Step
from dramatiq_guard.settle.settlement import Settlement, Undecided, is_outage
from tests.unit.conftest import deliver


class Owing:
    """Somebody who owes something at a message's end.

    Attributes:
      errors(list): Raised by the parts, one after the other.
      done(list): The names of the parts that were performed.
    """

    def __init__(self, *names: str, errors: tuple[BaseException, ...] = ()) -> None:
        self.names = names
        self.errors = list(errors)
        self.done: list[str] = []
        self.noted = 0

    def note(self, delivery) -> None:
        self.noted += 1
        for name in self.names:
            delivery.dues.append(Due(name, lambda name=name: self.perform(name)))

    def perform(self, name) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.done.append(name)


class Deciding:
    """A decider that notes what it is asked, and answers with what the test has put there."""

    def __init__(self, error: Exception | None = None, fails: bool = False) -> None:
        self.error = error
        self.fails = fails
        self.asked: list[BaseException] = []

    def decide(self, delivery, error) -> None:
        self.asked.append(error)
        if self.error is not None:
            raise self.error
        if self.fails:
            delivery.message.fail()


def returned(name="job"):
    """A delivery whose function has returned."""
    delivery = deliver(name)
    delivery.entered = delivery.returned = True
    return delivery


def test_what_is_owed_is_done_once_and_in_its_order(noting):
    """However often the message is asked to be acked."""
    owing = Owing("letter", "callback")
    settlement, delivery = Settlement(None, (owing,), None), returned()

    assert settlement.settle(delivery, noting())
    assert settlement.settle(delivery, noting())
    assert (owing.noted, owing.done) == (1, ["letter", "callback"])


@pytest.mark.parametrize(
    "error", [StoreUnavailable("out"), ConnectionClosed(OSError("reset")), TimeoutError(), ConnectionResetError()]
)
def test_while_something_is_out_the_message_stays(noting, caplog, error):
    """What was done before stays done; it is said once."""
    owing = Owing("letter", "callback", errors=(error, error))
    settlement, delivery = Settlement(None, (owing,), None), returned()

    for _ in range(2):
        with pytest.raises(SettlementHeld) as held:
            settlement.settle(delivery, noting())
        assert not held.value.again
    assert settlement.settle(delivery, noting())
    assert owing.done == ["letter", "callback"]
    assert (delivery.holds, caplog.text.count("stays unacked")) == (2, 1)


def test_a_lost_connection_is_told_by_what_the_client_said(noting, caplog):
    """Dramatiq's wrapping says nothing."""
    error = ConnectionClosed("lost")
    error.__cause__ = BrokenPipeError("the server went away")
    settlement = Settlement(None, (Owing("retry", errors=(error,)),), None)
    with pytest.raises(SettlementHeld, match="BrokenPipeError"):
        settlement.settle(returned(), noting())

    assert "the server went away" in caplog.text


class LastResort:
    """Notes what is given up."""

    def __init__(self) -> None:
        self.given_up: list[tuple[str, BaseException]] = []

    def give_up(self, delivery, due, error) -> None:
        self.given_up.append((due.name, error))


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_part_that_fails_otherwise_is_tried_three_times(noting, failures):
    """Then it becomes a dead letter, and the others are done all the same."""
    error = StoreError("it says no")
    owing, last_resort = Owing("callback", "pipeline", errors=(error,) * failures), LastResort()
    settlement = Settlement(None, (owing,), last_resort)

    assert settlement.settle(returned(), noting())
    assert last_resort.given_up == ([("callback", error)] if failures == 3 else [])
    assert owing.done == (["pipeline"] if failures == 3 else ["callback", "pipeline"])


def test_without_a_last_resort_what_is_given_up_is_in_the_log(noting, caplog):
    """Nothing is dropped unseen."""
    settlement = Settlement(None, (Owing("callback", errors=(ValueError("no"),) * 3),), None)

    assert settlement.settle(returned(), noting())
    assert "callback failed 3 times and is given up: ValueError('no')" in caplog.text


def test_an_interrupt_of_somebody_elses_in_a_part_holds_the_message(noting):
    """The part may be half done, and is repeated."""
    owing = Owing("letter", errors=(KeyboardInterrupt(),))
    settlement, delivery = Settlement(None, (owing,), None), returned()
    with pytest.raises(SettlementHeld):
        settlement.settle(delivery, noting())

    assert settlement.settle(delivery, noting())
    assert owing.done == ["letter"]


def test_an_interrupt_while_it_is_noted_is_not_owed_twice(noting):
    """The next try notes it anew."""
    owing = Owing("letter")

    class Interrupted:
        times = 1

        def note(self, delivery):
            if self.times:
                self.times -= 1
                raise KeyboardInterrupt

    settlement, delivery = Settlement(None, (owing, Interrupted()), None), returned()
    with pytest.raises(KeyboardInterrupt):
        settlement.settle(delivery, noting())
    assert delivery.dues == []

    assert settlement.settle(delivery, noting())
    assert owing.done == ["letter"]


def test_one_who_cannot_say_what_it_owes_stops_nobody(noting, caplog):
    """It is in the log, with the message."""

    class Broken:
        def note(self, delivery):
            raise ZeroDivisionError

    owing = Owing("letter")
    assert Settlement(None, (Broken(), owing), None).settle(returned("job"), noting())
    assert owing.done == ["letter"]
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]
    assert "'message_id': 'job'" in caplog.text


def test_what_is_not_held_any_more_is_not_settled(noting):
    """Nothing is sent for it: the broker delivers it again."""
    owing, consumer = Owing("letter"), noting()
    consumer.lives = False

    assert not Settlement(None, (owing,), None).settle(returned(), consumer)
    assert owing.done == []


def test_where_nobody_can_say_whether_it_is_held_the_message_stays(virtual, noting):
    """Whatever the error is."""

    class Unsure(noting):
        def holds(self, delivery):
            raise ZeroDivisionError

    delivery = returned()
    with pytest.raises(SettlementHeld, match="asking whether it is still ours"):
        Settlement(None, (Owing("letter"),), None).settle(delivery, Unsure())
    assert delivery.held_since == virtual.time


def retried(delivery):
    """Decide that a delivery is retried."""
    delivery.decision = Decision(Step.RETRY, None, None, counted=True, exit_process=False, why="it failed")
    delivery.successor = Successor(delivery.message, 1_000)
    return delivery


def test_the_copy_that_carries_a_message_on_comes_last(noting):
    """After what else is owed; not at all if the message was failed after the decision."""
    consumer, owing = noting(), Owing("callback")
    delivery = retried(deliver("retried"))
    Settlement(Deciding(), (owing,), None).settle(delivery, consumer)
    assert [due.name for due in delivery.dues] == ["callback", "retry"]
    assert consumer.heard == [("carry_on", "retried")]

    failed = retried(deliver("failed"))
    failed.message.fail()
    Settlement(Deciding(), (owing,), None).settle(failed, consumer)
    assert consumer.heard == [("carry_on", "retried")]


def test_what_arrives_undecided_is_decided_now(noting):
    """By the error that is there, or one that stands in for it; it is never simply acked."""
    decider = Deciding()
    interrupted = deliver("interrupted")
    interrupted.entered = True
    Settlement(decider, (), None).settle(interrupted, noting())
    raising = deliver("raising")
    raising.message.stuff_exception(error := ValueError("x"))
    Settlement(decider, (), None).settle(raising, noting())

    assert isinstance(decider.asked[0], Undecided)
    assert decider.asked[1:] == [error]


@pytest.mark.parametrize("known", ["returned", "skipped", "decision", "failed", "another's skip"])
def test_what_is_decided_is_not_decided_again(noting, known):
    """Nor what another middleware has skipped before the actor was reached."""
    decider, delivery = Deciding(), deliver()
    delivery.entered = known != "another's skip"
    if known == "failed":
        delivery.message.fail()
    elif known == "decision":
        delivery.decision = Decision(Step.GIVE_UP, "permanent", None, counted=True, exit_process=False, why="no")
    elif known != "another's skip":
        setattr(delivery, known, True)

    assert Settlement(decider, (), None).settle(delivery, noting())
    assert decider.asked == []


@pytest.mark.parametrize(
    "decider", [Deciding(fails=True), Deciding(error=ZeroDivisionError())], ids=["fails", "raises"]
)
def test_a_message_that_fails_after_all_is_nacked_instead(noting, decider):
    """Dramatiq has taken the branch that acks: it is told to take the other one."""
    delivery, owing = deliver(), Owing("letter")
    delivery.entered = True
    settlement = Settlement(decider, (owing,), None)
    with pytest.raises(SettlementHeld) as held:
        settlement.settle(delivery, noting())

    assert (held.value.again, delivery.message.failed, owing.done) == (True, True, [])
    assert settlement.settle(delivery, noting())
    assert owing.done == ["letter"]


def test_outages_are_told_by_their_names():
    """No client is imported for it, and subclasses count."""
    import pika.exceptions
    import redis.exceptions

    for error in (redis.exceptions.ReadOnlyError(), pika.exceptions.ChannelClosed(1, ""), BrokenPipeError()):
        assert is_outage(error)
    for error in (ValueError(), StoreError(), KeyError("ConnectionError")):
        assert not is_outage(error)
