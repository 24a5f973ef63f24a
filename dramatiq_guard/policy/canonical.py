"""The one spelling of each key: what is equal is spelt alike, and nothing else is.

A key names its types, so that 1, ``"1"`` and ``True`` stay three keys::

    1                             ["int",1]
    "1"                           ["str","1"]
    True                          ["bool",true]
    b"\\x01"                       ["bytes","01"]
    UUID("6f0e…")                 ["uuid","6f0e…"]
    date(2026, 5, 1)              ["date","2026-05-01"]
    datetime(…, tzinfo=…)         ["datetime","2026-05-01T07:30:00+00:00"]      in UTC
    Decimal("19.90")              ["decimal","199E-1"]                          19.9 and 19.90 are one amount
    Color.RED                     ["enum","Color","RED"]
    (7, "a") and [7, "a"]         ["list",[["int",7],["str","a"]]]

A value that the encoder of the messages changes is spelt as it arrives: tuples are lists, members of an `IntEnum` are
their numbers, those of a `StrEnum` and all other kinds of `str` are their text.  Otherwise a key made where a message
is sent would differ from the one made where it is worked on, and a parameter's default from the same value sent.

It must not know where the value comes from, nor what the key is used for.
"""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any

from .names import lineage, name_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NoKey", "canonical"]

#: What to write instead of a value that makes no good key.
_INSTEAD: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (float, "an int (cents, milliseconds), a Decimal, or its text: two floats that look alike may differ"),
    (dict, "the values in it that matter, e.g. (order['id'], order['line'])"),
    ((set, frozenset), "a list in an order of your own, e.g. sorted(ids)"),
    (datetime, "an aware datetime, e.g. value.astimezone(UTC): without its zone nobody knows which moment is meant"),
    ((bytearray, memoryview), "bytes(value)"),
)

_encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), check_circular=False).encode


class NoKey(ValueError):
    """There is no key: the value, or a part of it, is None or is not there."""


def canonical(value: object) -> str:
    """Spell a key.

    Only None is a missing key, alone as well as inside a tuple: all messages without an order would share the key of
    "no order".  An empty text, list or tuple is a value like any other.

    Example:
      >>> canonical(["order", 17])
      '["list",[["str","order"],["int",17]]]'

    Parameters:
      value(object): Text, bytes, a number without a fraction, a truth value, a UUID, date, aware datetime, finite
        Decimal or Enum, or a tuple or list of these.

    Returns:
      str: JSON in printable ASCII, of any length.  It is kept in stores, so it never changes.

    Raises:
      NoKey: The value is None, or has None in it.
      TypeError: It is, or has in it, something else that is not named above.
    """
    try:
        return _encode(_typed(value))
    except RecursionError:
        raise TypeError("a key cannot be made of a list that is nested this deeply, or contains itself") from None


def _typed(value: object) -> list[Any]:
    # The order matters: a bool is an int, a datetime is a date, and an IntEnum is an int before it is an Enum.
    if value is None:
        raise NoKey("None is no key, nor part of one: all messages without a value would count as one")
    if isinstance(value, str):
        return ["str", value]
    if isinstance(value, bool):
        return ["bool", value]
    if isinstance(value, int):
        return ["int", value]
    if isinstance(value, list | tuple):
        return ["list", [_typed(part) for part in value]]
    if isinstance(value, Decimal) and value.is_finite():
        return ["decimal", _decimal(value)]
    if isinstance(value, datetime) and value.utcoffset() is not None:
        return ["datetime", value.astimezone(UTC).isoformat()]
    if isinstance(value, date) and not isinstance(value, datetime):
        return ["date", value.isoformat()]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, Enum) and not isinstance(value, float):
        # Without its module: moving a class must not make every order a new one.  The sum of several flags that is no
        # member has no name.
        return ["enum", type(value).__qualname__, value.value if value.name is None else value.name]
    # By name, since nothing that can make a random UUID is imported here.
    if any(name.module == "uuid" and name.qualname == "UUID" for name in lineage(type(value))):
        return ["uuid", str(value)]
    raise TypeError(_refusal(value))


def _decimal(value: Decimal) -> str:
    """Spelt from its digits: `Decimal.normalize` would round to the precision of the thread's context."""
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits))
    shorter = text.rstrip("0")
    if not shorter:
        return "0E0"
    return f"{'-' if sign else ''}{shorter}E{int(exponent) + len(text) - len(shorter)}"


def _refusal(value: object) -> str:
    kind = str(name_of(type(value))).removeprefix("builtins.")
    if isinstance(value, Decimal):
        return f"a key cannot be made of {value}: a Decimal in a key must be a finite number"
    if isinstance(value, datetime):
        kind = f"naive {kind}"
    for types, instead in _INSTEAD:
        if isinstance(value, types):
            return f"a key cannot be made of a {kind}: write {instead}"
    return (
        f"a key cannot be made of a {kind}: write what identifies it, as text, bytes, int, bool, UUID, date, "
        "aware datetime, Decimal or Enum, or a tuple of these"
    )
