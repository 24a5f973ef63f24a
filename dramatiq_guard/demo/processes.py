"""The demo's processes: started in sessions of their own, watched, and ended by their ids.

A worker process that ends is started again, as systemd or Kubernetes would.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

    from .settings import Settings

__all__ = ["DownstreamProcess", "Fleet", "ProcessEnded", "end", "start_producer"]


class ProcessEnded(RuntimeError):
    """A process of the demo ended when it should not have; says what it printed last."""


def _start(arguments: list[str], log: IO[bytes], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a Ctrl-C is for the demo, which then ends its processes in order
    )


def end(process: subprocess.Popen[bytes], *, within: float = 8.0) -> None:
    """End a process that the demo started, and with it whatever it started itself.

    Parameters:
      process(subprocess.Popen): The process, leader of its own session.
      within(float): The number of seconds that it is given after SIGTERM.
    """
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(within)
    finally:  # a second Ctrl-C cuts the waiting short
        # Its children are in its group: an orphaned worker would outlive a master that was killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def start_producer(settings: Settings, ledger: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the producer, which ends by itself when everything is sent."""
    with log.open("ab") as file:
        return _start(["-m", "dramatiq_guard.demo.producer", str(ledger)], file, settings.to_environment())


class DownstreamProcess:
    """The downstream in its own process, which ends by itself when the demo is gone.

    Parameters:
      ledger(Path): The ledger that it keeps.
    """

    def __init__(self, ledger: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dramatiq_guard.demo.downstream", str(ledger)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def url(self) -> str:
        """Wait until it serves, and give its URL; to be called once.

        Raises:
          ProcessEnded: If it ended instead.
        """
        port = self._process.stdout.readline().decode().strip() if self._process.stdout else ""
        if not port:
            raise ProcessEnded("the demo's downstream ended before it served anything; its error is printed above")
        return f"http://127.0.0.1:{port}"

    def close(self) -> None:
        """End it."""
        end(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Fleet:
    """The workers: so many times ``dramatiq --processes 1``, each started again when it ends.

    Parameters:
      settings(Settings): Where everything is.
      log(Path): The file that gets what they print.
      size(int): How many.
      threads(int): How many threads each has.
    """

    def __init__(self, settings: Settings, log: Path, *, size: int = 2, threads: int = 4) -> None:
        self.log = log
        self.restarts = 0
        self._environment = settings.to_environment()
        self._arguments = ["-m", "dramatiq", "dramatiq_guard.demo.worker", "--processes", "1"]
        self._arguments += ["--threads", str(threads), "--worker-shutdown-timeout", "5000"]
        self._processes = [self._spawn() for _ in range(size)]

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as file:
            return _start(self._arguments, file, self._environment)

    def mend(self) -> None:
        """Start those again that have ended.

        Raises:
          ProcessEnded: When they keep ending, which no restart will cure.
        """
        for index, process in enumerate(self._processes):
            if process.poll() is None:
                continue
            end(process)
            if self.restarts >= 3 * len(self._processes):
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                raise ProcessEnded(f"the demo's workers keep ending (last status {process.returncode}):\n{tail}")
            self.restarts += 1
            self._processes[index] = self._spawn()

    def kill(self, pid: int) -> bool:
        """Kill a worker process the hard way, if it is one of these.

        Returns:
          bool: Whether it was, and was alive.
        """
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) in {process.pid for process in self._processes}:
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def close(self) -> None:
        """End them all: first all are told, then each is waited for."""
        with contextlib.ExitStack() as ending:  # each is ended whatever becomes of the others
            for process in self._processes:
                ending.callback(end, process)
                if process.poll() is None:
                    process.terminate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
