"""The answers to probes as files, and how they are read: one directory for all worker processes of one master.

A process keeps a file for each thing that is true of it (``startup.<pid>``, ``live.<pid>``, ``ready.<pid>``,
``draining.<pid>``), and ``process.<pid>``, which says that it exists and why something is not true.  All are touched
every two seconds, so that a process that is frozen, or holds its GIL, is told by the age of its files.  Who asks is
answered for all processes: startup, live and ready if they hold for each one, draining if it holds for any.

The directory belongs to one container or host: who is dead is told by ``/proc``.

This module must not know Dramatiq, and nothing that takes long to import.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import clock

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = ["FRESH_FOR", "STATES", "Answer", "ProbeFiles", "ask"]

#: What can be asked.
STATES: Final = ("startup", "live", "ready", "draining")

#: How old, in milliseconds, a file may be; five times as old as it gets.
FRESH_FOR: Final = 10_000

_PROCESS: Final = "process"


@dataclass(frozen=True, slots=True)
class Answer:
    """What is to be said to a probe.

    Parameters:
      state(str): What was asked.
      holds(bool): Whether it is so.
      reasons(tuple[str, ...]): Why not.
    """

    state: str
    holds: bool
    reasons: tuple[str, ...] = ()

    def as_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"probe": self.state, "ok": self.holds, "reasons": list(self.reasons)}, ensure_ascii=False)


class ProbeFiles:
    """The files of this process.

    Parameters:
      directory(Path): Where they are; made where it is missing.
      pid(int): Whose they are.
    """

    def __init__(self, directory: Path, pid: int | None = None) -> None:
        self.directory = directory
        self.pid = os.getpid() if pid is None else pid
        self._born = _birth(self.pid)
        self._said = ""

    def write(self, holding: Collection[str], reasons: Mapping[str, Sequence[str]]) -> None:
        """Say how this process is; to be repeated every two seconds.

        Parameters:
          holding(Collection[str]): Those of `STATES` that hold.
          reasons(Mapping[str, Sequence[str]]): Why others do not.

        Raises:
          OSError: When the directory cannot be written.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        said = json.dumps({"born": self._born, "reasons": {state: list(why) for state, why in reasons.items()}})
        path = self._path(_PROCESS)
        if said != self._said or not path.exists():
            # Whoever reads meanwhile reads the old one or the new one.
            fresh = self.directory / f".{_PROCESS}.{self.pid}"
            fresh.write_text(said)
            fresh.replace(path)
            self._said = said
        _touch(path)
        for state in STATES:
            if state in holding:
                _touch(self._path(state))
            else:
                self._path(state).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what processes left that ended without a word."""
        for pid in _pids(self.directory):
            path = self.directory / f"{_PROCESS}.{pid}"
            if pid != self.pid and not _fresh(path) and _said(path).get("born", "") != _birth(pid):
                _remove(self.directory, pid)

    def remove(self) -> None:
        """Remove the files of this process, which ends."""
        _remove(self.directory, self.pid)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.{self.pid}"


def ask(directory: Path, state: str) -> Answer:
    """Answer a probe for all processes that keep their files in a directory.

    Parameters:
      directory(Path): The directory.
      state(str): One of `STATES`.

    Returns:
      Answer: False, with a reason, too where there is no process and no directory.
    """
    pids = _pids(directory)
    if state == "draining":
        holds = any(_fresh(directory / f"{state}.{pid}") for pid in pids)
        return Answer(state, holds, () if holds else (f"no worker process in {directory} is draining",))
    if not pids:
        return Answer(state, holds=False, reasons=(f"there is no worker process in {directory}",))
    reasons = [f"process {pid}: {why}" for pid in pids for why in _against(directory, state, pid)]
    return Answer(state, not reasons, tuple(reasons))


def _against(directory: Path, state: str, pid: int) -> list[str]:
    """Why a state does not hold of a process; nothing if it does."""
    process = directory / f"{_PROCESS}.{pid}"
    if _fresh(directory / f"{state}.{pid}"):
        return []
    if not _fresh(process):
        return [f"it has not been heard of for more than {FRESH_FOR} ms: it was killed, or hangs"]
    reasons = _said(process).get("reasons")
    given = reasons.get(state) if isinstance(reasons, dict) else None
    return [str(each) for each in given] if isinstance(given, list) and given else [f"not {state}"]


def _said(process: Path) -> dict[str, Any]:
    """What a process has written of itself; nothing if that makes no sense."""
    try:
        said = json.loads(process.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _pids(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    numbers = (name.removeprefix(f"{_PROCESS}.") for name in names if name.startswith(f"{_PROCESS}."))
    return sorted(int(number) for number in numbers if number.isdecimal())


def _touch(path: Path) -> None:
    # On our clock, like the look at their age.
    path.touch()
    now = clock.now() * 1_000_000
    os.utime(path, ns=(now, now))


def _fresh(path: Path) -> bool:
    try:
        written = path.stat().st_mtime_ns // 1_000_000
    except OSError:
        return False
    # The system's clock may be set back: what is from the future is no fresher than what is old.
    return abs(clock.now() - written) <= FRESH_FOR


def _remove(directory: Path, pid: int) -> None:
    for name in (*STATES, f".{_PROCESS}", _PROCESS):
        with suppress(OSError):
            (directory / f"{name}.{pid}").unlink(missing_ok=True)


def _birth(pid: int) -> str | None:
    """When a process started, in ticks since the machine did; ``None`` if there is none. A number may be used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
