"""Runs that outlive their connection: each settles on the copy of its message that the broker delivers anew.

When a channel is lost, the broker takes its unacked messages back and delivers them again, while this process may still
be at work on them.  Running them a second time is what at-least-once allows; here it is needless:

1. A delivery is underway from the moment its function is entered until the broker has heard of its end.
2. Its end comes when its channel is gone: nothing can be sent for it, so it is parked with all that it owes.
3. The same message comes again, on the next channel, to this process: the copy is not run.  The delivery takes over its
   tag, and goes on, or settles at once if it was parked.

What comes again to another process runs there, and the parked delivery is forgotten in the end.

This module must not know any broker or middleware.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .delivery import Delivery

__all__ = ["Underway"]

#: How many ended deliveries wait for their messages to come again; a lost channel parks one a worker thread.
_PARKED: Final = 1_000


class Underway:
    """The deliveries of one process whose function has been entered, and of whose end the broker has not heard."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, list[Delivery]] = {}
        self._parked: dict[str, list[Delivery]] = {}

    def enter(self, delivery: Delivery) -> None:
        """Its function is about to be entered."""
        with self._lock:
            self._running.setdefault(delivery.message_id, []).append(delivery)

    def leave(self, delivery: Delivery, consumer: object = None) -> bool:
        """Its end is settled, or its function is not entered after all.

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

    def take_over(self, copy: Delivery) -> tuple[Delivery | None, bool]:
        """Find the delivery that this process has begun already, and give it the copy's place at the broker.

        Parameters:
          copy(Delivery): What a live consumer has just been delivered, and the broker says it has delivered before.

        Returns:
          tuple[Delivery | None, bool]: The delivery that goes on in the copy's place, if there is one, and whether its
          end has come already, so that it is to be settled now.
        """
        with self._lock:
            for places, ended in ((self._parked, True), (self._running, False)):
                for delivery in places.get(copy.message_id, ()):
                    if _same(delivery, copy):
                        if ended:
                            _remove(self._parked, delivery)
                            self._running.setdefault(delivery.message_id, []).append(delivery)
                        message: Any = delivery.message
                        message._tag = copy.message._tag
                        message.redelivered = True
                        delivery.consumer = copy.consumer
                        return delivery, ended
        return None, False


def _same(delivery: Delivery, copy: Delivery) -> bool:
    """Whether a copy is the very message of a delivery whose channel is gone, and no other attempt of it."""
    consumer: Any = delivery.consumer
    return delivery.options == copy.options and consumer is not copy.consumer and not consumer.alive()


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
