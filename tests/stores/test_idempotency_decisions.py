"""A person's decision is kept alike by every store of keys."""

from __future__ import annotations

import pytest

from dramatiq_guard.idempotency.claimed import DECIDED, STARTED, decided
from dramatiq_guard.idempotency.resolving import resolve
from dramatiq_guard.stores.idempotency import FRESH, Finish, IdempotencyStore

DAY = 86_400_000


def test_work_that_was_declared_undone_is_claimed_afresh(idempotency: IdempotencyStore) -> None:
    """With what had ended, what had not, and when that was said; whoever held the key before is fenced out."""
    lost = idempotency.claim("k", owner="gone", lease=60_000, retention=DAY, fingerprint=b"f")
    idempotency.step("k", lost.fence, "book", b"b-1")
    idempotency.step("k", lost.fence, "charge", STARTED)
    idempotency.park("k", lost.fence)

    assert "parked" == resolve(idempotency, "k", done=False)

    claim = idempotency.claim("k", owner="next", lease=60_000, retention=DAY, fingerprint=b"f")
    assert (FRESH, True) == (claim.answer, claim.fence > lost.fence)
    assert {"book": b"b-1", "charge": b"!"} == {name: v for name, v in claim.steps.items() if name != DECIDED}
    at, crashes = decided(claim.steps)
    assert (True, claim.crashes) == (claim.first_claim_at <= at <= claim.now, crashes)
    assert not idempotency.step("k", lost.fence, "charge", b"c-1")


@pytest.mark.parametrize("finish", [None, Finish(b"r")])
def test_work_that_was_declared_done_has_its_result(idempotency: IdempotencyStore, finish: Finish | None) -> None:
    """And nothing else is noted."""
    idempotency.park("k", idempotency.claim("k", owner="gone", lease=60_000, retention=DAY).fence)

    assert "parked" == resolve(idempotency, "k", done=True, finish=finish)

    claim = idempotency.claim("k", owner="next", lease=60_000, retention=DAY)
    assert ("done", finish and finish.result) == (claim.answer, claim.result)
