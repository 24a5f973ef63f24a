"""A worker that is frozen for longer than its lease: another one takes its work, and the first is held to that."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import replace
from typing import Any

import pytest

from tests.support.waiting import wait_until

from .world import Servers, World, world

MATRIX = pytest.mark.matrix
CASES = pytest.mark.parametrize(
    ("actor", "store", "broker"),
    [
        ("key", "redis", "redis"),
        ("atomic", "postgresql", "redis"),
        pytest.param("key", "redis", "rabbitmq", marks=MATRIX),
        pytest.param("step", "postgresql", "redis", marks=MATRIX),
        pytest.param("step", "redis", "rabbitmq", marks=MATRIX),
        pytest.param("atomic", "postgresql", "rabbitmq", marks=MATRIX),
    ],
)


def _frozen(actor: str, here: World) -> Any:
    """Freeze a worker in its run, and have another one finish the same work; gives the first, and the message."""
    message = here.send(actor, "job", "interruptibly")
    first = here.workers().start().wait_ready()
    try:
        here.wait_noted("waits")
        first.signal_worker(signal.SIGSTOP)
        # A frozen process keeps its connection to RabbitMQ, so another copy stands for the redelivery there.
        here.again(message)
        with here.working(KILLS_HURRY="yes"):
            wait_until(
                lambda: (found := here.record(message)) is not None and found.state == "done",
                60,
                lambda: f"the second run to finish:\n{here.story}\n{first.log}",
            )
    except BaseException:
        first.close()
        raise
    return first, message


@CASES
@pytest.mark.parametrize("finishes", [False, pytest.param(True, marks=MATRIX)], ids=["interrupted", "fenced"])
def test_a_run_that_has_slept_through_its_lease_does_not_count(
    finishes: bool, actor: str, store: str, broker: str, servers: Servers, request: pytest.FixtureRequest
) -> None:
    """The second run takes over and is the one that stands.  The first one is interrupted when it wakes; or, where it
    finishes before that, its result is not recorded, and its rows are not committed."""
    if broker == "rabbitmq":
        servers = replace(servers, rabbitmq=request.getfixturevalue("server"))
    with world(servers, broker, store) as here:
        first, message = _frozen(actor, here)
        with contextlib.closing(first):
            (second,) = here.noted("taken-over")
            if finishes:
                here.open()
            first.signal_worker(signal.SIGCONT)
            if not finishes:
                here.wait_noted("LeaseLost")
            here.wait_settled()
            first.term()
            assert 0 == first.wait()
            here.logs.append(first.log)
        record = here.record(message)
        assert record is not None
        assert "done" == record.state
        assert f"taken-over:{record.fence}" == second.split()[0], here.story
        (made,) = here.gateway.charges()["job"]
        assert made == here.result(message)
        assert 2 == here.runs("job"), here.story
        assert (actor == "atomic") == here.rows()["job"]
        assert not here.letters()
