"""Six hundred ways to go wrong around one effect: it happens once, and no message is lost."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from dramatiq_guard.idempotency.claimed import Claimed
from dramatiq_guard.stores.idempotency import FRESH, Claim

from .guarded import GuardedWorld, Inbox, broken, guarded

SCHEDULES = 600
CHUNK = 60


@pytest.mark.timeout(600)
def test_every_schedule_has_one_effect_for_each_key() -> None:
    """Processes killed and frozen, broker and store out, replies lost: one row, one charge, every key done."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        failed = [each for found in pool.map(broken, range(0, SCHEDULES, CHUNK), [CHUNK] * 10) for each in found]

    assert [] == failed, "\n".join(
        f"repeat it by: python -m tests.simulation --guarded {seed}\n  " + "\n  ".join(complaints)
        for seed, complaints in failed
    )


def test_the_schedules_are_hard() -> None:
    """There are kills, freezes and runs that are run again in them; without them the test above would say nothing."""
    worlds = [guarded(seed) for seed in range(24)]

    assert sum(world.kills for world in worlds) > 20
    assert sum(world.freezes for world in worlds) > 20
    assert any(world.runs[name] > 3 for world in worlds for name in world.runs)


def _unfenced(world: GuardedWorld, rows: list[str], _: object) -> None:
    world.rows.update(rows)


def _unlocked(inbox: Inbox) -> None:
    inbox.holds = True
    inbox.claim = Claim(answer=FRESH)


def _another(claimed: Claimed, name: str, **_: object) -> str:
    return f"{claimed.key}{name}{claimed.fence}"


@pytest.mark.parametrize(
    ("owner", "means", "worse"),
    [(GuardedWorld, "commit", _unfenced), (Inbox, "open", _unlocked), (Claimed, "key_for", _another)],
)
def test_a_store_that_is_worse_is_found_out(
    owner: type, means: str, worse: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take one of the means away by which an effect is kept single, and schedules fail."""
    monkeypatch.setattr(owner, means, worse)

    assert any(guarded(seed).complaints() for seed in range(80))
