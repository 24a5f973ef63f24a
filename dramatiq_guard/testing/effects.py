"""What an effect is, to a test: a number, a collection, a mapping of these, or a mock, that tells what has happened.

Two runs of the same work may leave different things behind, where an id or a time is in them.  So what an undisturbed
run does is looked at twice: if it is the same, others must do the same; else as much.

It must not know how the effect came about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any, Final, TypeAlias
from unittest.mock import NonCallableMock

__all__ = ["Effect", "amount", "shortened"]

_LONGEST: Final = 100


class Things(Counter[str]):
    """What is in a collection, told by how each thing presents itself, and how often it is in there."""


#: What an effect looks like at a moment: a number, some things, or the same under names.
Seen: TypeAlias = Any


class Effect:
    """Looks at what an actor has done.

    Parameters:
      given(Any): A callable that returns a number, a collection or a mapping of these; such a collection itself; or a
        mock, whose calls are counted.
      whole(bool): Whether it is brought back to its beginning before each schedule, so that what there is counts; else
        what was added does.
    """

    def __init__(self, given: Any, *, whole: bool) -> None:
        self.whole = whole
        #: Whether each undisturbed run does the same, and not only as much.
        self.stable = True
        self.name = "effect"
        self._look: Callable[[], Any]
        if isinstance(given, NonCallableMock):
            name = given._mock_name
            self.name = str(name) if name else "calls"
            self._look = lambda: given.call_count
        elif callable(given):
            name = getattr(given, "__name__", "<")
            self.name = self.name if name.startswith("<") else name
            self._look = given
        elif isinstance(given, Collection) and not isinstance(given, str | bytes):
            self._look = lambda: given
        else:
            raise TypeError(
                "effect must tell what the actor has done, e.g. effect=lambda: len(gateway.charges), or be a list, "
                f"set, dict or mock that keeps it, not {given!r}"
            )

    def look(self) -> Seen:
        """What has happened so far."""
        return _seen(self._look())

    def of(self, before: Seen, after: Seen) -> Seen:
        """What a schedule has done."""
        return after if self.whole else _added(before, after)

    def same(self, once: Seen, seen: Seen) -> bool:
        """Whether a schedule has done what one run does."""
        if self.stable:
            return bool(once == seen)
        if _is_named(once) and _is_named(seen):
            return Counter(map(amount, once.values())) == Counter(map(amount, seen.values()))
        return bool(amount(once) == amount(seen))

    def told(self, seen: Seen) -> str:
        """What was done, in a few words."""
        if _is_named(seen):
            return ", ".join(f"{name} {amount(each)}" for name, each in seen.items()) or f"{self.name} 0"
        return f"{self.name} {amount(seen)}"

    def differs(self, once: Seen, seen: Seen) -> str:
        """In what a schedule and one run differ."""
        if _is_named(once) and _is_named(seen):
            pairs = [(name, once.get(name, 0), seen.get(name, 0)) for name in {**once, **seen}]
        else:
            pairs = [(self.name, once, seen)]
        return ", ".join(self._pair(*pair) for pair in pairs if pair[1] != pair[2])

    def _pair(self, name: object, once: Seen, seen: Seen) -> str:
        text = f"{name} {amount(once)} → {amount(seen)}"
        if self.stable and isinstance(seen, Things) and isinstance(once, Things):
            for what, things in (("more", seen - once), ("missing", once - seen)):
                if things:
                    text += f" ({what}: {shortened(', '.join(things.elements()))})"
        return text


def amount(seen: Seen) -> Any:
    """How much was done, as one number."""
    if isinstance(seen, Things):
        return seen.total()
    return sum(map(amount, seen.values())) if isinstance(seen, Mapping) else seen


def shortened(text: str) -> str:
    """A text that leaves room for others."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _seen(value: Any) -> Seen:
    if type(value) is not bool and isinstance(value, Real | Decimal):
        return value
    if isinstance(value, Mapping):
        return {name: _seen(each) for name, each in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return Things(map(repr, value))
    return Things() if value is None else Things([repr(value)])


def _added(before: Seen, after: Seen) -> Seen:
    """What came to *before*."""
    if isinstance(after, Things):
        return Things(after - before) if isinstance(before, Things) else after
    if _is_named(after):
        known = before if _is_named(before) else {}
        added = {name: _added(known.get(name), each) for name, each in after.items()}
        return {name: each for name, each in added.items() if amount(each)}
    return after - before if isinstance(before, Real | Decimal) else after


def _is_named(seen: Seen) -> bool:
    return isinstance(seen, Mapping) and not isinstance(seen, Things)
