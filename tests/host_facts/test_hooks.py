"""Which hooks Dramatiq calls for which outcome, in which order, and what an exception out of one does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import dramatiq
import pytest
from dramatiq.errors import BrokerConnectionError
from dramatiq.middleware import (
    AgeLimit,
    Middleware,
    MiddlewareError,
    Retries,
    SkipMessage,
    TimeLimit,
    default_middleware,
)

from tests.support.waiting import wait_until

from .rig import Bench, Call, Recorder, Sabotage

BenchMaker = Callable[..., Bench]

PROCESSED = ["before_process_message", "after_process_message"]
ACKED = ["before_ack", "after_ack"]
NACKED = ["before_nack", "after_nack"]


class SettleAgain(MiddlewareError, BrokerConnectionError):
    """Both what ``emit_before`` lets through and what the settlement is repeated for."""


def of_delivery(recorder: Recorder, message_id: str) -> list[str]:
    """The hooks of one message without those of its first enqueueing."""
    hooks = recorder.hooks(message_id)
    assert hooks[:2] == ["before_enqueue", "after_enqueue"]
    return hooks[2:]


# The life of a message


def test_success_is_processed_then_acked(bench: BenchMaker) -> None:
    """H-table: a success is before_process, after_process with the result, before_ack, after_ack: the order
    decide-then-settle needs."""
    recorder = Recorder()
    b = bench(recorder)
    message = b.actor(lambda: None, actor_name="fine").send()
    b.work()
    b.drain()

    assert PROCESSED + ACKED == of_delivery(recorder, message.message_id)


def test_before_hooks_run_in_order_and_after_hooks_in_reverse(bench: BenchMaker) -> None:
    """H-table: before hooks run in list order and after hooks in reverse, so the stack's outer-to-inner order is the
    list's order."""
    journal: list[Call] = []
    b = bench(Recorder("outer", journal), Recorder("inner", journal))
    b.actor(lambda: None, actor_name="fine").send()
    b.work()
    b.drain()

    order = {hook: [c.label for c in journal if c.hook == hook] for hook in PROCESSED + ACKED}
    assert {
        "before_process_message": ["outer", "inner"],
        "after_process_message": ["inner", "outer"],
        "before_ack": ["outer", "inner"],
        "after_ack": ["inner", "outer"],
    } == order


def test_a_retry_is_a_copy_enqueued_before_the_original_is_acked(bench: BenchMaker) -> None:
    """H-table: a stock retry is enqueued inside after_process and the original acked after it: a crash between
    leaves two copies."""
    recorder = Recorder()
    b = bench(Retries(max_retries=1, min_backoff=1), recorder)

    def fail_once() -> None:
        if len(recorder.calls("before_process_message")) == 1:
            raise RuntimeError("first")

    message = b.actor(fail_once).send()
    b.work()
    b.drain()

    hooks = of_delivery(recorder, message.message_id)
    assert [*PROCESSED, "before_enqueue", "after_enqueue", "before_ack"] == hooks[:5]


def test_a_due_delayed_message_is_acked_on_the_consumer_thread_before_it_was_ever_processed(bench: BenchMaker) -> None:
    """H10: the .DQ copy is delayed, re-enqueued and acked by the consumer thread, so an ack hook is no proof that a
    job ran."""
    recorder = Recorder()
    b = bench(recorder)
    seen: list[threading.Thread] = []
    message = b.actor(lambda: seen.append(threading.current_thread()), actor_name="late").send_with_options(delay=20)
    worker = b.work()
    b.drain()

    assert ["before_delay_message", "before_enqueue", "after_enqueue"] == of_delivery(recorder, message.message_id)[:3]
    wait_until(lambda: len(recorder.calls("after_ack")) == 2)
    delayed, processed = sorted(recorder.calls("before_ack"), key=lambda c: c.subject.queue_name == "default")
    assert "default.DQ" == delayed.subject.queue_name
    assert worker.consumers["default.DQ"] is delayed.thread
    assert seen == [processed.thread]
    assert processed.thread in worker.workers
    assert delayed.subject is not processed.subject
    assert "before_process_message" not in [c.hook for c in recorder.journal if c.subject is delayed.subject]


def test_a_delayed_message_is_enqueued_twice(bench: BenchMaker) -> None:
    """H10: enqueue hooks see a delayed message twice (.DQ with the delay, then the canonical queue with None), so
    one counts only the first."""
    recorder = Recorder()
    b = bench(recorder)
    b.actor(lambda: None, actor_name="late").send_with_options(delay=20)
    b.work()
    b.drain()

    seen = [(c.details["queue"], c.details["delay"]) for c in recorder.calls("before_enqueue")]
    assert [("default.DQ", 20), ("default", None)] == seen


@pytest.mark.parametrize("options", [{"max_retries": 0}, {"throws": RuntimeError}], ids=["exhausted", "throws"])
def test_an_exhausted_or_thrown_message_is_failed_and_then_nacked(
    bench: BenchMaker, options: dict[str, object]
) -> None:
    """H-table: giving up sets message.failed in after_process and nacks afterwards, which is the channel our
    decision uses."""
    recorder = Recorder()
    b = bench(recorder, Retries())

    def fail() -> None:
        raise RuntimeError("no")

    message = b.actor(fail, **options).send()
    b.work()
    b.drain()

    assert PROCESSED + NACKED == of_delivery(recorder, message.message_id)
    (decided,) = recorder.calls("after_process_message")
    assert isinstance(decided.details["exception"], RuntimeError)
    assert decided.details["failed"] is True, "the inner Retries ran first and marked it"
    assert [message.message_id] == [dead.message_id for dead in b.broker.dead_letters]


@pytest.mark.parametrize("failed", [False, True])
def test_a_skip_reaches_every_after_skip_and_no_inner_before_process(bench: BenchMaker, failed: bool) -> None:
    """H-table: a skip ends the before_process chain but calls after_skip on all middlewares, so those must cope with
    no delivery begun."""
    journal: list[Call] = []
    outer, inner = Recorder("outer", journal), Recorder("inner", journal)

    def skip(message: dramatiq.broker.MessageProxy) -> None:
        if failed:
            message.fail()
        raise SkipMessage("not now")

    b = bench(outer, Recorder("skips", journal).on("before_process_message", skip), inner)
    runs: list[int] = []
    message = b.actor(lambda: runs.append(1), actor_name="skipped").send()
    b.work()
    b.drain()

    assert [] == runs
    assert ["before_enqueue", "after_enqueue", "after_skip_message", *(NACKED if failed else ACKED)] == [
        c.hook for c in journal if c.label == "inner" and c.subject.message_id == message.message_id
    ]
    assert ["inner", "skips", "outer"] == [c.label for c in journal if c.hook == "after_skip_message"]
    assert ([message.message_id] if failed else []) == [m.message_id for m in b.broker.dead_letters]


def test_fail_without_raising_before_processing_takes_the_success_hooks_and_then_nacks(bench: BenchMaker) -> None:
    """H-table: fail() in before_process skips the actor yet reports success with None, so quarantine must raise as
    well as fail."""
    recorder = Recorder().on("before_process_message", lambda message: message.fail())
    b = bench(recorder)
    runs: list[int] = []
    message = b.actor(lambda: runs.append(1), actor_name="refused").send()
    b.work()
    b.drain()

    assert [] == runs
    assert PROCESSED + NACKED == of_delivery(recorder, message.message_id)
    (after,) = recorder.calls("after_process_message")
    assert (None, None) == (after.details["result"], after.details["exception"])


def test_an_unknown_actor_is_only_nacked_and_on_the_consumer_thread(bench: BenchMaker) -> None:
    """H-table: an unknown actor passes nothing but the nack hooks, on the consumer thread, so the letter is written
    there without sleeping."""
    recorder = Recorder()
    b = bench(recorder)
    b.broker.declare_queue("default")
    message = b.broker.enqueue(dramatiq.Message("default", "nobody", (), {}, {}))
    worker = b.work()
    wait_until(lambda: recorder.calls("after_nack"))

    assert NACKED == of_delivery(recorder, message.message_id)
    before_nack, after_nack = recorder.journal[-2:]
    assert worker.consumers["default"] is before_nack.thread is after_nack.thread
    assert isinstance(before_nack.details["exception"], dramatiq.errors.ActorNotFound)
    with pytest.raises(dramatiq.errors.ActorNotFound):
        b.broker.get_actor("nobody")


# H1, H2: exceptions that Dramatiq swallows


def test_a_plain_exception_before_processing_fails_open(bench: BenchMaker) -> None:
    """H1: a plain exception in before_process is swallowed and the actor runs, so a guard must never be built on
    one."""
    recorder = Recorder().raising("before_process_message", ValueError("the guard's store is down"))
    b = bench(recorder)
    runs: list[int] = []
    b.actor(lambda: runs.append(1), actor_name="guarded").send()
    b.work()
    b.drain()

    assert [1] == runs


def test_a_middleware_error_before_processing_takes_the_exception_path(bench: BenchMaker) -> None:
    """H1: a MiddlewareError that is no SkipMessage stops the actor and arrives in after_process as an ordinary
    exception."""
    error = MiddlewareError("refused")
    recorder = Recorder().raising("before_process_message", error)
    b = bench(recorder)
    runs: list[int] = []
    b.actor(lambda: runs.append(1), actor_name="guarded").send()
    b.work()
    b.drain()

    assert [] == runs
    (after,) = recorder.calls("after_process_message")
    assert error is after.details["exception"]


def test_a_middleware_error_that_is_a_retry_is_honoured_with_its_delay(bench: BenchMaker) -> None:
    """H1: a class that is both MiddlewareError and Retry puts a message off from a before hook with the delay it
    names."""

    class PutOff(MiddlewareError, dramatiq.Retry):
        pass

    recorder = Recorder().raising("before_process_message", PutOff("later", delay=37), times=1)
    b = bench(recorder, Retries())
    runs: list[int] = []
    b.actor(lambda: runs.append(1), actor_name="put_off").send()
    b.work()
    b.drain()

    assert [1] == runs
    assert [None, 37, None] == [c.details["delay"] for c in recorder.calls("before_enqueue")]


def test_a_retry_that_cannot_be_enqueued_is_acked_and_lost(bench: BenchMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """H2: stock Retries enqueues in an after hook whose exception is swallowed, and the ack follows: why our retry
    is sent at the barrier."""
    recorder = Recorder()
    b = bench(recorder, Retries(max_retries=3, min_backoff=1))
    runs: list[int] = []

    def fail() -> None:
        runs.append(1)
        raise RuntimeError("no")

    b.actor(fail).send()

    def hiccup(*_: object, **__: object) -> None:
        raise dramatiq.errors.ConnectionClosed("hiccup")

    monkeypatch.setattr(b.broker, "enqueue", hiccup)
    b.work()
    b.drain()

    assert ([1], [], 0) == (runs, b.broker.dead_letters, b.unsettled())
    assert 1 == len(recorder.calls("after_ack"))


def test_a_raising_retry_when_loses_the_message(bench: BenchMaker) -> None:
    """H2: a raising retry_when is swallowed and the message acked, so an undecided delivery must count as a failed
    attempt."""
    b = bench(Retries(min_backoff=1))
    runs: list[int] = []

    def fail() -> None:
        runs.append(1)
        raise RuntimeError("no")

    def broken_predicate(retries: int, exception: BaseException) -> bool:
        raise KeyError("a bug in the predicate")

    b.actor(fail, retry_when=broken_predicate).send()
    b.work()
    b.drain()

    assert ([1], [], 0) == (runs, b.broker.dead_letters, b.unsettled())


# H3: the settle barrier


@pytest.mark.parametrize("hook", ["before_ack", "before_nack"])
def test_a_connection_error_before_settling_makes_dramatiq_settle_again(bench: BenchMaker, hook: str) -> None:
    """H3: the settle barrier leans on Dramatiq repeating before_ack/before_nack, message unsettled, while they raise
    this error."""
    unsettled: list[int] = []
    recorder = Recorder().raising(hook, SettleAgain("store out"), times=3)
    outer = Recorder("outer").on(hook, lambda _: unsettled.append(b.unsettled()))
    b = bench(outer, recorder, Retries(max_retries=0))

    def run() -> None:
        if hook == "before_nack":
            raise RuntimeError("no")

    b.actor(run).send()
    worker = b.work()
    b.drain()

    assert 4 == len(recorder.calls(hook)), "three failures and a success"
    assert [1, 1, 1, 1] == unsettled, "the outer middleware is called each time too, with the message still unsettled"
    assert 1 == len(recorder.calls(hook.replace("before", "after")))
    assert {True} == {c.thread in worker.workers for c in recorder.calls(hook)}, "on the worker thread"
    assert (1 if hook == "before_nack" else 0) == len(b.broker.dead_letters)


def test_the_barrier_does_not_repeat_the_hooks_before_it(bench: BenchMaker) -> None:
    """H3: only the settlement is repeated, never the actor nor after_process, so a decision taken there is taken
    once."""
    recorder = Recorder().raising("before_ack", SettleAgain("store out"), times=3)
    b = bench(recorder)
    runs: list[int] = []
    b.actor(lambda: runs.append(1), actor_name="once").send()
    b.work()
    b.drain()

    assert [1] == runs
    assert 1 == len(recorder.calls("after_process_message"))


def test_a_connection_error_that_is_no_middleware_error_does_not_hold_the_message(bench: BenchMaker) -> None:
    """H3: a bare BrokerConnectionError from a before hook is swallowed and the message acked, so the barrier's error
    must be both."""
    recorder = Recorder().raising("before_ack", BrokerConnectionError("store out"))
    b = bench(recorder)
    b.actor(lambda: None, actor_name="fine").send()
    b.work()
    b.drain()

    assert 1 == len(recorder.calls("before_ack"))
    assert 1 == len(recorder.calls("after_ack"))


def test_a_middleware_error_that_is_no_connection_error_leaves_the_message_unsettled(bench: BenchMaker) -> None:
    """H3: another MiddlewareError ends the settlement at once and leaves the message unsettled, which is how
    shutdown gives up."""
    recorder = Recorder().raising("before_ack", MiddlewareError("give up"))
    b = bench(recorder)
    b.actor(lambda: None, actor_name="fine").send()
    worker = b.work()
    wait_until(lambda: recorder.calls("before_ack"))
    wait_until(lambda: worker.work_queue.unfinished_tasks == 0)

    assert 1 == b.unsettled()
    assert 1 == len(recorder.calls("before_ack"))
    assert [] == recorder.calls("after_ack")
    assert {True} == {thread.is_alive() for thread in worker.workers}


def test_settling_again_on_the_consumer_thread_stops_the_queue(bench: BenchMaker) -> None:
    """H3: on a consumer thread the barrier holds up the whole queue, so there a settler thread must repeat instead."""
    open_again = threading.Event()

    def hold(_: object) -> None:
        if not open_again.is_set():
            raise SettleAgain("store out")

    recorder = Recorder().on("before_nack", hold)
    b = bench(recorder)
    runs: list[int] = []
    actor = b.actor(lambda: runs.append(1), actor_name="fine")
    b.broker.enqueue(dramatiq.Message("default", "nobody", (), {}, {}))
    actor.send()
    b.work()
    wait_until(lambda: len(recorder.calls("before_nack")) >= 10)

    assert [] == runs
    open_again.set()
    wait_until(lambda: runs == [1])


def test_a_settlement_that_keeps_failing_outlives_the_stop_of_its_worker(bench: BenchMaker) -> None:
    """H3: Worker.stop waits for a thread inside the barrier until its timeout, so once shutdown has begun a
    settlement must give up by itself."""
    open_again = threading.Event()

    def hold(_: object) -> None:
        if not open_again.is_set():
            raise SettleAgain("store out")

    b = bench(Recorder().on("before_ack", hold))
    b.actor(lambda: None, actor_name="fine").send()
    worker = b.work(threads=1)
    wait_until(lambda: worker.work_queue.unfinished_tasks == 1)
    worker.stop(timeout=200)
    b.worker = None

    assert worker.workers[0].is_alive()
    open_again.set()
    worker.workers[0].join(5)
    assert not worker.workers[0].is_alive()


# H4: interruptions inside hooks


def test_an_interruption_in_an_after_hook_of_a_failure_acks_and_kills_the_thread(
    bench: BenchMaker, deaths: list[BaseException]
) -> None:
    """H4: a BaseException in after_process of a failure acks the message and ends the worker thread, so interrupts
    are disarmed before hooks run."""
    b = bench(Recorder().raising("after_process_message", Sabotage()), Recorder())

    def fail() -> None:
        raise RuntimeError("no")

    b.actor(fail).send()
    worker = b.work(threads=1)
    wait_until(lambda: deaths)

    assert isinstance(deaths[0], Sabotage)
    assert (0, []) == (b.unsettled(), b.broker.dead_letters)
    wait_until(lambda: not worker.workers[0].is_alive())


def test_a_worker_without_threads_still_fetches(bench: BenchMaker, deaths: list[BaseException]) -> None:
    """H4: with its last worker thread dead a process still prefetches messages that nobody will run, so thread death
    must be fatal."""
    b = bench(Recorder().raising("after_process_message", Sabotage()))

    def fail() -> None:
        raise RuntimeError("no")

    actor = b.actor(fail)
    actor.send()
    worker = b.work(threads=1)
    wait_until(lambda: deaths)
    actor.send()

    wait_until(lambda: worker.work_queue.qsize() == 1)


def test_an_interruption_in_an_after_hook_of_a_success_runs_the_inner_hooks_twice(bench: BenchMaker) -> None:
    """H4: a BaseException in after_process of a success calls the inner hooks again with that exception: a success
    turns into a retry."""
    inner = Recorder()
    b = bench(Recorder().raising("after_process_message", Sabotage(), times=1), inner, Retries(max_retries=0))
    b.actor(lambda: None, actor_name="fine").send()
    b.work()
    b.drain()

    assert [type(None), Sabotage] == [type(c.details["exception"]) for c in inner.calls("after_process_message")]
    assert 1 == len(b.broker.dead_letters)


def test_an_interruption_before_acking_leaves_the_message_unacked_and_kills_the_thread(
    bench: BenchMaker, deaths: list[BaseException]
) -> None:
    """H4: a BaseException in before_ack leaves the message unsettled and ends the thread, so no interrupt may be
    armed in a settlement."""
    b = bench(Recorder().raising("before_ack", Sabotage()))
    b.actor(lambda: None, actor_name="fine").send()
    worker = b.work(threads=1)
    wait_until(lambda: deaths)

    wait_until(lambda: not worker.workers[0].is_alive())
    assert 1 == b.unsettled()


def test_the_default_time_limit_surrounds_the_other_default_middlewares() -> None:
    """H4: TimeLimit is second in the default list, so all later after hooks run under its deadline and install must
    replace it."""
    assert [AgeLimit, TimeLimit] == default_middleware[:2]
    assert Retries is default_middleware[-1]


# H6–H9: fail, skip, identity


@pytest.mark.parametrize("outer", [True, False])
def test_fail_does_not_stop_stock_retries(bench: BenchMaker, outer: bool) -> None:
    """H6: fail() beside stock Retries is retried and dead-lettered each time, so only one middleware may decide."""
    recorder = Recorder().on("after_process_message", lambda message: message.fail())
    retries = Retries(max_retries=2, min_backoff=1)
    b = bench(recorder, retries) if outer else bench(retries, recorder)
    runs: list[int] = []

    def fail() -> None:
        runs.append(1)
        raise RuntimeError("no")

    b.actor(fail).send()
    b.work()
    b.drain()

    assert (3, 3) == (len(runs), len(b.broker.dead_letters))


def test_two_retries_in_one_stack_multiply_a_message(bench: BenchMaker) -> None:
    """H6: two Retries in one stack make 7 runs and 5 dead letters of one send, so the boot check refuses a second
    one."""
    b = bench(Retries(max_retries=3, min_backoff=1), Retries(max_retries=3, min_backoff=1))
    runs: list[int] = []

    def fail() -> None:
        runs.append(1)
        raise RuntimeError("no")

    b.actor(fail).send()
    b.work()
    b.drain()

    assert (7, 5) == (len(runs), len(b.broker.dead_letters))


def test_a_guard_on_the_message_id_alone_loses_the_first_retry(bench: BenchMaker) -> None:
    """H8: message_id is constant over retries and delays, so a guard keyed on it alone skips the retry as a
    duplicate and the job is lost."""
    seen: set[str] = set()

    def guard(message: dramatiq.broker.MessageProxy) -> None:
        if message.message_id in seen:
            raise SkipMessage("duplicate")
        seen.add(message.message_id)

    recorder = Recorder().on("before_process_message", guard)
    b = bench(recorder, Retries(min_backoff=1))
    runs: list[int] = []

    def fail_once() -> None:
        runs.append(1)
        raise RuntimeError("transient")

    message = b.actor(fail_once).send()
    b.work()
    b.drain()

    assert {message.message_id} == {c.subject.message_id for c in recorder.journal}
    assert ([1], [], 0) == (runs, b.broker.dead_letters, b.unsettled())


def test_one_proxy_carries_a_whole_delivery(bench: BenchMaker) -> None:
    """H9: all hooks of one delivery see the same proxy and it takes attributes, which is where our Delivery hangs."""
    recorder = Recorder()

    def stamp(message: dramatiq.broker.MessageProxy) -> None:
        message._stamp = "ours"

    recorder.on("before_process_message", stamp)
    b = bench(recorder)
    b.actor(lambda: None, actor_name="fine").send()
    b.work()
    b.drain()

    proxies = [c.subject for c in recorder.journal if c.hook in PROCESSED + ACKED]
    assert 4 == len(proxies)
    assert 1 == len({id(p) for p in proxies})
    assert "ours" == proxies[-1]._stamp


def test_a_proxy_is_not_hashable() -> None:
    """H9: a proxy defines equality without a hash, so deliveries cannot be kept in a dict or WeakKeyDictionary keyed
    on it."""
    message = dramatiq.Message("default", "fine", (), {}, {})
    proxy = dramatiq.MessageProxy(message)

    assert proxy == message
    with pytest.raises(TypeError, match="unhashable"):
        hash(proxy)


# H14: raising while enqueueing, hooks that are coroutines


def test_raising_in_before_enqueue_loses_a_retry(bench: BenchMaker) -> None:
    """H14: a MiddlewareError in before_enqueue during a retry is swallowed by the after hook around it and the job
    is lost."""

    def refuse(message: dramatiq.Message[None]) -> None:
        if message.options.get("retries"):
            raise MiddlewareError("no")

    b = bench(Recorder().on("before_enqueue", refuse), Retries(min_backoff=1))
    runs: list[int] = []

    def fail() -> None:
        runs.append(1)
        raise RuntimeError("transient")

    b.actor(fail).send()
    b.work()
    b.drain()

    assert ([1], [], 0) == (runs, b.broker.dead_letters, b.unsettled())


def test_raising_in_before_enqueue_crash_loops_the_delay_consumer(bench: BenchMaker) -> None:
    """H14: a MiddlewareError as a delayed message falls due restarts the delay consumer again and again and the job
    never runs."""
    consumed: list[str] = []

    def refuse(message: dramatiq.Message[None]) -> None:
        if message.queue_name == "default":
            raise MiddlewareError("no")

    b = bench(Recorder().on("before_enqueue", refuse))
    stock_consume = b.broker.consume

    def consume(queue_name: str, prefetch: int, timeout: int) -> dramatiq.Consumer:
        consumed.append(queue_name)
        return stock_consume(queue_name, prefetch, timeout)

    b.broker.consume = consume
    runs: list[int] = []
    actor = b.actor(lambda: runs.append(1), actor_name="late")
    actor.send_with_options(delay=1)
    b.work()
    wait_until(lambda: consumed.count("default.DQ") == 2)
    actor.send_with_options(delay=1)
    wait_until(lambda: consumed.count("default.DQ") == 3)

    assert [] == runs


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_async_hooks_are_never_awaited(bench: BenchMaker) -> None:
    """H14: a hook that is a coroutine function is called and its coroutine dropped, so every hook must be a plain
    function."""
    ran: list[int] = []

    class Async(Middleware):
        async def before_process_message(self, broker: object, message: object) -> None:
            ran.append(1)

    recorder = Recorder()
    b = bench(Async(), recorder)
    b.actor(lambda: None, actor_name="fine").send()
    b.work()
    b.drain()

    assert [] == ran
    assert 1 == len(recorder.calls("after_ack"))
