"""JitterBackoff: what becomes of a message whose attempt failed.

The life of a failing message in it:

1. The error leaves the seam with its verdict (or comes from another middleware's hook, and is given one now).
2. `policy.decision.decide` says what is to be done: retry, give up, put off, requeue.  The copy that does it is built
   from the options as they were decoded, and encoded at once, so that it is known to be sendable.
3. A failure that counts goes on through the other middlewares' after hooks, a deferral leaves by the skip path.
4. At the settle barrier the copy is enqueued; only then is the original acked.
"""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from dramatiq import JSONEncoder, Message, get_encoder
from dramatiq.logging import get_logger
from dramatiq.middleware import Retries

from .. import clock, host, telemetry
from ..dead_letters.letter import Attempt, compact_traceback, summarize_error
from ..delivery import CARRIER, Due, Successor, carrier_of, count, delivery_of
from ..errors import SetupError
from ..failure_log import LOG_MODES, FailureLog, LogMode
from ..history import extended, first_failure
from ..options import announced, look_up, number
from ..policy.backoff import Backoff
from ..policy.decision import Counts, Decision, Limits, Step, decide
from ..policy.duration import milliseconds
from ..settle.forks import LIFE, SETTLED, Deliveries, new_mark
from ..settle.killpoints import reach
from ..wiring import stack_of
from .base import GuardMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from dramatiq import Broker
    from dramatiq.broker import MessageProxy
    from dramatiq.worker import Worker

    from ..delivery import Delivery
    from ..policy.backoff import Jitter

__all__ = ["JitterBackoff"]

#: The options that a message may carry to change its own plan.
_PLANNED: Final = (
    "max_retries",
    "min_backoff",
    "max_backoff",
    "jitter",
    "backoff",
    "retry_for",
    "max_deferrals",
    "max_interruptions",
)

#: How many different plans are remembered.
_PLANS: Final = 1_000

_HOST: Final = socket.gethostname()


class JitterBackoff(GuardMiddleware, Retries):
    """Retries with jitter, in place of Dramatiq's Retries; its options keep their names and meanings.

    What differs: `max_retries` holds beside `retry_when`; 0 is a value; a retry is enqueued before the original is
    acked, or the original stays; deferrals and interruptions count as no attempt.

    Parameters:
      max_retries(int | None): How often a message is retried; ``None`` for no limit.
      min_backoff(int | timedelta): Milliseconds before the first retry.  Defaults to 15 seconds.
      max_backoff(int | timedelta): Milliseconds that no backoff exceeds.  Defaults to 7 days, and cannot be more.
      retry_when(Callable[[int, BaseException], bool]): Says whether an error is retried at all; one that raises is
        logged, and the error retried.
      jitter(tuple[float, float] | str): The share added to every delay, or ``"full"``, ``"equal"``, ``"none"``.
      backoff(Sequence[int] | Callable): Explicit delays in milliseconds, the last of which repeats, or a function of
        ``(retries, exception, message)``; in place of the exponential ones.
      retry_for(int | timedelta): Milliseconds from the first failure after which no retry is begun.
      max_deferrals(int | None): How often a message is put off before it is given up.
      max_interruptions(int | None): How often a shutdown may interrupt a message before it is given up.
      log(str): ``"throttled"`` logs the traceback of each fingerprint once a minute per process and one line for the
        others, ``"traceback"`` every one, ``"summary"`` none.
      deliveries(DeliveryStore): On RabbitMQ, where copies that a lost confirm left behind are told apart, e.g.
        ``connect("redis://…").deliveries``; without one each process does so for itself. Redis needs none.

    Raises:
      SetupError: When an argument is of the wrong type or out of range; names it.

    Example:
      >>> JitterBackoff(min_backoff=1_000, max_backoff=300_000, max_retries=8)
    """

    place: ClassVar[int] = 4

    def __init__(
        self,
        *,
        max_retries: int | None = 20,
        min_backoff: int | timedelta | None = None,
        max_backoff: int | timedelta | None = None,
        retry_when: Callable[[int, BaseException], bool] | None = None,
        jitter: Jitter = (0.10, 0.20),
        backoff: Sequence[int | timedelta] | Callable[[int, BaseException, Any], int] | None = None,
        retry_for: int | timedelta | None = None,
        max_deferrals: int | None = 1000,
        max_interruptions: int | None = 5,
        log: LogMode = "throttled",
        deliveries: Deliveries | None = None,
    ) -> None:
        self.logger = get_logger(__name__, type(self))
        if log not in LOG_MODES:
            raise SetupError(f"JitterBackoff: log must be one of {', '.join(LOG_MODES)}, not {log!r}")
        if retry_when is not None and not callable(retry_when):
            raise SetupError(
                f"JitterBackoff: retry_when must be a callable (retries, exception) -> bool, not {retry_when!r}"
            )
        try:
            self.backoff = Backoff().replacing(
                min_backoff=min_backoff, max_backoff=max_backoff, jitter=jitter, schedule=backoff
            )
            self.limits = Limits(
                max_retries=number(max_retries, "max_retries"),
                retry_for=None if retry_for is None else milliseconds(retry_for, "retry_for"),
                max_deferrals=number(max_deferrals, "max_deferrals"),
                max_interruptions=number(max_interruptions, "max_interruptions"),
            )
        except (TypeError, ValueError) as error:
            raise SetupError(f"JitterBackoff: {error}") from error
        self.max_retries = self.limits.max_retries  # type: ignore[assignment]  # None is no limit, as in Dramatiq
        self.min_backoff = self.backoff.min_backoff
        self.max_backoff = self.backoff.max_backoff
        self.retry_when = retry_when
        self.log = log
        self._complained: set[str] = set()
        self._plans: dict[tuple[tuple[str, Any], ...], tuple[Limits, Backoff]] = {}
        self.deliveries = deliveries

    @property
    def actor_options(self) -> set[str]:
        return {*_PLANNED, "retry_when", "throws", "on_retry_exhausted"}

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        super().before_worker_boot(broker, worker)
        FailureLog(broker, self.log).install()

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        stack_of(broker).forks.enqueueing(message)

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        stack_of(broker).forks.enqueued()

    def plan(self, actor_options: Mapping[str, Any], message_options: Mapping[str, Any]) -> tuple[Limits, Backoff]:
        """The limits and the backoff that hold for an actor, and for one message of it.

        Parameters:
          actor_options(Mapping[str, Any]): The actor's options.
          message_options(Mapping[str, Any]): The message's; what is unsound in them is passed over.

        Returns:
          tuple[Limits, Backoff]: What holds.
        """
        found = {
            name: look_up(name, message_options, actor_options, _UNSET)
            for name in _PLANNED
            if name in message_options or name in actor_options
        }
        if not found:
            return self.limits, self.backoff
        key = tuple(found.items())
        try:
            known = self._plans.get(key)
        except TypeError:  # a schedule in a list, of an actor that nobody checked
            return self._plan(found)
        if known is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            known = self._plans[key] = self._plan(found)
        return known

    def _plan(self, found: Mapping[str, Any]) -> tuple[Limits, Backoff]:
        def limit(name: str) -> Any:
            value = found.get(name, _UNSET)
            return getattr(self.limits, name) if value is _UNSET else value

        def wait(name: str) -> Any:
            value = found.get(name, _UNSET)
            return None if value is _UNSET else value

        limits = Limits(
            max_retries=limit("max_retries"),
            retry_for=limit("retry_for"),
            max_deferrals=limit("max_deferrals"),
            max_interruptions=limit("max_interruptions"),
        )
        try:
            backoff = self.backoff.replacing(
                min_backoff=wait("min_backoff"),
                max_backoff=wait("max_backoff"),
                jitter=wait("jitter"),
                schedule=wait("backoff"),
            )
        except (TypeError, ValueError):
            # Each is sound, but not together: the minimum above the maximum.  As in Dramatiq, the maximum holds.
            backoff = self.backoff.replacing(
                max_backoff=wait("max_backoff"), jitter=wait("jitter"), schedule=wait("backoff")
            )
        return limits, backoff

    # -- deciding ------------------------------------------------------------------------------------------------------

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Decide about a failure; `Retries` enqueues here, where an error is swallowed and the message lost (H2)."""
        if exception is None:
            return
        delivery = delivery_of(message)
        if delivery.returned:
            # The actor succeeded, and an interrupt tore a later hook: the chain runs again as if it had failed (H4).
            self.logger.warning(
                "Message %r had succeeded when %r hit a hook; it is not run again.", message.message_id, exception
            )
            return
        decision = self.decide(delivery, exception)
        if delivery.consumer is None and delivery.successor is not None:
            # An eager broker: no consumer, so no barrier will come.
            broker.enqueue(delivery.successor.message, delay=delivery.successor.delay)
        self._log(delivery, decision)

    def decide(self, delivery: Delivery, error: BaseException) -> Decision:
        """Decide what becomes of a message; the first decision of a delivery stays.

        Parameters:
          delivery(Delivery): The delivery that failed.
          error(BaseException): The error that left the actor, or another middleware's hook.

        Returns:
          Decision: What is to be done; the message is marked failed where it is given up.
        """
        if delivery.decision is not None:
            return delivery.decision
        message = delivery.message
        actor = delivery.stack.broker.actors.get(delivery.actor_name)
        actor_options: Mapping[str, Any] = actor.options if actor is not None else {}
        verdict = delivery.stack.verdict(delivery, error)
        throws = isinstance(error, announced(message.options, actor_options))
        limits, backoff = self.plan(actor_options, delivery.options)
        retry_when = None
        if not throws:
            retry_when = self._ask_retry_when(actor_options, delivery, error)
        carrier = carrier_of(delivery.options)
        now = clock.now()
        first = first_failure(carrier)
        decision = decide(
            verdict,
            Counts(
                retries=delivery.retries,
                deferrals=count(carrier.get("deferrals")),
                interruptions=count(carrier.get("interruptions")),
                elapsed=0 if first is None else now - first,
            ),
            limits,
            backoff,
            clock.uniform(),
            throws=throws,
            retry_when=retry_when,
            exception=error,
            message=message,
        )
        delivery.error = error
        options = self._options_after(delivery, decision, error, carrier, now)
        if decision.step is not Step.GIVE_UP:
            decision = self._prepare(delivery, decision, options)
        if decision.counted:
            # What other middlewares and callbacks look at, as under Retries.
            message.options.update(
                {name: options[name] for name in ("retries", "traceback", "requeue_timestamp") if name in options}
            )
        if decision.delay is not None:
            telemetry.backed_off(
                delay_ms=decision.delay.milliseconds,
                strategy=decision.delay.strategy,
                capped=decision.delay.capped,
                retry_after_ms=verdict.retry_after,
                verdict=verdict.kind.value,
            )
        delivery.decision = decision
        if decision.step is Step.GIVE_UP:
            message.fail()
        reach("decided")
        return decision

    def _ask_retry_when(
        self, actor_options: Mapping[str, Any], delivery: Delivery, error: BaseException
    ) -> bool | None:
        predicate = actor_options.get("retry_when", self.retry_when)
        if predicate is None:
            return None
        try:
            return bool(predicate(delivery.retries, error))
        except BaseException as raised:
            name = delivery.actor_name
            self.logger.error(
                "retry_when of actor %r raised %r for message %r; the error counts as retryable.",
                name,
                raised,
                delivery.message_id,
                exc_info=name not in self._complained,  # once: a storm must not fill the disk
            )
            self._complained.add(name)
            return None

    def _options_after(
        self, delivery: Delivery, decision: Decision, error: BaseException, carrier: dict[str, Any], now: int
    ) -> dict[str, Any]:
        """The options of the copy: those that were decoded, one attempt further."""
        options = dict(delivery.options)
        if decision.step is Step.DEFER:
            carrier["deferrals"] = count(carrier.get("deferrals")) + 1
        elif decision.step is Step.REQUEUE:
            carrier["interruptions"] = count(carrier.get("interruptions")) + 1
        else:
            verdict = delivery.verdict
            delivery.summary = summary = summarize_error(error, redact=delivery.stack.redact_text)
            carrier = extended(
                carrier,
                Attempt(
                    at=now,
                    type=summary.type,
                    message=summary.message,
                    place=summary.place,
                    verdict=verdict.kind.value if verdict else "",
                    rule=verdict.rule if verdict else "",
                    delay=decision.delay.milliseconds if decision.delay else None,
                    why=decision.why,
                    host=_HOST,
                    pid=os.getpid(),
                ),
            )
            delivery.carrier = carrier
        if decision.counted:
            options["retries"] = delivery.retries + 1
            options["requeue_timestamp"] = now
            options["traceback"] = compact_traceback(error, redact=delivery.stack.redact_text)
        carrier[SETTLED] = count(carrier.get(SETTLED)) + 1
        if delivery.stack.forks.store is not None:
            carrier.setdefault(LIFE, new_mark())
        traceparent = telemetry.current_traceparent()
        if traceparent is not None:
            carrier["prev"] = traceparent
        options[CARRIER] = carrier
        return options

    def _prepare(self, delivery: Delivery, decision: Decision, options: dict[str, Any]) -> Decision:
        """Build the copy and see that it encodes; a message that does not is given up, with its evidence."""
        fields = {
            **delivery.message._message.asdict(),
            "queue_name": host.canonical_queue(delivery.message.queue_name),
            "options": options,
        }
        copy: Message[Any] = Message(**fields)
        try:
            if not _surely_encodes(copy):
                copy.encode()
        except Exception as error:  # noqa: BLE001 - encoders are the user's, and may raise anything
            return Decision(
                Step.GIVE_UP,
                "unencodable",
                None,
                counted=decision.counted,
                exit_process=decision.exit_process,
                why=f"the copy for another delivery cannot be encoded: {type(error).__name__}: {error!s:.200}",
            )
        delay = decision.delay.milliseconds if decision.delay is not None else 0
        delivery.successor = Successor(copy, None if decision.step is Step.REQUEUE else delay)
        return decision

    def _log(self, delivery: Delivery, decision: Decision) -> None:
        if delivery.said:
            return
        if decision.step is Step.RETRY and decision.delay is not None:
            self.logger.info(
                "Retrying message %r in %d milliseconds.", delivery.message_id, decision.delay.milliseconds
            )
        elif decision.step is Step.GIVE_UP:
            self.logger.warning(
                "Giving message %r of actor %r up (%s): %s.",
                delivery.message_id,
                delivery.actor_name,
                decision.reason,
                decision.why,
            )

    # -- settling ------------------------------------------------------------------------------------------------------

    def note(self, delivery: Delivery) -> None:
        """Owe the message to the actor in ``on_retry_exhausted``; the copy itself is owed by the settlement."""
        decision = delivery.decision
        if decision is None:
            return
        if decision.reason == "exhausted":
            broker = delivery.stack.broker
            options = broker.actors[delivery.actor_name].options
            target = delivery.options.get("on_retry_exhausted") or options.get("on_retry_exhausted")
            if target:
                limits, _ = self.plan(options, delivery.options)
                report = {"retries": delivery.retries, "max_retries": limits.max_retries}
                told: Message[Any] = broker.get_actor(target).message(delivery.message.asdict(), report)
                consumer: Any = delivery.consumer
                delivery.dues.append(
                    Due("on_retry_exhausted", partial(consumer.send, delivery, "on_retry_exhausted", told), told)
                )


def _surely_encodes(message: Message[Any]) -> bool:
    """Whether a message holds plain values only, and JSON is what it is encoded as; what is ours in it always is."""
    return (
        type(get_encoder()) is JSONEncoder
        and all(type(value) in _PLAIN for value in (*message.args, *message.kwargs.values()))
        and all(type(value) in _PLAIN or name == CARRIER for name, value in message.options.items())
    )


_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_UNSET: Final = object()
