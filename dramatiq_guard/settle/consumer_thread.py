"""What a consumer thread does with a message at its end, in place of Dramatiq's own.

Dramatiq's loop sleeps five seconds at a time on whichever thread it is on, shutdown or not; on a consumer's own thread
that stops the queue for everybody.  And its delay consumer loses what it holds when the broker goes away as messages
fall due.  So each consumer thread is adopted when it boots:

1. On a worker thread a settlement that is held is repeated, after waits that grow from 0.1 to 5 seconds.
2. A consumer thread settles nothing, since a store that is slow would hold up its queue: the settler thread does.
3. Once shutdown has begun, a settlement that fails ends at once: the message stays unacked and is redelivered.
4. A delayed message stays in the delay queue until it has been moved.
"""

from __future__ import annotations

import threading
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from dramatiq.errors import BrokerConnectionError
from dramatiq.logging import get_logger
from dramatiq.worker import ConsumerThread

from .. import clock
from ..delivery import delivery_of, let_go
from ..errors import SettlementHeld
from .killpoints import reach

if TYPE_CHECKING:
    from dramatiq import Broker
    from dramatiq.broker import MessageProxy

__all__ = ["Settler"]

_FIRST_WAIT: Final = 100
_LONGEST_WAIT: Final = 5_000

#: How often hooks that an interrupt cut short are called again.
_HOOK_TRIES: Final = 3


class Settler:
    """Repeats settlements until they succeed or the worker shuts down.

    Parameters:
      broker(Broker): The broker whose consumer threads it adopts.
    """

    def __init__(self, broker: Broker) -> None:
        self.logger = get_logger("dramatiq_guard", "settler")
        self.broker = broker
        self.closing = threading.Event()
        self._delayed = False
        self._held: SimpleQueue[tuple[Any, MessageProxy] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def adopt(self, thread: Any) -> None:
        """Put our own settling and promoting in place of a consumer thread's."""
        thread.post_process_message = partial(self.post_process, thread)
        thread.handle_delayed_messages = partial(self.promote_due, thread)

    def close(self) -> None:
        """Repeat nothing any more: shutdown has begun."""
        self.closing.set()
        self._held.put(None)

    def post_process(self, thread: Any, message: MessageProxy) -> None:
        """Settle a message and ack or nack it; in place of `ConsumerThread.post_process_message`."""
        if isinstance(threading.current_thread(), ConsumerThread):
            if not self._later(thread, message):
                self._try(thread, message)
            return
        delivery = delivery_of(message)
        try:
            self._settle_patiently(thread, message)
            delivery.ended = True
        finally:
            if delivery.stack is not None:
                delivery.stack.in_flight.pop(id(delivery), None)

    def promote_due(self, thread: Any) -> None:
        """Move the delayed messages that have fallen due; in place of `ConsumerThread.handle_delayed_messages`."""
        queue = thread.delay_queue
        if thread.consumer.stack.draining:
            # What is delayed here goes back to the broker.
            return
        # Looked at before it is taken: this runs after each message that is fetched, and mostly nothing is due.
        while True:
            try:
                if queue.queue[0].priority > clock.now():
                    return
                item = queue.get_nowait()
            except (IndexError, Empty):
                return
            try:
                try:
                    # Dramatiq acks the delayed copy with its hooks, and gauges lean on them (H10).
                    self.broker.emit_before("ack", item.message)
                    reach("before-promote")
                    thread.consumer.promote(item.message)
                    reach("after-promote")
                except BaseException as error:
                    queue.put(item)
                    lost = not isinstance(error, BrokerConnectionError) or not thread.consumer.alive()
                    if lost and isinstance(error, Exception):
                        raise
                    # It could not be sent, but is still ours: a new connection would bring all that is delayed again.
                    self._say_delayed(error)
                    return
                self._delayed = False
                self._promoted(item.message)
            finally:
                queue.task_done()

    def _say_delayed(self, error: BaseException) -> None:
        if not self._delayed:
            self._delayed = True
            self.logger.warning("Delayed messages that have fallen due wait until they can be sent: %s", error)

    def _promoted(self, message: MessageProxy) -> None:
        """The message is on its queue: whatever a hook does now, it is not moved again, and the thread goes on."""
        for _ in range(_HOOK_TRIES):
            try:
                self.broker.emit_after("ack", message)
            except BaseException:
                self.logger.exception("A hook was hit after delayed message %r had been moved.", message.message_id)
            else:
                let_go(delivery_of(message))
                return

    def _settle(self, thread: Any, message: MessageProxy) -> None:
        """One try, with the hooks that Dramatiq runs around it."""
        delivery = delivery_of(message)
        while True:
            name = "nack" if message.failed else "ack"
            self.broker.emit_before(name, message)
            # The consumer that delivered it, not the one that the thread has now: after a reconnect tags start anew,
            # and the same number is another message.  It may change meanwhile (see `underway`).
            consumer: Any = delivery.consumer or thread.consumer
            try:
                getattr(consumer, name)(message)
            except SettlementHeld as held:
                if held.again:
                    continue
                raise
            self.broker.emit_after(name, message)
            if delivery.holds:
                self.logger.info(
                    "Message %r is settled, after it was held for %d ms.",
                    message.message_id,
                    clock.monotonic() - delivery.held_since,
                )
            return

    def _settle_patiently(self, thread: Any, message: MessageProxy) -> None:
        wait = _FIRST_WAIT
        while True:
            try:
                self._settle(thread, message)
            except BrokerConnectionError as error:
                if self.closing.is_set() or clock.wait(self.closing, wait):
                    self.logger.warning(
                        "Message %r is left unacked at shutdown and will be redelivered: %s", message.message_id, error
                    )
                    stack = delivery_of(message).stack
                    if stack is not None:
                        stack.exit.left_behind.append(message.message_id)
                    return
                wait = min(wait * 2, _LONGEST_WAIT)
                continue
            except Exception:  # noqa: BLE001 - said by _unexpected
                self._unexpected(message)
                return
            return

    def _unexpected(self, message: MessageProxy) -> None:
        self.logger.error(
            "Message %r could not be acked or nacked: it stays unacked, and will be redelivered.",
            message.message_id,
            exc_info=True,  # noqa: LOG014 - called where an error is handled
        )

    def _later(self, thread: Any, message: MessageProxy) -> bool:
        if self.closing.is_set():
            return False
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dramatiq-guard-settler", daemon=True)
                self._thread.start()
        self._held.put((thread, message))
        return True

    def _run(self) -> None:
        """Try what is held in turns, so that one that cannot be settled holds up no other."""
        wait = _FIRST_WAIT
        waiting: list[tuple[Any, MessageProxy]] = []
        while not self.closing.is_set():
            if not waiting:
                held = self._held.get()
                if held is None:
                    return
                waiting.append(held)
            while not self._held.empty():
                held = self._held.get()
                if held is not None:
                    waiting.append(held)
            still = [each for each in waiting if not self._try(*each)]
            wait = _FIRST_WAIT if len(still) < len(waiting) else min(wait * 2, _LONGEST_WAIT)
            waiting = still
            if waiting:
                clock.wait(self.closing, wait)

    def _try(self, thread: Any, message: MessageProxy) -> bool:
        try:
            self._settle(thread, message)
        except BrokerConnectionError:
            return False
        except Exception:  # noqa: BLE001 - said by _unexpected
            self._unexpected(message)
        return True
