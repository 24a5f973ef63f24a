"""What Dramatiq's Redis broker keeps where, what it does when Redis is away, and where StubBroker differs from it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import MAINTENANCE_COMMAND_BLACKLIST, MAINTENANCE_SCALE, RedisBroker, _RedisConsumer
from dramatiq.errors import BrokerConnectionError, ConnectionClosed, DecodeError
from dramatiq.middleware import Middleware, MiddlewareError, Retries
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError

from tests.support.waiting import wait_until

from .rig import Bench, Recorder

BenchMaker = Callable[..., Bench]


class RedisBench:
    """A RedisBroker in a namespace of its own, and the keys that it writes."""

    def __init__(self, url: str, *middleware: Middleware, **options: Any) -> None:
        self.namespace = options.setdefault("namespace", f"facts-{uuid4()}")
        self.broker = RedisBroker(url=url, middleware=list(middleware), **{"maintenance_chance": 0, **options})
        self.client: redis.Redis = self.broker.client
        self.worker: dramatiq.Worker | None = None

    def actor(self, fn: Callable[..., Any], **options: Any) -> Any:
        """Declare *fn* as an actor of this broker."""
        return dramatiq.actor(broker=self.broker, **options)(fn)

    def work(self, *, threads: int = 2) -> dramatiq.Worker:
        """Start a worker."""
        self.worker = dramatiq.Worker(self.broker, worker_timeout=50, worker_threads=threads)
        self.worker.start()
        return self.worker

    def drain(self) -> None:
        """Wait until every message of the default queue was acked or nacked and its worker thread is done with it."""
        worker = self.worker
        assert worker is not None
        wait_until(lambda: self.broker.do_qsize("default") == 0 and worker.work_queue.unfinished_tasks == 0)

    def bodies(self, name: str = "default") -> list[dict[str, Any]]:
        """The messages of one hash, decoded."""
        return [json.loads(body) for body in self.client.hvals(f"{self.namespace}:{name}.msgs")]

    def held(self, queue_name: str = "default") -> set[str]:
        """The ids in this broker's ack set of a queue."""
        members = self.client.smembers(f"{self.namespace}:__acks__.{self.broker.broker_id}.{queue_name}")
        return {member.decode() for member in members}

    def consumer(self, queue_name: str = "default", prefetch: int = 4) -> Any:
        """A consumer without a worker."""
        return self.broker.consume(queue_name, prefetch=prefetch, timeout=50)

    def fetch(self, queue_name: str = "default") -> Any:
        """The next message of a fresh consumer."""
        return wait_until(lambda: next(self.consumer(queue_name)))

    def close(self) -> None:
        """Stop the worker and delete what the namespace holds."""
        if self.worker is not None:
            self.worker.stop(timeout=2_000)
        for key in self.client.scan_iter(f"{self.namespace}:*"):
            self.client.delete(key)
        self.broker.close()
        self.client.close()


RedisBenchMaker = Callable[..., RedisBench]


@pytest.fixture
def redis_bench(redis_url: str) -> Iterator[RedisBenchMaker]:
    """Build Redis benches; their workers are stopped and their keys deleted at the end."""
    built: list[RedisBench] = []

    def build(*middleware: Middleware, **options: Any) -> RedisBench:
        built.append(RedisBench(redis_url, *middleware, **options))
        return built[-1]

    yield build
    for each in built:
        each.close()


def fail() -> None:
    """An actor's function that only fails."""
    raise RuntimeError("no")


# Keys and identity


def test_a_queue_is_a_list_of_ids_and_a_hash_of_bodies(redis_bench: RedisBenchMaker) -> None:
    """Private: a queue is the list {ns}:{queue} of ids and the hash {ns}:{queue}.msgs of bodies, which our settle
    script writes."""
    b = redis_bench()
    message = b.actor(lambda: None, actor_name="fine").send()
    key = message.options["redis_message_id"]

    assert [key.encode()] == b.client.lrange(f"{b.namespace}:default", 0, -1)
    assert {key.encode(): message.encode()} == b.client.hgetall(f"{b.namespace}:default.msgs")


def test_a_delayed_message_lives_in_the_dq_under_its_canonical_body(redis_bench: RedisBenchMaker) -> None:
    """Private: a delayed message is the same with .DQ in key and body, and eta in its options."""
    b = redis_bench()
    message = b.actor(lambda: None, actor_name="late").send_with_options(delay=60_000)

    assert 1 == b.client.llen(f"{b.namespace}:default.DQ")
    (body,) = b.bodies("default.DQ")
    assert "default.DQ" == body["queue_name"] == message.queue_name
    assert {"eta", "redis_message_id"} == set(body["options"])


def test_a_fetched_message_is_in_the_ack_set_of_its_broker_and_queue(redis_bench: RedisBenchMaker) -> None:
    """Private: what a worker holds is the set {ns}:__acks__.{broker_id}.{queue} of redis_message_ids: "still held"
    is asked there."""
    b = redis_bench()
    b.actor(lambda: None, actor_name="fine").send()
    message = b.fetch()

    assert {message.options["redis_message_id"]} == b.held()
    assert 0 == b.client.llen(f"{b.namespace}:default")
    assert 1 == len(b.bodies()), "its body stays until the ack"


def test_a_settled_message_that_is_not_held_stays_where_it_is(redis_bench: RedisBenchMaker) -> None:
    """Private: ack and nack act only on what is in this broker's ack set, so one that was reclaimed meanwhile is not
    lost."""
    b = redis_bench()
    b.actor(lambda: None, actor_name="fine").send()
    consumer = b.consumer()
    message = wait_until(lambda: next(consumer))
    b.client.srem(f"{b.namespace}:__acks__.{b.broker.broker_id}.default", message.options["redis_message_id"])
    consumer.ack(message)
    consumer.nack(message)

    assert 1 == len(b.bodies())
    assert [] == b.bodies("default.XQ")


def test_every_copy_has_a_redis_message_id_of_its_own(redis_bench: RedisBenchMaker) -> None:
    """H8: redis_message_id is new for each retry and delay move while message_id stays, so it names a copy and the
    other the job."""
    recorder = Recorder()
    b = redis_bench(recorder, Retries(max_retries=2, min_backoff=1))
    b.actor(fail).send()
    b.work()
    b.drain()

    copies = [c.subject for c in recorder.calls("after_enqueue")]
    assert 5 == len(copies), "the first, and two retries of a delayed and a due copy each"
    assert 1 == len({copy.message_id for copy in copies})
    assert 5 == len({copy.options["redis_message_id"] for copy in copies})


def test_a_redelivery_is_not_to_be_told_from_the_first_delivery(redis_bench: RedisBenchMaker) -> None:
    """H8: Redis keeps no delivery count: a message of a dead worker comes back byte for byte, so starts are counted
    by us."""
    dead = redis_bench()
    dead.actor(lambda: None, actor_name="fine").send()
    first = dead.fetch()

    alive = redis_bench(namespace=dead.namespace, maintenance_chance=MAINTENANCE_SCALE, heartbeat_timeout=1)
    alive.broker.declare_queue("default")
    second = alive.fetch()

    assert first.asdict() == second.asdict()
    assert (set(), {second.options["redis_message_id"]}) == (dead.held(), alive.held())


def test_a_dead_workers_messages_wait_for_maintenance(redis_bench: RedisBenchMaker) -> None:
    """H8: a dead worker's messages come back only when one of the few maintaining commands happens on that queue,
    however long it is dead."""
    dead = redis_bench()
    dead.actor(lambda: None, actor_name="fine").send()
    dead.fetch()

    alive = redis_bench(namespace=dead.namespace, maintenance_chance=0, heartbeat_timeout=1)
    alive.broker.declare_queue("default")
    consumer = alive.consumer()
    assert [None] * 5 == [next(consumer) for _ in range(5)]
    assert 1 == len(dead.held())
    assert {"ack", "nack"} == MAINTENANCE_COMMAND_BLACKLIST


# Dispatch


def test_every_command_goes_through_one_script(redis_bench: RedisBenchMaker) -> None:
    """Private: do_x calls scripts["dispatch"] with these eight arguments first and the namespace as only key, as our
    settle script expects."""
    b = redis_bench(heartbeat_timeout=1_234, dead_message_ttl=5_678)
    called: list[dict[str, Any]] = []
    b.broker.scripts["dispatch"] = lambda **arguments: called.append(arguments)
    b.broker.do_enqueue("default", "an-id", b"a body")

    (call,) = called
    assert [b.namespace] == call["keys"]
    command, timestamp, queue, broker_id, heartbeat, ttl, maintain, unpack, *rest = call["args"]
    assert ("enqueue", "default", b.broker.broker_id) == (command, queue, broker_id)
    assert isinstance(timestamp, int)
    assert (1_234, 5_678, 0) == (heartbeat, ttl, maintain)
    assert b.broker._max_unpack_size() == unpack
    assert ["an-id", b"a body"] == rest


def test_the_dispatch_script_is_a_registered_script(redis_bench: RedisBenchMaker) -> None:
    """Private: scripts holds redis-py Scripts by file name, bound to broker.client, so ours can be registered beside
    them."""
    b = redis_bench()

    assert {"dispatch", "maxstack"} == set(b.broker.scripts)
    assert b.client is b.broker.scripts["dispatch"].registered_client


def test_commands_are_made_on_the_fly(redis_bench: RedisBenchMaker) -> None:
    """Private: do_x is no method but made by __getattr__ from _dispatch each time, so an instance attribute replaces
    one command."""
    b = redis_bench()

    assert "do_ack" not in dir(b.broker)
    assert callable(b.broker._dispatch("ack"))
    with pytest.raises(AttributeError):
        b.broker.undo_ack

    acked: list[tuple[str, ...]] = []
    b.broker.do_ack = lambda *arguments: acked.append(arguments)
    message = b.actor(lambda: None, actor_name="fine").send()
    b.work()
    wait_until(lambda: acked)
    assert [("default", message.options["redis_message_id"])] == acked


def test_the_consumer_keeps_what_it_holds_by_message_id(redis_bench: RedisBenchMaker) -> None:
    """Private: _RedisConsumer counts its prefetch in queued_message_ids (message_id) and message_cache, so a
    settlement of ours discards there."""
    b = redis_bench()
    actor = b.actor(lambda: None, actor_name="fine")
    sent = [actor.send() for _ in range(3)]
    consumer = b.consumer(prefetch=3)
    assert isinstance(consumer, _RedisConsumer)
    assert (b.broker, "default") == (consumer.broker, consumer.queue_name)
    message = wait_until(lambda: next(consumer))

    assert {sent[0].message_id} == consumer.queued_message_ids
    assert [m.encode() for m in sent[1:]] == consumer.message_cache
    consumer.ack(message)
    assert set() == consumer.queued_message_ids
    assert 2 == consumer.outstanding_message_count


def test_a_failed_ack_forgets_the_message_all_the_same(redis_bench: RedisBenchMaker) -> None:
    """Private: queued_message_ids is discarded in a finally, so while the barrier repeats, the consumer fetches
    beyond its prefetch."""
    b = redis_bench()
    b.actor(lambda: None, actor_name="fine").send()
    consumer = b.consumer()
    message = wait_until(lambda: next(consumer))
    b.broker.do_ack = raising(redis.ConnectionError("away"))
    with pytest.raises(ConnectionClosed):
        consumer.ack(message)

    assert set() == consumer.queued_message_ids


# Errors of the client


def raising(error: Exception) -> Callable[..., None]:
    """A command that fails."""

    def command(*_: object) -> None:
        raise error

    return command


def test_enqueue_raises_the_clients_own_errors(redis_bench: RedisBenchMaker) -> None:
    """H3: RedisBroker.enqueue raises redis-py's own ConnectionError, no BrokerConnectionError, so the barrier
    translates it."""
    b = redis_bench()
    actor = b.actor(lambda: None, actor_name="fine")
    b.broker.do_enqueue = raising(redis.ConnectionError("away"))

    with pytest.raises(redis.ConnectionError) as raised:
        actor.send()
    assert not isinstance(raised.value, BrokerConnectionError)


@pytest.mark.parametrize("error", [redis.TimeoutError, ReadOnlyError, OutOfMemoryError])
def test_an_ack_that_times_out_is_given_up(redis_bench: RedisBenchMaker, error: type[redis.RedisError]) -> None:
    """H3: only redis.ConnectionError makes Dramatiq repeat; after TIMEOUT, READONLY or OOM the ack is given up, so
    the barrier knows them by itself."""
    assert not issubclass(error, redis.ConnectionError)
    b = redis_bench()
    tries: list[int] = []

    def command(*_: object) -> None:
        tries.append(1)
        raise error("away")

    b.broker.do_ack = command
    b.actor(lambda: None, actor_name="fine").send()
    worker = b.work()
    wait_until(lambda: tries)
    wait_until(lambda: worker.work_queue.unfinished_tasks == 0)

    assert [1] == tries
    assert 1 == len(b.held())


@pytest.mark.parametrize("error", [redis.ConnectionError, BusyLoadingError])
def test_an_ack_that_loses_the_connection_is_repeated(
    redis_bench: RedisBenchMaker, error: type[redis.RedisError]
) -> None:
    """H3: while acks fail with redis.ConnectionError (LOADING is one), Dramatiq repeats the ack and its before hooks
    until it succeeds."""
    recorder = Recorder()
    b = redis_bench(recorder)
    stock = b.broker.do_ack
    tries: list[int] = []

    def command(*arguments: str) -> None:
        tries.append(1)
        if len(tries) < 4:
            raise error("away")
        stock(*arguments)

    b.broker.do_ack = command
    b.actor(lambda: None, actor_name="fine").send()
    b.work()
    b.drain()

    assert 4 == len(tries) == len(recorder.calls("before_ack"))
    assert 1 == len(recorder.calls("after_ack"))


def test_the_barrier_keeps_the_message_in_the_ack_set(redis_bench: RedisBenchMaker) -> None:
    """H3: while a before_ack raises the barrier's error the message stays in the ack set, body and all: a crash
    redelivers it."""

    class SettleAgain(MiddlewareError, BrokerConnectionError):
        pass

    store_is_back = threading.Event()

    def hold(_: object) -> None:
        if not store_is_back.is_set():
            raise SettleAgain("store out")

    recorder = Recorder().on("before_ack", hold)
    b = redis_bench(recorder)
    message = b.actor(lambda: None, actor_name="fine").send()
    b.work()
    wait_until(lambda: len(recorder.calls("before_ack")) >= 3)

    assert {message.options["redis_message_id"]} == b.held()
    assert 1 == len(b.bodies())
    store_is_back.set()
    b.drain()
    assert set() == b.held()


def test_an_outage_as_delayed_messages_fall_due_kills_the_delay_consumer(
    redis_bench: RedisBenchMaker, deaths: list[BaseException]
) -> None:
    """H14: a raw redis.ConnectionError escapes ConsumerThread.close and ends the delay consumer for good, so our
    consumer wrapper translates it."""
    b = redis_bench()
    actor = b.actor(lambda: None, actor_name="late")
    actor.send_with_options(delay=60_000)
    worker = b.work()
    wait_until(lambda: worker.consumers["default.DQ"].delay_queue.qsize() == 1)
    actor.send_with_options(delay=1)
    b.broker.do_requeue = raising(redis.ConnectionError("away"))
    b.broker.do_enqueue = raising(redis.ConnectionError("away"))
    wait_until(lambda: deaths)

    assert isinstance(deaths[0], redis.ConnectionError)
    wait_until(lambda: not worker.consumers["default.DQ"].is_alive())
    assert worker.consumers["default"].is_alive(), "nothing tells that delayed messages no longer run"
    del b.broker.do_requeue


def test_an_undecodable_message_strands_the_batch_that_it_came_with(redis_bench: RedisBenchMaker) -> None:
    """H19: one undecodable message restarts the consumer and leaves itself and its batch in the live worker's ack
    set, so our wrapper takes it out."""
    b = redis_bench()
    runs: list[int] = []
    actor = b.actor(runs.append, actor_name="fine")
    actor.send(1)
    b.broker.do_enqueue("default", "garbage", b"not a message")
    actor.send(3)
    b.work()
    wait_until(lambda: runs == [1])
    actor.send(4)
    wait_until(lambda: 4 in runs)

    wait_until(lambda: len(b.held()) == 2)  # that of 4 is acked after its run
    assert [1, 4] == runs
    assert [] == b.bodies("default.XQ")


def test_the_consumer_raises_the_undecodable_body(redis_bench: RedisBenchMaker) -> None:
    """H19: the DecodeError out of the consumer's next carries the raw body, of which the letter "undecodable" is
    made."""
    b = redis_bench()
    b.broker.declare_queue("default")
    b.broker.do_enqueue("default", "garbage", b"not a message")
    consumer = b.consumer()

    with pytest.raises(DecodeError) as raised:
        wait_until(lambda: next(consumer))
    assert b"not a message" == raised.value.data


# Dead letters


def test_a_dead_letter_is_a_sorted_id_and_a_body(redis_bench: RedisBenchMaker) -> None:
    """§2: a dead message is the zset {ns}:{queue}.XQ and the hash .XQ.msgs, which import and replay read and clear."""
    b = redis_bench(Retries(max_retries=0))
    message = b.actor(fail).send()
    b.work()
    b.drain()

    key = message.options["redis_message_id"]
    ((member, died_at),) = b.client.zrange(f"{b.namespace}:default.XQ", 0, -1, withscores=True)
    assert key.encode() == member
    assert message.message_timestamp <= died_at
    assert {key.encode(): message.encode()} == b.client.hgetall(f"{b.namespace}:default.XQ.msgs")


def test_the_dead_body_is_the_one_last_enqueued(redis_bench: RedisBenchMaker) -> None:
    """§2: the dead body is the last one enqueued, so the final exception is never stored: why DeadLetter writes its
    own letter."""
    b = redis_bench(Retries(max_retries=1, min_backoff=1))
    runs: list[int] = []

    def fail_differently() -> None:
        runs.append(1)
        raise RuntimeError(f"attempt {len(runs)}")

    b.actor(fail_differently).send()
    b.work()
    b.drain()

    (body,) = b.bodies("default.XQ")
    assert 1 == body["options"]["retries"]
    assert "attempt 1" in body["options"]["traceback"]
    assert "attempt 2" not in json.dumps(body)


def test_a_message_without_retries_dies_without_a_trace_of_why(redis_bench: RedisBenchMaker) -> None:
    """§2: with max_retries=0 the dead body holds no failure information at all."""
    b = redis_bench(Retries(max_retries=0))
    b.actor(fail).send()
    b.work()
    b.drain()

    (body,) = b.bodies("default.XQ")
    assert {"redis_message_id"} == set(body["options"])


def test_a_body_replayed_as_it_is_has_no_retries_left(redis_bench: RedisBenchMaker) -> None:
    """§2: enqueued as it is a dead body keeps its retries: one attempt and a second dead letter, so replay cleans
    the options."""
    b = redis_bench(Retries(max_retries=1, min_backoff=1))
    runs: list[int] = []

    def count() -> None:
        runs.append(1)
        raise RuntimeError("no")

    b.actor(count).send()
    b.work()
    b.drain()
    (body,) = b.bodies("default.XQ")
    b.broker.enqueue(dramatiq.Message(**body))
    b.drain()

    assert 2 + 1 == len(runs)
    assert 2 == len(b.bodies("default.XQ"))


def test_every_dead_message_passes_before_nack_with_its_exception(redis_bench: RedisBenchMaker) -> None:
    """§2: before_nack is passed by every dead message with its exception still on the proxy, which is where the
    letter is written."""
    recorder = Recorder()
    b = redis_bench(recorder, Retries(max_retries=0))
    b.actor(fail).send()
    b.broker.enqueue(dramatiq.Message("default", "nobody", (), {}, {}))
    b.work()
    b.drain()

    exceptions = {c.subject.actor_name: type(c.details["exception"]) for c in recorder.calls("before_nack")}
    assert {"fail": RuntimeError, "nobody": dramatiq.errors.ActorNotFound} == exceptions
    failed = next(c.subject for c in recorder.calls("before_nack") if c.subject.actor_name == "fail")
    assert failed._exception is None, "cleared when the delivery is over"


def test_a_dead_delayed_message_dies_in_the_canonical_dead_letter_queue(redis_bench: RedisBenchMaker) -> None:
    """§2: a nack on the .DQ goes to the canonical queue's XQ, with a body that still names the .DQ, so replay
    canonicalises it."""
    b = redis_bench()
    b.actor(lambda: None, actor_name="late").send_with_options(delay=60_000)
    consumer = b.consumer("default.DQ")
    consumer.nack(wait_until(lambda: next(consumer)))

    (body,) = b.bodies("default.XQ")
    assert "default.DQ" == body["queue_name"]


def test_flush_erases_the_dead_letters_of_a_queue(redis_bench: RedisBenchMaker) -> None:
    """§2: broker.flush erases a queue's dead letters on Redis, so letters must not live there alone."""
    b = redis_bench(Retries(max_retries=0))
    b.actor(fail).send()
    b.work()
    b.drain()
    assert 1 == len(b.bodies("default.XQ"))
    b.broker.flush("default")

    assert 0 == b.client.exists(f"{b.namespace}:default.XQ", f"{b.namespace}:default.XQ.msgs")


# H17: where StubBroker differs


def test_options_set_in_a_hook_are_kept_by_a_stub_dead_letter_only(
    bench: BenchMaker, redis_bench: RedisBenchMaker
) -> None:
    """H17: options set on the proxy stay in StubBroker's dead letter and never reach Redis', so what must last is
    written by us."""

    def mark(message: Any) -> None:
        message.options["marked"] = True

    kept: list[bool] = []
    for b in (
        bench(Recorder().on("before_process_message", mark), Retries(max_retries=0)),
        redis_bench(Recorder().on("before_process_message", mark), Retries(max_retries=0)),
    ):
        b.actor(fail).send()
        b.work()
        b.drain()
        (options,) = (
            [m["options"] for m in b.bodies("default.XQ")]
            if isinstance(b, RedisBench)
            else [m.options for m in b.broker.dead_letters]
        )
        kept.append("marked" in options)

    assert [True, False] == kept


def test_before_enqueue_changes_the_callers_own_message_on_the_stub_only(
    bench: BenchMaker, redis_bench: RedisBenchMaker
) -> None:
    """H17: before_enqueue sees the caller's own message on StubBroker and a copy on Redis, so context is injected
    into neither blindly."""

    def mark(message: Any) -> None:
        message.options["marked"] = True

    changed: list[bool] = []
    for b in (bench(Recorder().on("before_enqueue", mark)), redis_bench(Recorder().on("before_enqueue", mark))):
        message = b.actor(lambda: None, actor_name="fine").message()
        b.broker.enqueue(message)
        changed.append("marked" in message.options)

    assert [True, False] == changed


def test_prefetched_messages_return_to_redis_but_not_to_the_stub(
    bench: BenchMaker, redis_bench: RedisBenchMaker
) -> None:
    """H17: a stopping worker gives prefetched messages back to Redis while StubBroker loses them: drains are tested
    on a real broker."""
    left: list[int] = []
    for b in (bench(), redis_bench()):
        entered, leave = threading.Event(), threading.Event()

        def block(entered: threading.Event = entered, leave: threading.Event = leave) -> None:
            entered.set()
            leave.wait(10)

        actor = b.actor(block)
        actor.send()
        worker = b.work(threads=1)
        assert entered.wait(5)
        actor.send()
        wait_until(lambda worker=worker: worker.work_queue.qsize() == 1)
        for thread in worker.workers:
            thread.stop()
        leave.set()
        worker.stop(timeout=5_000)
        b.worker = None
        left.append(
            b.client.llen(f"{b.namespace}:default") if isinstance(b, RedisBench) else b.broker.queues["default"].qsize()
        )

    assert [0, 1] == left


def test_the_stub_consumer_has_no_requeue_of_its_own(bench: BenchMaker) -> None:
    """H17: StubBroker's consumer inherits a requeue that does nothing."""
    b = bench()
    b.broker.declare_queue("default")
    consumer = b.broker.consume("default")

    assert dramatiq.Consumer.requeue is type(consumer).requeue


def test_the_stub_prefetches_few_delayed_messages(bench: BenchMaker, redis_bench: RedisBenchMaker) -> None:
    """H17: a .DQ consumer prefetches 1000 messages a thread on Redis but on StubBroker as few as any other, so
    memory shows only on a real one."""
    prefetches: list[int] = []
    for b in (bench(), redis_bench()):
        b.broker.declare_queue("default")
        prefetches.append(b.work(threads=2).consumers["default.DQ"].prefetch)

    assert [4, 2_000] == prefetches
