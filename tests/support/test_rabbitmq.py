"""The private RabbitMQ boots beside any other, and can be made to fail."""

from __future__ import annotations

import signal
from pathlib import Path

import pika
import pika.exceptions
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.waiting import wait_until


def _publish(url: str, queue: str, body: bytes) -> None:
    parameters = pika.URLParameters(url)
    parameters.blocked_connection_timeout = 1
    connection = pika.BlockingConnection(parameters)
    try:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(queue, durable=True)
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))
    finally:
        if connection.is_open:
            connection.close()


def _fetch(url: str, queue: str) -> bytes | None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        body: bytes | None = connection.channel().basic_get(queue, auto_ack=True)[2]
        return body
    finally:
        connection.close()


def _logs_of_queues(server: PrivateRabbitMQ) -> list[Path]:
    folder = server.directory / "mnesia"
    return [*folder.rglob("LATEST.LOG"), *folder.rglob("rabbit_durable_queue.DC?")]


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL], ids=lambda sig: sig.name)
def test_a_confirmed_message_survives_a_restart_on_the_same_port(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, sig: signal.Signals
) -> None:
    """Stopped or killed, the server comes back at the same URL with what it confirmed."""
    _publish(rabbitmq_url, "kept", b"7")
    # It confirms a message before it has written down that there is a queue: a kill in between loses both.
    wait_until(lambda: any(b"kept" in log.read_bytes() for log in _logs_of_queues(private_rabbitmq)), 30)
    private_rabbitmq.restart(sig)

    assert b"7" == _fetch(rabbitmq_url, "kept")


def test_all_connections_are_closed_from_the_servers_side(private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str) -> None:
    """A client notices that the server has closed its connection."""
    connection = pika.BlockingConnection(pika.URLParameters(rabbitmq_url))
    private_rabbitmq.close_all_connections()

    with pytest.raises(pika.exceptions.ConnectionClosedByBroker):
        connection.process_data_events(time_limit=10)


def test_a_memory_alarm_blocks_publishers_until_it_is_over(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str
) -> None:
    """Inside the block nothing is confirmed; after it everything is."""
    with private_rabbitmq.memory_alarm(), pytest.raises(pika.exceptions.ConnectionBlockedTimeout):
        _publish(rabbitmq_url, "blocked", b"7")
    _publish(rabbitmq_url, "blocked", b"8")


def test_the_broker_fixture_confirms_and_starts_empty(rabbitmq_broker: RabbitmqBroker) -> None:
    """A test's broker waits for confirms, and no other test's queue is in its virtual host."""
    rabbitmq_broker.declare_queue("default", ensure=True)

    assert rabbitmq_broker.confirm_delivery
    assert (0, 0, 0) == rabbitmq_broker.get_queue_message_counts("default")
