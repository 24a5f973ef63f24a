"""RabbitMQ, and a message that nobody can decode: it becomes a letter, and its queue goes on (C10)."""

from __future__ import annotations

import contextlib

import pika
import pytest

from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.waiting import wait_until

from .rabbitmq_world import World

pytestmark = pytest.mark.usefixtures("impatient")

RUBBISH = (b"\x00 not json", b"{}", b'{"queue_name": "default"}', b"[1]")


def _put(url: str, queue_name: str, *bodies: bytes) -> None:
    with contextlib.closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        for body in bodies:
            connection.channel().basic_publish("", queue_name, body, pika.BasicProperties(delivery_mode=2))


def test_an_undecodable_message_becomes_a_letter_and_its_queue_goes_on(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The good messages run at once, without the consumer having to restart, and each bad one lies in a letter."""
    world = World(private_rabbitmq, rabbitmq_url)
    for n, body in enumerate(RUBBISH):
        world.send(f"good-{n}")
        world.send(f"late-{n}", delay=100)
        _put(rabbitmq_url, "default", body)
        _put(rabbitmq_url, "default.DQ", body + b" ")
    with world.working(threads=4):
        world.finish()
        wait_until(lambda: len(world.letters.page(limit=50).letters) == 8, describe="eight letters")
        wait_until(lambda: not world.unsettled(), describe=lambda: f"empty queues: {world.unsettled()}")
        assert [] == world.dead_threads()
        assert world.planned == world.runs
    written = world.letters.page(limit=50).letters
    assert {body.decode() + tail for body in RUBBISH for tail in ("", " ")} == {letter.raw for letter in written}
    assert {("undecodable", "default")} == {(letter.reason, letter.queue) for letter in written}
    assert "Restarting consumer" not in caplog.text
    with contextlib.closing(pika.BlockingConnection(pika.URLParameters(rabbitmq_url))) as connection:
        copies = connection.channel().queue_declare("default.XQ", passive=True).method.message_count
    assert copies == 8
