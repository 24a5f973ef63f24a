"""Who tells a group or a callback of a message that succeeded: one of its deliveries, and once.

Dramatiq's barrier counts a group's member each time that it is told of it, and a callback is a message of its own each
time.  So whoever is about to tell reserves that before the key is done, and leaves a mark when it has told; a duplicate
that meets the mark is skipped, and one that meets somebody about to tell waits for the mark.  If that one dies, its
reservation runs out as a lease does, and the duplicate tells in its place.

It must not know how a key is claimed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..delivery import Delivery
    from ..stores.idempotency import IdempotencyStore

__all__ = ["has_told", "leave_telling", "mark", "may_tell", "tells"]


def tells(delivery: Delivery) -> bool:
    """Whether a success of this message tells a group or a callback."""
    if "group_completion_uuid" in delivery.options or delivery.options.get("on_success"):
        return True
    return bool(delivery.stack.broker.actors[delivery.actor_name].options.get("on_success"))


def may_tell(store: IdempotencyStore, delivery: Delivery, who: str, *, lasts: int) -> bool:
    """Reserve it; whether nobody else is about to.

    Parameters:
      store(IdempotencyStore): Where.
      delivery(Delivery): The delivery.
      who(str): A name for this delivery's run.
      lasts(int): For how many milliseconds.
    """
    return store.reserve(f"tell:{_name(delivery)}", who, ttl=lasts) == who


def leave_telling(store: IdempotencyStore, delivery: Delivery, who: str) -> None:
    """Give the reservation back: it is not for this run to tell."""
    store.unreserve(f"tell:{_name(delivery)}", who)


def mark(store: IdempotencyStore, delivery: Delivery, *, retention: int) -> None:
    """Note that all have been told."""
    store.mark(_name(delivery), retention=retention)


def has_told(store: IdempotencyStore, delivery: Delivery) -> bool:
    """Whether all have been told."""
    return store.marked(_name(delivery))


def _name(delivery: Delivery) -> str:
    # A group that is run twice has the same message ids and another barrier.
    return f"{delivery.message_id}:{delivery.options.get('group_completion_uuid', '')}"
