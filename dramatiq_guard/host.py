"""Every private name of Dramatiq that the library touches, each pinned by a test.

When upstream moves one of them, this is the file to mend; `tests/host_facts` fails first and says which.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from threading import Event, get_ident
from typing import TYPE_CHECKING, Any, Final

from dramatiq import Message
from dramatiq.asyncio import get_event_loop_thread, set_event_loop_thread
from dramatiq.common import dq_name, q_name
from dramatiq.errors import ConnectionClosed, DecodeError
from dramatiq.middleware import SkipMessage
from dramatiq.threading import is_gevent_active, raise_thread_exception

from . import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dramatiq import Broker
    from dramatiq.broker import Consumer, MessageProxy

__all__ = [
    "DELAY_SUFFIX",
    "FAILURE_LOG_TEXT",
    "SKIP_LOG_TEXT",
    "WORKER_LOGGER",
    "canonical_queue",
    "clear_interrupt",
    "delay_consumer",
    "enqueue_once",
    "enter_command_line_worker",
    "event_loop_is_blocked",
    "in_command_line_worker",
    "is_command_line_handler",
    "is_gevent_active",
    "kind_of",
    "promoted",
    "publishes_unconfirmed",
    "rabbitmq_bound_client",
    "rabbitmq_publish_once",
    "rabbitmq_undecodable",
    "raise_thread_exception",
    "redis_ack",
    "redis_ack_set",
    "redis_acks_as_stock",
    "redis_bound_client",
    "redis_copy",
    "redis_hand_back",
    "redis_maintain",
    "redis_message_id",
    "redis_messages",
    "redis_move",
    "redis_note",
    "redis_noted",
    "redis_parts",
    "redis_send_part",
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


def enqueue_once(broker: Any, message: Message[Any], delay: int | None = None) -> None:
    """Enqueue a message in one try, however often the broker would try by itself."""
    if kind_of(broker) == "rabbitmq":
        rabbitmq_publish_once(broker, message, delay)
    else:
        broker.enqueue(message, delay=delay)


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


class _Cleared(BaseException):
    """Takes the place of an interrupt that is taken back."""


def clear_interrupt() -> None:
    """Take back an exception that was raised in this thread but has not arrived yet (H5).

    Unregistering alone is not enough: 200 of 200 late interrupts still arrived without this, none with it.  A thread
    has room for one: ours takes its place, and is let arrive here.  (Clearing it with NULL leaves CPython 3.11 looking
    for it for ever in a thread that is traced, as under coverage or a debugger.)
    """
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(get_ident()), ctypes.py_object(_Cleared))
        for _ in range(10_000):
            pass
    except _Cleared:
        pass


def is_command_line_handler(handler: object) -> bool:
    """Whether this is the signal handler that a worker process of the dramatiq command installs before it boots."""
    return getattr(handler, "__qualname__", "") == "worker_process.<locals>.termhandler"


def in_command_line_worker() -> bool:
    """Whether this is a worker process of the dramatiq command, whose end is ours; set when it boots."""
    return _COMMAND_LINE_WORKER.is_set()


def enter_command_line_worker() -> None:
    """Take note that this is a worker process of the dramatiq command."""
    _COMMAND_LINE_WORKER.set()


_COMMAND_LINE_WORKER: Final = Event()


def stop_event_loop() -> None:
    """End the event loop thread of AsyncIO: it is no daemon, and a boot that fails after it has started would hang."""
    thread = get_event_loop_thread()
    if thread is not None:
        thread.stop()
        thread.join(timeout=5)
        set_event_loop_thread(None)


def event_loop_is_blocked() -> bool:
    """Whether the event loop of async actors runs and does not come round: a coroutine blocks it."""
    thread = get_event_loop_thread()
    if thread is None or not thread.is_alive():
        return False
    round_ = Event()
    try:
        thread.loop.call_soon_threadsafe(round_.set)
    except RuntimeError:  # it has been closed just now
        return False
    return not round_.wait(0.2)


# -- Redis -----------------------------------------------------------------------------------------------------------

#: Takes a message out of this process's ack set, or does nothing if it is not ours any more.  It writes the keys that
#: Dramatiq's own dispatch script writes for an ack.
_ACK: Final = """
if redis.call("srem", KEYS[1], ARGV[1]) == 0 then
    return 0
end
redis.call("hdel", KEYS[2], ARGV[1])
return 1
"""

#: Takes a message out of this process's ack set and puts its successor on a queue, or does nothing if it is not ours
#: any more.  It writes the keys that Dramatiq's own dispatch script writes for an ack and an enqueue.
_MOVE: Final = """
if redis.call("srem", KEYS[1], ARGV[1]) == 0 then
    return 0
end
redis.call("hdel", KEYS[2], ARGV[1])
redis.call("hset", KEYS[3], ARGV[2], ARGV[3])
redis.call("rpush", KEYS[4], ARGV[2])
return 1
"""


#: Sends a part of a message's end, if the message is still ours and the part has not been sent before.  What has been
#: sent is noted beside the message, so that neither a lost reply nor a crash before the ack sends it twice.
_SEND_PART: Final = """
if redis.call("sismember", KEYS[1], ARGV[1]) == 0 then
    return 0
end
if redis.call("sadd", KEYS[2], ARGV[2]) == 0 then
    return 0
end
redis.call("pexpire", KEYS[2], ARGV[5])
redis.call("hset", KEYS[3], ARGV[3], ARGV[4])
redis.call("rpush", KEYS[4], ARGV[3])
return 1
"""

#: How long, in milliseconds, it is noted which parts were sent.  A crashed worker's message comes back long before.
_PARTS_KEPT: Final = 86_400_000

_SCRIPTS: Final = "_dramatiq_guard_scripts"


def redis_run_id(broker: Any) -> str | None:
    """Which server the broker's Redis is; ``None`` if it does not say."""
    try:
        return str(broker.client.info("server")["run_id"])
    except Exception:  # noqa: BLE001 - it is out of reach, or INFO is forbidden
        return None


def redis_ack_set(broker: Any, queue_name: str) -> str:
    """The key of the set of ids that this process has fetched from a queue and not settled."""
    return f"{broker.namespace}:__acks__.{broker.broker_id}.{queue_name}"


def redis_messages(broker: Any, queue_name: str) -> str:
    """The key of the hash of a queue's message bodies."""
    return f"{broker.namespace}:{queue_name}.msgs"


def redis_copy(message: Message[Any], delay: int | None) -> tuple[Message[Any], str]:
    """A message as RedisBroker.enqueue would write it, and the queue or delay queue that it goes to."""
    options: dict[str, Any] = {"redis_message_id": clock.unique()}
    queue_name = message.queue_name
    if delay is not None:
        queue_name = dq_name(queue_name)
        options["eta"] = clock.now() + delay
    return _readdressed(message, queue_name, {**message.options, **options}), queue_name


def redis_promoted(message: MessageProxy) -> Message[Any]:
    """The copy of a delayed message that goes to its queue when it has fallen due, as RedisBroker would write it."""
    options = {**message.options, "redis_message_id": clock.unique()}
    options.pop("eta", None)
    return _readdressed(message._message, q_name(message.queue_name), options)


def _readdressed(message: Message[Any], queue_name: str, options: dict[str, Any]) -> Message[Any]:
    """A copy of a message; `Message.copy` looks each field up by its name, which takes three times as long."""
    return Message(
        queue_name,
        message.actor_name,
        message.args,
        message.kwargs,
        options,
        message.message_id,
        message.message_timestamp,
    )


def redis_acks_as_stock(consumer: Any) -> bool:
    """Whether a consumer's ack is Dramatiq's own, which removes the message and does nothing else."""
    from dramatiq.brokers.redis import _RedisConsumer

    return getattr(type(consumer), "ack", None) is _RedisConsumer.ack


def redis_ack(broker: Any, queue_name: str, redis_message_id: str) -> bool:
    """Remove a message that this process holds; without the heartbeat that Dramatiq writes with each ack.

    Returns:
      bool: Whether it was still held.
    """
    keys = (redis_ack_set(broker, queue_name), redis_messages(broker, queue_name))
    return bool(_script(broker, _ACK)(keys, (redis_message_id,)))


def redis_move(
    broker: Any, from_queue: str, redis_message_id: str, to_queue: str, new_redis_message_id: str, body: bytes
) -> bool:
    """Replace a message that this process holds by its successor, in one step.

    Returns:
      bool: Whether it was still held.
    """
    keys = (
        redis_ack_set(broker, from_queue),
        redis_messages(broker, from_queue),
        redis_messages(broker, to_queue),
        f"{broker.namespace}:{to_queue}",
    )
    return bool(_script(broker, _MOVE)(keys, (redis_message_id, new_redis_message_id, body)))


def _script(broker: Any, source: str) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    script: Callable[[Sequence[Any], Sequence[Any]], Any] = _scripts(broker)[source]
    return script


def _scripts(broker: Any) -> Any:
    scripts = broker.__dict__.get(_SCRIPTS)
    if scripts is None:
        from .settle.redis_scripts import Scripts

        scripts = broker.__dict__.setdefault(_SCRIPTS, Scripts(broker.client))
    return scripts


def redis_parts(broker: Any, redis_message_id: str) -> str:
    """The key of the set of parts of a message's end that were sent."""
    return f"{broker.namespace}:__guard__.{redis_message_id}"


def redis_send_part(
    broker: Any,
    from_queue: str,
    redis_message_id: str,
    part: str,
    to_queue: str,
    new_redis_message_id: str,
    body: bytes,
) -> bool:
    """Send a part of a message's end, once.

    Returns:
      bool: Whether it was sent now.
    """
    keys = (
        redis_ack_set(broker, from_queue),
        redis_parts(broker, redis_message_id),
        redis_messages(broker, to_queue),
        f"{broker.namespace}:{to_queue}",
    )
    arguments = (redis_message_id, part, new_redis_message_id, body, _PARTS_KEPT)
    return bool(_script(broker, _SEND_PART)(keys, arguments))


def redis_noted(broker: Any, redis_message_id: str) -> frozenset[str]:
    """The parts of a message's end that have been noted as done, by this delivery of it or an earlier one."""
    members = broker.client.smembers(redis_parts(broker, redis_message_id))
    return frozenset(each.decode() if isinstance(each, bytes) else each for each in members)


def redis_note(broker: Any, redis_message_id: str, part: str) -> None:
    """Note a part of a message's end as done."""
    key = redis_parts(broker, redis_message_id)
    with broker.client.pipeline() as pipeline:
        pipeline.sadd(key, part).pexpire(key, _PARTS_KEPT).execute()


#: Returns messages that this process holds to the head of their queue, the first of them first.
_HAND_BACK: Final = """
local back = 0
for i = #ARGV, 1, -1 do
    if redis.call("srem", KEYS[1], ARGV[i]) > 0 and redis.call("hexists", KEYS[2], ARGV[i]) > 0 then
        redis.call("lpush", KEYS[3], ARGV[i])
        back = back + 1
    end
end
return back
"""


def redis_hand_back(broker: Any, queue_name: str, ids: list[str]) -> int:
    """Return messages that this process holds to the head of their queue, in their order.

    Returns:
      int: How many of them were still held.
    """
    script = broker.__dict__.get("_dramatiq_guard_hand_back")
    if script is None:
        script = broker.__dict__["_dramatiq_guard_hand_back"] = broker.client.register_script(_HAND_BACK)
    keys = [
        redis_ack_set(broker, queue_name),
        redis_messages(broker, queue_name),
        f"{broker.namespace}:{queue_name}",
    ]
    # From the end, so that the first ones come to lie before the others.
    return sum(int(script(keys=keys, args=ids[max(0, end - 500) : end])) for end in range(len(ids), 0, -500))


def redis_maintain(broker: Any, queue_name: str, *, reclaiming: bool = True) -> None:
    """Write this process's heartbeat, and return to the queue what dead workers held of it, if asked to.

    Any command does both when the script is told to; one that it does not know does nothing else.
    """
    broker.scripts["dispatch"](
        args=[
            "maintain",
            clock.now(),
            queue_name,
            broker.broker_id,
            broker.heartbeat_timeout,
            broker.dead_message_ttl,
            int(reclaiming),
            broker._max_unpack_size(),
        ],
        keys=[broker.namespace],
    )


def redis_bound_client(broker: Any) -> None:
    """Give the broker's client timeouts where it has none, and take its hidden retries away.

    A reply that is lost makes a client that retries by itself send a command again, up to ten times, behind the back of
    whoever counts.
    """
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    pool = broker.client.connection_pool
    for name, seconds in (("socket_timeout", 5), ("socket_connect_timeout", 2)):
        if pool.connection_kwargs.get(name) is None:
            pool.connection_kwargs[name] = seconds
    broker.client.set_retry(Retry(NoBackoff(), 0))
    pool.disconnect(inuse_connections=False)
    # Fetches, nacks and what actors send cost as much as acks and retries do.
    dispatch = broker.scripts["dispatch"]
    if hasattr(dispatch, "sha"):
        broker.scripts["dispatch"] = _scripts(broker).keeping(dispatch)


# -- RabbitMQ --------------------------------------------------------------------------------------------------------


_BLOCKED: Final = "_dramatiq_guard_blocked"

#: A queue that there is not: what is published to it is confirmed and dropped.
_NOWHERE: Final = "dramatiq_guard.nowhere"


def rabbitmq_bound_client(broker: Any) -> None:
    """Let no publish wait for ever on a server that has run out of memory."""
    parameters = broker.parameters if isinstance(broker.parameters, list) else [broker.parameters]
    for each in parameters:
        if each.blocked_connection_timeout is None:
            each.blocked_connection_timeout = 10


def rabbitmq_publish_once(broker: Any, message: Message[Any], delay: int | None) -> None:
    """Publish a message as RabbitmqBroker.enqueue does, but once.

    Dramatiq publishes up to six times by itself, so that a confirm that is lost multiplies the copies.
    """
    import pika

    canonical = queue_name = message.queue_name
    if delay is not None:
        queue_name = dq_name(queue_name)
        message = message.copy(queue_name=queue_name, options={"eta": clock.now() + delay})
    with _rabbitmq_reached(broker, canonical):
        _rabbitmq_reconnect(broker)
        _rabbitmq_probe(broker)
        broker.declare_queue(canonical, ensure=True)
    broker.emit_before("enqueue", message, delay)
    body = message.encode()
    with _rabbitmq_reached(broker, canonical):
        broker.channel.basic_publish(
            exchange="",
            routing_key=queue_name,
            body=body,
            properties=pika.BasicProperties(delivery_mode=2, priority=message.options.get("broker_priority")),
            mandatory=broker.confirm_delivery,
        )
    broker.emit_after("enqueue", message, delay)


@contextmanager
def _rabbitmq_reached(broker: Any, canonical_queue: str) -> Iterator[None]:
    """Let whatever pika raises count as a lost connection, and open this thread's anew the next time."""
    import pika

    try:
        yield
    except Exception as error:
        # Not only its own errors: a connection that broke at a bad moment raises ValueError or AssertionError, too.
        if isinstance(error, pika.exceptions.UnroutableError):
            broker.queues_pending.add(canonical_queue)
        if isinstance(error, pika.exceptions.ConnectionBlockedTimeout):
            broker.__dict__[_BLOCKED] = True
        _rabbitmq_hang_up(broker)
        raise ConnectionClosed(error) from error


def _rabbitmq_reconnect(broker: Any) -> None:
    """Open this thread's connection anew if the server has closed it while nobody listened.

    A publish into a connection that is gone fails as one does whose confirm was lost, and would be made twice.
    """
    connection = broker.connection
    try:
        if connection.is_open:
            connection.process_data_events(time_limit=0)
        usable = connection.is_open and broker.channel.is_open
    except Exception:  # noqa: BLE001 - as above
        usable = False
    if not usable:
        _rabbitmq_hang_up(broker)


def _rabbitmq_hang_up(broker: Any) -> None:
    """Have this thread's connection opened anew the next time."""
    for _ in range(2):
        try:
            del broker.connection
        except KeyError:
            # A channel that broke as it was opened: Dramatiq had not noted it yet, and has let go of it only now.
            continue
        return


def _rabbitmq_probe(broker: Any) -> None:
    """While the server is out of memory or disk, publish nothing that anybody would miss.

    It stops reading from a connection that publishes, and carries out what it has not read when the alarm is over,
    though the connection be long gone: each publish that was given up would come true, and add to what it is short of.
    """
    if broker.confirm_delivery and broker.__dict__.get(_BLOCKED):
        # With a body: what has none is taken all the same.
        broker.channel.basic_publish(exchange="", routing_key=_NOWHERE, body=b"probe", mandatory=False)
        broker.__dict__.pop(_BLOCKED, None)


def rabbitmq_undecodable(consumer: Any, bury: Callable[[DecodeError], object]) -> None:
    """Be told of what a consumer cannot decode: it nacks it before anybody sees it, in the handling of the error.

    Parameters:
      consumer(Consumer): Dramatiq's consumer.
      bury(Callable[[DecodeError], object]): Called before the nack; if it raises, the message stays unacked.
    """
    nack = consumer._nack

    def bury_and_nack(tag: int) -> None:
        error = sys.exception()
        if isinstance(error, DecodeError):
            bury(error)
        nack(tag)

    consumer._nack = bury_and_nack
