"""What the guard middlewares of one broker share: the seam, the settle barrier, the interrupts.

Middlewares never import each other.  When a worker boots, the stack looks through the broker's middlewares, asks each
for what it contributes (a layer, a decision, something owed at the end), and puts them together.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from . import checks, clock, host
from .delivery import delivery_of, enter
from .exits.worker_exit import WorkerExit
from .interrupts import Run
from .options import look_up
from .policy.rules import Rules
from .seam import Seam
from .settle.consumer import GuardedConsumer
from .settle.consumer_thread import Settler
from .settle.followups import FollowUps
from .settle.forks import Forks, SeenHere
from .settle.settlement import Settlement
from .settle.underway import Underway
from .substitutes import substitute

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Broker
    from dramatiq.broker import Consumer, MessageProxy
    from dramatiq.worker import Worker

    from .delivery import Delivery
    from .policy.verdict import Verdict

__all__ = ["Stack", "begin", "boot", "stack_of"]

_ATTRIBUTE: Final = "_dramatiq_guard_stack"
_PLAIN: Final = Rules((), builtin=False)
_lock = threading.Lock()


class Stack:
    """The wiring of one broker, put together anew whenever a worker boots.

    Parameters:
      broker(Broker): The broker; its middlewares may change until a worker boots.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.allow_unconfirmed = False
        self.booted_worker: Worker | None = None
        self.upkeep: Any = None
        self.holdings: Any = None
        self.underway = Underway()
        self.seen_here = SeenHere() if host.kind_of(broker) == "rabbitmq" else None
        #: What is being processed or settled by a worker thread just now.
        self.in_flight: dict[int, Delivery] = {}
        #: Set when the end has begun: consumers fetch nothing more.
        self.draining = False
        self.assemble()

    def assemble(self) -> None:
        """Collect what the broker's middlewares contribute."""
        self.interrupts, self._time_limit, self._notifications = substitute(self.broker)
        if self._notifications is not None:
            self._notifications.shut_down = self.shut_down
        middlewares = checks.guards_of(self.broker)
        layers = tuple(m.around for m in middlewares if hasattr(m, "around"))
        decider: Any = next((m for m in middlewares if hasattr(m, "decide")), None)
        noters = (FollowUps(self.broker), *(m for m in reversed(middlewares) if hasattr(m, "note")))
        last_resort: Any = next((m for m in middlewares if hasattr(m, "give_up")), None)
        classifier: Any = next((m for m in middlewares if hasattr(m, "verdict")), None)
        self.verdict: Callable[[Delivery, BaseException], Verdict] = (
            _plain_verdict if classifier is None else classifier.verdict
        )
        #: Says for how long nothing is to be taken from a queue; ``None`` where nobody holds any.
        self.hold: Callable[[str, int], int] | None = next((m.hold for m in middlewares if hasattr(m, "hold")), None)
        #: Takes secrets out of the text of an error; ``None`` where nobody asked for it.
        self.redact_text: Callable[[str], str] | None = next(
            (m.redaction.text for m in middlewares if hasattr(m, "redaction")), None
        )
        self.seam = Seam(layers, decider, self.interrupts, self._arm, self._admit)
        self.settlement = Settlement(decider, noters, last_resort)
        self.undertakers: tuple[Any, ...] = tuple(m for m in middlewares if hasattr(m, "bury_undecodable"))
        self.mourners: tuple[Any, ...] = tuple(m for m in middlewares if hasattr(m, "buried"))
        self.settler = Settler(self.broker)
        self.exit = WorkerExit(self)
        deliveries = [m.deliveries for m in middlewares if getattr(m, "deliveries", None) is not None]
        if host.kind_of(self.broker) == "redis":
            # It moves a message in one step: copies are told apart only where somebody asks for it.
            deliveries = [decider.deliveries] if getattr(decider, "deliveries", None) is not None else []
        self.forks = Forks(deliveries[0] if deliveries else self.seen_here)

    def start(self) -> None:
        """Start what runs beside the worker, after the fork."""
        self.interrupts.start()
        kind = host.kind_of(self.broker)
        if kind == "redis":
            from .settle.redis_consumer import RedisHoldings
            from .settle.redis_upkeep import RedisUpkeep

            self.holdings = RedisHoldings()
            host.redis_bound_client(self.broker)
            self.upkeep = RedisUpkeep(self.broker)
            self.upkeep.start()
        elif kind == "rabbitmq":
            host.rabbitmq_bound_client(self.broker)
        for middleware in checks.guards_of(self.broker):
            opens = getattr(middleware, "open_letterbox", None)
            if opens is not None:
                opens(self.broker)

    def stop(self) -> None:
        """End what runs beside the worker; it has shut down."""
        self.interrupts.close()
        if self.upkeep is not None:
            self.upkeep.close()

    def bury_undecodable(self, raw: bytes, queue_name: str, broker_id: str | None, error: BaseException) -> None:
        """Have a letter written for a message that nobody can decode; without DeadLetter the broker's copy is all."""
        for undertaker in self.undertakers:
            undertaker.bury_undecodable(self.broker, raw, queue_name, broker_id, error)

    def adopt(self, thread: Any) -> None:
        """Take over what a consumer thread does with messages at their end."""
        self.settler.adopt(thread)

    def shut_down(self) -> None:
        """Shutdown has begun: nothing more is taken, and no settlement is repeated any more."""
        self.draining = True
        self.settler.close()

    def after_death(self, delivery: Delivery) -> None:
        """A message has been nacked; whoever wants to know of it is told."""
        for mourner in self.mourners:
            mourner.buried(delivery)

    def wrap_consumer(self, consumer: Consumer, queue_name: str) -> Consumer:
        """Put the settle barrier around a consumer of the broker."""
        kind = host.kind_of(self.broker)
        if kind == "redis":
            from .settle.redis_consumer import RedisConsumer

            return RedisConsumer(consumer, self, queue_name)
        if kind == "rabbitmq":
            from .settle.rabbitmq_consumer import RabbitmqConsumer

            return RabbitmqConsumer(consumer, self, queue_name)
        return GuardedConsumer(consumer, self, queue_name)

    def _admit(self, delivery: Delivery) -> bool:
        consumer: Any = delivery.consumer
        return bool(consumer.admits(delivery))

    def _arm(self, delivery: Delivery) -> Run:
        options = self.broker.actors[delivery.actor_name].options
        time_limit = notify = None
        if self._time_limit is not None:
            time_limit = delivery.options.get("time_limit")
            if not time_limit or isinstance(time_limit, bool) or not isinstance(time_limit, int | float):
                time_limit = options.get("time_limit", self._time_limit.time_limit)
        if self._notifications is not None:
            notify = look_up("notify_shutdown", delivery.options, options, None)
            if notify is None:
                notify = self._notifications.notify_shutdown
        return Run(self.interrupts, time_limit, bool(notify))


def stack_of(broker: Broker) -> Stack:
    """The stack of a broker, made at its first use."""
    stack: Stack | None = broker.__dict__.get(_ATTRIBUTE)
    if stack is None:
        with _lock:
            stack = broker.__dict__.get(_ATTRIBUTE)
            if stack is None:
                stack = broker.__dict__[_ATTRIBUTE] = Stack(broker)
    return stack


def boot(broker: Broker, worker: Worker) -> None:
    """Check the set-up, and wire it, once for each worker that boots; the first guard middleware to be asked does it.

    Raises:
      SetupError: When the stack cannot keep its promises as it is set up; the worker does not start.
    """
    stack = stack_of(broker)
    if stack.booted_worker is worker:
        return
    try:
        checks.run(checks.Setup(broker, stack.allow_unconfirmed))
    except BaseException:
        # Dramatiq's AsyncIO may have booted before us, and its thread would keep the process alive for ever.
        host.stop_event_loop()
        raise
    stack.draining = False
    stack.in_flight.clear()
    stack.assemble()
    stack.start()
    host.wrap_consume(broker, stack.wrap_consumer)
    stack.booted_worker = worker


def begin(broker: Broker, message: MessageProxy) -> Delivery:
    """Make a delivery the current one; every guard middleware's first hook does, the first one counts."""
    delivery = delivery_of(message)
    if not delivery.began:
        delivery.stack = stack_of(broker)
        delivery.began = True
        delivery.stack.in_flight[id(delivery)] = delivery
        if "throws" in message.options:
            _check_throws(message)
        enter(delivery)
    return delivery


def _plain_verdict(delivery: Delivery, error: BaseException) -> Verdict:
    """The verdict where no Classify is in the stack: only what the errors themselves say; all else is retryable."""
    if delivery.verdict is None:
        delivery.verdict = _PLAIN.classify(error, now_ms=clock.now())
    return delivery.verdict


def _check_throws(message: MessageProxy) -> None:
    # Message options are validated by nobody, and ``isinstance(error, "KeyError")`` in Dramatiq's own error branch
    # kills the worker thread and acks the message (H13).
    throws = message.options["throws"]
    kinds = throws if isinstance(throws, tuple) else (throws,)
    if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        del message.options["throws"]
