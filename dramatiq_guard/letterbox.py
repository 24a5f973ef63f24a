"""Where a letter goes when its store is out: along with the messages, until the store is back.

The letter travels as a message of an internal actor on the queue that its message came from, so that workers which
listen to some queues only still carry it, and the original settles at once.  The internal actor puts itself off, by
the stack's own deferral, for as long as it takes.  A worker that does not know it leaves it in the broker's dead
letters, whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import dramatiq
from dramatiq.logging import get_logger

from . import clock
from .dead_letters.letter import Letter
from .errors import Defer, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Broker

__all__ = ["LETTER_ACTOR", "Letterbox"]

#: The name of the internal actor.
LETTER_ACTOR: Final = "dramatiq_guard.put_letter"

#: How long, in milliseconds, a store that did not answer is not asked again by those who have another way.
_QUIET: Final = 5_000

#: The first wait of a letter on its way, in milliseconds.
_DELAY: Final = 5_000


class Letterbox:
    """Puts letters into their store, or on their way to it.

    Parameters:
      put(Callable[[Letter], None]): Writes a letter into the store.
    """

    def __init__(self, put: Callable[[Letter], None]) -> None:
        self.logger = get_logger("dramatiq_guard", "letterbox")
        self._put = put
        self._quiet_until = 0

    def open(self, broker: Broker) -> None:
        """Declare the internal actor on a broker, on a queue that it has already."""
        if LETTER_ACTOR in broker.actors or not broker.actors:
            return
        unlimited: dict[str, Any] = {"max_retries": None, "max_deferrals": None}
        dramatiq.actor(
            actor_name=LETTER_ACTOR,
            queue_name=next(iter(broker.actors.values())).queue_name,
            broker=broker,
            **{name: value for name, value in unlimited.items() if name in broker.actor_options},
        )(self._deliver)

    def post(self, broker: Broker, letter: Letter) -> None:
        """Write a letter, or send it on its way if the store is out.

        Raises:
          StoreError: The store refuses the letter.
          BrokerConnectionError: Store and broker are out.
        """
        if clock.monotonic() >= self._quiet_until:
            try:
                self._put(letter)
            except StoreUnavailable as error:
                self._quiet_until = clock.monotonic() + _QUIET
                self.logger.warning(
                    "The dead letter store is out (%s): letters travel with the messages until it is back.", error
                )
                if LETTER_ACTOR not in broker.actors:
                    raise
            else:
                return
        message: dramatiq.Message[Any] = dramatiq.Message(
            queue_name=letter.queue,
            actor_name=LETTER_ACTOR,
            args=(letter.to_json(),),
            kwargs={},
            options={},
        )
        broker.enqueue(message, delay=_DELAY)

    def _deliver(self, text: str) -> None:
        """The internal actor."""
        try:
            self._put(Letter.from_json(text))
        except StoreUnavailable as error:
            raise Defer("the dead letter store is out") from error
        except StoreError as error:
            self.logger.critical("The dead letter store refuses a letter (%s): %s", error, text)
