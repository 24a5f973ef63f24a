"""The settle barrier: what a message's end owes is done before the message is acked or nacked, or the message stays.

Dramatiq swallows whatever goes wrong in an after hook and then acks (H2): a retry that could not be enqueued is a
message lost.  So hooks only decide, and the doing waits until the consumer is asked to ack or nack:

1. *Conclude.*  A delivery that began and arrives undecided (an interrupt or a raising predicate came between) is
   decided now; it is never simply acked.
2. *Note.*  Whoever owes something at this message's end says so, once: the letter, a callback, the next stage.  The
   copy that carries the message on comes last.
3. *Perform*, as long as the message is still held: each part is done and marked done by itself.  While a broker or
   store is out, the message stays unacked and the settlement is repeated for as long as it takes (H3).  A part that
   fails in any other way is tried three times and then becomes a dead letter.

This module must not know any middleware, store or telemetry backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from dramatiq.errors import BrokerConnectionError
from dramatiq.logging import get_logger

from .. import clock, telemetry
from ..delivery import Due
from ..errors import SettlementHeld, StoreUnavailable
from .killpoints import reach

if TYPE_CHECKING:
    from ..delivery import Delivery
    from ..seam import Decider

__all__ = ["TRIES", "Settlement", "Undecided", "is_outage"]

#: How often a part that fails for another reason than an outage is tried before it becomes a dead letter.
TRIES: Final = 3

#: Errors of clients that mean "out of reach", by qualified name, so that no client is imported to recognise them.
_OUTAGES: Final = frozenset(
    {
        "redis.exceptions.RedisError",
        "pika.exceptions.AMQPError",
        "builtins.ConnectionError",
        "builtins.TimeoutError",
    }
)


class Undecided(Exception):
    """Stands in for the error of a delivery that began, did not return, and left no error behind."""


class Noter(Protocol):
    """Adds what it owes at this message's end to `delivery.dues`; called once."""

    def note(self, delivery: Delivery) -> None: ...


class LastResort(Protocol):
    """Turns a part that cannot be performed into a dead letter."""

    def give_up(self, delivery: Delivery, due: Due, error: BaseException) -> None: ...


class Holder(Protocol):
    """The consumer that a delivery came from."""

    def holds(self, delivery: Delivery) -> bool: ...
    def carry_on(self, delivery: Delivery) -> None: ...


def is_outage(error: BaseException) -> bool:
    """Whether an error says that a broker or a store is out, so that trying again is what helps."""
    if isinstance(error, BrokerConnectionError | StoreUnavailable):
        return True
    return any(f"{cls.__module__}.{cls.__qualname__}" in _OUTAGES for cls in type(error).__mro__)


class Settlement:
    """Settles the deliveries of one broker.

    Parameters:
      decider(Decider | None): Decides what arrives undecided.
      noters(tuple[Noter, ...]): Who may owe something, in the order in which it is performed.
      last_resort(LastResort | None): Makes a letter of what cannot be performed; without one it is logged.
    """

    def __init__(self, decider: Decider | None, noters: tuple[Noter, ...], last_resort: LastResort | None) -> None:
        self.logger = get_logger("dramatiq_guard", "settlement")
        self.decider = decider
        self.noters = noters
        self.last_resort = last_resort

    def settle(self, delivery: Delivery, holder: Holder) -> bool:
        """Do what this delivery's end owes.

        Parameters:
          delivery(Delivery): The delivery.
          holder(Holder): The consumer that it came from.

        Returns:
          bool: Whether the message is still held, so that it is to be acked or nacked.

        Raises:
          SettlementHeld: While something is out; the message must stay unacked and the settlement be repeated.
        """
        if delivery.settled:
            return True
        if not delivery.noted:
            if not self._conclude(delivery):
                # Dramatiq has taken the branch that acks; repeating the settlement takes the one that nacks.
                raise SettlementHeld(
                    f"Message {delivery.message_id} failed after all: it is nacked instead.", again=True
                )
            self._note_all(delivery, holder)
        if delivery.dues and not self._perform(delivery, holder):
            return False
        delivery.settled = True
        return True

    def _note_all(self, delivery: Delivery, holder: Holder) -> None:
        owed = [*delivery.dues]
        try:
            for noter in self.noters:
                self._note(noter, delivery)
            # A message that was failed after the decision dies, and only dies (H6).
            if delivery.successor is not None and delivery.decision is not None and not delivery.message.failed:
                delivery.dues.append(Due(delivery.decision.step.value, lambda: holder.carry_on(delivery)))
            delivery.noted = True
        except BaseException:
            # An interrupt of somebody else's (H4): it is noted again, and must not be owed twice.
            delivery.dues[:] = owed
            raise

    def _note(self, noter: Noter, delivery: Delivery) -> None:
        try:
            noter.note(delivery)
        except Exception:
            # Nobody's fault but ours; the message itself, and what the others owe, must not hang on it.
            self.logger.critical(
                "%r could not say what it owes for message %r: %s",
                noter,
                delivery.message_id,
                delivery.message.asdict(),
                exc_info=True,
            )

    def _conclude(self, delivery: Delivery) -> bool:
        """Decide what arrives undecided; say whether the message is still to be acked or nacked as it was going to."""
        if (
            self.decider is None
            or delivery.returned
            or delivery.skipped
            or delivery.decision is not None
            or delivery.message.failed
        ):
            return True
        error = delivery.message._exception
        if not delivery.entered and error is None:
            # Another middleware skipped it before the actor was reached: that decision stands.
            return True
        try:
            self.decider.decide(delivery, error if error is not None else Undecided("the delivery was interrupted"))
        except Exception:
            self.logger.critical(
                "Nothing could be decided for message %r; it dies.", delivery.message_id, exc_info=True
            )
            delivery.message.fail()
        return not delivery.message.failed

    def _perform(self, delivery: Delivery, holder: Holder) -> bool:
        if not any(not due.done for due in delivery.dues):
            return True
        with telemetry.settling(delivery):
            try:
                if not holder.holds(delivery):
                    return False
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing is sent for a message that may be gone
                self.hold(delivery, "asking whether it is still ours", error)
            # A part may add others, a letter in place of a retry: the list grows while it is walked.
            for due in delivery.dues:
                while not due.done:
                    reach(f"before-{due.name}")
                    self._perform_one(delivery, due)
                    reach(f"after-{due.name}")
        return True

    def _perform_one(self, delivery: Delivery, due: Due) -> None:
        try:
            due.perform()
        except Exception as error:  # noqa: BLE001 - whatever it is, the message is not lost over it
            if is_outage(error):
                self.hold(delivery, due.name, error)
            due.tries += 1
            if due.tries < TRIES:
                self.logger.warning(
                    "Message %r: %s failed (%d of %d): %r", delivery.message_id, due.name, due.tries, TRIES, error
                )
                return
            self._replace(delivery, due, error)
        except BaseException as error:  # noqa: BLE001 - as above
            # An interrupt of somebody else's landed here (H4).  The part may be half done, and can be repeated.
            self.hold(delivery, due.name, error)
        due.done = True

    def hold(self, delivery: Delivery, what: str, error: BaseException) -> NoReturn:
        """Keep a message unacked, since something cannot be done now; it is said once for each delivery.

        Parameters:
          delivery(Delivery): The delivery.
          what(str): What has to wait: a part, the ack, the nack.
          error(BaseException): Why.

        Raises:
          SettlementHeld: Always.
        """
        if isinstance(error, BrokerConnectionError) and error.__cause__ is not None:
            error = error.__cause__  # what the client said
        delivery.holds += 1
        if delivery.holds == 1:
            delivery.held_since = clock.monotonic()
            telemetry.settlement_held(what=what, why=type(error).__name__)
            self.logger.warning(
                "Message %r stays unacked: %s waits until it can be done (%s: %.200s).",
                delivery.message_id,
                what,
                type(error).__name__,
                error,
            )
        raise SettlementHeld(
            f"{what} of message {delivery.message_id} cannot be done now: {type(error).__name__}"
        ) from error

    def _replace(self, delivery: Delivery, due: Due, error: BaseException) -> None:
        """A part that cannot be performed becomes a dead letter; nothing of it is dropped unseen."""
        self.logger.error(
            "Message %r of actor %r: %s failed %d times and is given up: %r",
            delivery.message_id,
            delivery.actor_name,
            due.name,
            due.tries,
            error,
        )
        if self.last_resort is not None:
            self.last_resort.give_up(delivery, due, error)
