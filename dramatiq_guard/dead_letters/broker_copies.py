"""The copies of dead messages that a broker keeps by itself, in its own dead-letter queue.

A letter is the original; what lies in ``.XQ`` is only a copy, and must not be replayed a second time by another tool.
On Redis it can be found by the id that the broker gave the message, removed, and read: it holds the payload exactly,
also where the letter was redacted.  RabbitMQ's queues cannot be searched; there the copy expires by itself.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dramatiq import Message
from dramatiq.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dramatiq import Broker

    from .letter import Letter

__all__ = ["exact_payload", "remove_copies"]

_logger = logging.getLogger("dramatiq_guard.dead_letters")


def remove_copies(broker: Broker | None, letters: Sequence[Letter]) -> int:
    """Remove the broker's own copies of letters, where it lets us.

    Parameters:
      broker(Broker | None): The broker.
      letters(Sequence[Letter]): The letters that were dealt with.

    Returns:
      int: How many copies were removed.  A broker that cannot be reached is logged: the copies expire by themselves.
    """
    client = _redis_of(broker)
    if client is None:
        return 0
    keys = [(*_keys(broker, letter), letter.broker_id) for letter in letters if letter.broker_id]
    if not keys:
        return 0
    try:
        with client.pipeline(transaction=False) as pipeline:
            for order, messages, broker_id in keys:
                pipeline.zrem(order, broker_id)
                pipeline.hdel(messages, broker_id)
            return sum(pipeline.execute()[::2])
    except Exception as error:  # noqa: BLE001 - the letter is dealt with; a copy left behind is no reason to say otherwise
        _logger.warning("%d copies stay in the broker's own .XQ until they expire: %s", len(keys), error)
        return 0


def exact_payload(broker: Broker | None, letter: Letter) -> Message[Any] | None:
    """Read the broker's own copy of a letter.

    Parameters:
      broker(Broker | None): The broker.
      letter(Letter): The letter.

    Returns:
      Message | None: The message as it was; ``None`` where the broker has no copy or does not let us look.
    """
    client = _redis_of(broker)
    if client is None or not letter.broker_id:
        return None
    data = client.hget(_keys(broker, letter)[1], letter.broker_id)
    if data is None:
        return None
    try:
        message: Message[Any] = Message.decode(data)
    except DecodeError:
        return None
    return message if message.message_id == letter.message_id else None


def _redis_of(broker: Broker | None) -> Any:
    """The client of a Redis broker.  Told by what it has: redis-py need not be installed to ask."""
    is_redis = any(each.__name__ == "RedisBroker" for each in type(broker).__mro__)
    return getattr(broker, "client", None) if is_redis else None


def _keys(broker: Any, letter: Letter) -> tuple[str, str]:
    order = f"{broker.namespace}:{letter.queue}.XQ"
    return order, f"{order}.msgs"
