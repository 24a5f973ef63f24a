"""The consumer that every broker's consumer is wrapped in: where deliveries are stamped and settled.

It is the settle barrier's door.  Whatever a message's end owes is done inside `ack` and `nack`, which are repeated
while the broker or a store is out, with the message still unacked.  This one knows what every broker has in common;
`redis_consumer` and `rabbitmq_consumer` know how theirs can be held on to.
"""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING, Any, Final

from dramatiq.broker import Consumer
from dramatiq.errors import ConnectionClosed

from .. import clock, host, telemetry
from ..delivery import delivery_of, enter, peek, stamp
from .killpoints import reach
from .settlement import is_outage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dramatiq import Message
    from dramatiq.broker import MessageProxy

    from ..delivery import Delivery
    from ..wiring import Stack

__all__ = ["GuardedConsumer"]

#: Never set: waiting for it is sleeping on our clock.
_NEVER: Final = Event()


class GuardedConsumer(Consumer):
    """Stamps what a consumer delivers, and settles it before it is acked or nacked.

    Parameters:
      inner(Consumer): The broker's own consumer; whatever is not named here is asked of it.
      stack(Stack): The wiring of the broker.
      queue_name(str): The queue, or delay queue, that it consumes.
    """

    def __init__(self, inner: Consumer, stack: Stack, queue_name: str) -> None:
        self.inner: Any = inner
        self.stack = stack
        self.queue_name = queue_name
        #: Whether it has noticed that nothing more is to be fetched.
        self.drained = False
        #: When it was last asked for a message, and whether the broker has answered since it was opened; see `health`.
        self.polled_at = clock.monotonic()
        self.in_touch = False
        #: Who may hold the queue, and what it has to know: the messages taken that have neither passed nor ended.
        self.hold = None if host.delay_consumer(queue_name) else stack.hold
        self.taken: set[str] = set()

    def __next__(self) -> MessageProxy | None:
        if self.stack.draining:
            self.idle()
            return None
        self.polled_at = clock.monotonic()
        hold = self.hold
        # Not before the broker has answered once, by which others know that it is there.
        if hold is not None and self.in_touch and (pause := hold(self.queue_name, len(self.taken))):
            self.pause(pause)
            return None
        message: MessageProxy | None = next(self.inner)
        self.in_touch = True
        if message is not None:
            delivery = stamp(message, self)
            delivery.stack = self.stack
            if hold is not None:
                self.taken.add(delivery.message_id)
        return message

    def ack(self, message: MessageProxy) -> None:
        """Settle a message that did not fail, then ack it."""
        delivery = delivery_of(message)
        if not delivery.acked and self.stack.settlement.settle(delivery, self) and not delivery.replaced:
            reach("before-ack")
            self._tell(delivery, "ack")
            reach("after-ack")
        delivery.acked = True
        self.forget(delivery)

    def nack(self, message: MessageProxy) -> None:
        """Settle a message that failed, then nack it."""
        delivery = delivery_of(message)
        if not delivery.acked and self.stack.settlement.settle(delivery, self):
            reach("before-nack")
            self._tell(delivery, "nack")
            delivery.acked = True
            reach("after-nack")
            self.stack.after_death(delivery)
        delivery.acked = True
        self.forget(delivery)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Hand messages back that were not processed."""
        self.in_touch = False  # the first thing that Dramatiq does with a consumer that it gives up
        self.inner.requeue(messages)

    def idle(self) -> None:
        """Fetch nothing, since the worker ends; what keeps the connection alive goes on."""
        self.drained = True
        clock.wait(_NEVER, 50)

    def pause(self, milliseconds: int) -> None:
        """Fetch nothing for a moment, since the queue is held; what keeps the connection alive goes on."""
        clock.wait(_NEVER, milliseconds)

    def passed(self, delivery: Delivery) -> None:
        """A message has gone through where those of its queue are held."""
        self.taken.discard(delivery.message_id)

    def hand_back(self, messages: list[MessageProxy]) -> int:
        """Return messages that were fetched to the head of their queue, in their order.

        Parameters:
          messages(list[MessageProxy]): Those that came from this consumer and are not being settled.

        Returns:
          int: How many were returned, those that only this consumer knew of included.
        """
        self.requeue(messages)
        return len(messages)

    def close(self) -> None:
        """Close the broker's consumer."""
        self.inner.close()

    def holds(self, delivery: Delivery) -> bool:
        """Whether the message is still ours to settle; where a broker cannot say, it is."""
        return True

    def alive(self) -> bool:
        """Whether what came from this consumer is still ours; where a broker cannot say, it is."""
        return True

    def admits(self, delivery: Delivery) -> bool:
        """Whether a delivery may still run: it is ours, and no other copy of its message has overtaken it."""
        return self.alive() and self.stack.forks.admits(delivery)

    def carry_on(self, delivery: Delivery) -> None:
        """Send the copy that carries a message on: its retry, its deferral, its requeue."""
        successor = delivery.successor
        if successor is None or delivery.decision is None:
            return
        if not delivery.moved:
            message = self.stack.forks.marked(successor.message)
            with telemetry.sending(message, kind=delivery.decision.step.value):
                self.publish(message, successor.delay)
            delivery.moved = True
        self.stack.forks.settled(delivery)

    def send(self, delivery: Delivery, part: str, message: Message[Any], delay: int | None = None) -> None:
        """Send a message that this delivery's end owes: a callback, the next stage of a pipeline.

        Parameters:
          delivery(Delivery): Whose end it is.
          part(str): Which part of it; a broker that can tell sends each part once.
          message(Message): What to send.
          delay(int | None): Milliseconds to delay it by.
        """
        self.publish(self.stack.forks.owed(delivery, part, message), delay)

    def noted(self, delivery: Delivery) -> frozenset[str]:
        """What is noted as done of this message's end, by whoever ran it; where a broker keeps no notes, nothing."""
        return frozenset()

    def note(self, delivery: Delivery, part: str) -> None:
        """Note a part of this message's end as done."""

    def publish(self, message: Message[Any], delay: int | None) -> None:
        """Put a copy of a message on its queue."""
        with self.stack.forks.publishing():
            self.stack.broker.enqueue(message, delay=delay)

    def promote(self, message: MessageProxy) -> None:
        """Move a delayed message that has fallen due to its queue."""
        if not self.alive():
            raise ConnectionClosed("the connection that this delayed message came over is gone")
        self.publish(self.stack.forks.marked(host.promoted(message)), None)
        self.inner.ack(message)

    def forget(self, delivery: Delivery) -> None:
        """Let go of the error, which holds frames, and of the thread's current delivery."""
        delivery.error = delivery.result = None
        if self.hold is not None:
            self.taken.discard(delivery.message_id)
        if peek() is delivery:
            enter(None)

    def _tell(self, delivery: Delivery, what: str) -> None:
        """Ack or nack at the broker; while it is out, that is held like everything else."""
        try:
            self._say(what, delivery.message)
        except Exception as error:
            if is_outage(error):
                self.stack.settlement.hold(delivery, what, error)
            raise

    def _say(self, what: str, message: MessageProxy) -> None:
        getattr(self.inner, what)(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
