"""Every private name of Dramatiq that the library touches, each pinned by a test.

When upstream moves one of them, this is the file to mend; `tests/host_facts` fails first and says which.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

from dramatiq.asyncio import get_event_loop_thread, set_event_loop_thread
from dramatiq.common import q_name
from dramatiq.middleware import SkipMessage
from dramatiq.threading import is_gevent_active, raise_thread_exception

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Broker, Message
    from dramatiq.broker import Consumer, MessageProxy

__all__ = [
    "DELAY_SUFFIX",
    "FAILURE_LOG_TEXT",
    "SKIP_LOG_TEXT",
    "WORKER_LOGGER",
    "canonical_queue",
    "clear_interrupt",
    "delay_consumer",
    "is_gevent_active",
    "kind_of",
    "promoted",
    "publishes_unconfirmed",
    "raise_thread_exception",
    "redis_message_id",
    "skipped_by_age_limit",
    "stop_event_loop",
    "wrap_consume",
]

#: The logger through which worker threads report failures before any middleware sees the error.
WORKER_LOGGER: Final = "dramatiq.worker.WorkerThread"
#: What it says of a failure, and of a skip.
FAILURE_LOG_TEXT: Final = "Failed to process message %s with unhandled exception."
SKIP_LOG_TEXT: Final = "Message %s was skipped."

#: The ending of a delay queue's name.
DELAY_SUFFIX: Final = ".DQ"

_AGE_LIMIT_TEXT: Final = "Message age limit exceeded"


def canonical_queue(queue_name: str) -> str:
    """The name of the queue itself, for the name of its delay queue too."""
    return q_name(queue_name)


def kind_of(broker: Broker) -> str:
    """Which broker this is, by the modules of its class: ``redis``, ``rabbitmq``, ``stub`` or ``other``.

    By name, so that no client library is imported for it; subclasses count as what they derive from.
    """
    for cls in type(broker).__mro__:
        if cls.__module__ == "dramatiq.brokers.redis":
            return "redis"
        if cls.__module__ == "dramatiq.brokers.rabbitmq":
            return "rabbitmq"
        if cls.__module__ == "dramatiq.brokers.stub":
            return "stub"
    return "other"


def publishes_unconfirmed(broker: Broker) -> bool:
    """Whether this is a RabbitMQ broker that does not wait for the server to confirm what it publishes."""
    return kind_of(broker) == "rabbitmq" and not getattr(broker, "confirm_delivery", True)


def redis_message_id(message: MessageProxy) -> str | None:
    """The id under which the Redis broker keeps this copy of the message; new for every copy (H8)."""
    value = message.options.get("redis_message_id")
    return value if isinstance(value, str) else None


def wrap_consume(broker: Broker, wrap: Callable[[Consumer, str], Consumer]) -> None:
    """Let every consumer that the broker makes from now on pass through `wrap`; a second call replaces the first."""
    inner = broker.__dict__.get("_dramatiq_guard_consume")
    if inner is None:
        inner = broker.consume
        broker.__dict__["_dramatiq_guard_consume"] = inner

    def consume(queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        return wrap(inner(queue_name=queue_name, prefetch=prefetch, timeout=timeout), queue_name)

    broker.consume = consume  # type: ignore[method-assign]


def promoted(message: MessageProxy) -> Message[Any]:
    """The copy of a delayed message that goes to its queue when it has fallen due, as Dramatiq makes it."""
    copy: Message[Any] = message.copy(queue_name=q_name(message.queue_name))
    copy.options.pop("eta", None)
    return copy


def delay_consumer(queue_name: str) -> bool:
    """Whether a consumer of this queue handles delayed copies, which are promoted, never processed (H10)."""
    return queue_name.endswith(DELAY_SUFFIX)


def skipped_by_age_limit(exception: BaseException | None) -> bool:
    """Whether this is how Dramatiq's AgeLimit skips an expired message; it leaves no other trace."""
    return isinstance(exception, SkipMessage) and str(exception) == _AGE_LIMIT_TEXT


def clear_interrupt(thread_id: int) -> None:
    """Take back an exception that was raised in a thread but has not arrived yet (H5).

    Unregistering alone is not enough: 200 of 200 late interrupts still arrived without this, none with it.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), None)


def stop_event_loop() -> None:
    """End the event loop thread of AsyncIO: it is no daemon, and a boot that fails after it has started would hang."""
    thread = get_event_loop_thread()
    if thread is not None:
        thread.stop()
        thread.join(timeout=5)
        set_event_loop_thread(None)
