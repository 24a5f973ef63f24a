"""What a worker thread does with a message, around Dramatiq's own: no interrupt ends the thread, or tears the end.

An exception that is no `Exception` may hit any hook or log line of a delivery: another middleware raises it in the
thread, as those that abort messages do.  Dramatiq's worker thread dies of it, silently, and the message is acked (H4).
So each worker thread is adopted when it boots:

1. What escapes from processing is logged, and the thread goes on.
2. The end of the message that was torn is done again: what is owed is marked done part by part, an ack is sent once.
3. An interrupt that was raised but has not arrived when the message is over is taken back: it was meant for this one.
4. Once the process has begun to end, no message is begun any more: it goes back.

This module must not know any middleware, store or broker.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from dramatiq.logging import get_logger

from .. import host
from ..delivery import delivery_of, let_go

if TYPE_CHECKING:
    from dramatiq.broker import MessageProxy

__all__ = ["adopt"]

#: How often the torn end of a message is tried again before the message is left for the broker to redeliver.
_TRIES: Final = 5


def adopt(thread: Any) -> None:
    """Put our own processing in place of a worker thread's.

    Parameters:
      thread(WorkerThread): The thread that boots.
    """
    thread.process_message = partial(_process, thread)


def _process(thread: Any, message: MessageProxy) -> None:
    """Process a message; in place of `WorkerThread.process_message`."""
    delivery = delivery_of(message)
    if delivery.stack is not None and delivery.stack.draining:
        # Taken in the very moment in which the end began.
        delivery.stack.exit.take_back(message)
        thread.work_queue.task_done()
        return
    try:
        type(thread).process_message(thread, message)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it was not meant for the thread
        _finish(thread, message, error)
    with suppress(BaseException):  # one more may arrive in here
        host.clear_interrupt()
        if delivery.ended and delivery.acked:
            # One that could not be acked may yet be, when its message comes again (see `underway`).
            let_go(delivery)


def _finish(thread: Any, message: MessageProxy, error: BaseException) -> None:
    """Do the rest of what Dramatiq does with a message after its hooks."""
    delivery = delivery_of(message)
    reported = False
    for _ in range(_TRIES):
        try:
            if not reported:
                reported = True
                get_logger("dramatiq_guard", "worker_thread").error(
                    "Message %r: a hook was hit by %r; its end is done again.",
                    message.message_id,
                    type(error).__name__,
                    exc_info=error,
                )
            if not delivery.ended:
                thread.consumers[message.queue_name].post_process_message(message)
                # What Dramatiq does after it, and could not.
                thread.work_queue.task_done()
                message.clear_exception()
        except BaseException:  # noqa: BLE001, S112 - another one: the loop goes on
            continue
        else:
            return
    get_logger("dramatiq_guard", "worker_thread").critical(
        "Message %r could not be settled, since each try was interrupted: it stays unacked, and will be redelivered.",
        message.message_id,
    )
