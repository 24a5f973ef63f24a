"""Enqueueing something only if it is not enqueued already: an advisory lock on its name, taken by the sender.

It saves work and guarantees nothing: nobody asks for it when a message is processed, so that a lock that was left
behind delays work by its ``ttl`` at most and never blocks it.  What must not happen twice is guarded by
`IdempotencyGuard`.

There is no hook for it: Dramatiq has no way to skip an enqueue, and raising in ``before_enqueue`` breaks groups
half-way and kills consumer threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dramatiq.logging import get_logger

from ..checks import guards_of
from ..delivery import CARRIER, Due, carrier_of
from ..errors import SetupError, StoreError
from ..policy.duration import milliseconds
from ..policy.keys import KEY, canonical, stored_key

if TYPE_CHECKING:
    from datetime import timedelta

    from dramatiq import Broker, Message

    from ..delivery import Delivery
    from ..stores.idempotency import IdempotencyStore

__all__ = ["UNIQUE", "enqueue_unique", "let_go", "owe_letting_go"]

#: Our entry in the carrier of a message that was enqueued so: its name, and until when it is held.
UNIQUE: Final = "unique"
_UNTIL: Final = ("start", "done")


def enqueue_unique(
    broker: Broker,
    message: Message[Any],
    *,
    key: Any,
    ttl: int | timedelta,
    until: str = "start",
    delay: int | None = None,
) -> tuple[Message[Any], bool]:
    """Enqueue a message, unless another one of its actor with this key is enqueued already.

    The broker needs an `IdempotencyGuard`, whose store keeps the names; the workers, too, so that they let go of them.

    Parameters:
      broker(Broker): The broker.
      message(Message): The message, e.g. ``refresh.message(user_id)``.
      key(Any): What must be there only once: a value as `idempotency_key` may have.
      ttl(int | timedelta): Milliseconds after which the name is free whatever happened; longer than the message waits.
      until(str): ``start``: another may be enqueued once this one has begun, so that no change that comes meanwhile is
        missed; ``done``: only once it has ended.
      delay(int | None): Milliseconds, as in `Broker.enqueue`.

    Returns:
      tuple[Message, bool]: The message that is enqueued, and ``True``; or one with the id of that which was there, and
        ``False``.

    Raises:
      SetupError: The broker has no `IdempotencyGuard`, or an argument is wrong.
      StoreUnavailable: The store is out of reach; nothing was enqueued.

    Example:
      >>> message, created = enqueue_unique(broker, refresh.message(17), key=17, ttl=600_000)
    """
    guard = next((m for m in guards_of(broker) if hasattr(m, "plans")), None)
    if guard is None:
        raise SetupError("enqueue_unique needs IdempotencyGuard(…) on the broker: its store keeps the names.")
    if until not in _UNTIL:
        raise SetupError(f"enqueue_unique: until must be one of {', '.join(_UNTIL)}, not {until!r}")
    try:
        lasts = milliseconds(ttl, "ttl")
        name = stored_key(guard.namespace, message.actor_name, KEY, canonical(key))
    except (TypeError, ValueError) as error:
        raise SetupError(f"enqueue_unique: {error}") from error
    if not lasts:
        raise SetupError("enqueue_unique: ttl must be above 0 ms")
    store: IdempotencyStore = guard.store
    holder = store.reserve(name, message.message_id, ttl=lasts)
    if holder != message.message_id:
        return message.copy(message_id=holder), False
    marked = message.copy(options={CARRIER: {**carrier_of(message.options), UNIQUE: [name, until]}})
    try:
        return broker.enqueue(marked, delay=delay), True
    except BaseException:
        store.unreserve(name, message.message_id)
        raise


def _held(delivery: Delivery) -> tuple[str, str] | None:
    carrier = delivery.options.get(CARRIER)  # not a copy of it: this is asked at the end of every message
    held = carrier.get(UNIQUE) if isinstance(carrier, dict) else None
    if isinstance(held, list) and len(held) == 2 and all(isinstance(each, str) for each in held):
        return held[0], held[1]
    return None


def let_go(store: IdempotencyStore, delivery: Delivery) -> None:
    """Let go of the name of a message that begins, if it was to be held until then."""
    held = _held(delivery)
    if held is None or held[1] == "done":
        return
    try:
        store.unreserve(held[0], delivery.message_id)
    except StoreError as error:
        get_logger("dramatiq_guard", "unique").warning(
            "The name %s of message %r could not be let go of, and is held until its ttl is over: %s",
            held[0],
            delivery.message_id,
            error,
        )


def owe_letting_go(store: IdempotencyStore, delivery: Delivery) -> None:
    """Owe letting go of the name of a message that ends, if it was to be held so long."""
    held = _held(delivery)
    if held is None or held[1] != "done" or (delivery.successor is not None and not delivery.message.failed):
        return
    delivery.dues.append(Due("unique", lambda: store.unreserve(held[0], delivery.message_id)))
