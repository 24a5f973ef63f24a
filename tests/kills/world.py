"""One broker, one store, one gateway, the processes at them, and the accounts: charges, rows, runs, what is left."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from dramatiq import Message
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results.backends import RedisBackend

from dramatiq_guard.policy.keys import MESSAGE, canonical, stored_key
from dramatiq_guard.settle.killpoints import VARIABLE
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import Record
from dramatiq_guard.stores.postgres.schema import apply_schema
from tests.settlement.rabbitmq_world import unsettled
from tests.settlement.redis_world import Keys
from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.waiting import wait_until
from tests.support.workers import Workers

from .gateway import Gateway

__all__ = ["HEARTBEAT", "LEASE", "Servers", "World", "world"]

APP = "tests.kills.app"

#: The lease, and the broker's heartbeat timeout on Redis, in milliseconds.
LEASE, HEARTBEAT = 1_500, 3_000

#: Erlang is asked by one at a time: whoever asks is a node, and all such nodes have one name.
_ASKING = threading.Lock()

#: Seconds that whatever is waited for may take on a busy machine.
LONG = 60.0


@dataclass(frozen=True, slots=True)
class Servers:
    """Where everything is.

    Parameters:
      redis(str): The broker's Redis.
      records(str): The Redis of letters, deliveries and results.
      store_redis(str): The Redis of the keys, another one than the broker's.
      postgres(str): An empty database.
      rabbitmq(PrivateRabbitMQ | None): The RabbitMQ, where it is needed.
    """

    redis: str
    records: str
    store_redis: str
    postgres: str = ""
    rabbitmq: PrivateRabbitMQ | None = None

    def prepare(self) -> Servers:
        """Make the tables."""
        if self.postgres:
            apply_schema(self.postgres)
            with psycopg.connect(self.postgres, autocommit=True) as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS effects (world text, job text)")
        return self

    def store(self, kind: str) -> str:
        return self.store_redis if kind == "redis" else self.postgres


@dataclass(slots=True)
class World:
    """A broker with some queues, the store of keys, and the processes at them."""

    servers: Servers
    kind: str
    url: str
    queues: tuple[str, ...]
    directory: Path
    gateway: Gateway
    environment: dict[str, str]
    broker: Any
    stores: Any
    records: Any
    results: RedisBackend
    logs: list[str] = field(default_factory=list)

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, actor: str, job: str, *args: Any, queue: str = "", delay: int | None = None) -> Message[Any]:
        """Send a job to a queue, the first one unless it is said."""
        message: Message[Any] = Message(queue or self.queues[0], actor, (job, *args), {}, {})
        self.broker.enqueue(message, delay=delay)
        return message

    def again(self, message: Message[Any], queue: str = "") -> None:
        """Send the same message, by its id, once more."""
        self.broker.enqueue(message.copy(queue_name=queue or message.queue_name))

    def open(self) -> None:
        """Let all jobs that wait, or would, go on."""
        (self.directory / "open").touch()

    # -- processes ---------------------------------------------------------------------------------------------------

    def workers(
        self,
        *,
        threads: int = 2,
        queues: Sequence[str] = (),
        arguments: Sequence[str] = (),
        kill_at: str = "",
        **environment: str,
    ) -> Workers:
        """A command at these queues, not yet started; `kill_at` is where it dies."""
        temporary = self.directory / uuid.uuid4().hex  # crashes soon after a boot are remembered there: each its own
        temporary.mkdir()
        return Workers(
            APP,
            threads=threads,
            queues=queues,
            arguments=arguments,
            ready_within=LONG,
            env={**self.environment, "TMPDIR": str(temporary), VARIABLE: kill_at, **environment},
        )

    def die(
        self,
        point: str,
        send: Callable[[], Message[Any]],
        *,
        threads: int = 1,
        queues: Sequence[str] = (),
        **environment: str,
    ) -> Message[Any]:
        """Have a worker process run what is sent until it is killed at a point, and give the message."""
        # Not before it has booted: killed on the way, it may take the lock along that its master waits for.
        with self.workers(kill_at=point, threads=threads, queues=queues, **environment) as workers:
            message = send()
            assert workers.wait(LONG) == 1, workers.log
            self.logs.append(workers.log)
        return message

    @contextlib.contextmanager
    def working(self, **options: Any) -> Iterator[Workers]:
        """Have a healthy process at work."""
        with self.workers(**options) as workers:
            try:
                yield workers
            finally:
                self.logs.append(workers.log)

    # -- accounts ----------------------------------------------------------------------------------------------------

    def noted(self, what: str, job: str = "") -> list[str]:
        """The lines of a kind that jobs wrote to the ledger."""
        ledger = self.directory / "ledger"
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        return [
            line for line in lines if line.split(" ")[0].startswith(what) and (not job or line.split(" ")[1] == job)
        ]

    def runs(self, job: str) -> int:
        """How often a job has begun."""
        return len(self.noted("began", job))

    def wait_noted(self, what: str, times: int = 1, job: str = "") -> list[str]:
        """Wait until there are so many lines of a kind in the ledger."""
        wait_until(lambda: len(self.noted(what, job)) >= times, LONG, lambda: f"{times} times {what}:\n{self.story}")
        return self.noted(what, job)

    def rows(self) -> Counter[str]:
        """How many rows each job has committed."""
        with psycopg.connect(self.servers.postgres, autocommit=True) as connection:
            mine = (self.environment["KILLS_NAMESPACE"],)
            return Counter(job for (job,) in connection.execute("SELECT job FROM effects WHERE world = %s", mine))

    def record(self, message: Message[Any]) -> Record | None:
        """What the store knows of a message's key."""
        name = stored_key("default", message.actor_name, MESSAGE, canonical(message.message_id))
        found: Record | None = self.stores.idempotency.get(name)
        return found

    def result(self, message: Message[Any]) -> Any:
        """The stored result of a message."""
        return self.results.get_result(message, block=True, timeout=int(LONG * 1000))

    def letters(self) -> list[Any]:
        """The dead letters."""
        return list(self.records.dead_letters.page(limit=500).letters)

    def left(self) -> dict[str, int]:
        """How many messages lie in each queue and delay queue, delivered or not."""
        if self.kind == "rabbitmq":
            assert self.servers.rabbitmq is not None
            with _ASKING:
                found = unsettled(self.servers.rabbitmq, self.url)
            return {name: count for name, count in found.items() if name.removesuffix(".DQ") in self.queues}
        with contextlib.closing(Keys(self.url, self.environment["KILLS_NAMESPACE"])) as keys:
            return {**keys.waiting(), **keys.stranded()}

    def wait_settled(self) -> None:
        """Wait until nothing is left that could still run."""
        wait_until(lambda: not self.left(), LONG, lambda: f"empty queues: {self.left()}\n{self.story}", interval=0.2)

    @property
    def story(self) -> str:
        """All that is known of what happened."""
        return "\n".join([*self.noted(""), *self.logs])


@contextlib.contextmanager
def world(
    servers: Servers,
    broker: str,
    store: str,
    queues: Sequence[str] = ("kills",),
    *,
    lease: int = LEASE,
    heartbeat: int = HEARTBEAT,
) -> Iterator[World]:
    """Have a broker with queues of its own, a store with keys of its own, and a gateway.

    Parameters:
      servers(Servers): Where everything is.
      broker(str): ``redis`` or ``rabbitmq``.
      store(str): ``redis`` or ``postgresql``.
      queues(Sequence[str]): The queues.
      lease(int): The lease in milliseconds.
      heartbeat(int): The heartbeat timeout on Redis in milliseconds.
    """
    name = f"kills-{uuid.uuid4().hex[:12]}"
    sender: Any
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        gateway = stack.enter_context(Gateway(directory / "calls"))
        if broker == "redis":
            url = servers.redis
            sender = RedisBroker(url=url, namespace=name, middleware=[])  # type: ignore[no-untyped-call]
            stack.callback(sender.client.connection_pool.disconnect)
        else:
            assert servers.rabbitmq is not None
            url = stack.enter_context(_vhost(servers.rabbitmq, name))
            sender = RabbitmqBroker(url=url, confirm_delivery=True, middleware=[])  # type: ignore[no-untyped-call]
        stack.callback(sender.close)
        for queue in queues:
            sender.declare_queue(queue, **({} if broker == "redis" else {"ensure": True}))
        stores, records = connect(servers.store(store)), connect(servers.records)
        stack.callback(stores.idempotency.close)
        stack.callback(records.dead_letters.close)
        results = RedisBackend(url=servers.records)
        stack.callback(results.client.close)
        environment = {
            "KILLS_BROKER": broker,
            "KILLS_URL": url,
            "KILLS_NAMESPACE": name,
            "KILLS_QUEUES": ",".join(queues),
            "KILLS_STORE": servers.store(store),
            "KILLS_RECORDS": servers.records,
            "KILLS_GATEWAY": str(gateway.port),
            "KILLS_DIRECTORY": str(directory),
            "KILLS_LEASE": str(lease),
            "KILLS_HEARTBEAT": str(heartbeat),
            # They are killed and interrupted: coverage would lose what it saw, or hang.
            "COVERAGE_PROCESS_START": "",
            "COVERAGE_PROCESS_CONFIG": "",
        }
        yield World(
            servers, broker, url, tuple(queues), directory, gateway, environment, sender, stores, records, results
        )


@contextlib.contextmanager
def _vhost(rabbitmq: PrivateRabbitMQ, name: str) -> Iterator[str]:
    with _ASKING:
        url = rabbitmq.add_vhost(name)
    yield url
    with _ASKING:
        rabbitmq.delete_vhost(name)
