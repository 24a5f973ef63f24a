"""Runs that outlive their connection: each settles on the copy of its message that the broker delivers anew.

When a channel is lost, the broker takes its unacked messages back and delivers them again, while this process may still
be at work on them.  Running them a second time is what at-least-once allows; here it is needless:

1. A delivery is underway from the moment its function is entered until the broker has heard of its end.
2. Its end comes when its channel is gone: nothing can be sent for it, so it is parked with all that it owes.
3. The same message comes again, on the next channel, to this process: the copy is not run.  The delivery takes over its
   tag, and goes on, or settles at once if it was parked.
4. An ack that was on its way when the channel was lost may not have arrived: what was settled last is remembered, and
   acked again if it comes again.

What comes again to another process runs there, and the parked delivery is forgotten in the end.

This module must not know any broker or middleware.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..delivery import Delivery

__all__ = ["Copy", "Underway"]

#: How many ended deliveries wait for their messages to come again; a lost channel parks one a worker thread.
_PARKED: Final = 1_000

#: How many settled ones are remembered: no more than a channel's prefetch can be without an ack at the broker.
_SETTLED: Final = 1_000


class Copy(Enum):
    """What a copy that comes again is."""

    NEW = "nothing that this process has begun: it runs"
    RUNNING = "a delivery at work, which settles on it when it ends"
    ENDED = "a delivery that was parked, which settles on it now"
    ACKED = "a message that was acked, and the ack was lost"
    NACKED = "a message that was nacked, and the nack was lost"


@dataclass(frozen=True, slots=True)
class _Settled:
    options: Mapping[str, Any]
    consumer: Any
    failed: bool


class Underway:
    """The deliveries of one process whose function has been entered, and of whose end the broker has not heard."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, list[Delivery]] = {}
        self._parked: dict[str, list[Delivery]] = {}
        self._settled: dict[str, _Settled] = {}

    def arrive(self, delivery: Delivery) -> None:
        """A message has been delivered for the first time: whatever has the same id is another copy."""
        if delivery.message_id in self._settled:
            self._settled.pop(delivery.message_id, None)

    def enter(self, delivery: Delivery) -> None:
        """Its function is about to be entered."""
        with self._lock:
            self._running.setdefault(delivery.message_id, []).append(delivery)

    def settle(self, delivery: Delivery) -> None:
        """The broker has been told of its end, if what it was told arrives."""
        with self._lock:
            _remove(self._running, delivery)
            self._settled[delivery.message_id] = _Settled(
                delivery.options, delivery.consumer, bool(delivery.message.failed)
            )
            if len(self._settled) > _SETTLED:
                self._settled.pop(next(iter(self._settled)))

    def leave(self, delivery: Delivery, consumer: object = None) -> bool:
        """Its function is not entered after all.

        Parameters:
          delivery(Delivery): The delivery.
          consumer(object): Leave only if this is still the consumer that it belongs to.

        Returns:
          bool: Whether it has left; it has not if it has taken another consumer's copy over.
        """
        with self._lock:
            if consumer is not None and delivery.consumer is not consumer:
                return False
            _remove(self._running, delivery)
            return True

    def park(self, delivery: Delivery, consumer: object) -> bool:
        """Its end has come, and its channel is gone.

        Parameters:
          delivery(Delivery): The delivery.
          consumer(object): Whose channel is gone.

        Returns:
          bool: Whether there is nothing more to be done now; otherwise it has taken another copy over, and can settle.
        """
        with self._lock:
            if delivery.consumer is not consumer:
                return False
            if _remove(self._running, delivery):
                self._parked.setdefault(delivery.message_id, []).append(delivery)
                while len(self._parked) > _PARKED:
                    self._parked.pop(next(iter(self._parked)))
            return True

    def take_over(self, copy: Delivery) -> tuple[Copy, Delivery]:
        """Find what this process has made of a message already, and give it the copy's place at the broker.

        Parameters:
          copy(Delivery): What a live consumer has just been delivered, and the broker says it has delivered before.

        Returns:
          tuple[Copy, Delivery]: What the copy is, and the delivery that goes on in its place, or itself.
        """
        message_id = copy.message_id
        with self._lock:
            settled = self._settled.get(message_id)
            if settled is not None and _same(settled, copy):
                # The ack that is given now may be lost, too.
                self._settled[message_id] = replace(settled, consumer=copy.consumer)
                return (Copy.NACKED if settled.failed else Copy.ACKED), copy
            for kind, places in ((Copy.ENDED, self._parked), (Copy.RUNNING, self._running)):
                for delivery in places.get(message_id, ()):
                    if _same(delivery, copy):
                        if kind is Copy.ENDED:
                            _remove(self._parked, delivery)
                            self._running.setdefault(message_id, []).append(delivery)
                        message: Any = delivery.message
                        message._tag = copy.message._tag
                        message.redelivered = True
                        delivery.consumer = copy.consumer
                        return kind, delivery
        return Copy.NEW, copy


def _same(known: Delivery | _Settled, copy: Delivery) -> bool:
    """Whether a copy is the very message that came over a channel that is gone, and no other attempt of it."""
    consumer: Any = known.consumer
    return known.options == copy.options and consumer is not copy.consumer and not consumer.alive()


def _remove(places: dict[str, list[Delivery]], delivery: Delivery) -> bool:
    """Take a delivery out; say whether it was there."""
    there = places.get(delivery.message_id, [])
    for index, each in enumerate(there):
        if each is delivery:
            del there[index]
            if not there:
                del places[delivery.message_id]
            return True
    return False
