"""CircuitBreaker: a recovering downstream is not trampled.

The life of a message in it:

1. Its actor names the downstream that it calls (``downstream="payments"``).  While that is well, the message passes,
   and its outcome is counted in the process; now and then the process reports to the store that all processes share.
2. When too much fails, the breaker opens for all processes: the message stays in its queue, if that is all for this
   downstream, or else is put off, which counts as no attempt; and one message now and then goes through as a probe.
3. When a probe succeeds, messages come back at the rate that the downstream did before the outage, faster as long as it
   bears it, slower as soon as it does not.
4. When nobody has to wait any more, the breaker is closed.

A duplicate of finished work asks nobody: it stands inside the idempotency guard, just before the actor runs.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

from dramatiq.common import dq_name
from dramatiq.logging import get_logger

from ..delivery import carrier_of, count
from ..downstreams.gates import Gates
from ..errors import SetupError
from ..options import announced
from ..policy.breaker import Limits
from ..policy.gate import waiting_room
from ..policy.verdict import Kind
from ..settle.letterbox import LETTER_ACTOR
from .base import GuardMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Actor, Broker
    from dramatiq.worker import ConsumerThread, Worker

    from ..delivery import Delivery
    from ..stores.breakers import BreakerStore

__all__ = ["CircuitBreaker"]


#: Milliseconds between two looks for what has fallen due, at most.
_LOOKS: Final = 100


class CircuitBreaker(GuardMiddleware):
    """Holds the messages of a failing downstream back, and lets them in again at a pace that it bears.

    Actors have one option: ``downstream``, its name, or a function of the message that gives the name (or ``None``).

    Parameters:
      store(BreakerStore): What the processes share, e.g. ``connect("redis://…").breakers``.
      failure_ratio(float): The share of failures above which a breaker opens.  Only errors that trying again may cure
        count: a permanent error is an answer.
      min_failures(int): Fewer failures than these never open it.
      first_rate(float): Messages per second with which a recovery begins where nothing is known of the downstream.
      waiting_threads(int | None): How many threads of a process may wait for one downstream at a time; half of them by
        default.

    Raises:
      SetupError: When an argument is of the wrong type or out of range; names it.

    Example:
      >>> CircuitBreaker(stores.breakers)
    """

    place: ClassVar[int] = 6
    #: What a set-up check says of a store that does not answer.
    without_store: ClassVar[str] = "messages go freely until it does"

    def __init__(
        self,
        store: BreakerStore,
        *,
        failure_ratio: float = 0.5,
        min_failures: int = 5,
        first_rate: float = 10.0,
        waiting_threads: int | None = None,
    ) -> None:
        self.logger = get_logger(__name__, type(self))
        if not hasattr(store, "update") or not hasattr(store, "names"):
            raise SetupError(
                f"CircuitBreaker: store must keep breakers, e.g. connect('redis://…').breakers, not {store!r}"
            )
        _check("failure_ratio", failure_ratio, "a share above 0 and below 1", lambda share: 0 < share < 1)
        _check("min_failures", min_failures, "a whole number from 1", _whole)
        _check("first_rate", first_rate, "a number of messages per second above 0", lambda rate: 0 < rate < inf)
        if waiting_threads is not None:
            _check("waiting_threads", waiting_threads, "a whole number of threads from 1", _whole)
        self.store = store
        self.waiting_threads = waiting_threads
        self.gates = Gates(
            store, Limits(failure_ratio=failure_ratio, min_failures=min_failures, first_rate=float(first_rate))
        )
        self._complained: set[str] = set()
        self._downstreams: dict[str, Any] = {}
        #: The queues whose messages all go to one downstream; made when it is first asked for.
        self._queues: dict[str, str] | None = None
        self._broker: Broker | None = None

    @property
    def actor_options(self) -> set[str]:
        return {"downstream"}

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        super().before_declare_actor(broker, actor)
        # Here, where an error stops the declaration: after it Dramatiq swallows them.
        self._declare(actor)
        self._queues = None

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        super().after_declare_actor(broker, actor)
        self._declare(actor)
        self._queues = None

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        super().before_worker_boot(broker, worker)
        self._broker = broker
        self.gates.start(self.waiting_threads or waiting_room(int(getattr(worker, "worker_threads", 8))))

    def after_consumer_thread_boot(self, broker: Broker, thread: ConsumerThread) -> None:
        super().after_consumer_thread_boot(broker, thread)
        if self._downstreams and thread.queue_name == dq_name(thread.queue_name):
            # What was put off comes back one by one, and is looked for once in this time: by whole seconds it would
            # come in batches, and most of each batch be put off again.
            thread.worker_timeout = min(thread.worker_timeout, _LOOKS)

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self.gates.close()
        super().after_worker_shutdown(broker, worker)

    def around(self, delivery: Delivery, proceed: Callable[[], Any]) -> Any:
        """Pass the gate, run, and tell how it ended."""
        downstream = self._downstreams.get(delivery.actor_name)
        if downstream is not None and not isinstance(downstream, str):
            downstream = self._asked(downstream, delivery)
        if downstream is None:
            return proceed()
        gates = self.gates
        period = gates.admitted(downstream)
        consumer: Any = delivery.consumer
        if period is None:
            period = gates.enter(
                downstream,
                again=bool(count(carrier_of(delivery.options).get("deferrals"))),
                hurried=lambda: delivery.shutting_down,
            )
        # Also where all is well: what runs for an hour must not count as waiting when its downstream fails meanwhile.
        consumer.passed(delivery)
        try:
            result = proceed()
        except BaseException as error:
            verdict = delivery.stack.verdict(delivery, error)
            if verdict.kind in (Kind.RETRYABLE, Kind.PERMANENT):
                failed = verdict.kind is Kind.RETRYABLE and not self._by_design(delivery, error)
                gates.left(downstream, period, ok=not failed, retry_after=verdict.retry_after if failed else None)
            raise
        gates.answered(downstream, period)
        return result

    def hold(self, queue_name: str, taken: int) -> int:
        """For how many milliseconds nothing more is to be taken from a queue; asked by its consumer.

        Parameters:
          queue_name(str): The queue.
          taken(int): How many messages were taken from it that have neither gone through nor ended yet.
        """
        queues = self._queues
        if queues is None:
            queues = self._queues = self._queues_of_one_downstream()
        downstream = queues.get(queue_name)
        return 0 if downstream is None else self.gates.hold(downstream, taken)

    def _queues_of_one_downstream(self) -> dict[str, str]:
        """The queues whose messages all go to the same downstream, and which one that is."""
        found: dict[str, set[Any]] = {}
        for actor in [] if self._broker is None else list(self._broker.actors.values()):
            # A letter that travels since its store is out is safe where it is, and may wait with the others.
            if actor.actor_name != LETTER_ACTOR:
                found.setdefault(actor.queue_name, set()).add(self._downstreams.get(actor.actor_name))
        alone = {queue_name: next(iter(names)) for queue_name, names in found.items() if len(names) == 1}
        return {queue_name: name for queue_name, name in alone.items() if isinstance(name, str)}

    def _by_design(self, delivery: Delivery, error: BaseException) -> bool:
        """Whether the actor's ``throws`` names the error: then it is an answer, whatever the verdict on its type."""
        actor = delivery.stack.broker.actors.get(delivery.actor_name)
        return isinstance(error, announced(delivery.message.options, {} if actor is None else actor.options))

    def _declare(self, actor: Actor[Any, Any]) -> None:
        downstream = actor.options.get("downstream")
        self._downstreams.pop(actor.actor_name, None)
        if downstream is None:
            return
        if not callable(downstream) and not (isinstance(downstream, str) and downstream):
            raise SetupError(
                f"Actor {actor.actor_name!r}: downstream must be the name of what it calls, or a function of the "
                f"message that gives it, not {downstream!r}"
            )
        self._downstreams[actor.actor_name] = downstream

    def _asked(self, function: Callable[[Any], Any], delivery: Delivery) -> str | None:
        """What the user's function says; one that fails is said to, and its message goes freely."""
        try:
            name = function(delivery.message)
        except Exception:  # noqa: BLE001 - it is the user's
            name = _FAILED
        if name is None or (isinstance(name, str) and name):
            return name
        if delivery.actor_name not in self._complained:
            self._complained.add(delivery.actor_name)
            self.logger.error(
                "downstream of actor %r did not give a name for message %r, which goes freely (said once).",
                delivery.actor_name,
                delivery.message_id,
                exc_info=name is _FAILED,
            )
        return None


_FAILED: Any = object()


def _whole(number: float) -> bool:
    return isinstance(number, int) and number >= 1


def _check(name: str, value: Any, wanted: str, sound: Callable[[Any], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not sound(value):
        raise SetupError(f"CircuitBreaker: {name} must be {wanted}, not {value!r}")
