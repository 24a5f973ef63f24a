"""A queue that is all for one downstream is held at the broker while that is out: none is churned, none overtakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard import CircuitBreaker, Classify, DeadLetter, GracefulShutdown, JitterBackoff, connect, install
from dramatiq_guard.policy.breaker import Mode, force
from dramatiq_guard.settle import rabbitmq_consumer
from tests.support.waiting import wait_until

MESSAGES = 60


class Place:
    """A broker with a breaker in memory, and an actor with a queue of its own.

    Parameters:
      broker(Any): The broker.
      sender(Any): Whoever sends to it, if that is another one.
    """

    def __init__(self, broker: Any, sender: Any = None) -> None:
        self.broker = broker
        self.sender = sender or broker
        self.sender.declare_queue("payments")
        self.broker.emit_after("process_boot")
        self.stores = connect("memory://")
        self.put_off: list[str] = []
        install(
            broker,
            Classify(),
            JitterBackoff(min_backoff=20, max_backoff=50, log="summary"),
            DeadLetter(self.stores.dead_letters),
            CircuitBreaker(self.stores.breakers),
            GracefulShutdown(),
        )
        self.done: list[int] = []
        self.charge = dramatiq.actor(
            self.done.append, actor_name="charge", broker=broker, queue_name="payments", downstream="payments"
        )
        self.worker: dramatiq.Worker | None = None

    def send(self, messages: int) -> None:
        """Send so many messages."""
        for at in range(messages):
            self.sender.enqueue(self.charge.message(at))

    @property
    def waiting(self) -> int:
        """The messages that no worker has taken, in the queue."""
        if isinstance(self.broker, RedisBroker):
            return int(self.broker.client.llen("dramatiq:payments"))
        return self.sender.get_queue_message_counts("payments")[0]  # type: ignore[no-any-return]

    @property
    def away(self) -> int:
        """The messages that were put off."""
        if isinstance(self.broker, RedisBroker):
            return int(self.broker.client.hlen("dramatiq:payments.DQ.msgs"))
        return len(self.consumer("payments.DQ").inner.known_tags)

    def force(self, mode: Mode) -> None:
        """An operator's word."""
        self.stores.breakers.update("payments", lambda state, now: (force(state, mode, now), None))

    def work(self, threads: int = 4) -> None:
        """Start a worker."""
        self.worker = dramatiq.Worker(self.broker, worker_timeout=20, worker_threads=threads)
        self.worker.start()

    def stop(self) -> None:
        """Stop it."""
        if self.worker is not None:
            self.worker.stop()
            self.worker = None

    def consumer(self, queue_name: str = "payments") -> Any:
        """The consumer of a queue."""
        wait_until(lambda: self.worker and queue_name in self.worker.consumers, 20)
        assert self.worker is not None
        thread = self.worker.consumers[queue_name]
        wait_until(lambda: thread.consumer is not None, 20)
        return thread.consumer

    def held(self, polls: int = 20) -> Any:
        """Wait until the queue has been held for a while; gives its consumer."""
        consumer = self.consumer()
        pauses: list[int] = []
        pause = consumer.pause

        def counted(milliseconds: int) -> None:
            pauses.append(milliseconds)
            pause(milliseconds)

        consumer.pause = counted
        wait_until(lambda: len(pauses) >= polls, 60, lambda: (pauses, consumer.taken))
        return consumer

    def close(self) -> None:
        self.stop()
        self.broker.close()
        self.sender.close()
        self.stores.close()


@pytest.fixture(params=["redis", "rabbitmq"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place on each real broker."""
    url = request.getfixturevalue(f"{request.param}_url")
    broker: Any
    sender = None
    if request.param == "redis":
        broker = RedisBroker(url=url)  # type: ignore[no-untyped-call]
    else:
        # Only a connection that is looked after outlives a second of silence; the sender's is not.
        broker = RabbitmqBroker(url=f"{url}{'&' if '?' in url else '?'}heartbeat=1", confirm_delivery=True)  # type: ignore[no-untyped-call]
        sender = RabbitmqBroker(url=url, confirm_delivery=True)  # type: ignore[no-untyped-call]
    with closing(Place(broker, sender)) as made:
        yield made


def test_a_paused_queue_stays_at_the_broker_and_in_its_order(place: Place) -> None:
    """Those few that were on their way when the worker met the breaker are put off; when it goes on all are done."""
    place.force(Mode.FORCED_OPEN)
    place.send(MESSAGES)
    place.work(threads=1)  # so that there is an order

    consumer = place.held(60)  # three seconds: of RabbitMQ's heartbeats, too
    assert place.away <= 1
    assert place.waiting >= MESSAGES - 3
    assert consumer is place.consumer(), "the connection was lost"

    place.force(Mode.CLOSED)
    wait_until(lambda: len(place.done) == MESSAGES, 60, lambda: place.done)
    assert [at for at in place.done if at != 0] == list(range(1, MESSAGES))


def test_what_is_prefetched_does_not_lie_for_long_on_rabbitmq(
    rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would close the channel for an ack that does not come: it goes back and comes again, once in a while."""
    monkeypatch.setattr(rabbitmq_consumer, "_FETCHED_ANEW", 300)
    with closing(Place(RabbitmqBroker(url=rabbitmq_url, confirm_delivery=True))) as place:  # type: ignore[no-untyped-call]
        place.force(Mode.FORCED_OPEN)
        place.send(MESSAGES)
        place.work()
        consumer = place.held(1)
        tags = set(consumer.inner.channel.consumer_tags)
        wait_until(lambda: set(consumer.inner.channel.consumer_tags).isdisjoint(tags), 20)

        place.force(Mode.CLOSED)
        wait_until(lambda: len(place.done) >= MESSAGES, 60, lambda: place.done)
        assert sorted(place.done) == list(range(MESSAGES))
        assert consumer is place.consumer(), "the connection was lost"


def test_what_a_held_queue_has_prefetched_goes_back_when_the_worker_stops(place: Place) -> None:
    """All of it, and nothing of it was tried."""
    place.force(Mode.FORCED_OPEN)
    place.send(MESSAGES)
    place.work()
    place.held()
    put_off = place.away
    place.stop()

    wait_until(lambda: place.waiting == MESSAGES - put_off, 20, lambda: place.waiting)
    assert place.done == []


def test_a_worker_that_boots_into_a_pause_is_ready(place: Place) -> None:
    """It has asked the broker once, and is not taken for stuck while it asks no more."""
    place.force(Mode.FORCED_OPEN)
    place.send(1)
    place.work()

    consumer = place.held()
    polled_at = consumer.polled_at
    assert consumer.in_touch
    wait_until(lambda: consumer.polled_at > polled_at, 20)


def test_what_has_ended_or_passed_is_not_counted(place: Place) -> None:
    """Whichever way a message leaves the process, the queue is not held for it."""
    place.work()
    place.send(MESSAGES)
    wait_until(lambda: len(place.done) == MESSAGES, 60)

    wait_until(lambda: not place.consumer().taken, 20, lambda: place.consumer().taken)


def test_a_queue_with_other_messages_is_not_held(redis_url: str) -> None:
    """An actor that calls somebody else, or nobody, shares it: its messages must not wait for this downstream."""
    with closing(Place(RedisBroker(url=redis_url))) as place:  # type: ignore[no-untyped-call]
        other: list[int] = []
        count = dramatiq.actor(other.append, actor_name="count", broker=place.broker, queue_name="payments")
        place.force(Mode.FORCED_OPEN)
        place.send(MESSAGES)
        count.send(1)
        place.work()

        wait_until(lambda: other == [1], 60)
        wait_until(lambda: place.away == MESSAGES, 60, lambda: place.away)
        assert place.waiting == 0


def test_an_actor_that_is_declared_later_frees_its_queue(redis_url: str) -> None:
    """From then on the queue is not all for the downstream."""
    with closing(Place(RedisBroker(url=redis_url))) as place:  # type: ignore[no-untyped-call]
        place.force(Mode.FORCED_OPEN)
        place.send(MESSAGES)
        place.work()
        place.held()
        other: list[int] = []
        count = dramatiq.actor(other.append, actor_name="count", broker=place.broker, queue_name="payments")
        count.send(1)

        wait_until(lambda: other == [1], 60)


@pytest.mark.parametrize(
    ("actors", "queues"),
    [
        ([("a", "payments"), ("a", "payments")], {"a": "payments"}),
        ([("a", "payments"), ("a", "courier")], {}),
        ([("a", "payments"), ("a", None)], {}),
        ([("a", "payments"), ("b", None)], {"a": "payments"}),
        ([("a", lambda _: "payments")], {}),
    ],
)
def test_which_queues_are_all_for_one_downstream(
    stub_broker: Any, actors: list[tuple[str, str | Callable[..., str] | None]], queues: dict[str, str]
) -> None:
    """Those where every actor names the same one; a function of the message may name any."""
    breaker = CircuitBreaker(connect("memory://").breakers)
    install(stub_broker, JitterBackoff(), breaker)
    for number, (queue_name, downstream) in enumerate(actors):
        options = {} if downstream is None else {"downstream": downstream}
        dramatiq.actor(lambda: None, actor_name=f"actor-{number}", queue_name=queue_name, broker=stub_broker, **options)
    breaker._broker = stub_broker

    assert breaker._queues_of_one_downstream() == queues
