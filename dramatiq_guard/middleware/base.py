"""What every guard middleware is: a Dramatiq middleware that joins the stack of the broker it was added to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from dramatiq.middleware import Middleware

from ..delivery import delivery_of
from ..options import check_actor
from ..seam import wrap
from ..settle.worker_thread import adopt
from ..wiring import begin, boot, stack_of

if TYPE_CHECKING:
    from dramatiq import Actor, Broker
    from dramatiq.broker import MessageProxy
    from dramatiq.worker import ConsumerThread, Worker, WorkerThread

__all__ = ["GuardMiddleware"]


class GuardMiddleware(Middleware):
    """Joins the stack: checks actors' options, puts the seam on their functions, wires the worker at its boot.

    A subclass that overrides one of these hooks calls ``super()`` first.
    """

    #: The place in the stack, from the outside in; see `dramatiq_guard.stack`.
    place: ClassVar[int]

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        check_actor(actor)

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        wrap(actor)

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        boot(broker, worker)

    def after_consumer_thread_boot(self, broker: Broker, thread: ConsumerThread) -> None:
        stack_of(broker).adopt(thread)

    def after_worker_thread_boot(self, broker: Broker, thread: WorkerThread) -> None:
        adopt(thread)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        stack_of(broker).shut_down()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        stack_of(broker).stop()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        if not delivery_of(message).began:
            begin(broker, message)
