"""Real `dramatiq` processes under test.

Starts what a user starts, `python -m dramatiq module`, in a process group of its own with its output in a file, and
promises that no process of the group outlives the `with` block, whatever the test did to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support.waiting import wait_until

__all__ = ["Workers"]

_READY = re.compile(r"\[PID (\d+)\].*Worker process is ready for action\.")
_PROJECT = Path(__file__).resolve().parents[2]


class Workers:
    """The `dramatiq` command line, running an app; a context manager that starts it and waits until it is ready.

    Parameters:
      module(str): What the command line is given, such as `"tests.apps.flaky"` or `"app:broker"`.
      processes(int): How many worker processes.
      threads(int): How many worker threads in each.
      path(Path): A directory to import the app from, before the project itself.
      env(Mapping[str, str]): Variables for the app, added to the environment.
      arguments(Sequence[str]): Further arguments, such as `("--worker-shutdown-timeout", "3000")`.
      queues(Sequence[str]): The only queues to consume.
      ready_within(float): The number of seconds to wait for all processes; 0 not to wait.

    Example:
      >>> with Workers("app", path=tmp_path, env={"REDIS_URL": redis_url}) as workers:
      ...     app.send()
      ...     workers.term()
      ...     assert workers.wait() == 0
    """

    def __init__(
        self,
        module: str,
        *,
        processes: int = 1,
        threads: int = 2,
        path: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        queues: Sequence[str] = (),
        ready_within: float = 30.0,
    ) -> None:
        self.processes = processes
        self.ready_within = ready_within
        self.command = [sys.executable, "-m", "dramatiq", module]
        self.command += ["--processes", str(processes), "--threads", str(threads), *arguments]
        if queues:
            self.command += ["--queues", *queues]
        paths = [str(path)] if path else []
        self.environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
            "PYTHONPATH": os.pathsep.join([*paths, str(_PROJECT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        log, name = tempfile.mkstemp(prefix="dramatiq-workers-", suffix=".log")
        os.close(log)
        self.log_path = Path(name)
        self.process: subprocess.Popen[bytes] | None = None

    # -- what it says ------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        """What all its processes have printed so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """The process id of the master."""
        assert self.process is not None, "the workers have not been started"
        return self.process.pid

    @property
    def pids(self) -> list[int]:
        """The process ids of the worker processes that have become ready, alive or not."""
        return [int(pid) for pid in _READY.findall(self.log)]

    @property
    def alive(self) -> list[int]:
        """The processes of the group that still run: master, workers and forks."""
        return _group_members(self.pid)

    # -- its life ----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the command line without waiting for it."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                cwd=_PROJECT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def wait_ready(self, timeout: float | None = None) -> Self:
        """Wait until every worker process has said that it is ready for action."""
        assert self.process is not None, "the workers have not been started"
        process = self.process

        def ready() -> bool:
            if len(self.pids) >= self.processes:
                return True
            assert process.poll() is None, f"the workers ended with {process.returncode} while booting:\n{self.log}"
            return False

        wait_until(ready, timeout or self.ready_within, lambda: f"{self.processes} ready workers; the log:\n{self.log}")
        return self

    def term(self) -> None:
        """Send SIGTERM to the master, as `docker stop` or `kill` would."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to every process of the group: the machine lost its power."""
        self.signal_group(signal.SIGKILL)

    def signal(self, sig: int) -> None:
        """Send a signal to the master alone."""
        os.kill(self.pid, sig)

    def signal_worker(self, sig: int, index: int = 0) -> None:
        """Send a signal to one worker process, in the order they became ready."""
        os.kill(self.pids[index], sig)

    def signal_group(self, sig: int) -> None:
        """Send a signal to every process of the group, as systemd's default KillMode does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, sig)

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for the master to end.

        Returns:
          int: Its exit code; negative for a signal.

        Raises:
          AssertionError: If it has not ended in time; holds the log.
        """
        assert self.process is not None, "the workers have not been started"
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the workers did not end within {timeout:g} s; the log:\n{self.log}") from None

    def wait_log(self, text: str, timeout: float = 15.0) -> None:
        """Wait until the log holds `text`."""
        wait_until(lambda: text in self.log, timeout, lambda: f"{text!r} in the log:\n{self.log}")

    def close(self) -> None:
        """End every process of the group and remove the log.  May be called more than once."""
        if self.process is not None:
            self.signal_group(signal.SIGCONT)
            if self.process.poll() is None:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)
            self.signal_group(signal.SIGKILL)
            self.process.wait()
            wait_until(lambda: not self.alive, 10, lambda: f"the end of the processes {self.alive}")
        self.log_path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        try:
            self.start()
            return self.wait_ready() if self.ready_within else self
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()


def _group_members(group: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, _, process_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(process_group) == group and state != "Z":
                    members.append(int(entry.name))
    return members
