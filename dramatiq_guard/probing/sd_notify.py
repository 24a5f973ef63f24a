"""What systemd is told: that the worker has started, lives, and stops.

Where ``NOTIFY_SOCKET`` is set (``Type=notify``), each worker process speaks for itself; the master does not know us. So
the unit says ``NotifyAccess=all``.  A message that cannot be sent is dropped: systemd is no reason to fail.

This module must not know what any of it is told for.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Notifier"]


class Notifier:
    """Speaks to the service manager that started this process, if there is one.

    Parameters:
      environment(Mapping[str, str] | None): Where it says so; the process's own.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        self.address = environment.get("NOTIFY_SOCKET", "")
        self.every = _interval(environment)
        self._status = ""
        self._told: set[str] = set()

    @property
    def enabled(self) -> bool:
        """Whether anybody listens."""
        return bool(self.address)

    def ready(self) -> None:
        """The worker has started; said once."""
        self._once("READY=1")

    def stopping(self) -> None:
        """The worker stops; said once."""
        self._once("STOPPING=1")

    def alive(self) -> None:
        """The worker lives; to be repeated every `every` milliseconds, where that is not ``None``."""
        if self.every is not None:
            self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """What ``systemctl status`` is to show; said when it changes."""
        line = " ".join(text.split())
        if line != self._status and self._send(f"STATUS={line}"):
            self._status = line

    def _once(self, message: str) -> None:
        if message not in self._told and self._send(message):
            self._told.add(message)

    def _send(self, message: str) -> bool:
        if not self.address:
            return False
        # A socket in the abstract namespace is written with an @ for the leading NUL.
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), address)
        except OSError:
            return False
        return True


def _interval(environment: Mapping[str, str]) -> int | None:
    """How often, in milliseconds, systemd wants to hear that we live: twice in the time after which it gives us up."""
    if not environment.get("NOTIFY_SOCKET"):
        return None
    # The process that systemd started is our master, so its number is meant for us too.
    if environment.get("WATCHDOG_PID", str(os.getpid())) not in {str(os.getpid()), str(os.getppid())}:
        return None
    microseconds = environment.get("WATCHDOG_USEC", "")
    return max(1, int(microseconds) // 2_000) if microseconds.isdecimal() and int(microseconds) > 0 else None
