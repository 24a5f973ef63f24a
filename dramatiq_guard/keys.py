"""Keys that are made of the message, not of its arguments: `per` and `parent`.

::

    from dramatiq_guard import keys

    @dramatiq.actor(idempotency_key=keys.per(hours=1))                     # once an hour
    def collect(): ...

    @dramatiq.actor(idempotency_key=keys.per(days=1, of="user:{user_id}"))  # once a day for each user
    def remind(user_id): ...

    @dramatiq.actor(idempotency_key=keys.parent)                           # once for each message that it is told of
    def charged(message, result): ...

This module must not know the clock: a key that depended on it would be another at the next delivery.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from .dead_letters.letter import replay_marker_of
from .policy.canonical import NoKey
from .policy.duration import milliseconds
from .policy.key_sources import KeyOf, MessageKey, binder, compile_key

if TYPE_CHECKING:
    import inspect

__all__ = ["parent", "per"]

#: A Monday in UTC, so that weeks begin on Mondays, days at midnight and hours at their full hour.
_ORIGIN = datetime(1970, 1, 5, tzinfo=UTC)

#: The same in UNIX milliseconds.
_ORIGIN_STAMP = 345_600_000


@dataclass(frozen=True, slots=True)
class _Per:
    length: int
    of: object

    def key_of(self, parameters: inspect.Signature, actor_name: str) -> KeyOf:
        of = None if self.of is None else compile_key(self.of, parameters, actor_name=actor_name)

        def key_of(args: Sequence[Any], kwargs: Mapping[str, Any], message: Any) -> tuple[Any, ...]:
            # A replay is a message of now about work of then.
            options = _field(message, "options")
            stamp = replay_marker_of(options).get("enqueued_at") if isinstance(options, Mapping) else None
            stamp = _field(message, "message_timestamp") if stamp is None else stamp
            if not isinstance(stamp, int):
                raise NoKey(f"the key of actor {actor_name!r} needs a message_timestamp, which the message has not")
            begins = _ORIGIN + timedelta(milliseconds=(stamp - _ORIGIN_STAMP) // self.length * self.length)
            return (
                ("per", self.length, begins) if of is None else ("per", self.length, begins, of(args, kwargs, message))
            )

        return key_of


@dataclass(frozen=True, slots=True)
class _Parent:
    def key_of(self, parameters: inspect.Signature, actor_name: str) -> KeyOf:
        first = next(iter(parameters.parameters.values()), None)
        if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
            raise ValueError(
                f"keys.parent is for callbacks, whose first argument is the message that they are told of; actor "
                f"{actor_name!r} takes {parameters}"
            )
        bind = binder(parameters, actor_name=actor_name)

        def key_of(args: Sequence[Any], kwargs: Mapping[str, Any], _: Any) -> str:
            given = args[0] if args else bind(args, kwargs)[first.name]
            message_id = given.get("message_id") if isinstance(given, Mapping) else None
            if not isinstance(message_id, str):
                raise NoKey(
                    f"the key of actor {actor_name!r} is keys.parent, but its first argument is not a message with a "
                    f"message_id: it was not sent as on_success, on_failure or on_retry_exhausted of another"
                )
            return message_id

        return key_of

    def __repr__(self) -> str:
        return "keys.parent"


def per(
    weeks: float = 0, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0, of: object = None
) -> MessageKey:
    """Once in each window of time, whichever message comes first.

    Windows begin with the full week (Monday), day, hour, minute and second of UTC.  A message belongs to the window in
    which it was made, by the producer's clock: it is not asked again when it is worked on.  Two messages may come
    shortly one after the other if a window ends in between; what is to come *at least* an hour apart needs another
    means.

    Example:
      >>> @dramatiq.actor(idempotency_key=keys.per(hours=1, of="user:{user_id}"))
      ... def remind(user_id): ...

    Parameters:
      weeks, days, hours, minutes, seconds(float): The length of the window, all added up.
      of: What is to be done once in it: another key, in any form that ``idempotency_key`` has.  None for the actor as
        a whole.

    Returns:
      MessageKey: For ``idempotency_key=`` of an actor.

    Raises:
      ValueError: One of them is negative, or the window is shorter than a millisecond.
    """
    given = {"weeks": weeks, "days": days, "hours": hours, "minutes": minutes, "seconds": seconds}
    for name, value in given.items():
        # A NaN is not above anything either.
        if not value >= 0:
            raise ValueError(f"keys.per({name}={value!r}) must not be negative")
    length = milliseconds(timedelta(**given), "keys.per()")
    if not length:
        raise ValueError("keys.per() needs the length of the window, e.g. keys.per(hours=1)")
    return _Per(length, of)


#: Once for each message that a callback is told of (``on_success``, ``on_failure``, ``on_retry_exhausted``), however
#: often it is told: Dramatiq gives every callback message an id of its own, also those of redelivered parents.  An
#: ``on_failure`` actor is told after each failed attempt: with this key it acts upon the first.
parent: Final[MessageKey] = _Parent()


def _field(message: Any, name: str) -> object:
    """Part of a message, which may be one of Dramatiq's or what travels of it."""
    return message.get(name) if isinstance(message, Mapping) else getattr(message, name, None)
