"""How a worker process ends: the one owner of it, whoever asks.

The life of an end:

1. Somebody asks: a signal, a fatal error, Dramatiq's own ``Worker.stop``.  Only the first one counts; a later one may
   make the exit code worse.
2. No more is fetched.  What was prefetched or delayed goes back to its queue at once, in its order; worker threads take
   nothing up any more.  Consumers go on polling, for their heartbeats and acks.
3. What is in flight may finish until the soft deadline; then it is interrupted, and requeued without being counted.
4. As soon as nothing is in flight any more, Dramatiq's main thread ends the worker as usual, and the last hook gives
   the exit code.
5. What is still in flight at the hard deadline is requeued as it is, and the process leaves with 75.  Whatever else
   hangs by then is left behind, too; if the interpreter is held, faulthandler ends the process a little later, with 1.

==== =================================================================================
code means
==== =================================================================================
0    everything finished or was handed back
1    the interpreter itself was held, and faulthandler ended the process
70   a fatal error
75   left with jobs still running, whose messages were requeued, or with messages that could not be settled, which
     the broker delivers again: they may run twice, and are named in the log
==== =================================================================================
"""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NoReturn

from dramatiq.common import iter_queue
from dramatiq.logging import get_logger

from .. import clock, host, telemetry
from ..delivery import delivery_of
from .deadman import Deadman

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from dramatiq.broker import MessageProxy
    from dramatiq.worker import Worker

    from ..delivery import Delivery
    from ..wiring import Stack

__all__ = ["ABANDONED", "FATAL", "WorkerExit"]

FATAL: Final = 70
ABANDONED: Final = 75

#: Signals within so many milliseconds count as one: a process group gets each of them twice.
_SAME_SIGNAL: Final = 2_000

#: How long, in milliseconds, faulthandler waits beyond the hard deadline.
_HELD_BEYOND: Final = 2_000

#: How long, in milliseconds, telemetry may take at the end, and when the hard deadline is over.
_FLUSH: Final = 2_000
_LAST_FLUSH: Final = 600

#: How long, in milliseconds, those who were interrupted may take when somebody hurries; and the broker, to take back
#: what is abandoned.
_LAST_MOMENT: Final = 500


class WorkerExit:
    """The end of one worker process.

    Parameters:
      stack(Stack): The wiring of the broker.
      soft_deadline(int): Milliseconds that what is in flight may take before it is interrupted.
      hard_deadline(int): Milliseconds after which the process leaves, whatever is running.
    """

    def __init__(self, stack: Stack, soft_deadline: int = 25_000, hard_deadline: int = 28_000) -> None:
        self.logger = get_logger("dramatiq_guard", "worker_exit")
        self.stack = stack
        self.soft_deadline = soft_deadline
        self.hard_deadline = hard_deadline
        self.code = 0
        self.reason = ""
        self.began_at: int | None = None
        self.in_flight = 0
        self.handed_back = 0
        self.interrupted = 0
        #: The ids of messages that are left unacked, since nothing could be sent for them: the broker redelivers them.
        self.left_behind: list[str] = []
        self.worker: Worker | None = None
        #: Called when the end begins, with whether the master will start the process anew (HUP).
        self.heralds: list[Callable[[bool], object]] = []
        #: Called just before the process leaves, by whatever way.
        self.farewells: list[Callable[[], object]] = []
        self._owners = 0
        self._reloading = False
        self.deadman = Deadman()
        self._lock = threading.Lock()
        self._hurried_at: int | None = None
        self._finished = threading.Event()
        self._told = self._said = False
        #: What worker threads had taken when the end began, until it is handed back with the rest.
        self._taken: list[MessageProxy] | None = []
        self._taking = threading.Lock()
        self._previous: dict[int, Any] = {}

    @property
    def begun(self) -> bool:
        """Whether the end has begun."""
        return self.began_at is not None

    # -- asking for it -----------------------------------------------------------------------------------------------

    def install(self, worker: Worker) -> None:
        """Take over the signals of a worker process of the dramatiq command; elsewhere they are somebody else's."""
        self.worker = worker
        self._owners += 1
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            previous = signal.getsignal(signum)
            if host.is_command_line_handler(previous):
                host.enter_command_line_worker()
                self._previous[signum] = previous
                signal.signal(signum, self._on_signal)

    def begin(self, reason: str, code: int = 0, within: int | None = None) -> None:
        """Begin the end, or make the code of one that has begun worse.

        Parameters:
          reason(str): Why, for the log.
          code(int): The exit code.
          within(int | None): Milliseconds that are left at most, if that is less than the hard deadline.
        """
        with self._lock:
            if code and (self.code == 0 or self.code == ABANDONED):
                self.code, self.reason = code, reason
            if self.begun:
                if within is not None and self._hurried_at is None:
                    self._hurried_at = clock.monotonic()
                return
            if within is not None and within < self.hard_deadline:
                self.soft_deadline, self.hard_deadline = min(self.soft_deadline, within // 2), within
            self.reason = reason
            self.began_at = clock.monotonic()
        try:
            self.deadman.last(self.hard_deadline + _HELD_BEYOND)
            self.logger.info("The worker process ends: %s.", reason)
            for herald in self.heralds:
                herald(self._reloading)
            threading.Thread(target=self._run, name="dramatiq-guard-exit", daemon=True).start()
        except Exception:
            if not host.in_command_line_worker():
                raise
            # There is no memory for a thread, or for anything: to be gone is what counts.
            os._exit(self.code or FATAL)
        if self._previous and threading.current_thread() is not threading.main_thread():
            # Dramatiq's main thread sleeps in a loop that only its own handler ends.
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        first = self.began_at
        previous = self._previous.pop(signum, None)
        if previous is not None:
            # Once: the second call of Dramatiq's own handler is `sys.exit(1)`.
            self._previous.clear()
            previous(signum, frame)
        self._reloading = self._reloading or signum == getattr(signal, "SIGHUP", None)
        if first is None:
            # Not in the handler itself: it may have interrupted whoever holds a lock that this takes.
            name = signal.Signals(signum).name
            threading.Thread(target=self.begin, args=(f"{name} was received",), daemon=True).start()
        elif self._hurried_at is None and clock.monotonic() - first > _SAME_SIGNAL:
            self._hurried_at = clock.monotonic()

    # -- the course of it --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._end()
        except BaseException:
            self.logger.critical("The end of the worker process failed; it leaves at once.", exc_info=True)
            os._exit(self.code or FATAL)

    def _end(self) -> None:
        started = clock.monotonic() if self.began_at is None else self.began_at
        self.deadman.last(self.hard_deadline + _HELD_BEYOND)
        self.in_flight = len(self.stack.in_flight)
        self.stack.interrupts.announce(started + self.soft_deadline)
        # Aside, like all that asks a broker: one that does not answer must not hold up the deadlines.
        _aside(self._stop_fetching)
        if self._wait(started + self.soft_deadline):
            return
        self.interrupted = self.stack.interrupts.interrupt_all()
        if self._wait(started + self.hard_deadline, _LAST_MOMENT):
            return
        self._leave()

    def _stop_fetching(self) -> None:
        self.stack.shut_down()
        worker: Any = self.worker
        if worker is None:
            return
        for thread in worker.workers:
            thread.stop()
        deadline = clock.monotonic() + min(5_000, self.soft_deadline)
        consumers = [each.consumer for each in worker.consumers.values() if each.consumer is not None]
        while clock.monotonic() < deadline and not all(getattr(each, "drained", True) for each in consumers):
            clock.wait(self._finished, 20)
        self._hand_back()

    def _hand_back(self) -> None:
        """Return what was prefetched and delayed, in its order."""
        worker: Any = self.worker
        waiting: dict[str, list[Any]] = defaultdict(list)
        with self._taking:
            for message in self._taken or ():
                waiting[message.queue_name].append(message)
            self._taken = None
        for item in iter_queue(worker.work_queue):
            waiting[item.message.queue_name].append(item.message)
            worker.work_queue.task_done()
        for queue_name, thread in worker.consumers.items():
            if thread.consumer is None:
                continue
            messages = waiting[queue_name]
            for item in iter_queue(thread.delay_queue):
                messages.append(item.message)
                thread.delay_queue.task_done()
            self._return(thread.consumer, messages)

    def take_back(self, message: MessageProxy) -> None:
        """Return a message that a worker thread had taken, but not begun, when the end began.

        Parameters:
          message(MessageProxy): The message.
        """
        with self._taking:
            if self._taken is not None:
                # It came before all that still waits, and goes back with it.
                self._taken.append(message)
                return
        self._return(delivery_of(message).consumer, [message])

    def _requeue(self, running: list[Delivery]) -> None:
        for delivery in running:
            self._return(delivery.consumer, [delivery.message])

    def _return(self, consumer: Any, messages: list[Any]) -> None:
        try:
            self.handed_back += consumer.hand_back(messages)
        except Exception as error:  # noqa: BLE001 - they stay unacked, and the broker delivers them again
            if not messages:
                return
            self.left_behind += [message.message_id for message in messages]
            self.logger.warning(
                "%d messages of queue %r could not be handed back; the broker delivers them again: %s",
                len(messages),
                consumer.queue_name,
                error,
            )

    def _wait(self, deadline: int, moment: int = 0) -> bool:
        """Wait for Dramatiq's main thread, which ends the worker when nothing is in flight any more.

        Parameters:
          deadline(int): Until when.
          moment(int): For how many milliseconds all the same, when somebody hurries.

        Returns:
          bool: Whether it has ended.
        """
        while True:
            if self._hurried_at is not None:
                deadline = min(deadline, self._hurried_at + moment)
            left = deadline - clock.monotonic()
            if left <= 0:
                return self._finished.is_set()
            if clock.wait(self._finished, min(50, left)):
                return True

    def _leave(self) -> None:
        """Leave at the hard deadline, whatever still runs or hangs; requeue what is in flight."""
        running = list(self.stack.in_flight.values())
        if not host.in_command_line_worker():
            if running:
                self.logger.error("%d messages are still running at the hard deadline.", len(running))
            return
        ids = [delivery.message_id for delivery in running]
        if ids or self.left_behind or host.event_loop_is_blocked():
            # A coroutine that blocks the loop goes on like a thread, even if its message has been requeued already.
            self.code = self.code or ABANDONED
        flushed = self._tell(ids, _LAST_FLUSH)
        # Last of all, since another process may take them up at once.
        _aside(lambda: self._requeue(running), _LAST_MOMENT)
        _aside(self._bid_farewell, _LAST_MOMENT)
        self._say(ids, flushed)
        os._exit(self.code)

    # -- the last hook -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Give the exit code; called by each middleware that has installed it, the last of which counts.

        Raises:
          SystemExit: With the code, where it is not 0.
        """
        self._owners -= 1
        if self._owners > 0:
            # `SystemExit` would cut off the hooks of the middlewares outside.
            return
        if not host.in_command_line_worker():
            self._finished.set()
            self.deadman.disarm()
            self._bid_farewell()
            return
        # Whatever hangs on the way out from here, the hard deadline and the deadman are the end of that, too.
        _aside(self._bid_farewell, _FLUSH)
        if self.left_behind:
            self.code = self.code or ABANDONED
        self._say([], self._tell([], _FLUSH))
        if self.code:
            raise SystemExit(self.code)

    def leave_boot(self) -> NoReturn:
        """Leave before the worker has started; nothing has been taken up.

        Raises:
          SystemExit: Always.
        """
        # No daemon: it would keep the process from ending.
        host.stop_event_loop()
        self._owners = 1
        self.finish()
        raise SystemExit(self.code)

    def _bid_farewell(self) -> None:
        while self.farewells:
            farewell = self.farewells.pop()
            try:
                farewell()
            except Exception:
                self.logger.warning("Something could not be put in order at the end.", exc_info=True)

    def _counts(self, abandoned: list[str]) -> dict[str, int]:
        interrupted = max(0, self.interrupted - len(abandoned))
        return {
            "in_flight": self.in_flight,
            "finished": max(0, self.in_flight - interrupted - len(abandoned)),
            "interrupted": interrupted,
            "handed_back": self.handed_back,
        }

    def _tell(self, abandoned: list[str], timeout: int) -> bool:
        """Say in one span and one figure how the process has ended, and hand the telemetry over."""
        if self._told:
            return True
        self._told = True
        took = clock.monotonic() - (self.began_at or 0)
        telemetry.ended(
            reason=self.reason,
            code=self.code,
            took_ms=took,
            abandoned=len({*abandoned, *self.left_behind}),
            **self._counts(abandoned),
        )
        return telemetry.flush(timeout)

    def _say(self, abandoned: list[str], flushed: bool) -> None:
        """Say it in one line of the log, too."""
        if self._said:
            return
        self._said = True
        self.logger.info(
            "The worker process leaves: reason=%r code=%d in_flight=%d finished=%d interrupted=%d handed_back=%d "
            "abandoned=%r flushed=%s took=%d ms.",
            self.reason,
            self.code,
            *self._counts(abandoned).values(),
            [*dict.fromkeys([*abandoned, *self.left_behind])],
            flushed,
            clock.monotonic() - (self.began_at or 0),
        )


def _aside(call: Callable[[], object], patience: int = 0) -> None:
    """Do something on a thread of its own, and wait for it for so many milliseconds."""
    thread = threading.Thread(target=call, name="dramatiq-guard-exit-aside", daemon=True)
    thread.start()
    if patience:
        thread.join(patience / 1000)
