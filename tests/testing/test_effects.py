"""What an effect looks like, and when two are the same."""

from __future__ import annotations

from collections import deque
from decimal import Decimal
from typing import Any
from unittest.mock import Mock

import pytest

from dramatiq_guard.testing.effects import Effect, amount


def change(before: Any, after: Any, *, whole: bool = False) -> Any:
    """What has been done between two looks."""
    states = iter((before, after))
    effect = Effect(lambda: next(states), whole=whole)
    seen = effect.look()
    return effect.of(seen, effect.look())


@pytest.mark.parametrize(
    ("before", "after", "added"),
    [
        (3, 5, 2),
        (Decimal("1.5"), Decimal(2), Decimal("0.5")),
        ([1], [1, 1], 1),
        ({"a"}, {"a", "b", "c"}, 2),
        (deque(), deque([1]), 1),
        ("draft", "sent", 1),
        (None, object(), 1),
        (False, True, 1),
        ({"a": 1}, {"a": 3, "b": 4}, 6),
        ({}, {"a": {"b": [1, 2]}}, 2),
        ({"a": "open"}, {"a": "paid"}, 1),
        ([1], [], 0),
    ],
)
def test_what_was_added_is_an_amount(before: Any, after: Any, added: Any) -> None:
    """Of numbers it is the difference, of collections the number of things, of mappings the sum."""
    assert amount(change(before, after)) == added


def test_all_there_is_counts_after_a_reset() -> None:
    """What was there before does not, since it is the same each time."""
    assert change([1], [1, 2], whole=True) == {"1": 1, "2": 1}


def test_a_look_is_not_changed_by_what_comes_after() -> None:
    """A list that goes on growing was shorter then."""
    kept: list[int] = []
    effect = Effect(kept, whole=True)
    before = effect.look()

    kept.append(1)

    assert amount(before) == 0
    assert amount(effect.look()) == 1


def test_where_two_runs_do_the_same_so_must_others() -> None:
    """As many things are not enough."""
    effect = Effect([], whole=False)

    assert effect.same(change([], ["a", "b"]), change([], ["b", "a"]))
    assert not effect.same(change([], ["a", "b"]), change([], ["a", "a"]))


def test_where_two_runs_differ_as_much_is_enough() -> None:
    """Things with an id of their own, and entries under keys that are others each time."""
    effect = Effect([], whole=False)
    effect.stable = False

    assert effect.same(change([], ["id 1"]), change([], ["id 2"]))
    assert not effect.same(change([], ["id 1"]), change([], ["id 2", "id 3"]))
    assert effect.same(change({}, {"key 1": 100}), change({}, {"key 2": 100}))
    assert not effect.same(change({}, {"key 1": 100}), change({}, {"key 2": 50, "key 3": 50}))


def test_what_differs_is_named() -> None:
    """By the names that the effect has, and the things that are too many or missing."""
    effect = Effect(lambda: 0, whole=False)
    once = change({}, {"charges": 1, "mails": ["a"], "rows": 1})
    seen = change({}, {"charges": 2, "mails": ["a", "b"], "rows": 1})

    assert effect.differs(once, seen) == "charges 1 → 2, mails 1 → 2 (more: 'b')"
    assert effect.differs(seen, once) == "charges 2 → 1, mails 2 → 1 (missing: 'b')"
    assert effect.differs(once, {}) == "charges 1 → 0, mails 1 → 0, rows 1 → 0"
    assert effect.told(once) == "charges 1, mails 1, rows 1"
    assert effect.told({}) == "effect 0"


def test_long_things_leave_room() -> None:
    """A report is a table, and not a dump."""
    effect = Effect([], whole=False)

    assert len(effect.differs(change([], []), change([], ["x" * 10_000]))) < 200


def test_an_effect_is_called_what_it_is() -> None:
    """A function and a mock have names, a lambda and a list have none."""

    def charges() -> int:
        return 0

    names = [Effect(each, whole=False).name for each in (charges, Mock(name="send"), Mock(), lambda: 0, [])]

    assert names == ["charges", "send", "calls", "effect", "effect"]


@pytest.mark.parametrize("nothing", [7, "charges", b"", None])
def test_what_tells_nothing_is_refused(nothing: Any) -> None:
    """A number is what was, and not what is."""
    with pytest.raises(TypeError, match="effect must tell what the actor has done"):
        Effect(nothing, whole=False)
