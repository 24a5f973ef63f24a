"""What else a message's end owes: each part once, whatever order failures come in, and never swallowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import GroupCallbacks
from dramatiq.rate_limits.backends import StubBackend as StubLimits
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend as StubResults

from dramatiq_guard import Classify, DeadLetter, JitterBackoff, connect, install
from dramatiq_guard.stores.protocols import Stores
from tests.support.waiting import wait_until


class Hiccups:
    """Makes a function fail at its first calls.

    Parameters:
      function: What is called in the end.
      times: How many calls fail before.
      error: What they raise.
    """

    def __init__(self, function: Callable[..., object], times: int, error: Exception) -> None:
        self.function = function
        self.left = times
        self.error = error

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.left:
            self.left -= 1
            raise self.error
        return self.function(*args, **kwargs)


@pytest.fixture
def stores() -> Stores:
    """Stores in memory."""
    return connect("memory://")


@pytest.fixture
def broker(stub_broker: StubBroker, stores: Stores) -> StubBroker:
    """A broker with results, group callbacks and the stack."""
    stub_broker.add_middleware(Results(backend=StubResults()))  # type: ignore[no-untyped-call]
    stub_broker.add_middleware(GroupCallbacks(StubLimits()))
    install(
        stub_broker,
        Classify(),
        JitterBackoff(min_backoff=5, max_backoff=20, max_retries=2),
        DeadLetter(stores.dead_letters),
    )
    return stub_broker


@pytest.fixture
def work(broker: StubBroker) -> Iterator[Callable[[], None]]:
    """Starts a worker, waits until all is worked off, and stops it at the end."""
    workers: list[dramatiq.Worker] = []

    def until_done() -> None:
        if not workers:
            workers.append(dramatiq.Worker(broker, worker_timeout=10, worker_threads=2))
            workers[0].start()
        broker.join("default", fail_fast=False, timeout=20_000)
        workers[0].join()

    yield until_done
    for worker in workers:
        worker.stop()


@pytest.mark.parametrize("error", [ConnectionClosed("gone"), ValueError("no outage, but passing")])  # type: ignore[no-untyped-call]
def test_c38_a_broker_that_hiccups_loses_no_follow_up(
    broker: StubBroker, work: Callable[[], None], error: Exception
) -> None:
    """The next stage, the callbacks and the result come although the broker and the backend failed at first."""
    seen: Counter[str] = Counter()

    @dramatiq.actor(store_results=True)
    def first() -> int:
        seen["first"] += 1
        return 2

    @dramatiq.actor
    def second(x: int) -> None:
        seen[f"second {x}"] += 1

    @dramatiq.actor
    def told(message: dict[str, object], result: object) -> None:
        seen[f"told {result}"] += 1

    results = broker.get_results_backend()
    results.store_result = Hiccups(results.store_result, 2, error)  # type: ignore[method-assign]
    message = first.message_with_options(on_success=told) | second.message()
    message.run()
    broker.enqueue = Hiccups(broker.enqueue, 2, error)  # type: ignore[method-assign]
    work()

    assert {"first": 1, "second 2": 1, "told 2": 1} == seen
    assert 2 == results.get_result(message.messages[0])


def test_a_group_is_complete_once(broker: StubBroker, work: Callable[[], None]) -> None:
    """A member whose arrival could not be told at first is counted once, and the callback comes once."""
    seen: Counter[str] = Counter()

    @dramatiq.actor
    def member() -> None:
        seen["member"] += 1

    @dramatiq.actor
    def complete() -> None:
        seen["complete"] += 1

    group = dramatiq.group([member.message() for _ in range(4)])
    group.add_completion_callback(complete.message())
    group.run()
    broker.enqueue = Hiccups(broker.enqueue, 2, ConnectionClosed("gone"))  # type: ignore[method-assign, no-untyped-call]
    work()

    assert {"member": 4, "complete": 1} == seen


def test_a_stage_that_cannot_be_sent_becomes_a_letter(
    broker: StubBroker, stores: Stores, work: Callable[[], None]
) -> None:
    """A result that cannot be encoded does not lose the rest of the pipeline unseen: the stage lies in the letters."""

    @dramatiq.actor
    def first() -> object:
        return {1, 2}

    @dramatiq.actor
    def second(x: object) -> None: ...

    (first.message() | second.message()).run()
    work()
    letters = stores.dead_letters.page().letters

    assert [("second", "unencodable")] == [(letter.actor, letter.reason) for letter in letters]
    assert letters[0].error is not None
    assert "TypeError" == letters[0].error.type


def test_stock_dramatiq_loses_the_next_stage(stub_broker: StubBroker) -> None:
    """The control: plain Dramatiq swallows the hiccup, and the pipeline stops without a word to anybody."""
    seen: Counter[str] = Counter()

    @dramatiq.actor
    def first() -> int:
        seen["first"] += 1
        return 2

    @dramatiq.actor
    def second(x: int) -> None:
        seen["second"] += 1

    (first.message() | second.message()).run()
    stub_broker.enqueue = Hiccups(stub_broker.enqueue, 1, ConnectionClosed("gone"))  # type: ignore[method-assign, no-untyped-call]
    worker = dramatiq.Worker(stub_broker, worker_timeout=10, worker_threads=2)
    worker.start()
    wait_until(lambda: seen["first"] == 1, describe="the first stage to run")
    stub_broker.join("default", fail_fast=False, timeout=20_000)
    worker.stop()

    assert {"first": 1} == seen
