"""What is remembered of crashes: which process is alive, which messages it has begun, and which ones processes died of.

The rules, which every store keeps alike:

- A process says that it is alive, again and again (`live`); when it stops saying so, it is dead once its time is over.
- It marks each message whose function it is about to enter (`Starter.start`) and unmarks it at the end (`finish`).
- When a process is found dead (`inquest`), each message that it had marked has one crash more.  A process that ends
  knowingly (`leave`) takes its marks with it.
- The messages with crashes are suspects, until one is forgiven or its last crash is too long ago.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Crash", "CrashStore", "History", "Starter"]


@dataclass(frozen=True, slots=True, order=True)
class Crash:
    """A process that died, or may have, while it was at work on a message.

    Parameters:
      at(int): When it had begun the message, in UNIX milliseconds.
      process(str): The id of the process.
      host(str): Where it ran.
      pid(int): Its number there.
    """

    at: int
    process: str
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class History:
    """What is known of a message.

    Parameters:
      crashes(tuple[Crash, ...]): Processes that are known to have died at it, oldest first.
      open(tuple[tuple[Crash, int], ...]): Processes that have begun it and have not ended it, each with the time until
        which it counts as alive.
    """

    crashes: tuple[Crash, ...] = ()
    open: tuple[tuple[Crash, int], ...] = ()


class Starter(Protocol):
    """One process's marks.  Safe to use from many threads; none of its methods raises for a store that is out."""

    def start(self, message_id: str, *, now: int) -> bool:
        """Mark a message, without waiting for an answer; finishes noted meanwhile go along.

        Returns:
          bool: Whether the mark was sent.
        """
        ...

    def finish(self, message_id: str) -> None:
        """Note that a message is over; it goes along with the next mark, or with `flush`."""
        ...

    def flush(self) -> bool:
        """Have everything noted, and wait for it; say whether it was, which nobody knows of a connection that broke."""
        ...

    def close(self) -> None:
        """Give back the connection."""
        ...


@runtime_checkable
class CrashStore(Protocol):
    """Remembers crashes.  Every method but `starter` is one round trip, and raises `StoreError` like other stores."""

    def live(self, process: str, *, host: str, pid: int, now: int, ttl: int) -> None:
        """Say that a process is alive, for so many milliseconds from now."""
        ...

    def leave(self, process: str) -> None:
        """A process ends knowingly: nothing that it had marked is a crash."""
        ...

    def starter(self, process: str) -> Starter:
        """The marks of a process, on a connection of its own."""
        ...

    def inquest(self, *, now: int) -> int:
        """Find the dead processes, and count a crash for each message that they had marked; each is found once.

        Returns:
          int: How many crashes were counted.
        """
        ...

    def suspects(self, *, since: int, limit: int = 1_000) -> Mapping[str, int]:
        """The messages with crashes, and how many; those whose last crash is older are forgotten."""
        ...

    def history(self, message_id: str, *, since: int) -> History:
        """What is known of a message, crashes before `since` apart."""
        ...

    def forgive(self, message_id: str) -> None:
        """A message is no suspect any more: it was done, or it was dealt with."""
        ...
