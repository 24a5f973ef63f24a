"""A server of one's own: started on a free loopback port, and made to fail on purpose.

What a private Valkey, PostgreSQL or RabbitMQ have in common: a port that stays the same over restarts, a directory for
its data, a process that can be stopped, killed, frozen and started again, and the promise that nothing is left behind.
It must not know which server it is; a subclass says how to start it and when it answers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["PrivateServer", "ServerDidNotStart", "free_port"]

#: Below the kernel's range of ephemeral ports (32768 and up).  In that range a client that keeps reconnecting to a
#: stopped server can be given the server's own port as its source and so connect to itself.
_PORTS = range(20_000, 32_000)


class ServerDidNotStart(RuntimeError):
    """A private server ended or stayed silent instead of answering; says where its log is and how it ends."""


def free_port() -> int:
    """Find a port on 127.0.0.1 that nobody listens on and that no outgoing connection will be given.

    Returns:
      int: The port.
    """
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise OSError("no free port on 127.0.0.1 among 200 tried between 20000 and 32000")


class PrivateServer:
    """A server process that belongs to whoever started it.

    Used as a context manager it is started on entry and closed, data and all, on exit; `stop`, `kill` and `restart`
    in between keep the data and the port.

    Parameters:
      port(int): The port on 127.0.0.1; a free one by default.
      ready_within(float): The number of seconds to wait for the first answer after a start.
    """

    #: What it is called in errors and in its temporary directory.
    name: ClassVar[str] = "server"

    def __init__(self, *, port: int | None = None, ready_within: float = 20.0) -> None:
        self.port = port or free_port()
        self.ready_within = ready_within
        self.directory = Path(tempfile.mkdtemp(prefix=f"dramatiq-guard-{self.name}-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        atexit.register(self.close)

    # -- what a subclass says ------------------------------------------------------------------------------------

    def command(self) -> list[str]:
        """Say how the server is started, in the foreground, on `self.port` with its data in `self.directory`."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Ask the server whether it is ready for clients; an `OSError` means no."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Give the environment of the server process."""
        return dict(os.environ)

    def family(self) -> list[int]:
        """List the processes that freeze and thaw together."""
        return [self.pid]

    # -- its life ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the process is there (it may be frozen)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._process is None:
            raise RuntimeError(f"the private {self.name} on port {self.port} is not running: call start() first")
        return self._process.pid

    @property
    def log_path(self) -> Path:
        """The file that gets what the server prints, over all its starts."""
        return self.directory / f"{self.name}.log"

    @property
    def log(self) -> str:
        """What the server has printed so far, over all its starts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def start(self) -> Self:
        """Start the process and wait until it answers.

        Raises:
          ServerDidNotStart: If it ended, or did not answer within `ready_within` seconds.
        """
        if self.running:
            return self
        with self.log_path.open("ab") as log:
            self._process = self.spawn(log)
        deadline = time.monotonic() + self.ready_within
        pause = 0.005
        while not self._ready():
            if self._process.poll() is not None:
                raise ServerDidNotStart(self._report(f"ended with status {self._process.returncode} while starting"))
            if time.monotonic() > deadline:
                report = self._report(f"did not answer within {self.ready_within:g} s")
                self.kill()
                raise ServerDidNotStart(report)
            time.sleep(pause)
            pause = min(pause * 2, 0.25)
        return self

    def spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Create the process, in a session of its own so that a Ctrl-C for the tests is not for the server."""
        return subprocess.Popen(
            self.command(),
            cwd=self.directory,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def stop(self, sig: int = signal.SIGTERM, *, timeout: float = 15.0) -> None:
        """Ask the server to end, and kill it if it has not done so in time; data and port are kept.

        Parameters:
          sig(int): The signal to ask with.
          timeout(float): The number of seconds to wait before SIGKILL.
        """
        if self._process is None:
            return
        if self.running:
            self.resume()  # a frozen process would not see the signal
            self._process.send_signal(sig)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End the server the hard way (SIGKILL); data and port are kept."""
        self.stop(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open, and nothing answers."""
        self._signal_family(signal.SIGSTOP)

    def resume(self) -> None:
        """Thaw a frozen server (SIGCONT)."""
        self._signal_family(signal.SIGCONT)

    def restart(self, sig: int = signal.SIGTERM) -> Self:
        """Stop the server and start it again on the same port with the same data.

        Parameters:
          sig(int): The signal to stop it with; SIGKILL for a crash.
        """
        self.stop(sig)
        return self.start()

    def close(self) -> None:
        """Stop the server and remove its data.  May be called more than once."""
        if os.getpid() != self._owner:
            return  # a forked child runs the same atexit callbacks, and the server is not its own
        atexit.unregister(self.close)
        try:
            self.stop()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.running else "not running"
        return f"<{type(self).__name__} 127.0.0.1:{self.port} {state}>"

    # -- inside --------------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        try:
            return self.answers()
        except OSError:
            return False

    def _signal_family(self, sig: int) -> None:
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)

    def _report(self, what: str) -> str:
        tail = "\n".join(self.log.splitlines()[-15:])
        return f"the private {self.name} on port {self.port} {what}; the end of its log:\n{tail}"
