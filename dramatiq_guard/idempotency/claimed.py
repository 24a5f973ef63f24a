"""A claimed key, as the actor that runs under it sees it by `current_delivery`: its key, its steps, its transaction.

This module must not know the middleware that made the claim.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from .. import clock, telemetry
from ..errors import Defer, FencedOut, LeaseLost, OutcomeUnknown, Permanent, StoreUnavailable
from ..policy.keys import derived_key
from ..reconcile import Done, NotDone, Unknown
from ..settle.killpoints import reach
from ..stores.idempotency import Finish
from .values import decode, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from ..interrupts import Run
    from ..stores.idempotency import Claim, IdempotencyStore
    from .plan import Plan

__all__ = ["DECIDED", "STARTED", "UNDONE", "Claimed", "decided", "patiently"]

#: A step that has begun, where it must not run twice.
STARTED: Final = b"?"
#: The same, after a person said that it had not happened.
UNDONE: Final = b"!"
#: Beside the steps: when a person said so, and how many runs had died by then.
DECIDED: Final = "~decided"
_FIRST_WAIT: Final = 50
_LONGEST_WAIT: Final = 1_000


class Claimed:
    """A key that is held by the run of one delivery.

    Parameters:
      key(str): The key.
      plan(Plan): What its actor asked for.
      store(IdempotencyStore | None): Where it is held; ``None`` where the work goes on without its store.
      claim(Claim): The answer to the claim.
      run(Run): What can interrupt the run.
      asked_at(int): When the claim was sent, monotonic: the lease is over so long after that, or earlier.
      connection(Any): The connection of the inbox.
    """

    __slots__ = (
        "_decided",
        "_local",
        "_used",
        "announce",
        "asked_at",
        "claim",
        "completed",
        "completing",
        "connection",
        "finish",
        "key",
        "lost",
        "owed",
        "plan",
        "renew_at",
        "result",
        "run",
        "store",
    )

    def __init__(
        self,
        key: str,
        plan: Plan,
        store: IdempotencyStore | None,
        claim: Claim,
        run: Run | None,
        asked_at: int,
        connection: Any = None,
    ) -> None:
        self.key = key
        self.plan = plan
        self.store = store
        self.claim = claim
        self.run = run
        self.asked_at = asked_at
        self.connection = connection
        #: When the lease is to be renewed, and whether it is known to be lost; written by `leases`.
        self.renew_at = asked_at + plan.lease // 3
        self.lost = False
        #: Whether the record is being completed, so that it is held no more; whether it is done, how, and with what.
        self.completing = False
        self.completed = False
        self.finish: Finish | None = None
        self.result: Any = None
        #: Called just before the key is completed by a transaction: duplicates may find it done from then on.
        self.announce: Callable[[Claimed], object] | None = None
        #: What the store could not take when the run ended, and has to be told yet.
        self.owed: Callable[[], object] | None = None
        self._decided = decided(claim.steps)
        self._used: set[str] = set()
        self._local = threading.Lock()

    @property
    def fence(self) -> int:
        """The fencing token: larger than that of any earlier run of this key."""
        return self.claim.fence

    @property
    def is_takeover(self) -> bool:
        """Whether an earlier run of this key ended without a word: its effect may have happened."""
        return self.claim.crashes > self._decided[1]

    def key_for(self, name: str, *, generation: int = 0) -> str:
        """The key to give to a third party for one of the things that this work does."""
        return derived_key(self.key, name, generation)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(
        self,
        name: str,
        perform: Callable[[str], Any],
        *,
        key_ttl: int | None = None,
        at_most_once: bool = False,
        reconcile: Callable[[str], Any] | None = None,
    ) -> Any:
        """Do something once and remember what it returned; see `Delivery.step`."""
        if self.plan.mode == "inbox":
            raise Permanent(
                f"step({name!r}) in an actor with idempotent='inbox': a step must outlive a rollback, so declare the "
                "actor with idempotent='atomic' or 'lease'"
            )
        with self._local:
            if name in self._used:
                raise Permanent(f"step {name!r} was taken twice in one run: give each its own name, like 'line:3'")
            self._used.add(name)
        if asyncio._get_running_loop() is not None:
            return self._step_async(name, perform, key_ttl, at_most_once, reconcile)
        known, value = self._known(name, key_ttl, at_most_once, reconcile)
        if known:
            return value
        return self._record(name, perform(self.key_for(name)))

    async def _step_async(
        self,
        name: str,
        perform: Callable[[str], Awaitable[Any]],
        key_ttl: int | None,
        at_most_once: bool,
        reconcile: Callable[[str], Any] | None,
    ) -> Any:
        known, value = await asyncio.to_thread(self._known, name, key_ttl, at_most_once, reconcile)
        if known:
            return value
        made = perform(self.key_for(name))
        if hasattr(made, "__await__"):
            made = await made
        return await asyncio.to_thread(self._record, name, made)

    def _known(
        self, name: str, key_ttl: int | None, at_most_once: bool, reconcile: Callable[[str], Any] | None
    ) -> tuple[bool, Any]:
        """Whether a step needs no call any more, and its value."""
        reach("before-step")
        found = self.claim.steps.get(name)
        if found == UNDONE:
            found = None
        if found is not None and found != STARTED:
            return True, decode(found)
        forgotten = key_ttl is not None and self._age() > key_ttl and self.claim.attempts > 1
        if found == STARTED or forgotten:
            why = (
                f"step {name!r} had begun when its process died"
                if found == STARTED
                else f"the third party may have forgotten the key of step {name!r} after {key_ttl} ms"
            )
            answer = NotDone() if self.store is None else Unknown() if reconcile is None else self._ask(name, reconcile)
            if isinstance(answer, Done):
                return True, self._record(name, answer.result)
            if isinstance(answer, Unknown):
                self.park(why)
        if at_most_once and found is None:
            self._write(name, STARTED)
        return False, None

    def _ask(self, name: str, reconcile: Callable[[str], Any]) -> Done | NotDone | Unknown:
        answer = reconcile(self.key_for(name))
        if not isinstance(answer, Done | NotDone | Unknown):
            raise Permanent(f"reconcile of step {name!r} must return Done(…), NotDone() or Unknown(), not {answer!r}")
        return answer

    def _record(self, name: str, value: Any) -> Any:
        try:
            data = encode(value)
            value = decode(data)  # what another run would get, so that nobody leans on more
        except Exception as error:
            raise Permanent(
                f"what step {name!r} returned cannot be stored ({error}): return plain values, like the id of what was "
                "made"
            ) from error
        reach("in-step")
        self._write(name, data)
        reach("after-step")
        return value

    def _write(self, name: str, data: bytes) -> None:
        store = self.store
        if store is None:
            return
        try:
            with self._shielded(), telemetry.key_operation("step", self.plan.engine) as operation:
                held = patiently(self.plan.store_wait, lambda: store.step(self.key, self.fence, name, data))
                operation.outcome, operation.fence = "recorded" if held else "lost", self.fence
        except StoreUnavailable as error:
            raise Defer(f"step {name!r} of key {self.key} cannot be recorded now: {error}") from error
        if not held:
            raise FencedOut(f"key {self.key} is held by another by now: step {name!r} was not recorded")

    def _age(self) -> int:
        """Milliseconds since the key was first claimed, or declared undone, by the store's clock."""
        return self.claim.now - max(self.claim.first_claim_at, self._decided[0]) + clock.monotonic() - self.asked_at

    # -- transactions --------------------------------------------------------------------------------------------------

    @contextmanager
    def atomic(self, result: Any = None, *, step: str | None = None) -> Iterator[Any]:
        """Open a transaction that commits the user's rows and the key together; see `Delivery.atomic`."""
        if self.plan.mode != "atomic" or self.store is None:
            raise Permanent(
                f"atomic() in an actor with idempotent={self.plan.mode!r}: declare it with idempotent='atomic', and "
                "give IdempotencyGuard a store on PostgreSQL"
                if self.store is not None
                else "atomic() while the store is out of reach, and the actor runs without it (on_store_error='run')"
            )
        if self.completed:
            raise Permanent(
                "atomic() after the key was completed: complete it last, and record what comes before by step="
            )
        try:
            data = encode(result) if result is not None or step is not None else None
        except Exception as error:
            raise Permanent(f"the result of atomic() cannot be stored ({error}): give plain values") from error
        store: Any = self.store
        reach("before-atomic")
        transaction = store.atomic(self.key, self.fence, Finish(data), step=step)
        try:
            with self._shielded():
                connection = transaction.__enter__()
            try:
                yield connection
                if step is None and self.announce is not None:
                    with self._shielded():
                        self.announce(self)
                reach("before-commit")
            except BaseException as error:
                with self._shielded():
                    transaction.__exit__(type(error), error, error.__traceback__)
                raise
            self.completing = step is None
            with self._shielded():
                transaction.__exit__(None, None, None)
        except BaseException as error:
            self.completing = False
            if not isinstance(error, StoreUnavailable):
                raise
            raise Defer(f"the transaction of key {self.key} did not come through: {error}") from error
        if step is None:
            self.completed, self.result = True, result
        reach("after-commit")

    def _shielded(self) -> AbstractContextManager[None]:
        """Nothing may tear a word with the store, which would leave its connection between question and answer."""
        return nullcontext() if self.run is None else self.run.shielded()

    def park(self, why: str) -> None:
        """Give the key over to a person.

        Raises:
          OutcomeUnknown: Always, or what says that the store could not be told.
        """
        store = self.store
        if store is not None:
            try:
                with self._shielded():
                    held = patiently(self.plan.store_wait, lambda: store.park(self.key, self.fence))
            except StoreUnavailable as error:
                raise Defer(f"key {self.key} cannot be parked now: {error}") from error
            if not held:
                raise LeaseLost
        raise OutcomeUnknown(
            f"{why}, so nobody knows whether the effect of key {self.key} happened: look, and then run "
            f"dramatiq-guard keys resolve {self.key!r} --done or --retry"
        )


def decided(steps: Mapping[str, bytes]) -> tuple[int, int]:
    """When a person last said that nothing of this work had happened, and how many runs had died by then."""
    at, _, crashes = steps.get(DECIDED, b"").partition(b" ")
    return (int(at), int(crashes)) if at.isdigit() and crashes.isdigit() else (0, 0)


def patiently(store_wait: int, ask: Callable[[], Any]) -> Any:
    """Ask a store until it answers, for so many milliseconds.

    Raises:
      StoreUnavailable: It did not.
      GuardError: Whatever else it said.
    """
    until = clock.monotonic() + store_wait
    pause = _FIRST_WAIT
    while True:
        try:
            return ask()
        except StoreUnavailable:
            left = until - clock.monotonic()
            if left <= 0:
                raise
            clock.wait(threading.Event(), min(pause, left))
            pause = min(2 * pause, _LONGEST_WAIT)
