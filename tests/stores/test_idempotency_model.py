"""Whatever is asked of a store in whatever order, it answers as the plain model in memory does, and the laws hold.

The laws: of the fences of a key one is current at most (I1), and they only grow (I2); nobody but its holder changes a
held record (I3); what is done stays so (I4), and all who finish or ask have the one result (I5); steps only grow (I6).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from dramatiq_guard import clock
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.idempotency import DONE, HELD, PARKED, Claim, Ended, Finish, IdempotencyStore, Record
from dramatiq_guard.stores.memory.idempotency import MemoryIdempotency
from dramatiq_guard.stores.postgres.schema import apply_schema
from tests.support.waiting import wait_until

LONG, DAY = 600_000, 24 * 60 * 60 * 1_000
KEYS = ("a", "b")

keys = st.sampled_from(KEYS)
prints = st.sampled_from([None, None, b"\0one", b"two"])
results = st.sampled_from([None, b"", b"\xff\0r", b"s"])
nth = st.integers(0, 9)


class Keys(RuleBasedStateMachine):
    """Does the same to a store and to the model, and compares all that can be seen; fences by what they were given for.

    A lease is either so long that it is never over, or over before anything else is asked.
    """

    runs: ClassVar = itertools.count()

    def __init__(self, store: IdempotencyStore) -> None:
        super().__init__()
        self.store = store
        self.model = MemoryIdempotency()
        self.run = f"{next(self.runs)}/"
        #: The fences of each key, in the order they were given: the model's, and the store's.
        self.fences: dict[str, list[tuple[int, int]]] = {key: [(1, 1)] for key in KEYS}
        #: What each key looked like after the step before; absent ones are not in it.
        self.before: dict[str, Record] = {}
        #: Keys whose record the step was allowed to remove.
        self.may_go: set[str] = set()

    # -- asking both ---------------------------------------------------------------------------------------------------

    def fence(self, key: str, at: int) -> tuple[int, int]:
        """One of the latest fences of a key, most often the last; of the model, and of the store."""
        known = self.fences[key]
        return known[-1 if at < 6 else -min(at - 4, len(known))]

    def both(self, verb: str, key: str, *args: Any, fence: tuple[int, int] | None = None, **known: Any) -> Any:
        """Ask both, and get their one answer."""
        ours, theirs = ((fence[0],), (fence[1],)) if fence else ((), ())
        expected = getattr(self.model, verb)(self.run + key, *ours, *args, **known)
        answer = getattr(self.store, verb)(self.run + key, *theirs, *args, **known)
        if isinstance(expected, Claim):
            self.match(key, expected.fence, answer.fence)
            assert (expected.lease_left > 0) == (answer.lease_left > 0)
            known_time: dict[str, Any] = {"fence": 0, "lease_left": 0, "first_claim_at": 0, "now": 0}
            assert replace(expected, **known_time) == replace(answer, **known_time)
        else:
            assert expected == answer
        return answer

    def match(self, key: str, ours: int, theirs: int) -> None:
        """The same fence, or for both a new one that is greater than any before."""
        known = self.fences[key]
        if (ours, theirs) not in known:
            assert ours > known[-1][0]
            assert theirs > known[-1][1]  # I2
            known.append((ours, theirs))

    # -- what can be asked ---------------------------------------------------------------------------------------------

    @rule(
        key=keys,
        owner=st.sampled_from(["me", "you ☃"]),
        over=st.booleans(),
        fingerprint=prints,
        strict=st.booleans(),
        park=st.booleans(),
    )
    def claim(self, key: str, over: bool, **known: Any) -> None:
        lease = 1 if over else LONG
        answer = self.both("claim", key, lease=lease, retention=DAY, **known)
        if answer.answer in ("fresh", "takeover") and over:
            self.wait_for(key)
        if answer.answer == DONE:
            assert answer.result == self.before[key].result  # I5

    @rule(key=keys, verb=st.sampled_from(["finished", "left"]))
    def expire(self, key: str, verb: str) -> None:
        """A record that was last claimed for a moment is over, wherever it stood."""
        answer = self.both("claim", key, owner="me", lease=1, retention=1, strict=False)
        if answer.answer in ("fresh", "takeover"):
            if verb == "left":
                # It may be gone already in one of them, so they are not compared.
                self.model.release(self.run + key, self.fences[key][-1][0])
                self.store.release(self.run + key, self.fences[key][-1][1])
            for each in (self.model, self.store):
                wait_until(partial(self.is_gone, each, key), interval=0.001)
            self.may_go.add(key)

    @rule(key=keys, at=nth, result=results, flags=st.integers(0, 3))
    def complete(self, key: str, at: int, result: bytes | None, flags: int) -> None:
        fence = self.fence(key, at)
        ended: Ended = self.both("complete", key, Finish(result, flags), fence=fence, retention=DAY)
        if ended.state == DONE:
            standing = self.store.get(self.run + key)
            assert standing is not None
            if ended.ours:
                assert standing.fence == fence[1]
            else:
                assert (standing.result, standing.flags) == (ended.result, ended.flags)  # I5
        self.nobody_else(key, fence, may_make=True)

    @rule(key=keys, at=nth, name=st.sampled_from(["s", "☃", "1"]), value=st.sampled_from([b"", b"\xff\0", b"v"]))
    def step(self, key: str, at: int, name: str, value: bytes) -> None:
        fence = self.fence(key, at)
        self.both("step", key, name, value, fence=fence)
        self.nobody_else(key, fence)

    @rule(key=keys, at=nth, verb=st.sampled_from(["release", "release", "park"]))
    def leave(self, key: str, at: int, verb: str) -> None:
        fence = self.fence(key, at)
        self.both(verb, key, fence=fence)
        self.nobody_else(key, fence)

    @rule(over=st.booleans())
    def renew(self, over: bool) -> None:
        """All fences that ever were, at once."""
        lease = 1 if over else LONG
        asked = [(key, fence) for key in KEYS for fence in self.fences[key]]
        expected = self.model.renew([(self.run + key, fence[0]) for key, fence in asked], lease=lease)
        answers = self.store.renew([(self.run + key, fence[1]) for key, fence in asked], lease=lease)
        assert expected == answers
        for key in KEYS:
            assert sum(held for (each, _), held in zip(asked, answers, strict=True) if each == key) <= 1  # I1
            self.wait_for(key)

    @rule(key=keys, done=st.booleans(), result=results, flags=st.integers(0, 3))
    def resolve(self, key: str, done: bool, result: bytes | None, flags: int) -> None:
        self.both("resolve", key, done=done, finish=Finish(result, flags))

    @rule(key=keys)
    def forget(self, key: str) -> None:
        assert (key in self.before) == self.both("forget", key)
        self.may_go.add(key)

    @rule(
        states=st.lists(st.sampled_from(["held", "free", DONE, PARKED]), unique=True), prefix=st.sampled_from(["", "a"])
    )
    def page(self, states: list[str], prefix: str) -> None:
        found = [
            sorted((record.key, record.state) for record in self.pages(each, prefix=self.run + prefix, states=states))
            for each in (self.model, self.store)
        ]
        assert found[0] == found[1]

    @rule(key=keys)
    def mark(self, key: str) -> None:
        self.both("mark", key, retention=DAY)

    @rule(key=keys, holder=st.sampled_from(["me", "you"]), back=st.booleans())
    def reserve(self, key: str, holder: str, back: bool) -> None:
        if back:
            self.both("unreserve", key, holder)
        else:
            self.both("reserve", key, holder, ttl=DAY)

    # -- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def the_records_are_the_same_and_keep_the_laws(self) -> None:
        for key in KEYS:
            assert self.model.marked(self.run + key) == self.store.marked(self.run + key)
            ours, theirs = self.model.get(self.run + key), self.store.get(self.run + key)
            before = self.before.pop(key, None)
            if ours is None or theirs is None:
                assert ours is theirs
                assert before is None or key in self.may_go
                continue
            self.match(key, ours.fence, theirs.fence)
            assert _told(ours) == _told(theirs)
            if before is not None and key not in self.may_go:
                assert theirs.fence >= before.fence  # I2
                assert theirs.steps.keys() >= before.steps.keys()  # I6
                if before.state == DONE:
                    assert _told(before) == _told(theirs)  # I4
            self.before[key] = theirs
        self.may_go.clear()

    def nobody_else(self, key: str, fence: tuple[int, int], *, may_make: bool = False) -> None:
        """Whoever came with a fence that was not current changed nothing (I3)."""
        before = self.before.get(key)
        if before is not None and (before.state != HELD or before.fence != fence[1]):
            after = self.store.get(self.run + key)
            assert after is not None
            assert _told(before) == _told(after)
        elif before is None:
            assert may_make or self.store.get(self.run + key) is None

    def wait_for(self, key: str) -> None:
        """Let a lease that is to be over be over, for both."""
        for each in (self.model, self.store):
            record = each.get(self.run + key)
            if record is not None and record.state == HELD and record.lease_until < clock.now() + LONG // 2:
                wait_until(partial(_is_past, record.lease_until), interval=0.001)

    def is_gone(self, store: IdempotencyStore, key: str) -> bool:
        return store.get(self.run + key) is None

    def pages(self, store: IdempotencyStore, **known: Any) -> Iterator[Record]:
        cursor, first = None, True
        while first or cursor is not None:
            page = store.page(cursor=cursor, limit=1, **known)
            yield from page.records
            cursor, first = page.cursor, False


def _is_past(time: int) -> bool:
    return clock.now() > time


def _told(record: Record) -> Record:
    """What can be compared of a record: not the clock, nor the number of its fence."""
    return replace(
        record,
        owner="" if record.state == DONE else record.owner,
        fence=0,
        lease_until=int(record.lease_until > 0),
        first_claim_at=0,
        expires_at=0,
    )


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_every_store_answers_as_the_model_does(kind: str, request: pytest.FixtureRequest) -> None:
    """Whatever is asked in whatever order."""
    url = request.getfixturevalue(f"{kind}_url")
    if kind == "postgres":
        apply_schema(url)
    stores = connect(url)
    try:
        run_state_machine_as_test(
            lambda: Keys(stores.idempotency),  # type: ignore[arg-type, return-value, unused-ignore]
            settings=settings(
                max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
    finally:
        stores.close()
