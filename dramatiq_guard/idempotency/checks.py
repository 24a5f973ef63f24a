"""What may be wrong with the set-up of the idempotency guard: retention, and a store that forgets.

A store that is out of reach says nothing about itself: the barrier waits for it, and its next boot is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import clock, host
from ..checks import Problem, guards_of
from ..errors import StoreError
from .retention import longest_of, retention_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..checks import Setup
    from ..stores.idempotency import Posture

__all__ = ["problems_of"]


def problems_of(guard: Any, setup: Setup) -> Iterator[Problem]:
    """Everything that is wrong with a guard's set-up.

    Parameters:
      guard(IdempotencyGuard): The guard.
      setup(Setup): The broker.
    """
    yield from _alone(setup)
    yield from _too_short(guard, setup)
    if not guard.plans:
        return
    try:
        posture = guard.store.posture()
    except StoreError:
        return
    yield from _forgetful(guard, posture)
    yield from _shared(posture, setup)
    yield from _clocks(posture, setup)


def _alone(setup: Setup) -> Iterator[Problem]:
    if not any(hasattr(m, "decide") for m in guards_of(setup.broker)):
        yield Problem(
            "puts_off",
            "IdempotencyGuard puts duplicates of running work off, which needs JitterBackoff: Dramatiq's own "
            "Retries would count each as a failed attempt. Add JitterBackoff().",
        )


def _too_short(guard: Any, setup: Setup) -> Iterator[Problem]:
    decider = next((m for m in setup.broker.middleware if hasattr(m, "decide") and hasattr(m, "plan")), None)
    for name, plan in guard.plans.items():
        actor = setup.broker.actors.get(name)
        if actor is None:
            continue
        longest = longest_of(actor.options, decider)
        if retention_of(plan, actor.options, decider) < longest:
            yield Problem(
                "retention",
                f"Actor {name!r} remembers its keys for {plan.retention} ms, but a copy of its message may sleep for "
                f"{longest} ms and would then be run again: leave retention out, raise it, or lower max_backoff.",
            )


def _forgetful(guard: Any, posture: Posture) -> Iterator[Problem]:
    if posture.evicts is not None and not guard.allow_eviction:
        yield Problem(
            "eviction",
            f"The Redis of IdempotencyGuard evicts keys when its memory is full (maxmemory-policy {posture.evicts}), "
            "and an evicted key lets its work run again: set maxmemory-policy noeviction, or "
            "IdempotencyGuard(…, allow_eviction=True) to accept it.",
        )
    if posture.engine == "redis" and posture.durable is False:
        yield Problem(
            "persistence",
            "The Redis of IdempotencyGuard does not write to disk what it is told (appendonly no): after its restart "
            "all keys are unknown, and work may run again. Set appendonly yes.",
            fatal=False,
        )


def _shared(posture: Posture, setup: Setup) -> Iterator[Problem]:
    if posture.engine != "redis" or host.kind_of(setup.broker) != "redis":
        return
    if host.redis_run_id(setup.broker) == posture.server:
        yield Problem(
            "shared_server",
            "IdempotencyGuard keeps its keys in the broker's Redis: a failover that forgets that a message was acked "
            "forgets its key, too. For money, keep the keys elsewhere.",
            fatal=False,
        )


def _clocks(posture: Posture, setup: Setup) -> Iterator[Problem]:
    timeout = getattr(setup.broker, "heartbeat_timeout", None)
    offset = abs(clock.now() - posture.now)
    if isinstance(timeout, int) and offset > timeout / 2:
        yield Problem(
            "clock_offset",
            f"The clocks of this host and of the store of IdempotencyGuard are {offset} ms apart, more than half of "
            f"the broker's heartbeat_timeout ({timeout} ms): other workers would take this one for dead, and its "
            "messages for theirs. Set the clock (NTP).",
        )
