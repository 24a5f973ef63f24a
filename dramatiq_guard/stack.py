"""Where each middleware belongs, and putting it there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dramatiq.middleware import Middleware, Retries

from . import host
from .errors import SetupError
from .middleware.base import GuardMiddleware
from .middleware.jitter_backoff import JitterBackoff
from .middleware.tracing import Tracing
from .options import check_actor
from .wiring import stack_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dramatiq import Broker

__all__ = ["arrange", "install"]

#: Guard middlewares with a place below this one stand outside everybody else's, the others inside.
_INNER = 3


def arrange(existing: Sequence[Any], guards: Sequence[GuardMiddleware]) -> list[Any]:
    """Put guard middlewares where they belong among those that a broker has.

    The outer ones come first, then everybody else's in the order they had, then the inner ones.  Dramatiq's own
    Retries gives way to JitterBackoff.

    Parameters:
      existing(Sequence[Middleware]): The broker's middlewares, none of ours.
      guards(Sequence[GuardMiddleware]): Ours, in any order.

    Returns:
      list[Middleware]: All of them, outermost first.
    """
    ordered = sorted(guards, key=lambda guard: guard.place)
    backs_off = any(isinstance(guard, JitterBackoff) for guard in guards)
    others = [m for m in existing if not (backs_off and type(m) is Retries)]
    return [
        *(guard for guard in ordered if guard.place < _INNER),
        *others,
        *(guard for guard in ordered if guard.place >= _INNER),
    ]


def install(broker: Broker, *middlewares: Any, allow_unconfirmed: bool = False) -> None:
    """Put the stack on a broker: any subset, in any order; each finds its place, and Tracing is added by itself.

    Parameters:
      broker(Broker): The broker, with or without actors declared on it.
      *middlewares(GuardMiddleware): What the stack is made of.
      allow_unconfirmed(bool): Accept a RabbitMQ broker that publishes without confirms, and so may lose a retry.

    Raises:
      SetupError: When something is no guard middleware, stands twice, or the broker has a stack already.

    Example:
      >>> install(broker, Classify(permanent=[CardDeclined]), JitterBackoff(max_retries=8))
    """
    for middleware in middlewares:
        if isinstance(middleware, type) and issubclass(middleware, GuardMiddleware):
            raise SetupError(f"install takes {middleware.__name__}(…), an instance, not the class itself.")
        if not isinstance(middleware, GuardMiddleware):
            hint = " Add it with broker.add_middleware." if isinstance(middleware, Middleware) else ""
            raise SetupError(f"install takes guard middlewares, not {middleware!r}.{hint}")
    names = [type(middleware).__name__ for middleware in middlewares]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SetupError(f"install was given {', '.join(twice)} twice: leave one.")
    present = [type(m).__name__ for m in broker.middleware if isinstance(m, GuardMiddleware)]
    if present:
        raise SetupError(
            f"This broker has a stack already ({', '.join(present)}): call install once, with all its middlewares."
        )
    for actor in broker.actors.values():
        check_actor(actor)

    guards = [*middlewares]
    if not any(isinstance(guard, Tracing) for guard in guards):
        guards.append(Tracing())
    arranged = arrange(broker.middleware, guards)
    for guard in guards:
        # Registers its options and shows it the actors and queues that are declared already.
        broker.add_middleware(guard)
    broker.middleware[:] = arranged
    if host.kind_of(broker) == "redis":
        # Producers, too, look for dead workers on one command in a thousand, and know nothing of outages: after a long
        # one they would take the living for dead.  Workers that have the stack see to it (`settle.redis_upkeep`).
        broker.maintenance_chance = 0  # type: ignore[attr-defined]  # RedisBroker's
    stack = stack_of(broker)
    stack.allow_unconfirmed = allow_unconfirmed
