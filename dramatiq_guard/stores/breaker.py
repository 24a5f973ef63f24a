"""The breakers that processes share: one small record a downstream, changed by compare and set.

What a record becomes is for `policy.breaker.step` alone to say; a store keeps records and versions, and knows the time.
An exchange reads the record, computes the next one here, and writes it if its version is still the one that was read;
otherwise somebody else was first, and it begins again.  So the policy exists once, and not in Lua or SQL.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

from ..errors import StoreError, StoreUnavailable
from ..policy.breaker import Lease, Limits, Mode, Report, State, Tally, force, step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["BreakerRecords", "Breakers", "Found", "decode", "encode"]

_T = TypeVar("_T")

#: So often an exchange begins again before it gives up; at the rate at which gates ask, two in a row are rare.
_TRIES: Final = 25
#: The version of a record's form.
_FORM: Final = 1


@dataclass(frozen=True, slots=True)
class Found:
    """What a store has for a key.

    Parameters:
      version(int): Goes up with each write; 0 where there is no record.
      record(str | None): The record.
      now(int): The store's time in milliseconds, the same for all processes.
    """

    version: int
    record: str | None
    now: int


@runtime_checkable
class BreakerRecords(Protocol):
    """Keeps records.  Every method is one round trip, and raises `StoreError` like other stores."""

    def read(self, key: str) -> Found:
        """The record of a key, and the time."""
        ...

    def write(self, key: str, version: int, record: str) -> bool:
        """Write a record if the version is still this one; say whether it was."""
        ...

    def keys(self) -> list[str]:
        """The keys that have records, sorted."""
        ...


class Breakers:
    """The breakers of a store.

    Parameters:
      records(BreakerRecords): Where their records are kept.
      limits(Limits): How they judge.
    """

    def __init__(self, records: BreakerRecords, limits: Limits | None = None) -> None:
        self.records = records
        self.limits = limits or Limits()

    def exchange(self, key: str, report: Report) -> Lease:
        """Take in a process's report, and answer it.

        Parameters:
          key(str): The downstream.
          report(Report): What the process says and wants.

        Returns:
          Lease: What it may do.

        Raises:
          StoreUnavailable: The store is out, or so contended that no report gets through.
          StoreError: The store answered with an error, or keeps a record that cannot be read.
        """
        _, lease = self._change(key, lambda state, now: step(self.limits, state, report, now))
        return lease

    def force(self, key: str, mode: Mode) -> State:
        """Set a breaker by hand: an operator's word.

        Parameters:
          key(str): The downstream.
          mode(Mode): `FORCED_OPEN`, `FORCED_CLOSED`, or one of the others to let it judge for itself again.

        Returns:
          State: What it is now.
        """
        state, _ = self._change(key, lambda state, now: (force(state, mode, now), None))
        return state

    def states(self) -> Mapping[str, State]:
        """What is known of each downstream."""
        found = {key: self.records.read(key) for key in self.records.keys()}  # noqa: SIM118 - no mapping
        return {key: decode(key, each.record) for key, each in found.items() if each.record is not None}

    def _change(self, key: str, change: Callable[[State, int], tuple[State, _T]]) -> tuple[State, _T]:
        for _ in range(_TRIES):
            found = self.records.read(key)
            state, answer = change(decode(key, found.record), found.now)
            if self.records.write(key, found.version, encode(state)):
                return state, answer
        raise StoreUnavailable(
            f"the breaker of {key!r} was changed by others {_TRIES} times in a row; are its processes' gates wired to "
            "ask only when a report is due?"
        )


def encode(state: State) -> str:
    """Write a state as it is kept."""
    record = asdict(state) | {"mode": state.mode.value, "form": _FORM}
    return json.dumps(record, separators=(",", ":"))


def decode(key: str, record: str | None) -> State:
    """Read a state; no record is a breaker of which nothing is known.

    Parameters:
      key(str): The downstream, for the error.
      record(str | None): What was kept.  What it lacks, as one of an older release may, is as in a new state.

    Returns:
      State: The state.

    Raises:
      StoreError: It is no record of ours.
    """
    if record is None:
        return State()
    try:
        kept: dict[str, Any] = json.loads(record)
        if kept["form"] > _FORM:
            raise ValueError(f"its form is {kept['form']}, of a newer release")
        known = {field.name: kept[field.name] for field in fields(State) if field.name in kept}
        for name, value in known.items():
            if isinstance(value, dict):
                known[name] = Tally(**value)
        return State(**(known | {"mode": Mode(kept["mode"])}))
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"the record of the breaker {key!r} cannot be read ({error}): remove it") from error
