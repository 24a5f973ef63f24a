"""What keeps the answers to probes up to date: a thread that looks at the health every two seconds, and says it.

1. It writes the files of this process (`probe_files`), and removes what dead processes left.
2. It answers over HTTP (`probe_server`), where a port was asked for and no other process of the master does.
3. It tells systemd (`sd_notify`), where systemd asked.  Its watchdog hears that all is well only while *every* process
   of the master is live: each of them could keep a unit alive in which another one hangs.

A process that is frozen, or holds its GIL, says nothing, and is found out by that.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dramatiq.logging import get_logger

from .. import clock
from ..errors import SetupError
from .probe_files import ProbeFiles, ask
from .probe_server import ProbeServer
from .sd_notify import Notifier

if TYPE_CHECKING:
    from .health import Condition, Health

__all__ = ["Probes"]

#: How often, in milliseconds, at most; more often where systemd's watchdog wants it.
EVERY: Final = 2_000


class Probes:
    """Answers probes for one worker process.

    Parameters:
      health(Health): How the process is.
      directory(Path | str | None): Where the worker processes of one master keep their answers as files; nobody else
        may use it.  By default a private one is made where `port` or systemd need it.
      port(int | None): The port of the HTTP endpoint; ``None`` for none.
      host(str): The address that it listens on.  An orchestrator on another host, and Kubernetes' ``httpGet``, need
        ``"0.0.0.0"``.
      notifier(Notifier | None): What speaks to systemd; by default it is found in the environment.
    """

    def __init__(
        self,
        health: Health,
        *,
        directory: Path | str | None = None,
        port: int | None = None,
        host: str = "127.0.0.1",
        notifier: Notifier | None = None,
    ) -> None:
        self.logger = get_logger("dramatiq_guard", "probes")
        self.health = health
        self.notifier = Notifier() if notifier is None else notifier
        self.every = min(EVERY, self.notifier.every or EVERY)
        self.wanted = directory is not None or port is not None or self.notifier.enabled
        self.private = directory is None
        self.directory = _private_directory() if directory is None else Path(directory)
        self.server = None if port is None else ProbeServer(self.directory, host, port)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self.reloading = False
        self._complained = ""
        self._thread: threading.Thread | None = None
        self._files: ProbeFiles | None = None

    def start(self) -> None:
        """Begin; to be called when the worker boots, after the fork, and before its threads start.

        Raises:
          SetupError: When the directory cannot be used, or the address not be bound.
        """
        if not self.wanted or self._thread is not None:
            return
        try:
            if self.private:
                _make_private(self.directory)
            self._files = ProbeFiles(self.directory)
            self._say()
        except OSError as error:
            raise SetupError(
                f"Probes cannot be answered from {self.directory}: {error}. Give them a directory that this process "
                "may write, and a port that it may listen on, or neither."
            ) from error
        self._thread = threading.Thread(target=self._run, name="dramatiq-guard-probes", daemon=True)
        self._thread.start()

    def drain(self, *, reloading: bool = False) -> None:
        """The end has begun: say so at once.

        Parameters:
          reloading(bool): Whether the master starts new processes after it (SIGHUP); systemd, if told that the unit
            stops, would kill them.
        """
        self.reloading = reloading
        self.health.draining = True
        self._wake.set()

    def close(self) -> None:
        """End: this process says nothing more, and leaves no file behind."""
        with self._lock:
            self._closed = True
            if self._files is not None:
                self._files.remove()
            if self.server is not None:
                self.server.close()
            if self.private:
                with suppress(OSError):  # the other processes' files may still be in it
                    self.directory.rmdir()
        self._wake.set()

    def _run(self) -> None:
        while True:
            clock.wait(self._wake, self.every)
            self._wake.clear()
            if self._closed:
                return
            try:
                self._say()
                self._complained = ""
            except Exception as error:  # noqa: BLE001 - the next round tries again, whatever it was
                if str(error) != self._complained:
                    self.logger.warning("Probes cannot be answered just now: %s", error)
                self._complained = str(error)

    def _say(self) -> None:
        """One round.  Systemd hears last, and of files that could not be written it hears nothing."""
        condition = self.health.look()
        with self._lock:
            if self._closed or self._files is None:
                return
            self._files.write(_holding(condition), _reasons(condition))
            self._files.sweep()
            if self.server is not None:
                self.server.bind()
        self._notify(condition)

    def _notify(self, condition: Condition) -> None:
        notifier = self.notifier
        if not notifier.enabled:
            return
        if condition.draining:
            if not self.reloading:
                notifier.stopping()
            notifier.status("reloading" if self.reloading else "draining")
        else:
            if ask(self.directory, "startup").holds:
                notifier.ready()
            notifier.status("; ".join((*condition.complaints, *condition.waits)) or "ready")
        if ask(self.directory, "live").holds:
            notifier.alive()


def _holding(condition: Condition) -> set[str]:
    holds = {
        "startup": condition.started,
        "live": condition.live,
        "ready": condition.ready,
        "draining": condition.draining,
    }
    return {state for state, true in holds.items() if true}


def _reasons(condition: Condition) -> dict[str, tuple[str, ...]]:
    return {
        "startup": () if condition.started else ("its worker threads have not all started",),
        "live": condition.complaints,
        "ready": (*condition.complaints, *condition.waits),
    }


def _private_directory() -> Path:
    """Where the worker processes of one master find each other."""
    return Path(tempfile.gettempdir()) / f"dramatiq-guard-{os.getuid()}-{os.getppid()}"


def _make_private(directory: Path) -> None:
    # The name can be guessed, and the place is everybody's: what somebody else put there is not used.
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to somebody else")
