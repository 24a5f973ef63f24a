"""Braking a boot loop: a process that keeps dying seconds after it booted waits before it tries again, and says so.

An orchestrator restarts at once what has crashed, and a broken release would hammer brokers and downstreams.  When the
last crashes came soon after their boots, each further boot waits twice as long, up to a minute.  They are remembered in
a small file in the temporary directory, one for each command line and user.
"""

from __future__ import annotations

import getpass
import json
import os
import sys
import tempfile
import threading
from hashlib import sha1
from pathlib import Path
from typing import Final

from dramatiq.logging import get_logger

from . import clock

__all__ = ["BootBrake"]

#: A crash counts if it came so many milliseconds after the boot, and is not older than that.
_SOON: Final = 10_000
_FORGOTTEN: Final = 300_000

#: So many boots may crash before the next one waits; the first wait and the longest, in milliseconds.
_FREE: Final = 3
_FIRST: Final = 5_000
_LONGEST: Final = 60_000


class BootBrake:
    """The brake of one worker process.

    Parameters:
      path(Path | None): The file; by default one for this command line and user.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.logger = get_logger("dramatiq_guard", "boot_brake")
        self.path = path or Path(tempfile.gettempdir()) / f"dramatiq-guard-boots-{_whose()}.json"
        self.booted_at = clock.now()

    def delay(self) -> int:
        """How many milliseconds this boot should wait."""
        recent = len(self._crashes())
        return 0 if recent < _FREE else int(min(_FIRST * 2 ** (recent - _FREE), _LONGEST))

    def wait(self) -> None:
        """Wait, if the boots before this one crashed."""
        delay = self.delay()
        if delay:
            self.logger.error(
                "The last %d worker processes died within %d ms of their boot; this one waits for %d ms before it goes "
                "on. Look at what they said.",
                len(self._crashes()),
                _SOON,
                delay,
            )
            clock.wait(threading.Event(), delay)
        self.booted_at = clock.now()

    def crashed(self) -> None:
        """This process ends for a fatal reason; remember it if it did so soon."""
        now = clock.now()
        if now - self.booted_at > _SOON:
            return
        crashes = [*self._crashes(), now][-20:]
        try:
            temporary = self.path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(crashes))
            temporary.replace(self.path)
        except OSError as error:
            self.logger.warning("A boot that crashed could not be noted in %s: %s", self.path, error)

    def _crashes(self) -> list[int]:
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return []
        oldest = clock.now() - _FORGOTTEN
        return [at for at in found if isinstance(at, int) and at > oldest] if isinstance(found, list) else []


def _whose() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return sha1(f"{user}\0{Path.cwd()}\0{sys.argv}".encode(), usedforsecurity=False).hexdigest()[:16]
