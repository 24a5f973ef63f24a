"""A worker is killed between the letter and the nack: the message comes again, and its letter must say the truth."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard.settle.killpoints import VARIABLE
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.protocols import DeadLetterStore
from tests.support.waiting import wait_until
from tests.support.workers import Workers

APP = "tests.settlement.second_time_app"


class Place:
    """A broker, the store of letters, and the workers between them.

    Parameters:
      broker(Broker): Where messages are sent to.
      broker_url(str): The same for the workers.
      letters_url(str): A Redis for letters and counts.
    """

    def __init__(self, broker: Any, broker_url: str, letters_url: str) -> None:
        self.broker = broker
        self.env = {"BROKER_URL": broker_url, "LETTERS_URL": letters_url}
        self.counts: redis.Redis = redis.Redis.from_url(letters_url)
        self.stores = connect(letters_url)
        self.letters: DeadLetterStore = self.stores.dead_letters

    def send(self, key: str, *plan: str, **options: Any) -> dramatiq.Message[Any]:
        """Send a job, with what it is to do at each of its runs."""
        self.broker.declare_queue("default")
        message: dramatiq.Message[Any] = dramatiq.Message("default", "job", (key, list(plan)), {}, options)
        self.broker.enqueue(message)
        return message

    def runs(self, key: str) -> int:
        """How often a job has been run."""
        return int(self.counts.get(f"runs:{key}") or 0)

    @property
    def unsettled(self) -> list[str]:
        """The messages whose letters are unsettled."""
        return [each.message_id for each in self.letters.unsettled(before=2**53)]

    def workers(self, kill_at: str = "") -> Workers:
        """A worker process; it kills itself at a point."""
        return Workers(APP, threads=1, env={**self.env, VARIABLE: kill_at})

    def killed_at(self, point: str, key: str, *plan: str, **options: Any) -> dramatiq.Message[Any]:
        """Have a worker take a job and die at a point, and see that it left the letter behind."""
        with self.workers(point) as workers:
            # Not before it is ready: a worker that is killed while it boots can leave its master waiting for ever.
            message = self.send(key, *plan, **options)
            assert workers.wait() != 0, "the point was not reached"
        assert [message.message_id] == [each.message_id for each in self.letters.page().letters]
        assert [message.message_id] == self.unsettled
        return message

    def close(self) -> None:
        self.counts.close()
        self.stores.close()


@pytest.fixture(params=["redis", "rabbitmq"])
def place(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Place]:
    """Each broker, empty, with letters on a Redis."""
    broker: Any
    if request.param == "redis":
        url = redis_url
        broker = RedisBroker(url=url)
    else:
        url = request.getfixturevalue("rabbitmq_url")
        broker = RabbitmqBroker(url=url, confirm_delivery=True)
    with contextlib.closing(broker), contextlib.closing(Place(broker, url, redis_url)) as found:
        yield found


def test_a_message_that_succeeds_after_all_leaves_no_letter(place: Place) -> None:
    """It failed, its letter was written, the worker was killed; delivered again it succeeds."""
    message = place.killed_at("after-letter", "a", "fail", "succeed")

    with place.workers():
        wait_until(lambda: place.runs("a") == 2, 30, "the second delivery")
        wait_until(lambda: place.letters.depth() == 0, 10, "the withdrawal of the letter")

    assert place.letters.get(message.message_id) is None
    assert [] == place.unsettled
    assert 2 == place.runs("a")


def test_a_message_that_dies_again_keeps_exactly_one_letter(place: Place) -> None:
    """The control: the second death is the same letter, and once the worker has left in peace it is settled."""
    message = place.killed_at("after-letter", "a", "fail", "fail")

    with place.workers() as workers:
        wait_until(lambda: place.runs("a") == 2, 30, "the second delivery")
        place.send("b", "succeed")
        wait_until(lambda: place.runs("b") == 1, 30, "the worker to be through with the first message")
        workers.term()
        assert 0 == workers.wait()

    assert [message.message_id] == [each.message_id for each in place.letters.page().letters]
    assert [] == place.unsettled
    assert 2 == place.runs("a")


def test_a_message_that_is_retried_after_all_leaves_no_letter(place: Place) -> None:
    """It was given up, and the second time it meets an error that is worth a retry: it is not dead."""
    place.killed_at("after-letter", "a", "never", "fail", max_retries=1, min_backoff=600_000, max_backoff=600_000)

    with place.workers():
        wait_until(lambda: place.runs("a") == 2, 30, "the second delivery")
        wait_until(lambda: place.letters.depth() == 0, 10, "the withdrawal of the letter")

    assert [] == place.unsettled


@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_a_letter_is_settled_while_the_worker_runs(place: Place) -> None:
    """Some seconds after the nack the note is gone, and whatever succeeds under this id then withdraws nothing."""
    message = place.send("a", "fail")

    with place.workers():
        wait_until(lambda: place.letters.depth() == 1, 30, "the letter")
        wait_until(lambda: not place.unsettled, 30, "the letter to be settled")

    assert not place.letters.withdraw(message.message_id, now=0)
