"""Named points at which a test can kill the process: between any two lines that write.

``DRAMATIQ_GUARD_KILL_AT=before-retry`` makes the first process that reaches that point kill itself with SIGKILL, as a
power cut would; ``after-letter:3`` the third time it is reached.  Without the variable a point costs one comparison.

The points, in the order in which a message meets them:

=====================  ==============================================================================================
decided                the decision is taken, nothing has been written
before-X, after-X      around each part of the settlement: ``result``, ``on_success``, ``on_failure``, ``pipeline``,
                       ``group``, ``on_retry_exhausted``, ``letter``, ``on_dead_letter``, ``retry``, ``defer``,
                       ``requeue``
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
from typing import Final

__all__ = ["VARIABLE", "reach"]

VARIABLE: Final = "DRAMATIQ_GUARD_KILL_AT"

_point, _, _times = os.environ.get(VARIABLE, "").partition(":")
_left = int(_times or 1)


def reach(point: str) -> None:
    """Die here if a test asked for it.

    Parameters:
      point(str): The name of this point.
    """
    if _point and point == _point:
        _die()


def _die() -> None:
    global _left  # noqa: PLW0603 - a countdown of the process
    _left -= 1
    if _left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
