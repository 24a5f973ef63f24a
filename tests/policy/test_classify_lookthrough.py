from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from dramatiq.middleware import Shutdown, TimeLimitExceeded

from dramatiq_guard.errors import Defer, Fatal, Permanent, Retryable
from dramatiq_guard.policy.backoff import Backoff
from dramatiq_guard.policy.lookthrough import MAX_DEPTH, combine
from dramatiq_guard.policy.rules import DEFAULT, Rules, compile_rules
from dramatiq_guard.policy.verdict import Kind, Verdict

from .errors import fake, raised, response


def classify(exc: BaseException, **given: Any) -> Verdict:
    return Rules((compile_rules(origin="actor", **given),)).classify(exc)


def test_the_verdict_of_the_cause_is_taken_over() -> None:
    """`raise OrderFailed() from error` says that the one is because of the other."""
    gone = fake("httpx.HTTPStatusError", response=response(410))
    missing = fake("httpx.HTTPStatusError", response=response(404))
    busy = fake("httpx.HTTPStatusError", response=response(503, Retry_After="30"))

    assert Kind.PERMANENT is classify(raised(RuntimeError(), cause=gone)).kind
    assert 3 == classify(raised(RuntimeError(), cause=missing)).max_retries
    assert 30_000 == classify(raised(RuntimeError(), cause=busy)).retry_after
    assert "builtin:httpx.HTTPStatusError[status=410]" == classify(raised(RuntimeError(), cause=gone)).rule


def test_the_cause_may_lie_deep() -> None:
    """Each layer of a program wraps the errors of the one below."""
    deep = raised(RuntimeError(), cause=raised(KeyError(), cause=raised(ValueError(), cause=Permanent("x"))))

    assert Kind.PERMANENT is classify(deep).kind


def test_an_error_that_a_rule_names_is_not_looked_through() -> None:
    """The user, or the table, has spoken."""
    wrapped = raised(ConnectionError(), cause=Permanent("x"))

    assert "builtin:builtins.ConnectionError" == classify(wrapped).rule
    assert "actor:retryable[0]" == classify(raised(KeyError(), cause=Permanent("x")), retryable=[KeyError]).rule


def test_predicates_are_asked_about_causes_too() -> None:
    """The first that anything in the chain answers to."""
    wrapped = raised(RuntimeError("order"), cause=KeyError("declined"))

    assert Kind.PERMANENT is classify(wrapped, permanent=[lambda exc: "declined" in str(exc)]).kind


def test_an_error_that_was_being_handled_may_add_patience() -> None:
    """Many people forget `from`: a deferral, a fatal error and a Retry-After are recognised without it."""
    busy = fake("httpx.HTTPStatusError", response=response(503, Retry_After="30"))

    assert Kind.FATAL is classify(raised(RuntimeError(), context=MemoryError())).kind
    assert Kind.DEFERRED is classify(raised(RuntimeError(), context=Defer(delay=5))).kind
    assert 30_000 == classify(raised(RuntimeError(), context=busy)).retry_after
    assert 5 == classify(raised(RuntimeError(), context=Retryable(delay=5))).delay


def test_an_error_that_was_being_handled_takes_no_patience_away() -> None:
    """`except FileNotFoundError: fetch()`: if fetch() fails, that the file was missing says nothing about it."""
    missing = fake("httpx.HTTPStatusError", response=response(404))

    assert DEFAULT == classify(raised(RuntimeError(), context=FileNotFoundError(2, "x")))
    assert None is classify(raised(RuntimeError(), context=missing)).max_retries
    assert Kind.RETRYABLE is classify(raised(RuntimeError(), context=raised(KeyError(), cause=Permanent("x")))).kind


def test_a_context_that_was_suppressed_is_not_asked() -> None:
    """`raise … from None` says that there is no connection."""

    def translate() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise RuntimeError from None

    with pytest.raises(RuntimeError) as info:
        translate()

    assert DEFAULT == classify(info.value)


@pytest.mark.parametrize("how", ["cause", "context"])
@pytest.mark.parametrize("outer", [RuntimeError, ConnectionError, FileNotFoundError])
def test_a_shutdown_beneath_any_error_is_an_interruption(how: str, outer: type[Exception]) -> None:
    """An async clean-up that takes too long hides it in a RuntimeError; a `finally` may fail in any way."""
    exc = raised(outer(), **{how: raised(KeyError(), **{how: Shutdown()})})

    assert Kind.INTERRUPTED is classify(exc).kind
    assert Kind.INTERRUPTED is classify(exc, permanent=[Exception]).kind


def test_the_shutdown_of_an_async_actor_is_recognised_in_what_dramatiq_makes_of_it() -> None:
    """The very code path: the coroutine does not end within a second of being cancelled."""

    def interrupted() -> None:
        try:
            raise Shutdown
        except Shutdown as exc:
            raise RuntimeError("Timed out while waiting for coroutine.") from exc

    with pytest.raises(RuntimeError) as info:
        interrupted()

    assert Kind.INTERRUPTED is classify(info.value).kind


def test_a_word_of_the_actors_outweighs_the_shutdown_beneath_it() -> None:
    """`except Shutdown: raise Permanent(…)` is meant."""
    assert Kind.PERMANENT is classify(raised(Permanent("x"), context=Shutdown())).kind


def test_a_shutdown_that_the_user_gave_another_meaning_is_no_interruption() -> None:
    """A rule that names it has its way, also from beneath."""
    exc = raised(ConnectionError(), context=Shutdown())

    assert "builtin:builtins.ConnectionError" == classify(exc, retryable=[Shutdown]).rule


def test_a_time_limit_hidden_by_the_clean_up_is_named() -> None:
    """It is RETRYABLE either way, but the rule tells."""
    exc = raised(RuntimeError(), cause=TimeLimitExceeded())

    assert "builtin:dramatiq.middleware.time_limit.TimeLimitExceeded" == classify(exc).rule


def test_cycles_end() -> None:
    """Causes can be set by hand to anything."""
    first, second, third = RuntimeError(), KeyError(), ValueError()
    raised(first, cause=second)
    raised(second, context=third)
    raised(third, cause=first)
    parts = [RuntimeError() for _ in range(9)]
    group = ExceptionGroup("x", parts)
    for part in parts:
        raised(part, cause=group)
    itself = RuntimeError()
    itself.__cause__ = itself
    named = ConnectionError()
    named.__cause__ = named

    assert [DEFAULT] * 6 == [classify(exc) for exc in (first, second, third, itself, group, parts[0])]
    assert "builtin:builtins.ConnectionError" == classify(named).rule


def test_the_look_beneath_has_a_bottom() -> None:
    """A chain of ten thousand errors costs no more than one of fifty."""

    def chain(length: int, last: BaseException) -> BaseException:
        for _ in range(length):
            last = raised(RuntimeError(), cause=last)
        return last

    assert Kind.PERMANENT is classify(chain(MAX_DEPTH, Permanent("x"))).kind
    assert DEFAULT == classify(chain(MAX_DEPTH + 1, Permanent("x")))
    assert DEFAULT == classify(chain(10_000, Permanent("x")))
    assert Kind.INTERRUPTED is classify(raised(ConnectionError(), cause=chain(MAX_DEPTH - 1, Shutdown()))).kind
    assert Kind.RETRYABLE is classify(raised(ConnectionError(), cause=chain(MAX_DEPTH, Shutdown()))).kind


PARTS: dict[str, BaseException] = {
    "permanent": Permanent("x"),
    "retryable": Retryable("x"),
    "unknown": KeyError("x"),
    "fatal": Fatal("x"),
    "deferred": Defer("x"),
    "interrupted": Shutdown(),
}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("permanent permanent", Kind.PERMANENT),
        ("permanent retryable", Kind.RETRYABLE),
        ("permanent unknown", Kind.RETRYABLE),
        ("permanent deferred", Kind.RETRYABLE),
        ("permanent interrupted", Kind.RETRYABLE),
        ("retryable deferred interrupted", Kind.RETRYABLE),
        ("unknown deferred", Kind.RETRYABLE),
        ("unknown unknown", Kind.RETRYABLE),
        ("fatal permanent retryable", Kind.FATAL),
        ("fatal unknown interrupted deferred", Kind.FATAL),
        ("deferred deferred", Kind.DEFERRED),
        ("interrupted interrupted", Kind.INTERRUPTED),
        ("deferred interrupted", Kind.DEFERRED),
    ],
)
def test_a_group_means_what_its_parts_mean_together(parts: str, expected: Kind) -> None:
    """In whatever order they stand, and however they are nested."""
    for names in itertools.permutations(parts.split()):
        members = [PARTS[name] for name in names]
        assert expected is classify(BaseExceptionGroup("x", members)).kind
        nested = BaseExceptionGroup("x", [members[0], BaseExceptionGroup("y", members[1:])])
        assert expected is classify(nested).kind


def test_a_group_of_unknown_errors_is_the_default() -> None:
    """As each of them is."""
    assert DEFAULT == classify(ExceptionGroup("x", [KeyError(), ValueError()]))


def test_the_parts_of_a_group_are_looked_through() -> None:
    """Each has causes of its own, which they may share."""
    shared = Permanent("x")
    parts = [raised(RuntimeError(), cause=shared), raised(KeyError(), cause=shared)]

    assert Kind.PERMANENT is classify(ExceptionGroup("x", parts)).kind


def test_a_group_of_unknown_errors_is_looked_through_like_any_error() -> None:
    """It may have a cause as a whole."""
    group = raised(ExceptionGroup("x", [KeyError()]), cause=Permanent("x"))

    assert Kind.PERMANENT is classify(group).kind


def test_a_rule_about_the_group_itself_comes_first() -> None:
    """A class or a predicate may name it."""
    group = ExceptionGroup("x", [KeyError()])

    assert "actor:permanent[0]" == classify(group, permanent=[ExceptionGroup]).rule
    assert "actor:permanent[0]" == classify(group, permanent=[lambda exc: isinstance(exc, ExceptionGroup)]).rule


def test_a_shutdown_beneath_a_group_is_an_interruption() -> None:
    """A task group that is taken down by the shutdown."""
    assert Kind.INTERRUPTED is classify(raised(ExceptionGroup("x", [OSError(5, "x")]), context=Shutdown())).kind


def test_a_task_groups_errors_are_looked_through() -> None:
    """What asyncio makes of two tasks that fail."""

    async def fail(exc: Exception) -> None:
        raise exc

    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail(Permanent("x")))
            tasks.create_task(fail(FileNotFoundError(2, "x")))

    with pytest.raises(ExceptionGroup) as info:
        asyncio.run(both())

    assert Kind.PERMANENT is classify(info.value).kind


def test_a_group_takes_the_longest_wait_and_the_smallest_limit_of_its_parts() -> None:
    """All of them have to be served."""
    limited = fake("httpx.HTTPStatusError", response=response(404))
    busy = fake("httpx.HTTPStatusError", response=response(503, Retry_After="30"))
    patient = KeyError()
    rules = [(KeyError, {"max_retries": 7})]
    verdict = classify(ExceptionGroup("x", [limited, busy, ConnectionError(), patient]), retryable=rules)

    assert (3, 30_000, None) == (verdict.max_retries, verdict.retry_after, verdict.delay)
    assert "builtin:httpx.HTTPStatusError[status=404]" == verdict.rule
    assert "4 of 4" in verdict.why


def test_a_group_waits_exactly_as_asked_only_if_all_its_parts_ask() -> None:
    """Otherwise what was asked is a floor: the others have their backoff."""
    both = classify(ExceptionGroup("x", [Retryable(delay=1), Retryable(delay=9)]))
    one = classify(ExceptionGroup("x", [Retryable(delay=9), ConnectionError()]))
    unknown = classify(ExceptionGroup("x", [Retryable(delay=9), KeyError()]))

    assert (9, None) == (both.delay, both.retry_after)
    assert (None, 9) == (one.delay, one.retry_after)
    assert (None, 9) == (unknown.delay, unknown.retry_after)


def test_a_group_takes_the_first_backoff_that_a_rule_gives() -> None:
    """There is no way to add two of them."""
    parts = [ConnectionError(), KeyError("x")]
    verdict = classify(ExceptionGroup("x", parts), retryable=[(KeyError, {"min_backoff": 1_000, "max_backoff": 9_000})])

    assert Backoff(1_000, 9_000) == verdict.backoff


def test_of_a_group_too_large_to_look_through_the_rest_counts_as_unknown() -> None:
    """So it cannot be given up unseen."""
    assert Kind.PERMANENT is classify(ExceptionGroup("x", [Permanent("x") for _ in range(900)])).kind
    assert Kind.RETRYABLE is classify(ExceptionGroup("x", [Permanent("x") for _ in range(5_000)])).kind
    assert Kind.RETRYABLE is classify(ExceptionGroup("x", [Permanent("x")] * 5_000)).kind


def test_no_parts_say_nothing() -> None:
    """Pure arithmetic of verdicts."""
    assert None is combine([])
    assert None is combine([None, None])
