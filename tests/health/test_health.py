"""What counts against a worker process: dead threads, stuck consumers, a blocked event loop; an outage does not."""

from __future__ import annotations

import threading

import pytest
from dramatiq.asyncio import get_event_loop_thread
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import AsyncIO

from dramatiq_guard.probing.health import Health
from tests.support.proxy import FaultyProxy
from tests.support.waiting import wait_until

HOUR = 3_600_000


def test_a_worker_is_started_when_all_its_threads_are(working):
    """Before that it is live, and not ready."""
    worker = working(boot=False)
    health = Health(worker)
    before = health.look()

    assert (before.started, before.live, before.ready) == (False, True, False)
    assert before.waits == ("its worker threads have not all started",)

    worker.start()
    try:
        wait_until(lambda: health.look().ready, describe=health.look)
        assert health.look().started
    finally:
        worker.stop()


def test_a_healthy_worker_is_ready_and_nothing_is_said_against_it(working):
    """On every queue the broker has answered."""
    health = Health(working())
    wait_until(lambda: health.look().ready, describe=health.look)

    condition = health.look()
    assert (condition.live, condition.complaints, condition.waits) == (True, (), ())


def test_a_dead_worker_thread_is_named(working, deaths):
    """One thread fewer, and nobody else would notice."""
    worker = working()
    health = Health(worker)
    worker.work_queue.put(0)  # nothing that Dramatiq puts there: the thread that takes it dies
    wait_until(lambda: deaths)
    dead = wait_until(lambda: [thread for thread in worker.workers if not thread.is_alive()])

    assert health.look().complaints == (f"worker thread {dead[0].name!r} is dead",)
    assert not health.look().ready


def test_a_dead_consumer_thread_is_named_by_its_queue(working, deaths):
    """It is dead, and not stuck, however long ago it was polled."""

    class Broken:
        def __next__(self):
            raise KeyboardInterrupt

        def __getattr__(self, name):
            return lambda *_: None

    worker = working()
    health = Health(worker, polled_within=0)
    health.polled_within = -1  # everything is stuck
    thread = worker.consumers["default"]
    wait_until(lambda: thread.consumer is not None)
    thread.consumer.inner = Broken()
    wait_until(lambda: not thread.is_alive())

    assert [each for each in health.look().complaints if "'default'" in each] == [
        "the consumer thread of queue 'default' is dead"
    ]


def test_a_consumer_that_does_not_come_round_is_stuck(working, turned):
    """Something holds its thread: a hook, a deadlock."""
    held, release = threading.Event(), threading.Event()

    worker = working()
    health = Health(worker)
    wait_until(lambda: health.look().ready, describe=health.look)
    thread = worker.consumers["default"]

    def hold():
        held.set()
        release.wait(30)

    thread.handle_delayed_messages = hold
    try:
        assert held.wait(10)
        assert health.look().live
        turned.added += 31_000
        wait_until(lambda: worker.consumers["default.DQ"].consumer.polled_at > thread.consumer.polled_at + 1_000)

        (complaint,) = health.look().complaints
        assert complaint.startswith("the consumer of queue 'default' has been stuck for 31")
    finally:
        release.set()
        del thread.handle_delayed_messages
    wait_until(lambda: health.look().ready, describe=health.look)


def test_a_round_may_take_three_of_the_workers_own_timeouts(working):
    """Who has idle consumers wait for minutes is not restarted for it."""
    worker = working(boot=False)
    worker.worker_timeout = 60_000

    assert Health(worker).polled_within == 180_000
    assert Health(worker, polled_within=300_000).polled_within == 300_000


def test_a_broker_that_is_out_makes_nobody_dead(working, turned):
    """However long it is out, the worker lives; it is not ready until the broker answers again."""

    class Unsteady(StubBroker):
        out = False

        def consume(self, *args, **kwargs):
            if self.out:
                raise ConnectionClosed("out")
            return super().consume(*args, **kwargs)

    class Lost:
        def __next__(self):
            raise ConnectionClosed("out")

        def __getattr__(self, name):
            return lambda *_: None

    broker = Unsteady()
    worker = working(broker)
    health = Health(worker)
    wait_until(lambda: health.look().ready, describe=health.look)

    broker.out = True
    for thread in worker.consumers.values():
        thread.consumer.inner = Lost()
    waits = {f"the broker has not answered on queue {name!r}" for name in ("default", "default.DQ")}
    wait_until(lambda: set(health.look().waits) == waits, describe=health.look)
    turned.added += HOUR
    condition = health.look()
    assert (condition.live, condition.ready) == (True, False)

    broker.out = False
    wait_until(lambda: health.look().ready, describe=health.look)


def test_a_broker_that_has_never_answered_keeps_a_worker_waiting_and_alive(working, turned):
    """At boot, too."""

    class Out(StubBroker):
        def consume(self, *args, **kwargs):
            raise ConnectionClosed("out")

    health = Health(working(Out()))
    turned.added += HOUR

    condition = health.look()
    assert (condition.started, condition.live, condition.ready) == (True, True, False)


@pytest.fixture
def redis_behind(redis_url):
    """A Redis broker behind a proxy."""
    with FaultyProxy(redis_url) as proxy:
        yield proxy, RedisBroker(url=f"{proxy.url}?socket_timeout=0.3&socket_connect_timeout=0.3")


@pytest.fixture
def rabbitmq_behind(rabbitmq_url):
    """A RabbitMQ broker behind a proxy."""
    with FaultyProxy(rabbitmq_url) as proxy:
        yield proxy, RabbitmqBroker(url=proxy.url, confirm_delivery=True)


def _outage(proxy, worker, fault):
    health = Health(worker)
    wait_until(lambda: health.look().ready, 20, describe=health.look)
    fault(proxy)
    lived = []
    wait_until(lambda: lived.append(health.look()) or not lived[-1].ready, 20)
    wait_until(
        lambda: lived.append(health.look()) or len(lived[-1].waits) == len(worker.consumers), 20, lambda: lived[-1]
    )
    assert all(each.live for each in lived), lived
    proxy.heal()
    wait_until(lambda: health.look().ready, 30, describe=health.look)


@pytest.mark.parametrize(
    "fault",
    [lambda proxy: (proxy.refuse(), proxy.cut()), lambda proxy: proxy.blackhole()],
    ids=["refused", "blackhole"],
)
def test_on_redis_an_outage_shows_as_not_ready(redis_behind, working, fault):
    """And it passes by itself."""
    proxy, broker = redis_behind
    _outage(proxy, working(broker), fault)
    broker.client.connection_pool.disconnect()


def test_on_rabbitmq_an_outage_shows_as_not_ready(rabbitmq_behind, working):
    """And it passes by itself."""
    proxy, broker = rabbitmq_behind
    _outage(proxy, working(broker), lambda proxy: (proxy.refuse(), proxy.cut()))


def test_a_paused_worker_waits(working):
    """Somebody paused it: it is not stuck."""
    worker = working()
    health = Health(worker)
    worker.pause()
    try:
        assert set(health.look().waits) == {"queue 'default' is paused", "queue 'default.DQ' is paused"}
        assert health.look().live
    finally:
        worker.resume()
    wait_until(lambda: health.look().ready, describe=health.look)


def test_an_event_loop_that_does_not_answer_is_a_complaint(working, turned):
    """An async actor that calls what blocks holds up all the others."""
    broker = StubBroker()
    broker.add_middleware(AsyncIO())
    health = Health(working(broker))
    blocking, release = threading.Event(), threading.Event()
    wait_until(lambda: health.look().ready, describe=health.look)

    get_event_loop_thread().loop.call_soon_threadsafe(lambda: (blocking.set(), release.wait(30)))
    try:
        assert blocking.wait(10)
        wait_until(lambda: health.loop._asked_at is not None or not health.look().live)
        assert health.look().live, "it was asked just now"
        turned.added += 10_500
        wait_until(lambda: len(health.look().complaints) == 1)
        assert health.look().complaints[0].startswith("the event loop has not answered for 1")
    finally:
        release.set()
    wait_until(lambda: health.look().ready, describe=health.look)


def test_an_event_loop_that_has_ended_is_a_complaint(working):
    """After sys.exit in an async actor each async message would fail."""
    broker = StubBroker()
    broker.add_middleware(AsyncIO())
    health = Health(working(broker))
    thread = get_event_loop_thread()
    thread.loop.call_soon_threadsafe(thread.loop.stop)
    thread.join(10)

    assert health.look().complaints == ("the event loop's thread is dead",)


def test_while_it_drains_nothing_counts_against_its_life(working, deaths):
    """Its own hard deadline ends it; a probe that failed would cut off the jobs that were given time."""
    worker = working()
    health = Health(worker)
    worker.work_queue.put(0)
    wait_until(lambda: health.look().complaints)
    health.draining = True

    condition = health.look()
    assert (condition.started, condition.live, condition.ready, condition.draining) == (True, True, False, True)
    assert condition.waits == ("it is draining",)


def test_threads_that_were_stopped_are_not_dead(working):
    """The worker was told to stop, by whomever."""
    worker = working()
    health = Health(worker)
    worker.stop()

    assert health.dead() == ()
    assert health.look().live
