"""A worker is told to stop while it works under a key: the key is given back, or taken over, and nothing is lost."""

from __future__ import annotations

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
        pytest.param("atomic", "postgresql", "redis", marks=MATRIX),
        pytest.param("inbox", "postgresql", "rabbitmq", marks=MATRIX),
        pytest.param("step", "redis", "rabbitmq", marks=MATRIX),
    ],
)


def _here(broker: str, store: str, servers: Servers, request: pytest.FixtureRequest) -> Any:
    if broker == "rabbitmq":
        servers = replace(servers, rabbitmq=request.getfixturevalue("server"))
    return world(servers, broker, store)


def _finish(here: World, message: Any) -> None:
    """Let the next process finish the work, and look what came of it."""
    here.open()
    with here.working():
        here.wait_settled()
    record = here.record(message)
    assert record is not None
    assert "done" == record.state
    (made,) = here.gateway.charges()["job"]
    assert made == here.result(message)
    assert (message.actor_name in ("atomic", "inbox")) == here.rows()["job"]
    assert not here.letters()
    assert 2 == here.runs("job"), here.story


@CASES
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=MATRIX)])
def test_an_interrupted_run_gives_its_key_back(
    times: int, actor: str, store: str, broker: str, servers: Servers, request: pytest.FixtureRequest
) -> None:
    """At the soft deadline, or at the second SIGTERM: the next run does not have to take it over."""
    with _here(broker, store, servers, request) as here:
        message = here.send(actor, "job", "interruptibly")
        with here.working(threads=1) as workers:
            here.wait_noted("waits")
            workers.term()
            if times == 2:
                workers.wait_log("Stopping worker process")
                workers.term()
            assert 0 == workers.wait(60)
        record = here.record(message)
        assert record is None or "free" == record.state
        _finish(here, message)
        assert not here.noted("taken-over"), here.story


@CASES
def test_an_abandoned_run_is_taken_over(
    actor: str, store: str, broker: str, servers: Servers, request: pytest.FixtureRequest
) -> None:
    """It sits in C, so that the process leaves it behind at its hard deadline."""
    with _here(broker, store, servers, request) as here:
        message = here.send(actor, "job", "in C")
        with here.working(threads=1) as workers:
            here.wait_noted("waits")
            workers.term()
            assert 75 == workers.wait(60)
        _finish(here, message)
        assert (actor != "inbox") == len(here.noted("taken-over")), here.story


@pytest.mark.parametrize(
    ("actor", "store", "broker"),
    [("key", "redis", "redis"), pytest.param("atomic", "postgresql", "rabbitmq", marks=MATRIX)],
)
@MATRIX
def test_a_run_longer_than_dramatiqs_own_shutdown_timeout_is_not_lost(
    actor: str, store: str, broker: str, servers: Servers, request: pytest.FixtureRequest
) -> None:
    """Without GracefulShutdown: Dramatiq gives the worker up, and its process ends with the run inside."""
    with _here(broker, store, servers, request) as here:
        message = here.send(actor, "job", "in C")
        arguments = ("--worker-shutdown-timeout", "1000")
        with here.working(threads=1, arguments=arguments, KILLS_STACK="abrupt") as workers:
            here.wait_noted("waits")
            workers.term()
            wait_until(lambda: workers.process is not None and workers.process.poll() is not None, 60, workers.log)
        _finish(here, message)
        assert here.noted("taken-over"), here.story
