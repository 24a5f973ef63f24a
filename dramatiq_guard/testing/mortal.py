"""Worker processes that die at a named point, all within one thread of a test, and with time that is skipped.

A course is the life of one message: it is delivered, its process may die, its lease runs out, it is delivered again.
Each delivery has a process of its own: a private broker with the stack of the user's, whose actor is the user's own,
and whose idempotency store is another.  What runs is the stack itself, the seam, the guard and the settle barrier.

A process dies by an exception that comes from the point at which it was to be killed.  It cannot keep ``finally`` and
``except BaseException`` from running; but nothing that they do reaches the store, the queue, or a further step.

This module must not know what is asserted.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
from collections import Counter
from concurrent import futures
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from dramatiq import Message
from dramatiq.asyncio import EventLoopThread, get_event_loop_thread, set_event_loop_thread
from dramatiq.broker import Consumer, MessageProxy
from dramatiq.brokers.stub import StubBroker
from dramatiq.logging import get_logger
from dramatiq.middleware import CurrentMessage, Middleware, SkipMessage
from dramatiq.middleware.threading import Interrupt

from .. import clock
from ..delivery import let_go, stamp
from ..middleware.base import GuardMiddleware
from ..middleware.classify import Classify
from ..middleware.idempotency_guard import IdempotencyGuard
from ..middleware.jitter_backoff import JitterBackoff
from ..settle.killpoints import reaching
from ..wiring import stack_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dramatiq import Actor

    from ..clock import Clock
    from ..delivery import Delivery
    from ..idempotency.claimed import Claimed
    from ..idempotency.plan import Plan
    from ..policy.decision import Decision
    from ..seam import Decider

__all__ = ["Course", "Ended", "Point", "simulated"]

#: After these nothing is delivered again: whoever dies there has done all.
_OVER: Final = frozenset({"after-ack", "after-nack"})


class Killed(BaseException):
    """The process is dead."""


#: What a death looks like from outside an actor: an async one is cancelled.
_DEATHS: Final = (Killed, asyncio.CancelledError, futures.CancelledError)


@dataclass(frozen=True, slots=True)
class Point:
    """Where a process may die.

    Parameters:
      name(str): The kill point.
      step(str | None): The step in which it lies.
      time(int): Which time it is reached, from 1.
    """

    name: str
    step: str | None = None
    time: int = 1


@dataclass(slots=True)
class Ended:
    """How one delivery ended.

    Parameters:
      ran(bool): Whether the actor was run.
      returned(bool): Whether there is a result.
      result(Any): The result.
      error(BaseException | None): What it failed with.
      dead(bool): Whether it became a dead letter.
      killed(bool): Whether its process died.
    """

    ran: bool = False
    returned: bool = False
    result: Any = None
    error: BaseException | None = None
    dead: bool = False
    killed: bool = False


@dataclass(slots=True)
class Course:
    """The life of one message, over all its deliveries.

    Parameters:
      actor(Actor): The user's actor.
      plan(Plan): How it is guarded.
      store(Any): Where keys are kept.
      real(bool): Whether the store is a real one, whose clock cannot be skipped.
      message(Message): The message.
      kill_at(Point | None): Where the first process to come there dies.
    """

    actor: Actor[Any, Any]
    plan: Plan
    store: Any
    real: bool
    message: Message[Any]
    kill_at: Point | None = None
    ended: list[Ended] = field(default_factory=list)
    #: The points that were reached, in order.
    reached: list[Point] = field(default_factory=list)
    #: Milliseconds that were skipped.
    skipped: int = 0
    #: Whether a process has died, and whether the actor went on nevertheless.
    killed: bool = False
    swallowed: bool = False
    #: The keys that were claimed.
    keys: set[str] = field(default_factory=set)
    _waiting: list[tuple[int, bytes]] = field(default_factory=list)
    _times: Counter[tuple[str, str | None]] = field(default_factory=Counter)

    def deliver(self) -> Ended:
        """Deliver the message once more, until nothing of it is left.

        Returns:
          Ended: How its last delivery ended.
        """
        self._waiting.append((0, self.message.encode()))
        while self._waiting:
            self._waiting.sort(key=lambda each: each[0])
            due, raw = self._waiting.pop(0)
            self.skipped += max(0, due - _system.now() - self.skipped)
            process = Process(self)
            # As in a thread of its own: nothing that it sets in its context is left behind.
            ended = copy_context().run(process.work, raw)
            self.ended.append(ended)
            if ended.killed:
                process.bury()
                self._run_out()
                self._waiting.append((0, raw))  # it was not acked
        return self.ended[-1]

    def put(self, message: Message[Any], delay: int | None) -> None:
        """Put a copy of the message on its queue; what else is sent is somebody else's test."""
        if message.message_id == self.message.message_id:
            self._waiting.append((clock.now() + (delay or 0), message.encode()))

    def reach(self, process: Process, name: str, step: str | None) -> None:
        """A process is at a point; it may die there."""
        if name in _OVER:
            return
        self._times[name, step] += 1
        point = Point(name, step, self._times[name, step])
        self.reached.append(point)
        if point == self.kill_at:
            self.killed = True
            process.die()

    def _run_out(self) -> None:
        """The lease of a process that died runs out."""
        if not self.real:
            self.skipped += self.plan.lease
        elif self.plan.mode != "inbox":
            _system.wait(Event(), self.plan.lease)


class Process:
    """A worker process, for one delivery.

    Parameters:
      course(Course): Whose message it is.
    """

    def __init__(self, course: Course) -> None:
        self.course = course
        self.dead = False
        #: Whether its middlewares have been told how the actor ended.
        self.told = False
        #: The event loop of its async actors.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.guard = IdempotencyGuard(_Store(self))
        self.guard.plans.update({course.plan.actor: course.plan})
        self.others = [m for m in course.actor.broker.middleware if _is_users(m)]
        self.broker = _PrivateBroker(
            self, [*self.others, _own(course, JitterBackoff), self.guard, _own(course, Classify), _Innermost(self)]
        )
        self.stack = stack_of(self.broker)
        self.stack.seam.decider = _Deciding(self.stack.seam.decider)

    def work(self, raw: bytes) -> Ended:
        """Process a message and settle it, as a worker thread does."""
        _place.set((self, None))
        message = MessageProxy(Message.decode(raw))
        delivery = stamp(message, self.stack.wrap_consumer(_Channel(self), message.queue_name))
        delivery.stack = self.stack
        self.ended = Ended()
        try:
            with _event_loop(self):
                self._process(message, delivery)
                self.stack.settler._settle(None, message)
        except BaseException as error:
            if not self.dead:
                raise
            self.ended.killed = True
            for middleware in reversed(self.others if not self.told else ()):  # what they opened is the test's
                with suppress(Exception):
                    middleware.after_process_message(self.broker, message, exception=error)
        self.ended.dead = message.failed
        let_go(delivery)
        return self.ended

    def bury(self) -> None:
        """What a server does when a process that was connected to it dies: its transactions are rolled back."""
        if self.course.real:
            gc.collect()

    def reach(self, name: str, step: str | None) -> None:
        """The process is at a point."""
        self.live()
        self.course.reach(self, name, step)

    def die(self) -> NoReturn:
        """The process dies, and all that goes on beside in it."""
        self.dead = True
        if self.loop is not None:
            self.loop.call_soon_threadsafe(_cancel, self.loop)
        raise Killed

    def live(self) -> None:
        """Go on, unless it is dead."""
        if self.dead:
            raise Killed

    def _process(self, message: MessageProxy, delivery: Delivery) -> None:
        """What `WorkerThread.process_message` does."""
        ended = self.ended
        try:
            self.broker.emit_before("process_message", message)
            if not message.failed:
                ended.result = self.course.actor(*message.args, **message.kwargs)
                ended.returned = True
            self.told = True
            self.broker.emit_after("process_message", message, result=ended.result)
        except SkipMessage as skipped:
            if message.failed:
                message.stuff_exception(skipped)
            self.told = True
            self.broker.emit_after("skip_message", message)
        except BaseException as error:
            if self.dead or not isinstance(error, Exception | Interrupt | SystemExit):
                raise  # Ctrl-C, or what pytest raises
            ended.error = error
            self.told = True
            message.stuff_exception(error)
            self.broker.emit_after("process_message", message, exception=error)


# -- what its parts are put in place of ------------------------------------------------------------------------------


class _PrivateBroker(StubBroker):
    """A broker of one process, which knows the actors of the user's."""

    def __init__(self, process: Process, middleware: list[Middleware]) -> None:
        super().__init__(middleware)
        self.process = process
        self.actors = dict(process.course.actor.broker.actors)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        self.process.live()
        self.emit_before("enqueue", message, delay)
        self.process.course.put(message, delay)
        self.emit_after("enqueue", message, delay)
        return message


class _Channel(Consumer):
    """Where a message of one process is acked."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def ack(self, message: MessageProxy) -> None:
        self.process.live()

    nack = ack


class _Store:
    """The store, as one process sees it: once that is dead, nothing reaches it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._process.course.store, name)
        if not callable(found):
            return found

        def ask(*args: Any, **kwargs: Any) -> Any:
            self._process.live()
            if name in ("claim", "inbox"):
                self._process.course.keys.add(args[0])
            return found(*args, **kwargs)

        return ask


class _Deciding:
    """Who decides about errors; a death is none."""

    def __init__(self, decider: Decider | None) -> None:
        self._decider: Any = decider

    def decide(self, delivery: Delivery, error: BaseException) -> Decision:
        if isinstance(error, Killed):
            raise error
        decided: Decision = self._decider.decide(delivery, error)
        return decided

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decider, name)


class _Innermost(GuardMiddleware):
    """Just around the actor: it sees to it that nobody outlives a death, and which steps are taken."""

    place: ClassVar[int] = 99

    def __init__(self, process: Process) -> None:
        self.process = process

    def around(self, delivery: Delivery, proceed: Callable[[], Any]) -> Any:
        process = self.process
        process.ended.ran = True
        claimed = delivery.claim
        if claimed is not None:
            delivery.claim = _Stepping(process, claimed)
        try:
            result = proceed()
        except BaseException as error:
            process.course.swallowed |= process.dead and not isinstance(error, _DEATHS)
            process.live()
            raise
        finally:
            delivery.claim = claimed
        process.course.swallowed |= process.dead
        process.live()
        return result


class _Stepping:
    """A claimed key that says which step its actor is in."""

    def __init__(self, process: Process, claimed: Claimed) -> None:
        self._process = process
        self._claimed = claimed

    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._in(name):
            made = self._claimed.step(name, *args, **kwargs)
        return self._awaited(name, made) if inspect.iscoroutine(made) else made

    async def _awaited(self, name: str, made: Any) -> Any:
        with self._in(name):
            return await made

    @contextmanager
    def _in(self, name: str) -> Iterator[None]:
        before = _place.get()
        _place.set((self._process, name))
        try:
            yield
        finally:
            _place.set(before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._claimed, name)


# -- the world ---------------------------------------------------------------------------------------------------------

#: In which process, and in which step, the code runs; elsewhere, in threads that have nothing to do with it, ``None``.
_place: Final[ContextVar[tuple[Process, str | None] | None]] = ContextVar("dramatiq_guard_mortal", default=None)
_system: Final = clock.SystemClock()


class _SkippingClock:
    """The clock that was there, and what was skipped; for our processes alone."""

    def __init__(self, before: Clock) -> None:
        self._before = before

    def now(self) -> int:
        return self._before.now() + self._skipped()

    def monotonic(self) -> int:
        return self._before.monotonic() + self._skipped()

    def uniform(self) -> float:
        return self._before.uniform()

    def wait(self, event: Event, milliseconds: int) -> bool:
        place = _place.get()
        if place is None:
            return self._before.wait(event, milliseconds)
        place[0].course.skipped += max(0, milliseconds)
        return event.is_set()

    @staticmethod
    def _skipped() -> int:
        place = _place.get()
        return 0 if place is None else place[0].course.skipped


@contextmanager
def simulated() -> Iterator[None]:
    """Let courses be run inside the ``with`` block."""
    with reaching(_reached), clock.use(_SkippingClock(_system)):
        yield


def _reached(name: str) -> None:
    place = _place.get()
    if place is not None:
        place[0].reach(name, place[1])


@contextmanager
def _event_loop(process: Process) -> Iterator[None]:
    """An event loop for an async actor, of its process alone, unless the test has one."""
    function = inspect.unwrap(process.course.actor.fn)
    if not inspect.iscoroutinefunction(function) or get_event_loop_thread() is not None:
        yield
        return
    thread = EventLoopThread(get_logger("dramatiq_guard", "testing"), interrupt_check_ival=1.0)
    thread.start(timeout=5.0)
    set_event_loop_thread(thread)
    process.loop = thread.loop
    try:
        yield
    finally:
        set_event_loop_thread(None)
        asyncio.run_coroutine_threadsafe(_end(), thread.loop).result(timeout=5.0)
        thread.stop()


async def _end() -> None:
    """End what still runs on a loop, and the threads that it has started."""
    loop = asyncio.get_running_loop()
    await asyncio.gather(*_cancel(loop), return_exceptions=True)
    await loop.shutdown_default_executor()


def _cancel(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    """Cancel what runs on a loop, but for whoever asks."""
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in tasks:
        task.cancel()
    return tasks


def _is_users(middleware: Middleware) -> bool:
    """Whether a middleware is the user's own, and so may be what the actor leans on."""
    if type(middleware) is CurrentMessage:
        return True
    kinds = [kind for kind in type(middleware).__mro__ if kind not in (Middleware, object)]
    return not any(kind.__module__.startswith(("dramatiq.", "dramatiq_guard.")) for kind in kinds)


def _own(course: Course, kind: type[Any]) -> Any:
    """A private copy of a middleware of the user's; of what leads to other servers, it has nothing."""
    for middleware in course.actor.broker.middleware:
        if isinstance(middleware, kind):
            own = copy.copy(middleware)
            if isinstance(own, JitterBackoff):
                own.deliveries = None
            return own
    return kind()
