"""Braking a boot loop: a process that keeps dying seconds after it booted waits before it tries again, and says so.

An orchestrator restarts at once what has crashed, and a broken release would hammer brokers and downstreams.  When the
last boots ended in a crash soon after, each further one waits twice as long, up to a minute.  They are remembered in a
small file of this user's in the temporary directory, one for each command line; processes of one master boot together,
and count as one boot.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import tempfile
import threading
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dramatiq.logging import get_logger

from .. import clock
from ..boot_log import say
from . import processes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BootBrake"]

#: A crash counts if it came so many milliseconds after the boot, and is not older than that.
_SOON: Final = 10_000
_FORGOTTEN: Final = 300_000

#: So many boots may crash before the next one waits; the first wait and the longest, in milliseconds.
_FREE: Final = 3
_FIRST: Final = 5_000
_LONGEST: Final = 60_000

#: How many crashes are remembered.
_KEPT: Final = 100

#: Never set: waiting for it is sleeping on our clock.
_NEVER: Final = threading.Event()


class BootBrake:
    """The brake of one worker process.

    Parameters:
      path(Path | None): The file; by default one for this command line and user.
      boot(str | None): What tells this boot from others; by default the master that this process belongs to.
    """

    def __init__(self, path: Path | None = None, boot: str | None = None) -> None:
        self.logger = get_logger("dramatiq_guard", "boot_brake")
        self.path = path or _default_path()
        self.boot = boot or f"{os.getppid()}:{processes.started_at(os.getppid())}"
        self.booted_at: int | None = None

    def delay(self) -> int:
        """How many milliseconds this boot should wait."""
        crashed = len(self._boots())
        return 0 if crashed < _FREE else int(min(_FIRST * 2 ** (crashed - _FREE), _LONGEST))

    def wait(self, given_up: Callable[[], bool]) -> None:
        """Wait, if the boots before this one crashed.

        Parameters:
          given_up(Callable[[], bool]): Whether nobody shall wait any more, since the process ends.
        """
        delay = self.delay()
        if not delay:
            return
        say(
            self.logger,
            logging.ERROR,
            f"The last {len(self._boots())} boots of this command ended in a crash within {_SOON} ms; this one waits "
            f"for {delay} ms before it goes on. Look at what they said.",
        )
        until = clock.monotonic() + delay
        while (left := until - clock.monotonic()) > 0 and not given_up():
            clock.wait(_NEVER, min(100, left))

    def booted(self) -> None:
        """The process goes to work: a crash from now on is soon for a while."""
        self.booted_at = clock.monotonic()

    def crashed(self) -> None:
        """This process ends for a fatal reason; remember it if it did so soon."""
        if self.booted_at is None or clock.monotonic() - self.booted_at > _SOON or self.path is None:
            return
        crashes = [*self._crashes(), [clock.now(), self.boot]][-_KEPT:]
        try:
            temporary = self.path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(crashes))
            temporary.replace(self.path)
        except OSError as error:
            self.logger.warning("A boot that crashed could not be noted in %s: %s", self.path, error)

    def _boots(self) -> set[str]:
        """The boots that crashed lately, this one apart: another process of it may have crashed before this waits."""
        return {str(boot) for _, boot in self._crashes()} - {self.boot}

    def _crashes(self) -> list[list[int | str]]:
        try:
            found = json.loads(self.path.read_text()) if self.path is not None else []
        except (OSError, ValueError):
            return []
        oldest = clock.now() - _FORGOTTEN
        return [each for each in found if _is_sound(each) and each[0] > oldest] if isinstance(found, list) else []


def _is_sound(crash: object) -> bool:
    return isinstance(crash, list) and len(crash) == 2 and isinstance(crash[0], int) and isinstance(crash[1], str)


def _default_path() -> Path | None:
    """The file of this command line; none where the place for it is somebody else's."""
    folder = Path(tempfile.gettempdir()) / f"dramatiq-guard-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        return None
    name = sha1(f"{Path.cwd()}\0{sys.argv}".encode(errors="replace"), usedforsecurity=False).hexdigest()[:16]
    return folder / f"boots-{name}.json"
