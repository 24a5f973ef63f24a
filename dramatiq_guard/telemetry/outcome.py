"""What became of an attempt, in one word, and whether it failed.

The process span records the *decision*; what came of carrying it out is on the settle span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dramatiq.errors import RateLimitExceeded, Retry
from dramatiq.middleware import SkipMessage

from ..policy.decision import Step
from ..policy.verdict import Kind

if TYPE_CHECKING:
    from ..delivery import Delivery

__all__ = ["failed", "outcome_of"]

_OUTCOMES: Final = {
    Step.RETRY: "retried",
    Step.GIVE_UP: "dead_lettered",
    Step.DEFER: "deferred",
    Step.REQUEUE: "interrupted",
}


def outcome_of(delivery: Delivery, error: BaseException | None, *, skipped: bool, resent: bool) -> str | None:
    """What becomes of the message.

    Parameters:
      delivery(Delivery): The delivery that ends.
      error(BaseException | None): The error that it ended with.
      skipped(bool): It ended by being skipped.
      resent(bool): The message was enqueued again while it ran, as stock `Retries` does.

    Returns:
      str | None: ``succeeded``, ``retried``, ``deferred``, ``interrupted``, ``dead_lettered`` or ``skipped``; ``None``
      while nobody has decided.
    """
    if error is None and not skipped:
        return "dead_lettered" if delivery.message.failed else "succeeded"
    if delivery.decision is not None:
        return _OUTCOMES[delivery.decision.step]
    if delivery.message.failed:
        return "dead_lettered"
    if skipped:
        return "skipped"
    return "retried" if resent else None


def failed(delivery: Delivery, error: BaseException | None, throws: Any) -> bool:
    """Whether an attempt failed, so that its span is an error.

    A retry that the actor asked for, a used-up rate, a deferral, an interruption, a skip, and an error that the actor
    announces in its ``throws`` are how things are meant to go.

    Parameters:
      delivery(Delivery): The delivery that ends.
      error(BaseException | None): The error that it ended with.
      throws: The actor's or the message's ``throws``.
    """
    if error is None or isinstance(error, Retry | RateLimitExceeded | SkipMessage):
        return False
    if delivery.decision is not None and delivery.decision.step in (Step.DEFER, Step.REQUEUE):
        return False
    if delivery.verdict is not None and delivery.verdict.kind in (Kind.DEFERRED, Kind.INTERRUPTED):
        return False
    try:
        return not (throws and isinstance(error, throws))
    except TypeError:  # no class and no tuple of classes
        return True
