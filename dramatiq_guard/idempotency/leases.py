"""One thread a process that keeps the leases of its claims alive, all of them in one round trip.

A job that is over before a third of its lease costs nothing.  Nobody's lease is kept for longer than its time limit and
one more lease, so that a hung thread cannot hold a key for ever.  Whoever could not be kept alive is interrupted before
anybody else may take the key over: `interrupts` does that by the clock, since this thread may be waiting for the store.

It has a thread of its own, apart from the heartbeat of `exits.quarantine`: their stores may be two, and the one that is
out must not starve the other.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from dramatiq.logging import get_logger

from .. import clock
from ..errors import LeaseLost, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from ..interrupts import Interrupts
    from ..stores.idempotency import IdempotencyStore
    from .claimed import Claimed

__all__ = ["Leases"]

#: How often, in milliseconds, it is looked whether a lease is to be renewed, at most.
_BEAT: Final = 1_000


class Leases:
    """Keeps the claims of one worker process alive.

    Parameters:
      store(IdempotencyStore): Where they are held.
    """

    def __init__(self, store: IdempotencyStore) -> None:
        self.logger = get_logger("dramatiq_guard", "leases")
        self.store = store
        self.interrupts: Interrupts | None = None
        self._lock = threading.Lock()
        self._held: dict[int, Claimed] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._beat = _BEAT

    def start(self, interrupts: Interrupts, shortest: int) -> None:
        """Begin; called when the worker boots, after the fork.

        Parameters:
          interrupts(Interrupts): Who interrupts a run whose lease is lost.
          shortest(int): The shortest lease there is, in milliseconds.
        """
        self._closed.set()  # another worker's before, in this process
        self.interrupts = interrupts
        self._closed = threading.Event()
        self._held = {}
        self._beat = max(10, min(_BEAT, shortest // 6))
        interrupts.interval = min(interrupts.interval, self._beat)
        self._thread = threading.Thread(
            target=self._run, args=(self._closed,), name="dramatiq-guard-leases", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End; the worker has shut down."""
        self._closed.set()

    def hold(self, claimed: Claimed) -> None:
        """Keep a claim alive from now on."""
        if claimed.run is not None:
            claimed.run.leased_until = claimed.asked_at + claimed.plan.lease
        with self._lock:
            self._held[id(claimed)] = claimed

    def drop(self, claimed: Claimed) -> None:
        """Keep a claim alive no more."""
        with self._lock:
            self._held.pop(id(claimed), None)

    def pay(self, claimed: Claimed) -> None:
        """Tell the store what it could not take when the run ended, and keep the claim alive no more.

        Raises:
          StoreUnavailable: It cannot take it now either.
          StoreError: It never will; the claim is kept alive no more.
        """
        owed = claimed.owed
        if owed is not None:
            try:
                owed()  # twice does no harm: the fence tells
            except StoreUnavailable:
                raise
            except StoreError:
                self.drop(claimed)
                raise
            claimed.owed = None
        self.drop(claimed)

    def renew(self) -> None:
        """Renew what has to be."""
        now = clock.monotonic()
        with self._lock:
            alive = [each for each in self._held.values() if not each.lost]
            owing = [each for each in self._held.values() if each.owed is not None]
        due = []
        if any(each.renew_at <= now for each in alive):
            # Those that are due at one of the next beats as well: all of them come to share one round trip.
            due = [each for each in alive if each.renew_at - each.plan.lease // 6 <= now]
        by_lease = defaultdict(list)
        for claimed in due:
            limit = None if claimed.run is None else claimed.run.limit_at
            if limit is None or now < limit + claimed.plan.lease:
                by_lease[claimed.plan.lease].append(claimed)
        for lease, claims in by_lease.items():
            asked_at = clock.monotonic()
            kept = self.store.renew([(each.key, each.fence) for each in claims], lease=lease)
            for claimed, held in zip(claims, kept, strict=True):
                if held:
                    claimed.renew_at = asked_at + lease // 3
                    if claimed.run is not None:
                        claimed.run.leased_until = asked_at + lease
                else:
                    self._lost(claimed)
        for claimed in owing:
            self.pay(claimed)

    def _lost(self, claimed: Claimed) -> None:
        with self._lock:
            if id(claimed) not in self._held:
                return  # it was finished meanwhile
        if claimed.completing or claimed.completed:
            return
        claimed.lost = True
        self.logger.warning("Key %s is not held by this run any more; the run is interrupted.", claimed.key)
        if self.interrupts is not None and claimed.run is not None:
            self.interrupts.interrupt(claimed.run, LeaseLost)

    def _run(self, closed: threading.Event) -> None:
        complained = False
        while not clock.wait(closed, self._beat):
            try:
                self.renew()
                complained = False
            except StoreError as error:
                if not complained:
                    self.logger.warning("Leases could not be renewed: %s", error)
                complained = True
            except Exception:
                # Whatever it is: without this thread every long job would lose its key.
                self.logger.exception("Renewing leases failed; it is tried again.")
