"""What a store must do for the circuit breakers: one small record a downstream, changed by compare and set.

What becomes of a record is decided by `dramatiq_guard.policy.breaker` alone, in the process; a store reads the record
with the server's time, has it changed, and writes what came of it if nobody else has written meanwhile.  So there is
one implementation of the policy and none in Lua or SQL.  This module must not know the middleware.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

from ..errors import StoreUnavailable
from ..policy.breaker import Mode, State, Tally

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BREAKERS_KEPT", "BreakerStore", "changed", "decoded", "encoded"]

T = TypeVar("T")

#: Milliseconds for which a breaker that nobody reports to is remembered.
BREAKERS_KEPT: Final = 30 * 24 * 60 * 60 * 1000

#: How often a change is begun again because somebody else was faster.
_TRIES: Final = 50

_VERSION: Final = 1


@runtime_checkable
class BreakerStore(Protocol):
    """Keeps breakers.  Safe to use from many threads, and from processes forked after it was made."""

    def update(self, name: str, change: Callable[[State, int], tuple[State, T]]) -> T:
        """Change the record of a breaker.

        Parameters:
          name(str): The downstream.
          change(Callable[[State, int], tuple[State, T]]): Is given what is known (a new `State` where nothing is) and
            the server's time in UNIX milliseconds; gives what is known now, and an answer.  It is called again where
            somebody else has written meanwhile.

        Returns:
          T: The answer.

        Raises:
          StoreUnavailable: The store cannot be reached, or too many others write.
        """
        ...

    def read(self, name: str) -> State | None:
        """Read the record of a breaker."""
        ...

    def names(self) -> tuple[str, ...]:
        """The downstreams that have a record, in alphabetical order."""
        ...

    def forget(self, name: str) -> bool:
        """Remove the record of a breaker, and say whether there was one."""
        ...

    def ping(self) -> None:
        """Make sure that the store answers and is set up.

        Raises:
          StoreUnavailable: It does not answer.
          SetupError: It answers, but is not set up.
        """
        ...

    def close(self) -> None:
        """Give back this process's connections."""
        ...


def encoded(state: State) -> str:
    """A record as it is stored: ASCII."""
    known = {each.name: _plain(getattr(state, each.name)) for each in fields(state)}
    return json.dumps({"v": _VERSION, **known}, separators=(",", ":"))


def decoded(text: str) -> State:
    """The record of what `encoded` wrote.

    What another version of the library has written, and this one cannot read, counts as nothing known: a breaker learns
    anew within seconds.  But an operator's word stays.
    """
    try:
        found = json.loads(text)
        mode = Mode(found["mode"])
        if found["v"] == _VERSION:
            values = {each.name: _typed(each.default, found[each.name]) for each in fields(State) if each.name in found}
            return State(**{**values, "mode": mode})
    except (ValueError, TypeError, KeyError):
        return State()
    return State(mode=mode, since=1) if mode in (Mode.FORCED_OPEN, Mode.FORCED_CLOSED) else State()


def changed(
    read: Callable[[], tuple[str | None, int]],
    swap: Callable[[str | None, str], tuple[bool, str | None, int]],
    change: Callable[[State, int], tuple[State, T]],
) -> T:
    """Compare and set until nobody else is faster.

    Parameters:
      read(Callable): Gives the stored text and the server's time.
      swap(Callable): Writes a new text in place of the former one; says whether that was still there, and if not what
        is, and the time.
      change(Callable): As in `BreakerStore.update`.
    """
    text, now = read()
    for _ in range(_TRIES):
        was = State() if text is None else decoded(text)
        state, answer = change(was, now)
        if text is not None and state == was:
            return answer
        done, text, now = swap(text, encoded(state))
        if done:
            return answer
    raise StoreUnavailable(f"others have changed the breaker {_TRIES} times meanwhile")


def _plain(value: Any) -> Any:
    if isinstance(value, Tally):
        return [value.ok, value.bad, value.ms]
    return value.value if isinstance(value, Mode) else value


def _typed(default: Any, value: Any) -> Any:
    if isinstance(default, Tally):
        ok, bad, ms = map(float, value)
        return Tally(ok, bad, ms)
    return value if isinstance(default, Mode) else type(default)(value)
