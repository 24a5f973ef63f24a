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
from dramatiq.common import dq_name, q_name, xq_name
from dramatiq.middleware import Retries, SkipMessage
from dramatiq.worker import ConsumerThread, Worker, WorkerThread

from .rig import Bench, Recorder, eventually

BenchMaker = Callable[..., Bench]
WORKER_LOGGER = "dramatiq.worker.WorkerThread"


def test_the_version_is_one_that_these_facts_were_seen_on() -> None:
    """H19: the facts were seen on Dramatiq 2.2; another minor version deserves a look at its changelog before it is trusted."""
    assert dramatiq.__version__.split(".")[:2] == ["2", "2"]


def test_a_worker_has_consumers_by_queue_and_worker_threads(bench: BenchMaker) -> None:
    """Private: Worker.consumers maps queue names, .DQ included, to ConsumerThreads, and Worker.workers lists WorkerThreads, on one work_queue."""
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
    """Private: ConsumerThread has consumer, delay_queue, work_queue, post_process_message, requeue_messages, pause, resume, running and paused."""
    b = bench()
    b.broker.declare_queue("default")
    worker = b.work()
    thread = worker.consumers["default"]
    eventually(lambda: thread.consumer is not None)

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
    """Private: delay_queue and work_queue hold items with .message, which is how what a worker has in memory is handed back."""
    b = bench()
    message = b.actor(lambda: None, actor_name="late").send_with_options(delay=60_000)
    thread = b.work().consumers["default.DQ"]
    eventually(lambda: thread.delay_queue.qsize() == 1)

    (item,) = thread.delay_queue.queue
    assert message.message_id == item.message.message_id
    assert item.priority == item.message.options["eta"]


def test_the_worker_thread_settles_through_its_queues_consumer_thread(bench: BenchMaker) -> None:
    """Private: a worker thread settles by consumers[message.queue_name].post_process_message, looked up each time, so it can be replaced on an instance."""
    b = bench()
    settled: list[tuple[str, threading.Thread]] = []
    b.broker.declare_queue("default")
    worker = b.work()
    thread = worker.consumers["default"]
    stock = thread.post_process_message

    def post_process_message(message: Any) -> None:
        settled.append((message.actor_name, threading.current_thread()))
        stock(message)

    thread.post_process_message = post_process_message  # type: ignore[method-assign]
    b.actor(lambda: None, actor_name="fine").send()
    b.drain()

    ((name, by),) = settled
    assert "fine" == name
    assert by in worker.workers


def test_the_settlement_uses_the_consumer_of_that_moment(bench: BenchMaker) -> None:
    """Private: post_process_message uses self.consumer as it is then, which after a reconnect is another than the message came from."""
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
    eventually(lambda: acked)


def test_the_retry_delay_of_the_barrier_is_read_each_time(bench: BenchMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private: POST_PROCESS_MESSAGE_RETRY_DELAY_SECS is a module constant of 5 s read at each repetition and slept by time.sleep of that module."""
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
    """Private: every start of a consumer calls broker.consume(queue_name=, prefetch=, timeout=), so an instance attribute wraps each consumer."""
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

    b.broker.consume = consume  # type: ignore[method-assign]
    worker = b.work(threads=2)
    eventually(lambda: len(calls) == 2)

    assert {"default", "default.DQ"} == {call["queue_name"] for call in calls}
    assert {("queue_name", "prefetch", "timeout")} == {tuple(call) for call in calls}
    assert [(4, 50)] == [(call["prefetch"], call["timeout"]) for call in calls if call["queue_name"] == "default"]
    eventually(lambda: {id(t.consumer) for t in worker.consumers.values()} == {id(c) for c in wrapped})


def test_a_failing_consumer_is_replaced_through_broker_consume(bench: BenchMaker) -> None:
    """Private: a consumer that raised is closed and made anew by broker.consume, so a wrapper there is stamped on every new channel."""
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

    b.broker.consume = consume  # type: ignore[method-assign]
    runs: list[int] = []
    b.actor(lambda: runs.append(1), actor_name="fine").send()
    b.work()
    b.drain()

    assert [1] == runs
    assert 3 == made.count("default")


def test_a_connection_error_of_the_consumer_drops_the_delay_queue(bench: BenchMaker) -> None:
    """Private: after a BrokerConnectionError the consumer thread replaces its delay_queue, without requeueing what was in it."""
    b = bench()
    b.actor(lambda: None, actor_name="late").send_with_options(delay=60_000)
    thread = b.work().consumers["default.DQ"]
    eventually(lambda: thread.delay_queue.qsize() == 1)
    former = thread.delay_queue

    def away() -> None:
        raise dramatiq.ConnectionClosed("away")

    requeued: list[Any] = []
    thread.requeue_messages = lambda messages: requeued.extend(messages)  # type: ignore[method-assign,assignment]
    thread.handle_delayed_messages = away  # type: ignore[method-assign]
    b.broker.queues["default.DQ"].put(dramatiq.Message("default.DQ", "late", (), {}, {"eta": None}).encode())
    eventually(lambda: thread.delay_queue is not former)

    assert [] == requeued
    del thread.handle_delayed_messages


def test_pausing_stops_the_fetching_and_not_the_working(bench: BenchMaker) -> None:
    """Private: ConsumerThread.pause leaves its consumer at the next idle moment and fetches no more, which is how a drain stops fetching."""
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
    eventually(lambda: runs == [1])


def test_names_of_delay_and_dead_letter_queues() -> None:
    """Private: a delay queue is {queue}.DQ and a dead letter queue {queue}.XQ, and q_name leads back from each."""
    assert ("default.DQ", "default.XQ") == (dq_name("default"), xq_name("default"))
    assert ("default", "default", "default") == (q_name("default"), q_name("default.DQ"), q_name("default.XQ"))


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
    """Private: an unhandled failure is logged by dramatiq.worker.WorkerThread with this text, the message and exc_info, before after_process."""
    logged_before: list[int] = []
    recorder = Recorder().on(
        "after_process_message", lambda _: logged_before.append(sum(r.levelno == logging.ERROR for r in caplog.records))
    )
    b = bench(recorder, Retries(max_retries=0))
    b.actor(fail).send()
    b.work()
    b.drain()

    (record,) = (r for r in caplog.records if r.levelno == logging.ERROR)
    assert WORKER_LOGGER == record.name
    assert "Failed to process message %s with unhandled exception." == record.msg
    assert isinstance(record.args, tuple)
    (message,) = record.args
    assert isinstance(message, dramatiq.MessageProxy)
    assert record.exc_info is not None
    assert RuntimeError is record.exc_info[0]
    assert [1] == logged_before


def test_a_filter_on_that_logger_can_drop_the_traceback(bench: BenchMaker, caplog: pytest.LogCaptureFixture) -> None:
    """Private: all worker threads share that logger, and a logging.Filter on it takes the traceback out before anything formats it."""

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


@pytest.mark.parametrize("error", [dramatiq.Retry("later"), dramatiq.RateLimitExceeded("full")], ids=["retry", "rate"])
def test_retry_and_rate_limit_are_not_logged_as_errors(
    bench: BenchMaker, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Private: Retry and RateLimitExceeded, and what derives from them, log no error, so what our seam re-raises may derive from Retry."""

    def put_off() -> None:
        raise error

    b = bench(Retries(max_retries=0))
    b.actor(put_off).send()
    b.work()
    b.drain()

    assert [] == [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_skip_is_a_warning_with_this_text(bench: BenchMaker, caplog: pytest.LogCaptureFixture) -> None:
    """Private: a skip is logged by the same logger as a warning with this text, which a filter of ours quiets for deferrals."""

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
