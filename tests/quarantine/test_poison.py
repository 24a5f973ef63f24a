"""A message that kills every process that takes it up is found out, and nobody else is harmed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.waiting import wait_until

from .fleet import fleet
from .poison import FULL, SOME, Outcome, Scenario, Servers, run

#: How many run beside each other: they wait for heartbeats most of the time.
AT_ONCE = 4
RUNS = int(os.environ.get("QUARANTINE_RUNS", "10"))


@pytest.fixture(scope="module")
def servers(valkey, rabbitmq, postgres) -> Servers:
    """Servers that all scenarios share; each has a namespace or queue of its own."""
    return Servers(valkey.url, rabbitmq.url, postgres.url)


@pytest.fixture(scope="module")
def outcome(servers: Servers, request: pytest.FixtureRequest) -> Iterator[Callable[[Scenario, int], Outcome]]:
    """What came of a scenario: all that are asked for begin with the first."""
    wanted = [
        (item.callspec.params["scenario"], item.callspec.params.get("number", 0))
        for item in request.session.items
        if isinstance(item, pytest.Function) and "scenario" in item.fixturenames
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes: dict[tuple[Scenario, int], Future[Outcome]] = {
            each: pool.submit(run, each[0], servers) for each in wanted
        }
        yield lambda scenario, number=0: outcomes[scenario, number].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", SOME, ids=str)
def test_c01_poison_is_quarantined_and_no_innocent_harmed(scenario: Scenario, outcome) -> None:
    """At the limit it becomes the letter ``poison`` with the story of its crashes; all eight innocents finish."""
    came = outcome(scenario)

    assert not came.wrong, "\n".join([*came.wrong, came.story])


@pytest.mark.matrix
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", range(RUNS))
@pytest.mark.parametrize("scenario", FULL, ids=str)
def test_poison_is_quarantined_every_time(scenario: Scenario, number: int, outcome) -> None:
    """The same for every kind of poison on every broker, ten times."""
    came = outcome(scenario, number)

    assert not came.wrong, "\n".join([*came.wrong, came.story])


@pytest.mark.timeout(300)
def test_with_plain_dramatiq_poison_kills_for_ever(servers: Servers) -> None:
    """The control: six processes have died, the message is still in its queue, and nothing would end it."""
    with fleet("rabbitmq", servers.rabbitmq, servers.redis, stack="stock") as workers:
        workers.send("poison", "poison", "kill", 0.1)
        workers.supervise()

        wait_until(lambda: workers.keys("began")["poison"] >= 6, 120, workers.story)

        assert [] == workers.letters()
