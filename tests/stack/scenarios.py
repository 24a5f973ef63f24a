"""What users of plain Dramatiq write, one generator each: declare, yield, send, yield, return what was seen.

Nothing here knows whether the stack is installed; `test_compatibility` runs each with and without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import dramatiq
from dramatiq.middleware import CurrentMessage
from dramatiq.rate_limits import ConcurrentRateLimiter
from dramatiq.results import ResultFailure, ResultMissing

from dramatiq_guard.delivery import CARRIER
from tests.stack.rig import FAST, Rig, Scenario, spin

SCENARIOS: dict[str, Scenario] = {}

Steps = Generator[None, None, Any]


def scenario(fn: Scenario) -> Scenario:
    """Add a scenario to the list."""
    SCENARIOS[fn.__name__] = fn
    return fn


class Sorry(Exception):
    """What an actor that fails raises here."""


def theirs(options: dict[str, Any]) -> dict[str, Any]:
    """A message's options without our one entry: a listed difference."""
    return {name: value for name, value in options.items() if name != CARRIER}


# -- runs and retries ------------------------------------------------------------------------------------------------


@scenario
def succeeds(rig: Rig) -> Steps:
    @rig.actor(actor_name="succeeds")
    def work(a: int, *, b: int) -> None:
        rig.note("succeeds", (a, b))

    yield
    message = work.send(1, b=2)
    yield
    assert rig.notes("succeeds") == [(1, 2)]
    return dict(rig.ends(message))


@scenario
def fails_twice(rig: Rig) -> Steps:
    @rig.actor(actor_name="fails_twice", max_retries=3, **FAST)
    def work(payload: dict[str, Any]) -> None:
        rig.note("fails_twice.args", payload)
        if rig.note("fails_twice") < 3:
            raise Sorry("again")

    yield
    message = work.send_with_options(args=({"x": [1, None]},), mine={"kept": True})
    yield
    assert rig.count("fails_twice") == 3
    return rig.notes("fails_twice.args"), dict(rig.ends(message))


@scenario
def exhausted(rig: Rig) -> Steps:
    @rig.actor(actor_name="exhausted.report")
    def report(message_data: dict[str, Any], retry_info: dict[str, Any]) -> None:
        rig.note("exhausted.report", (sorted(message_data), retry_info, message_data["args"]))

    @rig.actor(actor_name="exhausted", max_retries=2, on_retry_exhausted="exhausted.report", **FAST)
    def work(x: int) -> None:
        rig.note("exhausted")
        raise Sorry("always")

    yield
    message = work.send(7)
    yield
    assert rig.count("exhausted") == 3
    assert rig.notes("exhausted.report")[0][1] == {"retries": 2, "max_retries": 2}
    return rig.notes("exhausted.report"), dict(rig.ends(message))


@scenario
def no_retries(rig: Rig) -> Steps:
    @rig.actor(actor_name="no_retries", max_retries=0)
    def work() -> None:
        rig.note("no_retries")
        raise Sorry("once")

    yield
    message = work.send()
    yield
    assert rig.count("no_retries") == 1
    return dict(rig.ends(message))


@scenario
def a_message_carries_its_own_limit(rig: Rig) -> Steps:
    @rig.actor(actor_name="own_limit", max_retries=5)
    def work(which: str) -> None:
        rig.note(f"own_limit.{which}")
        raise Sorry("always")

    yield
    work.send_with_options(args=("one",), max_retries=1, **FAST)
    work.send_with_options(args=("none",), max_retries=0)
    yield
    runs = rig.count("own_limit.one"), rig.count("own_limit.none")
    assert runs == (2, 1)
    return runs


@scenario
def no_limit_at_all(rig: Rig) -> Steps:
    @rig.actor(actor_name="no_limit", max_retries=None, **FAST)
    def work() -> None:
        if rig.note("no_limit") <= 22:
            raise Sorry("more often than Dramatiq's default of 20")

    yield
    work.send()
    yield
    assert rig.count("no_limit") == 23
    return rig.count("no_limit")


@scenario
def throws(rig: Rig) -> Steps:
    @rig.actor(actor_name="throws.failed")
    def failed(message_data: dict[str, Any], error: dict[str, Any]) -> None:
        rig.note("throws.failed", (message_data["actor_name"], error))

    @rig.actor(actor_name="throws.one", throws=Sorry, on_failure="throws.failed")
    def one() -> None:
        rig.note("throws")
        raise Sorry("expected")

    @rig.actor(actor_name="throws.several", throws=(KeyError, Sorry))
    def several() -> None:
        rig.note("throws")
        raise Sorry("expected")

    yield
    messages = one.send(), several.send()
    yield
    assert rig.count("throws") == 2
    return rig.notes("throws.failed"), [dict(rig.ends(message)) for message in messages]


@scenario
def retry_when(rig: Rig) -> Steps:
    def not_twice(retries: int, error: BaseException) -> bool:
        rig.note("retry_when.asked", (retries, type(error).__name__))
        return retries < 1

    @rig.actor(actor_name="retry_when", retry_when=not_twice, **FAST)
    def work() -> None:
        rig.note("retry_when")
        raise Sorry("always")

    yield
    message = work.send()
    yield
    assert rig.count("retry_when") == 2
    return rig.notes("retry_when.asked"), dict(rig.ends(message))


@scenario
def asks_for_a_retry(rig: Rig) -> Steps:
    @rig.actor(actor_name="asks", max_retries=2, min_backoff=3_600_000)
    def work(delay: int | None) -> None:
        if rig.note(f"asks.{delay}") < 2:
            raise dramatiq.Retry("once more", delay=delay)

    yield
    work.send(0)
    work.send(30)
    yield
    runs = rig.count("asks.0"), rig.count("asks.30")
    assert runs == (2, 2)
    return runs


@scenario
def every_kind_of_exception(rig: Rig) -> Steps:
    kinds: dict[str, BaseException] = {
        "MemoryError": MemoryError(),
        "SystemExit": SystemExit(3),
        "KeyboardInterrupt": KeyboardInterrupt(),
        "GeneratorExit": GeneratorExit(),
        "StopIteration": StopIteration(),
        "KeyError": KeyError("k"),
        "group": ExceptionGroup("several", [Sorry("a"), ValueError("b")]),
    }

    @rig.actor(actor_name="kinds", max_retries=1, **FAST)
    def work(kind: str) -> None:
        if rig.note(f"kinds.{kind}") < 2:
            raise kinds[kind]

    yield
    for kind in kinds:
        work.send(kind)
    yield
    runs = {kind: rig.count(f"kinds.{kind}") for kind in kinds}
    assert set(runs.values()) == {2}
    return runs


@scenario
def options_travel(rig: Rig) -> Steps:
    @rig.actor(actor_name="travel", max_retries=2, **FAST)
    def work() -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        rig.note(
            "travel",
            (message.options.get("mine"), message.options.get("retries"), "traceback" in message.options),
        )
        if rig.count("travel") < 3:
            raise Sorry("again")

    yield
    work.send_with_options(mine=[1, {"a": None}])
    yield
    assert [retries for _, retries, _ in rig.notes("travel")] == [None, 1, 2]
    return rig.notes("travel")


@scenario
def rate_limited(rig: Rig) -> Steps:
    mutex = ConcurrentRateLimiter(rig.limits, "compat-mutex", limit=1)

    @rig.actor(actor_name="rate_limited", max_retries=1, **FAST)
    def work() -> None:
        rig.note("rate_limited")
        with mutex.acquire():
            raise AssertionError("not to be had")

    yield
    with mutex.acquire():
        message = work.send()
        yield
    assert rig.count("rate_limited") == 2
    return dict(rig.ends(message))


# -- time ------------------------------------------------------------------------------------------------------------


@scenario
def takes_too_long(rig: Rig) -> Steps:
    @rig.actor(actor_name="too_long", time_limit=40, max_retries=1, **FAST)
    def work() -> None:
        try:
            spin()
        except BaseException as error:
            rig.note("too_long", type(error).__name__)
            raise

    yield
    message = work.send()
    yield
    assert rig.notes("too_long") == ["TimeLimitExceeded"] * 2
    return dict(rig.ends(message))


@scenario
def a_message_carries_its_own_time_limit(rig: Rig) -> Steps:
    @rig.actor(actor_name="own_time", max_retries=0)
    def work() -> None:
        try:
            spin()
        except BaseException as error:
            rig.note("own_time", type(error).__name__)
            raise

    yield
    work.send_with_options(time_limit=40)
    yield
    return rig.notes("own_time")


@scenario
def expired(rig: Rig) -> Steps:
    @rig.actor(actor_name="expired", max_age=20)
    def work() -> None:
        rig.note("expired")

    yield
    message = work.send_with_options(delay=60)
    yield
    assert rig.count("expired") == 0
    return dict(rig.ends(message))


@scenario
def delayed(rig: Rig) -> Steps:
    @rig.actor(actor_name="delayed")
    def work() -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        rig.note("delayed", "eta" in message.options)

    yield
    message = work.send_with_options(delay=30)
    yield
    assert rig.count("delayed") == 1
    return rig.notes("delayed"), dict(rig.ends(message))


# -- callbacks, pipelines, groups ------------------------------------------------------------------------------------


@scenario
def callbacks(rig: Rig) -> Steps:
    @rig.actor(actor_name="callbacks.done")
    def done(message_data: dict[str, Any], result: Any) -> None:
        rig.note("callbacks.done", (sorted(message_data), sorted(theirs(message_data["options"])), result))

    @rig.actor(actor_name="callbacks.failed")
    def failed(message_data: dict[str, Any], error: dict[str, Any]) -> None:
        options = message_data["options"]
        rig.note("callbacks.failed", (sorted(message_data), options.get("retries"), "traceback" in options, error))

    @rig.actor(
        actor_name="callbacks",
        max_retries=2,
        on_success="callbacks.done",
        on_failure="callbacks.failed",
        **FAST,
    )
    def work(ok: bool) -> int:
        if not ok:
            raise Sorry("no")
        return 42

    yield
    messages = work.send(True), work.send(False)
    yield
    assert rig.count("callbacks.done") == 1
    assert rig.count("callbacks.failed") == 3
    return (
        rig.notes("callbacks.done"),
        sorted(rig.notes("callbacks.failed"), key=lambda note: note[1] or 0),
        [dict(rig.ends(message)) for message in messages],
    )


@scenario
def a_message_carries_its_own_callbacks(rig: Rig) -> Steps:
    @rig.actor(actor_name="own_callbacks.done")
    def done(message_data: dict[str, Any], result: Any) -> None:
        rig.note("own_callbacks", ("done", result))

    @rig.actor(actor_name="own_callbacks.failed")
    def failed(message_data: dict[str, Any], error: dict[str, Any]) -> None:
        rig.note("own_callbacks", ("failed", error["type"]))

    @rig.actor(actor_name="own_callbacks", max_retries=0)
    def work(ok: bool) -> str:
        if not ok:
            raise Sorry("no")
        return "fine"

    yield
    for ok in (True, False):
        work.send_with_options(args=(ok,), on_success=done, on_failure=failed)
    yield
    assert rig.count("own_callbacks") == 2
    return sorted(rig.notes("own_callbacks"))


@scenario
def pipelines(rig: Rig) -> Steps:
    @rig.actor(actor_name="pipeline.add", store_results=True, max_retries=2, **FAST)
    def add(x: int, y: int) -> int:
        if rig.note(f"pipeline.add.{x}.{y}") < 2:
            raise Sorry("once")
        return x + y

    @rig.actor(actor_name="pipeline.ignore", store_results=True)
    def ignore(*args: int) -> str:
        rig.note("pipeline.ignore", args)
        return "alone"

    @rig.actor(actor_name="pipeline.breaks", max_retries=0)
    def breaks(*args: int) -> None:
        raise Sorry("the rest never runs")

    @rig.actor(actor_name="pipeline.never")
    def never(*args: int) -> None:
        rig.note("pipeline.never")

    yield
    adds = (add.message(1, 2) | add.message(3) | add.message(4)).run()
    ignoring = (add.message(5, 6) | ignore.message_with_options(pipe_ignore=True)).run()
    (breaks.message() | never.message()).run()
    late = (ignore.message(8) | add.message_with_options(args=(9,), pipe_ignore=False, delay=20)).run(delay=20)
    yield
    assert adds.get_result() == 10
    assert rig.notes("pipeline.ignore").count(()) == 1
    assert rig.count("pipeline.never") == 0
    return (
        list(adds.get_results()),
        ignoring.get_result(),
        sorted(rig.notes("pipeline.ignore")),
        late.messages[0].get_result(),
    )


@scenario
def groups(rig: Rig) -> Steps:
    @rig.actor(actor_name="group.member", store_results=True, max_retries=2, **FAST)
    def member(x: int) -> int:
        if x % 2 and rig.note(f"group.{x}") < 2:
            raise Sorry("the odd ones fail once")
        return x * x

    @rig.actor(actor_name="group.dies", max_retries=0)
    def dies() -> None:
        raise Sorry("always")

    @rig.actor(actor_name="group.done")
    def done(which: str) -> None:
        rig.note("group.done", which)

    yield
    whole = dramatiq.group([member.message(x) for x in range(5)])
    whole.add_completion_callback(done.message("whole"))
    whole.run()
    broken = dramatiq.group([member.message(0), dies.message()])
    broken.add_completion_callback(done.message("broken"))
    broken.run()
    piped = dramatiq.group([member.message(2) | member.message(), member.message(4)])
    piped.add_completion_callback(done.message("piped"))
    piped.run()
    yield
    assert sorted(rig.notes("group.done")) == ["piped", "whole"]
    return list(whole.get_results()), list(piped.get_results())


# -- results ---------------------------------------------------------------------------------------------------------


@scenario
def results(rig: Rig) -> Steps:
    @rig.actor(actor_name="results", store_results=True, max_retries=1, **FAST)
    def work(what: str) -> Any:
        rig.note(f"results.{what}")
        if what == "second" and rig.count("results.second") < 2:
            raise Sorry("once")
        if what == "fails":
            raise Sorry("for good")
        return {"what": what}

    @rig.actor(actor_name="results.unstored")
    def unstored() -> None:
        return None

    yield
    sent = {what: work.send(what) for what in ("first", "second", "fails")}
    none = unstored.send()
    yield
    seen: dict[str, Any] = {what: sent[what].get_result() for what in ("first", "second")}
    try:
        sent["fails"].get_result()
    except ResultFailure as failure:
        seen["fails"] = (failure.orig_exc_type, failure.orig_exc_msg)
    try:
        none.get_result()
    except ResultMissing:
        seen["unstored"] = "missing"
    assert seen["fails"] == ("Sorry", "for good")
    assert seen["second"] == {"what": "second"}
    assert seen["unstored"] == "missing"
    return seen


# -- async -----------------------------------------------------------------------------------------------------------


@scenario
def async_actors(rig: Rig) -> Steps:
    @rig.actor(actor_name="async", store_results=True, max_retries=2, **FAST)
    async def work(x: int) -> int:
        await asyncio.sleep(0)
        if rig.note(f"async.{x}") < 2:
            raise Sorry("once")
        return x + 1

    @rig.actor(actor_name="async.dies", max_retries=1, **FAST)
    async def dies() -> None:
        rig.note("async.dies")
        raise Sorry("always")

    @rig.actor(actor_name="async.long", time_limit=40, max_retries=0)
    async def long() -> None:
        rig.note("async.long")
        await asyncio.sleep(10)

    yield
    message = work.send(1)
    others = dies.send(), long.send()
    yield
    assert (rig.count("async.1"), rig.count("async.dies"), rig.count("async.long")) == (2, 2, 1)
    return message.get_result(), [dict(rig.ends(other)) for other in others]


# -- actors that call, send and are classes ----------------------------------------------------------------------------


@scenario
def direct_and_nested_calls(rig: Rig) -> Steps:
    @rig.actor(actor_name="nested.inner", max_retries=0)
    def inner(x: int) -> int:
        return x + 1

    @rig.actor(actor_name="nested.outer", store_results=True, max_retries=0)
    def outer(depth: int) -> int:
        if depth:
            return int(outer(depth - 1)) + inner(0)
        return inner.fn(0)  # type: ignore[no-any-return]

    yield
    message = outer.send(3)
    yield
    assert outer(2) == 3
    assert message.get_result() == 4
    return message.get_result()


@scenario
def an_actor_that_sends(rig: Rig) -> Steps:
    @rig.actor(actor_name="sends.child")
    def child(x: int) -> None:
        rig.note("sends.child", x)

    @rig.actor(actor_name="sends", max_retries=1, **FAST)
    def work() -> None:
        child.send(rig.note("sends"))
        if rig.count("sends") < 2:
            raise Sorry("what was sent stays sent")

    yield
    work.send()
    yield
    assert sorted(rig.notes("sends.child")) == [1, 2]
    return sorted(rig.notes("sends.child"))


@scenario
def generic_actors(rig: Rig) -> Steps:
    class Base(dramatiq.GenericActor):
        class Meta:
            abstract = True

        def perform(self, x: int) -> None:
            if rig.note(f"generic.{x}") < 2:
                raise Sorry("once")

    class Concrete(Base):
        class Meta:
            actor_name = "generic"
            broker = rig.broker
            max_retries = 1
            min_backoff = 1
            max_backoff = 5

    yield
    Concrete.send(1)
    yield
    assert rig.count("generic.1") == 2
    return rig.count("generic.1")


@scenario
def unknown_actor(rig: Rig) -> Steps:
    yield
    message: Any = dramatiq.Message(queue_name="default", actor_name="nobody", args=(), kwargs={}, options={})
    rig.broker.declare_queue("default")
    rig.broker.enqueue(message)
    yield
    assert rig.ends(message) == {"nack": 1}
    return dict(rig.ends(message))


@scenario
def does_not_fit(rig: Rig) -> Steps:
    @rig.actor(actor_name="does_not_fit", max_retries=1, **FAST)
    def work(x: int) -> None:
        rig.note("does_not_fit")

    yield
    message = work.send(1, 2, 3)
    yield
    assert rig.count("does_not_fit") == 0
    return dict(rig.ends(message))


# -- middlewares of the user's own -----------------------------------------------------------------------------------


@scenario
def a_middleware_that_meddles(rig: Rig) -> Steps:
    names = ("skips", "fails", "skips_and_fails", "breaks", "refuses")

    def work(name: str) -> str:
        rig.note(f"meddler.{name}")
        return "done"

    options: dict[str, Any] = {"max_retries": 2, "store_results": True, **FAST}
    actors = {name: rig.actor(actor_name=f"meddler.{name}", **options)(work) for name in names}
    yield
    messages = {name: actor.send(name) for name, actor in actors.items()}
    yield
    runs = {name: rig.count(f"meddler.{name}") for name in names}
    assert runs == {"skips": 0, "fails": 0, "skips_and_fails": 0, "breaks": 1, "refuses": 1}
    seen: dict[str, Any] = {}
    for name, message in messages.items():
        try:
            seen[name] = message.get_result()
        except Exception as error:
            seen[name] = (type(error).__name__, getattr(error, "orig_exc_type", None))
    return runs, seen, {name: dict(rig.ends(message)) for name, message in messages.items()}


@scenario
def the_hooks_that_it_sees(rig: Rig) -> Steps:
    @rig.actor(actor_name="hooks.succeeds")
    def succeeds() -> None:
        return None

    @rig.actor(actor_name="hooks.fails", max_retries=1, **FAST)
    def fails() -> None:
        raise Sorry("always")

    @rig.actor(actor_name="hooks.delayed")
    def delayed() -> None:
        return None

    yield
    succeeds.send()
    fails.send()
    delayed.send_with_options(delay=20)
    yield
    # Which of them were called, and in which order those of one thread.
    seen = {name: rig.meddler.hooks[f"hooks.{name}"] for name in ("succeeds", "fails", "delayed")}
    return (
        {name: sorted(hooks) for name, hooks in seen.items()},
        {name: [hook for hook in hooks if "process_message" in hook] for name, hooks in seen.items()},
    )
