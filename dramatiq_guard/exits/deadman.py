"""The end of a process in which no Python code can run any more, since something holds the interpreter's lock.

No signal handler runs then, no thread, no hook.  faulthandler has a thread in C that does: it is told to end the
process after a while, and told so anew, later and later, for as long as Python runs.  It writes the stacks of all
threads and exits with 1.

It must not know who asks, or why the process ends.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from typing import Final

from .. import host

__all__ = ["Deadman"]


class Deadman:
    """The one timer that a process has for this."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = False

    def keep_off(self, milliseconds: int) -> None:
        """Python runs: end the process only after so many milliseconds from now.  Called again and again."""
        with self._lock:
            if not self._last:
                _arm(milliseconds)

    def last(self, milliseconds: int) -> None:
        """The process has so many milliseconds left, whatever runs; nothing keeps the end off any more."""
        with self._lock:
            self._last = True
            _arm(milliseconds)

    def disarm(self) -> None:
        """The process ends by itself."""
        with self._lock:
            self._last = True
            faulthandler.cancel_dump_traceback_later()


#: The least that it is armed for: a machine that is very busy is no held interpreter.
_LEAST: Final = 2_000


def _arm(milliseconds: int) -> None:
    if host.in_command_line_worker() and sys.__stderr__ is not None:
        # Not `sys.stderr`: that is Dramatiq's log pipe, whose framing it would corrupt.
        faulthandler.dump_traceback_later(max(milliseconds, _LEAST) / 1000, exit=True, file=sys.__stderr__)
