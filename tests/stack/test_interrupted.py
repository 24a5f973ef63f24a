"""Whatever interrupts an attempt, wherever it lands: the message is retried or dead-lettered, and no thread dies.

Each place is hit 200 times.  Beside it stands what plain Dramatiq does, which is why the stack is built as it is.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Interrupt, Middleware
from dramatiq.threading import raise_thread_exception

from dramatiq_guard.testing.valkey import PrivateValkey
from tests.stack.rig import FAST, Rig, build, spin
from tests.support.waiting import wait_until

RUNS = 200
THREADS = 8

#: No retry, so that an attempt that is counted is a dead letter at once.
ONCE: dict[str, Any] = {"max_retries": 0}


class Abort(Interrupt):
    """What a middleware raises in a worker thread to abort the message that runs there, as dramatiq-abort does."""


class Expected(Exception):
    """What the actors raise by themselves."""


class Hit(Middleware):
    """Calls a function in one hook of each message, the first time that this hook meets it."""

    def __init__(self, hook: str, action: Callable[[], None]) -> None:
        self.hook, self.action = hook, action
        self.seen: set[str] = set()
        setattr(self, hook, self._hit)

    def _hit(self, broker: Any, message: Any, **_: Any) -> None:
        if message.message_id not in self.seen:
            self.seen.add(message.message_id)
            self.action()


def abort_here() -> None:
    """Raise in this thread at once, whatever it is in."""
    raise Abort


def abort_soon() -> None:
    """Raise in this thread asynchronously, as another thread would: it arrives at the next safe point."""
    raise_thread_exception(threading.get_ident(), Abort)


ACTIONS = {"at once": abort_here, "asynchronously": abort_soon}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Give a rig in memory, with middlewares of the test's own; no warning of a thread that died is an error here."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    built: list[Rig] = []

    def start(way: str = "install", *extra: Any, kind: str = "stub", url: str | None = None) -> Rig:
        rig, put_on = build(kind, way, url, extra=extra)
        put_on()
        built.append(rig)
        return rig

    yield start
    for rig in built:
        rig.close()


def outcome(rig: Rig, actor: Any, *, timeout: float = 30.0) -> tuple[int, int, int]:
    """Send 200 messages and say how many runs there were, how many messages died, and how many threads live."""
    worker = rig.worker or rig.work(threads=THREADS)
    for _ in range(RUNS):
        actor.send()
    rig.settle(timeout)
    return rig.count("run"), len(rig.dead_messages()), living(worker)


def living(worker: dramatiq.Worker) -> int:
    """How many worker threads are alive."""
    return sum(thread.is_alive() for thread in worker.workers)


def failing(rig: Rig, **options: Any) -> Any:
    """An actor that fails by itself, so that what comes after it is what is interrupted."""

    @rig.actor(actor_name="failing", **{**ONCE, **options})
    def work() -> None:
        rig.note("run")
        raise Expected

    return work


def succeeding(rig: Rig, **options: Any) -> Any:
    """An actor that succeeds."""

    @rig.actor(actor_name="succeeding", **{**ONCE, **options})
    def work() -> None:
        rig.note("run")

    return work


# -- the body --------------------------------------------------------------------------------------------------------


def test_a_time_limit_in_the_body_is_a_failed_attempt(run: Callable[..., Rig]) -> None:
    """Each of 200 runs over their time limit is dead-lettered, once, when there are no retries."""
    rig = run()

    @rig.actor(time_limit=1, **ONCE)
    def work() -> None:
        rig.note("run")
        spin()

    assert outcome(rig, work) == (RUNS, RUNS, THREADS)
    assert {type(message._exception).__name__ for message in rig.dead_messages()} == {"TimeLimitExceeded"}


def test_a_time_limit_that_falls_due_as_the_body_returns_counts_once(run: Callable[..., Rig]) -> None:
    """At the edge between in time and too late a message either succeeded or died, never both and never neither."""
    rig = run()
    returned: list[int] = []

    @rig.actor(time_limit=20, **ONCE)
    def work() -> None:
        rig.note("run")
        limit = threading.Event()
        # The watch looks every 20 ms: about half of the interrupts land within the last lines.
        limit.wait(0.02 + random.random() * 0.02)
        returned.append(1)

    runs, dead, threads = outcome(rig, work)

    assert (runs, threads) == (RUNS, THREADS)
    assert RUNS - len(returned) <= dead <= RUNS


# -- logging ---------------------------------------------------------------------------------------------------------


class Interrupting(logging.Filter):
    """Hits whoever logs a failure."""

    def __init__(self, action: Callable[[], None], text: str) -> None:
        super().__init__()
        self.action, self.text = action, text

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(self.text):
            self.action()
        return True


@pytest.fixture
def interrupting_log() -> Iterator[Callable[..., None]]:
    """Interrupt whoever logs a text that begins so."""
    loggers: list[tuple[logging.Logger, logging.Filter]] = []

    def put(action: Callable[[], None], text: str, logger: str = "dramatiq.worker.WorkerThread") -> None:
        filter_ = Interrupting(action, text)
        # First, before anything changes the text.
        logging.getLogger(logger).filters.insert(0, filter_)
        loggers.append((logging.getLogger(logger), filter_))

    yield put
    for logger, filter_ in loggers:
        logger.removeFilter(filter_)


@pytest.mark.parametrize("how", ACTIONS)
def test_an_interrupt_while_the_failure_is_logged_loses_nothing(
    run: Callable[..., Rig], interrupting_log: Callable[..., None], how: str
) -> None:
    """The worker is hit as it logs the error, before any middleware has seen it: the message dies as planned."""
    rig = run()
    actor = failing(rig)
    rig.work(threads=THREADS)
    interrupting_log(ACTIONS[how], "Failed to process message")

    assert outcome(rig, actor) == (RUNS, RUNS, THREADS)


@pytest.mark.parametrize("how", ACTIONS)
def test_an_interrupt_while_the_failure_is_logged_costs_no_retry(
    run: Callable[..., Rig], interrupting_log: Callable[..., None], how: str
) -> None:
    """With one retry each message runs twice."""
    rig = run()
    actor = failing(rig, max_retries=1, **FAST)
    rig.work(threads=THREADS)
    interrupting_log(ACTIONS[how], "Failed to process message")

    assert outcome(rig, actor) == (2 * RUNS, RUNS, THREADS)


def test_plain_dramatiq_acks_what_was_interrupted_while_it_logged(
    run: Callable[..., Rig], interrupting_log: Callable[..., None]
) -> None:
    """The control: the message is gone, and the thread with it."""
    rig = run("stock")
    actor = failing(rig)
    worker = rig.work(threads=1)
    interrupting_log(abort_here, "Failed to process message")
    message = actor.send()
    wait_until(lambda: living(worker) == 0)

    assert rig.ends(message) == {"ack": 1}
    assert rig.dead_messages() == []


# -- hooks -----------------------------------------------------------------------------------------------------------

FAILURE_HOOKS = ("before_process_message", "after_process_message", "before_nack", "after_nack")
SUCCESS_HOOKS = ("after_process_message", "before_ack", "after_ack")


@pytest.mark.parametrize("how", ACTIONS)
@pytest.mark.parametrize("hook", FAILURE_HOOKS)
def test_an_interrupt_in_a_hook_of_a_failing_message_loses_nothing(
    run: Callable[..., Rig], hook: str, how: str
) -> None:
    """Each message that fails dies once, whichever hook of another middleware is hit."""
    rig = run("install", Hit(hook, ACTIONS[how]))
    runs, dead, threads = outcome(rig, failing(rig))

    # An interrupt before the actor is an attempt too, as in Dramatiq, but no run.
    assert runs == RUNS if hook != "before_process_message" else runs <= RUNS
    assert (dead, threads) == (RUNS, THREADS)
    assert rig.letters is not None
    assert rig.letters.depth() == RUNS


@pytest.mark.parametrize("how", ACTIONS)
@pytest.mark.parametrize("hook", ["before_process_message", "after_process_message", "before_ack", "after_ack"])
def test_an_interrupt_in_a_hook_costs_no_retry(run: Callable[..., Rig], hook: str, how: str) -> None:
    """A message that fails and has a retry left is tried again, whichever hook is hit."""
    rig = run("install", Hit(hook, ACTIONS[how]))

    @rig.actor(max_retries=2, **FAST)
    def work() -> None:
        message_id = dramatiq.middleware.CurrentMessage.get_current_message().message_id  # type: ignore[union-attr]
        rig.note("run")
        if rig.note(message_id) < 2:
            raise Expected

    runs, dead, threads = outcome(rig, work)

    assert (dead, threads) == (0, THREADS)
    assert runs == 2 * RUNS


@pytest.mark.parametrize("how", ACTIONS)
@pytest.mark.parametrize("hook", SUCCESS_HOOKS)
def test_an_interrupt_in_a_hook_of_a_message_that_succeeded_runs_nothing_again(
    run: Callable[..., Rig], hook: str, how: str
) -> None:
    """The work is done: the message is acked, its callback sent once, whichever hook is hit."""
    rig = run("install", Hit(hook, ACTIONS[how]))

    @rig.actor
    def told(message_data: dict[str, Any], result: Any) -> None:
        rig.note("told", message_data["message_id"])

    actor = succeeding(rig, max_retries=3, on_success="told", on_failure="told", **FAST)

    assert outcome(rig, actor) == (RUNS, 0, THREADS)
    assert len(rig.notes("told")) == len(set(rig.notes("told"))) == RUNS


@pytest.mark.parametrize("how", ACTIONS)
@pytest.mark.parametrize("hook", ["before_ack", "after_ack"])
def test_an_interrupt_in_a_hook_of_a_delayed_message_moves_it_once(
    run: Callable[..., Rig], hook: str, how: str
) -> None:
    """The hooks of the delayed copy run on the consumer's thread, which goes on; each message runs once."""
    rig = run("install", Hit(hook, ACTIONS[how]))
    actor = succeeding(rig)
    worker = rig.work(threads=THREADS)
    for _ in range(RUNS):
        actor.send_with_options(delay=10)
    rig.settle()

    assert rig.count("run") == RUNS
    assert all(thread.is_alive() for thread in worker.consumers.values())


@pytest.mark.parametrize(
    ("hook", "ends"), [("after_process_message", {"ack": 1}), ("before_ack", {})], ids=["after_process", "before_ack"]
)
def test_plain_dramatiq_loses_the_thread_and_the_message(run: Callable[..., Rig], hook: str, ends: Any) -> None:
    """The control: an interrupt in a hook after a failure acks the message, in one before the ack strands it."""
    rig = run("stock", Hit(hook, abort_here))
    actor = failing(rig) if hook == "after_process_message" else succeeding(rig)
    worker = rig.work(threads=1)
    message = actor.send()
    wait_until(lambda: living(worker) == 0)

    assert rig.ends(message) == ends
    assert rig.dead_messages() == []


# -- what is asked on the way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, Abort])
def test_a_retry_when_that_raises_costs_no_retry(run: Callable[..., Rig], error: type[BaseException]) -> None:
    """A predicate that raises is logged, and the error is retried up to its max_retries."""
    rig = run()

    def predicate(retries: int, exception: BaseException) -> bool:
        raise error("a bug")

    assert outcome(rig, failing(rig, max_retries=1, retry_when=predicate, **FAST)) == (2 * RUNS, RUNS, THREADS)


def test_plain_dramatiq_loses_the_message_of_a_retry_when_that_raises(run: Callable[..., Rig]) -> None:
    """The control: one run, no dead letter, an ack."""
    rig = run("stock")

    def predicate(retries: int, exception: BaseException) -> bool:
        raise ValueError

    assert outcome(rig, failing(rig, retry_when=predicate)) == (RUNS, 0, THREADS)


def _send_as_text(rig: Rig, actor: Any) -> None:
    for _ in range(RUNS):
        actor.send_with_options(retries="3")


def test_retries_that_came_as_text_are_counted(run: Callable[..., Rig]) -> None:
    """retries="3" reads as 3: with max_retries=4 there is one more retry, and then the message dies."""
    rig = run()
    actor = failing(rig, max_retries=4, **FAST)
    worker = rig.work(threads=THREADS)
    _send_as_text(rig, actor)
    rig.settle()

    assert (rig.count("run"), len(rig.dead_messages()), living(worker)) == (2 * RUNS, RUNS, THREADS)


def test_plain_dramatiq_loses_messages_whose_retries_came_as_text(run: Callable[..., Rig]) -> None:
    """The control: the hook raises, the message is acked."""
    rig = run("stock")
    actor = failing(rig, max_retries=4, **FAST)
    rig.work(threads=THREADS)
    _send_as_text(rig, actor)
    rig.settle()

    assert (rig.count("run"), len(rig.dead_messages())) == (RUNS, 0)


# -- anywhere --------------------------------------------------------------------------------------------------------


class Aborter(Middleware):
    """Interrupts worker threads at random moments from its first hook to its last, as dramatiq-abort may."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.targets: set[int] = set()
        self.raised = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._haunt, daemon=True)

    def before_process_message(self, broker: Any, message: Any) -> None:
        with self.lock:
            self.targets.add(threading.get_ident())

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        with self.lock:
            self.targets.discard(threading.get_ident())

    def after_skip_message(self, broker: Any, message: Any) -> None:
        self.after_process_message(broker, message)

    def _haunt(self) -> None:
        dice = random.Random(7)
        while not self.over.wait(0.0005 + dice.random() * 0.002):
            with self.lock:
                if self.targets:
                    self.raised += 1
                    raise_thread_exception(dice.choice(sorted(self.targets)), Abort)


@pytest.fixture
def no_logging() -> Iterator[None]:
    """An interrupt that lands as a log handler takes its lock leaves it locked for ever; that is Python's to mend."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("no_logging")
@pytest.mark.parametrize("kind", ["stub", "redis"])
def test_interrupts_at_random_moments_lose_nothing(run: Callable[..., Rig], kind: str, valkey: PrivateValkey) -> None:
    """Under a hail of interrupts every message of 200 succeeds or dies, and no thread does."""
    aborter = Aborter()
    rig = run("install", aborter, kind=kind, url=valkey.url_of(8))

    @rig.actor(max_retries=3, **FAST)
    def work() -> None:
        me = dramatiq.middleware.CurrentMessage.get_current_message()
        threading.Event().wait(0.002)
        rig.note("done", me.message_id if me is not None else None)

    worker = rig.work(threads=THREADS)
    aborter.thread.start()
    try:
        sent = {work.send().message_id for _ in range(RUNS)}
        rig.settle()
    finally:
        aborter.over.set()
        aborter.thread.join()

    dead = {message.message_id for message in rig.dead_messages()}
    assert sent == dead | set(rig.notes("done"))
    assert living(worker) == THREADS
    assert aborter.raised > 20
