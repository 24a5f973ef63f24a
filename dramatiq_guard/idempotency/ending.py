"""How a run ends at its key: completed with its result, given back, or its failure remembered.

The effect has happened when the actor returns, so from then on nothing but another owner of the key keeps it from being
recorded: while the store is out the message waits at the settle barrier.  A key is given back before the retry is sent,
since that must find it free; and it, too, waits at the barrier, lest a lease that runs out look like a crash.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from .. import telemetry
from ..delivery import Due
from ..errors import Defer, StoreError
from ..policy.verdict import Kind, Verdict
from ..settle.killpoints import reach
from ..stores.idempotency import DONE, FAILURE, Ended
from .claimed import patiently
from .telling import leave_telling, may_tell, tells
from .values import decode, failed, finished, replayed_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..delivery import Delivery
    from .claimed import Claimed
    from .keyring import Keyring

__all__ = ["begin_to_tell", "complete", "give_back", "note_result"]

#: Milliseconds after which a run whose key was taken over looks for what became of it.
_FENCED_OUT = 1_000

_FINAL: Final = Verdict(Kind.PERMANENT, "actor:remember_failures", "the actor remembers this failure as its answer")


def complete(keyring: Keyring, delivery: Delivery, claimed: Claimed, result: Any) -> Any:
    """Record what the actor returned.

    Returns:
      Any: What this delivery returns: the same, or the result that stands if another run has finished first.

    Raises:
      Defer: Another run holds the key.
      ReplayedFailure: Another run has finished first, with a failure that is remembered.
    """
    plan = claimed.plan
    if claimed.completed:  # by atomic()
        keyring.leases.drop(claimed)
        reach("after-complete")
        return claimed.result
    if plan.mode == "atomic":
        keyring.say_once(
            "no atomic()",
            plan,
            "Actor %r is declared with idempotent='atomic', and message %r returned without atomic(result=…): its key "
            "was completed apart from its rows.",
            plan.actor,
            delivery.message_id,
        )
    note_result(keyring, claimed, result)
    claimed.completing = True
    reach("before-complete")
    try:
        ended = patiently(plan.store_wait, lambda: _finish(keyring, delivery, claimed))
    except StoreError as error:
        # Not only an outage: whatever the store says, the effect has happened, and must not happen again for it.
        keyring.logger.warning("Key %s is done, and waits to be recorded: %s", claimed.key, error)
        _owe(keyring, delivery, claimed, "complete", lambda: _finish(keyring, delivery, claimed))
        return result
    keyring.leases.drop(claimed)
    reach("after-complete")
    if ended.ours:
        return result
    keyring.logger.warning(
        "Message %r: key %s was taken over while the actor ran; this run's result does not count.",
        delivery.message_id,
        claimed.key,
    )
    if tells(delivery):
        with suppress(StoreError):  # it runs out by itself
            leave_telling(keyring.store, delivery, _teller(claimed))
    if ended.state != DONE or tells(delivery):
        # Who is told of it is for the other run, too, if it is done: this one comes back as its duplicate.
        raise Defer(f"key {claimed.key} is held by another run by now", delay=_FENCED_OUT)
    if ended.flags & FAILURE and ended.result is not None:
        raise replayed_failure(ended.result)
    return None if ended.result is None else decode(ended.result)


def give_back(keyring: Keyring, delivery: Delivery, claimed: Claimed, error: BaseException) -> None:
    """Give the key of a run that failed back, or remember its failure, which is final then.

    Raises:
      Defer: Its failure was to be remembered, and another run holds the key, or has finished first.
    """
    if claimed.completed:  # atomic() had committed, and something broke after it
        keyring.leases.drop(claimed)
        return
    claimed.completing = True
    remembered = isinstance(error, claimed.plan.remember_failures)
    name: str
    perform: Callable[[], object]
    if remembered:
        delivery.verdict = _FINAL  # whatever Classify found: a retry would only be given this failure
        claimed.finish = failed(error)
        name, perform = "complete", lambda: _finish(keyring, delivery, claimed)
    else:
        name, perform = "release", lambda: _release(keyring, claimed)
    reach(f"before-{name}")
    try:
        perform()
    except StoreError as refused:
        keyring.logger.warning("Key %s waits for its %s: %s", claimed.key, name, refused)
        _owe(keyring, delivery, claimed, name, perform)
        return
    keyring.leases.drop(claimed)
    reach(f"after-{name}")
    if remembered and not claimed.completed:
        delivery.verdict = None
        raise Defer(f"key {claimed.key} is held by another run by now", delay=_FENCED_OUT) from error


def note_result(keyring: Keyring, claimed: Claimed, result: Any) -> None:
    """Write down how the key will be completed, and say so where the result cannot be kept."""
    claimed.result = result
    claimed.finish, omitted = finished(result, claimed.plan.max_result)
    if omitted is not None:
        keyring.say_once(
            "omitted", claimed.plan, "The result of actor %r is not kept: %s.", claimed.plan.actor, omitted
        )


def begin_to_tell(keyring: Keyring, delivery: Delivery, claimed: Claimed) -> None:
    """Reserve what this run is about to tell, before a duplicate can find its key done."""
    if tells(delivery):
        may_tell(keyring.store, delivery, _teller(claimed), lasts=claimed.plan.lease)


def _teller(claimed: Claimed) -> str:
    return f"run {claimed.fence}"


def _finish(keyring: Keyring, delivery: Delivery, claimed: Claimed) -> Ended:
    finish = claimed.finish
    assert finish is not None  # noqa: S101 - whoever completes has written it down
    if not finish.flags & FAILURE:
        begin_to_tell(keyring, delivery, claimed)
    with telemetry.key_operation("complete", claimed.plan.engine) as operation:
        ended = keyring.store.complete(
            claimed.key, claimed.fence, finish, retention=keyring.retention(claimed.plan, delivery)
        )
        operation.outcome, operation.fence = "completed" if ended.ours else "lost", claimed.fence
    claimed.completed = ended.ours
    return ended


def _release(keyring: Keyring, claimed: Claimed) -> None:
    with telemetry.key_operation("release", claimed.plan.engine) as operation:
        released = keyring.store.release(claimed.key, claimed.fence)
        operation.outcome, operation.fence = "released" if released else "lost", claimed.fence


def _owe(keyring: Keyring, delivery: Delivery, claimed: Claimed, name: str, perform: Callable[[], object]) -> None:
    """Hold the message at the settle barrier until the store has been told what it could not take now.

    The lease is kept meanwhile, and its thread tries, too: the message may be lost to another consumer, and then nobody
    asks the barrier again.
    """
    claimed.owed = perform
    delivery.dues.append(Due(name, lambda: keyring.leases.pay(claimed)))
