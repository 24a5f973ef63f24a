"""Telling the copies of one message apart where a broker cannot move a message in one step.

A publish whose confirm is lost is made again, and then two copies of the same retry may be in the broker.  So each
copy carries three marks:

- its *life* (``b``): which enqueue by the application it comes from.  One message may be enqueued twice, replayed, or
  shovelled back from the dead letters: these are lives of their own, and nothing of one is stale because of another.
- its *sequence* (``s``): how often the message has been settled before.
- its *fork* (``f``): which publish it comes from.

The first fork of a sequence to reach a worker wins: the store remembers it, and the others are dropped unseen.  A copy
of an earlier settlement is dropped, too; the winner itself may come again, after a crash.

Where no store is given, each process remembers for itself what it has seen of late: copies that reach two processes
then both run.

Ordinary messages cost no round trip: only retries, promoted delays and what the broker says it has delivered before are
looked up.  What a producer without the stack enqueues has no life until its first retry, and is not looked up.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import NAMESPACE_OID, uuid4, uuid5

from dramatiq.logging import get_logger

from .. import clock
from ..delivery import CARRIER, carrier_of, count
from ..errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dramatiq import Message

    from ..delivery import Delivery

__all__ = ["LIFE", "SETTLED", "Deliveries", "Forks", "SeenHere", "new_mark"]

#: Which enqueue by the application a message comes from.
LIFE: Final = "b"
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


class SeenHere:
    """The deliveries that one process has seen of late.

    Parameters:
      limit(int): How many messages it remembers.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._records: OrderedDict[str, tuple[int, str | None]] = OrderedDict()

    def claim(self, message_id: str, sequence: int, fork: str, *, now: int) -> bool:
        with self._lock:
            known, winner = self._records.get(message_id, (-1, None))
            if known > sequence or (known == sequence and winner not in (None, fork)):
                return False
            self._keep(message_id, sequence, fork)
            return True

    def advance(self, message_id: str, sequence: int, *, now: int) -> None:
        with self._lock:
            if self._records.get(message_id, (-1, None))[0] < sequence:
                self._keep(message_id, sequence, None)

    def purge(self, *, now: int) -> int:
        return 0

    def _keep(self, message_id: str, sequence: int, fork: str | None) -> None:
        self._records[message_id] = (sequence, fork)
        self._records.move_to_end(message_id)
        if len(self._records) > self._limit:
            self._records.popitem(last=False)


class Forks:
    """Marks the copies that a worker publishes, and admits those that it receives.

    Parameters:
      store(Deliveries | None): Where winners are remembered; ``None`` where copies need not be told apart.
    """

    def __init__(self, store: Deliveries | None) -> None:
        self.logger = get_logger("dramatiq_guard", "forks")
        self.store = store
        self._local = threading.local()
        self._purge_after = 0

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """What this thread enqueues inside the block is a copy of a message that lives already."""
        self._local.publishing = True
        try:
            yield
        finally:
            self._local.publishing = False

    def enqueueing(self, message: Message[Any]) -> None:
        """The application enqueues a message: a life begins, whatever the message has been through before."""
        local = self._local.__dict__
        if self.store is None or local.get("publishing") or local.get("enqueueing") is message:
            # In the last case Dramatiq tries again, after a confirm that may have been lost: it is the same enqueue.
            return
        local["enqueueing"] = message
        carrier = carrier_of(message.options)
        carrier[LIFE] = new_mark()
        carrier.pop(_FORK, None)
        message.options[CARRIER] = carrier

    def enqueued(self) -> None:
        """The application has enqueued its message."""
        if self.store is not None:
            self._local.enqueueing = None

    def marked(self, message: Message[Any]) -> Message[Any]:
        """The message with a mark of its own, for one publish."""
        carrier = carrier_of(message.options)
        if self.store is None or not isinstance(carrier.get(LIFE), str):
            return message
        carrier.setdefault(SETTLED, 0)
        carrier[_FORK] = new_mark()
        return message.copy(options={CARRIER: carrier})

    def owed(self, delivery: Delivery, part: str, message: Message[Any]) -> Message[Any]:
        """A message that a delivery's end owes, marked for one publish: its life follows from the delivery's.

        A callback is made anew by whoever runs the delivery: its id follows from the delivery's, too, so that two of
        them are known to be one.  The stages of a pipeline have ids that somebody may know.
        """
        carrier = carrier_of(delivery.options)
        key = _key(delivery, carrier)
        if self.store is None or key is None:
            return message
        if part.startswith("on_"):
            made_of = f"{key}:{count(carrier.get(SETTLED))}:{part}"
            message = message.copy(message_id=str(uuid5(NAMESPACE_OID, made_of)))
        return self.marked(message.copy(options={CARRIER: {**carrier_of(message.options), LIFE: carrier[LIFE]}}))

    def admits(self, delivery: Delivery) -> bool:
        """Whether this copy may run; one that another has overtaken may not."""
        carrier = carrier_of(delivery.options)
        key = _key(delivery, carrier)
        if self.store is None or key is None or not _looked_up(delivery, carrier):
            return True
        fork = carrier.get(_FORK)
        try:
            return self.store.claim(
                key, count(carrier.get(SETTLED)), fork if isinstance(fork, str) else "", now=clock.now()
            )
        except StoreError as error:
            self.logger.warning(
                "Message %r runs without being looked up: the deliveries store is out (%s).", delivery.message_id, error
            )
            return True

    def settled(self, delivery: Delivery) -> None:
        """Its successor is on its way: copies of this settlement or an earlier one are stale from now on."""
        carrier = carrier_of(delivery.options)
        key = _key(delivery, carrier)
        if self.store is None or key is None:
            return
        try:
            self.store.advance(key, count(carrier.get(SETTLED)) + 1, now=clock.now())
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

    def ended(self, delivery: Delivery) -> None:
        """It is about to be acked, and an ack may be lost: if it succeeded, nothing of it is to run again.

        A message that is nacked is left as it is: it may be shovelled back from the broker's dead letters.
        """
        if delivery.returned and not delivery.message.failed and _looked_up(delivery, carrier_of(delivery.options)):
            self.settled(delivery)


def new_mark() -> str:
    """A mark that no other has."""
    return uuid4().hex[:12]


def _key(delivery: Delivery, carrier: Mapping[str, Any]) -> str | None:
    """Under what a life is remembered."""
    life = carrier.get(LIFE)
    return f"{delivery.message_id}:{life}" if isinstance(life, str) else None


def _looked_up(delivery: Delivery, carrier: Mapping[str, Any]) -> bool:
    """Whether this may be one copy of several."""
    return isinstance(carrier.get(_FORK), str) or bool(getattr(delivery.message, "redelivered", False))
