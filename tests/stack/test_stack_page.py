"""docs/stack.md says what is so: the places, the options, the checks, and the lines that a reader copies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.middleware import AgeLimit, Callbacks, Pipelines, ShutdownNotifications, TimeLimit

import dramatiq_guard
from dramatiq_guard import CircuitBreaker, Classify, DeadLetter, IdempotencyGuard, JitterBackoff, Tracing, connect
from dramatiq_guard.checks import CHECKS, Setup, problems
from dramatiq_guard.middleware.base import GuardMiddleware
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from tests.stack.rig import bare_broker

PAGE = (Path(__file__).parents[2] / "docs" / "stack.md").read_text()


def column(heading: str) -> list[str]:
    """The first cells of the table under the first row that begins so."""
    table = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [row.split("|")[1].strip() for row in table]


def test_the_options_are_those_that_there_are() -> None:
    """Every option of the guards, and Dramatiq's that they carry out."""
    listed = {name for cell in column("| option |") for name in re.findall(r"`(\w+)`", cell)}
    stores = connect("memory://")
    guards: list[Any] = [Classify(), JitterBackoff(), DeadLetter(stores.dead_letters), Tracing()]
    guards += [IdempotencyGuard(stores.idempotency), CircuitBreaker(stores.breakers)]
    known = set().union(*(guard.actor_options for guard in guards)) | {"time_limit", "notify_shutdown"}

    assert listed == known


def test_the_places_are_those_of_the_middlewares() -> None:
    """Each public guard stands where the table says."""
    rows = PAGE[PAGE.index("| place |") :].split("\n\n")[0].splitlines()[2:]
    listed = {found[2]: int(found[1]) for row in rows if (found := re.match(r"\| (\d+) \| `(\w+)`", row))}
    public = [getattr(dramatiq_guard, name) for name in dramatiq_guard.__all__]
    places = {
        each.__name__: each.place for each in public if isinstance(each, type) and issubclass(each, GuardMiddleware)
    }

    assert listed == places


def test_the_checks_are_those_that_there_are() -> None:
    """Each by its name."""
    assert [cell.strip("`") for cell in column("| check |")] == [check.__name__ for check in CHECKS]


def test_the_list_that_a_reader_copies_is_in_order() -> None:
    """`middleware=[…]` as it is written there boots."""
    found = re.search(r"RedisBroker\(middleware=(\[.*?\])\)", PAGE, re.DOTALL)
    assert found is not None
    names = {
        each.__name__: each
        for each in (
            *(AgeLimit, Callbacks, Classify, DeadLetter, JitterBackoff, Pipelines),
            *(ShutdownNotifications, TimeLimit, Tracing),
        )
    }
    broker = bare_broker("stub", None, eval(found[1], {**names, "store": MemoryDeadLetters()}))

    assert list(problems(Setup(broker))) == []
    dramatiq.set_broker(broker)
