"""Two chains of one message: Dramatiq by itself, killed between sending a copy on and acking what it is a copy of.

So it is where some workers have the guard and others not yet, and in whatever such a deploy has left behind.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from .world import Servers, World, world

ON_EACH = pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.matrix)])


def _here(broker: str, servers: Servers, request: pytest.FixtureRequest) -> Any:
    found = replace(servers, rabbitmq=request.getfixturevalue("server")) if broker == "rabbitmq" else servers
    return world(found, broker, "redis", ["guarded", "control"])


def _finish(here: World) -> None:
    here.open()
    with here.working(threads=4):
        here.wait_settled()


@ON_EACH
def test_a_retry_and_what_it_is_a_retry_of_have_one_effect(
    broker: str, servers: Servers, request: pytest.FixtureRequest
) -> None:
    """A worker dies between its retry's enqueue and the ack: of the two that are left, the second one is replayed."""
    with _here(broker, servers, request) as here:
        messages = {}
        for queue, actor in (("guarded", "key"), ("control", "none")):
            messages[actor] = here.die(
                "before-ack",
                partial(here.send, actor, actor, "", True, queue=queue),
                queues=[queue],
                KILLS_STACK="stock",
            )
        _finish(here)
        assert {"key": 1, "none": 2} == {job: len(made) for job, made in here.gateway.charges().items()}
        assert 1 == here.gateway.calls()["key"]
        assert here.gateway.charges()["key"] == [here.result(messages["key"])]


@ON_EACH
def test_a_message_that_was_promoted_twice_has_one_effect(
    broker: str, servers: Servers, request: pytest.FixtureRequest
) -> None:
    """A worker dies between the enqueue of a delayed message on its queue and the ack of the delayed one."""
    with _here(broker, servers, request) as here:
        messages = {}
        for queue, actor in (("guarded", "key"), ("control", "none")):
            messages[actor] = here.die(
                "after-promote",
                partial(here.send, actor, actor, queue=queue, delay=500),
                queues=[queue],
                KILLS_STACK="stock",
                KILLS_IDLE="yes",
            )
        _finish(here)
        assert {"key": 1, "none": 2} == {job: len(made) for job, made in here.gateway.charges().items()}
        assert 1 == here.gateway.calls()["key"]
        assert here.gateway.charges()["key"] == [here.result(messages["key"])]
