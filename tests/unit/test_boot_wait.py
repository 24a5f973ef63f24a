"""Waiting at boot for servers that are down, and leaving as soon as the process is told to stop."""

from __future__ import annotations

from types import SimpleNamespace

import pika
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard.errors import SetupError, StoreUnavailable
from dramatiq_guard.exits.boot_wait import wait_for_servers


class Store:
    """A store that is out for some tries."""

    def __init__(self, out: int = 0, error: Exception | None = None) -> None:
        self.out = out
        self.error = error or StoreUnavailable("connection refused")
        self.asked = 0

    def ping(self) -> None:
        self.asked += 1
        if self.asked <= self.out:
            raise self.error


class Guard(SimpleNamespace):
    """A middleware of the stack."""

    place = 3


def on(broker, **stores):
    """Put a middleware with stores on a broker."""
    broker.middleware.append(Guard(**stores))
    return broker


def test_with_everything_up_nobody_waits(broker, virtual, caplog):
    """Each store is asked once, also where two middlewares share it; what cannot be asked is not."""
    caplog.set_level("INFO")
    shared = Store()
    on(broker, store=shared)
    on(broker, deliveries=shared, store=None)
    on(broker, store=object())

    assert wait_for_servers(broker, lambda: False)
    assert (shared.asked, virtual.waits, caplog.text) == (1, [], "")


def test_a_store_that_is_down_is_waited_for_and_that_is_said(broker, virtual, caplog):
    """Every five seconds, with what is waited for; and once when all are there."""
    caplog.set_level("INFO")
    on(broker, store=Store(out=25))
    assert wait_for_servers(broker, lambda: False)

    assert sum(virtual.waits) == 12_500
    assert caplog.text.count("waits for the store of Guard") == 3
    assert caplog.text.count("connection refused") == 3
    assert caplog.text.count("All servers answer") == 1


def test_a_store_that_is_not_set_up_stops_the_boot(broker, virtual):
    """Waiting would not help."""
    on(broker, store=Store(out=1, error=SetupError("run schema apply")))
    with pytest.raises(SetupError, match="schema apply"):
        wait_for_servers(broker, lambda: False)
    assert virtual.waits == []


def test_a_process_that_is_told_to_stop_waits_no_more(broker, virtual):
    """While it waits, or before it has begun to."""
    store = Store(out=1_000)
    on(broker, store=store)
    assert not wait_for_servers(broker, lambda: len(virtual.waits) >= 3)
    assert store.asked == 3
    assert not wait_for_servers(broker, lambda: True)
    assert store.asked == 3


def test_redis_itself_is_waited_for(virtual):
    """By a PING, whatever error its client has for it."""
    broker = RedisBroker(url="redis://127.0.0.1:1", middleware=[])
    answers = iter([ConnectionRefusedError("down"), None])

    def ping():
        if (answer := next(answers)) is not None:
            raise answer

    broker.client.ping = ping
    assert wait_for_servers(broker, lambda: False)
    assert virtual.waits == [500]


def test_rabbitmq_itself_is_waited_for(virtual, monkeypatch):
    """By a connection, which is closed again."""
    opened = []

    class Connection:
        def __init__(self, parameters):
            opened.append("opened")
            if len(opened) == 1:
                raise pika.exceptions.AMQPConnectionError("down")

        def close(self):
            opened.append("closed")

    monkeypatch.setattr(pika, "BlockingConnection", Connection)
    assert wait_for_servers(RabbitmqBroker(url="amqp://127.0.0.1:1", middleware=[]), lambda: False)
    assert opened == ["opened", "opened", "closed"]
    assert virtual.waits == [500]
