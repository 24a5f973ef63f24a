"""Workers with and without the stack on one queue, the stack taken off again, and carriers of other versions.

What travels in a message is one entry in its options, which nobody else reads: a deploy in two halves loses nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from dramatiq_guard.delivery import CARRIER
from tests.stack.rig import FAST, Rig, build
from tests.support.waiting import wait_until
from tests.support.workers import Workers

#: How often each message fails: half of them never, and some for good (max_retries is 2).
PLAN = {f"m{n}": (0, 0, 1, 2, 9)[n % 5] for n in range(60)}


class Fleet:
    """The queue, the ledger that the workers write, and workers of either kind."""

    def __init__(self, url: str, client: redis.Redis, ledger: Path) -> None:
        self.url, self.client, self.ledger = url, client, ledger
        ledger.touch()
        self.broker: Any = RedisBroker(url=url, middleware=[])  # type: ignore[no-untyped-call]
        self.broker.declare_queue("default")

    def workers(self, kind: str) -> Workers:
        """Two threads that run the app, with the stack or without."""
        env = {
            "FLEET_REDIS": self.url,
            "FLEET_LEDGER": str(self.ledger),
            "FLEET_KIND": kind,
            "dramatiq_worker_timeout": "50",
        }
        return Workers("tests.stack.fleet_app", env=env, threads=4)

    def send(self, plan: dict[str, int], **options: Any) -> None:
        """Send a message for each name."""
        for name, failures in plan.items():
            self.broker.enqueue(
                dramatiq.Message(
                    queue_name="default", actor_name="work", args=(name, failures), kwargs={}, options=dict(options)
                )
            )

    @property
    def runs(self) -> Counter[str]:
        """How often each message has been run."""
        return Counter(line.split()[0] for line in self.ledger.read_text().splitlines())

    @property
    def kinds(self) -> set[str]:
        """Which kinds of workers have run anything."""
        return {line.split()[1] for line in self.ledger.read_text().splitlines()}

    def dead(self) -> list[str]:
        """The names of the messages among the broker's dead letters."""
        return sorted(json.loads(body)["args"][0] for body in self.client.hvals("dramatiq:default.XQ.msgs"))

    def left(self) -> int:
        """How many messages are in the queue, in the delay queue, or held by a worker."""
        with self.client.pipeline(transaction=True) as pipe:
            # At one moment: a message may be on its way from one to the other.
            pipe.hlen("dramatiq:default.msgs").hlen("dramatiq:default.DQ.msgs")
            return sum(pipe.execute())

    def finish(self, plan: dict[str, int]) -> None:
        """Wait until nothing is left, and hold the ledger against the plan."""
        wait_until(lambda: self.left() == 0, 30, lambda: f"{self.left()} left; {self.runs}")
        assert self.runs == {name: min(failures, 2) + 1 for name, failures in plan.items()}
        assert self.dead() == sorted(name for name, failures in plan.items() if failures > 2)


@pytest.fixture
def fleet(redis_url: str, redis_client: redis.Redis, tmp_path: Path) -> Iterator[Fleet]:
    """An empty queue and an empty ledger."""
    fleet = Fleet(redis_url, redis_client, tmp_path / "ledger")
    yield fleet
    fleet.broker.client.connection_pool.disconnect()


def test_stock_and_stack_workers_share_a_queue(fleet: Fleet) -> None:
    """Each message runs exactly as often as it was planned to, whoever takes up its retries."""
    with fleet.workers("stock"), fleet.workers("stack"):
        fleet.send(PLAN)
        fleet.finish(PLAN)

    assert fleet.kinds == {"stock", "stack"}


@pytest.mark.parametrize(("first", "then"), [("stack", "stock"), ("stock", "stack")])
def test_the_stack_may_come_and_go_with_messages_in_flight(fleet: Fleet, first: str, then: str) -> None:
    """What one kind of worker has begun the other finishes, with the counts that were planned."""
    plan = {name: failures for name, failures in PLAN.items() if failures}
    with fleet.workers(first) as workers:
        # Long enough for the workers to end before the first retry.
        fleet.send(plan, min_backoff=1_500, max_backoff=2_000)
        wait_until(lambda: len(fleet.runs) == len(plan), 20, lambda: fleet.runs)
        workers.term()
        assert workers.wait() == 0
    assert fleet.left() > 0

    with fleet.workers(then):
        fleet.finish(plan)

    assert fleet.kinds == {first, then}


# -- carriers --------------------------------------------------------------------------------------------------------

FUTURE = {
    "v": 99,
    "history": {"n": 2, "first": [{"at": 1, "type": "X", "unheard": [1]}], "last": [], "compressed": True},
    "deferrals": 3,
    "shard": {"id": "s-1", "weights": [1, 2, None]},
}

RUBBISH: list[Any] = [
    "rubbish",
    3,
    None,
    [1, 2],
    {"history": "x"},
    {"history": {"n": "many", "first": 3, "last": [1, None, {}]}},
    {"history": {"n": -5, "first": [{"at": "yesterday", "type": 3}], "last": {}}},
    {"deferrals": "many", "interruptions": [], "prev": 3},
    {"of": 1, "replay": "x", "fork": [], "seq": "y"},
]


@pytest.fixture(params=["stub", "redis"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig with the stack, in memory and on Redis."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    rig, put_on = build(request.param, "install", url)
    put_on()
    yield rig
    rig.close()


def _fail_with(rig: Rig) -> Callable[[Any], Any]:
    @rig.actor(max_retries=1, **FAST)
    def work() -> None:
        me: Any = dramatiq.middleware.CurrentMessage.get_current_message()
        rig.note("carrier", dict(me.options).get(CARRIER))
        rig.note(me.message_id)
        raise ConnectionError("always")

    def send(carrier: Any) -> Any:
        return work.send_with_options(**{CARRIER: carrier})

    return send


def test_what_a_future_version_put_in_its_carrier_travels_on(rig: Rig) -> None:
    """Keys that this version does not know are kept in the copies that it makes."""
    send = _fail_with(rig)
    rig.work()
    message = send(FUTURE)
    rig.settle()

    before, after = rig.notes("carrier")
    assert {**before, **FUTURE} == before
    assert after["shard"] == FUTURE["shard"]
    assert after["v"] == 99
    assert after["deferrals"] == 3
    assert rig.count(message.message_id) == 2


def test_rubbish_in_the_carrier_changes_nothing(rig: Rig) -> None:
    """Each message runs as often as its actor's options say, and dies with a letter."""
    send = _fail_with(rig)
    rig.work()
    messages = [send(carrier) for carrier in RUBBISH]
    rig.settle()

    assert [rig.count(message.message_id) for message in messages] == [2] * len(RUBBISH)
    assert [rig.ends(message)["nack"] for message in messages] == [1] * len(RUBBISH)
    assert rig.letters is not None
    assert rig.letters.depth() == len(RUBBISH)
