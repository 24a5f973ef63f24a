"""Named points at which a test can kill the process: between any two lines that write.

``DRAMATIQ_GUARD_KILL_AT=before-retry`` makes the first process that reaches that point kill itself with SIGKILL, as a
power cut would; ``after-letter:3`` the third time it is reached.  Without the variable a point costs one comparison.

The points, in the order in which a message meets them:

=====================  ==============================================================================================
decided                the decision is taken, nothing has been written
before-X, after-X      around each part of the settlement: ``result``, ``on_success``, ``on_failure``, ``pipeline``,
                       ``group``, ``on_retry_exhausted``, ``letter``, ``on_dead_letter``, ``withdrawal``, ``retry``,
                       ``defer``, ``requeue``
before-ack, after-ack  around the broker's ack
before-nack,           around the broker's nack
after-nack
before-promote,        around the move of a delayed message to its queue
after-promote
=====================  ==============================================================================================
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["VARIABLE", "reach", "reaching"]

VARIABLE: Final = "DRAMATIQ_GUARD_KILL_AT"


def reach(point: str) -> None:
    """Die here if a test asked for it.

    Parameters:
      point(str): The name of this point.
    """
    if _hook is not None:
        _hook(point)


@contextmanager
def reaching(hook: Callable[[str], None]) -> Iterator[None]:
    """Have a function called at every point, for tests that simulate.

    Parameters:
      hook(Callable[[str], None]): Called with the name of each point that is reached.
    """
    global _hook  # noqa: PLW0603 - one for the process, as a kill is
    before, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = before


def _killer(wanted: str) -> Callable[[str], None] | None:
    point, _, times = wanted.partition(":")
    if not point:
        return None
    left = int(times or 1)

    def die(reached: str) -> None:
        nonlocal left
        if reached == point:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return die


_hook: Callable[[str], None] | None = _killer(os.environ.get(VARIABLE, ""))
