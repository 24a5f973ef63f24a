"""What a skip, a duplicate or a hiccup does to results, pipelines, groups and callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import Callbacks, GroupCallbacks, Pipelines, Retries, SkipMessage
from dramatiq.rate_limits.backends import StubBackend as RateLimiterBackend
from dramatiq.results import ResultMissing, Results
from dramatiq.results.backends import StubBackend as ResultBackend
from dramatiq.results.errors import ResultFailure
from dramatiq.worker import has_results_middleware

from .rig import Bench, Recorder

BenchMaker = Callable[..., Bench]


def skips(name: str) -> Recorder:
    """A middleware that skips every message of one actor."""

    def skip(message: Any) -> None:
        if message.actor_name == name:
            raise SkipMessage("not now")

    return Recorder().on("before_process_message", skip)


def test_a_skip_is_an_ack(bench: BenchMaker) -> None:
    """H7: a skipped message is acked and gone, so whoever skips to put off must have enqueued a copy."""
    b = bench(skips("skipped"), Retries())
    b.actor(lambda: None, actor_name="skipped").send()
    b.work()
    b.drain()

    assert (0, []) == (b.unsettled(), b.broker.dead_letters)


def test_a_skip_from_the_actor_itself_is_a_skip_too(bench: BenchMaker) -> None:
    """H7: a SkipMessage raised inside the actor takes the skip path, so the seam can put a message off without
    burning a retry."""
    recorder = Recorder()
    b = bench(recorder, Retries())

    def put_off() -> None:
        raise SkipMessage("not now")

    b.actor(put_off).send()
    b.work()
    b.drain()

    assert 1 == len(recorder.calls("after_skip_message"))
    assert [] == recorder.calls("after_process_message")
    assert (0, []) == (b.unsettled(), b.broker.dead_letters)


def test_a_skip_stops_a_pipeline(bench: BenchMaker) -> None:
    """H7: a skipped stage never starts the next one, so a duplicate returns its stored result from the seam instead."""
    b = bench(Pipelines(), skips("first"))
    runs: list[str] = []
    first = b.actor(lambda: runs.append("first"), actor_name="first")
    second = b.actor(lambda *_: runs.append("second"), actor_name="second")
    dramatiq.pipeline([first.message(), second.message()], broker=b.broker).run()
    b.work()
    b.drain()

    assert [] == runs


@pytest.mark.parametrize("skipped", [True, False], ids=["skipped", "run"])
def test_a_group_never_counts_a_skipped_member(bench: BenchMaker, skipped: bool) -> None:
    """H7: a group's completion never counts a skipped member, so a put-off member's copy must carry the group's
    options on."""
    b = bench(GroupCallbacks(RateLimiterBackend()), *([skips("second")] if skipped else []))
    done: list[str] = []
    first = b.actor(lambda: None, actor_name="first")
    second = b.actor(lambda: None, actor_name="second")
    complete = b.actor(lambda: done.append("complete"), actor_name="complete")
    group = dramatiq.group([first.message(), second.message()], broker=b.broker)
    group.add_completion_callback(complete.message())
    group.run()
    b.work()
    b.drain()

    assert ([] if skipped else ["complete"]) == done


def test_a_group_counts_a_member_as_often_as_it_is_processed(bench: BenchMaker) -> None:
    """H7: the group's barrier counts deliveries, not members, so a duplicate completes a group too early unless
    settled once."""
    recorder = Recorder()
    b = bench(GroupCallbacks(RateLimiterBackend()), recorder)
    done: list[str] = []
    first = b.actor(lambda: done.append("first"), actor_name="first")
    b.actor(lambda: done.append("complete"), actor_name="complete")
    group = dramatiq.group([first.message(), first.message()], broker=b.broker)
    group.add_completion_callback(b.broker.get_actor("complete").message())
    group.run()
    member = recorder.calls("before_enqueue")[0].subject
    b.broker.flush("default")
    b.broker.enqueue(member)
    b.broker.enqueue(member)
    b.work()
    b.drain()

    assert ["first", "first", "complete"] == done


def test_a_skip_overwrites_a_stored_result_with_none(bench: BenchMaker) -> None:
    """H7: Results stores None for a skipped message over the result it has, so the seam suppresses store_results
    when putting off."""
    backend = ResultBackend()
    deliveries: list[str] = []

    def skip_the_second(message: Any) -> None:
        deliveries.append(message.message_id)
        if len(deliveries) == 2:
            raise SkipMessage("duplicate")

    b = bench(Recorder().on("before_process_message", skip_the_second), Results(backend=backend))
    message = b.actor(lambda: 42, actor_name="answer", store_results=True).send()
    b.work()
    b.drain()
    assert 42 == message.get_result(backend=backend)

    b.broker.enqueue(message)
    b.drain()
    assert message.get_result(backend=backend) is None


def test_store_results_off_on_the_message_in_memory_keeps_a_stored_result(bench: BenchMaker) -> None:
    """H7: Results looks at the in-memory message's store_results at skip time, so switching it off there protects
    the stored result."""
    backend = ResultBackend()

    def skip(message: Any) -> None:
        message.options["store_results"] = False
        raise SkipMessage("put off")

    b = bench(Recorder().on("before_process_message", skip), Results(backend=backend))
    message = b.actor(lambda: 42, actor_name="answer", store_results=True).send()
    backend.store_result(message, 41, 60_000)
    b.work()
    b.drain()

    assert 41 == message.get_result(backend=backend)


def test_results_store_the_failure_only_after_the_nack(bench: BenchMaker) -> None:
    """H7: Results stores an exception in after_nack from message._exception, so a retried failure stores nothing
    yet."""
    backend = ResultBackend()
    found: list[bool] = []

    def look(message: Any) -> None:
        try:
            backend.get_result(message)
            found.append(True)
        except ResultMissing:
            found.append(False)

    b = bench(Results(backend=backend), Recorder().on("before_nack", look), Retries(max_retries=0))

    def fail() -> None:
        raise ValueError("no")

    message = b.actor(fail, store_results=True).send()
    b.work()
    b.drain()

    assert [False] == found
    with pytest.raises(ResultFailure, match="ValueError"):
        message.get_result(backend=backend)


@pytest.mark.parametrize("lost", ["next stage", "on_success", "on_failure"])
def test_what_follows_a_message_is_lost_when_the_broker_hiccups(
    bench: BenchMaker, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """H2: stock pipelines and callbacks enqueue in an after hook, so a hiccup loses them while the message is acked:
    ours are settled."""
    recorder = Recorder()
    b = bench(recorder, Pipelines(), Callbacks())
    runs: list[str] = []

    def first() -> None:
        runs.append("first")
        if lost == "on_failure":
            raise RuntimeError("no")

    second = b.actor(lambda *_: runs.append("second"), actor_name="second")
    actor = b.actor(first)
    if lost == "next stage":
        dramatiq.pipeline([actor.message(), second.message()], broker=b.broker).run()
    else:
        actor.send_with_options(**{lost: second})

    def hiccup(*_: object, **__: object) -> None:
        raise ConnectionClosed("hiccup")

    monkeypatch.setattr(b.broker, "enqueue", hiccup)
    b.work()
    b.drain()

    assert (["first"], 0) == (runs, b.unsettled())
    assert 1 == len(recorder.calls("after_ack"))


def test_a_result_is_lost_when_its_backend_hiccups(bench: BenchMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """H2: stock Results stores in an after hook, so a backend's hiccup loses the result of an acked message: ours is
    settled."""
    backend = ResultBackend()
    b = bench(Results(backend=backend))
    message = b.actor(lambda: 42, actor_name="answer", store_results=True).send()

    def hiccup(*_: object) -> None:
        raise ConnectionError("hiccup")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_store", hiccup)
        b.work()
        b.drain()

    assert 0 == b.unsettled()
    with pytest.raises(ResultMissing):
        message.get_result(backend=backend)


def test_the_results_middleware_is_recognised_by_its_exact_type(bench: BenchMaker) -> None:
    """Private: the worker looks for `type(m) is Results` and caches it per broker, so a subclass of ours makes it
    warn of discarded results."""

    class Settled(Results):
        pass

    assert has_results_middleware(bench(Results(backend=ResultBackend())).broker)
    assert not has_results_middleware(bench(Settled(backend=ResultBackend())).broker)
    assert hasattr(has_results_middleware, "cache_clear")


def test_a_subclass_of_results_makes_the_worker_warn(bench: BenchMaker, caplog: pytest.LogCaptureFixture) -> None:
    """Private: with only a subclass of Results the worker logs that the value was discarded though it was stored."""

    class Settled(Results):
        pass

    backend = ResultBackend()
    b = bench(Settled(backend=backend))
    message = b.actor(lambda: 42, actor_name="answer", store_results=True).send()
    b.work()
    b.drain()

    assert 42 == message.get_result(backend=backend)
    assert "so the value has been discarded" in caplog.text
