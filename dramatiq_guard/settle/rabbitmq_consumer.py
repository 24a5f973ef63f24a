"""A RabbitMQ consumer that settles only what it still holds.

Delivery tags are numbers within one channel.  When a channel is lost, RabbitMQ delivers its messages anew, and on the
next channel the numbers start again at 1: a stale ack would take another message away.  So a delivery belongs to the
consumer that it came from, and when that consumer's channel is gone nothing is sent for it: no copy, no letter, no ack.
A message that was prefetched is not run any more; a run that has begun goes on, and settles on the copy that RabbitMQ
delivers anew (see `underway`).

Publishing is one try with a confirm; a confirm that is lost makes the barrier try again, and the copies that this may
leave are told apart by their forks (see `forks`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pika.exceptions
from dramatiq.errors import ConnectionClosed
from dramatiq.logging import get_logger

from .. import clock, host
from ..delivery import delivery_of
from ..errors import SettlementHeld
from .consumer import GuardedConsumer
from .killpoints import reach
from .settlement import is_outage
from .underway import Copy

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Message
    from dramatiq.broker import Consumer, MessageProxy
    from dramatiq.errors import DecodeError

    from ..delivery import Delivery
    from ..wiring import Stack

__all__ = ["RabbitmqConsumer"]

_T = TypeVar("_T")

#: How long, in milliseconds, what was prefetched may lie here while its queue is held.  RabbitMQ closes a channel that
#: has not acked a message for half an hour.
_FETCHED_ANEW: Final = 600_000


class RabbitmqConsumer(GuardedConsumer):
    """Wraps a consumer of Dramatiq's RabbitmqBroker.

    Parameters:
      inner(Consumer): The broker's own consumer.
      stack(Stack): The wiring of the broker.
      queue_name(str): The queue, or delay queue, that it consumes.
    """

    def __init__(self, inner: Consumer, stack: Stack, queue_name: str) -> None:
        super().__init__(inner, stack, queue_name)
        self.logger = get_logger("dramatiq_guard", "rabbitmq_consumer")
        host.rabbitmq_undecodable(inner, self._bury)
        self._fetched_at = clock.monotonic()

    def __next__(self) -> MessageProxy | None:
        if self.stack.draining:
            self.idle()
            return None
        message = _reachably(super().__next__)
        if message is None:
            return None
        self._fetched_at = self.polled_at
        delivery = delivery_of(message)
        if not message.redelivered:
            self.stack.underway.arrive(delivery)
            return message
        copy, delivery = self.stack.underway.take_over(delivery)
        if copy is Copy.NEW:
            return message
        self.logger.info("Message %r was delivered again: it is %s.", delivery.message_id, copy.value)
        self.passed(delivery)
        if copy is Copy.ENDED:
            self.stack.settler.post_process(None, delivery.message)
        elif copy is Copy.ACKED:
            _reachably(partial(self.inner.ack, message))
        elif copy is Copy.NACKED:
            _reachably(partial(self.inner.nack, message))
        return None

    def ack(self, message: MessageProxy) -> None:
        self._settle(message, "ack")

    def nack(self, message: MessageProxy) -> None:
        self._settle(message, "nack")

    def admits(self, delivery: Delivery) -> bool:
        underway = self.stack.underway
        underway.enter(delivery)
        if not self.alive() and underway.leave(delivery, self):
            return False
        # If it has not left, it has just taken another copy over: that one may run.
        if self.stack.forks.admits(delivery):
            return True
        underway.leave(delivery)
        return False

    def holds(self, delivery: Delivery) -> bool:
        """Whether the channel that delivered the message is still there, and the message not settled on it."""
        return delivery.consumer is self and self.alive() and delivery.message._tag in self.inner.known_tags

    def alive(self) -> bool:
        """Whether the channel that this consumer's messages came from is open."""
        return bool(self.inner.connection.is_open and self.inner.channel.is_open)

    def publish(self, message: Message[Any], delay: int | None) -> None:
        """Publish once, and wait for the confirm; a lost one is for the barrier to try again."""
        with self.stack.forks.publishing():
            _reachably(partial(host.rabbitmq_publish_once, self.stack.broker, message, delay))

    def idle(self) -> None:
        """Consume nothing more, and hand back what pika has buffered; acks and heartbeats go on."""
        if not self.drained:
            _reachably(self.inner.channel.cancel)
            self.drained = True
        _reachably(partial(self.inner.connection.process_data_events, time_limit=0.05))

    def pause(self, milliseconds: int) -> None:
        if clock.monotonic() - self._fetched_at >= _FETCHED_ANEW:
            _reachably(self._fetch_anew)
        _reachably(partial(self.inner.connection.process_data_events, time_limit=milliseconds / 1000))

    def hand_back(self, messages: list[MessageProxy]) -> int:
        back = 0
        for message in messages:
            if self.holds(delivery_of(message)):
                self.inner.known_tags.discard(message._tag)
                nack = partial(self.inner.channel.basic_nack, message._tag, requeue=True)
                _reachably(partial(self.inner.connection.add_callback_threadsafe, nack))
                back += 1
        return back

    def _fetch_anew(self) -> None:
        """Hand back what has been prefetched and lies here, to the head of the queue, and consume again."""
        channel: Any = self.inner.channel
        channel.cancel()
        timeout = self.stack.booted_worker.worker_timeout / 1000 if self.stack.booted_worker is not None else 1
        self.inner.iterator = channel.consume(self.queue_name, inactivity_timeout=timeout)
        self._fetched_at = clock.monotonic()

    def promote(self, message: MessageProxy) -> None:
        if not self.alive():
            raise ConnectionClosed("the connection that this delayed message came over is gone")
        self.publish(self.stack.forks.marked(host.promoted(message)), None)
        # Before the ack, which may fail or be lost: its copy must not be promoted again.
        self.stack.underway.settle(delivery_of(message))
        _reachably(partial(self.inner.ack, message))

    def close(self) -> None:
        try:
            super().close()
        except Exception as error:
            # Whatever it is: any other error ends the consumer's thread.
            raise ConnectionClosed(error) from error

    def _bury(self, error: DecodeError) -> None:
        """Have a letter written for what cannot be decoded; it is nacked then, and not before."""
        self.logger.error("A message of queue %r cannot be decoded and becomes a dead letter.", self.queue_name)
        try:
            self.stack.bury_undecodable(error.data, self.queue_name, None, error)
        except Exception as refusal:
            if is_outage(refusal):
                raise ConnectionClosed(refusal) from refusal
            # The broker's copy is what is left; the queue must not hang on a letter that nobody takes.
            self.logger.critical("No letter could be written of a message that held %r.", error.data, exc_info=True)

    def _settle(self, message: MessageProxy, name: str) -> None:
        delivery = delivery_of(message)
        if delivery.acked:
            self.forget(delivery)
            return
        # What it owes is noted even if it cannot be sent: another copy may yet come, for which it is.
        settled = _reachably(partial(self.stack.settlement.settle, delivery, self))
        if settled and self.holds(delivery):
            self.stack.forks.ended(delivery)
            reach(f"before-{name}")
            _reachably(partial(getattr(self.inner, name), message))
            delivery.acked = True
            self.stack.underway.settle(delivery)
            reach(f"after-{name}")
            if name == "nack":
                self.stack.after_death(delivery)
        elif self.stack.underway.park(delivery, self):
            self.logger.info(
                "Message %r came over a channel that is gone: nothing is sent for it until RabbitMQ delivers it again.",
                message.message_id,
            )
        else:
            raise SettlementHeld(f"Message {message.message_id} has been delivered again meanwhile.", again=True)
        self.forget(delivery)


def _reachably(call: Callable[[], _T]) -> _T:
    """Call, and let every error of the protocol count as a lost connection."""
    try:
        return call()
    except pika.exceptions.AMQPError as error:
        raise ConnectionClosed(error) from error
