"""What a store must do for the idempotency guard: one record a key, claimed with a lease and finished with a fence.

Every method is one atomic step and one round trip, judged by **the store's own clock**: no worker's clock enters any
decision.  The life of a record, which every store keeps alike:

======= ================================================ =========================================================
from    by                                               to
======= ================================================ =========================================================
absent  `claim`                                          ``held``, with the next fence
free    `claim`                                          ``held``, with the next fence; its steps are kept
held    `claim`, its lease over                          ``held``, with the next fence, one crash more: a takeover
held    `claim` by the same owner                        ``held``, with the same fence: its first answer was lost
held    `claim` with ``park``, its lease over            ``parked``, one crash more: nobody knows whether the effect
                                                         happened
held    `complete`                                       ``done``, with the result
held    `release`                                        ``free``
held    `park`                                           ``parked``
parked  `resolve`                                        ``done`` or ``free``, as a person or a reconciliation says,
                                                         with the next fence: whoever still runs is fenced out
held    `resolve`, its lease over                        the same, one crash more
absent  `complete`                                       ``done``: whoever finished knows that it did
any     its retention over, or `forget`                  absent
======= ================================================ =========================================================

Of a ``held`` record only the holder of its fence changes anything; fences of a key only grow, also over its absence;
``done`` is final until it expires; steps only grow.  A released record is kept: when its key was first claimed, and how
often, is what tells how long a third party has known the keys of its steps.

What was asked again since its answer was lost is answered as it was: a claim by its owner, whether or not its lease is
over; a `complete` by its fence.

The lease is a field of the record, its retention is how long the record lives.  A record expires `retention` after its
last claim, and not before its lease.  This module must not know any middleware.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

__all__ = [
    "ABSENT",
    "BUSY",
    "DONE",
    "FAILURE",
    "FREE",
    "FRESH",
    "HELD",
    "MISMATCH",
    "OMITTED",
    "PARKED",
    "TAKEOVER",
    "Claim",
    "Ended",
    "Finish",
    "IdempotencyStore",
    "Inbox",
    "Keys",
    "Posture",
    "Record",
    "TransactionalStore",
]

#: Where a record stands.
HELD: Final = "held"
FREE: Final = "free"
DONE: Final = "done"
PARKED: Final = "parked"
ABSENT: Final = "absent"

#: What else a claim may be answered with.
FRESH: Final = "fresh"
TAKEOVER: Final = "takeover"
BUSY: Final = "busy"
MISMATCH: Final = "mismatch"

#: Bits of a record's `flags`, which the store only keeps: the result is a failure; the result was not kept.
FAILURE: Final = 1
OMITTED: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The answer to a claim.

    Parameters:
      answer(str): ``fresh`` and ``takeover``: it is yours, with this fence. ``busy``: somebody's lease is running.
        ``done``: finished, with this result. ``mismatch``: the key was claimed with another fingerprint. ``parked``.
      fence(int): The record's fence, 0 where there is none.
      lease_left(int): For ``busy``: milliseconds until the lease is over.
      attempts(int): How often the key was claimed, this time included.
      crashes(int): How often a lease ran out.
      first_claim_at(int): When the record was made, in UNIX milliseconds of the store's clock.
      now(int): The store's clock.
      steps(Mapping[str, bytes]): What steps recorded; given with ``fresh`` and ``takeover``.
      result(bytes | None): For ``done``: the result.
      flags(int): For ``done``: what the result is.
      same(bool): Whether the fingerprint is the one that the record has (or there is none to compare).
    """

    answer: str
    fence: int = 0
    lease_left: int = 0
    attempts: int = 1
    crashes: int = 0
    first_claim_at: int = 0
    now: int = 0
    steps: Mapping[str, bytes] = field(default_factory=dict)
    result: bytes | None = None
    flags: int = 0
    same: bool = True


@dataclass(frozen=True, slots=True)
class Finish:
    """How a run ended.

    Parameters:
      result(bytes | None): What the actor returned, or the failure to be remembered.
      flags(int): What the result is: 0, `FAILURE`, `OMITTED`.
    """

    result: bytes | None = None
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a `complete`.

    Parameters:
      state(str): ``done`` if the record is done, by this call (or an earlier one with this fence) or by another owner;
        else what stands in the way: ``held``, ``free``, ``parked``.
      ours(bool): Whether it is done with what was given.
      result(bytes | None): For ``done`` by another owner: the result that stands.
      flags(int): And what it is.
    """

    state: str
    ours: bool
    result: bytes | None = None
    flags: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a store knows of a key, for people.

    Parameters:
      key(str): The key.
      state(str): ``held``, ``free``, ``done`` or ``parked``; a held one whose lease is over is still ``held``.
      fence(int): Its fence.
      owner(str): Who claimed it last; empty once it is done.
      lease_until(int): Until when, in UNIX milliseconds of the store's clock; 0 where nobody holds it.
      fingerprint(bytes | None): The fingerprint of the payload.
      attempts(int): How often it was claimed.
      crashes(int): How often its lease ran out.
      first_claim_at(int): When the record was made, in UNIX milliseconds.
      expires_at(int): When it is forgotten, in UNIX milliseconds.
      steps(Mapping[str, bytes]): What steps recorded.
      result(bytes | None): The result.
      flags(int): What it is.
    """

    key: str
    state: str
    fence: int
    owner: str
    lease_until: int
    fingerprint: bytes | None
    attempts: int
    crashes: int
    first_claim_at: int
    expires_at: int
    steps: Mapping[str, bytes]
    result: bytes | None
    flags: int


@dataclass(frozen=True, slots=True)
class Keys:
    """Some records, ordered as the store likes, and where to go on.

    Parameters:
      records(tuple[Record, ...]): The records.
      cursor(str | None): Give it to the next call; ``None`` at the end.
    """

    records: tuple[Record, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Posture:
    """How far the server can be trusted with what it was told; for the boot checks.

    Parameters:
      engine(str): ``memory``, ``redis`` or ``postgresql``.
      server(str): Which server it is, so that two ways to one server can be told (on Redis its ``run_id``).
      now(int): Its clock, in UNIX milliseconds.
      evicts(str | None): The eviction policy, if it may drop our records when its memory is full.
      durable(bool | None): Whether it writes to disk what it was told (AOF); ``None`` if that could not be read.
    """

    engine: str
    server: str
    now: int
    evicts: str | None = None
    durable: bool | None = None


@runtime_checkable
class IdempotencyStore(Protocol):
    """Keeps records of keys.  Safe to use from many threads, and from processes forked after it was made.

    Attributes:
      engine(str): What kind of server it is, as OpenTelemetry calls it: ``redis``, ``postgresql``, ``memory``.

    Each method raises `StoreUnavailable` where the store cannot be reached or cannot write now, and `StoreError` for
    all else.  A key is a string of at most 255 ASCII characters.
    """

    engine: str

    def claim(
        self,
        key: str,
        *,
        owner: str,
        lease: int,
        retention: int,
        fingerprint: bytes | None = None,
        strict: bool = True,
        park: bool = False,
    ) -> Claim:
        """Ask whether the work of a key may be done now, and take the key if so.

        Parameters:
          key(str): The key.
          owner(str): Who asks: another for each delivery.  If it holds the key already, since the answer to its first
            claim was lost, it is given the same fence once more (``fresh``), and its lease begins anew.
          lease(int): For how many milliseconds nobody else may take it.
          retention(int): How many milliseconds the record lives from now on, beyond its lease.
          fingerprint(bytes | None): The payload's; ``None`` compares with nothing, and a record without one fits all.
          strict(bool): Whether another fingerprint is answered with ``mismatch``; if not, the claim goes on (a key that
            is taken gets the new fingerprint) and says so by `Claim.same`.
          park(bool): Whether a lease that ran out parks the key in place of a takeover.
        """
        ...

    def renew(self, claims: Sequence[tuple[str, int]], *, lease: int) -> tuple[bool, ...]:
        """Extend leases, all in one round trip: pairs of key and fence.

        Returns:
          tuple[bool, ...]: For each, whether it is still held with this fence.
        """
        ...

    def step(self, key: str, fence: int, name: str, value: bytes) -> bool:
        """Record a step of a key that is held with this fence.

        Returns:
          bool: Whether it is.
        """
        ...

    def complete(self, key: str, fence: int, finish: Finish, *, retention: int) -> Ended:
        """Note that the work of a key is done.

        A record that is missing (a flush, an eviction) is made anew.  `retention` counts only for that one: a record
        keeps the time that it got when it was claimed.
        """
        ...

    def release(self, key: str, fence: int) -> bool:
        """Give a key back undone: the next claim is fresh, and finds the steps.

        Returns:
          bool: Whether it was held with this fence.
        """
        ...

    def park(self, key: str, fence: int) -> bool:
        """Note that nobody knows whether the effect of a key that is held with this fence happened.

        Returns:
          bool: Whether it was.
        """
        ...

    def resolve(self, key: str, *, done: bool, finish: Finish | None = None) -> str:
        """Decide about a parked key, or one whose lease is over: done (with a result) or to be run again.

        Returns:
          str: The state before: ``parked`` or ``held`` (lease over) if it was resolved; ``busy``, ``free``, ``done`` or
            ``absent`` if not, since then there was nothing to decide.
        """
        ...

    def forget(self, key: str) -> bool:
        """Remove the record of a key, whatever its state.

        Returns:
          bool: Whether there was one.
        """
        ...

    def get(self, key: str) -> Record | None:
        """Read the record of a key."""
        ...

    def page(self, *, prefix: str = "", states: Sequence[str] = (), limit: int = 50, cursor: str | None = None) -> Keys:
        """Read records; for people, not for the hot path.

        Parameters:
          prefix(str): What the keys begin with.
          states(Sequence[str]): Only those in these states; none for all.
          limit(int): About how many at most; a page may be shorter, even empty, and not the last.
          cursor(str | None): Where to go on.

        Raises:
          ValueError: The cursor is none of this store's, or the limit is below 1.
        """
        ...

    def mark(self, name: str, *, retention: int) -> None:
        """Note a name for so many milliseconds."""
        ...

    def marked(self, name: str) -> bool:
        """Whether a name is noted."""
        ...

    def reserve(self, name: str, holder: str, *, ttl: int) -> str:
        """Take a name for so many milliseconds, if nobody has it.

        Returns:
          str: Who has it now.
        """
        ...

    def unreserve(self, name: str, holder: str) -> bool:
        """Give a name back.

        Returns:
          bool: Whether this holder had it.
        """
        ...

    def purge(self, *, limit: int = 1_000) -> int:
        """Remove what is over, so many at a time; where the server does that by itself, nothing.

        Returns:
          int: How many were removed; call again if it is the limit.
        """
        ...

    def posture(self) -> Posture:
        """Look how the server is set up."""
        ...

    def ping(self) -> None:
        """Make sure that the store answers and is set up.

        Raises:
          StoreUnavailable: It does not answer.
          SetupError: It answers, but is not set up.
        """
        ...

    def close(self) -> None:
        """Give back this process's connections."""
        ...


class Inbox(Protocol):
    """A transaction that claims a key, does the user's work and completes the key: all or nothing.

    Attributes:
      claim(Claim): What the claim was answered with; without ``fresh`` there is nothing to be done in it.
      connection(Any): The connection, in the transaction, for the user's rows.
    """

    claim: Claim
    connection: Any

    def commit(self, finish: Finish) -> None:
        """Complete the key and commit.  An inbox that is left without it is rolled back.

        Raises:
          StoreError: It was not committed; nothing of it was kept, unless it is `StoreUnavailable` and the answer to
            the commit was lost.
        """
        ...


@runtime_checkable
class TransactionalStore(IdempotencyStore, Protocol):
    """A store whose records lie in the database of the user's rows."""

    def atomic(self, key: str, fence: int, finish: Finish, *, step: str | None = None) -> AbstractContextManager[Any]:
        """Open a transaction for the user's rows that completes the key (or records a step) as it commits.

        Leaving it by an exception rolls everything back.

        Parameters:
          key(str): The key.
          fence(int): Its fence.
          finish(Finish): How the key is completed; with `step`, `finish.result` is the step's value.
          step(str | None): The step to record in place of completing the key.

        Yields:
          Any: The connection (of psycopg, SQLAlchemy or Django, as the store was made).

        Raises:
          FencedOut: On leaving: the key is not held with this fence any more; everything was rolled back.
        """
        ...

    def inbox(
        self, key: str, *, owner: str, retention: int, fingerprint: bytes | None = None, strict: bool = True
    ) -> AbstractContextManager[Inbox]:
        """Open a transaction and claim a key in it; nobody waits for another who does the same, it is ``busy``."""
        ...
