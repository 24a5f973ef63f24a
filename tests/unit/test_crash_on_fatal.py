"""What ends a process, and what becomes of a message that has killed too many; the end itself is only noted."""

from __future__ import annotations

import contextlib
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import dramatiq
import pytest
from dramatiq.asyncio import get_event_loop_thread
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AsyncIO, Shutdown

from dramatiq_guard import Classify, CrashOnFatal, DeadLetter, Fatal, JitterBackoff, install
from dramatiq_guard.delivery import carrier_of
from dramatiq_guard.errors import Defer, Quarantined, SetupError
from dramatiq_guard.exits.isolation import Isolation
from dramatiq_guard.exits.quarantine import Suspicion
from dramatiq_guard.exits.worker_exit import FATAL, WorkerExit
from dramatiq_guard.history import attempts
from dramatiq_guard.middleware import crash_on_fatal as module
from dramatiq_guard.policy.decision import Decision, Step
from dramatiq_guard.stores.crashes import Crash
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.stores.memory.deliveries import MemoryDeliveries
from dramatiq_guard.wiring import stack_of
from tests.support.waiting import wait_until
from tests.unit.conftest import deliver


@pytest.fixture
def ends(monkeypatch):
    """Why the process would have ended, and with which code."""
    ends: list[tuple] = []
    monkeypatch.setattr(
        WorkerExit, "begin", lambda self, reason, code=0, within=None: ends.append((reason, code, within))
    )
    return ends


@pytest.fixture
def working(ends):
    """Starts a worker on a broker in memory with the stack, and stops it at the end."""
    workers: list[dramatiq.Worker] = []

    def work(crash, *others, middleware=None):
        broker = StubBroker(middleware=middleware)
        broker.emit_after("process_boot")
        install(broker, crash, Classify(), JitterBackoff(min_backoff=1, max_backoff=1), *others)
        broker.declare_queue("default")
        worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=2)
        worker.start()
        workers.append(worker)
        return broker

    yield work
    for worker in workers:
        worker.stop(timeout=5_000)
        worker.broker.close()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"deliveries": object()}, "the store must keep deliveries"),
        ({"max_crashes": 0}, "max_crashes must be an integer from 1, not 0"),
        ({"max_crashes": True}, "max_crashes must be an integer"),
        ({"max_memory": "1G"}, "max_memory must be an integer from 1, not '1G'"),
        ({"window": -1}, "window"),
        ({"heartbeat": "5s"}, "heartbeat"),
        ({"heartbeat": 0}, "heartbeat must be at least 1 ms"),
        ({"stuck_after": 1.5j}, "stuck_after"),
        ({"held_after": -5}, "held_after"),
    ],
)
def test_a_wrong_argument_is_named(options, complaint):
    """When the middleware is made."""
    with pytest.raises(SetupError, match=complaint):
        CrashOnFatal(**options)


def test_durations_are_milliseconds_or_timedeltas():
    """As everywhere; some may be nothing at all."""
    crash = CrashOnFatal(window=timedelta(hours=1), stuck_after=None, held_after=None)
    assert (crash.window, crash.stuck_after, crash.held_after) == (3_600_000, None, None)


def test_a_fatal_error_ends_the_process_once_its_message_is_settled(working, ends):
    """Its retry is on its way by then."""
    letters = MemoryDeadLetters()
    broker = working(CrashOnFatal(), DeadLetter(letters))

    @dramatiq.actor(broker=broker, max_retries=0)
    def job():
        raise Fatal("unfit")

    message = job.send()
    wait_until(lambda: ends, describe="the end")
    ((reason, code, _),) = ends
    assert code == FATAL
    assert message.message_id in reason
    assert letters.depth() == 1


def test_an_ordinary_failure_ends_nothing(working, ends):
    """The process lives on."""
    letters = MemoryDeadLetters()
    broker = working(CrashOnFatal(), DeadLetter(letters))

    @dramatiq.actor(broker=broker, max_retries=0)
    def job():
        raise ValueError

    job.send()
    wait_until(lambda: letters.depth(), describe="the letter")
    broker.join("default", fail_fast=False)
    assert ends == []


def test_a_thread_that_dies_of_an_exception_ends_the_process(working, ends, monkeypatch):
    """An actor started it, and nobody else would notice; one that ends by SystemExit ends by itself."""
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    working(CrashOnFatal())
    for kind in (SystemExit, ZeroDivisionError):
        threading.excepthook(
            threading.ExceptHookArgs((kind, kind(), None, SimpleNamespace(name="a-thread")))  # type: ignore[arg-type]
        )

    assert seen == [SystemExit, ZeroDivisionError]
    assert ends == [("the thread a-thread died of ZeroDivisionError", FATAL, None)]


def test_what_is_raised_in_a_destructor_ends_it_where_that_is_asked_for(working, ends, monkeypatch):
    """By default it is none of its business."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    working(CrashOnFatal(thread_errors=False))
    args = SimpleNamespace(exc_type=ZeroDivisionError)
    sys.unraisablehook(args)
    assert ends == []
    working(CrashOnFatal(thread_errors=False, unraisable_errors=True))
    sys.unraisablehook(args)

    assert seen == [args, args]
    assert ends == [("ZeroDivisionError was raised where nobody can catch it", FATAL, None)]


def test_the_hooks_of_the_interpreter_are_put_back():
    """When the worker has shut down."""
    before = (threading.excepthook, sys.unraisablehook)
    broker = StubBroker()
    install(broker, CrashOnFatal(unraisable_errors=True))
    worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=1)
    worker.start()
    assert threading.excepthook is not before[0]
    assert sys.unraisablehook is not before[1]
    worker.stop()
    broker.close()

    assert (threading.excepthook, sys.unraisablehook) == before


@pytest.mark.parametrize("watched", [True, False])
def test_what_an_asyncio_task_leaves_unhandled_ends_the_process(working, ends, watched):
    """Unless that is not asked for; a message of the loop without an exception is only its default handler's."""
    working(CrashOnFatal(loop_errors=watched), middleware=[AsyncIO()])
    thread = get_event_loop_thread()
    done = threading.Event()

    def report():
        thread.loop.call_exception_handler({"message": "slow callback"})
        thread.loop.call_exception_handler({"message": "task failed", "exception": ZeroDivisionError()})
        done.set()

    thread.loop.call_soon_threadsafe(report)
    assert done.wait(10)
    assert ends == ([("an asyncio task left ZeroDivisionError unhandled", FATAL, None)] if watched else [])


@pytest.mark.parametrize("why", ["fatal", "orphaned"])
def test_what_the_watchdog_finds_ends_the_process(working, ends, why):
    """An orphan has less time: whoever killed its master means it to be gone."""
    crash = CrashOnFatal()
    working(crash)
    if why == "fatal":
        crash._watchdog.fatal("a thread has died")
        assert ends == [("a thread has died", FATAL, None)]
    else:
        crash._watchdog.orphaned()
        assert ends == [("its parent process is gone", FATAL, 2_500)]


# -- the boot of a worker process ------------------------------------------------------------------------------------


class Brake:
    """A brake that notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def wait(self, given_up) -> None:
        self.heard.append(f"wait {given_up()}")

    def booted(self) -> None:
        self.heard.append("booted")

    def crashed(self) -> None:
        self.heard.append("crashed")


@pytest.fixture
def booting(monkeypatch, ends):
    """The boot of a worker process of the dramatiq command; its brake is noted."""
    booting = SimpleNamespace(brake=Brake(), answer=True, crash=CrashOnFatal())
    monkeypatch.setattr(module, "BootBrake", lambda: booting.brake)
    monkeypatch.setattr(module.host, "in_command_line_worker", lambda: True)
    monkeypatch.setattr(module, "Watchdog", lambda *args, **options: SimpleNamespace(start=lambda: None, fatal=args[2]))
    monkeypatch.setattr(module, "wait_for_servers", lambda broker, given_up: booting.answer)
    monkeypatch.setattr(CrashOnFatal, "_hook_errors", lambda self: booting.brake.heard.append("goes to work"))

    def boot():
        broker = StubBroker()
        install(broker, booting.crash)
        booting.crash.before_worker_boot(broker, SimpleNamespace(workers=[], consumers={}))
        stack_of(broker).stop()

    booting.boot = boot
    return booting


def test_a_boot_waits_for_the_brake_and_for_the_servers(booting):
    """Then it goes to work, and a crash is counted from there."""
    booting.boot()
    assert booting.brake.heard == ["wait False", "booted", "goes to work"]
    booting.crash._fatal("x")
    assert booting.brake.heard[-1] == "crashed"


def test_a_boot_that_is_told_to_stop_leaves(booting, monkeypatch):
    """It has taken nothing up."""

    def leave(self):
        raise SystemExit(0)

    booting.answer = False
    monkeypatch.setattr(WorkerExit, "leave_boot", leave)
    with pytest.raises(SystemExit):
        booting.boot()
    assert "goes to work" not in booting.brake.heard


# -- messages that kill ----------------------------------------------------------------------------------------------

CRASHES = (Crash(1, "a", "web-1", 7), Crash(2, "b", "web-2", 8))


class Suspecting:
    """A quarantine with a fixed opinion.

    Attributes:
      opinion(Suspicion): What is held against every message.
      admits(bool): Whether it lets messages run.
    """

    def __init__(self, opinion=None, admits=True) -> None:
        self.opinion = opinion
        self.admits = admits
        self.asked: list[bool] = []
        self.forgiven: list[str] = []
        self.isolation = Isolation(lambda: False)

    def suspicion(self, message_id, *, redelivered):
        self.asked.append(redelivered)
        return self.opinion

    def watched(self, delivery, suspicion):
        return contextlib.nullcontext(self.admits)

    def forgive(self, message_id):
        self.forgiven.append(message_id)


@pytest.fixture
def suspecting(broker, ends):
    """A middleware with a quarantine that has an opinion, and a delivery that has begun."""

    def suspect(opinion=None, admits=True, **options):
        crash = CrashOnFatal(max_crashes=2)
        crash._quarantine = Suspecting(opinion, admits)
        crash._fatal = lambda reason: ends.append(reason)
        delivery = deliver("job", **options)
        return crash, delivery

    return suspect


def test_at_the_limit_a_message_is_not_run(suspecting, broker, caplog):
    """It leaves with the history of its crashes, and is forgiven: it is dead."""
    crash, delivery = suspecting(Suspicion(CRASHES))
    with pytest.raises(Quarantined, match=r"2 worker processes died.*pid 7 on web-1, pid 8 on web-2"):
        crash.before_process_message(broker, delivery.message)

    assert delivery.message.failed
    assert [(each.type, each.host, each.pid) for each in attempts(delivery.carrier)] == [
        ("process died", "web-1", 7),
        ("process died", "web-2", 8),
    ]
    assert carrier_of(delivery.options) == {}
    assert "is quarantined: 2 processes died at it" in caplog.text
    crash.after_nack(broker, delivery.message)
    assert crash._quarantine.forgiven == ["job"]


@pytest.mark.parametrize("opinion", [None, Suspicion(CRASHES[:1])])
def test_below_the_limit_it_runs(suspecting, broker, opinion):
    """What is held against it hangs on its delivery."""
    crash, delivery = suspecting(opinion)
    delivery.message.redelivered = True
    crash.before_process_message(broker, delivery.message)

    assert (delivery.suspicion, delivery.message.failed, crash._quarantine.asked) == (opinion, False, [True])
    assert crash.around(delivery, lambda: "result") == "result"


def test_without_a_store_nothing_is_asked(broker):
    """Messages run as they are."""
    crash, delivery = CrashOnFatal(), deliver("job")
    crash.before_process_message(broker, delivery.message)
    assert crash.around(delivery, lambda: "result") == "result"
    crash.after_ack(broker, delivery.message)


@pytest.mark.parametrize(("opinion", "admits", "delay"), [(Suspicion((), wait=700), True, 700), (None, False, 0)])
def test_a_message_that_must_not_run_here_now_is_put_off(suspecting, opinion, admits, delay):
    """Nobody knows yet whether it has killed; or this process ends."""
    crash, delivery = suspecting(opinion, admits)
    delivery.suspicion = opinion
    with pytest.raises(Defer) as put_off:
        crash.around(delivery, lambda: pytest.fail("it ran"))
    assert put_off.value.delay == delay


def raising(error):
    """A function that raises."""

    def function():
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "acquitted"),
    [
        (lambda: None, True),
        (raising(ValueError()), True),
        (raising(SystemExit()), True),
        (raising(Defer()), False),
        (raising(Shutdown()), False),
    ],
    ids=["success", "failure", "exit", "deferral", "shutdown"],
)
def test_a_suspect_that_the_process_has_outlived_is_forgiven(suspecting, broker, function, acquitted):
    """Not one that may not have come to the point that kills; and only once it is settled."""
    crash, delivery = suspecting(Suspicion(CRASHES[:1]))
    crash.before_process_message(broker, delivery.message)
    with contextlib.suppress(BaseException):
        crash.around(delivery, function)
    assert crash._quarantine.forgiven == []
    crash.after_ack(broker, delivery.message)

    assert crash._quarantine.forgiven == (["job"] if acquitted else [])


@pytest.mark.parametrize(("began", "exits", "said"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_a_settled_message_that_met_a_fatal_error_ends_the_process(suspecting, ends, broker, began, exits, said):
    """Not the delayed copy of one, which is acked as well (H10)."""
    crash, delivery = suspecting()
    delivery.began = began
    delivery.decision = Decision(Step.RETRY, None, None, counted=True, exit_process=exits, why="MemoryError is fatal")
    crash.after_ack(broker, delivery.message)

    assert len(ends) == said
    assert all("job" in reason and "MemoryError is fatal" in reason for reason in ends)


def test_a_process_with_a_store_shows_that_it_lives_and_leaves_knowingly(working):
    """Often enough that all know of its death before the broker gives its messages to others."""
    deliveries = MemoryDeliveries()
    broker = working(CrashOnFatal(deliveries, heartbeat=60_000))
    crash = next(each for each in broker.middleware if isinstance(each, CrashOnFatal))
    wait_until(lambda: deliveries.crashes._alive, describe="a sign of life")
    assert crash._quarantine.every == 60_000

    for herald in stack_of(broker).exit.heralds:
        herald(False)
    wait_until(lambda: not deliveries.crashes._alive, describe="the farewell")


def test_on_redis_the_heartbeat_is_an_eighth_of_the_brokers_at_most(broker, ends):
    """By the time it returns what a dead worker held, everybody must know what it died of."""
    broker.heartbeat_timeout = 8_000
    crash = CrashOnFatal(MemoryDeliveries(), heartbeat=5_000)
    crash._start_quarantine(broker)
    crash._quarantine.leave()
    assert crash._quarantine.every == 1_000
