"""What a store must do for the circuit breakers: one small record a downstream, changed by compare and set.

What becomes of a record is decided by `dramatiq_guard.policy.breaker` alone, in the process; a store reads the record
with the server's time, has it changed, and writes what came of it if nobody else has written meanwhile.  So there is
one implementation of the policy and none in Lua or SQL.  This module must not know the middleware.
"""

from __future__ import annotations

import json
from dataclasses import fields
from hashlib import sha1
from threading import Event
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

from .. import clock
from ..errors import StoreUnavailable
from ..policy.breaker import Mode, State, Tally
from .cells import clean

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BREAKERS_KEPT", "BreakerStore", "changed", "decoded", "encoded", "kept_name"]

T = TypeVar("T")

#: Milliseconds for which a breaker that nobody reports to is remembered.
BREAKERS_KEPT: Final = 30 * 24 * 60 * 60 * 1000

#: How often a change is begun again because somebody else was faster.
_TRIES: Final = 50
#: After so many of them it pauses, for chance milliseconds up to the longest: many meet an outage in one moment.
_AT_ONCE: Final = 3
_LONGEST_PAUSE: Final = 40

_VERSION: Final = 1

#: Characters of a downstream's name in a store; an index of PostgreSQL bears no more than 2704 bytes.
_LONGEST_NAME: Final = 500
#: No number of a record is beyond it.
_MOST: Final = 2**53

_NEVER: Final = Event()


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


def kept_name(name: str) -> str:
    """The name under which a store keeps a downstream: one that a message made may hold anything, and be of any length.

    Parameters:
      name(str): What the actor calls it.
    """
    name = clean(name)
    if len(name) <= _LONGEST_NAME:
        return name
    told_apart = sha1(name.encode(), usedforsecurity=False).hexdigest()
    return f"{name[: _LONGEST_NAME - len(told_apart) - 1]}…{told_apart}"


def encoded(state: State) -> str:
    """A record as it is stored: ASCII."""
    known = {each.name: _plain(getattr(state, each.name)) for each in fields(state)}
    return json.dumps({"v": _VERSION, **known}, separators=(",", ":"))


def decoded(text: str) -> State:
    """The record of what `encoded` wrote.

    What another version of the library has written, and this one cannot read or reckon with, counts as nothing known: a
    breaker learns anew within seconds.  But an operator's word stays.
    """
    try:
        found = json.loads(text)
        version, mode = found["v"], Mode(found["mode"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return State()
    state = _state_of(found, mode) if version == _VERSION else None
    if state is None:
        return State(mode=mode, since=1) if mode in (Mode.FORCED_OPEN, Mode.FORCED_CLOSED) else State()
    return state


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
    for tried in range(1, _TRIES + 1):
        was = State() if text is None else decoded(text)
        state, answer = change(was, now)
        if text is not None and state == was:
            return answer
        done, text, now = swap(text, encoded(state))
        if done:
            return answer
        if tried >= _AT_ONCE:
            clock.wait(_NEVER, round(clock.uniform() * min(_LONGEST_PAUSE, tried)))
            text, now = read()
    raise StoreUnavailable(f"others have changed the breaker {_TRIES} times meanwhile")


def _plain(value: Any) -> Any:
    if isinstance(value, Tally):
        return [value.ok, value.bad, value.ms]
    return value.value if isinstance(value, Mode) else value


def _state_of(found: dict[str, Any], mode: Mode) -> State | None:
    """The record that was written; ``None`` if it is none that the policy can reckon with."""
    try:
        values = {each.name: _typed(each.default, found[each.name]) for each in fields(State) if each.name in found}
        state = State(**{**values, "mode": mode})
    except (ValueError, TypeError, OverflowError):
        return None
    numbers = [each for each in values.values() if isinstance(each, int | float)]
    for tally in (state.learned, state.recent, state.trial, state.present):
        numbers += [tally.ok, tally.bad, tally.ms]
    sound = all(0 <= number <= _MOST for number in numbers) and (mode is not Mode.RECOVERING or state.rate > 0)
    return state if sound else None


def _typed(default: Any, value: Any) -> Any:
    if isinstance(default, Tally):
        ok, bad, ms = map(float, value)
        return Tally(ok, bad, ms)
    return value if isinstance(default, Mode) else type(default)(value)
