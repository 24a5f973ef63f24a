"""Any order of steps leaves every store where the plain model in memory is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from dramatiq_guard.dead_letters.letter import STATES, Letter
from dramatiq_guard.stores.connect import connect
from dramatiq_guard.stores.memory.dead_letters import MemoryDeadLetters
from dramatiq_guard.stores.postgres.schema import apply_schema
from dramatiq_guard.stores.protocols import DeadLetterStore, Filter

from .letters import T0, death_of_replay, letter

NAMES = ("a", "b", "c")
names = st.sampled_from(NAMES)
batches = st.lists(names, unique=True, min_size=1, max_size=3)


class Transitions(RuleBasedStateMachine):
    """Does the same to a store and to the model, and compares all that can be seen."""

    def __init__(self, store: DeadLetterStore, empty: Any) -> None:
        super().__init__()
        empty()
        self.store = store
        self.model: DeadLetterStore = MemoryDeadLetters()
        self.now = T0
        #: What each replay was given: the letter, the token in the store, the token in the model.
        self.sent: list[tuple[Letter, str, str]] = []

    def tick(self) -> int:
        self.now += 7
        return self.now

    def both(self, verb: str, *args: Any, **known: Any) -> None:
        assert getattr(self.model, verb)(*args, **known) == getattr(self.store, verb)(*args, **known)

    def with_tokens(self, at: int) -> tuple[Letter, str, str]:
        return self.sent[at % len(self.sent)]

    @rule(name=names, actor=st.sampled_from(["x", "y"]), same_moment=st.booleans())
    def put(self, name: str, actor: str, same_moment: bool) -> None:
        known = self.model.get(name)
        at = known.died_at if same_moment and known is not None else self.tick()
        self.both("put", letter(name, at - T0, actor=actor))

    @rule(ids=batches, lease=st.sampled_from([10, 1_000]))
    def begin(self, ids: list[str], lease: int) -> None:
        all_ids = [*ids, *(f"{name}~1" for name in ids)]
        now = self.tick()
        model = self.model.begin_replay(all_ids, owner="o", now=now, lease=lease, by="ada")
        store = self.store.begin_replay(all_ids, owner="o", now=now, lease=lease, by="ada")
        assert model.refused == store.refused
        assert [each.letter_id for each in model.letters] == [each.letter_id for each in store.letters]
        for ours, theirs in zip(model.letters, store.letters, strict=True):
            assert ours.standing.replay.n == theirs.standing.replay.n
            self.sent.append((theirs, theirs.standing.replay.token, ours.standing.replay.token))

    @precondition(lambda self: self.sent)
    @rule(at=st.integers(0, 99), verb=st.sampled_from(["finish_replay", "abandon_replay"]))
    def settle(self, at: int, verb: str) -> None:
        taken, token, model_token = self.with_tokens(at)
        now = self.tick()
        assert getattr(self.model, verb)([(taken.letter_id, model_token)], now=now) == getattr(self.store, verb)(
            [(taken.letter_id, token)], now=now
        )

    @precondition(lambda self: self.sent)
    @rule(at=st.integers(0, 99))
    def admit(self, at: int) -> None:
        taken, token, model_token = self.with_tokens(at)
        now = self.tick()
        assert self.model.admit_replay(taken.letter_id, model_token, now=now) == self.store.admit_replay(
            taken.letter_id, token, now=now
        )

    @precondition(lambda self: self.sent)
    @rule(at=st.integers(0, 99))
    def succeed(self, at: int) -> None:
        taken, token, model_token = self.with_tokens(at)
        now = self.tick()
        assert self.model.record_outcome(
            taken.letter_id, model_token, "succeeded", now=now
        ) == self.store.record_outcome(taken.letter_id, token, "succeeded", now=now)

    @precondition(lambda self: self.sent)
    @rule(at=st.integers(0, 99))
    def die_again(self, at: int) -> None:
        taken, _, _ = self.with_tokens(at)
        self.both("put", death_of_replay(taken, self.tick() - T0))

    @rule(ids=batches, verb=st.sampled_from(["discard", "restore"]))
    def lay_aside(self, ids: list[str], verb: str) -> None:
        self.both(verb, [*ids, *(f"{name}~1" for name in ids)], now=self.tick(), by="bob", why="why")

    @rule(ids=batches)
    def settled(self, ids: list[str]) -> None:
        self.both("settled", [*ids, *(f"{name}~1" for name in ids)], now=self.tick())

    @rule(name=names, replay=st.sampled_from(["", "~1"]))
    def withdraw(self, name: str, replay: str) -> None:
        self.both("withdraw", name + replay, now=self.tick())

    @rule(age=st.sampled_from([30, 10_000]), keep=st.sampled_from([1, 3, 100]))
    def purge(self, age: int, keep: int) -> None:
        now = self.tick()
        model = self.model.purge(now=now, max_age=age, max_count=keep)
        store = self.store.purge(now=now, max_age=age, max_count=keep)
        assert replace(model, letter_ids=()) == replace(store, letter_ids=())
        assert sorted(model.letter_ids) == sorted(store.letter_ids)

    @invariant()
    def same(self) -> None:
        for state in STATES:
            assert (self.model.depth(state), self.model.oldest(state)) == (
                self.store.depth(state),
                self.store.oldest(state),
            )
        for limit in (2, 100):
            assert self.model.unsettled(before=self.now, limit=limit) == self.store.unsettled(
                before=self.now, limit=limit
            )
        for where in (Filter(states=STATES), Filter(actor="x"), Filter(states=STATES, actor="y")):
            ours, theirs = self.model.page(where), self.store.page(where)
            assert [plain(each) for each in ours.letters] == [plain(each) for each in theirs.letters]
            assert self.model.groups(where) == self.store.groups(where)


def plain(each: Letter) -> Letter:
    """A letter without its token, which is random."""
    sent = each.standing.replay
    if sent is None:
        return each
    return replace(each, standing=replace(each.standing, replay=replace(sent, token="")))


@pytest.fixture(params=["redis", "postgres"])
def emptied_store(request: pytest.FixtureRequest) -> Iterator[tuple[DeadLetterStore, Any]]:
    """A real store, and what empties it."""
    if request.param == "redis":
        stores = connect(request.getfixturevalue("redis_url"))
        yield stores.dead_letters, request.getfixturevalue("redis_client").flushall
    else:
        url = request.getfixturevalue("postgres_url")
        apply_schema(url)
        stores = connect(url)
        tables = ("dead_letters", "cells", "letter_counts", "replay_numbers", "unsettled_letters")
        with psycopg.connect(url, autocommit=True) as connection:
            yield (
                stores.dead_letters,
                lambda: connection.execute("TRUNCATE " + ", ".join(f"dramatiq_guard.{table}" for table in tables)),
            )
    stores.close()


def test_every_store_moves_as_the_model_does(emptied_store: tuple[DeadLetterStore, Any]) -> None:
    """Whatever is done in whatever order, what can be seen of a store is what can be seen of the model."""
    run_state_machine_as_test(
        lambda: Transitions(*emptied_store),
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
