"""DeadLetter: every message that dies leaves a letter, by whatever road it went.

The life of a message in it:

1. A replay is asked for at the store before it runs: a copy that another one has replaced is dropped unseen.
2. The message is given up (or failed by another middleware, or its actor is unknown), and Dramatiq asks its consumer to
   nack it.
3. At the settle barrier the letter is written: the whole payload, redacted, the error, the history, the fingerprint.
   Only then is the message nacked, and `on_dead_letter` fired.  The entry in the broker's own dead letters is a copy.
4. A message that had left a letter behind when its worker was killed, and does not die this time, takes it back.
5. A replay that succeeded is noted on the letter that it came from.
"""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from dramatiq import Actor
from dramatiq.errors import ActorNotFound
from dramatiq.logging import get_logger
from dramatiq.middleware import SkipMessage

from .. import clock, host, telemetry
from ..dead_letters.letter import Letter, describe_error, letter_id_of, replay_marker_of
from ..dead_letters.redact import DEFAULT_KEYS, Redaction
from ..delivery import Due, carrier_of, delivery_of
from ..errors import Defer, Quarantined, SetupError, StoreUnavailable
from ..history import attempts, attempts_total
from ..policy.duration import milliseconds
from ..settle.letterbox import Letterbox
from ..settle.withdrawals import Withdrawals
from .base import GuardMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import timedelta

    from dramatiq import Broker
    from dramatiq.broker import MessageProxy
    from dramatiq.worker import Worker

    from ..delivery import Delivery
    from ..stores.protocols import DeadLetterStore

__all__ = ["DeadLetter"]

_DAY: Final = 24 * 60 * 60 * 1000

#: How often, in milliseconds, a process that writes letters looks whether old ones must go.
_PURGE_EVERY: Final = 60_000


class DeadLetter(GuardMiddleware):
    """Writes a letter for every message that dies.

    Parameters:
      store(DeadLetterStore): Where letters are kept, e.g. ``connect("postgresql://…").dead_letters``.
      on_dead_letter(Callable[[Letter], object] | Actor | str): Called with each letter, or an actor (or its name) that
        is sent the message and a report; once for each letter, whatever road it came by.  Actors have an option of the
        same name.
      redact(Callable[[str, Any], Any]): Says of each path and value what may be written.
      redact_keys(Iterable[str]): Names whose values are never written; an empty collection for none.
      version(str): The version of the user's code; defaults to the environment's ``DRAMATIQ_GUARD_CODE_VERSION``.
      retention(int | timedelta): Milliseconds that a letter is kept for.  Defaults to 30 days.
      max_letters(int): How many letters are kept.

    Raises:
      SetupError: When an argument is of the wrong type or out of range; names it.

    Example:
      >>> DeadLetter(stores.dead_letters, on_dead_letter="page_somebody")
    """

    place: ClassVar[int] = 3

    def __init__(
        self,
        store: DeadLetterStore,
        *,
        on_dead_letter: Callable[[Letter], object] | Actor[Any, Any] | str | None = None,
        redact: Callable[[str, Any], Any] | None = None,
        redact_keys: Iterable[str] = DEFAULT_KEYS,
        version: str | None = None,
        retention: int | timedelta = 30 * _DAY,
        max_letters: int = 100_000,
    ) -> None:
        self.logger = get_logger(__name__, type(self))
        if not hasattr(store, "put"):
            raise SetupError(
                f"DeadLetter: store must keep dead letters, e.g. connect('redis://…').dead_letters, not {store!r}"
            )
        _check_target(on_dead_letter, "DeadLetter")
        if isinstance(max_letters, bool) or not isinstance(max_letters, int) or max_letters < 1:
            raise SetupError(f"DeadLetter: max_letters must be an integer from 1, not {max_letters!r}")
        try:
            self.retention = milliseconds(retention, "retention")
        except (TypeError, ValueError) as error:
            raise SetupError(f"DeadLetter: {error}") from error
        self.store = store
        self.on_dead_letter = on_dead_letter
        self.redaction = Redaction(redact_keys, redact)
        self.version = version if version is not None else os.environ.get("DRAMATIQ_GUARD_CODE_VERSION", "")
        self.max_letters = max_letters
        self._purge_after = 0
        self.letterbox = Letterbox(self._write)
        self.withdrawals = Withdrawals(store)

    @property
    def actor_options(self) -> set[str]:
        return {"on_dead_letter"}

    def open_letterbox(self, broker: Broker) -> None:
        """Make ready for a store that is out, and for messages that left letters behind; after the fork."""
        self.letterbox.open(broker)
        self.withdrawals.start(getattr(broker, "heartbeat_timeout", None))

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        super().before_worker_shutdown(broker, worker)
        self.withdrawals.shut_down()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        super().after_worker_shutdown(broker, worker)
        self.withdrawals.close()

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        super().before_declare_actor(broker, actor)
        _check_target(actor.options.get("on_dead_letter"), f"Actor {actor.actor_name!r}")

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        super().after_declare_actor(broker, actor)
        # Once more, for those that were declared before this middleware was added.
        _check_target(actor.options.get("on_dead_letter"), f"Actor {actor.actor_name!r}")

    def around(self, delivery: Delivery, proceed: Callable[[], Any]) -> Any:
        """Let a replay run if it is the copy that counts; all other messages pass."""
        marker = replay_marker_of(delivery.options)
        if marker and marker.get("token"):
            try:
                admitted = self.store.admit_replay(marker["of"], str(marker["token"]), now=clock.now())
            except StoreUnavailable as error:
                raise Defer("the store that knows whether this replay may run is out of reach") from error
            if not admitted:
                self.logger.warning(
                    "Message %r is a replay of letter %r that another replay has replaced; it is dropped.",
                    delivery.message_id,
                    marker["of"],
                )
                delivery.message.options["store_results"] = False
                raise SkipMessage("replaced by another replay")
        return proceed()

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Remember which trace the failure belongs to, while it is the current one."""
        if exception is not None:
            delivery_of(message).trace = telemetry.current_ids()

    # -- settling ------------------------------------------------------------------------------------------------------

    def note(self, delivery: Delivery) -> None:
        """Owe the letter of a message that failed, and the outcome of a replay that did not."""
        message = delivery.message
        if message.failed:
            self._owe_letter(delivery, self._letter(delivery, _reason(delivery)))
            return
        self._owe_withdrawal(delivery)
        if delivery.returned:
            marker = replay_marker_of(delivery.options)
            if marker and marker.get("token"):
                of, token = marker["of"], str(marker["token"])
                delivery.dues.append(Due("replay_outcome", partial(self._note_success, of, token)))

    def _owe_withdrawal(self, delivery: Delivery) -> None:
        """Owe the withdrawal of the letter that an earlier delivery may have left; few deliveries are suspect."""
        letter_id = letter_id_of(delivery.message_id, delivery.options)
        if not vars(delivery.message).get("redelivered") and not self.withdrawals.suspects(letter_id):
            return
        # Whoever skips it may do so because of another copy of the message: the letter could be that one's.
        if delivery.returned or delivery.successor is not None or (delivery.entered and not delivery.skipped):
            ended = delivery.returned
            delivery.dues.append(Due("withdrawal", partial(self.withdrawals.withdraw, letter_id, ended=ended)))

    def buried(self, delivery: Delivery) -> None:
        """Settle the letter of a message that has been nacked, in a while: nobody waits for it."""
        self.withdrawals.buried(letter_id_of(delivery.message_id, delivery.options), delivery.consumer)

    def give_up(self, delivery: Delivery, due: Due, error: BaseException) -> None:
        """Make a letter of what could not be settled; of a letter that the store refuses, a log line with all of it."""
        if due.name == "letter":
            letter = self._letter(delivery, _reason(delivery))
            self.logger.critical(
                "The store refuses the letter of message %r: %s", delivery.message_id, letter.to_json()
            )
        elif due.name in ("retry", "defer", "requeue"):
            delivery.error = error
            self._owe_letter(delivery, self._letter(delivery, "unencodable"))
        elif due.message is not None:
            # The message itself was done; what could not be sent is another one, which it owed.
            self._owe_letter(
                delivery,
                Letter.from_message(
                    due.message.asdict(),
                    reason="unencodable",
                    died_at=clock.now(),
                    exception=error,
                    redaction=self.redaction,
                    code_version=self.version,
                ),
            )

    def bury_undecodable(
        self, broker: Broker, raw: bytes, queue_name: str, broker_id: str | None, error: BaseException
    ) -> None:
        """Write the letter of a message that cannot be decoded: what the broker held is all that is known."""
        evidence = describe_error(error, redact=self.redaction.text)
        letter = Letter.from_raw(raw, queue=queue_name, died_at=clock.now(), broker_id=broker_id, error=evidence)
        self.letterbox.post(broker, letter)
        self.withdrawals.buried(letter.letter_id)

    def _owe_letter(self, delivery: Delivery, letter: Letter) -> None:
        delivery.dues.append(Due("letter", partial(self.letterbox.post, delivery.stack.broker, letter)))
        actor = delivery.stack.broker.actors.get(letter.actor)
        targets = [self.on_dead_letter, actor.options.get("on_dead_letter") if actor is not None else None]
        for target in targets:
            if target is not None:
                delivery.dues.append(Due("on_dead_letter", partial(self._tell, delivery, letter, target)))

    def _letter(self, delivery: Delivery, reason: str) -> Letter:
        message = delivery.message
        actor = delivery.stack.broker.actors.get(message.actor_name)
        error = delivery.error if delivery.error is not None else message._exception
        carrier = delivery.carrier if delivery.carrier is not None else carrier_of(delivery.options)
        trace_id, span_id = delivery.trace or ("", "")
        key, remembered_until = delivery.remembered or ("", None)
        return Letter.from_message(
            {**message._message.asdict(), "options": dict(delivery.options)},
            reason=reason,
            died_at=clock.now(),
            exception=error,
            redaction=self.redaction,
            parameter_names=() if actor is None else _parameter_names(actor),
            history=attempts(carrier),
            attempts_total=attempts_total(carrier),
            trace_id=trace_id,
            span_id=span_id,
            code_version=self.version,
            redelivered=getattr(message, "redelivered", None),
            key=key,
            remembered_until=remembered_until,
        )

    def _write(self, letter: Letter) -> None:
        if not self.store.put(letter):
            return
        telemetry.dead_lettered(
            reason=letter.reason, actor=letter.actor, queue=letter.queue, fingerprint=letter.fingerprint
        )
        self.logger.warning(
            "Message %r of actor %r is dead: %s (letter %s, fingerprint %s).",
            letter.message_id,
            letter.actor,
            letter.reason,
            letter.letter_id,
            letter.fingerprint,
        )
        self._purge()

    def _purge(self) -> None:
        now = clock.monotonic()
        if now < self._purge_after:
            return
        self._purge_after = now + _PURGE_EVERY
        try:
            purged = self.store.purge(now=clock.now(), max_age=self.retention, max_count=self.max_letters)
        except Exception:
            self.logger.warning("Old dead letters could not be removed; the next letter tries again.", exc_info=True)
            return
        if purged.total:
            telemetry.letters_purged(by_age=purged.by_age, by_count=purged.by_count)
            self.logger.warning(
                "Removed %d dead letters older than %d ms and %d beyond the latest %d; nobody had handled %d of them.",
                purged.by_age,
                self.retention,
                purged.by_count,
                self.max_letters,
                purged.never_handled,
            )

    def _note_success(self, letter_id: str, token: str) -> None:
        self.store.record_outcome(letter_id, token, "succeeded", now=clock.now())

    def _tell(self, delivery: Delivery, letter: Letter, target: Any) -> None:
        if not isinstance(target, str | Actor):
            target(letter)
            return
        actor = delivery.stack.broker.get_actor(target) if isinstance(target, str) else target
        consumer: Any = delivery.consumer
        told = actor.message(
            letter.payload,
            {
                "letter_id": letter.letter_id,
                "reason": letter.reason,
                "fingerprint": letter.fingerprint,
                "attempts": letter.attempts_total,
                "error": None if letter.error is None else {"type": letter.error.type, "message": letter.error.message},
            },
        )
        consumer.send(delivery, f"on_dead_letter {actor.actor_name}", told)


def _reason(delivery: Delivery) -> str:
    """The reason code of a message that failed."""
    message = delivery.message
    if delivery.decision is not None:
        # Without a reason it was to be tried again, and another middleware failed it all the same.
        return delivery.decision.reason or "failed_by_middleware"
    error = message._exception
    if isinstance(error, ActorNotFound) and not delivery.began:
        return "unknown_actor"
    if isinstance(error, Quarantined):
        return "poison"
    if host.skipped_by_age_limit(error):
        return "expired"
    if error is None or not delivery.entered or delivery.returned or isinstance(error, SkipMessage):
        return "failed_by_middleware"
    # Dramatiq's own Retries gave it up; it says no more than this.
    actor = delivery.stack.broker.actors.get(message.actor_name)
    throws = message.options.get("throws") or (actor.options.get("throws") if actor is not None else None)
    return "permanent" if throws and isinstance(error, throws) else "exhausted"


def _check_target(target: object, whose: str) -> None:
    if target is not None and not callable(target) and not isinstance(target, str | Actor):
        raise SetupError(f"{whose}: on_dead_letter must be a callable, an actor or an actor's name, not {target!r}")


def _parameter_names(actor: Actor[Any, Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(actor.fn).parameters)
    except (TypeError, ValueError):
        return ()
