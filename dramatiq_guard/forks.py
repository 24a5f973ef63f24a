"""Telling the copies of one message apart where a broker cannot move a message in one step.

A publish whose confirm is lost is made again, and then two copies of the same retry may be in the broker.  So each
copy carries how often its message has been settled before (``s``) and a mark of the one publish that it came from
(``f``).  The first of them to reach a worker wins: the store remembers its mark, and the others are dropped unseen.  A
copy of an earlier settlement is dropped, too; the winner itself may come again, after a crash.

Ordinary messages carry neither and cost no round trip: only retries, promoted delays and what the broker says it has
delivered before are looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from dramatiq.logging import get_logger

from . import clock
from .delivery import CARRIER, carrier_of, count
from .errors import StoreError

if TYPE_CHECKING:
    from dramatiq import Message

    from .delivery import Delivery

__all__ = ["SETTLED", "Deliveries", "Forks"]

#: How often the message has been settled before this copy of it was sent.
SETTLED: Final = "s"
_FORK: Final = "f"

#: How often, in milliseconds, a process that settles messages has records removed that are over.
_PURGE_EVERY: Final = 60_000


class Deliveries(Protocol):
    """What is asked of a store; see `dramatiq_guard.stores.protocols.DeliveryStore`."""

    def claim(self, message_id: str, sequence: int, fork: str, *, now: int) -> bool: ...
    def advance(self, message_id: str, sequence: int, *, now: int) -> None: ...
    def purge(self, *, now: int) -> int: ...


class Forks:
    """Marks the copies that a worker publishes, and admits those that it receives.

    Parameters:
      store(Deliveries | None): Where winners are remembered; without one, copies are not told apart.
    """

    def __init__(self, store: Deliveries | None) -> None:
        self.logger = get_logger("dramatiq_guard", "forks")
        self.store = store
        self._purge_after = 0

    def marked(self, message: Message[Any]) -> Message[Any]:
        """The message with a mark of its own, for one publish."""
        if self.store is None:
            return message
        carrier = carrier_of(message.options)
        carrier.setdefault(SETTLED, 0)
        carrier[_FORK] = uuid4().hex[:12]
        return message.copy(options={CARRIER: carrier})

    def admits(self, delivery: Delivery) -> bool:
        """Whether this copy may run; one that another has overtaken may not."""
        if self.store is None:
            return True
        carrier = carrier_of(delivery.options)
        fork = carrier.get(_FORK)
        if not isinstance(fork, str):
            if not getattr(delivery.message, "redelivered", False):
                return True
            fork = ""
        try:
            return self.store.claim(delivery.message_id, count(carrier.get(SETTLED)), fork, now=clock.now())
        except StoreError as error:
            self.logger.warning(
                "Message %r runs without being looked up: the deliveries store is out (%s).", delivery.message_id, error
            )
            return True

    def settled(self, delivery: Delivery) -> None:
        """Its successor is on its way: copies of this settlement or an earlier one are stale from now on."""
        if self.store is None:
            return
        sequence = count(carrier_of(delivery.options).get(SETTLED)) + 1
        try:
            self.store.advance(delivery.message_id, sequence, now=clock.now())
            if clock.monotonic() >= self._purge_after:
                self._purge_after = clock.monotonic() + _PURGE_EVERY
                self.store.purge(now=clock.now())
        except StoreError as error:
            # The successor is sent; holding the original for this would send it again.
            self.logger.warning(
                "Message %r is settled without being noted: the deliveries store is out (%s).",
                delivery.message_id,
                error,
            )
