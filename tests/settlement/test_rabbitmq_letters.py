"""RabbitMQ, and the store of letters is away: jobs that die, and unknown ones, hold no good job up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dramatiq_guard import connect
from dramatiq_guard.testing.valkey import PrivateValkey
from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.waiting import wait_until

from .rabbitmq_world import World

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dramatiq_guard.settle.letterbox._DELAY", 500)


@pytest.fixture
def letters(own_valkey: PrivateValkey) -> Iterator[object]:
    """Letters in a Valkey of the test's own."""
    stores = connect(own_valkey.url)
    yield stores.dead_letters
    stores.close()


def _send(world: World, unknown: int) -> None:
    for n in range(60):
        world.send(f"good-{n}", sync=n % 2 == 0)
        if n < 20:
            world.send(f"refused-{n}", refused=True, sync=n % 2 == 0)
        if n < unknown:
            world.send_unknown(f"unknown-{n}")


def test_letters_travel_while_their_store_is_away(
    private_rabbitmq: PrivateRabbitMQ, rabbitmq_url: str, own_valkey: PrivateValkey, letters: object
) -> None:
    """Good jobs are done while the store is away, every message is settled, and when the store is back it has a letter
    of each that died."""
    world = World(private_rabbitmq, rabbitmq_url, letters=letters)
    with world.working(threads=4):
        own_valkey.kill()
        _send(world, unknown=10)
        wait_until(lambda: len(world.done) == 60, 20, lambda: f"sixty good jobs in {world.done}")
        wait_until(
            lambda: sum(world.unsettled().values()) == 30, 20, lambda: f"thirty letters on the way: {world.unsettled()}"
        )
        own_valkey.start()
        world.finish()
        world.check()

    assert dict.fromkeys(world.dying, 1) == world.dead()
