"""The bounded history of a message's failed attempts, as it travels in the message's own options.

The first five and the last twenty are kept, the rest counted: what started it and what it died of are what people look
for, and a message must not grow without end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .dead_letters.letter import Attempt
from .delivery import count

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["attempts", "attempts_total", "extended", "first_failure"]

#: How many of the first and of the last attempts are kept.
FIRST: Final = 5
LAST: Final = 20

_KEY: Final = "history"


def extended(carrier: Mapping[str, Any], attempt: Attempt) -> dict[str, Any]:
    """The carrier with one more attempt in its history.

    Parameters:
      carrier(Mapping[str, Any]): Our entry in the message's options.
      attempt(Attempt): What went wrong this time.

    Returns:
      dict[str, Any]: A new carrier; the given one stays as it is.
    """
    first, last, total = _read(carrier)
    entry = attempt.as_dict()
    if len(first) < FIRST:
        first = [*first, entry]
    else:
        last = [*last, entry][-LAST:]
    return {**carrier, _KEY: {"n": total + 1, "first": first, "last": last}}


def attempts(carrier: Mapping[str, Any]) -> tuple[Attempt, ...]:
    """The attempts that were kept, oldest first."""
    first, last, _ = _read(carrier)
    return tuple(Attempt.from_dict(entry) for entry in (*first, *last))


def attempts_total(carrier: Mapping[str, Any]) -> int:
    """How many attempts there were, the forgotten ones included."""
    return _read(carrier)[2]


def first_failure(carrier: Mapping[str, Any]) -> int | None:
    """When the first attempt failed, in UNIX milliseconds; ``None`` before any has."""
    first = _read(carrier)[0]
    at = count(first[0].get("at")) if first else 0
    return at or None


def _read(carrier: Mapping[str, Any]) -> tuple[list[Any], list[Any], int]:
    history = carrier.get(_KEY)
    if not isinstance(history, dict):
        return [], [], 0
    first, last = (
        [entry for entry in history.get(part, ()) if isinstance(entry, dict)]
        if isinstance(history.get(part, ()), list | tuple)
        else []
        for part in ("first", "last")
    )
    return first, last, max(count(history.get("n")), len(first) + len(last))
