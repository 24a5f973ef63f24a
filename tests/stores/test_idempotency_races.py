"""However many ask for a key at once, one gets it; and what only looks before it writes breaks under the same race."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import BUSY, FRESH, TAKEOVER, IdempotencyStore
from dramatiq_guard.stores.postgres.schema import apply_schema
from tests.support.waiting import wait_until

RACERS, ROUNDS = 50, 60
LONG, DAY = 600_000, 24 * 60 * 60 * 1_000


@pytest.fixture(params=["redis", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[IdempotencyStore]:
    """The keys of a server of each kind."""
    url = request.getfixturevalue(f"{request.param}_url")
    if request.param == "postgres":
        apply_schema(url)
    with closing(connect(url)) as stores:
        yield stores.idempotency


def race(rounds: int, prepare: Callable[[int], None], run: Callable[[int, int], str]) -> list[list[str]]:
    """Let all racers run at once, round after round.

    Parameters:
      rounds(int): How many.
      prepare(Callable[[int], None]): Called before each round with its number.
      run(Callable[[int, int], str]): Called by each racer with its own number and that of the round.

    Returns:
      list[list[str]]: What it returned, for each racer of each round.
    """
    turn = iter(range(rounds))
    start = threading.Barrier(RACERS, action=lambda: prepare(next(turn)))
    answers = [["did not end"] * RACERS for _ in range(rounds)]

    def racer(number: int) -> None:
        for at in range(rounds):
            start.wait(60)
            answers[at][number] = run(number, at)

    threads = [threading.Thread(target=racer, args=(number,)) for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_of_fifty_who_claim_a_key_one_gets_it(store: IdempotencyStore) -> None:
    """In each of sixty rounds; all others are busy.  Who looks first and then writes would be fifty."""

    def claim(number: int, at: int) -> str:
        return store.claim(f"key-{at}", owner=f"racer-{number}", lease=LONG, retention=DAY).answer

    answers = race(ROUNDS, lambda _: None, claim)

    assert [sorted([BUSY] * (RACERS - 1) + [FRESH])] * ROUNDS == list(map(sorted, answers))
    assert 1 < _winners_of_looking_first(store)


def test_of_fifty_who_take_a_key_over_one_gets_it(store: IdempotencyStore) -> None:
    """In each of sixty rounds a lease is over, and all see it at once; one fence follows the other."""
    fences: list[int] = []

    def let_a_lease_run_out(at: int) -> None:
        store.forget("key")
        fences.append(store.claim("key", owner="dead", lease=1, retention=DAY).fence)
        record = store.get("key")
        assert record is not None
        wait_until(lambda: store.posture().now >= record.lease_until, describe="the lease to be over", interval=0.002)

    def claim(number: int, at: int) -> str:
        claimed = store.claim("key", owner=f"racer-{number}", lease=LONG, retention=DAY)
        if claimed.answer == TAKEOVER:
            fences.append(claimed.fence)
        return claimed.answer

    answers = race(ROUNDS, let_a_lease_run_out, claim)

    assert [sorted([BUSY] * (RACERS - 1) + [TAKEOVER])] * ROUNDS == list(map(sorted, answers))
    assert sorted(set(fences)) == fences
    assert 1 < _winners_of_looking_first(store)


def _winners_of_looking_first(store: IdempotencyStore) -> int:
    """How many get a name that each takes who saw nobody have it; all have looked before the first writes."""
    looked = threading.Barrier(RACERS)

    def naive(number: int, at: int) -> str:
        taken = store.marked("naive")
        looked.wait(60)
        if taken:
            return BUSY
        store.mark("naive", retention=DAY)
        return FRESH

    return race(1, lambda _: None, naive)[0].count(FRESH)
