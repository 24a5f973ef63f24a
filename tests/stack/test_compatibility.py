"""What was written for plain Dramatiq runs unchanged under the stack: same runs, same callbacks, same results.

The scenarios of `scenarios.py` are run on plain Dramatiq and under the stack, on every broker and with the stack put
on in every way that there is, and what was observed is compared.  What differs on purpose is in `test_differences`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Middleware, Retries

from dramatiq_guard import Classify, DeadLetter, JitterBackoff, Permanent, Tracing, install
from dramatiq_guard.middleware.base import GuardMiddleware
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.stack.rig import FAST, Rig, bare_broker, build, observe, spin, stock_middleware, unique
from tests.stack.scenarios import SCENARIOS
from tests.support.waiting import wait_until

WAYS = ("install", "late", "add", "list")


def check(name: str, stock: dict[str, Any], stack: dict[str, Any]) -> None:
    """Compare one outcome; what went wrong in either is said first."""
    for seen in (stock[name], stack[name]):
        if isinstance(seen, Exception):
            raise seen
    assert stack[name] == stock[name]


@cache
def _on_stub(way: str) -> dict[str, Any]:
    return observe("stub", way, SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("way", WAYS)
def test_in_memory_the_stack_changes_nothing(way: str, name: str) -> None:
    """On StubBroker the same code has the same outcome, however the stack is put on, before or after the actors."""
    check(name, _on_stub("stock"), _on_stub(way))


@pytest.fixture(scope="module")
def on_redis(valkey: PrivateValkey) -> dict[str, dict[str, Any]]:
    """The outcomes on Redis, without and with the stack, each in a database of its own."""
    return {
        way: observe("redis", way, SCENARIOS, valkey.url_of(database))
        for database, way in enumerate(("stock", "install", "list"), start=4)
    }


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("way", ["install", "list"])
def test_on_redis_the_stack_changes_nothing(on_redis: dict[str, dict[str, Any]], way: str, name: str) -> None:
    """On Redis the same code has the same outcome."""
    check(name, on_redis["stock"], on_redis[way])


@pytest.fixture(scope="module")
def on_rabbitmq(rabbitmq: Any) -> dict[str, dict[str, Any]]:
    """The outcomes on RabbitMQ, without and with the stack, each in a virtual host of its own where it can be made."""
    outcomes = {}
    for way in ("stock", "install"):
        name = unique("compat")
        private = hasattr(rabbitmq, "add_vhost")
        url = rabbitmq.start().add_vhost(name) if private else rabbitmq.url
        outcomes[way] = observe("rabbitmq", way, SCENARIOS, url)
        if private:
            rabbitmq.delete_vhost(name)
    return outcomes


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_rabbitmq_the_stack_changes_nothing(on_rabbitmq: dict[str, dict[str, Any]], name: str) -> None:
    """On RabbitMQ the same code has the same outcome."""
    check(name, on_rabbitmq["stock"], on_rabbitmq["install"])


# -- what needs a worker of its own ----------------------------------------------------------------------------------


@pytest.fixture
def rigs() -> Iterator[Any]:
    """Build rigs in memory; closed at the end."""
    built: list[Rig] = []

    def build_one(way: str, **options: Any) -> Rig:
        rig, put_on = build("stub", way, **options)
        put_on()
        built.append(rig)
        return rig

    yield build_one
    for rig in built:
        rig.close()


@pytest.mark.parametrize("way", ["stock", "install"])
def test_priorities_are_kept(rigs: Any, way: str) -> None:
    """Of the messages that wait, those of the more urgent actor run first."""
    rig: Rig = rigs(way)
    order: list[str] = []
    hold, busy = threading.Event(), threading.Event()

    @rig.actor(priority=100)
    def blocker() -> None:
        busy.set()
        hold.wait(10)

    # Each on a queue of its own, so that both are fetched while the blocker runs.
    @rig.actor(priority=50, queue_name="later")
    def later() -> None:
        order.append("later")

    @rig.actor(priority=0, queue_name="sooner")
    def sooner() -> None:
        order.append("sooner")

    worker = rig.work(threads=1)
    blocker.send()
    assert busy.wait(10)
    later.send()
    wait_until(lambda: worker.work_queue.qsize() == 1)
    sooner.send()
    wait_until(lambda: worker.work_queue.qsize() == 2)
    hold.set()
    rig.settle()

    assert order == ["sooner", "later"]


@pytest.mark.parametrize("way", ["stock", "install"])
def test_a_shutdown_interrupts_who_asked_for_it(rigs: Any, way: str) -> None:
    """An actor with notify_shutdown is interrupted by `Shutdown`; one without finishes."""
    rig: Rig = rigs(way)
    started = threading.Barrier(3)
    saw: dict[str, str] = {}
    go_on = threading.Event()

    @rig.actor(notify_shutdown=True, max_retries=0)
    def notified() -> None:
        try:
            started.wait(10)
            spin()
        except BaseException as error:
            saw["notified"] = type(error).__name__
            go_on.set()
            raise

    @rig.actor(max_retries=0)
    def unaware() -> None:
        started.wait(10)
        go_on.wait(10)
        saw["unaware"] = "finished"

    worker = rig.work(threads=2)
    notified.send()
    unaware.send()
    started.wait(10)
    worker.stop(timeout=10_000)
    rig.worker = None

    assert saw == {"notified": "Shutdown", "unaware": "finished"}


# -- each by itself --------------------------------------------------------------------------------------------------


def _alone(*guards: Any, retries: bool) -> Rig:
    middleware = stock_middleware() if retries else stock_middleware()[:-1]
    rig = Rig(bare_broker("stub", None, middleware), stack=True)
    rig.broker.add_middleware(rig.watch)
    for guard in guards:
        rig.broker.add_middleware(guard)
    return rig


def _run_three(rig: Rig) -> tuple[int, int, int]:
    """Runs of a message that fails once, of one that never succeeds, and how many died."""

    @rig.actor(max_retries=2, **FAST)
    def once() -> None:
        if rig.note("once") < 2:
            raise OSError("once")

    @rig.actor(max_retries=2, **FAST)
    def always() -> None:
        rig.note("always")
        raise OSError("always")

    try:
        rig.work()
        once.send()
        always.send()
        rig.settle()
        return rig.count("once"), rig.count("always"), len(rig.dead_messages())
    finally:
        rig.close()


def test_jitter_backoff_alone_retries() -> None:
    """JitterBackoff without any other guard retries as Retries does."""
    assert _run_three(_alone(JitterBackoff(), retries=False)) == (2, 3, 1)


def test_dead_letter_works_with_stock_retries() -> None:
    """DeadLetter beside Dramatiq's own Retries writes the letter of what those give up, once."""
    store = MemoryDeadLetters()

    assert _run_three(_alone(DeadLetter(store), retries=True)) == (2, 3, 1)

    (letter,) = store.page().letters
    assert letter.reason == "exhausted"
    assert letter.error is not None
    assert letter.error.type.endswith("OSError")


def test_tracing_works_with_stock_retries() -> None:
    """Tracing beside Dramatiq's own Retries changes nothing."""
    assert _run_three(_alone(Tracing(), retries=True)) == (2, 3, 1)


def test_classify_with_jitter_backoff_gives_permanent_errors_up_at_once() -> None:
    """Classify needs JitterBackoff only: what it calls permanent is not retried."""
    rig = _alone(JitterBackoff(), Classify(permanent=[LookupError]), retries=False)

    @rig.actor(max_retries=5, **FAST)
    def work(kind: str) -> None:
        rig.note(kind)
        raise KeyError(kind) if kind == "ruled" else Permanent(kind)

    try:
        rig.work()
        for kind in ("ruled", "raised"):
            work.send(kind)
        rig.settle()
        assert (rig.count("ruled"), rig.count("raised"), len(rig.dead_messages())) == (1, 1, 2)
    finally:
        rig.close()


def test_install_takes_the_place_of_retries_and_keeps_the_rest_in_order() -> None:
    """The user's own middlewares keep their order, between the outer and the inner guards."""

    class Mine(Middleware):
        pass

    class Other(Middleware):
        pass

    broker = bare_broker("stub", None, [Mine(), *stock_middleware(), Other()])
    install(broker, Classify(), DeadLetter(MemoryDeadLetters()), JitterBackoff())

    names = [type(m).__name__ for m in broker.middleware]
    assert names[0] == "Tracing"
    assert names[-3:] == ["DeadLetter", "JitterBackoff", "Classify"]
    assert names[1] == "Mine"
    assert names[-4] == "Other"
    assert not any(type(m) is Retries for m in broker.middleware)
    assert sum(isinstance(m, GuardMiddleware) for m in broker.middleware) == 4


def test_a_direct_call_just_calls(rigs: Any) -> None:
    """Unit tests that call an actor as a function, or its fn, go straight through; the function's errors too."""
    rig: Rig = rigs("install")

    @rig.actor
    def double(x: int) -> int:
        return 2 * x

    assert double(4) == double.fn(4) == 8
    with pytest.raises(TypeError):
        double(None)


def test_an_actor_declared_again_on_a_second_broker_works_on_both(rigs: Any) -> None:
    """A usual trick of tests: the same function is declared on another broker, and each runs under its own stack."""
    first: Rig = rigs("install")
    second: Rig = rigs("install")
    runs: list[str] = []

    def work(which: str) -> None:
        runs.append(which)
        if runs.count(which) < 2:
            raise OSError("once")

    actors = [rig.actor(max_retries=1, **FAST)(work) for rig in (first, second)]
    for rig in (first, second):
        rig.work(threads=1)
    for name, actor in zip(("first", "second"), actors, strict=True):
        actor.send(name)
    first.settle()
    second.settle()

    assert sorted(runs) == ["first", "first", "second", "second"]
    assert dramatiq.get_broker() is second.broker
