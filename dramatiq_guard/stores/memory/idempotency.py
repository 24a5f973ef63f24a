"""Idempotency keys in a dictionary: the plainest statement of what the other stores do on their servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from ... import clock
from ..cells import clean
from ..idempotency import (
    ABSENT,
    BUSY,
    DONE,
    FREE,
    FRESH,
    HELD,
    MISMATCH,
    PARKED,
    TAKEOVER,
    Claim,
    Ended,
    Finish,
    Keys,
    Posture,
    Record,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MemoryIdempotency"]


@dataclass(slots=True)
class _Record:
    fence: int
    first_claim_at: int
    expires_at: int
    state: str = HELD
    owner: str = ""
    lease_until: int = 0
    fingerprint: bytes | None = None
    attempts: int = 1
    crashes: int = 0
    steps: dict[str, bytes] = field(default_factory=dict)
    result: bytes | None = None
    flags: int = 0

    def leave(self, state: str) -> None:
        """Nobody holds it any more."""
        self.state, self.lease_until = state, 0

    def finish(self, finish: Finish) -> None:
        """It is done; who did it is nobody's business any more, and would have to be kept by the million."""
        self.leave(DONE)
        self.owner, self.result, self.flags = "", finish.result, finish.flags


class MemoryIdempotency:
    """An `IdempotencyStore` that is gone with its process."""

    engine = "memory"

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        #: Until when a name is noted.
        self._marks: dict[str, int] = {}
        #: Who has a name, and until when.
        self._reserved: dict[str, tuple[str, int]] = {}
        self._fence = 0
        self._id = clock.unique()
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<MemoryIdempotency with {len(self._records)} records>"

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
        with self._lock:
            now = clock.now()
            record = self._known(key, now)
            if record is None:
                record = self._records[key] = _Record(0, now, 0, state=FREE, fingerprint=fingerprint, attempts=0)
                answer, same = FRESH, True
            else:
                same = record.fingerprint is None or fingerprint in (None, record.fingerprint)
                answer = _answer(record, now) if same or not strict else MISMATCH
            again = record.state == HELD and record.owner == clean(owner) and answer in (BUSY, TAKEOVER)
            if again:
                answer = FRESH
            if answer == TAKEOVER:
                record.crashes += 1
            if answer == TAKEOVER and park:
                answer = PARKED
                record.leave(PARKED)
                record.expires_at = now + lease + retention
            if answer in (FRESH, TAKEOVER):
                if not again:
                    record.state, record.owner = HELD, clean(owner)
                    record.fence = self._next_fence()
                    record.attempts += 1
                record.lease_until = now + lease
                record.expires_at = now + lease + retention
                record.fingerprint = fingerprint if fingerprint is not None else record.fingerprint
            return Claim(
                answer=answer,
                fence=record.fence,
                lease_left=record.lease_until - now if answer == BUSY else 0,
                attempts=record.attempts,
                crashes=record.crashes,
                first_claim_at=record.first_claim_at,
                now=now,
                steps=dict(record.steps) if answer in (FRESH, TAKEOVER) else {},
                result=record.result if answer == DONE else None,
                flags=record.flags if answer == DONE else 0,
                same=same,
            )

    def renew(self, claims: Sequence[tuple[str, int]], *, lease: int) -> tuple[bool, ...]:
        with self._lock:
            now = clock.now()
            held = [self._held(key, fence, now) for key, fence in claims]
            for record in held:
                if record is not None:
                    record.lease_until = now + lease
                    record.expires_at = max(record.expires_at, record.lease_until)
            return tuple(record is not None for record in held)

    def step(self, key: str, fence: int, name: str, value: bytes) -> bool:
        with self._lock:
            record = self._held(key, fence, clock.now())
            if record is not None:
                record.steps[clean(name)] = value
            return record is not None

    def complete(self, key: str, fence: int, finish: Finish, *, retention: int) -> Ended:
        with self._lock:
            now = clock.now()
            record = self._known(key, now)
            if record is None:
                self._fence = max(self._fence, fence)
                record = self._records[key] = _Record(fence, now, now + retention)
            if record.state == HELD and record.fence == fence:
                record.finish(finish)
            if record.state != DONE:
                return Ended(record.state, ours=False)
            if record.fence == fence:
                return Ended(DONE, ours=True)
            return Ended(DONE, ours=False, result=record.result, flags=record.flags)

    def release(self, key: str, fence: int) -> bool:
        return self._leave(key, fence, FREE)

    def park(self, key: str, fence: int) -> bool:
        return self._leave(key, fence, PARKED)

    def resolve(self, key: str, *, done: bool, finish: Finish | None = None) -> str:
        with self._lock:
            now = clock.now()
            record = self._known(key, now)
            if record is None:
                return ABSENT
            state = record.state
            if state == HELD and record.lease_until > now:
                return BUSY
            if state in (HELD, PARKED):
                record.crashes += state == HELD
                # Whoever still runs is fenced out: the decision stands.
                record.fence = self._next_fence()
                if done:
                    record.finish(finish or Finish())
                else:
                    record.leave(FREE)
            return state

    def forget(self, key: str) -> bool:
        with self._lock:
            known = self._known(key, clock.now()) is not None
            self._records.pop(key, None)
            return known

    def get(self, key: str) -> Record | None:
        with self._lock:
            record = self._known(key, clock.now())
            return None if record is None else _public(key, record)

    def page(self, *, prefix: str = "", states: Sequence[str] = (), limit: int = 50, cursor: str | None = None) -> Keys:
        if limit < 1:
            raise ValueError(f"a page holds at least one key, not {limit}")
        with self._lock:
            now = clock.now()
            found = sorted(
                key
                for key, record in self._records.items()
                if key.startswith(prefix)
                and record.expires_at > now
                and (not states or record.state in states)
                and (cursor is None or key > cursor)
            )
            records = tuple(_public(key, self._records[key]) for key in found[:limit])
            return Keys(records, found[limit - 1] if len(found) > limit else None)

    def mark(self, name: str, *, retention: int) -> None:
        with self._lock:
            self._marks[name] = clock.now() + retention

    def marked(self, name: str) -> bool:
        with self._lock:
            return self._marks.get(name, 0) > clock.now()

    def reserve(self, name: str, holder: str, *, ttl: int) -> str:
        with self._lock:
            now = clock.now()
            holder_now, until = self._reserved.get(name, ("", 0))
            if until > now:
                return holder_now
            self._reserved[name] = clean(holder), now + ttl
            return clean(holder)

    def unreserve(self, name: str, holder: str) -> bool:
        with self._lock:
            has = self._reserved.get(name, ("", 0))
            if has[0] != clean(holder) or has[1] <= clock.now():
                return False
            del self._reserved[name]
            return True

    def purge(self, *, limit: int = 1_000) -> int:
        with self._lock:
            now = clock.now()
            over: list[tuple[dict[str, Any], str]] = []
            over += ((self._records, key) for key, record in self._records.items() if record.expires_at <= now)
            over += ((self._marks, name) for name, until in self._marks.items() if until <= now)
            over += ((self._reserved, name) for name, (_, until) in self._reserved.items() if until <= now)
            del over[limit:]
            for kept, name in over:
                del kept[name]
            return len(over)

    def posture(self) -> Posture:
        return Posture(engine=self.engine, server=self._id, now=clock.now(), durable=False)

    def ping(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _known(self, key: str, now: int) -> _Record | None:
        record = self._records.get(key)
        return record if record is not None and record.expires_at > now else None

    def _held(self, key: str, fence: int, now: int) -> _Record | None:
        record = self._known(key, now)
        return record if record is not None and record.state == HELD and record.fence == fence else None

    def _leave(self, key: str, fence: int, state: str) -> bool:
        with self._lock:
            record = self._held(key, fence, clock.now())
            if record is not None:
                record.leave(state)
            return record is not None

    def _next_fence(self) -> int:
        """One counter for all keys: so it grows over the absence of any."""
        self._fence = max(self._fence + 1, clock.now() * 1_000)
        return self._fence


def _answer(record: _Record, now: int) -> str:
    if record.state in (DONE, PARKED):
        return record.state
    if record.state == FREE:
        return FRESH
    return BUSY if record.lease_until > now else TAKEOVER


def _public(key: str, record: _Record) -> Record:
    return Record(
        key=key,
        state=record.state,
        fence=record.fence,
        owner=record.owner,
        lease_until=record.lease_until,
        fingerprint=record.fingerprint,
        attempts=record.attempts,
        crashes=record.crashes,
        first_claim_at=record.first_claim_at,
        expires_at=record.expires_at,
        steps=dict(record.steps),
        result=record.result,
        flags=record.flags,
    )
