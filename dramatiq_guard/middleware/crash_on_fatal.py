"""CrashOnFatal: when in doubt, end the process with a non-zero code, and let the orchestrator start a clean one.

The life of a fatal error in it:

1. An actor meets it (MemoryError, SystemExit, `Fatal`, a class that the user names), or a thread, the event loop, the
   watchdog does.
2. The message that met it is settled like any other: its retry waits in its queue.
3. The process fetches no more, hands back what it holds, lets the others finish, and leaves with 70
   (`dramatiq_guard.exits.worker_exit`).

And of a message that kills its process outright, see `dramatiq_guard.exits.quarantine`: at the limit it becomes the
dead letter ``poison`` without being run, with the history of its crashes.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from dramatiq.asyncio import get_event_loop_thread
from dramatiq.logging import get_logger
from dramatiq.middleware import MiddlewareError, Shutdown

from .. import host, telemetry
from ..dead_letters.letter import Attempt
from ..delivery import carrier_of, delivery_of
from ..errors import Defer, Quarantined, SetupError
from ..exits.boot_brake import BootBrake
from ..exits.boot_wait import wait_for_servers
from ..exits.quarantine import Quarantine, Suspicion
from ..exits.watchdog import Watchdog
from ..exits.worker_exit import FATAL
from ..history import extended
from ..policy.duration import milliseconds
from ..wiring import stack_of
from .base import GuardMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from dramatiq import Broker
    from dramatiq.broker import MessageProxy
    from dramatiq.worker import Worker

    from ..delivery import Delivery

__all__ = ["CrashOnFatal"]

_HOUR: Final = 60 * 60 * 1000

_ORPHANED: Final = "its parent process is gone"

#: Milliseconds that an orphan has: whoever killed its master means it to be gone, and may have started another one.
_ORPHANS_LEAVE_WITHIN: Final = 2_500


class CrashOnFatal(GuardMiddleware):
    """Ends the process on fatal errors, and quarantines messages that kill it.

    Parameters:
      deliveries(DeliveryStore): Where crashes are remembered, e.g. ``connect("redis://…").deliveries``; without one,
        messages are not quarantined.
      max_crashes(int): At how many crashes a message is not run any more.
      window(int | timedelta): Milliseconds for which a crash is held against a message.  Defaults to 72 hours.
      heartbeat(int | timedelta): Milliseconds between two signs of life; after three without one a process is dead.
      thread_errors(bool): Whether an exception that ends a thread which an actor started is fatal.
      unraisable_errors(bool): Whether an exception in a destructor is.
      loop_errors(bool): Whether an exception that an asyncio task left unhandled is.
      stuck_after(int | timedelta | None): Milliseconds past its time limit after which a job counts as stuck, and its
        stack is logged.
      stuck_is_fatal(bool): Whether a stuck job ends the process.
      max_memory(int | None): Resident bytes above which the process drains and ends.
      held_after(int | timedelta | None): Milliseconds for which something may hold the interpreter's lock (a regular
        expression that backtracks, an extension in C) before faulthandler ends the process with 1: nothing else can,
        nor could the process be told to stop.  A process that is frozen for longer ends when it is thawed.

    Raises:
      SetupError: When an argument is of the wrong type or out of range; names it.

    Example:
      >>> CrashOnFatal(stores.deliveries, max_crashes=3)
    """

    place: ClassVar[int] = 1

    def __init__(
        self,
        deliveries: Any = None,
        *,
        max_crashes: int = 3,
        window: int | timedelta = 72 * _HOUR,
        heartbeat: int | timedelta = 5_000,
        thread_errors: bool = True,
        unraisable_errors: bool = False,
        loop_errors: bool = True,
        stuck_after: int | timedelta | None = 60_000,
        stuck_is_fatal: bool = False,
        max_memory: int | None = None,
        held_after: int | timedelta | None = 25_000,
    ) -> None:
        self.logger = get_logger(__name__, type(self))
        if deliveries is not None and not hasattr(deliveries, "crashes"):
            raise SetupError(
                "CrashOnFatal: the store must keep deliveries, e.g. connect('redis://…').deliveries, "
                f"not {deliveries!r}"
            )
        for name, value, least in (("max_crashes", max_crashes, 1), ("max_memory", max_memory, 1)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise SetupError(f"CrashOnFatal: {name} must be an integer from {least}, not {value!r}")
        try:
            self.window = milliseconds(window, "window")
            self.heartbeat = milliseconds(heartbeat, "heartbeat")
            self.stuck_after = None if stuck_after is None else milliseconds(stuck_after, "stuck_after")
            self.held_after = None if held_after is None else milliseconds(held_after, "held_after")
        except (TypeError, ValueError) as error:
            raise SetupError(f"CrashOnFatal: {error}") from error
        if self.heartbeat < 1:
            raise SetupError("CrashOnFatal: heartbeat must be at least 1 ms")
        self.deliveries = deliveries
        self.max_crashes = max_crashes
        self.thread_errors = thread_errors
        self.unraisable_errors = unraisable_errors
        self.loop_errors = loop_errors
        self.stuck_is_fatal = stuck_is_fatal
        self.max_memory = max_memory
        self._quarantine: Quarantine | None = None
        self._watchdog: Watchdog | None = None
        self._fatal: Callable[[str], None] = lambda _: None

    # -- the worker --------------------------------------------------------------------------------------------------

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        super().before_worker_boot(broker, worker)
        try:
            self._boot(broker, worker)
        except MiddlewareError:
            raise
        except Exception as error:
            # Dramatiq would go on without (H11), and nobody would know.
            raise SetupError(
                f"CrashOnFatal could not start, and the worker does not start without: {error!r}"
            ) from error

    def _boot(self, broker: Broker, worker: Worker) -> None:
        stack = stack_of(broker)
        stack.exit.install(worker)
        brake = BootBrake() if host.in_command_line_worker() else None

        def fatal(reason: str) -> None:
            try:
                telemetry.crashed(reason=reason, code=FATAL)
                if brake is not None:
                    brake.crashed()
            finally:
                # Whatever else has no memory left.
                stack.exit.begin(reason, FATAL)

        def orphaned() -> None:
            # Not the fault of anything here, and not to be held against the next boot.
            telemetry.crashed(reason=_ORPHANED, code=FATAL)
            stack.exit.begin(_ORPHANED, FATAL, within=_ORPHANS_LEAVE_WITHIN)

        self._fatal = fatal
        self._watchdog = Watchdog(
            stack,
            worker,
            fatal,
            orphaned,
            stuck_after=self.stuck_after,
            stuck_is_fatal=self.stuck_is_fatal,
            max_memory=self.max_memory,
            held_after=self.held_after,
        )
        self._watchdog.start()
        if brake is not None:
            # Elsewhere whoever starts a worker decides for how long to wait, and is not to be held up.
            brake.wait(lambda: stack.exit.begun)
            if not wait_for_servers(broker, lambda: stack.exit.begun):
                stack.exit.leave_boot()
            brake.booted()
        if self.deliveries is not None:
            self._start_quarantine(broker)
        self._hook_errors()

    def _start_quarantine(self, broker: Broker) -> None:
        stack = stack_of(broker)
        heartbeat = self.heartbeat
        if (timeout := getattr(broker, "heartbeat_timeout", None)) is not None:
            # Redis returns what a dead worker held after this time: by then everybody must know what it died of.
            heartbeat = max(1, min(heartbeat, timeout // 8))
        self._quarantine = quarantine = Quarantine(
            self.deliveries.crashes, self.max_crashes, self.window, heartbeat, lambda: stack.draining
        )
        quarantine.start()
        # However the process leaves from then on, it does so knowingly: what it had begun is no crash.
        stack.exit.heralds.append(lambda _: quarantine.leave_soon())
        stack.exit.farewells.append(quarantine.leave)

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """The event loop of async actors is there now: errors that its tasks leave unhandled are seen here."""
        loop = get_event_loop_thread()
        if loop is None or not self.loop_errors:
            return

        def unhandled(loop: Any, context: dict[str, Any]) -> None:
            loop.default_exception_handler(context)
            if context.get("exception") is not None:
                self._fatal(f"an asyncio task left {type(context['exception']).__name__} unhandled")

        loop.loop.call_soon_threadsafe(loop.loop.set_exception_handler, unhandled)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        stack_of(broker).exit.begin("the worker was stopped")
        super().before_worker_shutdown(broker, worker)

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        super().after_worker_shutdown(broker, worker)
        if self._watchdog is not None:
            self._watchdog.close()
        self._unhook_errors()
        stack_of(broker).exit.finish()

    # -- errors that no message meets --------------------------------------------------------------------------------

    def _hook_errors(self) -> None:
        self._thread_hook, self._unraisable_hook = threading.excepthook, sys.unraisablehook

        def thread_error(args: threading.ExceptHookArgs) -> None:
            self._thread_hook(args)
            if args.exc_type is not SystemExit:
                self._fatal(f"the thread {getattr(args.thread, 'name', '?')} died of {args.exc_type.__name__}")

        def unraisable_error(args: Any) -> None:
            self._unraisable_hook(args)
            self._fatal(f"{args.exc_type.__name__} was raised where nobody can catch it")

        if self.thread_errors:
            threading.excepthook = thread_error
        if self.unraisable_errors:
            sys.unraisablehook = unraisable_error

    def _unhook_errors(self) -> None:
        if self.thread_errors:
            threading.excepthook = self._thread_hook
        if self.unraisable_errors:
            sys.unraisablehook = self._unraisable_hook

    # -- a message ---------------------------------------------------------------------------------------------------

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Let a message that has killed too many processes not run: the one thing that leaves from a before hook."""
        super().before_process_message(broker, message)
        if self._quarantine is None:
            return
        delivery = delivery_of(message)
        # Only RabbitMQ's messages have it, and to ask the others for it raises and catches an error.
        redelivered = bool(message.__dict__.get("redelivered", False))
        suspicion = self._quarantine.suspicion(message.message_id, redelivered=redelivered)
        delivery.suspicion = suspicion
        if suspicion is None or len(suspicion.crashes) < self.max_crashes:
            return
        self.logger.error(
            "Message %r of actor %r is quarantined: %d processes died at it.",
            message.message_id,
            message.actor_name,
            len(suspicion.crashes),
        )
        telemetry.quarantined(actor=message.actor_name, queue=message.queue_name)
        delivery.carrier = _with_crashes(delivery, suspicion)
        delivery.suspicion = replace(suspicion, over=True)
        message.fail()
        raise Quarantined(
            f"{len(suspicion.crashes)} worker processes died while they were processing this message: "
            + ", ".join(f"pid {crash.pid} on {crash.host}" for crash in suspicion.crashes)
        )

    def around(self, delivery: Delivery, proceed: Callable[[], Any]) -> Any:
        """Watch the function: mark its start, run a suspect alone."""
        quarantine = self._quarantine
        if quarantine is None:
            return proceed()
        suspicion = delivery.suspicion
        if suspicion is not None and suspicion.wait:
            raise Defer("a process that had begun this message may still be alive", delay=suspicion.wait)
        with quarantine.watched(delivery, suspicion) as admitted:
            if not admitted:
                raise Defer("this process ends, and another one shall run the message", delay=0)
            try:
                result = proceed()
            except (Defer, Shutdown):
                raise  # it may not have come to the point that kills
            except BaseException:
                self._acquit(delivery)
                raise
            self._acquit(delivery)
            return result

    def _acquit(self, delivery: Delivery) -> None:
        """The process has outlived the function."""
        if delivery.suspicion is not None:
            delivery.suspicion = replace(delivery.suspicion, over=True)

    def after_ack(self, broker: Broker, message: MessageProxy) -> None:
        self._after_settlement(message)

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        self._after_settlement(message)

    def _after_settlement(self, message: MessageProxy) -> None:
        delivery = delivery_of(message)
        if not delivery.began:
            return
        if self._quarantine is not None:
            # Again, since another middleware's interrupt may have torn the end of its watch (H4).
            self._quarantine.isolation.leave(delivery)
            if delivery.suspicion is not None and delivery.suspicion.over:
                self._quarantine.forgive(message.message_id)
        decision = delivery.decision
        if decision is not None and decision.exit_process:
            self._fatal(
                f"message {message.message_id} of actor {message.actor_name!r} met a fatal error: {decision.why}"
            )


def _with_crashes(delivery: Delivery, suspicion: Suspicion) -> dict[str, Any]:
    """The history of the message with the crashes in it."""
    carrier = carrier_of(delivery.options)
    for crash in suspicion.crashes:
        carrier = extended(
            carrier,
            Attempt(
                at=crash.at,
                type="process died",
                message="the worker process died while it was processing this message",
                verdict="fatal",
                rule="crash",
                why="its liveness lapsed and it had not left knowingly",
                host=crash.host,
                pid=crash.pid,
            ),
        )
    return carrier
