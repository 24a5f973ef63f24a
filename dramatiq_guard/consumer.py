"""The consumer that every broker's consumer is wrapped in: where deliveries are stamped and settled.

It is the settle barrier's door.  Whatever a message's end owes is done inside `ack` and `nack`, where Dramatiq repeats
a `BrokerConnectionError` for ever with the message still unacked (H3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dramatiq.broker import Consumer

from .delivery import delivery_of, enter, peek, stamp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dramatiq.broker import MessageProxy

    from .delivery import Delivery
    from .wiring import Stack

__all__ = ["GuardedConsumer"]


class GuardedConsumer(Consumer):
    """Stamps what a consumer delivers, and settles it before it is acked or nacked.

    Parameters:
      inner(Consumer): The broker's own consumer; whatever is not named here is asked of it.
      stack(Stack): The wiring of the broker.
      queue_name(str): The queue, or delay queue, that it consumes.
    """

    def __init__(self, inner: Consumer, stack: Stack, queue_name: str) -> None:
        self.inner = inner
        self.stack = stack
        self.queue_name = queue_name

    def __next__(self) -> MessageProxy | None:
        message = next(self.inner)
        if message is not None:
            stamp(message, self)
        return message

    def ack(self, message: MessageProxy) -> None:
        delivery = delivery_of(message)
        self.stack.settlement.settle(delivery)
        self.inner.ack(message)
        _forget(delivery)

    def nack(self, message: MessageProxy) -> None:
        delivery = delivery_of(message)
        self.stack.settlement.settle(delivery)
        self.inner.nack(message)
        _forget(delivery)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        self.inner.requeue(messages)

    def close(self) -> None:
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _forget(delivery: Delivery) -> None:
    """Let go of the error, which holds frames, and of the thread's current delivery."""
    delivery.error = None
    if peek() is delivery:
        enter(None)
