"""A worker inside the test on a Redis that fails, and the accounts of it: planned, done, dead, stranded."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard.delivery import peek
from dramatiq_guard.settle.killpoints import reaching
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from tests.support.waiting import wait_until

from .redis_jobs import Jobs, Ledger

__all__ = ["Keys", "World", "gating"]


@contextlib.contextmanager
def gating(reach: Callable[[str], None]) -> Iterator[None]:
    """Have `reach` called at every kill point, as ``point/actor``; on a consumer thread as the point alone."""

    def at(point: str) -> None:
        delivery = peek()
        reach(point if delivery is None else f"{point}/{delivery.message.actor_name}")

    with reaching(at):
        yield


class Keys:
    """What lies in a Redis under Dramatiq's keys.

    Parameters:
      url(str): The server itself, not a proxy before it.
      namespace(str): The broker's namespace.
    """

    def __init__(self, url: str, namespace: str = "dramatiq") -> None:
        self.client: redis.Redis = redis.Redis.from_url(url)
        self.namespace = namespace

    def close(self) -> None:
        self.client.close()

    def stranded(self) -> dict[str, int]:
        """How many ids are in each ack set."""
        names = [name.decode() for name in self.client.scan_iter(f"{self.namespace}:__acks__.*")]
        return {name: int(self.client.scard(name)) for name in names}

    def waiting(self) -> dict[str, int]:
        """How many messages there are on each queue and delay queue, in flight or not."""
        names = [name.decode() for name in self.client.scan_iter(f"{self.namespace}:*.msgs")]
        return {name: int(self.client.hlen(name)) for name in names if not name.endswith(".XQ.msgs")}

    def dead(self) -> Counter[str]:
        """The keys of the jobs among the broker's own dead letters."""
        names = list(self.client.scan_iter(f"{self.namespace}:*.XQ.msgs"))
        bodies = [body for name in names for body in self.client.hvals(name)]
        return Counter(dramatiq.Message.decode(body).args[0] for body in bodies)

    def wait_empty(self, timeout: float = 45.0) -> None:
        """Wait until nothing is left that could still run."""
        wait_until(
            lambda: not self.waiting() and not self.stranded(),
            timeout,
            lambda: f"empty queues and ack sets: {self.waiting()}, {self.stranded()}",
            interval=0.1,
        )


class World:
    """A worker, its jobs and what became of them.

    Parameters:
      broker(RedisBroker): The broker, with the stack or without.
      ledger(Ledger): Where the jobs write.
      server(str): The URL of the server itself.
      letters(MemoryDeadLetters | None): The store of letters.
      reach(Callable[[str], None]): Called by a job that is about to raise.
    """

    def __init__(
        self,
        broker: RedisBroker,
        ledger: Ledger,
        server: str,
        letters: MemoryDeadLetters | None = None,
        reach: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.broker = broker
        self.ledger = ledger
        self.letters = letters
        self.jobs = Jobs(broker, ledger, reach)
        self.keys = Keys(server, broker.namespace)
        self.planned: Counter[str] = Counter()
        self.dying: set[str] = set()
        self.worker: dramatiq.Worker | None = None

    def send(self, actor: Any, key: str, *args: Any, attempts: int = 1, delay: int | None = None) -> None:
        """Send a job and plan its attempts; a job that is to fail gets their number as its argument."""
        self.planned[key] = attempts
        if actor in (self.jobs.flaky, self.jobs.aflaky):
            args = (attempts,)
        if actor in (self.jobs.doomed, self.jobs.adoomed):
            self.dying.add(key)
        actor.send_with_options(args=(key, *args), delay=delay)

    @contextlib.contextmanager
    def working(self, threads: int = 8, timeout: int = 200) -> Iterator[dramatiq.Worker]:
        """Run a worker; it is stopped at the end, whatever happened."""
        self.worker = dramatiq.Worker(self.broker, worker_timeout=timeout, worker_threads=threads)
        self.worker.start()
        try:
            yield self.worker
        finally:
            self.worker.stop(timeout=5_000)
            self.broker.close()
            self.broker.client.connection_pool.disconnect()
            self.keys.close()

    def dead_threads(self) -> list[str]:
        """The worker and consumer threads that have died."""
        assert self.worker is not None
        threads: Iterable[Any] = (*self.worker.workers, *self.worker.consumers.values())
        return [repr(thread) for thread in threads if not thread.is_alive()]

    def surplus(self) -> Counter[str]:
        """The runs beyond the plan."""
        return self.ledger.runs - self.planned

    def missing(self) -> Counter[str]:
        """The planned runs that did not happen."""
        return self.planned - self.ledger.runs

    def buried(self) -> Counter[str]:
        """The keys of the jobs that left a letter."""
        assert self.letters is not None
        return Counter(letter.args[0] for letter in self.letters.page(limit=500).letters)

    def check(self, timeout: float = 45.0) -> None:
        """Wait for the end, and hold what happened against the plan."""
        wait_until(
            lambda: not self.missing() and not self.keys.waiting() and not self.keys.stranded(),
            timeout,
            lambda: (
                f"the end: missing {dict(self.missing())}, surplus {dict(self.surplus())}, waiting "
                f"{self.keys.waiting()}, in ack sets {self.keys.stranded()}, dead threads {self.dead_threads()}"
            ),
            interval=0.1,
        )
        assert not self.surplus(), "a job ran more often than planned"
        assert not self.dead_threads()
        assert self.buried() == Counter(self.dying)
        assert self.keys.dead() == Counter(self.dying), "the broker's own copies of the dead"
