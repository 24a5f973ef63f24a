"""A worker that is frozen for longer than its lease: another one takes its work, and the first is held to that."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from dramatiq import Message

from tests.support.waiting import wait_until
from tests.support.workers import Workers

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


@contextlib.contextmanager
def _frozen(actor: str, here: World) -> Iterator[tuple[Workers, Message[Any]]]:
    """A worker that is frozen in its run, and another one that has finished the same work; the first, and the message.

    A frozen process keeps its connection to RabbitMQ, and with it what it has fetched: there another copy stands for
    the redelivery, on a queue that it does not consume.
    """
    message = here.send(actor, "job", "interruptibly", queue="first")
    with here.workers(queues=["first"]) as first:
        here.wait_noted("waits")
        first.signal_worker(signal.SIGSTOP)
        here.again(message, "second")
        with here.working(queues=["first", "second"] if here.kind == "redis" else ["second"], KILLS_HURRY="yes"):
            wait_until(
                lambda: (found := here.record(message)) is not None and found.state == "done",
                60,
                lambda: f"the second run to finish:\n{here.story}\n{first.log}",
            )
            yield first, message


@CASES
@pytest.mark.parametrize("finishes", [False, pytest.param(True, marks=MATRIX)], ids=["interrupted", "fenced"])
def test_a_run_that_has_slept_through_its_lease_does_not_count(
    finishes: bool, actor: str, store: str, broker: str, servers: Servers, request: pytest.FixtureRequest
) -> None:
    """The second run takes over and is the one that stands.  The first one is interrupted when it wakes; or, where it
    finishes before that, its result is not recorded, and its rows are not committed."""
    if broker == "rabbitmq":
        servers = replace(servers, rabbitmq=request.getfixturevalue("server"))
    with world(servers, broker, store, ["first", "second"]) as here:
        with _frozen(actor, here) as (first, message):
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
