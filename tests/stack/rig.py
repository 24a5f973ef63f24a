"""A broker of any kind, with or without the stack, on which the same code is run; and what could be observed of it.

A scenario is written once, as a generator: it declares its actors, yields, sends, yields, and returns what it saw when
every message had come to its end.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dramatiq
import dramatiq.broker
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import xq_name
from dramatiq.middleware import (
    AgeLimit,
    AsyncIO,
    Callbacks,
    CurrentMessage,
    GroupCallbacks,
    Middleware,
    MiddlewareError,
    Pipelines,
    Retries,
    ShutdownNotifications,
    SkipMessage,
    TimeLimit,
)
from dramatiq.rate_limits.backends import RedisBackend as RedisRateLimits
from dramatiq.rate_limits.backends import StubBackend as StubRateLimits
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend as RedisResults
from dramatiq.results.backends import StubBackend as StubResults

from dramatiq_guard import Classify, DeadLetter, JitterBackoff, Tracing, install
from dramatiq_guard.middleware.base import GuardMiddleware
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from tests.support.waiting import wait_until

Scenario = Callable[["Rig"], Generator[None, None, Any]]

#: Short waits, so that a scenario of several retries ends within a second.
FAST: dict[str, Any] = {"min_backoff": 1, "max_backoff": 5}


class Watch(Middleware):
    """Counts the copies that were enqueued and those that were acked or nacked: equal numbers mean that all is over."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.enqueued = 0
        self.ended = 0
        self.ends: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way."""
        with self.lock:
            return self.enqueued <= self.ended

    def after_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
        with self.lock:
            self.enqueued += 1

    def after_ack(self, broker: Any, message: Any) -> None:
        self._end(message, "ack")

    def after_nack(self, broker: Any, message: Any) -> None:
        self._end(message, "nack")

    def _end(self, message: Any, how: str) -> None:
        with self.lock:
            self.ended += 1
            self.ends[message.message_id].append(how)


class Meddler(Middleware):
    """A user's own middleware: does to the messages of some actors what their names say, and notes the hooks of all."""

    def __init__(self) -> None:
        self.hooks: defaultdict[str, list[str]] = defaultdict(list)

    def before_process_message(self, broker: Any, message: Any) -> None:
        self._saw("before_process_message", message)
        if message.actor_name == "meddler.skips":
            raise SkipMessage("not today")
        if message.actor_name == "meddler.fails":
            message.fail()
        if message.actor_name == "meddler.skips_and_fails":
            message.fail()
            raise SkipMessage("never")
        if message.actor_name == "meddler.breaks":
            raise ValueError("a bug in a middleware")
        if message.actor_name == "meddler.refuses" and message.options.get("retries", 0) < 1:
            raise MiddlewareError("not now")

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        self._saw(f"after_process_message({type(exception).__name__ if exception else result!r})", message)

    def after_skip_message(self, broker: Any, message: Any) -> None:
        self._saw("after_skip_message", message)

    def before_delay_message(self, broker: Any, message: Any) -> None:
        self._saw("before_delay_message", message)

    def after_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
        self._saw("after_enqueue", message)

    def after_ack(self, broker: Any, message: Any) -> None:
        self._saw("after_ack", message)

    def after_nack(self, broker: Any, message: Any) -> None:
        self._saw("after_nack", message)

    def _saw(self, hook: str, message: Any) -> None:
        self.hooks[message.actor_name].append(hook)


@dataclass
class Rig:
    """What a scenario is given.

    Parameters:
      broker(Broker): The broker; nothing of it says whether the stack is on it.
      stack(bool): Whether it is.
      results(ResultBackend): Where results are stored.
      limits(RateLimiterBackend): Where rate limiters and barriers are kept.
    """

    broker: Any
    stack: bool
    results: Any = None
    limits: Any = None
    letters: MemoryDeadLetters | None = None
    watch: Watch = field(default_factory=Watch)
    meddler: Meddler = field(default_factory=Meddler)
    worker: dramatiq.Worker | None = None
    _notes: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def actor(self, fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Declare an actor on the broker, as `dramatiq.actor` does."""
        if fn is not None:
            return dramatiq.actor(fn, broker=self.broker)
        return dramatiq.actor(broker=self.broker, **options)

    def note(self, key: str, value: Any = None) -> int:
        """Write something down; the number of notes under this key so far."""
        with self._lock:
            self._notes[key].append(value)
            return len(self._notes[key])

    def notes(self, key: str) -> list[Any]:
        """What was written down, in order."""
        with self._lock:
            return list(self._notes[key])

    def count(self, key: str) -> int:
        """How often something was written down."""
        return len(self.notes(key))

    def ends(self, message: Any) -> Counter[str]:
        """How often copies of a message were acked and nacked."""
        return Counter(self.watch.ends[message.message_id])

    def work(self, *, threads: int = 8) -> dramatiq.Worker:
        """Start a worker."""
        self.broker.emit_after("process_boot")
        self.worker = dramatiq.Worker(self.broker, worker_timeout=20, worker_threads=threads)
        self.worker.start()
        return self.worker

    def settle(self, timeout: float = 30.0) -> None:
        """Wait until every message has come to its end."""
        wait_until(
            lambda: self.watch.quiet,
            timeout,
            lambda: f"{self.watch.enqueued} enqueued copies to end ({self.watch.ended}); {dict(self.watch.ends)}",
        )

    def dead(self) -> dict[str, int]:
        """How many messages of each actor lie among the broker's own dead letters."""
        return dict(Counter(message.actor_name for message in self.dead_messages()))

    def dead_messages(self, queue_name: str = "default") -> list[Any]:
        """The broker's own dead letters."""
        if isinstance(self.broker, StubBroker):
            return list(self.broker.dead_letters_by_queue[queue_name])
        name = xq_name(queue_name)
        if isinstance(self.broker, RedisBroker):
            bodies = self.broker.client.hvals(f"{self.broker.namespace}:{name}.msgs")
            return [dramatiq.Message.decode(body) for body in bodies]
        found = []
        channel = self.broker.connection.channel()
        while True:
            method, _, body = channel.basic_get(name)
            if method is None:
                break
            found.append(dramatiq.Message.decode(body))
        channel.close()
        return found

    def close(self) -> None:
        """Stop the worker and close the broker."""
        if self.worker is not None:
            self.worker.stop(timeout=5_000)
        self.broker.close()
        if isinstance(self.broker, RedisBroker):
            self.broker.client.connection_pool.disconnect()
        for backend in (self.results, self.limits):
            client = getattr(backend, "client", None)
            if hasattr(client, "connection_pool"):
                client.connection_pool.disconnect()


def stock_middleware() -> list[Middleware]:
    """Dramatiq's default middleware, with a time limit that is looked at more often."""
    return [AgeLimit(), TimeLimit(interval=20), ShutdownNotifications(), Callbacks(), Pipelines(), Retries()]


def guards(letters: MemoryDeadLetters) -> list[GuardMiddleware]:
    """The stack as a user would install it, with nothing about errors that stock Dramatiq does not know."""
    return [Classify(builtin=False), JitterBackoff(), DeadLetter(letters)]


def bare_broker(kind: str, url: str | None, middleware: Sequence[Any]) -> Any:
    """A broker of a kind with exactly these middlewares."""
    if kind == "stub":
        return StubBroker(middleware=list(middleware), fail_fast_default=False)
    if kind == "redis":
        return RedisBroker(url=url, middleware=list(middleware))  # type: ignore[no-untyped-call]
    return RabbitmqBroker(url=url, middleware=list(middleware), confirm_delivery=True)


def build(kind: str, way: str, url: str | None = None, extra: Iterable[Any] = ()) -> tuple[Rig, Callable[[], None]]:
    """A broker and what puts the stack on it.

    Parameters:
      kind(str): ``stub``, ``redis`` or ``rabbitmq``.
      way(str): ``stock``; ``install`` and ``late`` (actors first) for `install`; ``add`` for one `add_middleware` after
        the other; ``list`` for ``middleware=[…]``.
      url(str | None): Of the server.
      extra(Iterable): Middlewares of the user's own.

    Returns:
      tuple: The rig, and a function that installs the stack, to be called before or after actors are declared.
    """
    results: Any = RedisResults(url=url) if kind == "redis" else StubResults()
    limits: Any = RedisRateLimits(url=url) if kind == "redis" else StubRateLimits()
    letters = MemoryDeadLetters()
    watch, meddler = Watch(), Meddler()
    others = [CurrentMessage(), Results(backend=results), GroupCallbacks(limits), watch, meddler, *extra]

    def nothing() -> None:
        return None

    put_on: Callable[[], None] = nothing
    stock = stock_middleware()
    if way == "list":
        backs_off = JitterBackoff()
        middleware = [Tracing(), *stock[:-1], *others, DeadLetter(letters), backs_off, Classify(builtin=False)]
        broker = bare_broker(kind, url, middleware)
    elif way == "add":
        broker = bare_broker(kind, url, [*stock[:-1], *others])
        for guard in (DeadLetter(letters), JitterBackoff(), Classify(builtin=False)):
            broker.add_middleware(guard)
    else:
        broker = bare_broker(kind, url, [*stock, *others])
        if way != "stock":

            def put_on() -> None:
                install(broker, *guards(letters))

    rig = Rig(broker, way != "stock", results, limits, letters, watch, meddler)
    dramatiq.set_broker(broker)
    return rig, put_on


def observe(kind: str, way: str, scenarios: dict[str, Scenario], url: str | None = None) -> dict[str, Any]:
    """Run every scenario on one broker and say what each returned, or which error it met.

    Parameters:
      kind(str): The kind of broker.
      way(str): How the stack is put on it.
      scenarios(dict[str, Scenario]): What to run, at the same time.
      url(str | None): Of the server.

    Returns:
      dict[str, Any]: An outcome, or an exception, for each.
    """
    before = dramatiq.broker.global_broker
    rig, put_on = build(kind, way, url, extra=[AsyncIO()])
    seen: dict[str, Any] = {}
    running: dict[str, Generator[None, None, Any]] = {}
    if way != "late":
        put_on()
    try:
        for name, scenario in scenarios.items():
            running[name] = scenario(rig)
        _advance(running, seen)
        if way == "late":
            put_on()
        rig.work()
        _advance(running, seen)
        rig.settle()
        _advance(running, seen)
    finally:
        rig.close()
        dramatiq.broker.global_broker = before
    return seen


def _advance(running: dict[str, Generator[None, None, Any]], seen: dict[str, Any]) -> None:
    for name, steps in list(running.items()):
        try:
            next(steps)
        except StopIteration as end:
            seen[name] = end.value
        except Exception as error:
            seen[name] = error
        else:
            continue
        del running[name]


def spin(seconds: float = 10.0) -> None:
    """Keep a thread busy in Python, so that an interrupt arrives at once; an interrupt that never comes is an error."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.001)
    raise AssertionError("nobody interrupted this")


def unique(prefix: str) -> str:
    """A name that no other test uses."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"
