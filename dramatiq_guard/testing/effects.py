"""What an effect is, to a test: a number, a collection or a mock that tells what has happened so far.

It must not know how the effect came about.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from decimal import Decimal
from numbers import Real
from typing import Any, Final
from unittest.mock import NonCallableMock

from ..errors import GuardError

__all__ = ["Effect", "amount", "told"]

_LONGEST: Final = 200


class Effect:
    """Looks at what an actor has done, before and after.

    Parameters:
      given(Any): A callable that returns a number, a collection or a mapping of these; such a collection itself; or a
        mock, whose calls are counted.
      whole(bool): Whether it is brought back to its beginning before each schedule, so that all of it can be compared;
        else what was added is.
    """

    def __init__(self, given: Any, *, whole: bool) -> None:
        self.whole = whole
        self.name = "effect"
        if isinstance(given, NonCallableMock):
            self.name = _name_of(given)
            self._look: Callable[[], Any] = lambda: given.call_count
        elif callable(given):
            name = getattr(given, "__name__", "<")
            self.name = self.name if name.startswith("<") else name
            self._look = given
        elif isinstance(given, Sized) and not isinstance(given, str | bytes):
            self._look = lambda: given
        else:
            raise TypeError(
                "effect must tell what the actor has done, e.g. effect=lambda: len(gateway.charges), or be a list, "
                f"set, dict or mock that keeps it, not {given!r}"
            )

    def look(self) -> Any:
        """What has happened so far, as it is now."""
        seen = self._look()
        try:
            return copy.deepcopy(seen)
        except Exception:  # noqa: BLE001 - whatever is in it, it is the user's
            return copy.copy(seen)

    def of(self, before: Any, after: Any) -> Any:
        """What a schedule has done: all that there is, or what was added.

        Raises:
          GuardError: What was added cannot be told.
        """
        return after if self.whole else _added(before, after)

    def same(self, once: Any, seen: Any) -> bool:
        """Whether a schedule has done what one run does."""
        if bool(once == seen):
            return True
        if self.whole or not (isinstance(once, dict) and isinstance(seen, dict)) or once.keys() == seen.keys():
            return False
        # Entries that are named by keys, which are others in each schedule: what they hold is compared.
        return Counter(map(repr, once.values())) == Counter(map(repr, seen.values()))

    def differs(self, once: Any, seen: Any) -> str:
        """In what a schedule and one run differ."""
        if isinstance(once, dict) and isinstance(seen, dict):
            names = [name for name in {**once, **seen} if once.get(name) != seen.get(name)]
            return ", ".join(f"{name} {told(once.get(name, 0))} → {told(seen.get(name, 0))}" for name in names)
        return f"{self.name} {told(once)} → {told(seen)}"


def amount(value: Any) -> Any:
    """How much was done, as one number; ``None`` where that cannot be said."""
    if isinstance(value, Mapping):
        amounts = [amount(each) for each in value.values()]
        return len(value) if None in amounts else sum(amounts)
    if _is_number(value):
        return value
    return len(value) if isinstance(value, Sized) else None


def told(value: Any) -> str:
    """A value in a few words."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _added(before: Any, after: Any) -> Any:
    """What came to *before*: a difference of numbers, a number of things, or the same for each name."""
    if isinstance(after, Mapping):
        before = before if isinstance(before, Mapping) else {}
        added = {name: _added(before.get(name), value) for name, value in after.items() if before.get(name) != value}
        return added | {name: -1 for name in before if name not in after}
    if _is_number(after):
        return after - (before if _is_number(before) else 0)
    if isinstance(after, Sized) and not isinstance(after, str | bytes):
        return len(after) - (len(before) if isinstance(before, Sized) else 0)
    if before is None:
        return 1  # a thing under a new name
    raise GuardError(
        f"assert_idempotent cannot tell what was added to {told(before)} when it became {told(after)}: let effect "
        "return a number, a collection, or a dict of these; or give reset=, so that the whole can be compared"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Decimal) and not isinstance(value, bool)


def _name_of(mock: NonCallableMock) -> str:
    name = mock._mock_name
    return str(name) if name else "calls"
