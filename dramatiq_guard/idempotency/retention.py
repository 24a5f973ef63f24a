"""For how long a key is remembered: longer than any copy of its message can sleep.

It must not know any store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..policy.backoff import Backoff
from ..policy.retention import longest_sleep, retention_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .plan import Plan

__all__ = ["longest_of", "retention_of"]

#: How long Dramatiq's own Retries lets a message sleep at most: 7 days, whatever its jitter.
_STOCK = 7 * 24 * 60 * 60 * 1000


def longest_of(options: Mapping[str, Any], decider: Any) -> int:
    """The longest single sleep of a copy of an actor's message, in milliseconds.

    Parameters:
      options(Mapping[str, Any]): The actor's options.
      decider(Any): Who plans the retries; without a plan they are Dramatiq's own.
    """
    plan = getattr(decider, "plan", None)
    if plan is None:
        return longest_sleep(Backoff(), None, asked=_STOCK)
    limits, backoff = plan(options, {})
    return longest_sleep(backoff, limits.max_retries, retry_for=limits.retry_for)


def retention_of(plan: Plan, options: Mapping[str, Any], decider: Any) -> int:
    """For how many milliseconds the keys of an actor are remembered."""
    return retention_for(longest_of(options, decider)) if plan.retention is None else plan.retention
