"""A stack that is set up wrongly never meets a message: it says what is wrong and what to write instead."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AsyncIO, Middleware, Retries, TimeLimit

from dramatiq_guard import Classify, DeadLetter, GuardError, IdempotencyGuard, JitterBackoff, Tracing, connect, install
from dramatiq_guard.checks import CHECKS, Setup, problems
from dramatiq_guard.errors import SetupError, StoreUnavailable
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.testing.private_server import free_port
from tests.stack.rig import stock_middleware
from tests.support.workers import Workers


def broker_of(*middleware: Any) -> StubBroker:
    """A broker in memory with exactly these middlewares, in this order."""
    return StubBroker(middleware=list(middleware))


def found(broker: Any, **options: Any) -> dict[str, str]:
    """The problems of a set-up: the name of the check, and what it says."""
    return {problem.check: problem.what for problem in problems(Setup(broker, **options))}


def boot(broker: Any) -> None:
    """Start a worker on the broker and stop it again."""
    worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=1)
    worker.start()
    worker.stop()


# -- each check ------------------------------------------------------------------------------------------------------


def test_a_sound_stack_has_no_problems() -> None:
    """Installed as it is meant to be, nothing is found, and the worker boots."""
    broker = broker_of(*stock_middleware())
    install(broker, Classify(), JitterBackoff(), DeadLetter(MemoryDeadLetters()))

    assert found(broker) == {}
    boot(broker)


def test_two_retry_middlewares_are_refused() -> None:
    """Both would retry every message (H6); the error says how to have one."""
    broker = broker_of(Retries(), JitterBackoff())

    assert "2 retry middlewares (Retries, JitterBackoff)" in found(broker)["one_retry_middleware"]
    assert "use install(broker, …)" in found(broker)["one_retry_middleware"]
    with pytest.raises(SetupError, match="The worker does not start"):
        boot(broker)


def test_no_retry_middleware_is_refused() -> None:
    """Without one a failure would be acked as done."""
    broker = broker_of(Classify())

    assert "add JitterBackoff()" in found(broker)["one_retry_middleware"]
    with pytest.raises(SetupError):
        boot(broker)


def test_a_guard_that_stands_twice_is_refused() -> None:
    """The error names it."""
    broker = broker_of(JitterBackoff(), Classify(), Classify())

    assert found(broker)["each_once"] == "Classify is 2 times in the broker's middleware: leave one."
    with pytest.raises(SetupError):
        boot(broker)


def test_a_wrong_order_is_refused() -> None:
    """The error says the right one."""
    broker = broker_of(Classify(), JitterBackoff(), DeadLetter(MemoryDeadLetters()), Tracing())

    assert "Tracing, DeadLetter, JitterBackoff, Classify." in found(broker)["in_order"]
    with pytest.raises(SetupError):
        boot(broker)


def test_rabbitmq_without_confirms_is_refused_unless_it_was_accepted() -> None:
    """A retry that was never confirmed may be lost; whoever accepts that says so, and is warned."""
    broker = RabbitmqBroker(url="amqp://127.0.0.1:1/")
    install(broker, JitterBackoff())
    (problem,) = problems(Setup(broker))
    assert problem.fatal
    assert "RabbitmqBroker(confirm_delivery=True, …)" in problem.what
    assert "allow_unconfirmed=True" in problem.what
    with pytest.raises(SetupError, match="confirm_delivery"):
        dramatiq.Worker(broker).start()

    accepted = RabbitmqBroker(url="amqp://127.0.0.1:1/")
    install(accepted, JitterBackoff(), allow_unconfirmed=True)
    (problem,) = problems(Setup(accepted, allow_unconfirmed=True))
    assert not problem.fatal


def test_rabbitmq_with_confirms_is_fine() -> None:
    """Nothing is found."""
    broker = RabbitmqBroker(url="amqp://127.0.0.1:1/", confirm_delivery=True)
    install(broker, JitterBackoff())

    assert found(broker) == {}


def test_the_options_of_actors_that_came_first_are_checked() -> None:
    """An actor that was declared before the stack is checked by install, by the error that names actor and option."""
    broker = broker_of(*stock_middleware())

    @dramatiq.actor(broker=broker, max_retries=-1)
    def early() -> None:
        return None

    with pytest.raises(SetupError, match=r"Actor 'early': max_retries must not be negative"):
        install(broker, JitterBackoff())
    broker.add_middleware(Classify())
    assert "Actor 'early'" in found(broker)["sound_actor_options"]


def test_a_callback_that_nobody_declares_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Another process may declare it, so the worker boots."""
    broker = broker_of(*stock_middleware())
    install(broker, JitterBackoff())

    @dramatiq.actor(broker=broker, on_failure="elsewhere", on_retry_exhausted="gone")
    def work() -> None:
        return None

    with caplog.at_level(logging.WARNING):
        boot(broker)

    said = [record.getMessage() for record in caplog.records if "is not declared here" in record.getMessage()]
    assert len(said) == 2
    assert "Actor 'work' names 'gone' in on_retry_exhausted" in said[0] + said[1]


class _Store(MemoryDeadLetters):
    """A store that answers its ping with an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def ping(self) -> None:
        raise self.error


def test_a_store_that_is_not_set_up_is_refused() -> None:
    """Waiting would not help; the error says what would."""
    broker = broker_of(*stock_middleware())
    install(broker, JitterBackoff(), DeadLetter(_Store(SetupError("run `dramatiq-guard schema apply`"))))

    with pytest.raises(SetupError, match="DeadLetter: run `dramatiq-guard schema apply`"):
        boot(broker)


def test_a_store_that_is_out_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The worker boots, and what needs the store waits for it."""
    broker = broker_of(*stock_middleware())
    install(broker, JitterBackoff(), DeadLetter(_Store(StoreUnavailable("connection refused"))))

    with caplog.at_level(logging.WARNING):
        boot(broker)

    assert "The store of DeadLetter does not answer (connection refused)" in caplog.text


def test_a_guard_of_keys_alone_would_burn_attempts() -> None:
    """Dramatiq's Retries knows nothing of a message that is put off; the check is the middleware's own."""
    broker = broker_of(*stock_middleware())
    install(broker, IdempotencyGuard(connect("memory://").idempotency))

    assert "Add JitterBackoff()" in found(broker)["puts_off"]


def test_every_check_is_tested_here() -> None:
    """A new check needs a test of what it says."""
    assert {check.__name__ for check in CHECKS} == {
        "one_retry_middleware",
        "each_once",
        "in_order",
        "confirmed_publishing",
        "sound_actor_options",
        "known_callbacks",
        "stores_answer",
        "of_the_middlewares",
    }


def test_everything_that_is_wrong_is_said_at_once() -> None:
    """One error names every fatal problem."""
    broker = broker_of(Classify(), Classify(), Retries(), JitterBackoff(), Tracing())

    with pytest.raises(SetupError) as caught:
        boot(broker)

    for part in ("2 retry middlewares", "Classify is 2 times", "wrong order"):
        assert part in str(caught.value)


# -- install ---------------------------------------------------------------------------------------------------------


def test_install_refuses_a_second_stack() -> None:
    """Whether it came by install or by add_middleware; the broker is left as it was."""
    broker = broker_of(*stock_middleware())
    install(broker, JitterBackoff())
    before = list(broker.middleware)

    with pytest.raises(SetupError, match="call install once, with all its middlewares"):
        install(broker, Classify())
    assert broker.middleware == before


def test_install_refuses_a_class() -> None:
    """A forgotten pair of parentheses."""
    with pytest.raises(SetupError, match=r"install takes Classify\(…\), an instance, not the class itself"):
        install(broker_of(), Classify)


def test_install_refuses_the_same_guard_twice() -> None:
    """The error names it."""
    with pytest.raises(SetupError, match="install was given Classify twice: leave one"):
        install(broker_of(), Classify(), JitterBackoff(), Classify())


def test_install_refuses_other_middlewares() -> None:
    """They belong to the broker; anything else is no middleware at all."""
    with pytest.raises(SetupError, match=r"Add it with broker\.add_middleware"):
        install(broker_of(), TimeLimit())
    with pytest.raises(SetupError, match="not 'Classify'"):
        install(broker_of(), "Classify")


def test_install_without_retries_is_found_at_boot() -> None:
    """On a broker without Retries something has to say what becomes of failures."""
    broker = broker_of()
    install(broker, Classify())

    with pytest.raises(SetupError, match=r"add JitterBackoff\(\)"):
        boot(broker)


def test_a_subclass_of_retries_of_the_users_own_is_a_second_one() -> None:
    """Only Dramatiq's own gives way; whoever wrote another is told."""

    class Mine(Retries):
        pass

    broker = broker_of(Mine())
    install(broker, JitterBackoff())

    with pytest.raises(SetupError, match=r"Mine, JitterBackoff|JitterBackoff, Mine"):
        boot(broker)


# -- options ---------------------------------------------------------------------------------------------------------

WRONG_OPTIONS: list[tuple[str, Any, str]] = [
    ("max_retries", "3", "max_retries must be an integer or None"),
    ("max_retries", True, "max_retries must be an integer or None"),
    ("max_retries", -1, "max_retries must not be negative"),
    ("min_backoff", "1s", "min_backoff"),
    ("min_backoff", -5, "min_backoff"),
    ("max_backoff", timedelta(seconds=-1), "max_backoff"),
    ("jitter", "some", "jitter"),
    ("jitter", (0.5, 0.1), "jitter"),
    ("backoff", [], "schedule|backoff"),
    ("backoff", [1, -1], "schedule|backoff"),
    ("retry_for", "soon", "retry_for"),
    ("max_deferrals", 1.5, "max_deferrals"),
    ("max_interruptions", "many", "max_interruptions"),
    ("retry_when", "always", "retry_when must be a callable"),
    ("throws", "KeyError", "throws must be an exception class or a tuple of them"),
    ("throws", [KeyError], "throws must be an exception class or a tuple of them"),
    ("on_retry_exhausted", 3, "on_retry_exhausted must be the name of an actor"),
    ("notify_shutdown", "yes", "notify_shutdown must be True or False"),
    ("time_limit", "1 minute", "time_limit"),
    ("classify", [KeyError], "classify must be a dict"),
    ("classify", {"permanent": [3]}, "classify"),
    ("on_dead_letter", 3, "on_dead_letter must be"),
]


@pytest.mark.parametrize(("option", "value", "says"), WRONG_OPTIONS)
def test_a_wrong_option_stops_the_declaration(option: str, value: Any, says: str) -> None:
    """The error comes where the actor is declared, and names the actor, the option and the value."""
    broker = broker_of(*stock_middleware())
    install(broker, Classify(), JitterBackoff(), DeadLetter(MemoryDeadLetters()))

    with pytest.raises(GuardError, match=says) as caught:

        @dramatiq.actor(broker=broker, actor_name="mistaken", **{option: value})
        def work() -> None:
            return None

    assert "'mistaken'" in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: JitterBackoff(jitter="wobbly"),  # type: ignore[arg-type]
        lambda: JitterBackoff(min_backoff=-1),
        lambda: JitterBackoff(max_retries="3"),  # type: ignore[arg-type]
        lambda: JitterBackoff(min_backoff=10, max_backoff=5),
        lambda: JitterBackoff(log="loud"),  # type: ignore[arg-type]
        lambda: JitterBackoff(retry_when=3),  # type: ignore[arg-type]
        lambda: JitterBackoff(backoff=[-1]),
        lambda: Classify(permanent=[3]),
        lambda: Classify(retryable=["not a name!"]),
        lambda: DeadLetter("redis://localhost"),  # type: ignore[arg-type]
        lambda: DeadLetter(MemoryDeadLetters(), max_letters=0),
        lambda: DeadLetter(MemoryDeadLetters(), retention=-1),
        lambda: DeadLetter(MemoryDeadLetters(), on_dead_letter=3),  # type: ignore[arg-type]
        lambda: Tracing(flush_timeout=-1),
    ],
)
def test_a_wrong_argument_is_refused_at_once(make: Any) -> None:
    """Each middleware checks its arguments when it is made, and names itself."""
    with pytest.raises(SetupError) as caught:
        make()

    assert any(name in str(caught.value) for name in ("JitterBackoff", "Classify", "DeadLetter", "Tracing"))


# -- real processes --------------------------------------------------------------------------------------------------

APP = """
import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO, Retries, default_middleware
from dramatiq_guard import Classify, JitterBackoff, install

middleware = [m() for m in default_middleware]
{how}
dramatiq.set_broker(broker)


@dramatiq.actor
def work():
    pass
"""


@pytest.mark.parametrize(
    "how",
    [
        # Dramatiq's event loop boots before the check is asked.
        "broker = RedisBroker(port={port}, middleware=[AsyncIO(), *middleware, JitterBackoff(), Classify()])",
        # And after it.
        """broker = RedisBroker(port={port}, middleware=middleware)
broker.add_middleware(AsyncIO())
install(broker, JitterBackoff())
broker.add_middleware(Retries())""",
    ],
    ids=["event loop first", "event loop last"],
)
def test_a_worker_process_that_is_set_up_wrongly_ends(tmp_path: Path, how: str) -> None:
    """The dramatiq command ends with an exit code that is not 0, and does not hang on the event loop's thread."""
    (tmp_path / "wrongly_set_up.py").write_text(APP.format(how=how.format(port=free_port())))

    with Workers("wrongly_set_up", path=tmp_path, ready_within=0) as workers:
        assert workers.wait(20) != 0
        assert "retry middlewares" in workers.log
        assert "The worker does not start." in workers.log


def test_an_event_loop_that_was_started_by_a_failed_boot_is_stopped() -> None:
    """In the same process: no thread of it is left behind."""
    import threading

    class Blocker(Middleware):
        pass

    broker = broker_of(AsyncIO(), Blocker(), Retries(), JitterBackoff())
    before = set(threading.enumerate())

    with pytest.raises(SetupError):
        boot(broker)

    assert not [thread for thread in set(threading.enumerate()) - before if "EventLoop" in type(thread).__name__]


def test_a_producer_with_the_stack_takes_nobody_for_dead() -> None:
    """Dramatiq has every process look for dead workers now and then, and after an outage all look dead."""
    broker = RedisBroker(url="redis://127.0.0.1:1/0")
    assert broker.maintenance_chance > 0

    install(broker, JitterBackoff())

    assert broker.maintenance_chance == 0
