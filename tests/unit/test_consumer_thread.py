"""Who settles what, and on which thread; and what becomes of delayed messages that cannot be moved."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import Middleware
from dramatiq.worker import ConsumerThread, _WorkQueueItem

from dramatiq_guard import clock
from dramatiq_guard.errors import SettlementHeld
from dramatiq_guard.settle.consumer_thread import Settler
from tests.support.waiting import wait_until
from tests.unit.conftest import deliver

HELD = SettlementHeld("the store is out")


class OnConsumerThread(ConsumerThread):
    """A thread that Dramatiq would consume on, and that does one thing."""

    def __init__(self, call) -> None:
        threading.Thread.__init__(self, daemon=True)
        self.run = call


def on_a_consumer_thread(call) -> None:
    """Do something on a consumer's own thread."""
    thread = OnConsumerThread(call)
    thread.start()
    thread.join(10)


@pytest.fixture
def settler(broker):
    """A settler that is closed at the end."""
    settler = Settler(broker)
    yield settler
    settler.close()


@pytest.fixture
def consumer(noting):
    """A consumer that notes what it is told."""
    return noting(SimpleNamespace(draining=False))


def arrived(consumer, name="job", **options):
    """A message that is in flight."""
    delivery = deliver(name, consumer, **options)
    delivery.stack = SimpleNamespace(in_flight={id(delivery): delivery}, exit=SimpleNamespace(left_behind=[]))
    return delivery


def test_a_worker_thread_repeats_what_is_held_after_growing_waits(settler, consumer, virtual, caplog):
    """From 0.1 to 5 seconds; how long it took is said."""
    caplog.set_level("INFO")
    delivery = arrived(consumer)
    delivery.holds, delivery.held_since = 1, virtual.time
    consumer.raising = [HELD] * 8
    settler.post_process(None, delivery.message)

    assert consumer.heard == [("ack", "job")]
    assert virtual.waits == [100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]
    assert f"held for {sum(virtual.waits)} ms" in caplog.text
    assert (delivery.ended, delivery.stack.in_flight) == (True, {})


def test_a_failed_message_is_nacked(settler, consumer):
    """Also if it failed only while it was being acked."""
    delivery = arrived(consumer)

    class Failing(type(consumer)):
        def ack(self, message):
            message.fail()
            raise SettlementHeld("it failed after all", again=True)

    delivery.consumer = Failing()
    settler.post_process(None, delivery.message)

    assert delivery.consumer.heard == [("nack", "job")]


def test_once_shutdown_has_begun_nothing_is_repeated(settler, consumer, virtual):
    """The message stays unacked, and is named among those that are left behind."""
    delivery = arrived(consumer)
    consumer.raising = [HELD]
    settler.close()
    settler.post_process(None, delivery.message)

    assert (consumer.heard, virtual.waits) == ([], [])
    assert delivery.stack.exit.left_behind == ["job"]


def test_a_shutdown_cuts_a_wait_short(settler, consumer, virtual):
    """Whoever waits to repeat gives up."""
    delivery = deliver("job", consumer)  # of no stack
    consumer.raising = [HELD] * 3
    virtual.meanwhile = settler.close
    settler.post_process(None, delivery.message)

    assert (consumer.heard, virtual.waits) == ([], [100])


def test_an_unexpected_error_leaves_the_message_and_is_said(settler, consumer, caplog):
    """It will be redelivered; the thread goes on."""
    delivery = arrived(consumer)
    consumer.raising = [ZeroDivisionError()]
    settler.post_process(None, delivery.message)

    assert consumer.heard == []
    assert "stays unacked" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_an_interrupt_is_not_the_settlers(settler, consumer):
    """It leaves, and the message is in flight no more."""
    delivery = arrived(consumer)
    consumer.raising = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        settler.post_process(None, delivery.message)

    assert delivery.stack.in_flight == {}
    assert not delivery.ended


def test_a_consumer_thread_leaves_it_to_the_settler(settler, consumer, monkeypatch):
    """One that cannot be settled holds up no other."""
    monkeypatch.setattr("dramatiq_guard.settle.consumer_thread._FIRST_WAIT", 1)
    monkeypatch.setattr("dramatiq_guard.settle.consumer_thread._LONGEST_WAIT", 1)

    class Stubborn(type(consumer)):
        def ack(self, message):
            raise HELD

    stuck, broken, fine = arrived(Stubborn(), "stuck"), arrived(consumer, "broken"), arrived(consumer, "fine")
    consumer.raising = [ZeroDivisionError()]

    def settle():
        for delivery in (stuck, broken, fine):
            settler.post_process(None, delivery.message)

    on_a_consumer_thread(settle)
    wait_until(lambda: consumer.heard, describe="the message behind the stuck one")
    stuck.consumer = consumer
    wait_until(lambda: len(consumer.heard) == 2, describe="the one that was stuck")
    assert consumer.heard == [("ack", "fine"), ("ack", "stuck")]

    settler.close()
    settler._thread.join(10)
    assert not settler._thread.is_alive()


def test_at_shutdown_a_consumer_thread_tries_once_itself(settler, consumer):
    """The settler thread has ended."""
    settler.close()
    consumer.raising = [None, HELD]
    one, two = arrived(consumer, "one"), arrived(consumer, "two")
    on_a_consumer_thread(lambda: [settler.post_process(None, each.message) for each in (one, two)])

    assert consumer.heard == [("ack", "one")]


@pytest.fixture
def thread(broker, settler, consumer):
    """A consumer thread, adopted, that is not started."""
    thread = ConsumerThread(
        broker=broker, queue_name="default", prefetch=1, work_queue=broker.queues["default"], worker_timeout=10
    )
    thread.consumer = consumer
    settler.adopt(thread)
    return thread


def delay(thread, name, until):
    """Put a message into a thread's delay queue."""
    thread.delay_queue.put(_WorkQueueItem(until, deliver(name, thread.consumer).message))


def waiting(thread):
    """What is in a thread's delay queue, and what Dramatiq still waits for."""
    return sorted(item.message.message_id for item in thread.delay_queue.queue), thread.delay_queue.unfinished_tasks


def test_what_has_fallen_due_is_moved(thread, consumer, virtual):
    """The others stay."""
    delay(thread, "due", clock.now())
    delay(thread, "later", clock.now() + 1)
    thread.handle_delayed_messages()

    assert consumer.heard == [("promote", "due")]
    assert waiting(thread) == (["later"], 1)


def test_once_the_end_has_begun_nothing_is_moved(thread, consumer, virtual):
    """What is delayed goes back to the broker."""
    consumer.stack.draining = True
    delay(thread, "due", 0)
    thread.handle_delayed_messages()

    assert (consumer.heard, waiting(thread)) == ([], (["due"], 1))


def test_what_cannot_be_sent_but_is_still_ours_waits(thread, consumer, virtual, caplog):
    """It is said once; a new connection would bring all that is delayed again."""
    delay(thread, "due", 0)
    consumer.raising = [ConnectionClosed("blocked"), ConnectionClosed("blocked")]
    thread.handle_delayed_messages()
    thread.handle_delayed_messages()
    assert (consumer.heard, waiting(thread)) == ([], (["due"], 1))
    assert caplog.text.count("blocked") == 1

    thread.handle_delayed_messages()
    assert (consumer.heard, waiting(thread)) == ([("promote", "due")], ([], 0))


def test_an_interrupt_in_the_move_ends_no_thread(thread, consumer, virtual):
    """The message stays, and is moved the next time."""
    delay(thread, "due", 0)
    consumer.raising = [KeyboardInterrupt()]
    thread.handle_delayed_messages()
    assert (consumer.heard, waiting(thread)) == ([], (["due"], 1))

    thread.handle_delayed_messages()
    assert (consumer.heard, waiting(thread)) == ([("promote", "due")], ([], 0))


@pytest.mark.parametrize("error", [ConnectionClosed("gone"), ZeroDivisionError()])
def test_when_its_channel_is_gone_a_delayed_message_stays_and_dramatiq_reconnects(thread, consumer, virtual, error):
    """The error is Dramatiq's; nothing is lost from the queue on the way."""
    delay(thread, "due", 0)
    consumer.raising, consumer.lives = [error], False
    with pytest.raises(type(error)):
        thread.handle_delayed_messages()

    assert waiting(thread) == (["due"], 1)


def test_a_hook_that_is_hit_after_the_move_moves_nothing_twice(thread, consumer, broker, virtual, caplog):
    """It is on its queue: the thread goes on."""

    class Hit(Middleware):
        def after_ack(self, broker, message):
            raise KeyboardInterrupt

    broker.add_middleware(Hit())
    delay(thread, "due", 0)
    thread.handle_delayed_messages()

    assert (consumer.heard, waiting(thread)) == ([("promote", "due")], ([], 0))
    assert "had been moved" in caplog.text
