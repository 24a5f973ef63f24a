"""Looking options up the way Dramatiq does, message before actor before middleware, and checking them in time.

Actor options are checked when the actor is declared, where an error surfaces at import.  What travels in a message is
validated by nobody: what does not fit there is passed over, and the actor's own option holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .errors import SetupError
from .policy.backoff import Backoff
from .policy.duration import milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dramatiq import Actor

__all__ = ["CHECKS", "announced", "check_actor", "look_up", "number"]


def look_up(name: str, message: Mapping[str, Any], actor: Mapping[str, Any], default: Any) -> Any:
    """The value of an option: the message's, else the actor's, else the middleware's.

    A message's value that would not be accepted in an actor is passed over.
    """
    if name in message:
        check = CHECKS.get(name)
        if check is None:
            return message[name]
        try:
            return check(message[name], name)
        except (TypeError, ValueError):
            pass
    return actor.get(name, default)


def announced(message: Mapping[str, Any], actor: Mapping[str, Any]) -> Any:
    """The errors that an actor announces in its ``throws``, which Dramatiq looks up like this; none is ``()``."""
    return message.get("throws") or actor.get("throws") or ()


def check_actor(actor: Actor[Any, Any]) -> None:
    """Check an actor's options, and turn durations given as `timedelta` into milliseconds.

    Raises:
      SetupError: Naming the actor and the option, and what may be written instead.
    """
    for name, value in actor.options.items():
        check = CHECKS.get(name)
        if check is None:
            continue
        try:
            actor.options[name] = check(value, name)
        except (TypeError, ValueError) as error:
            raise SetupError(f"Actor {actor.actor_name!r}: {error}") from error


def number(value: Any, name: str) -> int | None:
    """A number of times: an integer from 0, or ``None`` for no limit."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer or None, not {value!r}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value!r}")
    return value


def _duration_or_none(value: Any, name: str) -> int | None:
    return None if value is None else milliseconds(value, name)


def _time_limit(value: Any, name: str) -> int | float | None:
    if value is None or value == float("inf"):
        return value  # type: ignore[no-any-return]
    return milliseconds(value, name)


def _jitter(value: Any, _name: str) -> Any:
    # JSON has no tuples.
    return Backoff(jitter=tuple(value) if isinstance(value, list) else value).jitter


def _schedule(value: Any, _name: str) -> Any:
    return Backoff(schedule=value).schedule


def _predicate(value: Any, name: str) -> Any:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a callable (retries, exception) -> bool, not {value!r}")
    return value


def _throws(value: Any, name: str) -> Any:
    kinds = value if isinstance(value, tuple) else (value,)
    if value is not None and not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        raise TypeError(f"{name} must be an exception class or a tuple of them, not {value!r}")
    return value


def _actor_name(value: Any, name: str) -> Any:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be the name of an actor, not {value!r}")
    return value


def _flag(value: Any, name: str) -> Any:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


#: The check of each option; returns the value as it is to be used.
CHECKS: Final[dict[str, Callable[[Any, str], Any]]] = {
    "max_retries": number,
    "min_backoff": milliseconds,
    "max_backoff": milliseconds,
    "jitter": _jitter,
    "backoff": _schedule,
    "retry_for": _duration_or_none,
    "max_deferrals": number,
    "max_interruptions": number,
    "retry_when": _predicate,
    "throws": _throws,
    "on_retry_exhausted": _actor_name,
    "notify_shutdown": _flag,
    "time_limit": _time_limit,
}
