"""What all runs of one guard share: the store, the leases, how long keys are remembered, and what has been said.

It must not know how a claim is answered, nor what is done about it.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from dramatiq.logging import get_logger

from .. import clock
from .leases import Leases
from .retention import retention_of

if TYPE_CHECKING:
    from ..delivery import Delivery
    from ..stores.idempotency import IdempotencyStore
    from .plan import Plan

__all__ = ["Keyring"]


class Keyring:
    """The store of one guard, in one process.

    Parameters:
      store(IdempotencyStore): Where keys are kept.
    """

    def __init__(self, store: IdempotencyStore) -> None:
        self.logger = get_logger("dramatiq_guard", "idempotency")
        self.store = store
        self.leases = Leases(store)
        self._retentions: dict[str, int] = {}
        self._said: set[tuple[str, str]] = set()
        self._process = ""

    def boot(self) -> None:
        """Begin anew: a worker process boots, after the fork."""
        self._process = f"{socket.gethostname()}:{os.getpid()}"
        self._retentions = {}

    def owner(self) -> str:
        """A name for one delivery's claim: whoever asks again under it, since a reply was lost, is answered alike."""
        return f"{self._process}:{clock.unique()[:12]}"

    def retention(self, plan: Plan, delivery: Delivery) -> int:
        """For how many milliseconds the keys of an actor are remembered."""
        known = self._retentions.get(plan.actor)
        if known is None:
            options = delivery.stack.broker.actors[plan.actor].options
            known = self._retentions[plan.actor] = retention_of(plan, options, delivery.stack.seam.decider)
        return known

    def say_once(self, what: str, plan: Plan, text: str, *values: Any) -> None:
        """Log something about an actor the first time that it happens in this process."""
        if (what, plan.actor) not in self._said:
            self._said.add((what, plan.actor))
            self.logger.warning("%s (Said once.)", text % values)
