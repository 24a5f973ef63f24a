"""Tracing: every message's way, over all its attempts, as one trace.

The life of a message in it:

1. It is sent: a ``send`` span, and the span's context in the message's options.
2. It is processed: a ``process`` span below that, whose context the actor runs in.
3. The attempt ends, by a result, an error or a skip: the span says what was decided, and the context is left again.
4. The worker ends: what has been recorded is handed over, in a bounded time.

It is the outermost middleware, so that everything else happens inside its span.  What is exported, and how, is for
`dramatiq_guard.telemetry` to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .. import telemetry
from ..delivery import delivery_of
from ..errors import SetupError
from ..options import announced
from .base import GuardMiddleware

if TYPE_CHECKING:
    from dramatiq import Broker, Message, Worker
    from dramatiq.broker import MessageProxy
    from dramatiq.worker import ConsumerThread

__all__ = ["Tracing"]


class Tracing(GuardMiddleware):
    """Traces and counts messages with whatever OpenTelemetry SDK the process has; does next to nothing without one.

    `install` adds it by itself.

    Parameters:
      link_only(bool): Whether an attempt begins a trace of its own that links to the send's, instead of joining it.
        For messages that run long after they are sent, or by the thousand for one request.
      settle_spans(bool): Whether acks and nacks get spans too.
      flush_timeout(int): The number of milliseconds that the end of a worker may spend on handing telemetry over.

    Raises:
      SetupError: When `flush_timeout` is no number of milliseconds.
    """

    place: ClassVar[int] = 0

    def __init__(
        self,
        *,
        link_only: bool = False,
        settle_spans: bool = False,
        flush_timeout: int = telemetry.FLUSH_TIMEOUT,
    ) -> None:
        if isinstance(flush_timeout, bool) or not isinstance(flush_timeout, int) or flush_timeout < 0:
            raise SetupError(f"Tracing(flush_timeout=...) must be milliseconds, 0 or more, not {flush_timeout!r}.")
        self.link_only = link_only
        self.settle_spans = settle_spans
        self.flush_timeout = flush_timeout

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        telemetry.send_began(message, delay)

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        telemetry.send_ended(message)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        super().before_process_message(broker, message)
        telemetry.attempt_began(delivery_of(message), link_only=self.link_only)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        delivery = delivery_of(message)
        if delivery.span is None:
            return
        throws = None
        if exception is not None:
            actor = broker.actors.get(message.actor_name)
            throws = announced(message.options, {} if actor is None else actor.options)
        telemetry.attempt_ended(delivery, exception, throws=throws)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        telemetry.attempt_ended(delivery_of(message), skipped=True)

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:
        if self.settle_spans:
            telemetry.ack_began(delivery_of(message), "ack")

    def before_nack(self, broker: Broker, message: MessageProxy) -> None:
        if self.settle_spans:
            telemetry.ack_began(delivery_of(message), "nack")

    def after_ack(self, broker: Broker, message: MessageProxy) -> None:
        if self.settle_spans:
            telemetry.ack_ended(delivery_of(message))

    after_nack = after_ack

    def after_consumer_thread_boot(self, broker: Broker, thread: ConsumerThread) -> None:
        super().after_consumer_thread_boot(broker, thread)
        telemetry.promotes()

    def after_process_boot(self, broker: Broker) -> None:
        telemetry.boot()

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        super().before_worker_boot(broker, worker)
        # A `Worker()` that no command line made has no process boot (H12).
        telemetry.boot()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        super().after_worker_shutdown(broker, worker)
        telemetry.flush(self.flush_timeout)
