"""Claiming the key of a delivery, and what becomes of a delivery that is not given it.

It must not know what a run does with the key.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NoReturn

from dramatiq.middleware import SkipMessage

from .. import clock, telemetry
from ..delivery import carrier_of, count
from ..errors import Defer, KeyReused, OutcomeUnknown, Permanent, StoreUnavailable
from ..settle.killpoints import reach
from ..stores.idempotency import BUSY, DONE, FRESH, MISMATCH, PARKED, TAKEOVER, Claim
from .claimed import Claimed, patiently

if TYPE_CHECKING:
    from ..delivery import Delivery
    from .keyring import Keyring
    from .plan import Plan

__all__ = ["OUTCOMES", "claim", "put_off", "put_off_busy", "refuse"]

#: How a claim's answer is called in telemetry.
OUTCOMES: Final = {
    FRESH: "claimed",
    TAKEOVER: "taken_over",
    BUSY: "in_progress",
    DONE: "replayed",
    MISMATCH: "key_reused",
    PARKED: "parked",
}

#: Milliseconds: the first and the longest wait of a message whose key is held, and of one whose store is out.
_BUSY_WAITS: Final = (1_000, 60_000)
_OUT_WAITS: Final = (5_000, 300_000)

#: For how many milliseconds ``on_busy="wait"`` keeps a worker thread, and how often it looks.
_WAIT_FOR_BUSY: Final = 10_000
_LOOK: Final = 200

_NEVER: Final = threading.Event()


def claim(keyring: Keyring, plan: Plan, delivery: Delivery, key: str, *, business: bool) -> Claimed:
    """Claim a key.

    Parameters:
      keyring(Keyring): The store.
      plan(Plan): What the actor asked for.
      delivery(Delivery): The delivery.
      key(str): Its key.
      business(bool): Whether that is a business key, which other messages may have, too.

    Returns:
      Claimed: Given, by ``fresh`` or ``takeover``; or ``done``, with what an earlier run has left.

    Raises:
      Defer, KeyReused, OutcomeUnknown, SkipMessage, Permanent: As the answer demands.
    """
    owner = keyring.owner()
    fingerprint = plan.fingerprint_of(delivery)
    retention = keyring.retention(plan, delivery)
    strict = business if plan.strict is None else plan.strict
    waits_until = clock.monotonic() + _WAIT_FOR_BUSY if business and plan.on_busy == "wait" else 0
    asked_at = 0

    def ask() -> Claim:
        nonlocal asked_at
        asked_at = clock.monotonic()
        return keyring.store.claim(
            key,
            owner=owner,
            lease=plan.lease,
            retention=retention,
            fingerprint=fingerprint,
            strict=strict,
            park=plan.parks,
        )

    reach("before-claim")
    while True:
        try:
            with telemetry.key_operation("claim", plan.engine) as operation:
                answer = patiently(plan.store_wait, ask)
                operation.outcome, operation.fence = OUTCOMES[answer.answer], answer.fence
            # When a record was claimed last only its owner is told; it is kept from its first claim on, at least.
            since = answer.now + plan.lease if answer.answer in (FRESH, TAKEOVER) else answer.first_claim_at
            delivery.remembered = key, since + retention
        except StoreUnavailable as error:
            return _without_store(keyring, plan, delivery, key, error)
        if not answer.same and answer.answer != MISMATCH:
            keyring.say_once(
                "another payload",
                plan,
                "Message %r of actor %r came with another payload than before; the first one counts.",
                delivery.message_id,
                plan.actor,
            )
        if answer.answer in (FRESH, TAKEOVER, DONE):
            return Claimed(key, plan, keyring.store, answer, delivery.interrupts, asked_at)
        if answer.answer != BUSY or clock.monotonic() >= waits_until or delivery.shutting_down:
            refuse(plan, delivery, key, answer, business=business)
        clock.wait(_NEVER, min(max(answer.lease_left, 1), _LOOK))


def refuse(plan: Plan, delivery: Delivery, key: str, answer: Claim, *, business: bool) -> NoReturn:
    """Raise what a claim that was not given leads to."""
    if answer.answer == MISMATCH:
        raise KeyReused(
            f"key {key} was used with another payload before; the first one stands. If this is other work, give it "
            "another key; if the difference does not matter, name what does in fingerprint=[…]"
        )
    if answer.answer == PARKED:
        raise OutcomeUnknown(
            f"key {key} is parked: an earlier run died, and nobody knows whether its effect happened. Look, and then "
            f"run dramatiq-guard keys resolve {key!r} --done or --retry"
        )
    if business and plan.on_busy == "skip":
        delivery.message.options["store_results"] = False  # in memory: Results would store None (H7)
        raise SkipMessage(f"key {key} is being worked on by another delivery")
    if business and plan.on_busy == "fail":
        raise Permanent(f"key {key} is being worked on by another delivery (on_busy='fail')")
    put_off_busy(delivery, answer.lease_left, f"key {key} is being worked on by another delivery")


def put_off_busy(delivery: Delivery, lease_left: int, why: str) -> NoReturn:
    """Put a message off until another delivery is through; it is looked for less and less often."""
    raise Defer(why, delay=min(max(lease_left, 1), _backed_off(delivery, _BUSY_WAITS)))


def put_off(delivery: Delivery, error: StoreUnavailable) -> NoReturn:
    """Put a message off until its store is back; it is looked for less and less often."""
    delay = _backed_off(delivery, _OUT_WAITS)
    raise Defer(f"the idempotency store is out of reach: {error}", delay=delay) from error


def _without_store(keyring: Keyring, plan: Plan, delivery: Delivery, key: str, error: StoreUnavailable) -> Claimed:
    if plan.on_store_error != "run":
        put_off(delivery, error)
    keyring.say_once(
        "store out",
        plan,
        "The idempotency store is out of reach (%s): actor %r runs without it, as on_store_error='run' says.",
        error,
        plan.actor,
    )
    delivery.remembered = key, None
    return Claimed(key, plan, None, Claim(answer=FRESH), delivery.interrupts, clock.monotonic())


def _backed_off(delivery: Delivery, waits: tuple[int, int]) -> int:
    first, longest = waits
    deferrals = count(carrier_of(delivery.options).get("deferrals"))
    return int(min(first * 2 ** min(deferrals, 20), longest))
