"""Finding the message that kills its workers, and nobody else.

The life of a poisonous message in it:

1. Its function is about to be entered: a mark is written, without waiting for an answer.  It kills the process.
2. The process's liveness lapses.  Another process finds it dead, and counts one crash for each message that it had
   marked: the poison, and those that were beside it.  They are suspects now.
3. A suspect that comes again runs alone in its process.  The innocent ones succeed, and are forgiven.
4. The poison kills again.  At the limit it is not run any more: the caller makes a dead letter of it.

An ordinary message pays for the mark alone.  What the broker says it has delivered before is looked up as well; if the
process that had begun it may still be alive, nobody knows yet, and the message is put off until that is known.

This module must not know Dramatiq.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dramatiq.logging import get_logger

from . import clock, telemetry
from .errors import StoreError
from .isolation import Isolation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .delivery import Delivery
    from .stores.crashes import Crash, CrashStore, History, Starter

__all__ = ["Quarantine", "Suspicion"]

_HOST: Final = socket.gethostname()


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is held against a message.

    Parameters:
      crashes(tuple[Crash, ...]): The processes that died at it.
      wait(int): Milliseconds until it is known whether another process that had begun it is dead; 0 if all is known.
    """

    crashes: tuple[Crash, ...]
    wait: int = 0


class Quarantine:
    """One process's part in it.

    Parameters:
      store(CrashStore): Where crashes are remembered.
      max_crashes(int): At how many crashes a message is not run any more.
      window(int): For how many milliseconds a crash is held against a message.
      every(int): Milliseconds between two signs of life.
      given_up(Callable[[], bool]): Whether nobody shall wait any more, since the process ends.
    """

    def __init__(
        self, store: CrashStore, max_crashes: int, window: int, every: int, given_up: Callable[[], bool]
    ) -> None:
        self.logger = get_logger("dramatiq_guard", "quarantine")
        self.store = store
        self.max_crashes = max_crashes
        self.window = window
        self.every = every
        self.process = uuid.uuid4().hex
        self.isolation = Isolation(given_up)
        self._starter: Starter = store.starter(self.process)
        self._suspects: Mapping[str, int] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._complained = False

    @property
    def ttl(self) -> int:
        """For how long one sign of life lasts, in milliseconds."""
        return 3 * self.every

    def start(self) -> None:
        """Give the first sign of life, and go on giving them."""
        self.beat()
        self._thread = threading.Thread(target=self._run, name="dramatiq-guard-quarantine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The process ends knowingly: what it had begun is no crash."""
        self._closed.set()
        self._starter.close()
        try:
            self.store.leave(self.process)
        except StoreError as error:
            self.logger.warning("The marks of this process could not be removed: %s", error)

    def beat(self) -> None:
        """Give a sign of life, look for the dead, and learn the suspects."""
        try:
            now = clock.now()
            self.store.live(self.process, host=_HOST, pid=os.getpid(), now=now, ttl=self.ttl)
            found = self.store.inquest(now=now)
            self._suspects = self.store.suspects(since=now - self.window)
        except StoreError as error:
            if not self._complained:
                self.logger.warning("Crashes are not counted while their store is out: %s", error)
                telemetry.crashes_uncounted()
            self._complained = True
            return
        self._complained = False
        if found:
            self.logger.warning("%d messages were being processed when their worker process died.", found)

    def suspicion(self, message_id: str, *, redelivered: bool) -> Suspicion | None:
        """What is held against a message that has arrived; ``None`` for an ordinary one, without asking anybody.

        Parameters:
          message_id(str): The message.
          redelivered(bool): Whether the broker says that it was delivered before.
        """
        if not redelivered and message_id not in self._suspects:
            return None
        now = clock.now()
        try:
            history = self.store.history(message_id, since=now - self.window)
        except StoreError as error:
            self.logger.warning("Message %r runs without a look at its crashes: %s", message_id, error)
            telemetry.crashes_uncounted()
            return None
        return self._judge(history, now)

    def _judge(self, history: History, now: int) -> Suspicion | None:
        crashes = [*history.crashes]
        wait = 0
        for start, until in history.open:
            if start.process == self.process:
                continue
            if until <= now or (start.host == _HOST and not _exists(start.pid)):
                crashes.append(start)
            elif start.host != _HOST:
                # Another machine: only its silence will tell.
                wait = max(wait, until - now)
        return Suspicion(tuple(sorted(crashes)), wait) if crashes or wait else None

    @contextmanager
    def watched(self, delivery: Delivery, suspicion: Suspicion | None) -> Iterator[bool]:
        """Run a message's function under watch: a suspect alone, the others together.

        Yields:
          bool: Whether it may run; not if the process ends while it waits.
        """
        if suspicion is None:
            if not self.isolation.enter(delivery):
                yield False
                return
            try:
                self._starter.start(delivery.message_id, now=clock.now())
                yield True
            finally:
                self._starter.finish(delivery.message_id)
                self.isolation.leave(delivery)
            return
        with self.isolation.alone(delivery) as admitted:
            if not admitted:
                yield False
                return
            # Those that ran before it are over, and must be known to be.
            self._starter.flush()
            self._starter.start(delivery.message_id, now=clock.now())
            try:
                yield True
            finally:
                self._starter.finish(delivery.message_id)
                self._starter.flush()

    def forgive(self, message_id: str) -> None:
        """A message is no suspect any more."""
        self.store.forgive(message_id)
        self._suspects = {each: crashes for each, crashes in self._suspects.items() if each != message_id}

    def _run(self) -> None:
        while not clock.wait(self._closed, self.every):
            self.beat()


def _exists(pid: int) -> bool:
    """Whether there is such a process on this machine; one that may not be looked at is one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
