"""The fixtures that all tests share; `tests/support/__init__.py` lists them.

A server is started when the first test asks for it, once for all of them.  One that does not start fails the tests
that need it; only a RabbitMQ that is not installed skips them, and not where `CI=true`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import dramatiq
import dramatiq.broker
import hypothesis
import pytest
import redis
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import raise_thread_exception
from dramatiq.middleware.time_limit import _CtypesTimeoutManager

from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.postgres import PrivatePostgres
from tests.support.rabbitmq import HOW_TO_INSTALL, ForeignRabbitMQ, PrivateRabbitMQ, rabbitmq_is_installed

# How long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")

_MARK_OF_FIXTURE = {
    "valkey": "redis",
    "own_valkey": "redis",
    "postgres": "postgres",
    "own_postgres": "postgres",
    "rabbitmq": "rabbitmq",
}

#: Tests that are `untraced` without saying so.
_INTERRUPTING = [Path(__file__).parent / place for place in ("host_facts", "stack/test_interrupted.py")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the servers that it needs."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in _MARK_OF_FIXTURE:
                item.add_marker(_MARK_OF_FIXTURE[fixture])


_rabbitmq_missing = False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly that the tests on RabbitMQ were not run."""
    if _rabbitmq_missing:
        terminalreporter.section("THE TESTS ON RABBITMQ WERE SKIPPED", red=True, bold=True)
        terminalreporter.line(HOW_TO_INSTALL, red=True)


class _Nothing(BaseException):
    """An interrupt that is awaited and dropped."""


def _settle_interrupts() -> None:
    """Let an interrupt arrive and drop it: on CPython 3.11 nothing else ends the search for one that was taken back."""
    with contextlib.suppress(_Nothing):
        raise_thread_exception(threading.get_ident(), _Nothing)
        while True:
            pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Take coverage off the thread of a test that interrupts threads, with its fixtures, and off those it starts.

    On CPython 3.11 every traced thread spins, and hangs with the lock that it holds, while an interrupt
    (PyThreadState_SetAsyncExc) is pending in any thread, and for ever after one was taken back with NULL.
    """
    if not any(item.path.is_relative_to(path) for path in _INTERRUPTING) and not item.get_closest_marker("untraced"):
        return (yield)
    mine, theirs = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        _settle_interrupts()
        threading.settrace(theirs)
        sys.settrace(mine)


# -- Redis -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def valkey() -> Iterator[PrivateValkey]:
    """The Valkey that all tests share: do not kill, stop or freeze this one."""
    with PrivateValkey() as server:
        yield server


@pytest.fixture
def own_valkey() -> Iterator[PrivateValkey]:
    """A Valkey of the test's own, whose data survive SIGKILL."""
    with PrivateValkey(aof=True) as server:
        yield server


@pytest.fixture
def redis_url(valkey: PrivateValkey) -> str:
    """The URL of an empty database."""
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
    return valkey.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the empty database at `redis_url`."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def redis_broker(redis_url: str) -> Iterator[RedisBroker]:
    """A broker on `redis_url` with Dramatiq's own middleware, which is the global one during the test."""
    broker = RedisBroker(url=redis_url)
    dramatiq.set_broker(broker)
    yield broker
    broker.close()
    broker.client.connection_pool.disconnect()


# -- PostgreSQL ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres() -> Iterator[PrivatePostgres]:
    """The PostgreSQL that all tests share: do not kill, stop or freeze this one."""
    with PrivatePostgres() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PrivatePostgres]:
    """A PostgreSQL of the test's own."""
    with PrivatePostgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PrivatePostgres) -> Iterator[str]:
    """The URL of an empty database that is dropped after the test."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield postgres.create_database(name)
    postgres.drop_database(name)


# -- RabbitMQ --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[PrivateRabbitMQ | ForeignRabbitMQ]:
    """The RabbitMQ that all tests share; whoever restarts it leaves it running."""
    if url := os.environ.get("DRAMATIQ_GUARD_TEST_RABBITMQ_URL"):
        yield ForeignRabbitMQ(url)
        return
    if not rabbitmq_is_installed():
        if os.environ.get("CI") == "true":
            pytest.fail(HOW_TO_INSTALL, pytrace=False)
        global _rabbitmq_missing
        _rabbitmq_missing = True
        pytest.skip(HOW_TO_INSTALL)
    with PrivateRabbitMQ() as server:
        yield server


@pytest.fixture
def private_rabbitmq(rabbitmq: PrivateRabbitMQ | ForeignRabbitMQ) -> PrivateRabbitMQ:
    """The shared RabbitMQ, for tests that restart it or raise its alarms: skipped where it is somebody else's."""
    if isinstance(rabbitmq, ForeignRabbitMQ):
        pytest.skip("this test stops RabbitMQ, and DRAMATIQ_GUARD_TEST_RABBITMQ_URL names one that is not ours")
    return rabbitmq.start()


@pytest.fixture
def rabbitmq_url(rabbitmq: PrivateRabbitMQ | ForeignRabbitMQ) -> Iterator[str]:
    """The URL of an empty virtual host that is deleted after the test."""
    if isinstance(rabbitmq, ForeignRabbitMQ):
        yield rabbitmq.url
        return
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield rabbitmq.start().add_vhost(name)
    if rabbitmq.running:
        rabbitmq.delete_vhost(name)


@pytest.fixture
def rabbitmq_broker(rabbitmq_url: str) -> Iterator[RabbitmqBroker]:
    """A broker on `rabbitmq_url` that waits for confirms, with Dramatiq's own middleware; the global one meanwhile."""
    broker = RabbitmqBroker(url=rabbitmq_url, confirm_delivery=True)
    dramatiq.set_broker(broker)
    yield broker
    broker.close()


# -- In memory -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_time_limit_outlives_its_test() -> Iterator[None]:
    """Take back the time limits that plain Dramatiq keeps for worker threads that have died.

    Ten minutes later it would raise in whichever thread has got the number of the dead one by then.
    """
    yield
    for thread in threading.enumerate():
        if isinstance(thread, _CtypesTimeoutManager):
            with thread.mu:
                thread.deadlines.clear()


@pytest.fixture(autouse=True)
def _global_broker() -> Iterator[None]:
    """Leave the global broker as it was found."""
    before = dramatiq.broker.global_broker
    yield
    dramatiq.broker.global_broker = before


@pytest.fixture
def stub_broker() -> Iterator[StubBroker]:
    """A broker in memory with Dramatiq's own middleware, which is the global one during the test."""
    broker = StubBroker()
    broker.emit_after("process_boot")
    dramatiq.set_broker(broker)
    yield broker
    broker.flush_all()
    broker.close()


@pytest.fixture
def stub_worker(stub_broker: StubBroker) -> Iterator[dramatiq.Worker]:
    """A running worker on `stub_broker`."""
    worker = dramatiq.Worker(stub_broker, worker_timeout=10, worker_threads=4)
    worker.start()
    yield worker
    worker.stop()
