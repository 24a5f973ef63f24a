"""The names of Dramatiq's worker that it does not promise to keep and that we use all the same."""

from __future__ import annotations

import inspect
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import dramatiq
import dramatiq.worker
import pytest
from dramatiq.asyncio import EventLoopThread, get_event_loop_thread
from dramatiq.common import dq_name, q_name, xq_name
from dramatiq.middleware import AsyncIO, CurrentMessage, Retries, ShutdownNotifications, SkipMessage, TimeLimit
from dramatiq.middleware.time_limit import _GeventTimeoutManager
from dramatiq.threading import is_gevent_active
from dramatiq.worker import ConsumerThread, Worker, WorkerThread

from tests.support.waiting import wait_until

from .rig import Bench, Recorder

BenchMaker = Callable[..., Bench]
WORKER_LOGGER = "dramatiq.worker.WorkerThread"


def test_a_worker_has_consumers_by_queue_and_worker_threads(bench: BenchMaker) -> None:
    """Private: Worker.consumers maps queue names, .DQ included, to ConsumerThreads, and Worker.workers lists
    WorkerThreads, on one work_queue."""
    b = bench()
    b.broker.declare_queue("default")
    worker = b.work(threads=3)

    assert {"default", "default.DQ"} == set(worker.consumers)
    assert {ConsumerThread} == {type(thread) for thread in worker.consumers.values()}
    assert [WorkerThread] * 3 == [type(thread) for thread in worker.workers]
    for thread in (*worker.consumers.values(), *worker.workers):
        assert isinstance(thread, threading.Thread)
        assert worker.work_queue is thread.work_queue
    assert {id(worker.consumers)} == {id(thread.consumers) for thread in worker.workers}, "one dict, not copies"
    assert isinstance(worker.work_queue, queue.PriorityQueue)


def test_a_consumer_thread_has_the_names_that_we_use(bench: BenchMaker) -> None:
    """Private: ConsumerThread has consumer, delay_queue, work_queue, post_process_message, requeue_messages, pause,
    resume, running and paused."""
    b = bench()
    b.broker.declare_queue("default")
    worker = b.work()
    thread = worker.consumers["default"]
    wait_until(lambda: thread.consumer is not None)

    assert b.broker is thread.broker
    assert "default" == thread.queue_name
    assert isinstance(thread.delay_queue, queue.PriorityQueue)
    assert (True, False) == (thread.running, thread.paused)
    for name, parameters in {
        "post_process_message": ["message"],
        "requeue_messages": ["messages"],
        "handle_message": ["message"],
        "pause": [],
        "resume": [],
        "stop": [],
        "close": [],
    }.items():
        assert parameters == list(inspect.signature(getattr(thread, name)).parameters)


def test_queues_hold_items_with_a_message(bench: BenchMaker) -> None:
    """Private: delay_queue and work_queue hold items with .message, which is how what a worker has in memory is
    handed back."""
    b = bench()
    message = b.actor(lambda: None, actor_name="late").send_with_options(delay=60_000)
    thread = b.work().consumers["default.DQ"]
    wait_until(lambda: thread.delay_queue.qsize() == 1)

    (item,) = thread.delay_queue.queue
    assert message.message_id == item.message.message_id
    assert item.priority == item.message.options["eta"]


def test_the_worker_thread_settles_through_its_queues_consumer_thread(bench: BenchMaker) -> None:
    """Private: a worker thread settles by consumers[message.queue_name].post_process_message, looked up each time,
    so it can be replaced on an instance."""
    b = bench()
    settled: list[tuple[str, threading.Thread]] = []
    b.broker.declare_queue("default")
    worker = b.work()
    thread = worker.consumers["default"]
    stock = thread.post_process_message

    def post_process_message(message: Any) -> None:
        settled.append((message.actor_name, threading.current_thread()))
        stock(message)

    thread.post_process_message = post_process_message
    b.actor(lambda: None, actor_name="fine").send()
    b.drain()

    ((name, by),) = settled
    assert "fine" == name
    assert by in worker.workers


def test_the_settlement_uses_the_consumer_of_that_moment(bench: BenchMaker) -> None:
    """Private: post_process_message uses self.consumer as it is then, which after a reconnect is another than the
    message came from."""
    b = bench()
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        leave.wait(10)

    b.actor(block).send()
    thread = b.work().consumers["default"]
    assert entered.wait(5)
    acked: list[Any] = []

    class Another(dramatiq.Consumer):
        def ack(self, message: Any) -> None:
            acked.append(message)

    former, thread.consumer = thread.consumer, Another()
    assert former is not None
    leave.set()
    wait_until(lambda: acked)


def test_the_retry_delay_of_the_barrier_is_read_each_time(bench: BenchMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private: POST_PROCESS_MESSAGE_RETRY_DELAY_SECS is a module constant of 5 s read at each repetition and slept
    by time.sleep of that module."""
    monkeypatch.undo()
    assert 5 == dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS

    slept: list[float] = []

    class Time:
        sleep = staticmethod(slept.append)
        monotonic_ns = staticmethod(dramatiq.worker.time.monotonic_ns)

    monkeypatch.setattr(dramatiq.worker, "POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 4.25)
    b = bench()
    b.broker.declare_queue("default")
    thread = ConsumerThread(
        broker=b.broker, queue_name="default", prefetch=1, work_queue=queue.PriorityQueue(), worker_timeout=50
    )

    class Flaky(dramatiq.Consumer):
        def ack(self, message: Any) -> None:
            if not slept:
                raise dramatiq.ConnectionClosed("away")

    thread.consumer = Flaky()
    monkeypatch.setattr(dramatiq.worker, "time", Time)
    thread.post_process_message(dramatiq.MessageProxy(dramatiq.Message("default", "fine", (), {}, {})))

    assert [4.25] == slept


def test_a_consumer_thread_asks_the_broker_for_its_consumer_by_keywords(bench: BenchMaker) -> None:
    """Private: every start of a consumer calls broker.consume(queue_name=, prefetch=, timeout=), so an instance
    attribute wraps each consumer."""
    b = bench()
    b.broker.declare_queue("default")
    stock = b.broker.consume
    calls: list[dict[str, Any]] = []
    wrapped: list[Any] = []

    def consume(*arguments: Any, **keywords: Any) -> Any:
        assert () == arguments
        calls.append(keywords)
        wrapped.append(stock(**keywords))
        return wrapped[-1]

    b.broker.consume = consume
    worker = b.work(threads=2)
    wait_until(lambda: len(calls) == 2)

    assert {"default", "default.DQ"} == {call["queue_name"] for call in calls}
    assert {("queue_name", "prefetch", "timeout")} == {tuple(call) for call in calls}
    assert [(4, 50)] == [(call["prefetch"], call["timeout"]) for call in calls if call["queue_name"] == "default"]
    wait_until(lambda: {id(t.consumer) for t in worker.consumers.values()} == {id(c) for c in wrapped})


def test_a_failing_consumer_is_replaced_through_broker_consume(bench: BenchMaker) -> None:
    """Private: a consumer that raised is closed and made anew by broker.consume, so a wrapper there is stamped on
    every new channel."""
    b = bench()
    b.broker.declare_queue("default")
    stock = b.broker.consume
    made: list[str] = []

    class Broken(dramatiq.Consumer):
        def __next__(self) -> None:
            raise dramatiq.ConnectionClosed("away")

    def consume(queue_name: str, prefetch: int, timeout: int) -> Any:
        made.append(queue_name)
        return Broken() if made.count(queue_name) < 3 else stock(queue_name, prefetch, timeout)

    b.broker.consume = consume
    runs: list[int] = []
    b.actor(lambda: runs.append(1), actor_name="fine").send()
    b.work()
    b.drain()

    assert [1] == runs
    assert 3 == made.count("default")


class Door(dramatiq.Consumer):
    """A wrapper around a broker's consumer whose settling can be made to fail."""

    def __init__(self, inner: dramatiq.Consumer, error: BaseException | None = None, times: int = 0) -> None:
        self.inner = inner
        self.error = error
        self.left = times
        self.tries: list[Any] = []
        self.closed: list[str] = []

    def __next__(self) -> Any:
        return next(self.inner)

    def ack(self, message: Any) -> None:
        self.tries.append(message)
        if self.left > 0:
            self.left -= 1
            assert self.error is not None
            raise self.error
        self.inner.ack(message)

    def requeue(self, messages: Any) -> None:
        self.closed.append("requeue")
        self.inner.requeue(messages)

    def close(self) -> None:
        self.closed.append("close")
        self.inner.close()


def doors(b: Bench, error: BaseException | None = None, times: int = 0) -> dict[str, Door]:
    """Put a door on every consumer that the bench's broker makes from now on."""
    made: dict[str, Door] = {}
    stock = b.broker.consume

    def consume(queue_name: str, prefetch: int, timeout: int) -> Door:
        made[queue_name] = Door(stock(queue_name, prefetch, timeout), error, times)
        return made[queue_name]

    b.broker.consume = consume
    return made


def test_a_connection_error_from_the_consumers_own_ack_is_repeated(bench: BenchMaker) -> None:
    """H3: a bare BrokerConnectionError out of consumer.ack repeats before_ack and ack until it succeeds: the
    barrier's door may be there."""
    recorder = Recorder()
    b = bench(recorder)
    made = doors(b, dramatiq.errors.BrokerConnectionError("store out"), times=3)
    b.actor(lambda: None, actor_name="fine").send()
    b.work()
    b.drain()

    assert 4 == len(made["default"].tries)
    assert 1 == len({id(message) for message in made["default"].tries}), "the same proxy each time"
    assert ["before_ack"] * 4 + ["after_ack"] == [hook for hook in recorder.hooks() if hook.endswith("_ack")]


def test_any_other_error_from_the_consumers_own_ack_is_given_up(bench: BenchMaker) -> None:
    """H3: another exception out of consumer.ack is logged and given up at once, the message unsettled, after_ack not
    called."""
    recorder = Recorder()
    b = bench(recorder)
    made = doors(b, ValueError("a bug"), times=1)
    b.actor(lambda: None, actor_name="fine").send()
    worker = b.work()
    wait_until(lambda: "default" in made and made["default"].tries)
    wait_until(lambda: worker.work_queue.unfinished_tasks == 0)

    assert (1, 1) == (len(made["default"].tries), b.unsettled())
    assert [] == recorder.calls("after_ack")
    assert {True} == {thread.is_alive() for thread in worker.workers}


def test_a_stopping_worker_requeues_and_closes_through_its_consumers(bench: BenchMaker) -> None:
    """Private: at the end each consumer's requeue is called with its delayed messages, then its close, so a wrapper
    passes both on."""
    b = bench()
    b.broker.declare_queue("default")
    made = doors(b)
    worker = b.work()
    wait_until(lambda: len(made) == 2)
    worker.stop(timeout=2_000)
    b.worker = None

    assert ["requeue", "close"] == made["default"].closed == made["default.DQ"].closed


def test_a_connection_error_of_the_consumer_drops_the_delay_queue(bench: BenchMaker) -> None:
    """Private: after a BrokerConnectionError the consumer thread replaces its delay_queue, without requeueing what
    was in it."""
    b = bench()
    b.actor(lambda: None, actor_name="late").send_with_options(delay=60_000)
    thread = b.work().consumers["default.DQ"]
    wait_until(lambda: thread.delay_queue.qsize() == 1)
    former = thread.delay_queue

    def away() -> None:
        raise dramatiq.ConnectionClosed("away")

    requeued: list[Any] = []
    thread.requeue_messages = lambda messages: requeued.extend(messages)
    thread.handle_delayed_messages = away
    b.broker.queues["default.DQ"].put(dramatiq.Message("default.DQ", "late", (), {}, {"eta": None}).encode())
    wait_until(lambda: thread.delay_queue is not former)

    assert [] == requeued
    del thread.handle_delayed_messages


def test_pausing_stops_the_fetching_and_not_the_working(bench: BenchMaker) -> None:
    """Private: ConsumerThread.pause leaves its consumer at the next idle moment and fetches no more, which is how a
    drain stops fetching."""
    b = bench()
    runs: list[int] = []
    actor = b.actor(lambda: runs.append(1), actor_name="fine")
    thread = b.work().consumers["default"]
    thread.pause()
    assert thread.paused_event.wait(5)
    actor.send()
    assert [] == runs
    assert 1 == b.broker.queues["default"].qsize()

    thread.resume()
    wait_until(lambda: runs == [1])


def test_names_of_delay_and_dead_letter_queues() -> None:
    """Private: a delay queue is {queue}.DQ and a dead letter queue {queue}.XQ, and q_name leads back from each."""
    assert ("default.DQ", "default.XQ") == (dq_name("default"), xq_name("default"))
    assert ("default", "default", "default") == (q_name("default"), q_name("default.DQ"), q_name("default.XQ"))


def test_replacing_a_middleware_in_the_brokers_list_takes_effect(bench: BenchMaker) -> None:
    """Private: broker.middleware is a list read at every emit, so a stock middleware is replaced by assigning to its
    place."""
    former, present = Recorder(), Recorder()
    b = bench(former)
    b.broker.middleware[0] = present
    b.actor(lambda: None, actor_name="fine").send()
    b.work()
    b.drain()

    assert [] == former.journal
    assert 1 == len(present.calls("after_process_message"))


def test_stock_middlewares_have_the_names_that_their_substitutes_copy() -> None:
    """Private: TimeLimit has time_limit, logger and manager.interval in seconds; ShutdownNotifications
    notify_shutdown; Retries its four options."""
    limit = TimeLimit(time_limit=1_500, interval=250)
    assert (1_500, 0.25) == (limit.time_limit, limit.manager.interval)
    assert (600_000, 1.0) == (TimeLimit().time_limit, TimeLimit().manager.interval)
    assert {"time_limit"} == limit.actor_options

    notifications = ShutdownNotifications(notify_shutdown=True)
    assert notifications.notify_shutdown is True
    assert ShutdownNotifications().notify_shutdown is False
    assert {"notify_shutdown"} == notifications.actor_options

    retries = Retries()
    assert (20, 15_000, 604_800_000, None) == (
        retries.max_retries,
        retries.min_backoff,
        retries.max_backoff,
        retries.retry_when,
    )
    assert {"max_retries", "min_backoff", "max_backoff", "retry_when", "throws", "on_retry_exhausted"} == (
        retries.actor_options
    )
    for middleware in (limit, notifications):
        assert isinstance(middleware.logger, logging.Logger)


def test_the_gevent_managers_take_the_calls_that_we_make() -> None:
    """Private: gevent's timeout manager keeps timers by thread and can be disarmed when nothing was armed; nothing
    patches gevent in here."""
    manager = _GeventTimeoutManager()
    manager.start()
    manager.remove_timeout(7)

    assert {} == manager.timers
    assert ["thread_id", "ttl"] == list(inspect.signature(manager.add_timeout).parameters)
    assert not is_gevent_active()


def test_the_event_loop_thread_is_no_daemon(bench: BenchMaker) -> None:
    """Private: AsyncIO's loop thread is global and no daemon, so a boot that fails after AsyncIO's hook must stop it
    or hang."""
    assert get_event_loop_thread() is None
    b = bench(AsyncIO())
    worker = b.work()
    thread = get_event_loop_thread()

    assert isinstance(thread, EventLoopThread)
    assert not thread.daemon
    assert thread.loop.is_running()
    worker.stop(timeout=2_000)
    b.worker = None
    assert get_event_loop_thread() is None
    assert not thread.is_alive()


def test_a_body_is_rebuilt_from_its_dict() -> None:
    """Private: Message(**message.asdict()) is the same message and its encoding the same bytes, with these seven
    fields."""
    message = dramatiq.Message("default", "fine", (1,), {"a": 2}, {"retries": 1})
    fields = ["queue_name", "actor_name", "args", "kwargs", "options", "message_id", "message_timestamp"]

    assert fields == list(message.asdict())
    assert message == dramatiq.Message(**message.asdict()) == dramatiq.Message.decode(message.encode())
    assert message.options is message.asdict()["options"], "not copied: a snapshot must copy them"


def test_the_exception_is_on_the_proxy_until_it_is_settled() -> None:
    """Private: MessageProxy has failed, _exception, _message, stuff_exception and clear_exception."""
    message = dramatiq.Message("default", "fine", (), {}, {})
    proxy = dramatiq.MessageProxy(message)
    assert (False, None, message) == (proxy.failed, proxy._exception, proxy._message)

    error = ValueError("no")
    proxy.stuff_exception(error)
    proxy.fail()
    assert (True, error) == (proxy.failed, proxy._exception)
    proxy.clear_exception()
    assert proxy._exception is None


# Logging


def fail() -> None:
    """An actor's function that only fails."""
    raise RuntimeError("a secret in an error")


def test_a_failure_is_logged_before_any_after_hook_with_this_text(
    bench: BenchMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """Private: an unhandled failure is logged by dramatiq.worker.WorkerThread with this text, the message and
    exc_info, before after_process."""
    logged_before: list[int] = []

    def errors() -> list[logging.LogRecord]:
        return [r for r in caplog.records if r.name == WORKER_LOGGER and r.levelno == logging.ERROR]

    b = bench(
        Recorder().on("after_process_message", lambda _: logged_before.append(len(errors()))), Retries(max_retries=0)
    )
    b.actor(fail).send()
    b.work()
    b.drain()

    (record,) = errors()
    assert "Failed to process message %s with unhandled exception." == record.msg
    assert isinstance(record.args, tuple)
    (message,) = record.args
    assert isinstance(message, dramatiq.MessageProxy)
    assert record.exc_info is not None
    assert RuntimeError is record.exc_info[0]
    assert [1] == logged_before


def test_a_filter_on_that_logger_can_drop_the_traceback(bench: BenchMaker, caplog: pytest.LogCaptureFixture) -> None:
    """Private: all worker threads share that logger, and a logging.Filter on it takes the traceback out before
    anything formats it."""

    class DropsTheTraceback(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            record.exc_info = None
            return True

    b = bench(Retries(max_retries=0))
    b.actor(fail).send()
    dropping = DropsTheTraceback()
    logging.getLogger(WORKER_LOGGER).addFilter(dropping)
    try:
        worker = b.work()
        b.drain()
    finally:
        logging.getLogger(WORKER_LOGGER).removeFilter(dropping)

    assert {WORKER_LOGGER} == {thread.logger.name for thread in worker.workers}
    assert "with unhandled exception" in caplog.text
    assert "a secret in an error" not in caplog.text


def test_the_failure_is_logged_on_the_worker_thread_in_the_context_of_its_delivery(bench: BenchMaker) -> None:
    """Private: the record is made on the worker thread, where context variables of before_process still hold, so a
    filter finds the delivery."""
    seen: list[tuple[Any, threading.Thread]] = []

    class Looks(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.levelno == logging.ERROR:
                seen.append((CurrentMessage.get_current_message(), threading.current_thread()))
            return True

    b = bench(CurrentMessage(), Retries(max_retries=0))
    message = b.actor(fail).send()
    looking = Looks()
    logging.getLogger(WORKER_LOGGER).addFilter(looking)
    try:
        worker = b.work()
        b.drain()
    finally:
        logging.getLogger(WORKER_LOGGER).removeFilter(looking)

    ((current, thread),) = seen
    assert message.message_id == current.message_id
    assert thread in worker.workers


@pytest.mark.parametrize("error", [dramatiq.Retry("later"), dramatiq.RateLimitExceeded("full")], ids=["retry", "rate"])
def test_retry_and_rate_limit_are_not_logged_as_errors(
    bench: BenchMaker, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Private: Retry and RateLimitExceeded, and what derives from them, log no error, so what our seam re-raises may
    derive from Retry."""

    def put_off() -> None:
        raise error

    b = bench(Retries(max_retries=0))
    b.actor(put_off).send()
    b.work()
    b.drain()

    assert [] == [r for r in caplog.records if r.name == WORKER_LOGGER and r.levelno >= logging.ERROR]


def test_a_skip_is_a_warning_with_this_text(bench: BenchMaker, caplog: pytest.LogCaptureFixture) -> None:
    """Private: a skip is logged by the same logger as a warning with this text, which a filter of ours quiets for
    deferrals."""

    def skip() -> None:
        raise SkipMessage("not now")

    b = bench()
    b.actor(skip).send()
    b.work()
    b.drain()

    (record,) = (r for r in caplog.records if r.name == WORKER_LOGGER and r.levelno == logging.WARNING)
    assert "Message %s was skipped." == record.msg


def test_the_worker_signature() -> None:
    """Private: Worker takes a broker, queues, worker_timeout and worker_threads, and stop a timeout in milliseconds."""
    assert ["broker", "queues", "worker_timeout", "worker_threads"] == list(inspect.signature(Worker).parameters)
    assert ["self", "timeout"] == list(inspect.signature(Worker.stop).parameters)
