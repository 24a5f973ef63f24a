"""Looking, once a second, whether a worker process is still fit to go on.

Worker threads die silently (H4), an event loop that is gone takes every async actor with it, a process whose master was
killed works on unseen.  Each of these is told to whoever ends the process; nothing here ends it.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, Final

from dramatiq.logging import get_logger

from .. import clock, host, telemetry
from ..async_actors import event_loop_is_gone
from . import processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq.worker import Worker

    from ..interrupts import Run
    from ..wiring import Stack

__all__ = ["Watchdog"]

_EVERY: Final = 1_000


class Watchdog:
    """Watches one worker process.

    Parameters:
      stack(Stack): The wiring of the broker.
      worker(Worker): The worker.
      fatal(Callable[[str], None]): Told, once, why the process must end.
      orphaned(Callable[[], None]): Told, once, that nobody would restart or stop the process any more.
      stuck_after(int | None): Milliseconds past its time limit after which a job counts as stuck; ``None`` for never.
      stuck_is_fatal(bool): Whether a stuck job ends the process, or is only logged with its stack.
      max_memory(int | None): Resident bytes above which the process drains and ends.
      held_after(int | None): Milliseconds for which something may hold the interpreter's lock before the process is
        ended from outside of it; ``None`` for ever.
    """

    def __init__(
        self,
        stack: Stack,
        worker: Worker,
        fatal: Callable[[str], None],
        orphaned: Callable[[], None],
        *,
        stuck_after: int | None,
        stuck_is_fatal: bool,
        max_memory: int | None,
        held_after: int | None,
    ) -> None:
        self.logger = get_logger("dramatiq_guard", "watchdog")
        self.stack = stack
        self.worker = worker
        self.fatal = fatal
        self.orphaned = orphaned
        self.stuck_after = stuck_after
        self.stuck_is_fatal = stuck_is_fatal
        self.max_memory = max_memory
        # Under gevent this watchdog waits its turn like any greenlet: that it is late says nothing.
        self.held_after = None if host.is_gevent_active() else held_after
        self._parent = os.getppid()
        self._stuck: set[Run] = set()
        self._closed = threading.Event()

    def start(self) -> None:
        """Start watching, after the fork."""
        self._keep_deadman_off()
        threading.Thread(target=self._run, name="dramatiq-guard-watchdog", daemon=True).start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def look(self) -> str | None:
        """What is wrong with the process, if anything that it must end for."""
        if self.stack.draining:
            # Threads end now, and are meant to.
            return None
        worker: Any = self.worker
        for thread in [*worker.workers, *worker.consumers.values()]:
            if thread.ident is not None and not thread.is_alive():
                return f"the thread {thread.name} ({type(thread).__name__}) has died"
        if event_loop_is_gone():
            return "the event loop of async actors has died"
        if self.max_memory is not None and (used := processes.resident_bytes()) > self.max_memory:
            return f"it uses {used} bytes of memory, more than max_memory={self.max_memory}"
        return self._look_for_stuck_jobs()

    def _look_for_stuck_jobs(self) -> str | None:
        if self.stuck_after is None:
            return None
        overdue = self.stack.interrupts.overdue(self.stuck_after)
        known, self._stuck = self._stuck, {run for _, run in overdue}
        reason = None
        for thread_id, run in overdue:
            if run in known:
                continue
            frame = sys._current_frames().get(thread_id)
            stack = "".join(traceback.format_stack(frame)[-20:]) if frame is not None else "(its thread is gone)\n"
            message_id = "?"
            for delivery in list(self.stack.in_flight.values()):
                if delivery.interrupts is run:
                    message_id = delivery.message_id
                    telemetry.job_stuck(actor=delivery.message.actor_name, queue=delivery.message.queue_name)
            self.logger.error(
                "The job of message %r runs %d ms past its time limit and cannot be interrupted. It is at:\n%s",
                message_id,
                self.stuck_after,
                stack,
            )
            if self.stuck_is_fatal:
                reason = "a job is stuck past its time limit"
        return reason

    def _keep_deadman_off(self) -> None:
        if self.held_after is not None:
            self.stack.exit.deadman.keep_off(self.held_after)

    def _run(self) -> None:
        while not clock.wait(self._closed, _EVERY):
            if os.getppid() != self._parent:
                self.orphaned()
                return
            self._keep_deadman_off()
            try:
                reason = self.look()
            except Exception:
                self.logger.exception("The watchdog could not look; it goes on.")
                continue
            if reason is not None:
                self.fatal(reason)
                return
