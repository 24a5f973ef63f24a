"""Saying something while a worker process boots, when nobody reads its log yet.

A worker's log goes to its master through a pipe, and the master looks into it only when all its workers have booted, or
after half a minute.  So what makes a boot wait is written to the standard error output as well, which both have.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from . import host

if TYPE_CHECKING:
    from logging import Logger

__all__ = ["say"]


def say(logger: Logger, level: int, text: str) -> None:
    """Log something, and see that it is read at once.

    Parameters:
      logger(Logger): Where it is logged.
      level(int): The level of the line.
      text(str): What there is to say.
    """
    logger.log(level, "%s", text)
    # Not `sys.stderr`: that is the pipe.
    if host.in_command_line_worker() and sys.__stderr__ is not None:
        with suppress(OSError, ValueError):
            sys.__stderr__.write(f"[PID {os.getpid()}] [{logger.name}] {text}\n")
            sys.__stderr__.flush()
