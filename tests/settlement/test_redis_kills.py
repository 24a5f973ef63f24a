"""A worker is killed between any two lines that write, and nothing is lost, and nothing done twice that is noted.

Every kill point has a real `dramatiq` process that dies there and one message that it dies over.  When all have died, a
healthy process takes up what they left.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from dramatiq_guard.settle import killpoints
from dramatiq_guard.settle.killpoints import VARIABLE
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.workers import Workers

from .kill_points import POINTS
from .redis_jobs import Ledger
from .redis_world import Keys

APP = "tests.settlement.ends"

#: Seconds after which a killed worker's messages must be done: the heartbeat timeout of three, and ten.
BACK_WITHIN = 13.0

#: Parts that are killed at in tests of their own.
ELSEWHERE = {"withdrawal"}


@dataclass
class Aftermath:
    """What was left when all had died, and what became of it."""

    ends: Any
    ledger: Ledger
    keys: Keys
    messages: dict[str, Any]

    def of(self, point: str) -> Counter[str]:
        """What was done for the message of one point, and how often."""
        lines = self.ledger.runs
        return Counter({line.split(" ", 1)[1]: n for line, n in lines.items() if line.split(" ", 1)[0] == point})


@pytest.fixture(scope="module")
def aftermath(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aftermath]:
    """Kill a process at every point, three at a time, and let a healthy one take up what they left."""
    ledger = Ledger(tmp_path_factory.mktemp("kills") / "runs")
    with PrivateValkey(aof=True) as server, pytest.MonkeyPatch.context() as patch:
        environment = {"ENDS_REDIS": server.url, "ENDS_LETTERS": server.url_of(1), "ENDS_LEDGER": str(ledger.path)}
        for name, value in environment.items():
            patch.setenv(name, value)
        ends = importlib.import_module(APP)
        messages: dict[str, Any] = {}

        def die(point: str) -> None:
            with Workers(APP, threads=1, env={**environment, VARIABLE: point}, queues=[point]) as workers:
                messages[point] = ends.send(point)
                assert workers.wait(30) == 1, workers.log

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(die, POINTS))
        keys = Keys(server.url)
        with Workers(APP, threads=4, env=environment):
            keys.wait_empty(BACK_WITHIN)
            yield Aftermath(ends, ledger, keys, messages)
        keys.close()
        ends.broker.client.close()


def expected(point: str) -> Counter[str]:
    """What must have been done for the message of a point: the attempt again if it was not settled, all else once."""
    match POINTS[point]:
        case "retried":
            return Counter({"attempt 1": 2 if point in ("decided", "before-retry") else 1, "attempt 2": 1})
        case "deferred":
            return Counter({"deferred 0": 2 if point == "before-defer" else 1, "deferred 1": 1})
        case "interrupted" if point == "before-requeue":
            return Counter({"interrupted 0": 2})
        case "interrupted":
            return Counter({"interrupted 0": 1, "interrupted 1": 1})
        case "succeeds":
            runs = 1 if point == "after-ack" else 2
            parts = ("on_success", "pipeline", *(() if point == "after-group" else ("group",)))
            return Counter({"attempt 1": runs, **dict.fromkeys(parts, 1)})
    parts = ("on_failure", "on_retry_exhausted", "on_dead_letter")
    return Counter({"attempt 1": 1 if point == "after-nack" else 2, **dict.fromkeys(parts, 1)})


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_killed_at_any_point_costs_no_message_and_doubles_no_part(point: str, aftermath: Aftermath) -> None:
    """The message was delivered again in time, has one successor, and every part of its end is there, once."""
    assert aftermath.of(point) == expected(point)
    if POINTS[point] == "succeeds":
        assert aftermath.ends.results.get_result(aftermath.messages[point]) == point
    dies = POINTS[point] == "exhausted"
    letters = [each for each in aftermath.ends.letters.page(limit=500).letters if each.args == (point,)]
    assert [each.reason for each in letters] == ["exhausted"] * dies
    assert aftermath.keys.dead()[point] == dies


def test_the_points_are_those_that_are_named() -> None:
    """Every point that the list of kill points names is one that a process is killed at here."""
    text = killpoints.__doc__ or ""
    parts = set(re.findall(r"``([a-z_]+)``", text))
    points = {"decided", *re.findall(r"\b(?:before|after)-[a-z_]+", text)}
    assert {"retry", "letter"} <= parts
    assert set(POINTS) >= points | {f"{side}-{part}" for part in parts - ELSEWHERE for side in ("before", "after")}
