"""A clock on which waiting takes no time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dramatiq_guard import clock


class VirtualClock(clock.SystemClock):
    """A clock that moves only when somebody waits, and then at once.

    Attributes:
      time(int): Milliseconds, on both scales.
      waits(list[int]): The waits, one after the other.
      meanwhile(Callable): What happens during a wait.
    """

    def __init__(self) -> None:
        #: Threads that tests before this one left behind: they are no part of it.
        self.others = set(threading.enumerate()) - {threading.current_thread()}
        self.time = super().now()
        self.waits: list[int] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def now(self) -> int:
        return self.time

    def monotonic(self) -> int:
        return self.time

    def wait(self, event: Any, milliseconds: int) -> bool:
        if threading.current_thread() in self.others:
            return bool(event.wait(milliseconds / 1000))
        assert len(self.waits) < 10_000, "somebody waits for ever"
        self.waits.append(milliseconds)
        self.meanwhile()
        self.time += milliseconds
        return bool(event.is_set())


@pytest.fixture
def virtual() -> Iterator[VirtualClock]:
    """The clock that everything uses during the test."""
    virtual = VirtualClock()
    with clock.use(virtual):
        yield virtual
