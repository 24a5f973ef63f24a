"""A worker is killed between any two lines that write: RabbitMQ delivers at once, and nothing is lost or runs twice.

Every kill point has a real `dramatiq` process that dies there and one message that it dies over.  A healthy process
takes up what they left.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from dramatiq_guard.settle.killpoints import VARIABLE
from tests.support.rabbitmq import ForeignRabbitMQ, PrivateRabbitMQ
from tests.support.waiting import wait_until
from tests.support.workers import Workers

from .kill_points import POINTS
from .rabbitmq_world import dead, unsettled
from .redis_jobs import Ledger

APP = "tests.settlement.ends"

#: One of each kind that RabbitMQ makes different; the others are killed at in the matrix.
FIRST = [
    *("decided", "before-retry", "after-retry", "before-promote", "after-promote", "after-pipeline", "before-ack"),
    *("after-ack", "after-on_failure", "before-letter", "after-letter", "before-nack", "after-nack"),
]

#: How long, in seconds, a process that has just started may take for what the dead left.
AT_ONCE = 6.0


@dataclass
class Aftermath:
    """What was left when all had died, and what became of it."""

    ends: Any
    ledger: Ledger
    messages: dict[str, Any]
    dead: dict[str, int]

    def of(self, point: str) -> Counter[str]:
        """What was done for the message of one point, and how often."""
        lines = self.ledger.runs
        return Counter({line.split(" ", 1)[1]: n for line, n in lines.items() if line.split(" ", 1)[0] == point})


@contextmanager
def killed(rabbitmq: PrivateRabbitMQ, stores: str, ledger: Ledger, points: list[str]) -> Iterator[Aftermath]:
    """Kill a process at every point, three at a time, and let a healthy one take up what they left."""
    url = rabbitmq.add_vhost("kills")
    environment = {
        "ENDS_RABBITMQ": url,
        "ENDS_REDIS": stores,
        "ENDS_LETTERS": stores,
        "ENDS_LEDGER": str(ledger.path),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.delitem(sys.modules, APP, raising=False)
        ends = importlib.import_module(APP)
    messages = {point: ends.send(point) for point in points}

    def die(point: str) -> None:
        with Workers(APP, threads=1, env={**environment, VARIABLE: point}, queues=[point], ready_within=0) as workers:
            assert workers.wait(40) == 1, workers.log

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(die, points))
    with Workers(APP, threads=4, env=environment) as workers:
        wait_until(lambda: not unsettled(rabbitmq, url), AT_ONCE, lambda: f"{unsettled(rabbitmq, url)}\n{workers.log}")
    yield Aftermath(ends, ledger, messages, {point: dead(url, point)[point] for point in points})
    ends.broker.close()
    del sys.modules[APP]
    rabbitmq.delete_vhost("kills")


@pytest.fixture(scope="module")
def server(rabbitmq: PrivateRabbitMQ | ForeignRabbitMQ) -> PrivateRabbitMQ:
    """The RabbitMQ that all tests share."""
    if isinstance(rabbitmq, ForeignRabbitMQ):
        pytest.skip("this test looks into RabbitMQ, and DRAMATIQ_GUARD_TEST_RABBITMQ_URL names one that is not ours")
    return rabbitmq.start()


@pytest.fixture(scope="module")
def aftermath(
    server: PrivateRabbitMQ, valkey: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Aftermath]:
    """What became of the first kill points, or of the others."""
    ledger = Ledger(tmp_path_factory.mktemp("kills") / "runs")
    with killed(server, valkey.url_of(7), ledger, request.param) as aftermath:
        yield aftermath


def expected(point: str) -> list[Counter[str]]:
    """What may have been done for the message of a point: the attempt again if it was not settled, all else once.

    Whether an ack or a nack was still sent before the process died is not known; a group's member is counted again.
    """
    match POINTS[point]:
        case "retried":
            first = 2 if point in ("decided", "before-retry") else 1
            # A message that was promoted may have been begun already, in the moment before the kill.
            begun = (1, 2) if point == "after-promote" else (1,)
            return [Counter({"attempt 1": first, "attempt 2": runs}) for runs in begun]
        case "deferred":
            return [Counter({"deferred 0": 2 if point == "before-defer" else 1, "deferred 1": 1})]
        case "interrupted" if point == "before-requeue":
            return [Counter({"interrupted 0": 2})]
        case "interrupted":
            return [Counter({"interrupted 0": 1, "interrupted 1": 1})]
        case "succeeds":
            parts = dict.fromkeys(("on_success", "pipeline", "group"), 1)
            return [Counter({"attempt 1": runs, **parts}) for runs in ((1, 2) if point == "after-ack" else (2,))]
    parts = dict.fromkeys(("on_failure", "on_retry_exhausted", "on_dead_letter"), 1)
    return [Counter({"attempt 1": runs, **parts}) for runs in ((1, 2) if point == "after-nack" else (2,))]


def check(point: str, aftermath: Aftermath) -> None:
    assert aftermath.of(point) in expected(point)
    if POINTS[point] == "succeeds":
        assert aftermath.ends.results.get_result(aftermath.messages[point]) == point
    dies = POINTS[point] == "exhausted"
    letters = [each for each in aftermath.ends.letters.page(limit=500).letters if each.args == (point,)]
    assert [each.reason for each in letters] == ["exhausted"] * dies
    assert aftermath.dead[point] == dies


@pytest.mark.parametrize("aftermath", [FIRST], indirect=True, ids=[""])
@pytest.mark.parametrize("point", FIRST)
def test_a_worker_killed_at_a_point_costs_no_message(point: str, aftermath: Aftermath) -> None:
    """The message was delivered again at once, has one successor, and every part of its end is there, once."""
    check(point, aftermath)


@pytest.mark.matrix
@pytest.mark.parametrize("aftermath", [[*POINTS]], indirect=True, ids=[""])
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_killed_at_any_point_costs_no_message(point: str, aftermath: Aftermath) -> None:
    """The same, at every point."""
    check(point, aftermath)
