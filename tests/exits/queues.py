"""What lies in a broker when all its workers are gone: waiting, delayed, dead, or held by a process that is no more."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import pika
import redis
from dramatiq import Message
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import dq_name, xq_name

__all__ = ["Broker", "Lying", "RabbitMQ", "Redis"]


@dataclass(slots=True)
class Lying:
    """The messages of one queue.

    Attributes:
      waiting(list[Message]): In the queue, its head first.
      delayed(list[Message]): In the delay queue.
      dead(list[Message]): In the queue of dead letters.
      held(list[Message]): In the ack set of a process; on Redis only.
    """

    waiting: list[Message[Any]] = field(default_factory=list)
    delayed: list[Message[Any]] = field(default_factory=list)
    dead: list[Message[Any]] = field(default_factory=list)
    held: list[Message[Any]] = field(default_factory=list)

    @property
    def all(self) -> Counter[str]:
        """How often each job lies in the queue or delay queue, held or not, by its key."""
        return Counter(message.args[0] for message in (*self.waiting, *self.delayed, *self.held))


class Broker(Protocol):
    """A broker that jobs are sent to and whose queue is looked at."""

    kind: str
    url: str
    name: str

    def send(self, actor: str, *args: Any, delay: int | None = None, **options: Any) -> None: ...
    def look(self) -> Lying: ...
    def close(self) -> None: ...


class Redis:
    """A queue of its own namespace on a Redis.

    Parameters:
      url(str): The server.
      name(str): The queue, and the namespace.
    """

    kind = "redis"

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self.client: Any = redis.Redis.from_url(url)
        self.broker = RedisBroker(url=url, namespace=name, middleware=[])  # type: ignore[no-untyped-call]
        self.broker.declare_queue(name)  # type: ignore[no-untyped-call]

    def send(self, actor: str, *args: Any, delay: int | None = None, **options: Any) -> None:
        """Send a job."""
        self.broker.enqueue(Message(self.name, actor, args, {}, options), delay=delay)

    def look(self) -> Lying:
        """What lies there now."""
        lying = Lying(
            waiting=self._bodies(self.name, self.client.lrange(f"{self.name}:{self.name}", 0, -1)),
            delayed=self._bodies(dq_name(self.name), self.client.lrange(f"{self.name}:{dq_name(self.name)}", 0, -1)),
            dead=[Message.decode(body) for body in self.client.hvals(f"{self.name}:{xq_name(self.name)}.msgs")],
        )
        for name in self.client.scan_iter(f"{self.name}:__acks__.*"):
            queue = dq_name(self.name) if name.decode().endswith(".DQ") else self.name
            lying.held += self._bodies(queue, list(self.client.smembers(name)))
        return lying

    def close(self) -> None:
        """Remove the namespace."""
        for name in list(self.client.scan_iter(f"{self.name}:*")):
            self.client.delete(name)
        self.broker.close()
        self.broker.client.connection_pool.disconnect()
        self.client.close()

    def _bodies(self, queue: str, ids: list[bytes]) -> list[Message[Any]]:
        # An id without a body is a ghost of a message that was acked.
        bodies = self.client.hmget(f"{self.name}:{queue}.msgs", ids) if ids else []
        return [Message.decode(body) for body in bodies if body is not None]


class RabbitMQ:
    """A queue on a RabbitMQ.

    Parameters:
      url(str): The server and its virtual host.
      name(str): The queue.
    """

    kind = "rabbitmq"

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self.broker = RabbitmqBroker(url=url, confirm_delivery=True, middleware=[])  # type: ignore[no-untyped-call]
        self.broker.declare_queue(name, ensure=True)

    def send(self, actor: str, *args: Any, delay: int | None = None, **options: Any) -> None:
        """Send a job."""
        self.broker.enqueue(Message(self.name, actor, args, {}, options), delay=delay)

    def look(self) -> Lying:
        """What lies there now; it is taken out, and put back by closing the connection."""
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            channel = connection.channel()
            return Lying(
                waiting=_taken(channel, self.name),
                delayed=_taken(channel, dq_name(self.name)),
                dead=_taken(channel, xq_name(self.name)),
            )

    def close(self) -> None:
        """Delete the queues."""
        for name in (self.name, dq_name(self.name), xq_name(self.name)):
            self.broker.channel.queue_delete(name)
        self.broker.close()


def _taken(channel: Any, queue: str) -> list[Message[Any]]:
    messages = []
    while True:
        method, _, body = channel.basic_get(queue)
        if method is None:
            return messages
        messages.append(Message.decode(body))
