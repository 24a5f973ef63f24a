"""A broker with the whole stack and the idempotency guard on it, and what could be observed of the guard's work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dramatiq
from dramatiq.asyncio import get_event_loop_thread, set_event_loop_thread
from dramatiq.middleware import AsyncIO

from dramatiq_guard import Classify, DeadLetter, IdempotencyGuard, JitterBackoff, install
from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.errors import StoreUnavailable
from dramatiq_guard.stores.idempotency import Record
from dramatiq_guard.stores.memory.idempotency import MemoryIdempotency
from tests.stack.rig import build

#: A retry or a deferral of these comes at once.
FAST: dict[str, Any] = {"min_backoff": 1, "max_backoff": 5}


class EventLoops(AsyncIO):
    """Dramatiq's event loop, for tests with two workers: Dramatiq's own forgets the thread of the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: list[Any] = []

    def before_worker_boot(self, broker: Any, worker: Any) -> None:
        super().before_worker_boot(broker, worker)  # type: ignore[no-untyped-call]
        self._threads.append(get_event_loop_thread())

    def after_worker_shutdown(self, broker: Any, worker: Any) -> None:
        set_event_loop_thread(self._threads.pop())
        super().after_worker_shutdown(broker, worker)  # type: ignore[no-untyped-call]


class Bench:
    """A rig with an idempotency guard.

    Parameters:
      kind(str): Of the broker: ``stub``, ``redis`` or ``rabbitmq``.
      url(str | None): Of its server.
      store(IdempotencyStore | None): Where keys are kept; in memory by default.
      classify(bool): Whether Classify is in the stack.
      extra(Iterable): Middlewares of the user's own.
      max_deferrals(int | None): Of JitterBackoff.
      **options: The guard's.
    """

    def __init__(
        self,
        kind: str = "stub",
        url: str | None = None,
        *,
        store: Any = None,
        classify: bool = True,
        extra: Iterable[Any] = (),
        max_deferrals: int | None = 1000,
        late: bool = False,
        **options: Any,
    ) -> None:
        self.rig, _ = build(kind, "stock", url, extra=[EventLoops(), *extra])
        self.broker = self.rig.broker
        self.store = MemoryIdempotency() if store is None else store
        self.guard = IdempotencyGuard(self.store, **options)
        backs_off = JitterBackoff(max_deferrals=max_deferrals, jitter="none")
        guards: list[Any] = [backs_off, DeadLetter(self.rig.letters), self.guard]  # type: ignore[arg-type]
        self.guards = [Classify(builtin=False), *guards] if classify else guards
        if not late:
            self.install()

    def install(self) -> None:
        """Put the stack on the broker."""
        install(self.broker, *self.guards)

    def actor(self, fn: Any = None, **options: Any) -> Any:
        """Declare an actor."""
        return self.rig.actor(fn, **options)

    def note(self, key: str, value: Any = None) -> int:
        """Write something down; the number of notes under this key so far."""
        return self.rig.note(key, value)

    def notes(self, key: str) -> list[Any]:
        """What was written down, in order."""
        return self.rig.notes(key)

    def count(self, key: str) -> int:
        """How often something was written down."""
        return self.rig.count(key)

    def work(self, threads: int = 8) -> dramatiq.Worker:
        """Start a worker."""
        return self.rig.work(threads=threads)

    def deliver(self, message: Any, times: int = 1) -> Any:
        """Put copies of a message on its queue, as a broker that delivers it again would."""
        for _ in range(times):
            self.broker.enqueue(message)
        return message

    def settle(self, timeout: float = 30.0) -> None:
        """Wait until every copy of every message has come to its end."""
        self.rig.settle(timeout)

    def run(self, message: Any, times: int = 1) -> Any:
        """Deliver a message, start a worker if there is none, and wait for the end."""
        self.deliver(message, times)
        if self.rig.worker is None:
            self.work()
        self.settle()
        return message

    def result(self, message: Any) -> Any:
        """The stored result of a message."""
        return message.get_result(backend=self.rig.results)

    def letters(self) -> list[Letter]:
        """The dead letters."""
        assert self.rig.letters is not None
        return list(self.rig.letters.page(limit=500).letters)

    def reasons(self) -> list[str]:
        """Why messages died, in alphabetical order."""
        return sorted(letter.reason for letter in self.letters())

    def records(self) -> list[Record]:
        """All that the store knows."""
        return list(self.store.page(limit=500).records)

    def record(self) -> Record:
        """The one record that the store has."""
        (record,) = self.records()
        return record

    def close(self) -> None:
        """Stop the worker."""
        self.rig.close()


class Faulty:
    """A store that can be out: for some of its methods, always or a number of times, before or after it did the work.

    Parameters:
      store(IdempotencyStore): The store behind it.
    """

    def __init__(self, store: Any = None) -> None:
        self.store = MemoryIdempotency() if store is None else store
        self.out: dict[str, float] = {}
        self.losing: dict[str, int] = {}
        self.error: type[Exception] = StoreUnavailable
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        there = getattr(self.store, name)
        if not callable(there):
            return there

        def call(*args: Any, **known: Any) -> Any:
            self.calls.append((name, args))
            for each in (name, "*"):
                if self.out.get(each, 0) > 0:
                    self.out[each] -= 1
                    raise self.error(f"{name}: the store is out")
            answer = there(*args, **known)
            if self.losing.get(name, 0) > 0:
                self.losing[name] -= 1
                raise StoreUnavailable(f"{name}: the reply was lost")
            return answer

        return call

    def asked(self, name: str) -> int:
        """How often a method was called."""
        return [called for called, _ in self.calls].count(name)


def died_of(letter: Letter) -> str:
    """The class of the error that a message died of."""
    assert letter.error is not None
    return letter.error.type


def said(letter: Letter) -> str:
    """What that error said."""
    assert letter.error is not None
    return letter.error.message


#: Out for as long as nobody heals it.
FOR_EVER = float("inf")

__all__ = ["FAST", "FOR_EVER", "Bench", "Faulty", "died_of", "said"]
