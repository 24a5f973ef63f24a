"""A stock broker, real worker threads and a recorder of every hook: the bench on which the host's facts are observed.

It must not know the package under test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import dramatiq
from dramatiq.broker import Broker, MessageProxy
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import dq_name
from dramatiq.middleware import Middleware

from tests.support.waiting import wait_until


class Sabotage(BaseException):
    """An interruption as Dramatiq's own: not an Exception, so no ``except Exception`` stops it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one hook."""

    hook: str
    label: str
    thread: threading.Thread
    subject: Any
    details: dict[str, Any]


class Recorder(Middleware):
    """Writes down every message hook, and raises what it is told to raise in one."""

    def __init__(self, label: str = "", journal: list[Call] | None = None) -> None:
        self.label = label
        self.journal: list[Call] = [] if journal is None else journal
        self.actions: dict[str, Callable[[Any], None]] = {}

    def on(self, hook: str, action: Callable[[Any], None]) -> Recorder:
        """Run *action* with the hook's message, after the call was recorded."""
        self.actions[hook] = action
        return self

    def raising(self, hook: str, exception: BaseException, *, times: int | None = None) -> Recorder:
        """Raise *exception* from *hook*, for ever or only the first *times*."""
        left = [times]

        def action(_: Any) -> None:
            if left[0] is None or left[0] > 0:
                left[0] = None if left[0] is None else left[0] - 1
                raise exception

        return self.on(hook, action)

    def record(self, hook: str, subject: Any, **details: Any) -> None:
        """Note the call, then do what was asked of this hook."""
        self.journal.append(Call(hook, self.label, threading.current_thread(), subject, details))
        if hook in self.actions:
            self.actions[hook](subject)

    def hooks(self, message_id: str | None = None) -> list[str]:
        """Return the names of the hooks so far, in order, of one message or of all."""
        return [c.hook for c in self.journal if message_id is None or c.subject.message_id == message_id]

    def calls(self, hook: str) -> list[Call]:
        """Return the calls of one hook."""
        return [c for c in self.journal if c.hook == hook]

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:
        self.record("before_ack", message, failed=message.failed)

    def after_ack(self, broker: Broker, message: MessageProxy) -> None:
        self.record("after_ack", message)

    def before_nack(self, broker: Broker, message: MessageProxy) -> None:
        self.record("before_nack", message, exception=message._exception)

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        self.record("after_nack", message)

    def before_enqueue(self, broker: Broker, message: Any, delay: int | None) -> None:
        self.record("before_enqueue", message, delay=delay, queue=message.queue_name)

    def after_enqueue(self, broker: Broker, message: Any, delay: int | None) -> None:
        self.record("after_enqueue", message, delay=delay)

    def before_delay_message(self, broker: Broker, message: MessageProxy) -> None:
        self.record("before_delay_message", message)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self.record("before_process_message", message)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self.record("after_process_message", message, result=result, exception=exception, failed=message.failed)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self.record("after_skip_message", message)


class Bench:
    """A StubBroker with exactly the middlewares asked for, and a worker on request."""

    def __init__(self, middleware: Iterable[Middleware]) -> None:
        self.broker = StubBroker(middleware=list(middleware), fail_fast_default=False)
        self.worker: dramatiq.Worker | None = None

    def actor(self, fn: Callable[..., Any], **options: Any) -> Any:
        """Declare *fn* as an actor of this broker."""
        return dramatiq.actor(broker=self.broker, **options)(fn)

    def boot_process(self) -> None:
        """Say what the command line says to the middlewares of a fresh worker process, and a bare worker does not."""
        self.broker.emit_after("process_boot")

    def work(self, *, threads: int = 2) -> dramatiq.Worker:
        """Start a worker."""
        self.worker = dramatiq.Worker(self.broker, worker_timeout=50, worker_threads=threads)
        self.worker.start()
        return self.worker

    def unsettled(self, queue_name: str = "default") -> int:
        """Return how many messages of the queue were neither acked nor nacked."""
        return sum(int(self.broker.queues[name].unfinished_tasks) for name in (queue_name, dq_name(queue_name)))

    def drain(self, queue_name: str = "default") -> None:
        """Wait until every message of the queue was acked or nacked and every worker thread is done with it."""
        wait_until(lambda: self.unsettled(queue_name) == 0)
        assert self.worker is not None
        worker = self.worker
        wait_until(lambda: worker.work_queue.unfinished_tasks == 0 or not any(w.is_alive() for w in worker.workers))

    def stop(self) -> None:
        """End the worker's threads; a thread that died already is no hindrance."""
        if self.worker is not None:
            self.worker.stop(timeout=2_000)
        self.broker.close()
