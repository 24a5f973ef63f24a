"""Letting one message run alone in its process, so that no innocent is blamed when it kills it.

An ordinary message passes by adding itself to a set and looking at one field, without a lock.  Whoever wants to be
alone says so first and then waits until the set is empty but for itself: either the newcomer sees the wish, or the one
with the wish sees the newcomer.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..delivery import Delivery

__all__ = ["Isolation"]


class Isolation:
    """Keeps a process's messages apart.

    Parameters:
      given_up(Callable[[], bool]): Whether nobody shall wait any more, since the process ends.
    """

    def __init__(self, given_up: Callable[[], bool]) -> None:
        self._given_up = given_up
        self._inside: set[int] = set()
        self._alone: Delivery | None = None
        self._one = threading.Lock()
        self._open = threading.Event()
        self._open.set()

    def enter(self, delivery: Delivery) -> bool:
        """Run among others; wait while somebody is alone.

        Returns:
          bool: Whether it may run; not if the process ends while it waits.
        """
        while True:
            self._inside.add(id(delivery))
            if self._alone is None:
                return True
            self._inside.discard(id(delivery))
            if self._given_up():
                return False
            clock.wait(self._open, 100)

    def leave(self, delivery: Delivery) -> None:
        """It has run."""
        self._inside.discard(id(delivery))

    @contextmanager
    def alone(self, delivery: Delivery) -> Iterator[bool]:
        """Run alone: wait until all others have run, and let nobody in meanwhile.

        Yields:
          bool: Whether it may run; not if the process ends while it waits.
        """
        acquired = False
        while not acquired and not self._given_up():
            acquired = self._one.acquire(timeout=0.1)
        if not acquired:
            yield False
            return
        try:
            self._open.clear()
            self._alone = delivery
            while self._inside and not self._given_up():
                clock.wait(_NEVER, 10)
            yield not self._inside
        finally:
            self._alone = None
            self._open.set()
            self._one.release()


#: Never set: waiting for it is sleeping on our clock.
_NEVER = threading.Event()
