"""How a worker process ends, step by step; it does not really leave, and nobody is signalled."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from queue import PriorityQueue
from types import SimpleNamespace

import pytest
from dramatiq.worker import _WorkQueueItem

from dramatiq_guard import host, telemetry
from dramatiq_guard.exits import worker_exit as module
from dramatiq_guard.exits.worker_exit import ABANDONED, FATAL, WorkerExit
from dramatiq_guard.wiring import stack_of
from tests.support.waiting import wait_until
from tests.unit.conftest import deliver


class Left(BaseException):
    """The process has left."""


@pytest.fixture
def left(monkeypatch):
    """The codes with which the process has left, and what it was sent; it is a worker of the dramatiq command."""
    left = SimpleNamespace(codes=[], signals=[], told=[], timers=[])

    def leave(code):
        left.codes.append(code)
        raise Left

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(os, "kill", lambda pid, signum: left.signals.append(signum))
    monkeypatch.setattr(host, "in_command_line_worker", lambda: True)
    monkeypatch.setattr(host, "event_loop_is_blocked", lambda: False)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: left.timers.append(seconds))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: left.timers.append("cancelled"))
    monkeypatch.setattr(telemetry, "ended", lambda **said: left.told.append(said))
    monkeypatch.setattr(telemetry, "flush", lambda timeout: True)
    return left


@pytest.fixture
def stack(broker):
    """The wiring of a broker whose interrupts are noted."""
    stack = stack_of(broker)
    stack.interrupted = []
    stack.interrupts.interrupt_all = lambda: stack.interrupted.append(1) or len(stack.in_flight)
    return stack


@pytest.fixture
def ending(stack, left):
    """The end of a process with deadlines of 300 and 500 ms."""
    ending = WorkerExit(stack, soft_deadline=300, hard_deadline=500)
    stack.exit = ending
    return ending


def running(stack, consumer, name="job"):
    """A message that is in flight."""
    delivery = deliver(name, consumer)
    stack.in_flight[id(delivery)] = delivery
    return delivery


def worker(noting, stack, **queues):
    """A worker with a consumer for each queue, and what waits in it."""
    consumers = {}
    stopped = []
    work_queue = PriorityQueue()
    for queue_name, (waiting, delayed) in queues.items():
        consumer = noting(stack)
        delay_queue = PriorityQueue()
        for place, names in ((work_queue, waiting), (delay_queue, delayed)):
            for name in names:
                place.put(_WorkQueueItem(0, deliver(name, consumer, queue_name).message))
        consumers[queue_name] = SimpleNamespace(consumer=consumer, delay_queue=delay_queue)
    return SimpleNamespace(
        workers=[SimpleNamespace(stop=lambda: stopped.append(1))],
        consumers=consumers,
        work_queue=work_queue,
        stopped=stopped,
    )


def test_the_first_reason_counts_and_the_code_only_gets_worse(ending, monkeypatch):
    """A fatal error during a shutdown is fatal; nothing makes it less."""
    monkeypatch.setattr(WorkerExit, "_run", lambda self: None)
    ending.begin("TERM was received")
    began = ending.began_at
    assert (ending.begun, ending.code, ending.reason) == (True, 0, "TERM was received")
    ending.begin("memory is out", FATAL)
    ending.begin("the worker was stopped")
    ending.begin("another", 71)

    assert (ending.began_at, ending.code, ending.reason) == (began, FATAL, "memory is out")


def test_who_has_less_time_shortens_the_deadlines(ending, monkeypatch):
    """Or hurries an end that has begun; more time than there is, nobody gets."""
    monkeypatch.setattr(WorkerExit, "_run", lambda self: None)
    ending.begin("orphaned", FATAL, within=100)
    assert (ending.soft_deadline, ending.hard_deadline) == (50, 100)
    assert ending._hurried_at is None
    ending.begin("orphaned", FATAL, within=100)
    assert ending._hurried_at is not None

    other = WorkerExit(ending.stack, 300, 500)
    other.begin("orphaned", FATAL, within=100_000)
    assert (other.soft_deadline, other.hard_deadline) == (300, 500)


def test_heralds_hear_of_the_beginning(ending, monkeypatch):
    """And whether the master starts the process anew."""
    monkeypatch.setattr(WorkerExit, "_run", lambda self: None)
    heard = []
    ending.heralds.append(heard.append)
    ending.begin("TERM was received")
    ending.begin("again")
    assert heard == [False]


def test_an_end_in_which_all_finish_in_time_is_quiet(ending, stack, left):
    """Nobody is interrupted, nobody leaves by force: Dramatiq's main thread ends the worker."""
    ending.began_at = module.clock.monotonic()
    ending._finished.set()
    ending._end()

    wait_until(lambda: stack.draining, describe="the fetching to stop")
    assert (stack.interrupted, left.codes) == ([], [])
    assert left.timers == [2.5]
    assert stack.interrupts.interrupting_at == ending.began_at + 300


def test_what_finishes_after_the_interrupt_lets_the_process_end(ending, stack, left, virtual, noting):
    """At the soft deadline; the hard one is not needed."""
    running(stack, noting())
    ending.began_at = virtual.time
    virtual.meanwhile = lambda: stack.interrupted and ending._finished.set()
    ending._end()

    assert (stack.interrupted, left.codes, ending.interrupted) == ([1], [], 1)
    assert 300 <= sum(virtual.waits[:7])


def test_what_still_runs_at_the_hard_deadline_is_requeued_and_left(ending, stack, left, noting, caplog):
    """With 75, and its id in the log."""
    caplog.set_level("INFO")
    consumer = noting()
    running(stack, consumer, "stuck")
    ending.began_at = module.clock.monotonic() - 10_000
    with pytest.raises(Left):
        ending._end()

    assert left.codes == [ABANDONED]
    assert consumer.heard == [("hand_back", "stuck")]
    assert "abandoned=['stuck']" in caplog.text
    (told,) = left.told
    assert (told["code"], told["abandoned"], told["in_flight"], told["finished"]) == (ABANDONED, 1, 1, 0)


def test_a_fatal_end_stays_fatal_however_much_is_left(ending, stack, left, noting):
    """The worse code wins."""
    running(stack, noting())
    ending.code = FATAL
    with pytest.raises(Left):
        ending._leave()
    assert left.codes == [FATAL]


@pytest.mark.parametrize(("blocked", "code"), [(False, 0), (True, ABANDONED)])
def test_whatever_else_hangs_is_left_behind_with_the_code_it_had(ending, left, monkeypatch, blocked, code):
    """No message runs any more; a coroutine that blocks the loop goes on like a thread."""
    monkeypatch.setattr(host, "event_loop_is_blocked", lambda: blocked)
    with pytest.raises(Left):
        ending._leave()
    assert left.codes == [code]


@pytest.mark.parametrize("busy", [True, False])
def test_somebody_elses_process_is_never_left(ending, stack, left, noting, monkeypatch, caplog, busy):
    """A worker in the user's own program: it is said, and that is all."""
    monkeypatch.setattr(host, "in_command_line_worker", lambda: False)
    if busy:
        running(stack, noting())
    ending._leave()

    assert left.codes == []
    assert ("1 messages are still running at the hard deadline" in caplog.text) is busy


def test_an_error_in_the_end_is_the_end(ending, left, monkeypatch, caplog):
    """A process that cannot end must."""

    def broken(self):
        raise ZeroDivisionError

    monkeypatch.setattr(WorkerExit, "_end", broken)
    with pytest.raises(Left):
        ending._run()
    assert left.codes == [FATAL]
    assert "leaves at once" in caplog.text


def test_what_was_fetched_goes_back_in_its_order(ending, stack, left, noting):
    """What a thread had taken first, then what waited, then what is delayed; each to its own queue."""
    ending.worker = worker(noting, stack, default=(["b", "c"], ["d"]), other=(["x"], []), closed=([], []))
    consumer = ending.worker.consumers["default"].consumer
    ending.worker.consumers["closed"].consumer = None
    ending.take_back(deliver("a", consumer).message)
    assert consumer.heard == []
    ending._stop_fetching()

    assert [name for _, name in consumer.heard] == ["a", "b", "c", "d"]
    assert [name for _, name in ending.worker.consumers["other"].consumer.heard] == ["x"]
    assert ending.worker.stopped == [1]
    assert ending.handed_back == 5
    assert stack.settler.closing.is_set()


def test_what_is_taken_after_that_goes_back_by_itself(ending, stack, left, noting):
    """A thread that was between two messages."""
    ending.worker = worker(noting, stack, default=([], []))
    consumer = ending.worker.consumers["default"].consumer
    ending._hand_back()
    ending.take_back(deliver("late", consumer).message)

    assert (consumer.heard, ending.handed_back) == ([("hand_back", "late")], 1)


def test_a_consumer_that_has_not_noticed_is_waited_for(ending, stack, left, noting, virtual):
    """It may be about to fetch; but not for ever."""
    ending.worker = worker(noting, stack, default=(["a"], []))
    consumer = ending.worker.consumers["default"].consumer
    consumer.drained = False
    virtual.meanwhile = lambda: len(virtual.waits) == 3 and setattr(consumer, "drained", True)
    ending._stop_fetching()
    assert (len(virtual.waits), consumer.heard) == (3, [("hand_back", "a")])

    consumer.drained = False
    virtual.meanwhile = lambda: None
    ending._stop_fetching()
    assert sum(virtual.waits[3:]) == 300


def test_what_cannot_be_handed_back_is_left_behind_and_named(ending, stack, left, noting, caplog):
    """The broker delivers it again; the process says 75."""
    consumer = noting()
    consumer.raising = [OSError("reset")]
    ending._return(consumer, [deliver("a", consumer).message])
    assert "1 messages of queue 'default' could not be handed back" in caplog.text
    assert ending.left_behind == ["a"]

    ending._owners = 1
    with pytest.raises(SystemExit) as exit_:
        ending.finish()
    assert exit_.value.code == ABANDONED


def test_nothing_that_cannot_be_handed_back_is_no_news(ending, caplog):
    """A consumer whose connection is gone, and that held nothing."""

    def broken(messages):
        raise OSError("reset")

    ending._return(SimpleNamespace(hand_back=broken, queue_name="default"), [])
    assert (ending.left_behind, caplog.text) == ([], "")


@pytest.mark.parametrize("moment", [0, 100])
def test_whoever_hurries_waits_no_longer(ending, virtual, moment):
    """Than those who were interrupted need."""
    ending._hurried_at = virtual.time
    assert not ending._wait(virtual.time + 10_000, moment)
    assert sum(virtual.waits) == moment


# -- the last hook ---------------------------------------------------------------------------------------------------


def test_the_last_of_its_owners_gives_the_code(ending, left):
    """`SystemExit` would cut off the hooks of the others."""
    goodbyes = []
    ending.farewells.append(lambda: goodbyes.append(1))
    ending._owners, ending.code = 2, FATAL
    ending.finish()
    assert goodbyes == []
    with pytest.raises(SystemExit) as exit_:
        ending.finish()

    assert (exit_.value.code, goodbyes) == (FATAL, [1])
    assert left.told[0]["code"] == FATAL


def test_a_clean_end_is_quiet(ending, left, caplog):
    """Code 0, said once, even if it is asked for again."""
    caplog.set_level("INFO")
    ending._owners = 1
    ending.finish()
    ending._owners = 1
    ending.finish()

    assert len(left.told) == 1
    assert caplog.text.count("The worker process leaves") == 1


def test_in_somebody_elses_program_the_end_is_only_the_workers(ending, left, monkeypatch):
    """No code, no timer, no span; those who said goodbye did."""
    monkeypatch.setattr(host, "in_command_line_worker", lambda: False)
    goodbyes = []
    ending.farewells.append(lambda: goodbyes.append(1))
    ending._owners, ending.code = 1, FATAL
    ending.finish()

    assert (goodbyes, left.told, left.timers) == ([1], [], ["cancelled"])
    assert ending._finished.is_set()


def test_a_farewell_that_fails_keeps_nobody(ending, left, caplog):
    """The others are said."""
    goodbyes = []
    ending.farewells += [lambda: goodbyes.append(1), lambda: 1 // 0]
    ending._bid_farewell()

    assert goodbyes == [1]
    assert "could not be put in order" in caplog.text


@pytest.mark.parametrize("code", [0, FATAL])
def test_a_boot_can_be_left(ending, left, monkeypatch, code):
    """With the event loop, which is no daemon, ended first."""
    stopped = []
    monkeypatch.setattr(host, "stop_event_loop", lambda: stopped.append(1))
    ending._owners, ending.code = 3, code
    with pytest.raises(SystemExit) as exit_:
        ending.leave_boot()
    assert (exit_.value.code, stopped) == (code, [1])


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def signals(monkeypatch):
    """The signal handlers of a worker process of the dramatiq command; none of this process's own is touched."""

    def worker_process():
        def termhandler(signum, frame):
            called.append(signum)

        return termhandler

    called: list[int] = []
    worker_process.__qualname__ = "worker_process"
    handler = worker_process()
    handler.__qualname__ = "worker_process.<locals>.termhandler"
    handlers = {signal.SIGTERM: handler, signal.SIGHUP: handler}
    monkeypatch.setattr(signal, "getsignal", handlers.get)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(host, "enter_command_line_worker", lambda: None)
    return SimpleNamespace(handlers=handlers, called=called)


def test_the_signals_of_a_worker_process_are_taken_over_once(ending, signals, monkeypatch):
    """By whichever middleware comes first; each counts as an owner of the end."""
    monkeypatch.setattr(WorkerExit, "_run", lambda self: None)
    for _ in range(2):
        ending.install(SimpleNamespace())
    assert ending._owners == 2
    assert set(signals.handlers.values()) == {ending._on_signal}

    signals.handlers[signal.SIGTERM](signal.SIGTERM, None)
    wait_until(lambda: ending.begun, describe="the end to begin")
    assert ending.reason == "SIGTERM was received"
    assert signals.called == [signal.SIGTERM]


def test_a_second_signal_within_two_seconds_is_the_same_one(ending, signals, monkeypatch, virtual):
    """A process group gets each of them twice; a later one hurries. Dramatiq's own handler hears the first alone."""
    monkeypatch.setattr(WorkerExit, "_run", lambda self: None)
    ending.install(SimpleNamespace())
    on_signal = signals.handlers[signal.SIGTERM]
    on_signal(signal.SIGTERM, None)
    wait_until(lambda: ending.begun, describe="the end to begin")
    virtual.time += 2_000
    on_signal(signal.SIGTERM, None)
    assert ending._hurried_at is None
    virtual.time += 1
    on_signal(signal.SIGHUP, None)
    assert ending._hurried_at == virtual.time
    virtual.time += 1
    on_signal(signal.SIGTERM, None)
    assert ending._hurried_at == virtual.time - 1

    assert signals.called == [signal.SIGTERM]


def test_a_hangup_is_a_reload(ending, signals, monkeypatch):
    """The heralds hear of it: the master starts new processes."""
    monkeypatch.setattr(WorkerExit, "_run", lambda self: None)
    heard = []
    ending.heralds.append(heard.append)
    ending.install(SimpleNamespace())
    signals.handlers[signal.SIGHUP](signal.SIGHUP, None)
    wait_until(lambda: heard, describe="the heralds to hear")
    assert heard == [True]


def test_an_end_that_begins_aside_wakes_dramatiqs_main_thread(ending, signals, left, monkeypatch):
    """It sleeps in a loop that only its own handler ends."""
    monkeypatch.setattr(WorkerExit, "_run", lambda self: None)
    ending.install(SimpleNamespace())
    thread = threading.Thread(target=ending.begin, args=("fatal", FATAL))
    thread.start()
    thread.join(10)

    assert left.signals == [signal.SIGTERM]


@pytest.mark.parametrize("where", ["another program", "another thread"])
def test_elsewhere_signals_are_somebody_elses(ending, signals, where):
    """And stay as they were."""
    if where == "another program":
        signals.handlers.update(dict.fromkeys(signals.handlers, signal.SIG_DFL))
    before = dict(signals.handlers)
    if where == "another program":
        ending.install(SimpleNamespace())
    else:
        thread = threading.Thread(target=ending.install, args=(SimpleNamespace(),))
        thread.start()
        thread.join(10)

    assert signals.handlers == before
    assert ending._owners == 1
