"""A broker or a store that is down when a worker boots: it waits and says so, and takes nothing up meanwhile."""

from __future__ import annotations

import signal

import dramatiq
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker

from dramatiq_guard import CrashOnFatal, DeadLetter, JitterBackoff, connect, install
from dramatiq_guard.errors import SetupError
from dramatiq_guard.exits.boot_wait import wait_for_servers
from dramatiq_guard.testing.private_server import free_port
from dramatiq_guard.testing.valkey import PrivateValkey

from .conftest import VirtualClock
from .fleet import fleet


class Patience:
    """Gives up when it has been asked too often."""

    def __init__(self, questions: int) -> None:
        self.questions = questions

    def __call__(self) -> bool:
        self.questions -= 1
        return self.questions < 0


def test_a_worker_waits_for_its_broker_and_works_when_it_is_there() -> None:
    """The server is started while the worker waits for it."""
    port = free_port()
    with PrivateValkey() as store, fleet("redis", f"redis://127.0.0.1:{port}/0", store.url, threads=2) as workers:
        command = workers.start(ready=False)
        command.wait_log("waits for its broker", 30)
        with PrivateValkey(port=port):
            command.wait_ready()
            workers.send("innocent", "job", 0)
            workers.wait_noted("finished")

            assert "All servers answer" in command.log
            command.term()
            assert 0 == command.wait()


def test_a_worker_that_waits_leaves_when_it_is_told_to() -> None:
    """At once, with 0, and its event loop does not keep it."""
    port = free_port()
    with PrivateValkey() as broker, fleet("redis", broker.url, f"redis://127.0.0.1:{port}/0", threads=2) as workers:
        workers.send("innocent", "job", 0)
        command = workers.start(ready=False)
        command.wait_log("waits for the store of", 30)
        command.signal_group(signal.SIGTERM)

        assert 0 == command.wait(10)
        assert {} == workers.keys("began")


def test_each_server_is_waited_for(virtual: VirtualClock, redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever is out is named, once every five seconds."""
    out = f"redis://127.0.0.1:{free_port()}/0"
    broker = RedisBroker(url=redis_url)
    install(broker, JitterBackoff(), DeadLetter(connect(redis_url).dead_letters), CrashOnFatal(connect(out).deliveries))

    assert not wait_for_servers(broker, Patience(100))

    said = [record.getMessage() for record in caplog.records if "waits for" in record.getMessage()]
    assert 10 == len(said), said
    assert all("the store of CrashOnFatal" in each and out.rpartition("/")[0] in each for each in said)


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_a_broker_that_answers_is_not_waited_for(kind: str, request: pytest.FixtureRequest) -> None:
    """The boot goes on at once, and says nothing."""
    broker: dramatiq.Broker = request.getfixturevalue(f"{kind}_broker")

    assert wait_for_servers(broker, Patience(3))


@pytest.mark.parametrize(
    "broker",
    [
        RedisBroker(url=f"redis://127.0.0.1:{free_port()}/0"),
        RabbitmqBroker(url=f"amqp://guest:guest@127.0.0.1:{free_port()}/", confirm_delivery=True),
    ],
    ids=["redis", "rabbitmq"],
)
def test_a_broker_that_is_not_there_is_waited_for(
    broker: dramatiq.Broker, virtual: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """For as long as it takes."""
    assert not wait_for_servers(broker, Patience(5))
    assert "waits for its broker" in caplog.text


def test_a_store_that_is_not_set_up_stops_the_boot(postgres_url: str, stub_broker: StubBroker) -> None:
    """Waiting would not help it."""
    install(stub_broker, JitterBackoff(), CrashOnFatal(connect(postgres_url).deliveries))

    with pytest.raises(SetupError, match="schema apply"):
        wait_for_servers(stub_broker, Patience(3))


def test_a_worker_in_another_program_does_not_wait(stub_broker: StubBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts it by hand decides for how long to wait."""
    monkeypatch.setattr("dramatiq_guard.middleware.crash_on_fatal.wait_for_servers", lambda *_: pytest.fail("it waits"))
    install(stub_broker, JitterBackoff(), CrashOnFatal(connect(f"redis://127.0.0.1:{free_port()}/0").deliveries))
    worker = dramatiq.Worker(stub_broker, worker_threads=1)
    worker.start()
    worker.stop()
