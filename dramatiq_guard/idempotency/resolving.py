"""What a person decides about a key that waits for one: its effect happened, or it did not.

A run that comes after "it did not" must not stop where the one before it stopped, or the key would be parked again: so
the decision is on record beside the steps.  What was begun and not ended is taken for not done, a third party is taken
to have known its keys since then, and the runs that had died before it are history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import clock
from ..stores.idempotency import FREE, FRESH, HELD, PARKED
from .claimed import DECIDED, STARTED, UNDONE

if TYPE_CHECKING:
    from ..stores.idempotency import Finish, IdempotencyStore

__all__ = ["resolve"]

#: For how many milliseconds the key is kept from runs while the decision is written.
_LEASE: Final = 10_000

#: For how many milliseconds, at least, a key that was resolved is remembered: somebody has yet to replay its letter.
_RETENTION: Final = 24 * 60 * 60 * 1000


def resolve(store: IdempotencyStore, key: str, *, done: bool, finish: Finish | None = None) -> str:
    """Decide about a key that is parked, or whose lease is over.

    Parameters:
      store(IdempotencyStore): Where it is kept.
      key(str): The key.
      done(bool): Whether the effect happened.
      finish(Finish | None): With what.

    Returns:
      str: The state before, as `IdempotencyStore.resolve` says.
    """
    was = store.resolve(key, done=done, finish=finish)
    if not done and was in (PARKED, HELD):
        _note(store, key)
    return was


def _note(store: IdempotencyStore, key: str) -> None:
    record = store.get(key)
    if record is None or record.state != FREE:
        return
    retention = max(_RETENTION, record.expires_at - store.posture().now)
    claim = store.claim(key, owner=f"decision:{clock.unique()[:12]}", lease=_LEASE, retention=retention)
    if claim.answer != FRESH:
        return  # a run was faster
    for name, value in claim.steps.items():
        if value == STARTED:
            store.step(key, claim.fence, name, UNDONE)
    store.step(key, claim.fence, DECIDED, f"{claim.now} {claim.crashes}".encode())
    store.release(key, claim.fence)
