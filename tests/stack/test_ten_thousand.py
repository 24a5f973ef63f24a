"""Ten thousand messages, thirty in a hundred failing once: as many executions as planned, not one more or less."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.stack.rig import Rig, build

MESSAGES = 10_000


@pytest.fixture
def quiet() -> Iterator[None]:
    """What 3 000 failures have to say is tested elsewhere."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", ["stub", "redis"])
def test_executions_are_exactly_as_many_as_planned(kind: str, request: pytest.FixtureRequest) -> None:
    """Each message succeeds once, after one failure where one was planned; nothing is left, and nothing died."""
    url = request.getfixturevalue("redis_url") if kind == "redis" else None
    rig, put_on = build(kind, "install", url)
    put_on()
    try:
        _run(rig)
    finally:
        rig.close()


def _run(rig: Rig) -> None:
    @rig.actor(max_retries=1, min_backoff=1, max_backoff=100)
    def work(n: int) -> None:
        if rig.note(f"run {n}") == 1 and n % 10 < 3:
            raise ConnectionError("once")
        rig.note("succeeded", n)

    rig.work(threads=4)
    for n in range(MESSAGES):
        work.send(n)
    rig.settle(60)

    assert sorted(rig.notes("succeeded")) == list(range(MESSAGES))
    assert Counter(rig.count(f"run {n}") for n in range(MESSAGES)) == {1: 7_000, 2: 3_000}
    assert rig.dead() == {}
