"""What differs from plain Dramatiq on purpose: one test for each entry of docs/differences.md, with its reason.

Each runs the same code with and without the stack, where plain Dramatiq can be run at all.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import CurrentMessage, Middleware, Retries

from dramatiq_guard import Classify, JitterBackoff, install
from dramatiq_guard.delivery import CARRIER
from dramatiq_guard.errors import SetupError
from tests.stack.rig import FAST, Rig, bare_broker, build, spin
from tests.support.waiting import wait_until

DOCS = Path(__file__).parents[2] / "docs" / "differences.md"


@pytest.fixture
def rigs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Rig, Rig]]]:
    """Give a stock rig and one with the stack, both in memory; what ends a thread is not an error of the test."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    built: list[Rig] = []

    def start(extra: Callable[[], Any] | None = None) -> tuple[Rig, Rig]:
        for way in ("stock", "install"):
            rig, put_on = build("stub", way, extra=() if extra is None else (extra(),))
            put_on()
            built.append(rig)
        return built[-2], built[-1]

    yield start
    for rig in built:
        rig.close()


def run(rig: Rig, work: Callable[..., Any], *, sending: dict[str, Any] | None = None, **options: Any) -> Any:
    """Declare an actor, send it one message, wait for the end; the message."""
    actor = rig.actor(actor_name="work", **{**FAST, **options})(work)
    if rig.worker is None:
        rig.work(threads=2)
    message = actor.send_with_options(**(sending or {}))
    rig.settle()
    return message


def fails(rig: Rig, error: type[BaseException] = OSError) -> Callable[[], None]:
    """An actor's function that always fails."""

    def work() -> None:
        rig.note("run")
        raise error

    return work


def test_d01_max_retries_holds_beside_retry_when(rigs: Any) -> None:
    """A predicate says whether, a budget says how many: an error that always may be retried must end somewhere."""
    stock, stack = rigs()
    for rig in (stock, stack):
        run(rig, fails(rig), max_retries=2, retry_when=lambda retries, error: retries < 6)

    assert (stock.count("run"), stack.count("run")) == (7, 3)


def test_d02_zero_is_a_value() -> None:
    """Dramatiq reads `Retries(min_backoff=0)` as 15 seconds."""
    assert Retries(min_backoff=0).min_backoff == 15_000
    assert JitterBackoff(min_backoff=0).min_backoff == 0


def test_d03_the_jitter_is_smaller_and_never_below_the_plan() -> None:
    """Between 10 and 20 % on top, so that waits can be foretold; Dramatiq adds up to 100 %."""
    backoff = JitterBackoff().backoff

    assert [backoff.bounds(retries) for retries in range(2)] == [(16_500, 18_000), (33_000, 36_000)]


def test_d04_a_retry_when_that_raises_is_retried(rigs: Any) -> None:
    """Dramatiq acks the message: a bug in a predicate must not lose it."""

    def predicate(retries: int, error: BaseException) -> bool:
        raise ValueError

    stock, stack = rigs()
    for rig in (stock, stack):
        run(rig, fails(rig), max_retries=1, retry_when=predicate)

    assert (stock.count("run"), stock.dead()) == (1, {})
    assert (stack.count("run"), stack.dead()) == (2, {"work": 1})


def test_d05_unsound_options_in_a_message_are_passed_over(rigs: Any) -> None:
    """Dramatiq's hook raises, and the message is acked: whatever travels is validated by nobody."""
    stock, stack = rigs()
    for rig in (stock, stack):
        run(rig, fails(rig), max_retries=1, sending={"max_retries": "many"})

    assert (stock.count("run"), stock.dead()) == (1, {})
    assert (stack.count("run"), stack.dead()) == (2, {"work": 1})


def test_d06_wrong_actor_options_are_refused_when_the_actor_is_declared(rigs: Any) -> None:
    """With Dramatiq they show when the first message fails, and it is lost."""
    stock, stack = rigs()
    stock.actor(actor_name="work", throws=["KeyError"])(fails(stock))

    with pytest.raises(SetupError, match="throws"):
        stack.actor(actor_name="work", throws=["KeyError"])(fails(stack))


def test_d07_the_built_in_table_gives_hopeless_errors_up_at_once() -> None:
    """A file that is not there is not there in an hour either; `Classify(builtin=False)` turns the table off."""
    runs = {}
    for builtin in (True, False):
        rig, _ = build("stub", "stock")
        install(rig.broker, Classify(builtin=builtin), JitterBackoff())
        run(rig, fails(rig, FileNotFoundError), max_retries=2)
        rig.close()
        runs[builtin] = rig.count("run")

    assert runs == {True: 1, False: 3}


@pytest.mark.parametrize("way", ["stock", "install"])
def test_d08_a_shutdown_is_no_attempt(redis_url: str, way: str) -> None:
    """With Dramatiq a deploy burns a retry, and dead-letters what has none."""
    rig, put_on = build("redis", way, redis_url)
    put_on()
    started = threading.Event()

    def work() -> None:
        started.set()
        spin()

    actor = rig.actor(actor_name="work", notify_shutdown=True, max_retries=0)(work)
    worker = rig.work(threads=1)
    message = actor.send()
    started.wait(10)
    worker.stop(timeout=10_000)
    rig.worker = None
    waiting = [dramatiq.Message.decode(body) for body in rig.broker.client.hvals("dramatiq:default.msgs")]
    dead = rig.dead()
    rig.close()

    if way == "stock":
        assert (waiting, dead) == ([], {"work": 1})
    else:
        assert dead == {}
        assert [each.message_id for each in waiting] == [message.message_id]
        assert "retries" not in waiting[0].options


class Slow(Middleware):
    """Takes longer in a hook than the actor's time limit."""

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        try:
            deadline = threading.Event()
            for _ in range(60):
                deadline.wait(0.002)
        except BaseException as error:
            message.options["hit"] = type(error).__name__
            HITS.append(type(error).__name__)
            raise


HITS: list[str] = []


def test_d09_a_time_limit_is_for_the_actor_alone(rigs: Any) -> None:
    """Dramatiq's runs until the last hook: it tears hooks, and a message that succeeded is run again (H4)."""
    outcomes = []
    for rig in rigs(Slow):
        HITS.clear()
        run(rig, lambda rig=rig: rig.note("run") and None, time_limit=40, max_retries=1)
        outcomes.append((list(HITS), rig.count("run")))

    (stock_hits, _), (stack_hits, stack_runs) = outcomes
    assert "TimeLimitExceeded" in stock_hits
    assert (stack_hits, stack_runs) == ([], 1)


def test_d10_a_retried_message_has_one_more_option(rigs: Any) -> None:
    """The history and the counters travel in it; nobody else reads it."""
    seen = []
    for rig in rigs():

        def work(rig: Rig = rig) -> None:
            message: Any = CurrentMessage.get_current_message()
            if rig.note("run") < 2:
                raise OSError
            rig.note("options", sorted(name for name in message.options if name != "redis_message_id"))

        run(rig, work, max_retries=1)
        seen.append(rig.notes("options")[0])

    stock, stack = seen
    assert set(stack) - set(stock) == {CARRIER}
    assert set(stock) <= set(stack)


def test_d11_what_is_changed_on_a_message_in_memory_does_not_travel(rigs: Any) -> None:
    """With Dramatiq it does, by accident; the copy is made of what was decoded, so that no hook can spoil it."""
    for rig in rigs():

        def work(payload: list[int], rig: Rig = rig) -> None:
            message: Any = CurrentMessage.get_current_message()
            rig.note("seen", message.options.get("mine"))
            message.options["mine"] = "changed"
            if rig.note("run") < 2:
                raise OSError

        run(rig, work, max_retries=1, sending={"args": ([],)})

        assert rig.notes("seen") == ([None, None] if rig.stack else [None, "changed"])


class Sees(Middleware):
    """Notes what the message looks like when its own hook is called."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        self.seen.append(message.failed)


def test_d12_middlewares_of_the_user_see_the_decision(rigs: Any) -> None:
    """JitterBackoff stands inside them: whether a message was given up is known when their hooks are called."""
    seen = []
    for rig in rigs(Sees):
        run(rig, fails(rig), max_retries=0)
        seen.append(next(m for m in rig.broker.middleware if isinstance(m, Sees)).seen)

    assert seen == [[False], [True]]


class Fails(Middleware):
    """Gives every message up that failed."""

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        if exception is not None:
            message.fail()


def test_d13_a_message_that_was_failed_is_not_retried(rigs: Any) -> None:
    """With Dramatiq it is retried *and* dead-lettered: three runs, three dead letters (H6)."""
    outcomes = []
    for rig in rigs(Fails):
        run(rig, fails(rig), max_retries=2)
        outcomes.append((rig.count("run"), sum(rig.dead().values())))

    assert outcomes == [(3, 3), (1, 1)]
    assert rig.letters is not None
    assert [letter.reason for letter in rig.letters.page().letters] == ["failed_by_middleware"]


class Orders(Middleware):
    """Notes the order of its hooks and of what is sent."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
        self.order.append(f"sent {message.actor_name}")

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        self.order.append(f"processed {message.actor_name}")

    def before_ack(self, broker: Any, message: Any) -> None:
        self.order.append(f"acking {message.actor_name}")

    def after_ack(self, broker: Any, message: Any) -> None:
        self.order.append(f"acked {message.actor_name}")


def test_d14_what_a_message_owes_is_sent_between_before_ack_and_after_ack(rigs: Any) -> None:
    """Where an error keeps the message unacked; in Dramatiq's after hooks it is swallowed, and the callback lost."""
    orders = []
    for rig in rigs(Orders):

        @rig.actor(actor_name="told", queue_name="unread")
        def told(message_data: Any, result: Any) -> None:
            return None

        run(rig, lambda: None, on_success="told")
        order = next(m for m in rig.broker.middleware if isinstance(m, Orders)).order
        orders.append([each for each in order if not each.endswith(" told") or each == "sent told"])

    stock, stack = orders
    assert stock.index("sent told") < stock.index("acking work")
    assert stack.index("acking work") < stack.index("sent told") < stack.index("acked work")


def test_d15_an_interrupt_in_a_hook_ends_no_thread(rigs: Any) -> None:
    """With Dramatiq the thread dies in silence, and the message is acked."""

    class Abort(BaseException):
        pass

    class Aborts(Middleware):
        def after_process_message(self, *_: Any, **__: Any) -> None:
            raise Abort

    stock, stack = rigs(Aborts)
    for rig in (stock, stack):
        run(rig, fails(rig), max_retries=0)
    stock_worker, stack_worker = stock.worker, stack.worker
    assert stock_worker is not None
    assert stack_worker is not None
    wait_until(lambda: sum(thread.is_alive() for thread in stock_worker.workers) == 1)

    assert (stock.dead(), stack.dead()) == ({}, {"work": 1})
    assert all(thread.is_alive() for thread in stack_worker.workers)


def test_d16_a_storm_of_failures_is_logged_in_lines(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The traceback of each fingerprint once a minute, one line for the others; `log="traceback"` as in Dramatiq."""
    tracebacks = []
    for rig in rigs():
        caplog.clear()
        with caplog.at_level(logging.ERROR, "dramatiq.worker.WorkerThread"):
            run(rig, fails(rig), max_retries=3)
        failures = [record for record in caplog.records if record.name == "dramatiq.worker.WorkerThread"]
        assert len(failures) == 4
        tracebacks.append(sum(record.exc_info is not None for record in failures))

    assert tracebacks == [4, 1]


def test_d17_the_traceback_that_travels_has_no_source_lines(rigs: Any) -> None:
    """Reading files is most of what a failed attempt costs; the letter has them."""
    texts = []
    for rig in rigs():
        work = fails(rig)
        run(rig, work, max_retries=0)
        texts.append(rig.dead_messages()[0].options["traceback"])

    assert "raise error" in texts[0]
    assert "raise error" not in texts[1]
    assert "test_differences.py" in texts[1]


def test_d18_the_stack_refuses_what_it_cannot_keep_its_promises_on() -> None:
    """Two retry middlewares, a wrong order, RabbitMQ without confirms: the worker does not boot."""
    broker = bare_broker("stub", None, [Retries(), JitterBackoff()])

    with pytest.raises(SetupError):
        dramatiq.Worker(broker).start()


def test_d19_every_death_leaves_a_letter(rigs: Any) -> None:
    """The broker's own entry is the body that was last enqueued: with max_retries=0 it says nothing of the failure."""
    stock, stack = rigs()
    for rig in (stock, stack):
        run(rig, fails(rig), max_retries=0)

    assert "last attempt" not in stock.dead_messages()[0].options
    assert stack.letters is not None
    (letter,) = stack.letters.page().letters
    assert letter.reason == "exhausted"
    assert letter.error is not None
    assert letter.error.type == "OSError"


def test_d20_time_limits_hold_in_a_bare_worker_too() -> None:
    """Without the dramatiq command there is no process boot, and Dramatiq's watch never starts (H12)."""
    rig, put_on = build("stub", "install")
    put_on()

    @rig.actor(time_limit=30, max_retries=0)
    def work() -> None:
        spin(5)

    # Not `rig.work()`, which boots a process first.
    rig.worker = dramatiq.Worker(rig.broker, worker_timeout=10, worker_threads=1)
    rig.worker.start()
    try:
        work.send()
        rig.settle()
        assert [type(message._exception).__name__ for message in rig.dead_messages()] == ["TimeLimitExceeded"]
    finally:
        rig.close()


def test_d21_a_failure_is_stored_as_a_result_before_the_nack(rigs: Any) -> None:
    """A crash between the two would lose it; whoever waits may see it a moment before the broker does."""

    class Looks(Middleware):
        def __init__(self) -> None:
            self.missing: list[bool] = []

        def after_nack(self, broker: Any, message: Any) -> None:
            results = broker.get_results_backend()
            self.missing.append(results.build_message_key(message) not in results.results)

    outcomes = []
    for rig in rigs(Looks):
        run(rig, fails(rig), max_retries=0, store_results=True)
        outcomes.append(next(m for m in rig.broker.middleware if isinstance(m, Looks)).missing)

    stock, stack = outcomes
    # The user's hook is called before Results' in both; only with the stack the result is there.
    assert (stock, stack) == ([True], [False])


def test_d22_guards_take_the_place_of_dramatiqs_own() -> None:
    """Retries, TimeLimit and ShutdownNotifications give way to subclasses, so `isinstance` still finds them."""
    rig, put_on = build("stub", "install")
    put_on()
    rig.work(threads=1)
    try:
        for kind in (Retries, dramatiq.middleware.TimeLimit, dramatiq.middleware.ShutdownNotifications):
            (found,) = [m for m in rig.broker.middleware if isinstance(m, kind)]
            assert type(found) is not kind
    finally:
        rig.close()


def test_every_difference_is_listed_and_tested() -> None:
    """docs/differences.md has an entry for each test here, and no other."""
    listed = set(re.findall(r"^\| (D\d\d) ", DOCS.read_text(), re.MULTILINE))
    tested = {name[5:8].upper() for name in globals() if re.match(r"test_d\d\d_", name)}

    assert listed == tested
