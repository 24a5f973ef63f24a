"""What a duplicate of finished work is given: the recorded result, and nothing that must be heard of only once.

Returning the result from the seam runs Dramatiq's after hooks again, which is what a first delivery that was killed
before its ack needs.  But Dramatiq's barrier would count a group's member twice, and a callback would be sent twice; so
a message that tells a group or a callback leaves a mark when it has told them, and its duplicates are skipped.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dramatiq import Message
from dramatiq.middleware import SkipMessage
from dramatiq.results import Results

from ..delivery import Due
from ..errors import OutcomeUnknown, StoreUnavailable
from ..stores.idempotency import FAILURE, OMITTED
from .claimed import patiently
from .claiming import put_off, put_off_busy
from .telling import has_told, mark, may_tell, tells
from .values import decode, replayed_failure

if TYPE_CHECKING:
    from collections.abc import Container

    from ..delivery import Delivery
    from ..stores.idempotency import Claim
    from .keyring import Keyring
    from .plan import Plan

__all__ = ["owe_marker", "replay"]


def replay(keyring: Keyring, plan: Plan, delivery: Delivery, claim: Claim, key: str, guarded: Container[str]) -> Any:
    """What an earlier delivery of the same work ended with.

    Parameters:
      keyring(Keyring): The store.
      plan(Plan): What the actor asked for.
      delivery(Delivery): The duplicate.
      claim(Claim): The answer to its claim: ``done``.
      key(str): The key.
      guarded(Container[str]): The names of the actors that are guarded.

    Raises:
      ReplayedFailure: The earlier delivery failed for good.
      OutcomeUnknown: Its result was not kept, and somebody is to be given it.
      SkipMessage: All who must hear of this message once have heard of it.
      Defer: Another delivery is about to tell them, or the store is out of reach.
    """
    if tells(delivery) and not claim.flags & FAILURE:
        try:
            mine = patiently(
                plan.store_wait,
                lambda: may_tell(keyring.store, delivery, keyring.owner(), lasts=plan.lease),
            )
            told = patiently(plan.store_wait, lambda: has_told(keyring.store, delivery))
        except StoreUnavailable as error:
            put_off(delivery, error)
        if told:
            _leave(delivery, claim)
        if not mine:
            put_off_busy(delivery, plan.lease, "another delivery of this message is about to tell of it")
    if claim.flags & FAILURE and claim.result is not None:
        delivery.replayed = True
        raise replayed_failure(claim.result)
    if claim.flags & OMITTED:
        if _is_wanted(delivery):
            raise OutcomeUnknown(
                f"key {key} is done, and its result was not kept: the next stage or whoever waits for the result "
                "cannot be given it. Raise max_result, or return less"
            )
        return None
    _warn_of_next_stage(keyring, plan, delivery, guarded)
    return None if claim.result is None else decode(claim.result)


def owe_marker(keyring: Keyring, delivery: Delivery) -> None:
    """Owe the mark that a message has told its group and its callbacks; what is owed before it is telling them."""
    claimed = delivery.claim
    if claimed is None or claimed.store is None or delivery.message.failed or not delivery.returned:
        return
    if tells(delivery):
        retention = keyring.retention(claimed.plan, delivery)
        delivery.dues.append(Due("marker", lambda: mark(keyring.store, delivery, retention=retention)))


def _leave(delivery: Delivery, claim: Claim) -> None:
    """Skip the duplicate; the result that was stored may have been lost since."""
    broker = delivery.stack.broker
    for results in broker.middleware:
        if type(results) is Results and not claim.flags:
            store, ttl = results._lookup_options(broker, delivery.message)
            if store:
                value = None if claim.result is None else decode(claim.result)
                perform = partial(results.backend.store_result, delivery.message, value, ttl)
                delivery.dues.append(Due("result", perform))
    delivery.message.options["store_results"] = False  # in memory: Results would store None (H7)
    raise SkipMessage("an earlier delivery of this message has told its group and its callbacks")


def _is_wanted(delivery: Delivery) -> bool:
    """Whether somebody is given the result of this message."""
    broker, message = delivery.stack.broker, delivery.message
    target = delivery.options.get("pipe_target")
    if isinstance(target, dict):
        ignore = Message(**target).options.get("pipe_ignore")
        if not (ignore or broker.actors[delivery.actor_name].options.get("pipe_ignore")):
            return True
    return any(
        bool(middleware._lookup_options(broker, message)[0])
        for middleware in broker.middleware
        if type(middleware) is Results
    )


def _warn_of_next_stage(keyring: Keyring, plan: Plan, delivery: Delivery, guarded: Container[str]) -> None:
    target = delivery.options.get("pipe_target")
    name = target.get("actor_name") if isinstance(target, dict) else None
    if name is not None and name not in guarded:
        keyring.say_once(
            "next stage",
            plan,
            "Actor %r is guarded, and the next stage of its pipeline, %r, is not: a duplicate of the one may run the "
            "other again.",
            plan.actor,
            name,
        )
