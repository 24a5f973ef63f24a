"""The whole run of an actor in one transaction: its rows and its key are committed together, or neither.

A run whose process dies is rolled back by the server at once; there is no lease to wait for, nothing to take over and
nothing to park.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import clock, telemetry
from ..errors import StoreUnavailable
from ..settle.killpoints import reach
from ..stores.idempotency import FRESH, TAKEOVER
from .claimed import Claimed
from .claiming import OUTCOMES, put_off
from .ending import begin_to_tell, note_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..delivery import Delivery
    from ..stores.idempotency import Claim
    from .keyring import Keyring
    from .plan import Plan

__all__ = ["run_in_inbox"]


def run_in_inbox(
    keyring: Keyring, plan: Plan, delivery: Delivery, key: str, *, business: bool, proceed: Callable[[], Any]
) -> Claim | None:
    """Claim a key, run the actor and complete the key in one transaction.

    Returns:
      Claim | None: ``None`` if that was done, and `delivery.claim` has the result; else why not.

    Raises:
      Defer: The store is out of reach, or the answer to the commit was lost.
      BaseException: Whatever the actor raised; all is rolled back.
    """
    store: Any = keyring.store
    running = False
    reach("before-claim")
    try:
        with store.inbox(
            key,
            owner=keyring.owner(),
            retention=keyring.retention(plan, delivery),
            fingerprint=plan.fingerprint_of(delivery),
            strict=business if plan.strict is None else plan.strict,
        ) as inbox:
            answer: Claim = inbox.claim
            with telemetry.key_operation("claim", plan.engine) as operation:
                operation.outcome, operation.fence = OUTCOMES[answer.answer], answer.fence
            # A run that does not commit leaves no trace, so there is nothing that a record could tell.
            delivery.remembered = key, None
            if answer.answer not in (FRESH, TAKEOVER):
                delivery.remembered = key, answer.first_claim_at + keyring.retention(plan, delivery)
                return answer
            claimed = Claimed(key, plan, store, answer, delivery.interrupts, clock.monotonic(), inbox.connection)
            delivery.claim = claimed
            reach("after-claim")
            running = True
            result = proceed()
            running = False
            note_result(keyring, claimed, result)
            begin_to_tell(keyring, delivery, claimed)
            reach("before-commit")
            with telemetry.key_operation("complete", plan.engine) as operation:
                inbox.commit(claimed.finish)
                operation.outcome, operation.fence = "completed", answer.fence
            claimed.completed = True
            reach("after-commit")
            return None
    except StoreUnavailable as error:
        if running:
            raise  # the actor's own
        put_off(delivery, error)
