"""Idempotency keys on PostgreSQL: one statement and one round trip a call, judged by the server's clock.

A duplicate only reads.  Whoever is about to write to a key takes an advisory lock on it first, if nobody else has it:
that is what keeps an inbox, whose row nobody sees until it is committed, from being waited for.  Two keys whose locks
are the same by chance are at worst busy for each other.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from ...errors import FencedOut, StoreError
from ..cells import clean
from ..idempotency import BUSY, FRESH, Claim, Ended, Finish, Keys, Posture, Record
from .connection import Queries
from .schema import check_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .connection import PostgresConnection
    from .transactions import Transaction

__all__ = ["PostgresIdempotency"]

_HELD: Final = (
    "key = %(key)s::text AND fence = %(fence)s::bigint AND state = 'held' AND greatest(expires_at, lease_until) > now"
)
_RECORD: Final = (
    "k.key, k.state, k.fence, k.owner, CASE k.state WHEN 'held' THEN k.lease_until ELSE 0 END, k.fingerprint, "
    "k.attempts, k.crashes, k.first_claim_at, greatest(k.expires_at, k.lease_until), k.steps::text, k.result, k.flags"
)

#: How often a statement is run again that found a row changed meanwhile.
_LOOKS: Final = 10

#: How many keys a page looks at for those in the states that it was asked for.
_LOOKED_AT: Final = 5_000

#: What is said of an inbox's time, which nobody knows: whoever puts off has a backoff of his own.
_SOME_TIME: Final = 60_000

_CHANGED: Final = ("40001", "40P01")
_LOCKED: Final = "55P03"
_NONE_ENDED: Final = "22012"
_NOT_THE_SAME: Final = "22P02"


class PostgresIdempotency:
    """A `TransactionalStore` on PostgreSQL.

    Parameters:
      connection(PostgresConnection): The way to the server, and the schema of the tables.
    """

    engine = "postgresql"

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        parts = {"held": _HELD, "record": _RECORD}
        pieces = Queries(connection.schema, file="idempotency.sql")
        self._queries = Queries(
            connection.schema, file="idempotency.sql", **parts, judged=pieces["judged"], clock=pieces["clock"]
        )

    def __repr__(self) -> str:
        return f"<PostgresIdempotency at {self._connection.name}, schema {self._connection.schema}>"

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
        asked = {
            "key": key,
            "lock": self._lock(key),
            "owner": clean(owner),
            "lease": lease,
            "retention": retention,
            "fingerprint": fingerprint,
            "strict": strict,
            "park": park,
            # A claim that a crash of the server takes back is only a lost lease; unless nobody may repeat the work.
            "durable": park,
        }
        for _ in range(_LOOKS):
            try:
                rows = self._connection.rows("claiming a key", self._queries["claim"], asked)
            except StoreError as error:
                if _code(error) == _LOCKED:
                    break
                if _code(error) not in _CHANGED:
                    raise
                rows = []
            if rows:
                return _claim(rows[0])
        return Claim(answer=BUSY, lease_left=lease)

    def renew(self, claims: Sequence[tuple[str, int]], *, lease: int) -> tuple[bool, ...]:
        if not claims:
            return ()
        asked = {"keys": [key for key, _ in claims], "fences": [fence for _, fence in claims], "lease": lease}
        renewed = set(self._connection.rows("renewing leases", self._queries["renew"], asked))
        return tuple(claim in renewed for claim in map(tuple, claims))

    def step(self, key: str, fence: int, name: str, value: bytes) -> bool:
        asked = {"key": key, "fence": fence, "step": _step(name, value)}
        return self._connection.change("recording a step", self._queries["step"], asked) > 0

    def complete(self, key: str, fence: int, finish: Finish, *, retention: int) -> Ended:
        asked = {"lock": self._lock(key), "retention": retention, **_finished(key, fence, finish)}
        state, ours, result, flags = self._settled("completing a key", "complete", asked)
        return Ended(state, ours, _bytes(result), flags)

    def release(self, key: str, fence: int) -> bool:
        asked = {"key": key, "fence": fence}
        return self._connection.change("giving a key back", self._queries["release"], asked) > 0

    def park(self, key: str, fence: int) -> bool:
        return self._connection.change("parking a key", self._queries["park"], {"key": key, "fence": fence}) > 0

    def resolve(self, key: str, *, done: bool, finish: Finish | None = None) -> str:
        finish = (finish if done else None) or Finish()
        asked = {"done": done, **_finished(key, 0, finish)}
        return str(self._settled("resolving a key", "resolve", asked)[0])

    def forget(self, key: str) -> bool:
        return bool(self._connection.rows("forgetting a key", self._queries["forget"], {"key": key}))

    def get(self, key: str) -> Record | None:
        rows = self._connection.rows("reading a key", self._queries["get"], {"key": key})
        return _record(rows[0]) if rows else None

    def page(self, *, prefix: str = "", states: Sequence[str] = (), limit: int = 50, cursor: str | None = None) -> Keys:
        if limit < 1:
            raise ValueError(f"a page holds at least one key, not {limit}")
        if cursor is not None and not cursor.startswith("key:"):
            raise ValueError(f"not a cursor of a page of keys: {cursor!r}; give back what the former page returned")
        prefix = clean(prefix)
        look_at = max(limit, _LOOKED_AT)
        asked = {
            "after": clean(cursor or "").removeprefix("key:"),
            "from": prefix,
            "to": prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else None,
            "states": list(states),
            "limit": limit,
            "look_at": look_at,
        }
        rows = self._connection.rows("reading keys", self._queries["page"], asked)
        records = tuple(_record(rest) for _, _, *rest in rows if rest[0] is not None)
        last, looked_at = rows[0][:2]
        if len(records) == limit:
            return Keys(records, f"key:{records[-1].key}")
        return Keys(records, f"key:{last}" if looked_at == look_at else None)

    def mark(self, name: str, *, retention: int) -> None:
        asked = {"name": clean(name), "retention": retention}
        self._connection.change("noting a name", self._queries["mark"], asked)

    def marked(self, name: str) -> bool:
        return bool(self._connection.rows("looking for a name", self._queries["marked"], {"name": clean(name)}))

    def reserve(self, name: str, holder: str, *, ttl: int) -> str:
        asked = {"name": clean(name), "holder": clean(holder), "ttl": ttl}
        return str(self._settled("reserving a name", "reserve", asked)[0])

    def unreserve(self, name: str, holder: str) -> bool:
        asked = {"name": clean(name), "holder": clean(holder)}
        return self._connection.change("giving a name back", self._queries["unreserve"], asked) > 0

    def purge(self, *, limit: int = 1_000) -> int:
        ((removed,),) = self._connection.rows("purging keys", self._queries["purge"], {"limit": limit})
        return int(removed)

    def posture(self) -> Posture:
        ((server, now, durable),) = self._connection.rows("looking at the server", self._queries["posture"], {})
        return Posture(engine="postgresql", server=server, now=now, durable=durable)

    def ping(self) -> None:
        check_version(self._connection)

    def close(self) -> None:
        self._connection.close()

    # -- transactions ------------------------------------------------------------------------------------------------

    @contextmanager
    def atomic(self, key: str, fence: int, finish: Finish, *, step: str | None = None) -> Iterator[Any]:
        """See `TransactionalStore.atomic`.

        The user's own statements have no time limit of ours; those that the transaction begins and ends with have.  At
        the isolation level ``REPEATABLE READ`` or above every renewal of the lease in the meantime makes it fail.

        Raises:
          StoreUnavailable: Nobody knows whether it was committed, or there is no connection for it.
          StoreError: The transaction was ended inside.
        """
        marking = (self._queries["mark_transaction"], {"fence": fence})
        with self._connection.transaction(f"opening a transaction for {key}", marking) as transaction:
            yield transaction.connection
            if step is None:
                ending = self._queries["commit_key"], _finished(key, fence, finish)
            else:
                value = _step(step, finish.result or b"")
                ending = self._queries["commit_step"], {"key": key, "fence": fence, "step": value}
            _commit(transaction, key, *ending)

    @contextmanager
    def inbox(
        self, key: str, *, owner: str, retention: int, fingerprint: bytes | None = None, strict: bool = True
    ) -> Iterator[PostgresInbox]:
        """See `TransactionalStore.inbox`.

        Its claim is ``fresh`` also where a lease ran out.  Nothing is written before `PostgresInbox.commit`, so it has
        no steps; until then the key is ``busy`` for all others, and free at once if this process dies.
        """
        asked = {"key": key, "owner": None, "fingerprint": fingerprint, "strict": strict, "park": False}
        locking = self._queries["lock"], {"lock": self._lock(key)}
        with self._connection.transaction(f"claiming {key}", locking, (self._queries["look"], asked)) as transaction:
            yield PostgresInbox(
                transaction,
                self._queries["commit_inbox"],
                {"key": key, "fingerprint": fingerprint, "retention": retention},
            )

    def _lock(self, key: str) -> int:
        name = f"{self._connection.schema}\0{key}".encode()
        return int.from_bytes(sha256(name).digest()[:8], "big", signed=True)

    def _settled(self, what: str, query: str, asked: Mapping[str, Any]) -> tuple[Any, ...]:
        """Run a statement until it returns its row."""
        for _ in range(_LOOKS):
            rows = self._connection.rows(what, self._queries[query], asked)
            if rows:
                return rows[0]
        raise StoreError(f"{self._connection.name}: the row changed {_LOOKS} times while {what}")


class PostgresInbox:
    """An `Inbox`.

    Parameters:
      transaction(Transaction): The transaction, in which the key was locked and looked at.
      ending(str): The statement that completes the key.
      known(Mapping[str, Any]): What it needs to know.
    """

    def __init__(self, transaction: Transaction, ending: str, known: Mapping[str, Any]) -> None:
        (((locked,),), (row,)) = transaction.answers
        *answer, fence, state, lease_until = row
        claim = _claim(answer)
        self.claim = claim
        if claim.answer == FRESH and not locked:
            self.claim = Claim(answer=BUSY, lease_left=_SOME_TIME, now=claim.now, same=claim.same)
        self.connection = transaction.connection
        self._transaction = transaction
        self._ending = ending
        self._known = {**known, "seen_fence": fence, "seen_state": state, "seen_lease_until": lease_until}

    def commit(self, finish: Finish) -> None:
        if self.claim.answer != FRESH:
            raise StoreError(f"the key {self._known['key']} is {self.claim.answer}: there is nothing to commit")
        known = {
            **self._known,
            **_finished(self._known["key"], self.claim.fence, finish),
            "attempts": self.claim.attempts,
            "crashes": self.claim.crashes,
            "first_claim_at": self.claim.first_claim_at,
        }
        _commit(self._transaction, self._known["key"], self._ending, known)


def _commit(transaction: Transaction, key: str, ending: str, parameters: Mapping[str, Any]) -> None:
    try:
        transaction.commit(ending, parameters)
    except StoreError as error:
        if _code(error) == _NONE_ENDED:
            raise FencedOut(
                f"the key {key} is not held with fence {parameters['fence']} any more: what was to be committed with "
                "it was rolled back"
            ) from error
        if _code(error) == _NOT_THE_SAME:
            raise StoreError(
                f"the transaction for the key {key} was ended inside, by a COMMIT or a ROLLBACK: what was written does "
                "not go together with the key, which was not completed; leave the transaction to its context manager"
            ) from error
        raise


def _code(error: BaseException) -> str | None:
    """The SQLSTATE that an error of ours was made of."""
    return getattr(error.__cause__, "sqlstate", None)


def _claim(row: Sequence[Any]) -> Claim:
    answer, fence, lease_left, attempts, crashes, first_claim_at, now, steps, result, flags, same = row
    return Claim(
        answer=answer,
        fence=fence or 0,
        lease_left=lease_left,
        attempts=attempts,
        crashes=crashes,
        first_claim_at=first_claim_at,
        now=now,
        steps=_steps(steps),
        result=_bytes(result),
        flags=flags,
        same=same,
    )


def _record(row: Sequence[Any]) -> Record:
    key, state, fence, owner, lease_until, fingerprint, attempts, crashes, first_claim_at, expires_at, *rest = row
    steps, result, flags = rest
    return Record(
        key=key,
        state=state,
        fence=fence,
        owner=owner,
        lease_until=lease_until,
        fingerprint=_bytes(fingerprint),
        attempts=attempts,
        crashes=crashes,
        first_claim_at=first_claim_at,
        expires_at=expires_at,
        steps=_steps(steps),
        result=_bytes(result),
        flags=flags,
    )


def _finished(key: str, fence: int, finish: Finish) -> dict[str, Any]:
    return {"key": key, "fence": fence, "result": finish.result, "flags": finish.flags}


def _step(name: str, value: bytes) -> str:
    return json.dumps({clean(name): b64encode(value).decode()})


def _steps(text: str | None) -> dict[str, bytes]:
    return {name: b64decode(value) for name, value in json.loads(text or "{}").items()}


def _bytes(value: Any) -> bytes | None:
    """What a driver gives for bytea, which may be a memoryview."""
    return None if value is None else bytes(value)
