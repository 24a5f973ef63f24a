"""What Dramatiq does with actors, their functions and their options, and where context variables reach."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import ActorNotFound
from dramatiq.middleware import AgeLimit, AsyncIO, Middleware, MiddlewareError, Retries

from tests.support.waiting import wait_until

from .rig import Bench, Recorder

BenchMaker = Callable[..., Bench]
CURRENT: contextvars.ContextVar[str | None] = contextvars.ContextVar("CURRENT", default=None)


class SetsContext(Middleware):
    """Sets a context variable as a delivery does."""

    def before_process_message(self, broker: object, message: Any) -> None:
        CURRENT.set(message.message_id)

    def after_process_message(self, broker: object, message: Any, *, result: Any = None, exception: Any = None) -> None:
        CURRENT.set(None)


class ReplacesFunctions(Middleware):
    """Puts a wrapper on ``actor.fn`` as the seam does."""

    def __init__(self) -> None:
        self.through: list[str] = []

    def after_declare_actor(self, broker: object, actor: dramatiq.Actor[Any, Any]) -> None:
        function = actor.fn

        @functools.wraps(function)
        def around(*args: Any, **kwargs: Any) -> Any:
            self.through.append(actor.actor_name)
            return function(*args, **kwargs)

        actor.fn = around


# The boot, H11


class RaisesIn(Middleware):
    """Raises an error in one hook."""

    def __init__(self, hook: str, error: Exception) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise error

        setattr(self, hook, refuse)


def test_a_middleware_error_stops_the_boot(bench: BenchMaker) -> None:
    """H11: a MiddlewareError in before_worker_boot escapes Worker.start before any thread runs, which is how the
    boot check refuses."""
    b = bench(RaisesIn("before_worker_boot", MiddlewareError("wrong order")))

    with pytest.raises(MiddlewareError, match="wrong order"):
        b.work()
    assert b.worker is not None
    assert ([], {}) == (b.worker.workers, b.worker.consumers)


def test_any_other_error_of_the_boot_is_swallowed(bench: BenchMaker) -> None:
    """H11: any other exception in before_worker_boot is swallowed and the worker starts, so the check's errors are
    MiddlewareErrors."""
    b = bench(RaisesIn("before_worker_boot", ValueError("wrong order")))

    assert 2 == len(b.work().workers)


@pytest.mark.parametrize("error", [ValueError("no"), MiddlewareError("no")], ids=["plain", "middleware error"])
def test_every_error_of_the_process_boot_is_swallowed(bench: BenchMaker, error: Exception) -> None:
    """H11: everything raised in after_process_boot is swallowed, so no check may live there."""
    bench(RaisesIn("after_process_boot", error)).boot_process()


def test_a_worker_boots_the_middlewares_in_list_order(bench: BenchMaker) -> None:
    """H11: before_worker_boot runs in list order, so a check that must come before AsyncIO's must be first in the
    list."""
    order: list[str] = []

    class Boots(Middleware):
        def __init__(self, name: str) -> None:
            self.name = name

        def before_worker_boot(self, broker: object, worker: object) -> None:
            order.append(self.name)

    bench(Boots("first"), Boots("second")).work()

    assert ["first", "second"] == order


def test_the_last_of_shutdown_runs_in_reverse_on_the_stopping_thread(bench: BenchMaker) -> None:
    """H11: after_worker_shutdown runs in reverse on the thread that stops the worker, and a SystemExit from it
    escapes: it must be the outermost."""
    order: list[tuple[str, threading.Thread]] = []

    class Ends(Middleware):
        def __init__(self, name: str) -> None:
            self.name = name

        def after_worker_shutdown(self, broker: object, worker: object) -> None:
            order.append((self.name, threading.current_thread()))
            if self.name == "outer" and len(order) == 2:
                raise SystemExit(70)

    worker = bench(Ends("outer"), Ends("inner")).work()
    with pytest.raises(SystemExit) as exit_info:
        worker.stop(timeout=2_000)

    assert 70 == exit_info.value.code
    assert [("inner", threading.current_thread()), ("outer", threading.current_thread())] == order


def test_a_middleware_error_while_declaring_surfaces_at_import(bench: BenchMaker) -> None:
    """H11: a MiddlewareError in before_declare_actor is raised by the decorator, so bad options fail where the actor
    is written."""
    b = bench(RaisesIn("before_declare_actor", MiddlewareError("bad option")))

    with pytest.raises(MiddlewareError, match="bad option"):
        b.actor(lambda: None, actor_name="bad")


def test_an_error_after_declaring_is_swallowed(bench: BenchMaker) -> None:
    """H11: an exception in after_declare_actor is swallowed even as a MiddlewareError, so the seam there must not
    fail."""
    b = bench(RaisesIn("after_declare_actor", MiddlewareError("no")))

    assert "fine" == b.actor(lambda: None, actor_name="fine").actor_name


def test_a_middleware_added_later_meets_the_actors_declared_before(bench: BenchMaker) -> None:
    """H16: add_middleware calls after_declare_actor, and not before_declare_actor, for actors that exist already, so
    install may come late."""
    b = bench()
    actor = b.actor(lambda: None, actor_name="early")
    before: list[object] = []

    class Late(ReplacesFunctions):
        def before_declare_actor(self, broker: object, actor: object) -> None:
            before.append(actor)

    late = Late()
    b.broker.add_middleware(late)
    actor()

    assert ["early"] == late.through
    assert [] == before


# Options, H13


def test_actor_options_must_be_registered_before_the_actor_is_declared(bench: BenchMaker) -> None:
    """H13: an actor option that no middleware has registered yet is refused at declaration, so install comes before
    the actors."""
    with pytest.raises(ValueError, match="idempotency_key"):
        bench().actor(lambda: None, idempotency_key=str)

    class Registers(Middleware):
        @property
        def actor_options(self) -> set[str]:
            return {"idempotency_key"}

    actor = bench(Registers()).actor(lambda: None, actor_name="keyed", idempotency_key=str)
    assert {"idempotency_key": str} == actor.options


def test_message_options_are_not_validated(bench: BenchMaker) -> None:
    """H13: message options are never validated, so a typo in send_with_options must be caught by us."""
    actor = bench().actor(lambda: None, actor_name="fine")

    assert -1 == actor.send_with_options(max_retrys=-1).options["max_retrys"]


@pytest.mark.parametrize("throws", [[ValueError], "ValueError"], ids=["list", "string"])
def test_throws_that_is_no_class_kills_the_thread_and_acks(
    bench: BenchMaker, deaths: list[BaseException], throws: object
) -> None:
    """H13: a list or a string in throws ends the worker thread and acks the failed message, so it is validated at
    declaration."""
    recorder = Recorder()
    b = bench(recorder, Retries(max_retries=0))

    def fail() -> None:
        raise ValueError("no")

    b.actor(fail, throws=throws).send()
    worker = b.work(threads=1)
    wait_until(lambda: deaths)

    assert isinstance(deaths[0], TypeError)
    wait_until(lambda: not worker.workers[0].is_alive())
    assert 1 == len(recorder.calls("after_ack"))
    assert [] == recorder.calls("after_process_message")
    assert [] == b.broker.dead_letters


def test_a_class_in_message_options_cannot_be_encoded(bench: BenchMaker) -> None:
    """H13: a class in message options fails in the sender with JSON's TypeError, so throws can only be an actor's
    option."""
    actor = bench(Retries()).actor(lambda: None, actor_name="fine")

    with pytest.raises(TypeError, match="not JSON serializable"):
        actor.send_with_options(throws=ValueError)


@pytest.mark.parametrize("actor_option", [None, 0], ids=["unset", "set"])
@pytest.mark.parametrize("message_option", [None, 1], ids=["unset", "set"])
def test_options_are_looked_up_on_the_message_then_the_actor_then_the_middleware(
    bench: BenchMaker, message_option: int | None, actor_option: int | None
) -> None:
    """H13: max_retries of the message wins over the actor's over the middleware's: our look-up keeps that order."""
    b = bench(Retries(max_retries=2, min_backoff=1))
    runs: list[int] = []

    def fail() -> None:
        runs.append(1)
        raise RuntimeError("no")

    options: dict[str, Any] = {} if actor_option is None else {"max_retries": actor_option}
    message_options: dict[str, Any] = {} if message_option is None else {"max_retries": message_option}
    b.actor(fail, **options).send_with_options(**message_options)
    b.work()
    b.drain()

    wins = next(o for o in (message_option, actor_option, 2) if o is not None)
    assert wins + 1 == len(runs)


# H15: context variables


def test_a_context_variable_reaches_a_sync_actor_but_not_its_threads(bench: BenchMaker) -> None:
    """H15: contextvars set in before_process reach a sync actor, yet not a thread it starts: there is no current
    delivery there."""
    b = bench(SetsContext())
    seen: list[str | None] = []

    def look() -> None:
        seen.append(CURRENT.get())
        thread = threading.Thread(target=lambda: seen.append(CURRENT.get()))
        thread.start()
        thread.join()

    message = b.actor(look).send()
    b.work()
    b.drain()

    assert [message.message_id, None] == seen


def test_a_context_variable_reaches_an_async_actor(bench: BenchMaker) -> None:
    """H15: contextvars set in before_process reach an async actor on the loop's thread, so current_delivery works
    there."""
    b = bench(AsyncIO(), SetsContext())
    seen: list[str | None] = []
    threads: list[threading.Thread] = []

    async def look() -> None:
        seen.append(CURRENT.get())
        threads.append(threading.current_thread())

    message = b.actor(look).send()
    worker = b.work()
    b.drain()

    assert [message.message_id] == seen
    assert threads[0] not in worker.workers


# The function, H16


def test_a_worker_calls_what_actor_fn_is_at_that_time(bench: BenchMaker) -> None:
    """H16: the worker calls actor.fn as it is when the message comes, so a wrapper put there in after_declare_actor
    is the seam."""
    seam = ReplacesFunctions()
    b = bench(seam)
    runs: list[int] = []
    b.actor(lambda: runs.append(1), actor_name="wrapped").send()
    b.work()
    b.drain()

    assert (["wrapped"], [1]) == (seam.through, runs)


def test_a_direct_call_goes_through_actor_fn_too(bench: BenchMaker) -> None:
    """H16: a direct call in a unit test goes through actor.fn as well, so without a current delivery the seam must
    just call."""
    seam = ReplacesFunctions()
    actor = bench(seam).actor(lambda n: n + 1, actor_name="plus")

    assert 2 == actor(1)
    assert ["plus"] == seam.through


def test_actor_fn_of_an_async_actor_is_a_sync_wrapper(bench: BenchMaker) -> None:
    """H16: when after_declare_actor runs, actor.fn of an async actor is already a sync callable, so one wrapper
    serves both."""
    found: list[Callable[..., Any]] = []

    class Looks(Middleware):
        def after_declare_actor(self, broker: object, actor: dramatiq.Actor[Any, Any]) -> None:
            found.append(actor.fn)

    b = bench(AsyncIO(), Looks())

    async def plus(n: int) -> int:
        return n + 1

    b.actor(plus)
    b.work()
    assert 2 == found[0](1)
    assert plus is found[0].__wrapped__


def test_an_actor_declared_again_on_a_second_broker_carries_its_wrapper_along(bench: BenchMaker) -> None:
    """H16: re-declaring actor.fn on a second broker wraps it twice, so the seam marks the function and never finds
    its stack by closure."""
    first, second = ReplacesFunctions(), ReplacesFunctions()
    actor = bench(first).actor(lambda: None, actor_name="shared")
    again = bench(second).actor(actor.fn, actor_name="shared")
    again()

    assert (["shared"], ["shared"]) == (first.through, second.through)


# H12, H18: what is off or does not fire


def test_an_eager_broker_runs_actors_without_ack_hooks() -> None:
    """H16: a broker that runs actors inside enqueue, as test suites have, calls no process or ack hooks, so the seam
    must pass through."""

    class Eager(StubBroker):
        def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
            self.get_actor(message.actor_name)(*message.args, **message.kwargs)
            return message

    recorder = Recorder()
    broker = Eager(middleware=[recorder])
    runs: list[int] = []
    dramatiq.actor(actor_name="eager", broker=broker)(lambda: runs.append(1)).send()

    assert ([1], []) == (runs, recorder.journal)


def exhausting_bench(bench: BenchMaker, *middleware: Middleware) -> tuple[Bench, list[str]]:
    """A bench whose failing actor names an on_retry_exhausted actor, and the list of what that one was told."""
    b = bench(*middleware, Retries(max_retries=0))
    told: list[str] = []

    def exhausted(message_data: dict[str, Any], counts: dict[str, int]) -> None:
        told.append(message_data["actor_name"])

    b.actor(exhausted)
    return b, told


def fail_with_value_error() -> None:
    """An actor's function that only fails."""
    raise ValueError("no")


def test_on_retry_exhausted_fires_when_retries_are_exhausted(bench: BenchMaker) -> None:
    """H18: on_retry_exhausted fires when retries ran out, as ours must too."""
    b, told = exhausting_bench(bench)
    b.actor(fail_with_value_error, on_retry_exhausted="exhausted").send()
    b.work()
    b.drain()

    assert ["fail_with_value_error"] == told


def test_on_retry_exhausted_does_not_fire_for_throws(bench: BenchMaker) -> None:
    """H18: on_retry_exhausted stays silent for throws, so on_dead_letter is what tells of every end."""
    b, told = exhausting_bench(bench)
    b.actor(fail_with_value_error, on_retry_exhausted="exhausted", throws=ValueError).send()
    b.work()
    b.drain()

    assert 1 == len(b.broker.dead_letters)
    assert [] == told


def test_on_retry_exhausted_does_not_fire_for_an_expired_message(bench: BenchMaker) -> None:
    """H18: on_retry_exhausted stays silent for a message that AgeLimit dropped."""
    b, told = exhausting_bench(bench, AgeLimit(max_age=1))
    actor = b.actor(fail_with_value_error, on_retry_exhausted="exhausted")
    b.broker.enqueue(aged(actor.message(), by=10))
    b.work()
    b.drain()

    assert 1 == len(b.broker.dead_letters)
    assert [] == told


def test_on_retry_exhausted_does_not_fire_for_an_unknown_actor(bench: BenchMaker) -> None:
    """H18: on_retry_exhausted stays silent for an unknown actor."""
    b, told = exhausting_bench(bench)
    b.broker.enqueue(dramatiq.Message("default", "nobody", (), {}, {"on_retry_exhausted": "exhausted"}))
    b.work()
    b.drain()

    assert 1 == len(b.broker.dead_letters)
    assert [] == told


def aged(message: dramatiq.Message[Any], *, by: int) -> dramatiq.Message[Any]:
    """The same message, first enqueued *by* milliseconds earlier."""
    return message.copy(message_timestamp=message.message_timestamp - by)


def test_the_age_limit_counts_from_the_first_enqueueing(bench: BenchMaker) -> None:
    """H18: AgeLimit counts from the first enqueueing over all retries, so a patient backoff can expire a message."""
    recorder = Recorder()
    b = bench(AgeLimit(max_age=60_000), recorder, Retries(min_backoff=1))
    runs: list[int] = []

    def fail() -> None:
        runs.append(1)
        raise RuntimeError("no")

    young = b.actor(fail, max_retries=3).send()
    b.work()
    b.drain()
    assert [young.message_timestamp] * 4 == [
        c.subject.message_timestamp for c in recorder.calls("before_process_message")
    ]

    b.broker.enqueue(aged(young, by=60_000))
    b.drain()
    assert 4 == len(runs), "a retry of it would have been dropped now"


def test_the_age_limit_leaves_by_a_failed_skip_with_this_text(bench: BenchMaker) -> None:
    """Private: AgeLimit's only trace is a SkipMessage with this text on a failed message, by which we name the
    reason "expired"."""
    recorder = Recorder()
    b = bench(AgeLimit(max_age=1), recorder)
    b.broker.enqueue(aged(b.actor(lambda: None, actor_name="late").message(), by=10))
    b.work()
    b.drain()

    (nacked,) = recorder.calls("before_nack")
    assert isinstance(nacked.details["exception"], dramatiq.middleware.SkipMessage)
    assert "Message age limit exceeded" == str(nacked.details["exception"])


def test_an_unknown_actor_raises_inside_get_actor(bench: BenchMaker) -> None:
    """H18: get_actor raises for an actor that is not declared here, so whoever reads actor options in before_nack
    must expect it."""
    with pytest.raises(ActorNotFound):
        bench().broker.get_actor("nobody")
