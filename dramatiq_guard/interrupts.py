"""What may interrupt an actor while it runs, and never anything else: its time limit, and the shutdown of its worker.

Dramatiq raises both asynchronously in the worker's thread, from before the first hook until the last one, so they can
tear a hook in two (H4).  Here a run is armed just before the user's function and disarmed just after it, under the
same lock that raises; an interrupt that was raised but has not arrived is taken back (H5).
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from dramatiq.logging import get_logger
from dramatiq.middleware import Shutdown, TimeLimitExceeded
from dramatiq.middleware.threading import Interrupt

from . import clock, host
from .errors import LeaseLost

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Interrupts", "Run", "call_interruptibly"]


class Run:
    """One run of a user's function, as far as interrupts are concerned.

    Parameters:
      interrupts(Interrupts): Who may interrupt it.
      time_limit(float | None): How many milliseconds it may take; ``None`` or infinity for as long as it likes.
      notify(bool): Whether it wants to be interrupted by a shutdown (Dramatiq's ``notify_shutdown``).
    """

    __slots__ = (
        "deadline",
        "interrupts",
        "leased_until",
        "limit_at",
        "notify",
        "pending",
        "raised",
        "shields",
        "thread_id",
        "time_limit",
    )

    def __init__(self, interrupts: Interrupts, time_limit: float | None, notify: bool) -> None:
        self.interrupts = interrupts
        self.time_limit = None if time_limit is None or time_limit == float("inf") else int(time_limit)
        self.notify = notify
        self.thread_id = 0
        #: When the time limit is over; and the same, until it has been raised.
        self.limit_at: int | None = None
        self.deadline: int | None = None
        #: Until when nobody else may do this work; written by whoever renews the lease.
        self.leased_until: int | None = None
        self.raised = False
        #: How deep it is in what must not be torn, and what is to be raised once it is out of that.
        self.shields = 0
        self.pending: type[Interrupt] | None = None

    @property
    def shutting_down(self) -> bool:
        """Whether the worker has been told to stop."""
        return self.interrupts.shutting_down

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Let nothing interrupt what the user's function has us do in the middle of it: a word with a store, a commit.

        What was to be raised meanwhile is raised at the end.  In other threads than the run's nothing is raised anyway.
        """
        if threading.get_ident() != self.thread_id:
            yield
            return
        self.interrupts.shield(self)
        try:
            yield
        finally:
            self.interrupts.unshield(self)

    def time_left(self) -> int | None:
        """Milliseconds until the time limit, or until a shutdown interrupts it; ``None`` with neither."""
        ends = [end for end in (self.limit_at, self.interrupts.interrupting_at) if end is not None]
        return max(0, min(ends) - clock.monotonic()) if ends else None


class _Timer(Protocol):
    def add_timeout(self, thread_id: int, ttl: float) -> None: ...
    def remove_timeout(self, thread_id: int) -> None: ...


class Interrupts:
    """Interrupts the armed runs of one worker process.

    Parameters:
      interval(int): How often, in milliseconds, to look for runs past their time limit.
      gevent_timer(object | None): Under gevent, the timeout registry of Dramatiq's own TimeLimit.
      gevent_notifier(object | None): Under gevent, the notification registry of its ShutdownNotifications.
    """

    def __init__(
        self, *, interval: int = 1000, gevent_timer: _Timer | None = None, gevent_notifier: Any = None
    ) -> None:
        self.logger = get_logger("dramatiq_guard", "interrupts")
        self.interval = interval
        self.shutting_down = False
        #: When a shutdown interrupts what still runs, and whether it has.
        self.interrupting_at: int | None = None
        self.interrupting = False
        self._gevent_timer = gevent_timer
        self._gevent_notifier = gevent_notifier
        self._lock = threading.Lock()
        self._runs: dict[int, Run] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start looking for runs past their time limit; called when the worker boots, after the fork."""
        if self._gevent_timer is None and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="dramatiq-guard-time-limits", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def announce(self, deadline: int) -> None:
        """Let those who ask know that a shutdown has begun, and when it will interrupt them."""
        self.interrupting_at = deadline
        self.shutting_down = True

    def shutdown(self) -> None:
        """Interrupt every armed run that asked to be told of a shutdown, and remember that one has begun."""
        self.shutting_down = True
        if self._gevent_notifier is not None:
            self._gevent_notifier.shutdown()
            return
        with self._lock:
            for run in self._runs.values():
                if run.notify and not run.raised:
                    self.logger.info(
                        "Worker shutdown notification. Raising exception in worker thread %r.", run.thread_id
                    )
                    self._raise(run, Shutdown)

    def interrupt_all(self) -> int:
        """Interrupt every armed run, whether it asked to be told or not: its time is up.

        Returns:
          int: How many were interrupted.
        """
        self.shutting_down = True
        with self._lock:
            self.interrupting = True
            running = list(self._runs.values())
            for run in running:
                self.logger.warning("Shutdown: raising an exception in worker thread %r.", run.thread_id)
                self._raise(run, Shutdown)
        return len(running)

    def interrupt(self, run: Run, kind: type[Interrupt]) -> bool:
        """Interrupt one run, if it is armed.

        Parameters:
          run(Run): The run.
          kind(type[Interrupt]): What is raised in it.

        Returns:
          bool: Whether it was; not under gevent, where only Dramatiq's own two interrupts work.
        """
        with self._lock:
            if self._runs.get(run.thread_id) is not run:
                return False
            self._raise(run, kind)
        return True

    def shield(self, run: Run) -> None:
        """Raise nothing in a run for a while; what was raised before arrives here."""
        shielded = False
        try:
            with self._lock:
                run.shields += 1
                shielded = True
            for _ in range(100):  # backward jumps, at which a thread looks for what was raised in it
                pass
        except BaseException:
            if shielded:
                run.shields -= 1
            raise

    def unshield(self, run: Run) -> None:
        """Let a run be interrupted again, and interrupt it if that was to be done meanwhile."""
        kind = None
        with self._lock:
            run.shields = max(0, run.shields - 1)
            if not run.shields:
                kind, run.pending = run.pending, None
        if kind is not None:
            raise kind

    def overdue(self, milliseconds: int) -> list[tuple[int, Run]]:
        """The runs, with their threads, that go on so long after their time limit was over."""
        latest = clock.monotonic() - milliseconds
        with self._lock:
            return [
                (run.thread_id, run)
                for run in self._runs.values()
                if run.limit_at is not None and run.limit_at < latest
            ]

    def arm(self, run: Run) -> None:
        """Let a run be interrupted from now on."""
        run.thread_id = threading.get_ident()
        if run.time_limit is not None:
            run.deadline = run.limit_at = clock.monotonic() + run.time_limit
        if self._gevent_timer is not None:
            self._gevent_timer.add_timeout(run.thread_id, float("inf") if run.time_limit is None else run.time_limit)
            if run.notify and self._gevent_notifier is not None:
                self._gevent_notifier.add_notification()
            return
        with self._lock:
            self._runs[run.thread_id] = run
            if self.interrupting or (self.shutting_down and run.notify):
                # A shutdown that began just before it: its thread had taken the message up already.
                self._raise(run, Shutdown)

    def disarm(self, run: Run) -> None:
        """Let a run not be interrupted any more, and take back what was raised but has not arrived."""
        if self._gevent_timer is not None:
            self._gevent_timer.remove_timeout(run.thread_id)
            if run.notify and self._gevent_notifier is not None:
                self._gevent_notifier.remove_notification()
            return
        with self._lock:
            self._runs.pop(run.thread_id, None)
            run.shields, run.pending = 0, None
            if run.raised:
                run.raised = False
                host.clear_interrupt()

    def _raise(self, run: Run, kind: type[Interrupt]) -> None:
        """Raise in the run's thread; the caller holds the lock."""
        run.raised = True
        if run.shields:
            run.pending = kind
            return
        host.raise_thread_exception(run.thread_id, kind)

    def _watch(self) -> None:
        while not clock.wait(self._closed, self.interval):
            now = clock.monotonic()
            with self._lock:
                for run in self._runs.values():
                    if run.deadline is not None and now >= run.deadline:
                        self.logger.warning(
                            "Time limit exceeded. Raising exception in worker thread %r.", run.thread_id
                        )
                        run.deadline = None
                        self._raise(run, TimeLimitExceeded)
                    if run.leased_until is not None and now + self.interval >= run.leased_until:
                        # Not a moment later: then another may have the key, and both would work.
                        self.logger.warning(
                            "The lease could not be renewed. Raising exception in worker thread %r.", run.thread_id
                        )
                        run.leased_until = None
                        self._raise(run, LeaseLost)


def gevent_notifier() -> Any:
    """Dramatiq's own notification registry for gevent."""
    from dramatiq.middleware import shutdown

    return shutdown._GeventShutdownManager(get_logger("dramatiq_guard", "interrupts"))


def call_interruptibly(run: Run, function: Any, args: Any, kwargs: Any) -> Any:
    """Call the user's function with its interrupts armed, and nothing else.

    An interrupt that arrives after the function has returned is swallowed: the work is done.  CPython looks for
    pending interrupts when a function is entered, on backward jumps and after calls into C, so between the return of a
    Python function and the next line there is no such point.
    """
    returned = False
    value = None
    try:
        try:
            run.interrupts.arm(run)
            value = function(*args, **kwargs)
            returned = True
        finally:
            run.interrupts.disarm(run)
    except Interrupt:
        _disarm_surely(run)
        if not returned:
            raise
    return value


def _disarm_surely(run: Run) -> None:
    # An interrupt may land in the disarming itself; each kind is raised once, so this ends.
    while True:
        try:
            run.interrupts.disarm(run)
        except Interrupt:
            continue
        return
