"""Symptoms that people who run Dramatiq have reported in public, and what becomes of them under the stack.

Each is about the kind of fault, not about the one input; others are answered where their part is tested.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import Middleware, MiddlewareError, Retries
from dramatiq.rate_limits import ConcurrentRateLimiter

from dramatiq_guard import Classify, DeadLetter, Defer, JitterBackoff, install
from dramatiq_guard.dead_letters.letter import Letter
from dramatiq_guard.errors import SetupError
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from tests.stack.rig import FAST, Rig, bare_broker, build, spin, stock_middleware
from tests.support.waiting import wait_until


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A rig in memory with the whole stack."""
    rig, put_on = build("stub", "install")
    put_on()
    yield rig
    rig.close()


def rigged(*guards: Any, kind: str = "stub", url: str | None = None) -> Rig:
    """A rig with these guards."""
    rig, _ = build(kind, "stock", url)
    install(rig.broker, *guards)
    return rig


def letters(rig: Rig) -> list[Letter]:
    """The letters of a rig."""
    assert rig.letters is not None
    return list(rig.letters.page().letters)


def test_c29_retry_when_does_not_lift_max_retries(rig: Rig) -> None:
    """A predicate that always says yes ends at max_retries."""

    @rig.actor(max_retries=3, retry_when=lambda retries, error: True, **FAST)
    def work() -> None:
        rig.note("run")
        raise OSError

    rig.work()
    work.send()
    rig.settle()

    assert rig.count("run") == 4


def test_c30_a_raising_retry_when_loses_nothing(rig: Rig) -> None:
    """It is logged, and the error is retried."""

    def predicate(retries: int, error: BaseException) -> bool:
        raise KeyError("retries")

    @rig.actor(max_retries=1, retry_when=predicate, **FAST)
    def work() -> None:
        rig.note("run")
        raise OSError

    rig.work()
    work.send()
    rig.settle()

    assert rig.count("run") == 2
    assert [letter.reason for letter in letters(rig)] == ["exhausted"]


def test_c31_a_schedule_of_ones_own(rig: Rig) -> None:
    """A list of waits, the last of which repeats, or a function."""
    asked: list[tuple[int, str, str]] = []

    def schedule(retries: int, error: BaseException, message: Any) -> int:
        asked.append((retries, type(error).__name__, message.actor_name))
        return 1

    @rig.actor(max_retries=3, backoff=[1, 2], jitter="none", max_backoff=10)
    def listed() -> None:
        raise OSError

    @rig.actor(max_retries=2, backoff=schedule)
    def computed() -> None:
        raise OSError

    rig.work()
    messages = listed.send(), computed.send()
    rig.settle()

    by_message = {letter.message_id: letter for letter in letters(rig)}
    assert [attempt.delay for attempt in by_message[messages[0].message_id].history] == [1, 2, 2, None]
    assert asked == [(retries, "OSError", "computed") for retries in range(2)]


def test_c32_a_limit_for_each_kind_of_error() -> None:
    """A rule may have its own max_retries; the smaller one holds."""
    rig = rigged(Classify(retryable=[(KeyError, {"max_retries": 1, "backoff": [1]})]), JitterBackoff())

    @rig.actor(max_retries=3, **FAST)
    def work(kind: str) -> None:
        rig.note(kind)
        raise KeyError if kind == "ruled" else OSError

    rig.work()
    for kind in ("ruled", "other"):
        work.send(kind)
    rig.settle()
    rig.close()

    assert (rig.count("ruled"), rig.count("other")) == (2, 4)


def test_c34_the_final_failure_is_told_once_for_every_road() -> None:
    """on_dead_letter is called for what was exhausted, permanent, expired or unknown, once each, and for no try."""
    told: list[str] = []
    rig = rigged(
        Classify(permanent=[KeyError]),
        JitterBackoff(),
        DeadLetter(MemoryDeadLetters(), on_dead_letter=lambda letter: told.append(letter.reason)),
    )

    @rig.actor(max_retries=2, **FAST)
    def work(kind: str) -> None:
        raise KeyError if kind == "permanent" else OSError

    @rig.actor(max_age=1)
    def late() -> None:
        raise AssertionError("too old to run")

    rig.work()
    work.send("exhausted")
    work.send("permanent")
    late.send_with_options(delay=30)
    rig.broker.enqueue(dramatiq.Message(queue_name="default", actor_name="nobody", args=(), kwargs={}, options={}))
    rig.settle()
    rig.close()

    assert sorted(told) == ["exhausted", "expired", "permanent", "unknown_actor"]


def test_c36_waiting_for_a_rate_limiter_uses_up_no_retry() -> None:
    """Put off where asked: with max_retries=0 the message waits and succeeds."""
    rig = rigged(Classify(defer_on=["dramatiq.RateLimitExceeded"]), JitterBackoff())
    mutex = ConcurrentRateLimiter(rig.limits, "c36", limit=1)

    @rig.actor(max_retries=0)
    def work() -> None:
        rig.note("run")
        with mutex.acquire():
            rig.note("done")

    rig.work()
    with mutex.acquire():
        message = work.send()
        wait_until(lambda: rig.ends(message))
    rig.settle()
    rig.close()

    assert rig.count("done") == 1
    assert rig.ends(message)["nack"] == 0


def test_c37_putting_off_does_not_look_like_an_error(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """No error is logged, no on_failure is fired, no result stored; and the message runs again."""

    @rig.actor
    def failed(message_data: Any, error: Any) -> None:
        rig.note("failed")

    @rig.actor(on_failure="failed", store_results=True, max_retries=0)
    def work() -> str:
        if rig.note("run") < 3:
            raise Defer("not now", delay=1)
        return "done"

    rig.work()
    with caplog.at_level(logging.WARNING):
        message = work.send()
        rig.settle()

    assert message.get_result() == "done"
    assert (rig.count("run"), rig.count("failed")) == (3, 0)
    assert [record.getMessage() for record in caplog.records] == []


def test_c38_a_hiccup_of_the_broker_while_a_retry_is_sent_loses_nothing(rig: Rig) -> None:
    """The message stays unacked until its retry is on its way."""
    left = [2]

    class Closed(MiddlewareError, ConnectionClosed):
        """What the broker raises, let through by a hook."""

    class Hiccup(Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            if delay is not None and left[0]:
                left[0] -= 1
                raise Closed("hiccup")

    rig.broker.add_middleware(Hiccup())

    @rig.actor(max_retries=1, **FAST)
    def work() -> None:
        if rig.note("run") < 2:
            raise OSError

    rig.work()
    message = work.send()
    rig.settle()

    assert rig.count("run") == 2
    assert rig.ends(message) == {"ack": 3}
    assert left == [0]


def test_c39_without_a_retry_middleware_no_worker_boots() -> None:
    """Failures would be acked as done."""
    broker = bare_broker("stub", None, stock_middleware()[:-1])
    broker.add_middleware(DeadLetter(MemoryDeadLetters()))

    with pytest.raises(SetupError, match="acked as if it were done"):
        dramatiq.Worker(broker).start()


def test_c40_a_second_retries_is_found() -> None:
    """install takes the place of Dramatiq's own; one more is refused at boot."""
    broker = bare_broker("stub", None, stock_middleware())
    install(broker, JitterBackoff())
    assert sum(isinstance(m, Retries) for m in broker.middleware) == 1
    broker.add_middleware(Retries(max_retries=3))

    with pytest.raises(SetupError, match="2 retry middlewares"):
        dramatiq.Worker(broker).start()


def test_c41_a_deploy_dead_letters_nothing(redis_url: str) -> None:
    """An interrupted message without retries goes back to its queue, and finishes on the next worker."""
    rig, put_on = build("redis", "install", redis_url)
    put_on()
    started = threading.Event()

    @rig.actor(max_retries=0, notify_shutdown=True)
    def work() -> None:
        if rig.note("run") == 1:
            started.set()
            spin()

    worker = rig.work(threads=1)
    message = work.send()
    started.wait(10)
    worker.stop(timeout=10_000)
    rig.work(threads=1)
    rig.settle()
    rig.close()

    assert rig.count("run") == 2
    assert rig.ends(message)["nack"] == 0


def test_c45_every_actor_that_asked_is_told_of_a_shutdown(rig: Rig) -> None:
    """Not only the first of those that run."""
    threads = 8

    @rig.actor(max_retries=0, notify_shutdown=True)
    def work() -> None:
        try:
            rig.note("started")
            spin()
        except dramatiq.middleware.Shutdown:
            rig.note("told")
            raise

    worker = rig.work(threads=threads)
    for _ in range(threads):
        work.send()
    wait_until(lambda: rig.count("started") == threads)
    worker.stop(timeout=10_000)
    rig.worker = None

    assert rig.count("told") == threads


def test_c48_interruptions_have_a_cap(redis_url: str) -> None:
    """A job that is too long for the deploys is given up, with a reason of its own."""
    rig, put_on = build("redis", "install", redis_url)
    put_on()

    @rig.actor(max_retries=5, max_interruptions=1, notify_shutdown=True)
    def work() -> None:
        rig.note("run")
        spin()

    work.send()
    for n in (1, 2):
        worker = rig.work(threads=1)
        wait_until(lambda n=n: rig.count("run") == n)  # type: ignore[misc]
        worker.stop(timeout=10_000)
    rig.worker = None

    assert [letter.reason for letter in letters(rig)] == ["interrupted_too_often"]
    rig.close()


def test_c49_a_letter_holds_the_last_error_and_its_traceback(redis_url: str) -> None:
    """On real Redis, with max_retries=0, where the broker's own dead letter says nothing at all."""
    rig, put_on = build("redis", "install", redis_url)
    put_on()

    @rig.actor(max_retries=0)
    def work(order: int) -> None:
        raise ValueError(f"order {order} is broken")

    rig.work()
    message = work.send(7)
    rig.settle()
    (letter,) = letters(rig)
    rig.close()

    assert letter.message_id == message.message_id
    assert letter.error is not None
    assert (letter.error.type, letter.error.message) == ("ValueError", "order 7 is broken")
    assert "test_cases.py" in letter.error.traceback
    assert 'raise ValueError(f"order {order} is broken")' in letter.error.traceback
    assert [(attempt.type, attempt.message) for attempt in letter.history] == [("ValueError", "order 7 is broken")]
    assert letter.attempts_total == 1


def test_c52_every_dead_letter_has_a_reason_and_a_line_in_the_log(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The line names the message, the actor, the reason and the letter."""

    @rig.actor(max_retries=0)
    def work() -> None:
        raise OSError

    rig.work()
    with caplog.at_level(logging.WARNING):
        message = work.send()
        rig.settle()

    (letter,) = letters(rig)
    (line,) = [record.getMessage() for record in caplog.records if "is dead" in record.getMessage()]
    assert all(part in line for part in (message.message_id, "'work'", "exhausted", letter.letter_id))


def test_c72_install_puts_everything_in_its_place_in_any_order() -> None:
    """Whichever way round the guards are given."""
    orders = []
    for guards in (
        (Classify(), JitterBackoff(), DeadLetter(MemoryDeadLetters())),
        (DeadLetter(MemoryDeadLetters()), JitterBackoff(), Classify()),
    ):
        broker = bare_broker("stub", None, stock_middleware())
        install(broker, *guards)
        orders.append([type(m).__name__ for m in broker.middleware])

    assert orders[0] == orders[1]


# -- parts that cannot be done ---------------------------------------------------------------------------------------


def test_a_retry_that_cannot_be_sent_is_tried_three_times_and_becomes_a_letter(rig: Rig) -> None:
    """For another reason than an outage, which is repeated for as long as it takes."""

    class Refuses(MiddlewareError):
        pass

    class Refusing(Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            if delay is not None:
                rig.note("tried")
                raise Refuses("no delayed messages here")

    rig.broker.add_middleware(Refusing())

    @rig.actor(max_retries=3, **FAST)
    def work() -> None:
        rig.note("run")
        raise OSError("the error of the attempt")

    rig.work()
    work.send()
    wait_until(lambda: letters(rig))

    assert (rig.count("run"), rig.count("tried")) == (1, 3)
    (letter,) = letters(rig)
    assert letter.reason == "unencodable"
    assert letter.error is not None
    assert "no delayed messages here" in letter.error.message


def test_a_callback_that_cannot_be_sent_costs_the_message_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """It is tried three times and reported; the message, which succeeded, is acked once and not run again."""

    class Refuses(MiddlewareError):
        pass

    class Refusing(Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            if message.actor_name == "told":
                rig.note("tried")
                raise Refuses("no callbacks here")

    rig.broker.add_middleware(Refusing())

    @rig.actor
    def told(message_data: Any, result: Any) -> None:
        return None

    @rig.actor(on_success="told")
    def work() -> None:
        rig.note("run")

    rig.work()
    message = work.send()
    rig.settle()

    assert (rig.count("run"), rig.count("tried")) == (1, 3)
    assert rig.ends(message) == {"ack": 1}
    assert "on_success failed 3 times and is given up" in caplog.text
