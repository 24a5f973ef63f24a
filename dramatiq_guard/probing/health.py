"""How a worker process is: whether it has started, lives, is ready for work, or is on its way out.

A look at threads and notes that others keep; it asks neither broker nor store, and never waits.  What counts as what:

1. *Started*: all worker threads run.  Not that the broker answers: who waits for it is not to be killed for it.
2. *Live*: no thread has died, the consumers go round, the event loop of asynchronous actors answers.  A broker that is
   out makes nobody dead: an orchestrator would restart a whole fleet for it, again and again.
3. *Ready*: started, live, in touch with the broker on every queue, and not draining.
4. *Draining*: told to stop.  Then nothing counts against its life any more: its own hard deadline ends it, and whoever
   killed it earlier would cut off the jobs that it was given time for.

This module must not know who asks, or how the answers travel; see `probes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dramatiq.asyncio import get_event_loop_thread

from .. import clock

if TYPE_CHECKING:
    from dramatiq.worker import Worker

__all__ = ["Condition", "Health"]

#: How long, in milliseconds, a consumer may take for one round.  An outage shows sooner: the clients' timeouts are 5 s.
POLLED_WITHIN: Final = 30_000

#: How long, in milliseconds, the event loop may keep a call waiting.
ANSWERED_WITHIN: Final = 10_000


@dataclass(frozen=True, slots=True)
class Condition:
    """What was seen at one look.

    Parameters:
      started(bool): Whether all worker threads run, or have run.
      draining(bool): Whether the process has been told to stop.
      complaints(tuple[str, ...]): What stands against its being alive; a restart would cure it.
      waits(tuple[str, ...]): What else keeps it from taking work; it passes by itself.
    """

    started: bool
    draining: bool
    complaints: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        """Whether the process is worth keeping."""
        return not self.complaints

    @property
    def ready(self) -> bool:
        """Whether it takes work."""
        return self.started and not self.draining and not self.complaints and not self.waits


class Health:
    """Looks at the threads of a worker.

    Parameters:
      worker(Worker): The worker of this process.
      polled_within(int): Milliseconds that a consumer may take for one round; three of the worker's own timeouts at
        least.
      answered_within(int): Milliseconds that the event loop may keep a call waiting.
    """

    def __init__(
        self, worker: Worker, *, polled_within: int = POLLED_WITHIN, answered_within: int = ANSWERED_WITHIN
    ) -> None:
        self.worker = worker
        self.polled_within = max(polled_within, 3 * worker.worker_timeout)
        self.loop = _LoopWatch(answered_within)
        #: Set by whoever begins the end of the process.
        self.draining = False

    def look(self) -> Condition:
        """Say how the process is now.  Meant to be called every few seconds, from one thread."""
        started = len(self.worker.workers) >= self.worker.worker_threads
        if self.draining:
            return Condition(started, draining=True, waits=("it is draining",))
        stuck, waits = self._consumers()
        loop = self.loop.complaint()
        return Condition(
            started,
            draining=False,
            complaints=(*self.dead(), *stuck, *filter(None, [loop])),
            waits=waits if started else ("its worker threads have not all started", *waits),
        )

    def dead(self) -> tuple[str, ...]:
        """The threads that have ended although nobody stopped them, by name."""
        consumers = (
            f"the consumer thread of queue {name!r} is dead"
            for name, thread in list(self.worker.consumers.items())
            if _has_died(thread)
        )
        workers = (
            f"worker thread {thread.name!r} is dead" for thread in list(self.worker.workers) if _has_died(thread)
        )
        return (*consumers, *workers)

    def _consumers(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Which consumers are stuck, and which are out of touch with the broker."""
        stuck, waits = [], []
        for name, thread in list(self.worker.consumers.items()):
            consumer: Any = thread.consumer
            if thread.paused:
                waits.append(f"queue {name!r} is paused")
            elif not getattr(consumer, "in_touch", False):
                # It connects, or waits after a connection error, for as long as the broker is out.
                waits.append(f"the broker has not answered on queue {name!r}")
            elif (silent := clock.monotonic() - consumer.polled_at) > self.polled_within and not _has_died(thread):
                stuck.append(f"the consumer of queue {name!r} has been stuck for {silent} ms")
        return tuple(stuck), tuple(waits)


class _LoopWatch:
    """Leaves a call with the event loop at each look, and sees at the next ones whether it came through."""

    def __init__(self, within: int) -> None:
        self.within = within
        self._thread: Any = None
        self._asked_at: int | None = None

    def complaint(self) -> str | None:
        """What is wrong with the event loop, if there is one."""
        thread = get_event_loop_thread()
        if thread is not self._thread:
            self._thread, self._asked_at = thread, None
        if thread is None:
            return None
        if not thread.is_alive():
            return "the event loop's thread is dead"
        if self._asked_at is None:
            self._asked_at = clock.monotonic()
            try:
                thread.loop.call_soon_threadsafe(self._answer)
            except RuntimeError:
                return "the event loop is closed"
        elif (silent := clock.monotonic() - self._asked_at) > self.within:
            return f"the event loop has not answered for {silent} ms"
        return None

    def _answer(self) -> None:
        self._asked_at = None


def _has_died(thread: Any) -> bool:
    # Who stops a thread says so in `running` first; what ends by an exception leaves it as it was.
    return bool(thread.running) and not thread.is_alive()
