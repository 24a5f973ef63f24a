"""CircuitBreaker: a downstream that is down is not called, and is let recover at its own pace.

The life of a message in it, where its actor says ``downstream="payments"``:

1. After the idempotency claim and just before the actor's function, the process's gate for that downstream is asked.
   While the breaker is closed it lets everything through without a round trip.
2. Otherwise the message needs a token.  Its thread waits for one, up to *patience* and with up to *room* threads of
   the process; or the message is put off (`Defer`), which is no attempt, to a place in the line of the recovery.
3. The outcome is counted by its verdict: what may pass counts against the downstream, a permanent error shows that it
   answers.  A Retry-After holds every message for it back.
4. Where the breakers' store is out, everything is let through, with a warning, until it is back.
"""

from __future__ import annotations

from collections import deque
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dramatiq.logging import get_logger
from dramatiq.middleware import SkipMessage

from .. import clock
from ..delivery import carrier_of
from ..errors import Defer, SetupError
from ..policy.gate import Gate, Move
from ..policy.verdict import Kind
from .base import GuardMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Actor, Broker
    from dramatiq.worker import Worker

    from ..delivery import Delivery
    from ..policy.breaker import Lease, Report
    from ..policy.verdict import Verdict

__all__ = ["CircuitBreaker"]


class _Exchange(Protocol):
    def exchange(self, key: str, report: Report) -> Lease: ...


class CircuitBreaker(GuardMiddleware):
    """Puts messages off while the downstream of their actor is down, and lets them in at the rate it bears.

    Parameters:
      breakers(Breakers): The breakers that all processes share.
      room(int): How many threads of a process may wait for a token of one downstream; half of them, if not given.
      patience(int): Milliseconds that a thread waits at most.

    Raises:
      SetupError: A room below 1, or a negative patience.

    Example:
      >>> CircuitBreaker(Breakers(RedisBreakers(RedisConnection("redis://localhost"))))
    """

    place: ClassVar[int] = 6

    def __init__(self, breakers: _Exchange, *, room: int | None = None, patience: int = 2_000) -> None:
        if (room is not None and room < 1) or patience < 0:
            raise SetupError(f"CircuitBreaker needs room ≥ 1 and patience ≥ 0, got {room!r} and {patience!r}")
        self.logger = get_logger(__name__, type(self))
        self.breakers = breakers
        self.room = room
        self.patience = patience
        self._lock = Lock()
        self._doors: dict[str, _Door] = {}

    @property
    def actor_options(self) -> set[str]:
        return {"downstream"}

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        super().before_declare_actor(broker, actor)
        named = actor.options.get("downstream")
        if named is not None and not callable(named) and not (isinstance(named, str) and named):
            raise SetupError(
                f"Actor {actor.actor_name!r}: downstream must be a name or a function of the message, not {named!r}"
            )

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        super().before_worker_boot(broker, worker)
        if self.room is None:
            self.room = max(1, worker.worker_threads // 2)

    def around(self, delivery: Delivery, proceed: Callable[[], Any]) -> Any:
        """Let the message through, keep its thread, or put it off; and count what comes of it."""
        key = self._key(delivery)
        if key is None:
            return proceed()
        door = self._door(key)
        period = door.enter(again=bool(carrier_of(delivery.options).get("deferrals")))
        try:
            result = proceed()
        except BaseException as error:
            self._count(door, period, delivery.verdict, error)
            raise
        door.leave(period, ok=True)
        return result

    def _key(self, delivery: Delivery) -> str | None:
        named = delivery.stack.broker.get_actor(delivery.actor_name).options.get("downstream")
        key: str | None = named(delivery.message) if callable(named) else named
        return key

    def _door(self, key: str) -> _Door:
        door = self._doors.get(key)
        if door is None:
            with self._lock:
                door = self._doors.setdefault(key, _Door(key, self))
        return door

    def _count(self, door: _Door, period: int, verdict: Verdict | None, error: BaseException) -> None:
        if verdict is None:
            if isinstance(error, Exception) and not isinstance(error, SkipMessage):
                door.leave(period, ok=False)
        elif verdict.kind is Kind.RETRYABLE:
            door.leave(period, ok=False, retry_after=verdict.retry_after)
        elif verdict.kind is Kind.PERMANENT:
            door.leave(period, ok=True)


class _Door:
    """A gate, and the threads that stand at it."""

    def __init__(self, key: str, owner: CircuitBreaker) -> None:
        self.key = key
        self.owner = owner
        self.gate = Gate(owner.room or 1, clock.monotonic())
        self.changed = Condition()
        self.waiting: deque[object] = deque()
        self.out = False

    def enter(self, *, again: bool) -> int:
        """Go through, maybe after a wait; gives the period that the outcome belongs to.

        Raises:
          Defer: Not now.
        """
        self._exchange()
        with self.changed:
            answer = self.gate.arrive(clock.monotonic(), clock.uniform(), again=again)
            if answer.move is Move.ADMIT:
                return answer.period
            if answer.move is Move.PUT_OFF:
                raise self._put_off(answer.delay)
            self.waiting.append(ticket := object())
        return self._wait(ticket)

    def leave(self, period: int, *, ok: bool, retry_after: int | None = None) -> None:
        """A message that went through has its outcome."""
        with self.changed:
            self.gate.done(period, clock.monotonic(), ok=ok, retry_after=retry_after)
        self._exchange()

    def _wait(self, ticket: object) -> int:
        until = clock.monotonic() + self.owner.patience
        while True:
            self._exchange()
            with self.changed:
                now = clock.monotonic()
                if self.waiting[0] is ticket and (over := self.gate.wait_over(now)):
                    self.waiting.popleft()
                    self.changed.notify_all()
                    return over.period
                if now >= until:
                    self.waiting.remove(ticket)
                    answer = self.gate.give_up(now, clock.uniform())
                    self.changed.notify_all()
                    raise self._put_off(answer.delay)
                self.changed.wait((min(self.gate.wake_at(now), until) - now) / 1000)

    def _exchange(self) -> None:
        """Report, if a report is due; one thread does, the others go on with what is known."""
        with self.changed:
            now = clock.monotonic()
            if not self.gate.due(now):
                return
            report = self.gate.ask(now)
        try:
            lease = self.owner.breakers.exchange(self.key, report)
        except Exception as error:  # noqa: BLE001 - a breaker that cannot be asked stops nobody
            if not self.out:
                self.owner.logger.warning(
                    "The breaker of %r cannot be reached (%s): until it can, nothing is held back.", self.key, error
                )
            with self.changed:
                self.out = True
                self.gate.lost(clock.monotonic())
                self.changed.notify_all()
            return
        with self.changed:
            self.out = False
            self.gate.learn(lease, clock.monotonic(), clock.uniform())
            self.changed.notify_all()

    def _put_off(self, delay: int) -> Defer:
        return Defer(f"the breaker of {self.key!r} is {self.gate.mode.value}", delay=max(1, delay))
