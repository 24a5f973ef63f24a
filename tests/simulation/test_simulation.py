"""Two thousand ways to go wrong, and none loses a message; the real servers have tests of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from dramatiq_guard.settle.consumer import GuardedConsumer
from dramatiq_guard.settle.redis_consumer import RedisConsumer

from .schedules import broken, check, schedule

SCHEDULES = 2_000
CHUNK = 100


@pytest.mark.timeout(600)
def test_every_schedule_keeps_every_promise() -> None:
    """Whatever fails, and whenever: no message is lost, each is attempted as planned, and the letters are exact."""
    # Spawned, not forked: a fork would take along the threads of the tests before this one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        failed = [each for found in pool.map(broken, range(0, SCHEDULES, CHUNK), [CHUNK] * 20) for each in found]

    assert [] == failed, "\n".join(
        f"repeat it by: python -m tests.simulation {seed}\n  " + "\n  ".join(complaints) for seed, complaints in failed
    )


def test_a_schedule_follows_from_its_seed() -> None:
    """A seed that fails can be repeated: the same seed is the same schedule."""
    first, second = schedule(22), schedule(22)

    assert first.clock.time == second.clock.time
    assert [each.runs for each in first.sent.values()] == [each.runs for each in second.sent.values()]


@pytest.mark.parametrize(
    ("name", "worse"),
    [
        ("carry_on", GuardedConsumer.carry_on),
        ("send", GuardedConsumer.send),
        ("reclaim", lambda _: 0),
    ],
)
def test_a_stack_that_is_worse_is_found_out(
    name: str, worse: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take one of the means away by which Redis deliveries are settled, and schedules fail."""
    monkeypatch.setattr(RedisConsumer, name, worse)

    assert any(check(schedule(seed)) for seed in range(60))
