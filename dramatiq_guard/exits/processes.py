"""What Linux tells of the processes of this machine: which of them still is the one that was meant.

A process that was killed holds its number until its parent has heard of it, and in a container that is started anew the
same numbers come again within a second.  So a number is alive only if the process behind it is no zombie, and is not
younger than what it is said to have done.
"""

from __future__ import annotations

import os
from typing import Final

from .. import clock

__all__ = ["alive", "resident_bytes", "started_at"]

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

#: What a process is that has died and has not been waited for.
_DEAD: Final = frozenset({"Z", "X", "x"})


def alive(pid: int, at: int) -> bool:
    """Whether the process that had a number at some time still runs.

    Parameters:
      pid(int): The number.
      at(int): When it certainly ran, in UNIX milliseconds.

    Returns:
      bool: ``False`` if nobody has the number, or only a dead process, or one that was started later.  Where the
        machine does not tell, whoever has the number counts.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # it is somebody else's
    found = _stat(pid)
    if found is None:
        return True
    state, started = found
    return state not in _DEAD and started <= at


def started_at(pid: int) -> int | None:
    """When a process was started, in UNIX milliseconds; ``None`` where there is none, or the machine does not tell."""
    found = _stat(pid)
    return None if found is None else found[1]


def resident_bytes() -> int:
    """How much memory this process has now."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), clock.booted_at() + int(fields[19]) * 1000 // _TICKS
