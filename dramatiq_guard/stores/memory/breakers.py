"""Breakers in a dictionary, for tests and for one process that needs no others to know."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from ... import clock
from ...policy.breaker import State
from ..breakers import decoded, encoded, kept_name

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryBreakers"]

T = TypeVar("T")


class MemoryBreakers:
    """A `BreakerStore` that is gone with its process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._records: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<MemoryBreakers with {len(self._records)} records>"

    def update(self, name: str, change: Callable[[State, int], tuple[State, T]]) -> T:
        name = kept_name(name)
        with self._lock:
            text = self._records.get(name)
            state, answer = change(State() if text is None else decoded(text), clock.now())
            self._records[name] = encoded(state)
            return answer

    def read(self, name: str) -> State | None:
        text = self._records.get(kept_name(name))
        return None if text is None else decoded(text)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._records))

    def forget(self, name: str) -> bool:
        with self._lock:
            return self._records.pop(kept_name(name), None) is not None

    def ping(self) -> None:
        pass

    def close(self) -> None:
        pass
