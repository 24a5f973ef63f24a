"""What Dramatiq's RabbitMQ broker declares, and what its consumer does with delivery tags; no server is needed to
see it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import dramatiq
import pika.exceptions
import pytest
from dramatiq.brokers.rabbitmq import (
    DEAD_MESSAGE_TTL,
    MAX_ENQUEUE_ATTEMPTS,
    RabbitmqBroker,
    _RabbitmqConsumer,
    _RabbitmqMessage,
)
from dramatiq.errors import ConnectionClosed, DecodeError

from .rig import Recorder


class Channel:
    """Writes down what is asked of it; raises what it is told to when publishing."""

    is_open = True

    def __init__(self, error: Exception | None = None) -> None:
        self.declared: dict[str, dict[str, Any]] = {}
        self.published: list[dict[str, Any]] = []
        self.settled: list[tuple[str, int]] = []
        self.confirming = False
        self.error = error

    def queue_declare(self, *, queue: str, durable: bool, arguments: dict[str, Any]) -> None:
        self.declared[queue] = arguments

    def basic_publish(self, **arguments: Any) -> None:
        self.published.append(arguments)
        if self.error is not None:
            raise self.error

    def basic_ack(self, tag: int) -> None:
        self.settled.append(("ack", tag))

    def basic_nack(self, tag: int, *, requeue: bool) -> None:
        assert not requeue
        self.settled.append(("nack", tag))

    def basic_qos(self, *, prefetch_count: int) -> None:
        pass

    def consume(self, queue: str, *, inactivity_timeout: float) -> Iterator[tuple[Any, None, bytes]]:
        body = dramatiq.Message(queue, "fine", (), {}, {}).encode()
        for tag in range(1, 9):
            yield SimpleNamespace(delivery_tag=tag, redelivered=tag == 1), None, body

    def confirm_delivery(self) -> None:
        self.confirming = True

    def close(self) -> None:
        pass


class Connection:
    """A connection whose callbacks wait for somebody to run them, as on the consumer's own thread."""

    is_open = True

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.callbacks: list[Callable[[], None]] = []

    def channel(self) -> Channel:
        return self._channel

    def add_callback_threadsafe(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def run_callbacks(self) -> None:
        while self.callbacks:
            self.callbacks.pop(0)()

    def close(self) -> None:
        pass


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The connections made so far, each with one channel."""
    made: list[Connection] = []

    def connect(parameters: object) -> Connection:
        made.append(Connection(Channel()))
        return made[-1]

    monkeypatch.setattr("pika.BlockingConnection", connect)
    return made


def consume(broker: RabbitmqBroker) -> tuple[Any, Connection]:
    """A consumer and the connection of its own."""
    consumer = _RabbitmqConsumer(broker, "default", 8, 50)
    return consumer, consumer.connection


def test_a_dead_letter_queue_keeps_seven_days(connections: list[Connection]) -> None:
    """§2: the queue {queue}.XQ drops what is older than 7 days, so letters must not live there alone."""
    broker = RabbitmqBroker(middleware=[])
    broker.declare_queue("default", ensure=True)

    declared = connections[0]._channel.declared
    assert {"default", "default.DQ", "default.XQ"} == set(declared)
    assert {"x-message-ttl": DEAD_MESSAGE_TTL} == declared["default.XQ"]
    assert 7 * 86_400_000 == DEAD_MESSAGE_TTL


def test_queue_and_delay_queue_dead_letter_into_the_queues_own_xq(connections: list[Connection]) -> None:
    """§2: a nack routes to {queue}.XQ by the queue's dead-letter arguments, for the .DQ as well."""
    broker = RabbitmqBroker(middleware=[])
    broker.declare_queue("default", ensure=True)

    routing = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "default.XQ"}
    declared = connections[0]._channel.declared
    assert (routing, routing) == (declared["default"], declared["default.DQ"])


def test_after_ack_precedes_the_real_ack(connections: list[Connection]) -> None:
    """H10: ack and nack only schedule a callback on the consumer's connection, so after_ack is no proof that the
    broker knows."""
    consumer, connection = consume(RabbitmqBroker(middleware=[]))
    first, second = next(consumer), next(consumer)
    consumer.ack(first)
    consumer.nack(second)

    assert [] == connection._channel.settled
    connection.run_callbacks()
    assert [("ack", 1), ("nack", 2)] == connection._channel.settled


def test_a_stale_message_settles_an_innocent_of_the_same_number(connections: list[Connection]) -> None:
    """H19: tags restart at 1 after a reconnect, and a message of the former consumer nacks the same number there:
    deliveries are stamped with their consumer."""
    broker = RabbitmqBroker(middleware=[])
    former, _ = consume(broker)
    stale = next(former)
    present, connection = consume(broker)
    innocent = next(present)
    assert stale.message_id != innocent.message_id
    present.nack(stale)
    connection.run_callbacks()

    assert [("nack", 1)] == connection._channel.settled
    assert set() == present.known_tags
    present.ack(innocent)
    connection.run_callbacks()
    assert [("nack", 1)] == connection._channel.settled, "and the innocent's own ack is dropped"


def test_an_unknown_tag_is_dropped_with_a_warning(
    connections: list[Connection], caplog: pytest.LogCaptureFixture
) -> None:
    """H19: settling a message whose tag is not known does nothing but log, so the barrier hears of no failure and
    asks known_tags itself."""
    consumer, connection = consume(RabbitmqBroker(middleware=[]))
    message = next(consumer)
    consumer.known_tags.clear()
    consumer.ack(message)
    consumer.nack(message)

    assert [] == connection.callbacks
    assert ["Failed to ack message: not in known tags.", "Failed to nack message: not in known tags."] == [
        record.message for record in caplog.records
    ]


def test_the_consumer_has_the_names_that_we_use(connections: list[Connection]) -> None:
    """Private: a consumer has connection, channel, known_tags and queue_name, and its messages _tag and redelivered."""
    broker = RabbitmqBroker(middleware=[])
    consumer, connection = consume(broker)
    message = next(consumer)

    assert isinstance(message, _RabbitmqMessage)
    assert (1, True) == (message._tag, message.redelivered)
    assert {1} == consumer.known_tags
    assert connection is consumer.connection
    assert connection._channel is consumer.channel
    assert (broker, "default") == (consumer.broker, consumer.queue_name)
    assert _RabbitmqConsumer is broker.consumer_class


def test_each_consumer_has_a_connection_of_its_own(connections: list[Connection]) -> None:
    """Private: a consumer's connection is none of the broker's thread-local ones, so "channel gone" is asked of the
    consumer."""
    broker = RabbitmqBroker(middleware=[])
    consumer, _ = consume(broker)

    assert consumer.connection is not broker.connection
    assert {broker.connection} == broker.connections


def test_requeue_is_left_to_the_server(connections: list[Connection]) -> None:
    """H17: requeue does nothing on RabbitMQ, where unacked messages return when the consumer's connection closes."""
    consumer, connection = consume(RabbitmqBroker(middleware=[]))
    message = next(consumer)
    consumer.requeue([message])

    assert [] == connection.callbacks
    assert {1} == consumer.known_tags


def test_an_undecodable_message_is_nacked_without_any_hook(
    connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H19: an undecodable message is nacked inside the consumer, no hook sees it, so the letter needs a wrapper
    around the consumer."""
    monkeypatch.setattr(
        Channel,
        "consume",
        lambda *_, **__: iter([(SimpleNamespace(delivery_tag=1, redelivered=False), None, b"not a message")]),
    )
    recorder = Recorder()
    consumer, connection = consume(RabbitmqBroker(middleware=[recorder]))

    assert next(consumer) is None
    connection.run_callbacks()
    assert [("nack", 1)] == connection._channel.settled
    assert [] == recorder.journal


def test_what_cannot_be_decoded_is_nacked_by_a_method_of_the_consumer_while_its_error_is_handled(
    connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Private: _nack is looked up on the consumer, and sys.exception() in it is the DecodeError with what came; so a
    letter can be written first."""
    monkeypatch.setattr(
        Channel,
        "consume",
        lambda *_, **__: iter([(SimpleNamespace(delivery_tag=1, redelivered=False), None, b"not a message")]),
    )
    consumer, _ = consume(RabbitmqBroker(middleware=[]))
    seen: list[Any] = []
    monkeypatch.setattr(consumer, "_nack", lambda tag: seen.append((tag, sys.exception())))

    assert next(consumer) is None
    [(tag, error)] = seen
    assert isinstance(error, DecodeError)
    assert (1, b"not a message") == (tag, error.data)


def test_a_lost_reply_multiplies_copies_inside_one_enqueue(
    connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2: enqueue publishes up to 6 times on connection errors, before_enqueue each time, so a lost reply makes
    copies that settling must tell apart."""
    recorder = Recorder()
    broker = RabbitmqBroker(middleware=[recorder])
    channels: list[Channel] = []

    def connect(parameters: object) -> Connection:
        channels.append(Channel(pika.exceptions.ConnectionClosed(320, "lost")))
        return Connection(channels[-1])

    monkeypatch.setattr("pika.BlockingConnection", connect)
    with pytest.raises(ConnectionClosed):
        broker.enqueue(dramatiq.Message("default", "fine", (), {}, {}))

    assert 6 == MAX_ENQUEUE_ATTEMPTS == sum(len(channel.published) for channel in channels)
    assert 6 == len(recorder.calls("before_enqueue"))
    assert [] == recorder.calls("after_enqueue")


@pytest.mark.parametrize("confirm", [True, False])
def test_publishing_is_unconfirmed_unless_asked_for(connections: list[Connection], confirm: bool) -> None:
    """H17: publishes are confirmed only with confirm_delivery=True, which is not the default and which the boot
    check asks for."""
    broker = RabbitmqBroker(middleware=[], **({"confirm_delivery": True} if confirm else {}))
    broker.enqueue(dramatiq.Message("default", "fine", (), {}, {}))

    channel = connections[0]._channel
    assert (confirm, confirm, confirm) == (
        broker.confirm_delivery,
        channel.confirming,
        channel.published[0]["mandatory"],
    )
