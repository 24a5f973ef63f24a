"""One delivery of a message: what its middlewares know about it, and what its end owes.

A `Delivery` hangs on Dramatiq's message proxy, which is one object in all hooks of one delivery (H9).  Each field has
one writer; the others read, and cope with ``None``, so that every middleware works alone.

This module must not know any middleware, store or telemetry.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from .errors import GuardError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from dramatiq import Message
    from dramatiq.broker import MessageProxy

    from .policy.decision import Decision
    from .policy.verdict import Verdict

__all__ = ["CARRIER", "Delivery", "Due", "Successor", "carrier_of", "current_delivery", "delivery_of"]

#: The one entry in a message's options that is ours.  Old versions, stock workers and other brokers carry it along
#: without reading it.
CARRIER: Final = "dramatiq_guard"

#: Where the delivery hangs on the message proxy: naughty, but better than a table keyed by ids that are not unique.
_ATTRIBUTE: Final = "_dramatiq_guard_delivery"

_current: ContextVar[Delivery | None] = ContextVar("dramatiq_guard_delivery", default=None)


class Due:
    """One thing that the end of a message owes, performed at the settle barrier until it is done.

    Parameters:
      name(str): What is owed, for logs and spans: ``retry``, ``letter``, ``on_dead_letter``.
      perform(Callable[[], object]): Does it; must be safe to call again when it raised.
      message(Message | None): The message that is owed, if it is one: what a letter is made of when it cannot be sent.
    """

    __slots__ = ("done", "message", "name", "perform", "tries")

    def __init__(self, name: str, perform: Callable[[], object], message: Message[Any] | None = None) -> None:
        self.name = name
        self.perform = perform
        self.message = message
        self.done = False
        self.tries = 0


class Successor:
    """The copy that carries a message on: its retry, its deferral, its requeue.

    Parameters:
      message(Message): The copy, already known to encode.
      delay(int | None): Milliseconds to delay it by; ``None`` puts it straight on its queue.
    """

    __slots__ = ("delay", "message")

    def __init__(self, message: Message[Any], delay: int | None) -> None:
        self.message = message
        self.delay = delay


class Delivery:
    """One delivery of one message.

    What actors see of it is `message_id`, `attempt`, `shutting_down`, `time_left()`; guarded ones also `key`,
    `key_for()`, `step()`, `atomic()`, `connection`, `fence`, `is_takeover`.

    Attributes:
      message(MessageProxy): Dramatiq's own proxy.
      message_id(str): The id of the message, the same over all its attempts.
      actor_name(str): The name of its actor, which may be unknown.
      options(Mapping[str, Any]): The options as they were decoded; copies are built from these, so that what is done
        to the message in memory never travels.
      consumer(object | None): The consumer that delivered it; ``None`` where there is none (eager brokers).
    """

    __slots__ = (
        "acked",
        "actor_name",
        "began",
        "carrier",
        "claim",
        "consumer",
        "decision",
        "dues",
        "ended",
        "entered",
        "error",
        "held_since",
        "holds",
        "interrupts",
        "message",
        "message_id",
        "moved",
        "noted",
        "options",
        "parted",
        "remembered",
        "replaced",
        "replayed",
        "result",
        "returned",
        "said",
        "settled",
        "skipped",
        "span",
        "stack",
        "started_at",
        "successor",
        "summary",
        "suspicion",
        "trace",
        "verdict",
    )

    def __init__(self, message: MessageProxy, consumer: object | None = None) -> None:
        self.message = message
        self.message_id: str = message.message_id
        self.actor_name: str = message.actor_name
        self.consumer = consumer
        self.options: Mapping[str, Any] = dict(message.options)
        #: Set by the seam's hooks: the wiring of the broker, and whether processing has begun.
        self.stack: Any = None
        self.began = False
        #: Set by the seam: the user's function was entered; it returned, and what; it asked to be skipped.
        self.entered = False
        self.returned = False
        self.result: Any = None
        self.skipped = False
        #: The error that left the seam (or was met by another hook), set with the decision.
        self.error: BaseException | None = None
        #: Set by the seam: what can interrupt this run.
        self.interrupts: Any = None
        #: Written by CrashOnFatal: what is held against the message, if anything.
        self.suspicion: Any = None
        #: Written by IdempotencyGuard: the key that is held for this run, and what was done under it.
        self.claim: Any = None
        #: By the same: the key of this work, and until when its record is kept, at least, in UNIX milliseconds; that
        #: is ``None`` where the work leaves no record.
        self.remembered: tuple[str, int | None] | None = None
        #: By the same: what the actor ended with is the failure of an earlier delivery, whose callback was told of it.
        self.replayed = False
        #: Written by Classify; by IdempotencyGuard where the actor remembers the failure as its final answer.
        self.verdict: Verdict | None = None
        #: Written by JitterBackoff: what is to be done, and the copy that does it.
        self.decision: Decision | None = None
        self.successor: Successor | None = None
        #: Its error in one line, as the history has it; and whether the log has told what becomes of the message.
        self.summary: tuple[str, str, str] | None = None
        self.said = False
        #: Our entry in the options after this attempt: the history with this one in it.
        self.carrier: dict[str, Any] | None = None
        #: Written by DeadLetter: trace id and span id of the attempt that failed.
        self.trace: tuple[str, str] | None = None
        #: Written by the settlement.
        self.dues: list[Due] = []
        self.noted = False
        self.settled = False
        self.holds = 0
        self.held_since = 0
        #: Written by the consumer: the successor is on its way; and the broker put it in the message's place in one
        #: step, so that there is nothing left to ack.
        self.moved = False
        self.replaced = False
        #: Written by the consumer: parts of its end were noted at the broker.
        self.parted = False
        #: Written by the consumer: it was acked or nacked, which must not happen twice; and by its thread: all is over.
        self.acked = False
        self.ended = False
        #: Written by Tracing: whatever it keeps for this delivery, and when processing began (ms, monotonic).
        self.span: Any = None
        self.started_at = 0

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1; deferrals and interruptions are not attempts."""
        return self.retries + 1

    @property
    def retries(self) -> int:
        """How many counted attempts came before this one.  Rubbish in the options reads as none."""
        return count(self.options.get("retries"))

    @property
    def shutting_down(self) -> bool:
        """Whether the worker process has been told to stop; long jobs ask, and leave early."""
        return self.interrupts is not None and self.interrupts.shutting_down

    def time_left(self) -> int | None:
        """How long this run may still take.

        Returns:
          int | None: Milliseconds until the time limit or, once the worker process has been told to stop, until the job
            is interrupted for that; 0 when that is over, ``None`` without a limit.
        """
        return None if self.interrupts is None else self.interrupts.time_left()

    # -- what a guarded actor has more ---------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """The idempotency key of this work, printable ASCII: the same over all its deliveries.

        Raises:
          GuardError: The actor is not guarded.
        """
        return str(self._claim("key").key)

    @property
    def fence(self) -> int:
        """A number that is larger than that of any earlier run of this key, for resources that can compare it.

        Raises:
          GuardError: The actor is not guarded.
        """
        return int(self._claim("fence").fence)

    @property
    def is_takeover(self) -> bool:
        """Whether an earlier run of this key ended without a word, so that its effect may have happened."""
        return self.claim is not None and bool(self.claim.is_takeover)

    @property
    def connection(self) -> Any:
        """The connection of the transaction that an actor with ``idempotent="inbox"`` runs in.

        Raises:
          GuardError: There is none.
        """
        connection = self._claim("connection").connection
        if connection is None:
            raise GuardError(
                "This delivery runs in no transaction: declare the actor with idempotent='inbox', or use "
                "current_delivery().atomic() in one with idempotent='atomic'."
            )
        return connection

    def key_for(self, name: str, *, generation: int = 0) -> str:
        """The key to give to a third party for one of the things that this work does.

        Parameters:
          name(str): What is done, e.g. ``"refund"``.
          generation(int): Another gives another key: only after the third party said that nothing was done.

        Returns:
          str: A UUID of 36 ASCII characters; the same over retries, redeliveries, takeovers and replays.

        Raises:
          GuardError: The actor is not guarded.
        """
        return str(self._claim("key_for()").key_for(name, generation=generation))

    def step(
        self,
        name: str,
        perform: Callable[[str], Any],
        *,
        key_ttl: int | None = None,
        at_most_once: bool = False,
        reconcile: Callable[[str], Any] | None = None,
    ) -> Any:
        """Do one thing of this work, and remember what it returned: another run of the key does not do it again.

        In an async actor it is to be awaited, and `perform` may return an awaitable.

        Parameters:
          name(str): What is done; unique in a run, and kept over deploys.
          perform(Callable[[str], Any]): Does it; is given ``key_for(name)``, for the third party.  What it returns has
            to be plain values.
          key_ttl(int | None): For how many milliseconds the third party remembers the key; after that a run that does
            not know whether the step was done asks `reconcile`, or is parked.
          at_most_once(bool): Note first that the step has begun: if its process dies in it, another run asks
            `reconcile`, or is parked, and does not do it again.
          reconcile(Callable[[str], Any] | None): Finds out by the key whether it was done: `reconcile.Done`,
            `reconcile.NotDone`, `reconcile.Unknown`.

        Returns:
          Any: What `perform` returned, as it was stored.

        Raises:
          GuardError: The actor is not guarded.

        Example:
          >>> charge_id = current_delivery().step("charge", lambda key: gateway.charge(cents, key=key).id)
        """
        return self._claim("step()").step(
            name, perform, key_ttl=key_ttl, at_most_once=at_most_once, reconcile=reconcile
        )

    def atomic(self, result: Any = None, *, step: str | None = None) -> AbstractContextManager[Any]:
        """Open a transaction that commits the user's rows and completes the key together, or neither.

        Parameters:
          result(Any): What duplicates of this work get; plain values.  It is what this run returns, too.
          step(str | None): Record *result* as the value of this step in place of completing the key.

        Returns:
          AbstractContextManager: Gives the connection of the guard's store.

        Raises:
          GuardError: The actor is not guarded.

        Example:
          >>> with current_delivery().atomic(result={"order": order_id}) as connection:
          ...     connection.execute("insert into payments …")
        """
        opened: AbstractContextManager[Any] = self._claim("atomic()").atomic(result, step=step)
        return opened

    def _claim(self, what: str) -> Any:
        if self.claim is None:
            raise GuardError(
                f"This delivery has no {what}: its actor is not guarded. Declare it with idempotency_key=… or "
                "idempotent=True, and add IdempotencyGuard to the stack."
            )
        return self.claim

    def __repr__(self) -> str:
        return f"Delivery({self.actor_name} {self.message_id}, attempt {self.attempt})"


def count(value: object) -> int:
    """Read a counter from a message's options, which nobody validates: rubbish reads as 0, ``"3"`` as 3."""
    if value is None:
        return 0
    try:
        return max(0, int(value))  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError, OverflowError):
        return 0


def carrier_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of our own entry in a message's options; empty where there is none or it is rubbish."""
    carrier = options.get(CARRIER)
    return dict(carrier) if isinstance(carrier, dict) else {}


def delivery_of(message: MessageProxy) -> Delivery:
    """The delivery that hangs on a message proxy, made where no consumer has stamped it yet."""
    delivery: Delivery | None = message.__dict__.get(_ATTRIBUTE)
    if delivery is None:
        delivery = stamp(message, None)
    return delivery


def stamp(message: MessageProxy, consumer: object | None) -> Delivery:
    """Hang a new delivery on a message proxy, naming the consumer that it came from."""
    delivery = Delivery(message, consumer)
    message.__dict__[_ATTRIBUTE] = delivery
    return delivery


def let_go(delivery: Delivery) -> None:
    """Untie a delivery that is over from its message: both are freed at once, and not by the garbage collector."""
    delivery.message.__dict__.pop(_ATTRIBUTE, None)
    delivery.dues.clear()


#: The delivery that runs in this context, if any.
peek: Final[Callable[[], Delivery | None]] = _current.get

#: Make a delivery the current one of this context (``None``: there is none any more).
enter: Final[Callable[[Delivery | None], object]] = _current.set


def current_delivery() -> Delivery:
    """The delivery that runs here; works in sync and async actors, and in what they call.

    Threads that an actor starts itself do not inherit it: pass on what they need.

    Returns:
      Delivery: The current delivery.

    Raises:
      GuardError: When no delivery runs here, as in a direct call of an actor.

    Example:
      >>> @dramatiq.actor
      ... def work():
      ...     print(current_delivery().attempt)
    """
    delivery = _current.get()
    if delivery is None:
        raise GuardError(
            "There is no current delivery here: current_delivery() answers inside an actor that a worker runs, "
            "not in a direct call, nor in a thread that the actor started."
        )
    return delivery
