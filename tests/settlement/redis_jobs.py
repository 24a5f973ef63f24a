"""The jobs that are run while Redis fails: what each must do is known beforehand, and what it did is in a ledger.

The same jobs run in a worker inside the test and in real `dramatiq` processes, on the stack or on stock Dramatiq.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import (
    AgeLimit,
    AsyncIO,
    Callbacks,
    CurrentMessage,
    Middleware,
    Pipelines,
    Retries,
    ShutdownNotifications,
    TimeLimit,
)

from dramatiq_guard import Classify, DeadLetter, JitterBackoff, install

__all__ = ["Gate", "Jobs", "Ledger", "Refused", "guarded", "stock"]

#: Short waits, so that four attempts end within seconds.
BACKOFF: dict[str, int] = {"min_backoff": 200, "max_backoff": 1_000}


class Refused(Exception):
    """What a job dies of that must not be tried again."""


class Ledger:
    """A file that every run of a job is written to before it does anything; survives whatever is killed.

    Parameters:
      path(Path): The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def write(self, what: str) -> None:
        """Add a line, in one write."""
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, f"{what}\n".encode())
        finally:
            os.close(file)

    @property
    def runs(self) -> Counter[str]:
        """How often each job has run so far."""
        return Counter(self.path.read_text().splitlines())


class Gate:
    """Holds jobs where they are told to wait, until a fault has begun: so the fault meets all of them there.

    Parameters:
      points(Iterable[str]): Where one job each is to be held, as ``point/actor``.
    """

    def __init__(self, *points: str) -> None:
        self._awaited = set(points)
        self._lock = threading.Lock()
        self.full = threading.Event()
        self.opened = threading.Event()
        if not points:
            self.full.set()
            self.opened.set()

    @property
    def awaited(self) -> set[str]:
        """The points that nobody has reached yet."""
        return set(self._awaited)

    def reach(self, point: str) -> None:
        """Wait here if this point is to be met by the fault and nobody waits here yet."""
        with self._lock:
            if point not in self._awaited:
                return
            self._awaited.discard(point)
            if not self._awaited:
                self.full.set()
        assert self.opened.wait(60), f"the gate was not opened for {point}"


class Jobs:
    """Declares the jobs on a broker.

    Parameters:
      broker(Broker): The broker.
      ledger(Ledger): Where runs are written.
      reach(Callable[[str], None]): Called by a job that is about to raise.
    """

    def __init__(self, broker: Any, ledger: Ledger, reach: Callable[[str], None] = lambda _: None) -> None:
        self.broker = broker

        def attempt() -> int:
            message = CurrentMessage.get_current_message()
            return 1 + int((message.options if message is not None else {}).get("retries", 0))

        @dramatiq.actor(broker=broker, max_retries=10, **BACKOFF)
        def flaky(key: str, attempts: int) -> None:
            ledger.write(key)
            if attempt() < attempts:
                reach("raise/flaky")
                raise RuntimeError(key)

        @dramatiq.actor(broker=broker, max_retries=10, **BACKOFF)
        async def aflaky(key: str, attempts: int) -> None:
            ledger.write(key)
            if attempt() < attempts:
                await asyncio.to_thread(reach, "raise/aflaky")
                raise RuntimeError(key)

        @dramatiq.actor(broker=broker, throws=Refused)
        def doomed(key: str) -> None:
            ledger.write(key)
            raise Refused(key)

        @dramatiq.actor(broker=broker, throws=Refused)
        async def adoomed(key: str) -> None:
            ledger.write(key)
            raise Refused(key)

        @dramatiq.actor(broker=broker)
        def plain(key: str, ms: int = 0) -> None:
            ledger.write(key)
            if ms:
                threading.Event().wait(ms / 1000)

        @dramatiq.actor(broker=broker)
        async def aplain(key: str) -> None:
            ledger.write(key)

        @dramatiq.actor(broker=broker)
        def stuck(key: str) -> None:
            again = ledger.runs[key]
            ledger.write(key)
            if not again:
                threading.Event().wait(600)

        self.flaky, self.aflaky = flaky, aflaky
        self.doomed, self.adoomed = doomed, adoomed

        @dramatiq.actor(broker=broker)
        def muster(threads: int) -> None:
            ledger.write("muster")
            while ledger.runs["muster"] < threads:
                threading.Event().wait(0.05)

        self.muster = muster
        self.plain, self.aplain = plain, aplain
        self.stuck = stuck


def _others() -> list[Middleware]:
    return [
        AgeLimit(),
        TimeLimit(interval=100),
        ShutdownNotifications(),
        Callbacks(),
        Pipelines(),
        CurrentMessage(),
        AsyncIO(),
    ]


def guarded(url: str | None, letters: Any, **options: Any) -> RedisBroker:
    """A broker with the stack on it."""
    broker = RedisBroker(url=url, middleware=[*_others(), Retries()], **options)  # type: ignore[no-untyped-call]
    install(broker, Classify(builtin=False), JitterBackoff(log="summary", **BACKOFF), DeadLetter(letters))
    return broker


def stock(url: str | None, **options: Any) -> RedisBroker:
    """The same broker without the stack."""
    return RedisBroker(url=url, middleware=[*_others(), Retries()], **options)  # type: ignore[no-untyped-call]
