"""What is sent over a channel that is there, and over one that is gone; with a channel that notes what it is told."""

from __future__ import annotations

from types import SimpleNamespace

import dramatiq
import pika.exceptions
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker, _RabbitmqMessage
from dramatiq.errors import ConnectionClosed

from dramatiq_guard import host
from dramatiq_guard.delivery import delivery_of
from dramatiq_guard.errors import SettlementHeld
from dramatiq_guard.settle.rabbitmq_consumer import RabbitmqConsumer
from dramatiq_guard.wiring import stack_of


class Channel:
    """Dramatiq's consumer, its connection and its channel in one: what comes, and what is sent.

    Attributes:
      coming(list): What is delivered next: messages, ``None``, or errors.
      sent(list): The words and tags that the server hears.
    """

    def __init__(self, *coming) -> None:
        self.coming = list(coming)
        self.sent: list[tuple] = []
        self.known_tags: set[int] = set()
        self.is_open = True
        self.connection = self.channel = self
        self.error: Exception | None = None

    def __next__(self):
        found = self.coming.pop(0) if self.coming else None
        if isinstance(found, BaseException):
            raise found
        if found is not None:
            self.known_tags.add(found._tag)
        return found

    def _send(self, *what) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(what)

    def ack(self, message):
        self.known_tags.remove(message._tag)
        self._send("ack", message._tag)

    def nack(self, message):
        self.known_tags.remove(message._tag)
        self._send("nack", message._tag)

    def _nack(self, tag):
        self._send("nack", tag)

    def basic_nack(self, tag, requeue):
        self._send("requeue" if requeue else "nack", tag)

    def cancel(self):
        self._send("cancel")

    def add_callback_threadsafe(self, call):
        call()

    def process_data_events(self, time_limit):
        self._send("events")

    def close(self):
        self._send("close")


def message(name, tag, redelivered=False, **options):
    """A message as it comes over a channel."""
    return _RabbitmqMessage(redelivered, tag, dramatiq.Message("default", "job", (), {}, options, message_id=name))


@pytest.fixture
def stack(monkeypatch):
    """The wiring of a broker that is not connected; what would be published is in `published`."""
    stack = stack_of(RabbitmqBroker(url="amqp://127.0.0.1:1", confirm_delivery=True, middleware=[]))
    stack.published = []
    monkeypatch.setattr(
        host, "rabbitmq_publish_once", lambda broker, message, delay: stack.published.append((message, delay))
    )
    return stack


@pytest.fixture
def consuming(stack):
    """Makes consumers over channels to which messages come."""
    return lambda *coming: RabbitmqConsumer(Channel(*coming), stack, "default")


def lose(consumer):
    """Cut the channel of a consumer."""
    consumer.inner.is_open = False


def running(consumer):
    """Take the next message, and enter its function."""
    delivery = delivery_of(next(consumer))
    assert consumer.admits(delivery)
    return delivery


def test_a_message_is_acked_once(consuming):
    """However often the thread is asked to."""
    consumer = consuming(message("a", 1))
    delivery = running(consumer)
    delivery.returned = True
    consumer.ack(delivery.message)
    consumer.ack(delivery.message)

    assert consumer.inner.sent == [("ack", 1)]


def test_a_failed_message_is_nacked_and_the_mourners_are_told(consuming, stack):
    """Once the server has been told."""
    told = []
    stack.mourners = (SimpleNamespace(buried=lambda delivery: told.append((delivery, list(consumer.inner.sent)))),)
    consumer = consuming(message("a", 1))
    delivery = running(consumer)
    delivery.message.fail()
    consumer.nack(delivery.message)

    assert told == [(delivery, [("nack", 1)])]


def test_nothing_is_sent_over_a_channel_that_is_gone(consuming):
    """The same number is another message on the next one; the run settles there, when its message comes again."""
    old, new = consuming(message("a", 7)), consuming(message("b", 1), message("a", 2, redelivered=True))
    delivery = running(old)
    delivery.returned = True
    lose(old)
    old.ack(delivery.message)
    assert old.inner.sent == []

    assert delivery_of(next(new)).message_id == "b"
    assert next(new) is None
    assert new.inner.sent == [("ack", 2)]


def test_a_run_that_goes_on_settles_on_the_copy(consuming):
    """It is delivered again while it runs: the copy does not run."""
    old, new = consuming(message("a", 7)), consuming(message("a", 2, redelivered=True))
    delivery = running(old)
    lose(old)
    assert next(new) is None

    delivery.returned = True
    delivery.consumer.ack(delivery.message)
    assert (old.inner.sent, new.inner.sent) == ([], [("ack", 2)])


def test_a_run_that_is_taken_over_as_it_ends_settles_again(consuming, stack, monkeypatch):
    """Its end met the old channel, and the copy had just come."""
    old, new = consuming(message("a", 7)), consuming(message("a", 2, redelivered=True))
    delivery = running(old)
    lose(old)
    monkeypatch.setattr(stack.settlement, "settle", lambda *_: next(new))
    with pytest.raises(SettlementHeld) as held:
        old.ack(delivery.message)

    assert held.value.again
    assert delivery.consumer is new


@pytest.mark.parametrize("word", ["ack", "nack"])
def test_what_was_settled_and_comes_again_is_settled_again(consuming, word):
    """The ack was lost with the channel; it does not run."""
    old, new = consuming(message("a", 7)), consuming(message("a", 2, redelivered=True))
    delivery = running(old)
    if word == "nack":
        delivery.message.fail()
    getattr(old, word)(delivery.message)
    lose(old)

    assert next(new) is None
    assert new.inner.sent == [(word, 2)]


def test_what_another_process_had_begun_runs(consuming):
    """Nothing is known of it here."""
    assert next(consuming(message("a", 2, redelivered=True))).message_id == "a"


def test_a_prefetched_message_whose_channel_is_gone_is_not_run(consuming, stack):
    """It is delivered again, to whoever; a channel that comes back does not make it ours."""
    consumer = consuming(message("a", 1))
    delivery = delivery_of(next(consumer))
    lose(consumer)

    assert not consumer.admits(delivery)
    assert not consumer.holds(delivery)


def test_a_copy_that_another_has_overtaken_is_not_run(consuming, stack, monkeypatch):
    """And is not underway."""
    consumer = consuming(message("a", 1))
    delivery = delivery_of(next(consumer))
    monkeypatch.setattr(stack.forks, "admits", lambda _: False)

    assert not consumer.admits(delivery)
    assert stack.underway._running == {}


def test_an_error_of_the_protocol_counts_as_a_lost_connection(consuming):
    """Whichever it is: the barrier, or Dramatiq, tries again."""
    consumer = consuming(message("a", 1), pika.exceptions.AMQPHeartbeatTimeout())
    delivery = running(consumer)
    delivery.returned = True
    with pytest.raises(ConnectionClosed):
        next(consumer)
    consumer.inner.error = pika.exceptions.ChannelWrongStateError()
    for call in (lambda: consumer.ack(delivery.message), consumer.close):
        with pytest.raises(ConnectionClosed):
            call()


def test_once_the_end_has_begun_it_consumes_no_more_and_the_heart_beats(consuming, stack):
    """What pika has buffered goes back."""
    consumer = consuming(message("a", 1))
    stack.draining = True

    assert (next(consumer), next(consumer)) == (None, None)
    assert consumer.inner.sent == [("cancel",), ("events",), ("events",)]
    assert consumer.drained


def test_what_is_still_ours_is_handed_back(consuming):
    """In its order; what is settled, or came over another channel, is not."""
    other = consuming(message("x", 1))
    foreign = next(other)
    consumer = consuming(message("a", 1), message("b", 2), message("c", 3))
    messages = [next(consumer) for _ in range(3)]
    running_ = delivery_of(messages[1])
    running_.returned = True
    consumer.ack(messages[1])

    assert consumer.hand_back([*messages, foreign]) == 2
    assert consumer.inner.sent == [("ack", 2), ("requeue", 1), ("requeue", 3)]
    assert consumer.hand_back(messages) == 0


def test_a_delayed_message_is_moved_and_then_acked(consuming, stack):
    """To its own queue, without its time."""
    delayed = _RabbitmqMessage(
        False, 1, dramatiq.Message("default.DQ", "job", (), {}, {"eta": 5, "kept": 1}, message_id="a")
    )
    consumer = consuming(delayed)
    next(consumer)
    consumer.promote(delayed)

    ((copy, delay),) = stack.published
    assert (copy.queue_name, copy.options, delay) == ("default", {"kept": 1}, None)
    assert consumer.inner.sent == [("ack", 1)]


def test_a_delayed_message_whose_channel_is_gone_is_not_moved(consuming, stack):
    """It is delivered again, and moved then."""
    consumer = consuming(message("a", 1))
    delayed = next(consumer)
    lose(consumer)
    with pytest.raises(ConnectionClosed):
        consumer.promote(delayed)

    assert stack.published == []


def test_a_move_whose_ack_was_lost_is_not_made_twice(consuming, stack):
    """It comes again on the next channel, and is only acked."""
    old, new = consuming(message("a", 1)), consuming(message("a", 9, redelivered=True))
    delayed = next(old)
    old.inner.error = pika.exceptions.StreamLostError()
    with pytest.raises(ConnectionClosed):
        old.promote(delayed)
    lose(old)

    assert next(new) is None
    assert new.inner.sent == [("ack", 9)]
    assert len(stack.published) == 1


def test_a_publish_is_no_enqueue_of_the_applications(consuming, stack, monkeypatch):
    """It is a copy of a message that lives already, on this thread and until it is sent."""
    seen = []
    monkeypatch.setattr(
        host, "rabbitmq_publish_once", lambda *_: seen.append(stack.forks._local.__dict__.get("publishing"))
    )
    consumer = consuming()
    consumer.publish(dramatiq.Message("default", "job", (), {}, {}), None)

    assert seen == [True]
    assert not stack.forks._local.publishing
