"""Finding the message that kills its workers, and nobody else.

The life of a poisonous message in it:

1. Its function is about to be entered: a mark is written, without waiting for an answer.  It kills the process.
2. The process's liveness lapses.  Another process finds it dead, and counts one crash for each message that it had
   marked: the poison, and those that were beside it.  They are suspects now.
3. A suspect that comes again runs alone in its process.  The innocent ones succeed, and are forgiven.
4. The poison kills again.  At the limit it is not run any more: the caller makes a dead letter of it.

An ordinary message pays for the mark alone.  What the broker says it has delivered before is looked up as well; if the
process that had begun it may still be alive, nobody knows yet, and the message is put off until that is known.

Nobody is taken for dead until this process has been in touch with the store for as long as a sign of life lasts: after
an outage, all the living look dead to whoever comes first.

This module must not know Dramatiq.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dramatiq.logging import get_logger

from .. import clock, telemetry
from ..errors import SetupError, StoreError
from . import processes
from .isolation import Isolation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from ..delivery import Delivery
    from ..stores.crashes import Crash, CrashStore, History, Starter

__all__ = ["Quarantine", "Suspicion"]

_HOST: Final = socket.gethostname()

#: How long, in milliseconds, to wait for the end of a process on this machine that has just dropped a message.
_DYING: Final = 500

#: How long, in milliseconds, deaths still count once a process has been told to end.  Docker kills after 10 s.
_LEAVES_AFTER: Final = 5_000

#: What a store says when it is out, or has been taken down under us.
_OUT: Final = (StoreError, SetupError)

#: Never set: waiting for it is sleeping on our clock.
_NEVER: Final = threading.Event()


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is held against a message.

    Parameters:
      crashes(tuple[Crash, ...]): The processes that died at it.
      wait(int): Milliseconds until it is known whether another process that had begun it is dead; 0 if all is known.
      over(bool): Whether nothing is held against it any more once this delivery is settled.
    """

    crashes: tuple[Crash, ...]
    wait: int = 0
    over: bool = False


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
        self.process = f"{_namespace()}.{uuid.uuid4().hex}"
        self.isolation = Isolation(given_up)
        self._starter: Starter = store.starter(self.process)
        self._suspects: Mapping[str, int] = {}
        self._closed = threading.Event()
        self._complained = False
        self._leaving = threading.Lock()
        self._left = False
        #: Since when the store has answered without a break, and when it did so last.
        self._in_touch_since: int | None = None
        self._answered_at = 0

    @property
    def ttl(self) -> int:
        """For how long one sign of life lasts, in milliseconds."""
        return 3 * self.every

    def start(self) -> None:
        """Give the first sign of life, and go on giving them."""
        self.beat()
        threading.Thread(target=self._run, name="dramatiq-guard-quarantine", daemon=True).start()

    def leave_soon(self) -> None:
        """The process has been told to end: what is at work for a while longer, and is killed then, is no crash.

        Not at once: a message that kills this process now kills it all the same.  Not at the end: an orchestrator that
        grants less time than the deadlines need kills it before.
        """

        def run() -> None:
            clock.wait(self._closed, _LEAVES_AFTER)
            self.leave()

        threading.Thread(target=run, name="dramatiq-guard-leave", daemon=True).start()

    def leave(self) -> None:
        """The process ends knowingly: what it had begun, and what it may still begin, is no crash."""
        with self._leaving:
            if self._left:
                return
            self._closed.set()
            # Marks have a way of their own to the store: none may come after the farewell.
            self._starter.flush()
            self._starter.close()
            try:
                self.store.leave(self.process)
            except _OUT as error:
                self.logger.warning("The marks of this process could not be removed: %s", error)
                return
            self._left = True

    def beat(self) -> None:
        """Give a sign of life, look for the dead, and learn the suspects."""
        now = clock.monotonic()
        if now - self._answered_at > self.ttl:
            # It was out, or this process was frozen.
            self._in_touch_since = None
        found = 0
        try:
            self.store.live(self.process, host=_HOST, pid=os.getpid(), now=clock.now(), ttl=self.ttl)
            if self._closed.is_set():
                # It has left meanwhile, and must not come back from the dead.
                self.store.leave(self.process)
                return
            if self._in_touch():
                found = self.store.inquest(now=clock.now())
            self._suspects = self.store.suspects(since=clock.now() - self.window)
        except _OUT as error:
            self._in_touch_since = None
            if not self._complained:
                self.logger.warning("Crashes are not counted while their store is out: %s", error)
                telemetry.crashes_uncounted()
            self._complained = True
            return
        # What has finished must not look begun for as long as nothing else begins.
        self._starter.flush()
        self._answered_at = clock.monotonic()
        if self._in_touch_since is None:
            self._in_touch_since = now
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
            return self._judge(history, now)
        except _OUT as error:
            self.logger.warning("Message %r runs without a look at its crashes: %s", message_id, error)
            telemetry.crashes_uncounted()
            return None

    def _judge(self, history: History, now: int) -> Suspicion | None:
        crashes = [*history.crashes]
        wait = 0
        for start, until in history.open:
            if start.process == self.process:
                continue
            if start.process.partition(".")[0] == _namespace() and start.host == _HOST:
                # Otherwise it is alive, and has lost its connection to the broker: no reason to suspect anything.
                if _is_gone(start):
                    self._declare_dead(start)
                    crashes.append(start)
            elif until <= now and self._in_touch():
                crashes.append(start)
            else:
                # Only its silence will tell, and then everybody must have heard of it.
                wait = max(wait, until - now, 0) + self.ttl + 2 * self.every
        return Suspicion(tuple(sorted(crashes)), wait) if crashes or wait else None

    def _declare_dead(self, crash: Crash) -> None:
        """Let everybody know at once: the next copy of a message may go to another process, and not be redelivered."""
        self.store.live(crash.process, host=crash.host, pid=crash.pid, now=0, ttl=0)
        self.store.inquest(now=0)

    def _in_touch(self) -> bool:
        """Whether the store has answered for long enough that everybody who lives has said so."""
        since = self._in_touch_since
        return since is not None and clock.monotonic() - since >= self.ttl

    def watched(self, delivery: Delivery, suspicion: Suspicion | None) -> AbstractContextManager[bool]:
        """Run a message's function under watch: a suspect alone, the others together.

        Returns:
          AbstractContextManager[bool]: Gives whether it may run; not if the process ends while it waits.
        """
        return _Among(self, delivery) if suspicion is None else self._alone(delivery)

    @contextmanager
    def _alone(self, delivery: Delivery) -> Iterator[bool]:
        with self.isolation.alone(delivery) as admitted:
            if not admitted:
                yield False
                return
            # Those that ran before it are over, and must be known to be; and its own mark must not be lost.
            self._mark(delivery)
            self._starter.flush()
            try:
                yield True
            finally:
                self._starter.finish(delivery.message_id)
                self._starter.flush()

    def _mark(self, delivery: Delivery) -> None:
        if not self._starter.start(delivery.message_id, now=clock.now()) and not self._closed.is_set():
            telemetry.crashes_uncounted()

    def forgive(self, message_id: str) -> None:
        """A message is no suspect any more."""
        try:
            self.store.forgive(message_id)
        except _OUT as error:
            self.logger.warning("Message %r could not be forgiven: %s", message_id, error)
        self._suspects = {each: crashes for each, crashes in self._suspects.items() if each != message_id}

    def _run(self) -> None:
        while not clock.wait(self._closed, self.every):
            try:
                self.beat()
            except Exception:
                self.logger.exception("A sign of life could not be given; the next one is tried all the same.")


class _Among:
    """An ordinary message among others.  A class, since each message passes here, and a generator takes longer."""

    __slots__ = ("admitted", "delivery", "quarantine")

    def __init__(self, quarantine: Quarantine, delivery: Delivery) -> None:
        self.quarantine = quarantine
        self.delivery = delivery
        self.admitted = False

    def __enter__(self) -> bool:
        self.admitted = self.quarantine.isolation.enter(self.delivery)
        if self.admitted:
            try:
                self.quarantine._mark(self.delivery)
            except BaseException:  # an interrupt of somebody else's (H4)
                self.quarantine.isolation.leave(self.delivery)
                raise
        return self.admitted

    def __exit__(self, *_: object) -> None:
        if self.admitted:
            try:
                self.quarantine._starter.finish(self.delivery.message_id)
            finally:
                self.quarantine.isolation.leave(self.delivery)


def _is_gone(start: Crash) -> bool:
    """Whether a process of this machine has died; one that is just dying is waited for, since its sockets go first."""
    deadline = clock.monotonic() + _DYING
    while processes.alive(start.pid, start.at):
        if clock.monotonic() >= deadline:
            return False
        clock.wait(_NEVER, 20)
    return True


@functools.cache
def _namespace() -> str:
    """Within what process numbers mean the same: two containers may share a host name."""
    with suppress(OSError):
        return format(os.stat("/proc/self/ns/pid").st_ino, "x")
    return ""
