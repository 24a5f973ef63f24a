"""A Redis consumer that survives: what it holds is known, moved in one step, and comes back when it is dropped.

Dramatiq's Redis broker keeps the ids that a process has fetched in an ack set of that process.  A message is ours for
as long as its id is in there, so settling is one script: take the id out of the set and put the successor on its
queue, or do nothing at all.  A reply that is lost makes the script run again, and the second time it does nothing.

What this process has fetched but no longer holds (a batch that was dropped with its consumer, a fetch whose reply was
lost) is looked for when a consumer starts, once a minute, and when it closes; it goes back to its queue.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import redis
from dramatiq import Message
from dramatiq.errors import ConnectionClosed, DecodeError
from dramatiq.logging import get_logger

from .. import clock, host, telemetry
from ..delivery import delivery_of
from ..policy.decision import Step
from .consumer import GuardedConsumer
from .settlement import is_outage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dramatiq.broker import Consumer, MessageProxy

    from ..delivery import Delivery
    from ..wiring import Stack

__all__ = ["RedisConsumer", "RedisHoldings"]

_T = TypeVar("_T")

#: How often, in milliseconds, the ack set is compared with what is held.
_RECLAIM_EVERY: Final = 60_000

#: What the copy that carries a message on is owed as.
_MOVES: Final = frozenset({Step.RETRY.value, Step.DEFER.value, Step.REQUEUE.value})


class RedisHoldings:
    """What this process holds of each queue: Redis ids of messages that were delivered and not yet settled."""

    def __init__(self) -> None:
        self._ids: dict[str, set[str]] = {}
        #: Set once the server has not answered while the worker shut down.
        self.silent = False

    def of(self, queue_name: str) -> set[str]:
        """The ids that are held of a queue or delay queue; adding and discarding is atomic."""
        return self._ids.setdefault(queue_name, set())


class RedisConsumer(GuardedConsumer):
    """Wraps a consumer of Dramatiq's RedisBroker.

    Parameters:
      inner(Consumer): The broker's own consumer.
      stack(Stack): The wiring of the broker.
      queue_name(str): The queue, or delay queue, that it consumes.
    """

    def __init__(self, inner: Consumer, stack: Stack, queue_name: str) -> None:
        super().__init__(inner, stack, queue_name)
        self.logger = get_logger("dramatiq_guard", "redis_consumer")
        self.broker: Any = stack.broker
        self.held = stack.holdings.of(queue_name)
        self._acks_as_stock = host.redis_acks_as_stock(inner)
        self._reclaim_after = 0
        if host.delay_consumer(queue_name):
            # Dramatiq drops the delay queue with the consumer that filled it.
            self.held.clear()

    def __next__(self) -> MessageProxy | None:
        if self.stack.draining:
            self.idle()
            return None
        if not self.inner.message_cache and clock.monotonic() >= self._reclaim_after:
            _reachably(self.reclaim)
            self._reclaim_after = clock.monotonic() + _RECLAIM_EVERY
        try:
            message = super().__next__()
        except DecodeError as error:
            _reachably(partial(self._bury, error))
            return None
        except redis.RedisError as error:
            raise ConnectionClosed(error) from error
        if message is not None:
            self.held.add(message.options["redis_message_id"])
        return message

    def ack(self, message: MessageProxy) -> None:
        try:
            super().ack(message)
        except redis.RedisError as error:
            raise ConnectionClosed(error) from error
        self._release(message)
        self._forget_parts(message)

    def nack(self, message: MessageProxy) -> None:
        _reachably(partial(super().nack, message))
        self._release(message)
        self._forget_parts(message)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        messages = list(messages)
        self._return(partial(super().requeue, messages))
        for message in messages:
            self._release(message)

    def hand_back(self, messages: list[MessageProxy]) -> int:
        ids = [message.options["redis_message_id"] for message in messages]
        # Fetched, and not looked at yet: later ones than those that were.
        for body in self.inner.message_cache:
            with suppress(DecodeError, KeyError):
                ids.append(Message.decode(body).options["redis_message_id"])
        self.inner.message_cache.clear()
        back: int = self._return(partial(host.redis_hand_back, self.broker, self.queue_name, ids))
        for message in messages:
            self._release(message)
        return back

    def close(self) -> None:
        # Of what was fetched and not yet looked at only the bodies are known; their ids are those that nobody holds.
        self.inner.message_cache.clear()
        self._return(self.reclaim)
        super().close()

    def holds(self, delivery: Delivery) -> bool:
        """Whether the message's id is still in this process's ack set."""
        if all(due.done or due.name in _MOVES for due in delivery.dues):
            # The script that puts the successor in its place asks by itself.
            return True
        return bool(
            _reachably(
                partial(
                    self.broker.client.sismember,
                    host.redis_ack_set(self.broker, self.queue_name),
                    delivery.message.options["redis_message_id"],
                )
            )
        )

    def carry_on(self, delivery: Delivery) -> None:
        """Put the successor in the message's place, in one step."""
        successor = delivery.successor
        if successor is None or delivery.decision is None:
            return
        with telemetry.sending(successor.message, kind=delivery.decision.step.value):
            # The key is the same at every try: a script that ran although its reply was lost runs no second time.
            copy, queue_name = host.redis_copy(successor.message, successor.delay)
            self._move(delivery.message, copy, queue_name, successor.delay)
        delivery.moved = delivery.replaced = True

    def send(self, delivery: Delivery, part: str, message: Message[Any], delay: int | None = None) -> None:
        """Send a part of a message's end, once: however often it is tried, and whoever runs the message again."""
        copy, queue_name = host.redis_copy(message, delay)
        self.broker.emit_before("enqueue", copy, delay)
        delivery.parted = True
        sent = _reachably(
            partial(
                host.redis_send_part,
                self.broker,
                self.queue_name,
                delivery.message.options["redis_message_id"],
                part,
                queue_name,
                copy.options["redis_message_id"],
                copy.encode(),
            )
        )
        if sent:
            self.broker.emit_after("enqueue", copy, delay)

    def noted(self, delivery: Delivery) -> frozenset[str]:
        redis_message_id = delivery.message.options["redis_message_id"]
        return frozenset(_reachably(partial(host.redis_noted, self.broker, redis_message_id)))

    def note(self, delivery: Delivery, part: str) -> None:
        delivery.parted = True
        _reachably(partial(host.redis_note, self.broker, delivery.message.options["redis_message_id"], part))

    def promote(self, message: MessageProxy) -> None:
        """Move a delayed message that has fallen due to its queue, in one step."""
        copy = host.redis_promoted(message)
        self._move(message, copy, copy.queue_name, None)
        self._release(message)

    def reclaim(self) -> int:
        """Return to the queue what this process fetched and does not hold.

        Returns:
          int: How many messages went back.
        """
        key = host.redis_ack_set(self.broker, self.queue_name)
        ours = {member.decode() if isinstance(member, bytes) else member for member in self.broker.client.smembers(key)}
        stranded = sorted(ours - self.held)
        if not stranded:
            return 0
        for start in range(0, len(stranded), 500):
            self.broker.do_requeue(self.queue_name, *stranded[start : start + 500])
        self.logger.warning(
            "%d messages of queue %r had been fetched by this process and were held by nobody; they went back.",
            len(stranded),
            self.queue_name,
        )
        return len(stranded)

    def _move(self, message: MessageProxy, copy: Message[Any], queue_name: str, delay: int | None) -> None:
        self.broker.emit_before("enqueue", copy, delay)
        old, new = message.options["redis_message_id"], copy.options["redis_message_id"]
        body = copy.encode()
        try:
            moved = host.redis_move(self.broker, self.queue_name, old, queue_name, new, body)
        except redis.RedisError as error:
            raise ConnectionClosed(error) from error
        if moved:
            self.broker.emit_after("enqueue", copy, delay)
        else:
            # Either a try before this one did it and its reply was lost, or another process has taken the message up.
            self.logger.info("Message %r was not in the ack set any more; nothing was sent for it.", message.message_id)

    def _say(self, what: str, message: MessageProxy) -> None:
        if what == "ack" and self._acks_as_stock:
            host.redis_ack(self.broker, self.queue_name, message.options["redis_message_id"])
        else:
            super()._say(what, message)

    def _return(self, call: Callable[[], _T]) -> _T:
        """Return messages.  A server that does not answer is asked once at shutdown, not by each consumer in turn."""
        closing = self.stack.settler.closing.is_set()
        if closing and self.stack.holdings.silent:
            raise ConnectionClosed("Redis did not answer while the worker shut down; it is not asked again")
        try:
            return call()
        except redis.RedisError as error:
            self.stack.holdings.silent = closing and isinstance(error, redis.TimeoutError)
            raise ConnectionClosed(error) from error

    def _release(self, message: MessageProxy) -> None:
        delivery = delivery_of(message)
        self.held.discard(delivery.options["redis_message_id"])
        self.inner.queued_message_ids.discard(delivery.message_id)

    def _forget_parts(self, message: MessageProxy) -> None:
        """Remove the note of the parts that were sent; it would expire by itself."""
        if delivery_of(message).parted:
            with suppress(redis.RedisError):
                self.broker.client.delete(host.redis_parts(self.broker, message.options["redis_message_id"]))

    def _bury(self, error: DecodeError) -> None:
        """Make a letter of a message that cannot be decoded, so that the rest of its batch goes on."""
        raw = error.data if isinstance(error.data, bytes) else str(error.data).encode()
        key = host.redis_ack_set(self.broker, self.queue_name)
        ids = [member.decode() if isinstance(member, bytes) else member for member in self.broker.client.smembers(key)]
        ids = [each for each in ids if each not in self.held]
        bodies = self.broker.client.hmget(host.redis_messages(self.broker, self.queue_name), ids) if ids else []
        found = [each for each, body in zip(ids, bodies, strict=True) if body == raw]
        for redis_message_id in found:
            self.logger.error(
                "Message %r of queue %r cannot be decoded and becomes a dead letter.", redis_message_id, self.queue_name
            )
            try:
                self.stack.bury_undecodable(raw, self.queue_name, redis_message_id, error)
            except Exception as refusal:
                if is_outage(refusal):
                    raise ConnectionClosed(refusal) from refusal
                # The broker's copy is what is left; a batch must not hang on a letter that nobody takes.
                self.logger.critical(
                    "No letter could be written of %r, which held %r.", redis_message_id, raw, exc_info=True
                )
            self.broker.do_nack(self.queue_name, redis_message_id)


def _reachably(call: Callable[[], _T]) -> _T:
    """Call, and let every error of Redis count as a lost connection: READONLY and timeouts pass, too."""
    try:
        return call()
    except redis.RedisError as error:
        raise ConnectionClosed(error) from error
