"""Where a letter goes when its store is out: along with the messages, until the store is back.

The letter travels as a message of an internal actor on the queue that its message came from, so that workers which
listen to some queues only still carry it, and the original settles at once.  The internal actor puts itself off, by
the stack's own deferral, for as long as it takes.  A worker that does not know it leaves it in the broker's dead
letters, whole.

A store that is frozen answers nobody for as long as its timeouts are.  So each write is made on a thread of its own
and waited for briefly; one that comes late is no harm, since a letter is written once.  While the store is out, one
thread asks it now and then, for all.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final

import dramatiq
from dramatiq.logging import get_logger

from .. import clock, host
from ..dead_letters.letter import Letter
from ..errors import Defer, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Broker

__all__ = ["LETTER_ACTOR", "Letterbox"]

#: The name of the internal actor.
LETTER_ACTOR: Final = "dramatiq_guard.put_letter"

#: How long, in milliseconds, a worker thread waits for the store before it lets the letter travel.
_PATIENCE: Final = 1_000

#: How long, in milliseconds, a store that did not answer is not asked again.
_QUIET: Final = 5_000

#: The first wait of a letter on its way, in milliseconds.
_DELAY: Final = 5_000


class Letterbox:
    """Puts letters into their store, or on their way to it.

    Parameters:
      put(Callable[[Letter], None]): Writes a letter into the store; writing it again does nothing.
    """

    def __init__(self, put: Callable[[Letter], None]) -> None:
        self.logger = get_logger("dramatiq_guard", "letterbox")
        self._put = put
        self._lock = threading.Lock()
        self._out = False
        self._asking = 0
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
          StoreError: The store refuses the letter; or it is out, and the letter cannot travel.
          BrokerConnectionError: Store and broker are out.
        """
        if LETTER_ACTOR not in broker.actors:
            self._put(letter)
        elif not self._written(letter):
            message: dramatiq.Message[Any] = dramatiq.Message(
                queue_name=letter.queue,
                actor_name=LETTER_ACTOR,
                args=(letter.to_json(),),
                kwargs={},
                options={},
            )
            host.enqueue_once(broker, message, _DELAY)

    def _deliver(self, text: str) -> None:
        """The internal actor."""
        try:
            if not self._written(Letter.from_json(text)):
                raise Defer("the dead letter store is out")
        except StoreError as error:
            self.logger.critical("The dead letter store refuses a letter (%s): %s", error, text)

    def _written(self, letter: Letter) -> bool:
        """Write a letter, unless the store is out."""
        with self._lock:
            if self._out and (self._asking or clock.monotonic() < self._quiet_until):
                return False
            self._asking += 1
        answer: Future[None] = Future()
        # In the context of the settlement, whose span the letter is an event of.
        context = copy_context()
        threading.Thread(
            target=context.run, args=(self._ask, letter, answer), name="dramatiq-guard-letter", daemon=True
        ).start()
        try:
            answer.result(_PATIENCE / 1000)
        except StoreUnavailable as error:
            self._is_out(error)
            return False
        except TimeoutError:
            if not answer.done():
                self._is_out(f"no answer within {_PATIENCE} ms")
                return False
            raise
        return True

    def _ask(self, letter: Letter, answer: Future[None]) -> None:
        try:
            self._put(letter)
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is waited for
            answer.set_exception(error)
        else:
            answer.set_result(None)
        with self._lock:
            self._asking -= 1
            if answer.exception() is None:
                self._out = False

    def _is_out(self, why: object) -> None:
        with self._lock:
            self._quiet_until = clock.monotonic() + _QUIET
            known, self._out = self._out, True
        if not known:
            self.logger.warning(
                "The dead letter store is out (%s): letters travel with the messages until it is back.", why
            )
